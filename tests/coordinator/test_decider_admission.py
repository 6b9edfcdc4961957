from __future__ import annotations

import pytest

from remit.coordinator.state import NodeState, Pool
from remit.coordinator.views import node_view
from remit.core.errors import ChildLimitExceeded, DependencyError, DepthExceeded, NotFound
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from tests.coordinator.decider_world import LIMIT_ONE, World


@pytest.mark.requirement("B37")
def test_delegation_deeper_than_the_limit_is_refused_with_the_limit_named() -> None:
    world = World(max_depth=2)
    turn = world.open_turn()
    deep = world.run(world.run(turn))
    error = world.delegate_all(deep, [world.request()]).error
    assert isinstance(error, DepthExceeded)
    assert "the workspace allows 2 levels" in str(error)


@pytest.mark.requirement("B37")
def test_a_turn_may_raise_the_depth_and_a_run_can_only_narrow_it() -> None:
    world = World(max_depth=1)
    turn = world.open_turn(limits=Limits(max_depth=9))
    narrow = world.run(turn, limits=Limits(max_depth=1))
    below = world.run(narrow)
    assert isinstance(world.delegate_all(below, [world.request()]).error, DepthExceeded)
    wide = world.run(turn, limits=Limits(max_depth=5))
    world.run(world.run(wide))


def test_the_number_of_children_is_bounded_for_all_below() -> None:
    world = World()
    turn = world.open_turn(limits=Limits(max_children=2))
    run = world.run(turn)
    assert isinstance(world.delegate_all(turn, [world.request(), world.request()]).error, ChildLimitExceeded)
    assert isinstance(world.delegate_all(run, [world.request() for _ in range(3)]).error, ChildLimitExceeded)
    world.delegate(run, 2)


@pytest.mark.requirement("B38")
def test_a_batch_with_one_bad_dependency_starts_nothing() -> None:
    world = World()
    turn = world.open_turn()
    other = world.open_turn("s2")
    good = world.request()
    bad_batches = [
        [good, world.request(after=("run_unknown",))],
        [good, world.request(run_id=good.run_id)],
        [good, world.request(after=(turn,))],
        [good, world.request(after=(other,))],
        [world.request(run_id="run_a", after=("run_b",)), world.request(run_id="run_b", after=("run_a",))],
        [world.request(run_id="run_self", after=("run_self",))],
    ]
    for batch in bad_batches:
        assert isinstance(world.delegate_all(turn, batch).error, DependencyError)
    assert world.live() == [turn, other]
    assert isinstance(world.delegate_all("run_nobody", [good]).error, NotFound)


def test_a_delegation_sent_twice_is_one_delegation() -> None:
    world = World()
    turn = world.open_turn()
    requests = [world.request(), world.request()]
    world.delegate_all(turn, requests)
    count = len(world.events)
    assert world.delegate_all(turn, requests).error is None
    assert len(world.events) == count


@pytest.mark.requirement("B32")
def test_a_run_whose_dependency_failed_is_blocked_and_names_it_all_the_way_down() -> None:
    world = World()
    turn = world.open_turn()
    first = world.run(turn, name="lint")
    second = world.run(turn, after=(first,))
    third = world.run(turn, after=(second,))
    world.end(first, "raised")
    assert (world.node(second).blocked_by, world.node(third).blocked_by) == (first, second)
    assert world.cause(second).reason == "blocked: 'lint' failed"
    assert node_view(world.state, world.node(third)).state == "blocked"
    later = world.run(turn, after=(third,))
    assert world.node(later).blocked_by == third
    assert "run_started" not in world.kinds(later)


@pytest.mark.parametrize("report", ["returned", "raised"])
def test_a_chain_of_thousands_is_settled_without_recursion(report: str) -> None:
    world = World(check=False)
    turn = world.open_turn()
    requests = [world.request(run_id="run_0")]
    requests += [world.request(run_id=f"run_{i}", after=(f"run_{i - 1}",)) for i in range(1, 5_000)]
    assert world.delegate_all(turn, requests).error is None
    world.end("run_0", report)
    if report == "raised":
        assert world.live() == [turn]
    else:
        assert world.running() == ["run_1"]
        world.cancel(turn)
        assert world.live() == [turn, "run_1"]


@pytest.mark.field_report("E13")
@pytest.mark.parametrize("first", [0, 1])
def test_runs_that_would_wait_for_each_other_are_refused_whichever_waits_first(first: int) -> None:
    world = World()
    turn = world.open_turn()
    runs = world.delegate(turn, 2)
    one, other = runs[first], runs[1 - first]
    world.wait(one, other)
    world.wait(other, one)
    assert world.refused_waits == [f"{other} -> {one} -> {other}"]
    assert (world.node(one).state, world.node(other).state) == (NodeState.WAITING, NodeState.RUNNING)


@pytest.mark.field_report("E13")
def test_a_run_that_comes_after_what_waits_for_its_parent_is_refused() -> None:
    world = World()
    turn = world.open_turn()
    parent, waiter = world.delegate(turn, 2)
    world.wait(waiter, parent)
    error = world.delegate_all(parent, [world.request(after=(waiter,))]).error
    assert isinstance(error, DependencyError)
    assert f"{parent} -> {waiter} -> {parent}" in str(error)


@pytest.mark.field_report("E13")
def test_a_wait_for_what_ends_only_after_oneself_is_refused() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    for target in (child, parent, turn):
        world.wait(child, target)
    assert len(world.refused_waits) == 3
    world.wait(parent, child)
    assert world.node(parent).state is NodeState.WAITING


@pytest.mark.requirement("F10")
@pytest.mark.parametrize("pool", list(Pool))
def test_one_slot_suffices_for_a_tree_of_waiting_parents(pool: Pool) -> None:
    world = World(max_shared=1, max_dedicated=1, max_depth=9)
    parent = world.open_turn()
    path: list[str] = []
    for _ in range(8):
        run = world.run(parent, pool=pool.value)
        if path:
            assert world.node(run).state is NodeState.QUEUED
            world.wait(path[-1], run)
        assert world.running() == [run]
        path.append(run)
        parent = run
    while path:
        world.end(path.pop())
        if path:
            world.resume(path[-1])
            assert world.running() == [path[-1]]
    assert world.resumed


@pytest.mark.requirement("F10")
def test_a_parent_whose_wait_is_over_comes_before_new_runs() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    world.wait(parent, child)
    new = world.run(turn)
    world.resume(parent)
    world.end(child)
    assert world.running() == [parent]
    world.end(parent)
    assert world.running() == [new]


def test_a_body_that_waits_again_before_it_has_its_slot_is_not_resumed_for_the_old_wait() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    parent = world.run(turn)
    first, second = world.delegate(parent, 2)
    world.wait(parent, first)
    world.resume(parent)
    world.wait(parent, second)
    world.end(first)
    assert world.running() == [second]
    assert world.resumed == []


@pytest.mark.requirement("F11")
def test_a_full_pool_refuses_no_turn_and_shows_what_waits() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    world.run(turn)
    queued = world.run(turn)
    assert node_view(world.state, world.node(queued)).waiting_for == "a slot"
    other = world.open_turn("s2")
    assert world.node(other).started_at is not None
    assert world.cancel(queued).accepted
    assert world.outcome(queued) is Outcome.CANCELLED


def test_max_concurrent_lets_others_pass_and_goes_on_when_there_is_room() -> None:
    world = World()
    narrow, wide = world.open_turn("s1", limits=LIMIT_ONE), world.open_turn("s2")
    first, second = world.delegate(narrow, 2)
    free = world.delegate(wide, 2)
    assert world.running() == [first, *free]
    world.end(first)
    assert second in world.running()


def test_hosts_never_serve_two_environments_and_a_dedicated_one_has_one_run() -> None:
    world = World(auto_hosts=False, max_dedicated=3)
    turn = world.open_turn()
    for env in ("x", "y"):
        for pool in Pool:
            world.delegate_all(turn, [world.request(pool=pool.value), world.request(pool=pool.value)], env_key=env)
    for _ in range(10):
        world.settle_hosts()
    for host in world.state.hosts.values():
        nodes = [world.node(name) for name in host.runs]
        assert {node.env_key for node in nodes} <= {host.env_key}
        assert host.pool is not Pool.DEDICATED or len(nodes) <= 1
    assert len(world.running()) == 4 + 3


def test_shared_runs_with_resources_get_a_host_of_their_own_kind() -> None:
    world = World(max_shared_hosts=1)
    turn = world.open_turn()
    world.run(turn)
    special = world.run(turn, resources_key='{"memory":1}')
    assert world.node(special).state is NodeState.RUNNING


def test_idle_hosts_are_let_go_and_one_stays_warm() -> None:
    world = World(idle_host_s=10.0)
    turn = world.open_turn()
    world.end(world.run(turn))
    world.advance(11.0)
    assert [host.pool for host in world.state.hosts.values()] == [None]
