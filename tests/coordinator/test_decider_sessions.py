"""Sessions in the decider: turns in their order, cancels that come late, and what later turns are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remit.core.cause import CauseKind
from remit.core.errors import SessionBusy
from remit.core.events import TurnStarted
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from tests.coordinator.conversation_world import ConversationWorld


def started(w: ConversationWorld) -> list[str]:
    return [event.node_id for event in w.events if isinstance(event, TurnStarted)]


def test_queued_turns_start_in_their_order_one_at_a_time() -> None:
    w = ConversationWorld()
    turns = [w.open_turn(busy="queue") for _ in range(4)]
    assert started(w) == turns[:1]
    for turn in turns:
        assert started(w)[-1] == turn
        run = w.run(turn)
        w.finish(turn)
        assert started(w)[-1] == turn, "it is over when what it delegated is"
        w.end(run)
    assert started(w) == turns


@pytest.mark.requirement("D13")
@pytest.mark.parametrize("first", ["cancel", "end of the active one"])
def test_a_queued_turn_that_is_cancelled_never_starts(first: str) -> None:
    w = ConversationWorld()
    active, queued, behind = (w.open_turn(busy="queue") for _ in range(3))
    steps: list[Callable[[], object]] = [lambda: w.cancel(queued), lambda: w.finish(active)]
    for step in steps if first == "cancel" else reversed(steps):
        step()
    if first == "cancel":
        assert started(w) == [active, behind]
        assert w.outcome(queued) is Outcome.CANCELLED
    else:
        assert started(w) == [active, queued]
        w.finish(queued, "cancelled")
        assert started(w)[-1] == behind


def test_a_cancel_of_a_session_starts_nothing_of_its_queue() -> None:
    w = ConversationWorld()
    active, *queued = (w.open_turn(busy="queue") for _ in range(3))
    answer = w.cancel("s1")
    assert answer.accepted
    w.finish(active, "cancelled")
    assert started(w) == [active]
    assert {w.outcome(turn) for turn in queued} == {Outcome.CANCELLED}


@pytest.mark.requirement("C1")
def test_an_interrupt_waits_for_the_quiet_of_what_it_has_stopped() -> None:
    w = ConversationWorld()
    first = w.open_turn()
    queued = w.open_turn(busy="queue")
    run = w.run(first)
    second = w.open_turn(busy="interrupt")
    assert w.cause(first).kind is w.cause(run).kind is CauseKind.USER_INTERRUPT
    assert second in w.cause(first).reason
    assert w.outcome(queued) is Outcome.CANCELLED
    w.finish(first, "cancelled")
    assert started(w) == [first], "a run of the first is still at work"
    w.unwind(run)
    assert started(w) == [first, second]
    assert w.outcome(first) is Outcome.CANCELLED


@pytest.mark.parametrize("first", ["interrupt", "end"])
def test_an_interrupt_and_the_end_race_and_the_order_decides(first: str) -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    steps: list[Callable[[], object]] = [
        lambda: w.open_turn(turn_id="turn_new", busy="interrupt"),
        lambda: w.finish(turn),
    ]
    for step in steps if first == "interrupt" else reversed(steps):
        step()
    # A body that returned after its cancel was accepted is no success any more.
    assert w.outcome(turn) is (Outcome.CANCELLED if first == "interrupt" else Outcome.SUCCEEDED)
    assert started(w) == [turn, "turn_new"]
    assert w.node("turn_new").cause is None


@pytest.mark.requirement("B25")
def test_nobody_interrupts_what_another_user_runs() -> None:
    w = ConversationWorld()
    first = w.open_turn(user="ada")
    w.open_turn(user="eve", busy="interrupt")
    assert isinstance(w.last.error, SessionBusy)
    assert "ada" in str(w.last.error)
    assert w.node(first).cause is None
    w.open_turn(user="ada", busy="interrupt")
    assert w.last.error is None


@pytest.mark.field_report("B12")
@pytest.mark.requirement("D14")
@pytest.mark.parametrize("what", ["the turn", "the session"])
def test_a_late_cancel_of_an_earlier_turn_does_not_hit_the_next(what: str) -> None:
    w = ConversationWorld()
    first = w.open_turn()
    target = first if what == "the turn" else "s1"
    w.cancel(target, request_id="req_1")
    w.finish(first, "cancelled")
    second = w.open_turn()
    run = w.run(second)
    w.cancel(target, request_id="req_1")
    if what == "the turn":
        again = w.cancel(target, request_id="req_2")
        assert (again.accepted, again.already) == (False, Outcome.CANCELLED)
    assert w.node(second).cause is None
    w.end(run)
    w.finish(second)
    assert w.outcome(second) is Outcome.SUCCEEDED


@pytest.mark.requirement("D14")
def test_a_cancel_that_found_nothing_finds_nothing_when_it_is_sent_again() -> None:
    w = ConversationWorld()
    before = len(w.events)
    assert not w.cancel("s1", request_id="req_1").accepted
    assert len(w.events) == before, "it records nothing"
    turn = w.open_turn()
    assert not w.cancel("s1", request_id="req_1").accepted
    assert w.node(turn).cause is None
    assert w.cancel("s1", request_id="req_2").accepted


def test_only_so_many_idle_cancels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.coordinator.stopping._IDLE_CANCELS", 2)
    w = ConversationWorld()
    for number in range(4):
        w.cancel("s1", request_id=f"req_{number}")
    w.cancel("s1", request_id="req_rehearsal", dry_run=True)
    assert list(w.state.idle_cancels) == ["req_2", "req_3"]


# -- history ---------------------------------------------------------------------------


@pytest.mark.requirement("B30")
def test_a_later_turn_is_told_that_the_one_before_was_cancelled_and_at_which_step() -> None:
    w = ConversationWorld()
    first = w.open_turn(name="fix lint")
    for name in ("look", "plan"):
        w.end(w.run(first, name=name))
    w.run(first, name="edit")
    w.run(first, name="test", after=(w.live()[-1],))
    w.partial(first, '"three files are left"')
    w.cancel(first, reason="changed my mind")
    assert w.history()[0].describe() == "at work"
    for run in w.live()[1:]:
        w.unwind(run)
    w.finish(first, "cancelled")
    second = w.open_turn(name="go on")
    told, now = w.history()
    assert (told.outcome, told.cause) == (Outcome.CANCELLED, w.cause(first))
    assert (told.steps, told.steps_done, told.at_work) == (4, 2, ("edit",))
    assert told.progress == '"three files are left"'
    assert told.describe() == f"cancelled at step 3 of 4 (edit), {w.cause(first).describe()}"
    assert [(run.name, run.outcome) for run in told.unfinished] == [
        ("test", Outcome.CANCELLED),
        ("edit", Outcome.CANCELLED),
    ]
    assert (now.id, now.outcome) == (second, None)
    w.restart()
    assert w.history()[0] == told


@pytest.mark.parametrize(
    ("story", "words"),
    [
        ("queued", "cancelled before it had started"),
        ("idle", "cancelled before its first step"),
        ("done", "cancelled after step 1 of 1"),
        ("deadline", "timed out at step 1 of 1 (a)"),
        ("returned", "succeeded"),
        ("raised", "failed"),
    ],
)
def test_how_a_turn_ended_in_words(story: str, words: str) -> None:
    w = ConversationWorld()
    w.open_turn()
    turn = w.open_turn(busy="queue", deadline_s=10.0 if story == "deadline" else None)
    if story != "queued":
        w.finish("turn_1")
    if story in ("done", "deadline"):
        run = w.run(turn, name="a")
        if story == "done":
            w.end(run)
    if story == "deadline":
        w.advance(11.0)
        w.unwind(w.live()[-1])
    elif story not in ("returned", "raised"):
        w.cancel(turn)
    if story != "queued":
        w.finish(turn, story if story in ("returned", "raised") else "cancelled")
    assert w.history()[1].describe().split(",")[0] == words


@pytest.mark.requirement("B43")
def test_a_turn_may_claim_success_only_if_every_run_succeeded() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    good, bad, behind, stopped = (w.run(turn, name=name) for name in ("good", "bad", "behind", "stopped"))
    w.end(good)
    w.end(bad, "raised", error="no bread")
    w.end(behind, "raised", error="no butter")
    w.cancel(stopped, reason="enough")
    w.unwind(stopped)
    w.finish(turn)
    (record,) = w.history()
    assert (record.outcome, record.is_complete) == (Outcome.SUCCEEDED, False)
    assert [tuple(run) for run in record.unfinished[:2]] == [
        ("bad", Outcome.FAILED, "no bread"),
        ("behind", Outcome.FAILED, "no butter"),
    ]
    assert record.unfinished[2].outcome is Outcome.CANCELLED
    assert "enough" in record.unfinished[2].reason
    follows = w.open_turn()
    w.end(w.run(follows, name="bad"), "raised")
    w.finish(follows, "follow")
    assert w.outcome(follows) is Outcome.FAILED, "one that follows its runs does not even say so"
    clean = w.open_turn()
    w.end(w.run(clean))
    w.finish(clean)
    assert w.history()[-1].is_complete


def test_of_many_runs_that_did_not_succeed_the_first_are_named_and_all_are_counted() -> None:
    w = ConversationWorld(check=False)
    turn = w.open_turn()
    runs = w.delegate(turn, 50)
    w.cancel(turn)
    for run in runs:
        w.unwind(run)
    assert len(w.history()[0].unfinished) == 20
    w.finish(turn, "cancelled")
    (record,) = w.history()
    assert (len(record.unfinished), record.unfinished_count, record.steps, record.steps_done) == (20, 50, 50, 0)
    assert len(record.at_work) == 20


@pytest.mark.field_report("J9")
@pytest.mark.parametrize("ended", range(4))
def test_whenever_a_turn_of_three_runs_is_cancelled_each_is_closed_once_and_the_session_goes_on(ended: int) -> None:
    w = ConversationWorld(max_shared=1)
    turn = w.open_turn()
    runs = w.delegate(turn, 3)
    for run in runs[:ended]:
        w.end(run)
    w.cancel(turn)
    for run in runs[ended:]:
        if not w.node(run).is_ended:
            w.unwind(run)
    w.finish(turn, "cancelled")
    outcomes = [w.outcome(run) for run in runs]
    assert outcomes == [Outcome.SUCCEEDED] * ended + [Outcome.CANCELLED] * (3 - ended)
    assert all(w.terminal_counts()[run] == 1 for run in runs)
    following = w.open_turn()
    w.end(w.run(following))
    w.finish(following)
    assert w.outcome(following) is Outcome.SUCCEEDED


def test_histories_are_bounded_and_named_sessions_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.coordinator.conversation.KEPT_TURNS", 3)
    w = ConversationWorld(keep_ended_turns=1)
    for _ in range(6):
        turn = w.open_turn()
        w.spend(turn, 1)
        w.finish(turn)
    conversation = w.state.conversations["s1"]
    assert (conversation.count, len(conversation.turns), conversation.tokens) == (6, 3, 6)
    nameless, limited = w.ids.session(), w.ids.session()
    w.finish(w.open_turn(nameless))
    w.finish(w.open_turn(limited, session_limits=Limits(tokens=5)))
    w.finish(w.open_turn("last"))
    monkeypatch.setattr("remit.coordinator.conversation.KEPT_PRUNED", 2)
    gone = w.decider.prune()
    assert len(gone) == 8
    assert (len(conversation.turns), conversation.count) == (2, 6)
    assert set(w.state.conversations) == {"s1", limited, "last"}
    w.open_turn(session_limits=Limits(tokens=6))
    assert w.last.error is not None, "what it has spent is remembered"
