"""Programs end with their run: whoever has let it go, whatever has become of its host or its coordinator."""

from __future__ import annotations

from remit.core.messages import ReportProcess
from remit.core.outcome import Outcome
from remit.locks import ClaimState
from tests.coordinator.claims_world import ClaimWorld, wish


def started(w: ClaimWorld, run: str, pid: int) -> str:
    """Let the body of a run start a program; return its host."""
    node = w.node(run)
    w.report(node.host_id, ReportProcess(run, node.attempt, pid, 1.0, "here", "cc"))
    return node.host_id


def test_the_last_attempt_that_took_too_long_leaves_no_program() -> None:
    w = ClaimWorld()
    run = w.run(w.open_turn(), attempt_timeout_s=1.0)
    started(w, run, 77)
    w.advance(1.5)
    w.end(run, "timed_out", before_cancel=False)
    assert w.outcome(run) is Outcome.TIMED_OUT
    assert w.swept == [(run, 77)]


def test_what_was_delegated_by_an_attempt_that_took_too_long_leaves_no_program() -> None:
    w = ClaimWorld()
    parent = w.run(w.open_turn(), attempt_timeout_s=1.0, retries=1)
    child = w.run(parent)
    started(w, child, 77)
    w.advance(1.5)
    w.unwind(child)
    assert w.swept == [(child, 77)]


def test_a_body_that_was_given_up_on_keeps_its_claims_when_its_programs_are_gone() -> None:
    w = ClaimWorld(warm_hosts=0)
    turn = w.open_turn()
    other = w.run(turn)
    run = w.run(turn, claims=wish("w:a"), attempt_timeout_s=1.0, grace_s=1.0)
    host = started(w, run, 77)
    assert w.node(other).host_id == host
    w.advance(3.0)
    assert w.node(run).unconfirmed
    assert w.swept == [(run, 77)]
    w.process_swept(run, 77)
    assert w.owners(ClaimState.QUARANTINED) == [run]
    w.host_gone(host)
    assert (w.last.effects.orphans, w.swept[1:]) == ([("here", other), ("here", run)], [(run, 77)])
    w.process_swept(run, 77)
    assert w.owners(ClaimState.QUARANTINED) == []


def test_programs_of_runs_that_are_over_are_ended_again_after_a_restart() -> None:
    w = ClaimWorld()
    turn = w.open_turn()
    run = w.run(turn)
    host = started(w, run, 77)
    w.host_gone(host)
    assert w.outcome(run) is Outcome.LOST
    assert w.swept == [(run, 77)]
    w.restart()
    assert w.swept == [(run, 77), (run, 77)]


def test_programs_of_a_holder_that_vanished_are_ended_though_its_runs_go_on() -> None:
    w = ClaimWorld()
    turn = w.open_turn(on_disconnect="continue")
    run = w.run(turn)
    assert w.client_gone().effects.orphans == [("", turn)]
    assert w.live() == [turn, run]


def test_programs_of_a_holder_that_vanished_after_its_turn_was_given_up_on_are_ended() -> None:
    w = ClaimWorld()
    turn = w.open_turn(grace_s=1.0)
    w.cancel(turn)
    w.advance(1.5)
    assert w.node(turn).unconfirmed
    assert w.client_gone().effects.orphans == [("", turn)]
