"""Claims in the decider: who is granted, withdrawn, freed and quarantined, and in which step."""

from __future__ import annotations

import pytest

from remit.coordinator.state import NodeState
from remit.core.errors import DependencyError, NotFound, Refused, TurnCancelled
from remit.core.messages import ClaimCheck, ReportProcess
from remit.core.outcome import Outcome
from remit.locks import (
    ClaimState,
    ClaimTimeout,
    DeadlockDetected,
    InvalidClaim,
    LeaseNotHeld,
    PathNotClaimed,
)
from remit.processes.gitlocks import Aftermath
from tests.coordinator.claims_world import ClaimWorld, wish


def test_a_workspace_without_claims_journals_nothing_about_them() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    run = world.run(turn)
    world.cancel(run)
    world.unwind(run)
    world.finish(turn)
    assert "claim_changed" not in {event.kind for event in world.events}


def test_a_request_is_granted_or_queued_and_a_second_copy_changes_nothing() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    first = world.claim(one, "w:src", claim_id="c1")
    second = world.claim(two, "w:src/a", claim_id="c2")
    assert first.token > 0
    assert (second.token, second.held_by) == (0, (one,))
    count = len(world.events)
    assert world.claim(one, "w:src", claim_id="c1") == first
    assert world.claim(two, "w:src/a", claim_id="c2") == second
    assert len(world.events) == count
    world.give_up(one, "c1")
    ((owner, notice),) = world.notices
    assert (owner, notice.node_id) == (two, "c2")
    assert notice.token > first.token
    # The answer of a copy that comes after the grant is the grant.
    assert world.claim(two, "w:src/a", claim_id="c2").token == notice.token


@pytest.mark.requirement("B14")
@pytest.mark.requirement("F13")
@pytest.mark.field_report("G1")
def test_a_cancel_takes_the_whole_subtree_out_of_line_in_its_own_step() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    holder, parent, bystander = world.delegate(turn, 3)
    child = world.run(parent)
    world.claim(holder, "w:src")
    started = world.run(parent, claims=wish("w:src/b"))
    world.claim(child, "w:src/a", "r:docs")
    assert world.node(started).state is NodeState.CLAIMING
    world.claim(bystander, "w:src/a")
    world.cancel(parent)
    decided = [event.kind for event, _ in world.last.events]
    assert decided[0] == "cancel_requested"
    assert "claim_changed" in decided
    assert world.waiters == [bystander]
    assert world.holders == [holder]
    assert world.outcome(started) is Outcome.CANCELLED
    # Neither asks again.
    assert isinstance(world.ask(child, "w:elsewhere").error, TurnCancelled)
    world.unwind(child)
    world.unwind(parent)
    world.end(holder)
    assert world.holders == [bystander]


@pytest.mark.requirement("B15")
def test_the_terminal_event_frees_the_claims_and_grants_the_next_in_the_same_step() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    world.claim(one, "w:a")
    world.claim(two, "w:a")
    world.end(one)
    kinds = [(event.kind, event.node_id) for event, _ in world.last.events]
    assert kinds == [("claim_changed", one), ("claim_changed", two), ("run_ended", one)]
    assert world.holders == [two]


def test_an_ended_or_earlier_attempt_claims_nothing() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    run = world.run(turn, retries=1)
    world.claim(run, "w:a")
    world.end(run, "raised")
    assert world.holders == []
    world.advance(1.0)
    assert isinstance(world.ask(run, "w:a", attempt=1).error, Refused)
    assert world.claim(run, "w:a").token > 0
    world.end(run)
    assert isinstance(world.ask(run, "w:a").error, Refused)
    assert world.holders == []


def test_a_claim_of_a_run_comes_before_its_slot_and_again_for_each_attempt() -> None:
    world = ClaimWorld(max_shared=2)
    turn = world.open_turn()
    first = world.run(turn, claims=wish("w:a"))
    second = world.run(turn, claims=wish("w:a"), retries=1)
    other = world.run(turn)
    assert world.running() == [first, other]
    assert world.node(second).state is NodeState.CLAIMING
    world.end(first)
    assert world.running() == [second, other]
    third = world.run(turn, claims=wish("w:a"))
    world.end(second, "raised")
    # The next attempt stands in line again, behind whoever came meanwhile.
    assert world.holders == [third]
    world.advance(1.0)
    assert world.waiters == [second]
    world.end(third)
    assert world.running() == [second, other]
    assert world.node(second).attempt == 2


def test_a_run_asks_for_its_claims_once_what_it_comes_after_is_done() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    first = world.run(turn)
    second = world.run(turn, after=(first,), claims=wish("w:a"))
    assert world.state.locks.is_idle
    world.end(first)
    assert world.holders == [second]
    assert world.running() == [second]


def test_a_child_enters_what_its_parent_holds_and_siblings_take_turns() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    parent = world.run(turn)
    world.claim(parent, "w:src")
    one, two, three = world.delegate(parent, 3)
    stranger = world.run(turn)
    assert world.claim(one, "w:src/a").token > 0
    assert world.claim(two, "w:src/b").token > 0
    assert world.claim(three, "w:src/a").held_by == (one,)
    assert world.claim(stranger, "w:src/c").held_by == (parent,)
    world.end(one)
    assert three in world.holders
    detached = world.run(parent, detached=True)
    assert world.claim(detached, "w:src/d").held_by == (parent,)


def test_circles_of_claims_and_waits_are_refused_where_they_close() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    world.claim(one, "w:a")
    # Two waits for one to end; one wants what two holds.
    world.claim(two, "w:b")
    world.wait(two, one)
    error = world.ask(one, "w:b").error
    assert isinstance(error, DeadlockDetected)
    assert one in str(error)
    assert two in str(error)
    # The other way round: the claim waits, then the wait for a run would close it.
    world.resume(two)
    world.claim(two, "w:a")
    world.wait(one, two)
    (refused,) = world.refused_waits
    assert refused.split(" -> ")[0] == refused.split(" -> ")[-1] == one


@pytest.mark.field_report("E13")
def test_a_run_that_comes_after_what_waits_for_a_claim_of_its_parent_is_refused() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    parent, stranger = world.delegate(turn, 2)
    world.claim(parent, "w:x")
    world.claim(stranger, "w:x")
    error = world.delegate_all(parent, [world.request(after=(stranger,))]).error
    assert isinstance(error, DependencyError)
    assert f"{parent} -> {stranger} -> {parent}" in str(error)
    # One that is let go is nobody's to wait for.
    assert world.delegate_all(parent, [world.request(after=(stranger,), detached=True)]).error is None


@pytest.mark.field_report("G6")
def test_a_timeout_takes_the_request_out_of_line_and_names_the_holder() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    world.claim(one, "w:a")
    world.claim(two, "w:a", claim_id="c2", timeout_s=3.0)
    world.advance(2.9)
    assert world.waiters == [two]
    world.advance(0.2)
    assert world.waiters == []
    ((owner, notice),) = world.notices
    assert (owner, notice.node_id, notice.token) == (two, "c2", 0)
    assert isinstance(notice.error, ClaimTimeout)
    assert notice.error.held_by == (one,)
    # A granted claim does not expire.
    world.give_up(one, "claim_none")
    world.claim(turn, "r:docs", timeout_s=1.0)
    world.advance(2.0)
    assert turn in world.holders


@pytest.mark.requirement("F12")
@pytest.mark.field_report("G4")
def test_claims_of_a_lost_host_are_freed_once_its_processes_are_proven_gone() -> None:
    """Invariant I17."""
    world = ClaimWorld()
    turn = world.open_turn()
    one, two, three = world.delegate(turn, 3)
    host = world.node(one).host_id
    world.report(host, ReportProcess(one, 1, 77, 1.0, "here", "cc"))
    world.claim(one, "w:a")
    world.claim(turn, "w:b")
    world.claim(two, "w:c")
    world.host_gone(host)
    assert world.outcome(one) is world.outcome(two) is world.outcome(three) is Outcome.LOST
    (kept,) = [view for view in world.state.locks.claims() if view.state is ClaimState.QUARANTINED]
    assert (kept.owner, kept.note) == (one, "not proven gone: cc (77)")
    late = world.run(turn)
    assert world.claim(late, "w:a").held_by == (one,)
    assert world.swept == [(one, 77)]
    world.process_swept(one, 77, gone=False)
    assert world.waiters == [late]
    world.process_swept(one, 77)
    assert late in world.holders


def test_what_will_not_stop_is_quarantined_until_its_host_is_gone() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    stuck, other = world.delegate(turn, 2)
    world.claim(stuck, "w:a")
    world.claim(other, "w:a")
    world.cancel(stuck, grace_s=1.0)
    world.advance(1.5)
    assert world.node(stuck).unconfirmed
    assert world.owners(ClaimState.QUARANTINED) == [stuck]
    assert world.waiters == [other]
    host = world.node(stuck).host_id
    late = world.run(turn)
    assert world.node(late).host_id != host
    world.host_gone(host)
    assert ClaimState.QUARANTINED not in [view.state for view in world.state.locks.claims()]
    assert world.claim(late, "w:a").token > 0


def test_a_person_may_vouch_for_what_cannot_be_proven() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    stuck, other = world.delegate(turn, 2)
    world.claim(stuck, "w:a")
    world.claim(other, "w:a")
    world.cancel(stuck, grace_s=1.0)
    world.advance(1.5)
    world.clear(stuck)
    assert world.holders == [other]


def test_a_turn_that_never_says_it_is_over_is_quarantined_until_it_does_or_its_client_is_gone() -> None:
    for end in ("finish", "client"):
        world = ClaimWorld()
        turn, other = world.open_turn("s1", client_id="client_1"), world.open_turn("s2", client_id="client_2")
        world.claim(turn, "w:a")
        world.claim(other, "w:a")
        world.cancel(turn, grace_s=1.0)
        world.advance(1.5)
        assert world.owners(ClaimState.QUARANTINED) == [turn]
        if end == "finish":
            world.finish(turn, "cancelled")
        else:
            world.client_gone("client_1")
        assert world.holders == [other]


def test_a_restart_frees_what_earlier_lives_held_and_tokens_go_on_growing() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    before = world.claim(one, "w:a").token
    world.claim(two, "w:a")
    world.restart()
    assert world.state.locks.claims() == ()
    again = world.run(world.open_turn("s2"))
    assert world.claim(again, "w:a").token > before


def test_a_writer_is_checked_against_what_it_holds_now() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    run = world.run(turn)
    token = world.claim(run, "w:src", claim_id="c1").token
    (area,) = wish("w:src/a")
    (outside,) = wish("w:docs")
    check = world.decider.check_claim
    assert check(ClaimCheck(run, "c1", token)) == check(ClaimCheck(run, area=area)) == token
    with pytest.raises(PathNotClaimed):
        check(ClaimCheck(run, area=outside))
    for wrong in (ClaimCheck(run, "c1", token + 1), ClaimCheck(turn, "c1", token), ClaimCheck(run, "c2", token)):
        with pytest.raises(LeaseNotHeld):
            check(wrong)
    world.cancel(run)
    with pytest.raises(TurnCancelled):
        check(ClaimCheck(run, "c1", token))


@pytest.mark.field_report("G14")
def test_what_cleans_up_after_a_cancel_may_write_what_is_still_held_and_not_lent() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    (run,) = world.delegate(turn)
    (child,) = world.delegate(run)
    token = world.claim(run, "w:.git", claim_id="c1").token
    (area,) = wish("w:.git/index.lock")
    world.cancel(run)
    check = world.decider.check_claim
    with pytest.raises(TurnCancelled):
        check(ClaimCheck(run, area=area))
    assert check(ClaimCheck(run, area=area, in_clean_up=True)) == token
    with pytest.raises(PathNotClaimed):
        check(ClaimCheck(child, area=area, in_clean_up=True))


@pytest.mark.field_report("G14")
def test_git_locks_that_a_dead_host_had_left_are_journalled_before_its_claims_are_freed() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    (run,) = world.delegate(turn)
    host = world.node(run).host_id
    world.claim(run, "w:.git")
    world.report(host, ReportProcess(run, 1, 77, 0.0, "box", "git"))
    world.host_gone(host)
    found = Aftermath(("/w/.git/index.lock",), ("/w/.git/config.lock: it is older",))
    decision = world.process_swept(run, 77, aftermath=found)
    kinds = [event.kind for event, _ in decision.events]
    assert kinds.index("git_locks_found") < kinds.index("claim_changed")
    assert (world.node(run).git_locks_removed, world.node(run).git_locks_left) == (found.removed, found.left)
    assert world.holders == []


def test_foreign_and_unknown_claims_are_typed_errors_and_change_nothing() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    world.claim(one, "w:a", claim_id="c1")
    assert isinstance(world.give_up(two, "c1").error, LeaseNotHeld)
    assert isinstance(world.ask(two, "w:b", claim_id="c1").error, InvalidClaim)
    assert isinstance(world.ask(two).error, InvalidClaim)
    assert isinstance(world.give_up("run_none", "c1").error, NotFound)
    assert world.holders == [one]
    # Given back before it arrives, it is refused when it does.
    world.give_up(two, "c9")
    assert world.ask(two, "w:z", claim_id="c9").error is not None
    world.end(two)
    world.end(one)
    assert world.state.locks.is_idle


def test_a_host_that_goes_before_a_body_that_did_not_stop_is_settled_is_the_proof_that_it_is_gone() -> None:
    world = ClaimWorld(auto_hosts=False, max_shared=8)
    turn = world.open_turn()
    for host in list(world.to_spawn):
        world.host_ready(host)
    stuck, other = world.delegate(turn, 2)
    host = world.node(stuck).host_id
    assert world.node(other).host_id == host
    world.claim(stuck, "w:a")
    child = world.run(stuck, pool="actor")
    world.settle_hosts()
    world.cancel(stuck, grace_s=1.0)
    world.advance(1.1)
    assert world.node(stuck).report == "stuck", "what is below it has not ended"
    world.host_gone(host)
    world.unwind(child)
    assert world.outcome(stuck) is Outcome.CANCELLED
    assert world.state.locks.claims() == ()
