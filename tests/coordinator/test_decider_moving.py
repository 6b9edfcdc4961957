"""Draining a node of the cluster: work moves by attempt, and no run ends by it."""

from __future__ import annotations

from typing import Any

import pytest

from remit.coordinator.state import NodeState
from remit.core.cause import CauseKind
from remit.core.errors import Refused, TurnCancelled
from remit.core.messages import DrainAnswer
from remit.core.outcome import Outcome
from tests.coordinator.claims_world import ClaimWorld
from tests.coordinator.decider_world import World


def host_on(world: World, node: str) -> None:
    """Let all hosts that are asked for come up on one node."""
    asked, world.to_spawn = world.to_spawn, []
    for host_id in asked:
        world.host_ready(host_id, node)


def drain(world: World, node: str, **options: Any) -> DrainAnswer:
    decision = world.drain_node(node, **options)
    if decision.error is not None:
        raise decision.error
    assert decision.drain is not None
    return decision.drain


def on_node_a() -> tuple[ClaimWorld, str, str]:
    world = ClaimWorld(auto_hosts=False)
    turn = world.open_turn(grace_s=5.0)
    host_on(world, "a")
    run = world.run(turn)
    host_on(world, "a")
    assert world.state.hosts[world.node(run).host_id].node == "a"
    return world, turn, run


@pytest.mark.field_report("I1")
def test_a_run_on_a_drained_node_goes_on_elsewhere_and_uses_up_no_retry() -> None:
    world, turn, run = on_node_a()
    assert drain(world, "a").runs == 1
    (order,) = [order for _, order in world.orders]
    assert (order.target, order.attempt, order.cause.kind) == (run, 1, CauseKind.WORKER_MOVED)
    host_on(world, "b")
    world.end(run, "moved", before_cancel=False)
    assert (world.node(run).attempt, world.node(run).state) == (2, NodeState.RUNNING)
    assert world.state.hosts[world.node(run).host_id].node == "b"
    assert (world.node(run).cause, world.node(run).retries) == (None, 1)
    assert world.kinds(run).count("attempt_moved") == world.kinds(run).count("attempt_ended") == 1
    world.end(run)
    world.finish(turn)
    assert {world.outcome(run), world.outcome(turn)} == {Outcome.SUCCEEDED}


def test_nothing_starts_on_a_drained_node_also_on_hosts_that_come_up_there_later() -> None:
    world, turn, run = on_node_a()
    drain(world, "a")
    others = world.delegate(turn, 3)
    host_on(world, "a")
    assert {world.node(name).state for name in others} == {NodeState.QUEUED}
    world.advance(1.0)
    host_on(world, "b")
    assert {world.state.hosts[world.node(name).host_id].node for name in others} == {"b"}
    world.decider.drain("a", "", world.now, undo=True)
    assert world.state.drained == {}
    assert world.node(run).moved_attempt == 1


@pytest.mark.field_report("I2")
def test_what_a_moved_attempt_does_later_is_not_the_runs() -> None:
    world, _, run = on_node_a()
    child = world.run(run)
    world.claim(run, "w:a")
    drain(world, "a")
    assert world.cause(child).kind is CauseKind.WORKER_MOVED
    refused = world.delegate_all(run, [world.request()]).error
    assert isinstance(refused, TurnCancelled)
    assert refused.cause is not None
    assert refused.cause.kind is CauseKind.WORKER_MOVED
    assert world.ask(run, "w:b").error is not None
    host_on(world, "b")
    world.unwind(child)
    world.end(run, "moved", before_cancel=False)
    assert (world.node(run).attempt, world.holders) == (2, [])


@pytest.mark.parametrize("pool", ["shared", "actor"])
def test_a_body_that_does_not_move_is_killed_with_its_host_and_its_run_goes_on(pool: str) -> None:
    world, turn, first = on_node_a()
    deaf = world.run(turn, pool=pool, grace_s=2.0)
    host_on(world, "a")
    host_on(world, "a")
    drain(world, "a")
    host_on(world, "b")
    world.advance(2.5)
    assert world.node(deaf).host_id in world.to_kill
    world.settle_hosts()
    world.advance(0.1)
    host_on(world, "b")
    assert (world.node(deaf).attempt, world.outcome(deaf)) == (2, None)
    assert world.outcome(first) is None


def test_a_cancel_after_the_move_is_a_cancel() -> None:
    world, turn, run = on_node_a()
    drain(world, "a")
    world.cancel(turn)
    world.end(run, "moved", before_cancel=False)
    world.finish(turn, "cancelled")
    assert {world.outcome(run), world.outcome(turn)} == {Outcome.CANCELLED}
    assert world.cause(run).kind is CauseKind.USER_INTERRUPT


def test_what_was_reported_before_the_move_stays() -> None:
    world, _, run = on_node_a()
    drain(world, "a")
    # The report was on its way when the order left.
    world.end(run, "returned")
    assert world.outcome(run) is Outcome.SUCCEEDED


def test_a_move_goes_on_after_a_restart() -> None:
    world, _, run = on_node_a()
    drain(world, "a")
    world.restart(world.survey())
    assert [(order.attempt, order.cause.kind) for _, order in world.orders] == [(1, CauseKind.WORKER_MOVED)]
    world.restart(world.survey(missing=[run]))
    host_on(world, "b")
    assert (world.node(run).attempt, world.outcome(run)) == (2, None)
    assert world.state.drained == {"a": "repairs"}


def test_draining_twice_tells_nobody_twice_and_the_last_node_stays() -> None:
    world, _, _ = on_node_a()
    drain(world, "a")
    assert drain(world, "a").runs == 0
    with pytest.raises(Refused, match="no other node"):
        drain(world, "b", others=0)
