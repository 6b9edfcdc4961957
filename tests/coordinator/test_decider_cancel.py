from __future__ import annotations

import pytest

from remit.coordinator.state import NodeState, Pool
from remit.coordinator.views import node_view, summarise_cancel
from remit.core.cause import CauseKind
from remit.core.errors import Refused, TurnCancelled
from remit.core.messages import CancelRequest
from remit.core.outcome import Outcome
from tests.coordinator.decider_world import LIMIT_ONE, World


@pytest.mark.requirement("A15")
@pytest.mark.requirement("B18")
@pytest.mark.field_report("C7")
def test_a_cancel_is_acknowledged_at_once_and_ends_nothing_that_still_works() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    answer = world.cancel(turn, reason="enough", actor="ada")
    assert (answer.accepted, answer.live, answer.already) == (True, 1, None)
    assert world.live() == [turn, run]
    assert world.node(run).state is NodeState.CANCELLING
    world.unwind(run)
    assert (world.outcome(run), world.outcome(turn)) == (Outcome.CANCELLED, None)
    world.finish(turn, "cancelled")
    assert world.outcome(turn) is Outcome.CANCELLED
    assert world.quiet == [answer.request_id]


@pytest.mark.requirement("A21")
@pytest.mark.requirement("B10")
@pytest.mark.requirement("B12")
@pytest.mark.field_report("A1")
@pytest.mark.field_report("A5")
@pytest.mark.field_report("D8")
def test_one_cause_is_on_everything_below_with_the_cancelled_node_as_origin() -> None:
    world = World()
    turn = world.open_turn()
    child = world.run(turn)
    grandchild = world.run(child)
    below = world.run(grandchild)
    answer = world.cancel(turn, reason="enough", actor="ada", surface="cli", request_id="req_why")
    assert answer.live == 3
    for run in (below, grandchild, child):
        world.unwind(run)
    world.finish(turn, "cancelled")
    causes = {world.cause(name) for name in (turn, child, grandchild, below)}
    assert causes == {answer.cause}
    cause = causes.pop()
    assert (cause.kind, cause.origin, cause.request_id) == (CauseKind.USER_INTERRUPT, turn, "req_why")
    assert (cause.actor, cause.surface, cause.reason) == ("ada", "cli", "enough")
    assert world.announced == [below, grandchild, child, turn]


@pytest.mark.requirement("A10")
@pytest.mark.requirement("B26")
def test_cancelling_what_has_ended_changes_nothing_and_says_so() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    world.end(run)
    count = len(world.events)
    answer = world.cancel(run)
    assert (answer.accepted, answer.already) == (False, Outcome.SUCCEEDED)
    assert "already ended" in answer.message
    assert not world.cancel("run_unknown").accepted
    assert "no active turn" in world.cancel("a session that is idle").message
    assert len(world.events) == count


@pytest.mark.requirement("A1")
@pytest.mark.requirement("A2")
def test_a_stop_of_a_session_means_its_turns_and_without_one_nothing() -> None:
    world = World()
    assert not world.cancel("s1").accepted
    turn = world.open_turn("s1")
    answer = world.cancel("s1", reason="stop")
    assert (answer.accepted, answer.target) == (True, turn)
    assert world.last.effects.turn_cancelled == [turn]
    assert world.cause(turn).reason == "stop"
    world.finish(turn, "cancelled")
    # The next turn of the session is not hit by what came before it.
    following = world.open_turn("s1")
    assert world.node(following).cause is None


@pytest.mark.requirement("B22")
@pytest.mark.parametrize(
    ("report", "first", "second"),
    [("returned", Outcome.SUCCEEDED, Outcome.CANCELLED), ("cancelled", Outcome.FAILED, Outcome.CANCELLED)],
)
def test_order_decides_between_an_end_and_a_cancel(report: str, first: Outcome, second: Outcome) -> None:
    world = World()
    turn = world.open_turn()
    early, late = world.delegate(turn, 2)
    world.end(early, report)
    world.cancel(turn)
    world.end(late, report)
    assert (world.outcome(early), world.outcome(late)) == (first, second)


@pytest.mark.requirement("B20")
@pytest.mark.requirement("B21")
def test_a_body_that_raised_before_its_signal_was_set_stays_failed() -> None:
    world = World()
    turn = world.open_turn()
    raised, surfaced = world.delegate(turn, 2)
    world.cancel(turn)
    world.end(raised, "raised", before_cancel=True, error_type="ValueError")
    world.end(surfaced, "raised", before_cancel=False, error_type="ConnectionError")
    assert (world.outcome(raised), world.outcome(surfaced)) == (Outcome.FAILED, Outcome.CANCELLED)
    assert world.node(raised).error_type == "ValueError"


@pytest.mark.requirement("B20")
@pytest.mark.field_report("D3")
def test_what_a_body_returns_after_the_cancel_is_kept_as_salvage_only() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    world.cancel(run)
    world.end(run, "returned")
    node = world.node(run)
    assert (node.outcome, node.salvage) == (Outcome.CANCELLED, True)
    assert [payload for event, payload in world.last.events if event.terminal] == [b"result"]


@pytest.mark.requirement("B32")
@pytest.mark.requirement("D15")
@pytest.mark.requirement("A4")
@pytest.mark.requirement("F1")
@pytest.mark.field_report("B2")
@pytest.mark.field_report("B7")
def test_queued_runs_below_a_cancel_end_in_the_same_step_without_a_start() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    first, second, third = world.delegate(turn, 3)
    after = world.run(turn, after=(third,))
    world.cancel(turn)
    for name in (second, third, after):
        assert world.outcome(name) is Outcome.CANCELLED
        assert world.cause(name).origin == turn
        assert world.kinds(name) == ["run_accepted", "run_ended"]
    world.unwind(first)
    assert world.running() == []
    assert world.last.effects.starts == {}


@pytest.mark.requirement("F8")
@pytest.mark.requirement("D14")
@pytest.mark.field_report("C4")
@pytest.mark.field_report("C1")
def test_a_delegation_below_a_cancel_is_refused_and_recorded() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    world.cancel(turn)
    for parent in (turn, run):
        decision = world.delegate_all(parent, [world.request(run_id=f"run_late_{parent}")])
        assert isinstance(decision.error, TurnCancelled)
        assert decision.error.cause == world.cause(turn)
    assert [refusal.run_ids for refusal in world.refusals()] == [(f"run_late_{turn}",), (f"run_late_{run}",)]
    world.unwind(run)
    world.finish(turn, "cancelled")
    assert isinstance(world.delegate_all(turn, [world.request()]).error, TurnCancelled)


@pytest.mark.requirement("F8")
@pytest.mark.requirement("B27")
@pytest.mark.field_report("C10")
@pytest.mark.field_report("A11")
@pytest.mark.field_report("M1")
def test_a_cancel_of_one_child_leaves_siblings_and_parent_alone() -> None:
    world = World()
    turn = world.open_turn()
    left, right = world.delegate(turn, 2)
    below = world.run(left)
    world.cancel(left)
    world.unwind(below)
    world.unwind(left)
    world.end(right)
    world.finish(turn)
    assert [world.outcome(n) for n in (below, left, right, turn)] == [
        Outcome.CANCELLED,
        Outcome.CANCELLED,
        Outcome.SUCCEEDED,
        Outcome.SUCCEEDED,
    ]


@pytest.mark.requirement("D5")
def test_a_second_cancel_keeps_the_first_cause_and_hears_of_the_same_quiet() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    first = world.cancel(turn, reason="first")
    second = world.cancel(turn, reason="second")
    assert (second.accepted, second.cause) == (True, first.cause)
    assert len([order for _, order in world.orders]) == 1
    world.unwind(run)
    world.finish(turn, "cancelled")
    assert sorted(world.quiet) == sorted([first.request_id, second.request_id])
    summary = summarise_cancel(world.state, second.request_id)
    assert summary is not None
    assert (summary.quiet, dict(summary.runs)) == (True, {"cancelled": 1})


@pytest.mark.requirement("B25")
def test_a_cancel_of_a_session_with_several_turns_is_quiet_only_when_all_are() -> None:
    world = World()
    active = world.open_turn("s1")
    queued = world.open_turn("s1", busy="queue")
    other = world.open_turn("s2")
    run = world.run(active)
    answer = world.cancel("s1", request_id="req_all")
    assert (answer.accepted, answer.live) == (True, 1)
    assert world.kinds(queued) == ["turn_accepted", "cancel_requested", "turn_ended", "cancel_quiet"]
    assert world.quiet == []
    world.unwind(run)
    assert world.quiet == []
    world.finish(active, "cancelled")
    assert world.quiet == ["req_all"]
    assert world.node(other).cause is None


@pytest.mark.requirement("B25")
def test_a_user_cannot_cancel_what_belongs_to_another() -> None:
    world = World()
    turn = world.open_turn(user="ada")
    run = world.run(turn)
    for target in (turn, run, "s1"):
        assert not world.cancel(target, user="bob").accepted
        assert world.node(turn).cause is None
    assert world.cancel(run, user="ada").accepted


@pytest.mark.requirement("B12")
@pytest.mark.field_report("B12")
def test_a_late_cancel_of_one_turn_does_not_hit_the_next() -> None:
    world = World()
    first = world.open_turn("s1")
    world.finish(first)
    second = world.open_turn("s1")
    answer = world.cancel(first)
    assert (answer.accepted, answer.already) == (False, Outcome.SUCCEEDED)
    assert world.node(second).cause is None


def test_a_dry_run_names_what_would_be_stopped_and_stops_nothing() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    answer = world.cancel(turn, dry_run=True)
    assert answer.nodes == (turn, run)
    assert world.node(turn).cause is None


def test_one_order_goes_to_each_host_however_many_runs_it_has() -> None:
    world = World()
    turn = world.open_turn()
    world.delegate(turn, 50)
    world.cancel(turn)
    assert len(world.orders) == len(world.state.hosts) - 1 == 1


def test_several_named_in_one_cancel_are_stopped_in_one_step_and_have_one_receipt() -> None:
    world = World()
    turn = world.open_turn(limits=LIMIT_ONE)
    ended, running, queued, other = world.delegate(turn, 4)
    world.end(ended)
    answer = world.cancel(ended, also=(running, queued, "run_unheard_of"), request_id="req_all")
    assert (answer.accepted, answer.live) == (True, 2)
    assert world.outcome(queued) is Outcome.CANCELLED, "it does not get the slot that becomes free"
    assert world.quiet == []
    world.unwind(running)
    assert world.quiet == ["req_all"]
    assert world.cause(running).request_id == world.cause(queued).request_id == "req_all"
    assert world.running() == [other]


def test_a_run_may_stop_several_only_if_all_of_them_are_below_it() -> None:
    world = World()
    turn = world.open_turn()
    mine, other = world.delegate(turn, 2)
    below = world.run(mine)
    request = CancelRequest("req_1", below, also=(other,), requester=mine)
    assert isinstance(world.decider.cancel(request, world.now).error, Refused)
    assert world.node(below).cause is None


@pytest.mark.requirement("E14")
@pytest.mark.field_report("D2")
def test_a_cancel_ends_a_run_the_same_way_from_every_phase() -> None:
    world = World(max_shared=5)
    turn = world.open_turn()
    running, waiting, retrying, settling, resuming = world.delegate(turn, 5, retries=1, retry_delay_s=10.0)
    queued = world.run(turn)
    depending = world.run(turn, after=(queued,))
    below = world.run(waiting)
    world.wait(waiting, below)
    below_settling = world.run(settling)
    world.end(settling, "raised")
    assert world.node(below_settling).cause is not None
    world.end(retrying, "raised")
    world.delegate(turn, 8)
    world.wait(resuming, queued)
    world.resume(resuming)
    world.cancel(turn)
    for name in world.live():
        if world.node(name).on_host:
            world.unwind(name)
    for name in (running, waiting, retrying, queued, depending, below, resuming):
        assert world.outcome(name) is Outcome.CANCELLED, world.kinds(name)
        assert world.cause(name).origin == turn
    assert world.running() == []


@pytest.mark.requirement("B33")
@pytest.mark.field_report("B13")
@pytest.mark.field_report("D1")
def test_a_cancel_while_the_next_attempt_is_due_ends_the_run_and_no_attempt_follows() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, retries=3, retry_delay_s=5.0)
    world.end(run, "raised")
    assert world.node(run).state is NodeState.RETRYING
    world.cancel(run)
    assert world.outcome(run) is Outcome.CANCELLED
    world.advance(60.0)
    assert world.kinds(run).count("run_started") == 1


@pytest.mark.field_report("D1")
def test_a_child_that_its_parent_stopped_is_not_retried() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, retries=3)
    world.cancel(turn)
    world.end(run, "raised", before_cancel=False)
    assert (world.outcome(run), world.node(run).attempt) == (Outcome.CANCELLED, 1)


@pytest.mark.field_report("B5")
def test_a_run_that_waits_for_what_comes_before_it_is_cancelled_alone() -> None:
    world = World()
    turn = world.open_turn()
    first = world.run(turn)
    second = world.run(turn, after=(first,))
    world.cancel(second)
    assert (world.outcome(second), world.node(first).state) == (Outcome.CANCELLED, NodeState.RUNNING)
    world.end(first)
    assert world.kinds(second).count("run_started") == 0


@pytest.mark.field_report("E5")
def test_a_child_that_ends_during_a_cancel_does_not_set_the_parent_going() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    world.wait(parent, child)
    world.cancel(turn)
    world.unwind(child)
    world.resume(parent)
    assert (world.resumed, world.node(parent).state) == ([], NodeState.CANCELLING)


@pytest.mark.field_report("D13")
@pytest.mark.field_report("E15")
def test_a_run_has_ended_only_when_all_it_started_has() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    world.end(parent)
    assert (world.outcome(parent), world.node(parent).state) == (None, NodeState.SETTLING)
    world.end(child)
    assert world.announced == [child, parent]
    assert world.outcome(parent) is Outcome.SUCCEEDED


@pytest.mark.field_report("C6")
def test_children_of_a_body_that_raised_are_cancelled_and_over_before_it_has_failed() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    children = world.delegate(parent, 3)
    world.end(parent, "raised")
    assert world.outcome(parent) is None
    for child in children:
        assert (world.cause(child).kind, world.cause(child).origin) == (CauseKind.PARENT_FAILED, parent)
        world.unwind(child)
    assert world.outcome(parent) is Outcome.FAILED
    assert world.announced == [*children, parent]


def test_detached_runs_outlive_the_cancel_and_the_end_of_their_parent() -> None:
    world = World()
    turn = world.open_turn()
    kept = world.run(turn, detached=True)
    world.cancel(turn)
    world.finish(turn, "cancelled")
    assert (world.outcome(turn), world.node(kept).cause) == (Outcome.CANCELLED, None)
    below = world.run(kept)
    world.end(below)
    world.end(kept)
    assert world.outcome(kept) is Outcome.SUCCEEDED


@pytest.mark.field_report("A3")
def test_a_body_that_has_ended_cannot_delegate() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    world.end(run)
    assert isinstance(world.delegate_all(run, [world.request()]).error, Refused)
    world.finish(turn)
    assert isinstance(world.delegate_all(turn, [world.request()]).error, Refused)


@pytest.mark.field_report("M2")
def test_the_view_says_what_a_tree_under_cancel_still_waits_for() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent, name="slow")
    world.cancel(turn)
    assert node_view(world.state, world.node(parent)).waiting_for == "slow to stop"
    assert node_view(world.state, world.node(child)).waiting_for == "its body to stop"


class TestEscalation:
    @pytest.mark.field_report("J4", "M4")
    @pytest.mark.requirement("A15")
    def test_a_dedicated_host_is_killed_after_the_grace_and_its_death_confirms_the_end(self) -> None:
        world = World(auto_hosts=False, warm_hosts=0)
        turn = world.open_turn(grace_s=2.0)
        run = world.run(turn, pool=Pool.DEDICATED.value)
        world.settle_hosts()
        host = world.node(run).host_id
        world.cancel(turn)
        world.advance(1.9)
        assert world.to_kill == []
        world.advance(0.2)
        assert (world.to_kill, world.outcome(run)) == ([host], None)
        world.host_gone(host, "killed")
        assert (world.outcome(run), world.node(run).unconfirmed) == (Outcome.CANCELLED, False)
        assert world.outcome(turn) is Outcome.CANCELLED

    @pytest.mark.field_report("C7")
    def test_a_stuck_run_on_a_shared_host_is_unconfirmed_and_the_host_drained(self) -> None:
        world = World()
        turn = world.open_turn(grace_s=2.0)
        stuck, fine = world.delegate(turn, 2)
        host = world.node(stuck).host_id
        world.cancel(stuck)
        world.advance(2.1)
        assert (world.outcome(stuck), world.node(stuck).unconfirmed) == (Outcome.CANCELLED, True)
        assert world.state.hosts[host].draining
        assert world.node(world.run(turn)).host_id != host
        world.end(fine)
        world.advance(1.0)
        assert host not in world.state.hosts

    def test_a_shared_host_with_nothing_that_should_live_is_killed(self) -> None:
        world = World()
        turn = world.open_turn(grace_s=9.0)
        runs = world.delegate(turn, 2)
        host = world.node(runs[0]).host_id
        # The grace of the cancel counts, not the one that the runs came with.
        world.cancel(turn, grace_s=1.0)
        world.advance(1.1)
        assert host not in world.state.hosts
        assert [world.node(run).unconfirmed for run in runs] == [False, False]

    @pytest.mark.field_report("M4")
    def test_kill_shortens_the_grace_of_a_cancel_under_way(self) -> None:
        world = World()
        turn = world.open_turn(grace_s=60.0)
        run = world.run(turn, pool=Pool.DEDICATED.value)
        world.cancel(turn)
        world.advance(1.0)
        assert world.outcome(run) is None
        world.cancel(turn, kill=True)
        world.advance(1.0)
        assert world.outcome(run) is Outcome.CANCELLED

    def test_a_turn_whose_holder_does_not_answer_ends_after_the_grace(self) -> None:
        world = World()
        turn = world.open_turn(grace_s=2.0)
        world.cancel(turn)
        world.advance(2.1)
        assert world.outcome(turn) is Outcome.CANCELLED


def test_a_freed_slot_goes_to_another_batch_never_to_the_cancelled_one() -> None:
    world = World()
    turn = world.open_turn(limits=LIMIT_ONE)
    first, second, third = world.delegate(turn, 3)
    other = world.open_turn("s2", limits=LIMIT_ONE)
    theirs = world.run(other)
    world.cancel(turn)
    world.unwind(first)
    assert world.running() == [theirs]
    assert [world.kinds(n).count("run_started") for n in (second, third)] == [0, 0]
