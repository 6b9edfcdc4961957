"""Approvals in the decider: who wins, what ends the asking, what policies say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from remit.coordinator.state import NodeState
from remit.core.approvals import ApprovalRule, policy_rules, verdict
from remit.core.cause import CauseKind
from remit.core.errors import ApprovalSettled, InvalidArgument, NotFound, Refused, TurnCancelled
from remit.core.events import ApprovalAnswered, CancelRequested
from remit.core.messages import ReportWaiting
from remit.core.outcome import Outcome
from tests.coordinator.conversation_world import ConversationWorld

STRICT = ("deny", "ask", "approve")


def begun(**options: Any) -> tuple[ConversationWorld, str, str]:
    """Return a world with a turn and one run at work."""
    w = ConversationWorld()
    turn = w.open_turn(name="release", **options)
    return w, turn, w.run(turn, name="ship")


def decisions(w: ConversationWorld, approval_id: str) -> list[str]:
    return [e.decision for e in w.events if isinstance(e, ApprovalAnswered) and e.approval_id == approval_id]


@pytest.mark.parametrize("approve", [True, False])
def test_an_answer_reaches_whoever_asked(approve: bool) -> None:
    w, _, run = begun()
    record = w.asked(run, "deploy", details='{"to": "prod"}')
    assert record.is_open
    assert record.path == ("release", "ship")
    decision = w.answer(record.id, approve=approve, by="ada", surface="cli", reason="as agreed")
    assert decision.value == w.approval(record.id)
    settled = w.approval(record.id)
    assert (settled.decision, settled.by, settled.reason) == ("approved" if approve else "denied", "ada", "as agreed")
    assert [(owner, notice.record) for owner, notice in w.told] == [(run, settled)]


@pytest.mark.field_report("H1")
def test_an_approval_of_a_grandchild_is_shown_with_its_path() -> None:
    w, _, run = begun()
    below = w.run(run, name="upload")
    assert w.asked(below).path == ("release", "ship", "upload")


def test_asked_twice_it_is_asked_once() -> None:
    w, _, run = begun()
    first = w.asked(run, approval_id="approval_x")
    assert w.asked(run, approval_id="approval_x") == first
    assert w.kinds(run).count("approval_requested") == 1


@pytest.mark.requirement("B9")
def test_the_first_answer_stands_and_a_later_one_is_refused() -> None:
    w, _, run = begun()
    record = w.asked(run)
    w.answer(record.id, approve=False, by="ada", request_id="req_ada")
    late = w.answer(record.id, approve=True, by="eve").error
    assert isinstance(late, ApprovalSettled)
    assert (late.code, late.decision) == ("approval_settled", "denied")  # type: ignore[attr-defined]
    assert "denied by ada" in str(late)
    again = w.answer(record.id, approve=False, by="ada", request_id="req_ada")
    assert again.error is None, "the same request sent again is the same answer"
    assert decisions(w, record.id) == ["denied"]
    assert len(w.told) == 1


@pytest.mark.requirement("B7")
@pytest.mark.requirement("B8")
@pytest.mark.field_report("H4")
def test_a_cancel_closes_what_is_asked_below_it_in_its_own_step_and_nothing_else() -> None:
    w, turn, run = begun()
    below = w.run(run, name="upload")
    other = w.open_turn("s2")
    kept = w.asked(other)
    own, inherited, of_turn = w.asked(run), w.asked(below), w.asked(turn)
    before = len(w.events)
    w.cancel(turn, reason="enough")
    kinds = [event.kind for event in w.events[before:]]
    assert kinds[:4] == ["cancel_requested", *["approval_answered"] * 3], "one decision, right behind the mark"
    for record in (own, inherited, of_turn):
        closed = w.approval(record.id)
        assert (closed.decision, closed.cause) == ("cancelled", w.cause(turn))
        late = w.answer(record.id)
        assert isinstance(late.error, ApprovalSettled)
        assert w.approval(record.id) == closed
    assert w.approval(kept.id).is_open
    assert {owner for owner, _ in w.told} == {turn, run, below}, "whoever waits is woken, and finds its cause"


@pytest.mark.requirement("B9")
@pytest.mark.parametrize("first", ["answer", "cancel"])
def test_answer_and_cancel_race_and_the_first_in_the_journal_wins(first: str) -> None:
    w, turn, run = begun()
    record = w.asked(run)
    steps: list[Callable[[], object]] = [lambda: w.answer(record.id), lambda: w.cancel(turn)]
    for step in steps if first == "answer" else reversed(steps):
        step()
    assert decisions(w, record.id) == ["approved" if first == "answer" else "cancelled"]
    w.unwind(run)
    assert w.outcome(run) is Outcome.CANCELLED


@pytest.mark.field_report("H3")
def test_the_end_of_a_run_closes_its_approvals_as_cancelled_never_as_denied() -> None:
    w, _, run = begun()
    record = w.asked(run)
    w.end(run)
    assert w.outcome(run) is Outcome.SUCCEEDED
    assert (w.approval(record.id).decision, w.approval(record.id).cause) == ("cancelled", None)
    assert not w.told, "nobody is left who waits for it"


@pytest.mark.field_report("H7")
def test_an_expired_approval_is_expired_and_not_denied() -> None:
    w, _, run = begun()
    record = w.asked(run, timeout_s=5.0)
    answered = w.asked(run, timeout_s=5.0)
    w.advance(4.9)
    w.answer(answered.id)
    assert w.approval(record.id).is_open
    w.advance(0.2)
    expired = w.approval(record.id)
    assert (expired.decision, expired.reason) == ("expired", "nobody answered within 5 s")
    assert isinstance(w.answer(record.id).error, ApprovalSettled)
    assert w.approval(answered.id).decision == "approved"
    assert w.node(run).on_host, "the run goes on"


@pytest.mark.field_report("H5")
def test_an_approval_is_for_one_attempt_alone() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn, retries=1)
    record = w.asked(run)
    w.end(run, "raised")
    w.advance(1.0)
    assert w.node(run).attempt == 2
    assert w.approval(record.id).decision == "cancelled"
    assert isinstance(w.answer(record.id).error, ApprovalSettled)
    assert isinstance(w.ask(run, attempt=1).error, Refused), "a body of the first attempt asks no more"
    assert w.asked(run).attempt == 2


def test_nothing_that_is_over_or_being_stopped_may_ask() -> None:
    w, turn, run = begun()
    queued = w.open_turn(busy="queue")
    assert isinstance(w.ask(queued).error, Refused)
    assert isinstance(w.ask(run, attempt=7).error, Refused)
    w.cancel(run)
    assert isinstance(w.ask(run).error, TurnCancelled)
    w.unwind(run)
    w.finish(turn)
    assert isinstance(w.ask(turn).error, Refused)
    assert not w.state.approvals


def test_an_approval_of_another_user_is_not_found() -> None:
    w, _, run = begun(user="ada")
    record = w.asked(run)
    for wrong in (w.answer(record.id, user="eve"), w.answer("approval_none")):
        assert isinstance(wrong.error, NotFound)
    assert w.answer(record.id, user="ada").error is None


def test_a_wait_for_approval_gives_its_slot_back() -> None:
    w = ConversationWorld(max_shared=1)
    turn = w.open_turn()
    first, second = w.delegate(turn, 2)
    record = w.asked(first)
    w.report(w.node(first).host_id, ReportWaiting(first, 1, 1, (), "approval"))
    assert w.running() == [second]
    w.answer(record.id)
    w.resume(first)
    assert w.running() == [second]
    w.end(second)
    assert w.running() == [first]
    assert w.node(first).state is NodeState.RUNNING


@pytest.mark.requirement("F14")
def test_an_open_approval_outlives_the_coordinator_with_its_time() -> None:
    w, turn, _ = begun()
    w.asked(turn, approval_id="approval_turn", timeout_s=60.0)
    answered = w.asked(turn)
    w.answer(answered.id, request_id="req_1")
    folded = w.folded
    assert folded.approvals == w.state.approvals
    assert folded.approvals["approval_turn"].is_open
    w.restart()
    assert w.approval("approval_turn").is_open, "its turn goes on under the next life"
    w.advance(61.0)
    assert w.approval("approval_turn").decision == "expired"
    assert isinstance(w.answer(answered.id).error, ApprovalSettled)
    assert w.answer(answered.id, request_id="req_1").error is None


def test_timers_of_open_approvals_are_set_again() -> None:
    from remit.coordinator.approving import arm_approvals
    from remit.coordinator.decider import Decider

    w, _, run = begun()
    record = w.asked(run, timeout_s=60.0)
    w.decider = Decider(settings=w.decider.settings, ids=w.ids, state=w.state)
    w._take(w.decider.decide(arm_approvals, w.now))
    w.advance(61.0)
    assert w.approval(record.id).decision == "expired"


def test_whoever_does_not_wait_any_more_closes_its_own_request_alone() -> None:
    w, turn, run = begun()
    record = w.asked(run)
    w.withdraw(record.id, turn)
    assert w.approval(record.id).is_open
    w.withdraw(record.id, run)
    w.withdraw(record.id, run)
    assert decisions(w, record.id) == ["cancelled"]
    assert not w.told


def test_closing_the_coordinator_closes_approvals_with_its_cause() -> None:
    w, _, run = begun()
    record = w.asked(run)
    w.shutdown()
    closed = w.approval(record.id)
    assert closed.cause is not None
    assert closed.cause.kind is CauseKind.SHUTDOWN
    w.drain()


def test_answers_that_are_old_are_forgotten_and_open_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.coordinator.conversation.KEPT_ANSWERS", 2)
    w, _, run = begun()
    kept = w.asked(run)
    ids = [w.asked(run).id for _ in range(4)]
    for name in ids:
        w.answer(name)
    assert list(w.state.approvals) == [kept.id, *ids[2:]]


# -- policies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "action", "decision"),
    [
        ("auto", "deploy", "approved"),
        ("deny", "deploy", "denied"),
        ("ask", "deploy", ""),
        ((), "deploy", ""),
        ([ApprovalRule("git *", "approve"), ApprovalRule("*", "deny")], "git push", "approved"),
        ([ApprovalRule("git *", "approve"), ApprovalRule("*", "deny")], "rm -r", "denied"),
        ([ApprovalRule("git *", "approve")], "rm -r", ""),
        ([ApprovalRule("Git *", "approve")], "git push", ""),
    ],
)
def test_policies_of_a_turn_answer_at_once(policy: Any, action: str, decision: str) -> None:
    w, _, run = begun(approvals=policy_rules(policy))
    record = w.asked(run, action)
    assert record.decision == decision
    if decision:
        assert (record.by, record.surface) == ("policy", "policy")
        assert isinstance(w.answer(record.id).error, ApprovalSettled)


@pytest.mark.requirement("B40")
@pytest.mark.parametrize(
    ("words", "expected"),
    [(words, min(words, key=STRICT.index)) for words in itertools.product(STRICT, repeat=2)],
)
def test_a_run_can_only_narrow_what_is_allowed_above_it(words: tuple[str, str], expected: str) -> None:
    w = ConversationWorld()
    turn = w.open_turn(approvals=(ApprovalRule("*", words[0]).to_dict(),))
    run = w.run(turn, approvals=(ApprovalRule("*", words[1]).to_dict(),))
    detached = w.run(run, detached=True)
    wanted = {"approve": "approved", "deny": "denied", "ask": ""}[expected]
    assert w.asked(run).decision == wanted
    assert w.asked(detached).decision == wanted, "nor by letting something go"


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"action": "*"},
        {"action": "", "answer": "approve"},
        {"action": 3, "answer": "approve"},
        {"action": "*", "answer": "yes"},
        {"action": "*", "answer": "approve", "reason": 1},
        {"action": "*", "answer": "approve", "until": "2030"},
        {"action": "*", "answer": ["approve"]},
        ["*", "approve"],
        None,
    ],
)
def test_a_rule_that_does_not_hold_denies(rule: Any) -> None:
    said = verdict([("turn_1", [rule, ApprovalRule("*", "approve").to_dict()])], "deploy")
    assert said.word == "deny"
    assert "rule 1 of turn_1" in said.reason


def test_policies_are_checked_where_they_are_made() -> None:
    for wrong in ("yes", [{"action": "*", "answer": "approve"}]):
        with pytest.raises(InvalidArgument):
            policy_rules(wrong)  # type: ignore[arg-type]
    for action, answer in (("", "approve"), ("*", "allow")):
        with pytest.raises(InvalidArgument):
            ApprovalRule(action, answer)


@pytest.mark.field_report("H9")
def test_the_order_to_stop_is_there_before_the_word_about_the_approval() -> None:
    w, turn, run = begun()
    record = w.asked(run)
    w.cancel(turn)
    assert w.last.effects.cancels, "sent first, see Dispatcher.apply"
    ((owner, notice),) = w.last.effects.approvals
    assert (owner, notice.record.id, notice.record.cause) == (run, record.id, w.cause(run))
    cancels = [event for event in w.events if isinstance(event, CancelRequested)]
    assert len(cancels) == 1
