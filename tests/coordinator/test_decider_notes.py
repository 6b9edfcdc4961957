"""What bodies tell besides their end: partial results of turns, effects, and the stop after a failure."""

from __future__ import annotations

import pytest

from remit.coordinator.noting import note_effect
from remit.core.cause import CauseKind
from remit.core.errors import NotFound, Refused, TurnCancelled
from remit.core.events import EffectUncertain, TurnEnded
from remit.core.messages import NoteEffect
from remit.core.outcome import Outcome
from tests.coordinator.claims_world import ClaimWorld
from tests.coordinator.conversation_world import ConversationWorld


def uncertain(w: ConversationWorld, node_id: str) -> list[EffectUncertain]:
    return [event for event in w.events if isinstance(event, EffectUncertain) and event.node_id == node_id]


def ended(w: ConversationWorld, node_id: str) -> tuple[TurnEnded, bytes | None]:
    for event, payload in w.last.events:
        if isinstance(event, TurnEnded) and event.node_id == node_id:
            return event, payload
    raise AssertionError("not in the last decision")


# -- partial results -------------------------------------------------------------------


@pytest.mark.requirement("A22")
@pytest.mark.requirement("D9")
def test_what_a_cancelled_turn_had_is_kept_with_its_end() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    w.partial(turn, "one")
    w.partial(turn, "two")
    w.cancel(turn)
    w.partial(turn, "three, while it stops")
    w.finish(turn, "cancelled")
    event, payload = ended(w, turn)
    assert (event.outcome, event.salvage, payload) == (Outcome.CANCELLED, True, b"three, while it stops")
    assert w.node(turn).preview == "three, while it stops"
    refused = w.state.refused
    w.partial(turn, "four")
    w.partial("turn_none", "five")
    assert w.state.refused == refused + 2


def test_a_turn_that_succeeded_needs_no_partial_result() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    w.partial(turn, "one")
    w.finish(turn)
    event, payload = ended(w, turn)
    assert (event.salvage, payload) == (False, None)


# -- effects ---------------------------------------------------------------------------


@pytest.mark.requirement("B23")
@pytest.mark.requirement("B31")
@pytest.mark.field_report("M7")
def test_an_effect_whose_end_is_not_known_is_uncertain_for_good() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn)
    w.effect(run, "POST /a")
    w.effect(run, "POST /a", ended=True)
    w.effect(run, "POST /b")
    w.effect(run, "POST /b")
    answer = w.cancel(run)
    w.unwind(run)
    (event,) = uncertain(w, run)
    assert (event.reason, event.in_flight) == ("not confirmed", ("POST /b",))
    assert w.kinds(run).index("effect_uncertain") < w.kinds(run).index("run_ended")
    assert w.folded.nodes[run].uncertain == 1
    assert answer.accepted
    assert w.kinds(run).count("effect_started") == 2


@pytest.mark.requirement("B24")
@pytest.mark.parametrize("story", ["nothing begun", "confirmed", "queued"])
def test_without_anything_in_flight_nothing_is_uncertain(story: str) -> None:
    w = ConversationWorld(max_shared=1)
    turn = w.open_turn()
    if story == "queued":
        w.run(turn)
    run = w.run(turn)
    if story == "confirmed":
        w.effect(run)
        w.effect(run, ended=True)
    w.cancel(run)
    if story != "queued":
        w.unwind(run)
    assert w.outcome(run) is Outcome.CANCELLED
    assert not uncertain(w, run)


def test_an_effect_may_end_while_its_run_is_being_stopped_and_must_not_begin() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn())
    w.effect(run, "POST /a")
    w.cancel(run)
    assert isinstance(w.effect(run, "POST /b").error, TurnCancelled)
    assert w.effect(run, "POST /a", ended=True).error is None
    w.unwind(run)
    assert not uncertain(w, run)
    assert w.effect(run, "POST /a", ended=True).error is None
    unknown = w._take(w.decider.decide(lambda tx: note_effect(tx, NoteEffect("run_none", 1, "e")), w.now))
    assert isinstance(unknown.error, NotFound)


def test_an_open_effect_of_a_body_that_returned_is_uncertain_too() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn())
    w.effect(run, "POST /a")
    w.end(run)
    assert w.outcome(run) is Outcome.SUCCEEDED
    assert [event.in_flight for event in uncertain(w, run)] == [("POST /a",)]


def test_each_attempt_has_its_own_effects() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn(), retries=1)
    w.effect(run, "POST /a")
    w.end(run, "raised")
    w.advance(1.0)
    assert w.node(run).attempt == 2
    assert w.node(run).effects is None
    assert [event.in_flight for event in uncertain(w, run)] == [("POST /a",)]
    stale = w._take(w.decider.decide(lambda tx: note_effect(tx, NoteEffect(run, 1, "e", "late")), w.now))
    assert isinstance(stale.error, Refused)


@pytest.mark.requirement("B23")
@pytest.mark.parametrize("story", ["gives no sign", "vanishes", "unwinds"])
def test_an_effect_of_a_turn_is_uncertain_when_its_holder_does_not_confirm_it(story: str) -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    w.effect(turn, "POST /a")
    if story == "vanishes":
        w.client_gone()
    else:
        w.cancel(turn, grace_s=1.0)
        w.advance(2.0) if story == "gives no sign" else w.finish(turn, "cancelled")
    (event,) = uncertain(w, turn)
    expected = ("POST /a", "body of the turn") if story == "gives no sign" else ("POST /a",)
    assert event.in_flight == expected
    assert w.node(turn).unconfirmed is (story == "gives no sign")
    assert w.history()[0].unconfirmed is (story == "gives no sign")


def test_a_lost_body_leaves_what_it_might_have_written_uncertain() -> None:
    w = ClaimWorld()
    run = w.run(w.open_turn())
    w.claim(run, "w:src/a", "r:docs")
    host = w.node(run).host_id
    w.host_gone(host)
    (event,) = [event for event in w.events if isinstance(event, EffectUncertain)]
    assert event.in_flight == (f"body on {host}", "claim write src/a and read docs")


# -- one failure stops the others ------------------------------------------------------


@pytest.mark.field_report("B7")
@pytest.mark.parametrize("how", ["raised", "lost", "cancelled", "timed out"])
def test_the_first_run_that_does_not_succeed_stops_the_others_before_anything_starts(how: str) -> None:
    w = ConversationWorld(max_shared=1)
    turn = w.open_turn(on_failure="stop")
    bad = w.run(turn, name="bad", deadline_s=5.0 if how == "timed out" else None)
    waiting = w.delegate(turn, 3)
    detached = w.run(turn, detached=True)
    if how == "raised":
        w.end(bad, "raised")
    elif how == "lost":
        w.host_gone(w.node(bad).host_id)
    else:
        w.advance(6.0) if how == "timed out" else w.cancel(bad)
        w.unwind(bad)
    for run in waiting:
        cause = w.cause(run)
        assert (cause.kind, cause.origin, cause.reason) == (CauseKind.PARENT_FAILED, turn, "bad did not succeed")
        assert w.outcome(run) is Outcome.CANCELLED
        assert w.node(run).started_at is None
    assert w.node(detached).cause is None
    assert w.node(turn).cause is None
    w.finish(turn, "follow")
    assert w.outcome(turn) is Outcome.FAILED


def test_a_retry_is_no_failure_and_other_turns_go_on() -> None:
    w = ConversationWorld()
    turn = w.open_turn(on_failure="stop")
    retried, beside = w.run(turn, retries=1), w.run(turn)
    grandchild = w.run(beside)
    w.end(retried, "raised")
    w.end(grandchild, "raised")
    assert w.node(beside).cause is None, "only runs of the turn itself count"
    other = w.open_turn("s2")
    kept = w.run(other)
    w.end(w.run(other), "raised")
    assert w.node(kept).cause is None, "by default one failure stops nobody"
    w.advance(1.0)
    w.end(retried)
    w.end(beside)
    w.finish(turn, "follow")
    assert w.outcome(turn) is Outcome.SUCCEEDED
    assert not w.state.fail_fast


def test_a_chain_of_dependents_ends_with_the_failure() -> None:
    w = ConversationWorld()
    turn = w.open_turn(on_failure="stop")
    first = w.run(turn)
    second = w.run(turn, after=(first,))
    third = w.run(turn, after=(second,))
    running = w.run(turn)
    w.end(first, "raised")
    assert [w.outcome(run) for run in (second, third)] == [Outcome.CANCELLED] * 2
    assert w.node(second).blocked_by == first
    assert w.cause(running).kind is CauseKind.PARENT_FAILED


def test_another_word_for_a_failure_is_refused() -> None:
    w = ConversationWorld()
    w.open_turn(on_failure="explode")
    assert "on_failure must be one of continue, stop" in str(w.last.error)


def test_a_run_that_no_host_could_be_started_for_stops_its_siblings_in_the_same_step() -> None:
    w = ConversationWorld(auto_hosts=False)
    turn = w.open_turn(on_failure="stop")
    w.settle_hosts()
    sibling = w.run(turn)
    w.to_spawn.clear()
    assert w.node(sibling).started_at is not None
    hopeless = w.run(turn, pool="actor")
    while w.outcome(hopeless) is None:
        w.host_gone(w.to_spawn.pop(0), "it did not start")
    assert w.outcome(hopeless) is Outcome.FAILED
    assert w.cause(sibling).kind is CauseKind.PARENT_FAILED
