from __future__ import annotations

import pytest

from remit.coordinator.state import NodeState, Pool
from remit.core.cause import CauseKind
from remit.core.errors import Refused, TurnCancelled
from remit.core.messages import ReportEnded, ReportProgress
from remit.core.outcome import Outcome
from tests.coordinator.decider_world import World


@pytest.mark.requirement("F7")
def test_a_failed_attempt_is_repeated_only_if_that_was_asked_for() -> None:
    world = World()
    turn = world.open_turn()
    once, twice = world.run(turn), world.run(turn, retries=1)
    world.end(once, "raised")
    world.end(twice, "raised")
    assert (world.outcome(once), world.outcome(twice)) == (Outcome.FAILED, None)
    world.end(twice)
    assert (world.outcome(twice), world.node(twice).attempt) == (Outcome.SUCCEEDED, 2)


@pytest.mark.requirement("B33")
def test_an_attempt_that_took_too_long_is_told_to_stop_and_the_next_one_is_not() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, retries=1, attempt_timeout_s=2.0)
    world.advance(2.0)
    order = world.orders[-1][1]
    assert (order.cause.kind, order.attempt) == (CauseKind.ATTEMPT_TIMEOUT, 1)
    assert isinstance(world.delegate_all(run, [world.request()]).error, TurnCancelled)
    world.end(run, "timed_out", before_cancel=False)
    node = world.node(run)
    assert (node.attempt, node.cause, node.state) == (2, None, NodeState.RUNNING)
    world.end(run)
    assert world.outcome(run) is Outcome.SUCCEEDED


@pytest.mark.requirement("B22")
def test_reports_and_delegations_of_an_attempt_that_is_over_are_refused() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, retries=1, retry_delay_s=1.0)
    host = world.node(run).host_id
    world.end(run, "raised")
    assert isinstance(world.delegate_all(run, [world.request()]).error, Refused)
    world.advance(1.0)
    refused = world.state.refused
    world.report(host, ReportEnded(run, 1, "returned", payload=b"late"))
    assert isinstance(world.delegate_all(run, [world.request()], attempt=1).error, Refused)
    assert (world.state.refused, world.node(run).state) == (refused + 1, NodeState.RUNNING)
    world.end(run)
    world.report(host, ReportEnded(run, 2, "raised"))
    assert world.terminal_counts()[run] == 1


@pytest.mark.requirement("F5")
@pytest.mark.parametrize("asked", [False, True])
def test_a_host_that_vanishes_makes_a_run_lost_unless_a_cancel_came_first(asked: bool) -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    if asked:
        world.cancel(run)
    world.host_gone(world.node(run).host_id)
    assert world.outcome(run) is (Outcome.CANCELLED if asked else Outcome.LOST)


@pytest.mark.requirement("F5")
def test_a_host_that_dies_settles_its_runs_from_every_state() -> None:
    world = World(max_shared=3)
    turn = world.open_turn()
    running, waiting, resuming = world.delegate(turn, 3)
    world.wait(waiting, running)
    settling = world.run(turn)
    world.wait(resuming, settling)
    child = world.run(settling)
    world.end(settling)
    world.run(turn)
    world.resume(resuming)
    states = [world.node(n).state for n in (running, waiting, resuming, settling)]
    assert states == [NodeState.RUNNING, NodeState.WAITING, NodeState.RESUMING, NodeState.SETTLING]
    world.host_gone(world.node(running).host_id)
    assert [world.outcome(n) for n in (running, waiting, resuming, child)] == [Outcome.LOST] * 4
    # Its own body had ended well before.
    assert world.outcome(settling) is Outcome.SUCCEEDED
    assert world.running() == []


def test_a_parent_and_child_lost_together_end_children_first_and_may_be_tried_again() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn, retries=1)
    child = world.run(parent)
    world.wait(parent, child)
    world.host_gone(world.node(parent).host_id)
    assert world.cause(child).origin == parent
    assert (world.outcome(child), world.node(parent).attempt) == (Outcome.CANCELLED, 2)


def test_hosts_that_cannot_be_started_fail_what_needs_them_after_three_tries() -> None:
    world = World(auto_hosts=False, warm_hosts=0)
    turn = world.open_turn(limits=None)
    run = world.run(turn, pool=Pool.DEDICATED.value, resources_key='{"num_gpus":1}')
    for tries in range(3):
        assert world.outcome(run) is None, tries
        world.host_gone(world.to_spawn.pop(0), "no such resource")
    assert world.outcome(run) is Outcome.FAILED
    assert "no such resource" in world.node(run).error
    again = world.run(turn, pool=Pool.DEDICATED.value, resources_key='{"num_gpus":1}')
    world.settle_hosts()
    assert world.node(again).state is NodeState.RUNNING


@pytest.mark.requirement("A10")
def test_a_partial_result_never_replaces_the_whole_one() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    child = world.run(run)
    world.end(run)
    world.report(world.node(run).host_id, ReportProgress(run, 1, "half", b"half"))
    world.end(child)
    ends = [payload for event, payload in world.last.events if event.terminal and event.node_id == run]
    assert ends == [b"result"]


@pytest.mark.requirement("D9")
@pytest.mark.field_report("E12")
def test_what_a_cancelled_run_had_reported_is_kept_as_incomplete() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    world.report(world.node(run).host_id, ReportProgress(run, 1, "half", b"half"))
    world.cancel(run)
    world.unwind(run)
    assert [payload for event, payload in world.last.events if event.terminal] == [b"half"]
    assert world.node(run).salvage


class TestDeadlines:
    @pytest.mark.field_report("D7")
    def test_the_node_whose_deadline_fired_timed_out_and_what_it_takes_down_is_cancelled(self) -> None:
        world = World()
        turn = world.open_turn(deadline_s=5.0)
        run = world.run(turn)
        world.advance(5.0)
        assert (world.cause(run).kind, world.cause(run).origin) == (CauseKind.DEADLINE, turn)
        world.unwind(run)
        world.finish(turn, "cancelled")
        assert (world.outcome(run), world.outcome(turn)) == (Outcome.CANCELLED, Outcome.TIMED_OUT)

    @pytest.mark.field_report("E4")
    @pytest.mark.parametrize(("own", "above", "origin"), [(3.0, 5.0, "run"), (5.0, 3.0, "turn"), (4.0, 4.0, "turn")])
    def test_the_nearer_deadline_fires_and_is_named(self, own: float, above: float, origin: str) -> None:
        world = World()
        turn = world.open_turn(deadline_s=above)
        run = world.run(turn, deadline_s=own)
        world.advance(6.0)
        assert world.cause(run).origin == (run if origin == "run" else turn)

    @pytest.mark.requirement("B22")
    @pytest.mark.parametrize("cancel_first", [True, False])
    def test_the_first_of_a_cancel_and_a_deadline_names_the_end(self, cancel_first: bool) -> None:
        world = World()
        turn = world.open_turn()
        run = world.run(turn, deadline_s=5.0, grace_s=60.0)
        if cancel_first:
            world.cancel(run)
        world.advance(5.0)
        world.cancel(run)
        world.unwind(run)
        expected = (Outcome.CANCELLED, CauseKind.USER_INTERRUPT) if cancel_first else (Outcome.TIMED_OUT, "deadline")
        assert (world.outcome(run), world.cause(run).kind) == expected

    def test_a_run_that_waits_for_a_slot_times_out_without_a_start(self) -> None:
        world = World(max_shared=1)
        turn = world.open_turn()
        world.run(turn)
        queued = world.run(turn, deadline_s=1.0)
        world.advance(1.0)
        assert world.outcome(queued) is Outcome.TIMED_OUT
        assert "run_started" not in world.kinds(queued)
