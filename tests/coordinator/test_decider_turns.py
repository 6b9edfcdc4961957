from __future__ import annotations

import pytest

from remit.core.cause import CauseKind
from remit.core.errors import CoordinatorClosing, InvalidArgument, Refused, SessionBusy
from remit.core.outcome import Outcome
from tests.coordinator.decider_world import World


@pytest.mark.requirement("B25")
@pytest.mark.requirement("B19")
def test_a_busy_session_refuses_a_turn_until_the_cancelled_one_has_ended() -> None:
    world = World()
    first = world.open_turn()
    world.cancel(first)
    world.open_turn()
    assert isinstance(world.last.error, SessionBusy)
    assert vars(world.last.error)["turn_id"] == first
    world.finish(first, "cancelled")
    second = world.open_turn()
    assert world.node(second).started_at is not None


@pytest.mark.requirement("B25")
def test_a_queued_turn_starts_when_the_one_before_it_has_ended_and_delegates_nothing_until_then() -> None:
    world = World()
    first = world.open_turn()
    second = world.open_turn(busy="queue")
    assert isinstance(world.delegate_all(second, [world.request()]).error, Refused)
    run = world.run(first)
    world.finish(first)
    assert world.node(second).started_at is None
    world.end(run)
    assert world.last.effects.turn_started == [second]


@pytest.mark.requirement("C1")
@pytest.mark.field_report("E8")
def test_an_interrupting_turn_cancels_what_came_before_and_starts_after_it() -> None:
    world = World()
    first = world.open_turn()
    queued = world.open_turn(busy="queue")
    second = world.open_turn(busy="interrupt", user="ada")
    assert world.cause(first).kind is CauseKind.USER_INTERRUPT
    assert second in world.cause(first).reason
    assert world.outcome(queued) is Outcome.CANCELLED
    assert "turn_started" not in world.kinds(queued)
    world.finish(first, "cancelled")
    assert world.node(second).started_at is not None
    assert world.node(second).cause is None


@pytest.mark.requirement("D16")
@pytest.mark.requirement("D17")
def test_a_session_is_free_when_the_end_is_announced_and_a_late_end_does_not_touch_the_next() -> None:
    world = World()
    first = world.open_turn()
    world.finish(first)
    assert (world.announced, world.state.sessions) == ([first], {})
    second = world.open_turn()
    world.finish(first, "raised")
    assert world.state.sessions["s1"].active == second


def test_words_that_do_not_exist_are_refused() -> None:
    world = World()
    world.open_turn(busy="maybe")
    assert isinstance(world.last.error, InvalidArgument)
    world.open_turn(on_disconnect="maybe")
    assert isinstance(world.last.error, InvalidArgument)


def test_a_turn_sent_twice_is_one_turn() -> None:
    world = World()
    turn = world.open_turn()
    world.open_turn(turn_id=turn)
    assert (world.last.error, world.kinds(turn)) == (None, ["turn_accepted", "turn_started"])
    world.finish(turn)
    world.finish(turn)
    assert world.terminal_counts()[turn] == 1


def test_a_client_that_is_gone_takes_its_turns_with_it() -> None:
    world = World()
    turn = world.open_turn()
    queued = world.open_turn(busy="queue")
    other = world.open_turn("s2", client_id="client_2")
    run = world.run(turn)
    world.client_gone()
    assert world.cause(run).kind is CauseKind.PARENT_LOST
    assert world.kinds(queued).count("turn_started") == 0
    world.unwind(run)
    assert world.outcome(turn) is Outcome.CANCELLED
    assert world.node(other).cause is None


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_turn_that_goes_on_without_its_client_follows_its_runs(succeeds: bool) -> None:
    world = World()
    turn = world.open_turn(on_disconnect="continue")
    run = world.run(turn)
    queued = world.open_turn(on_disconnect="continue", busy="queue")
    world.client_gone()
    assert world.live() == [turn, run]
    # A turn that never began has nothing to go on with.
    assert world.outcome(queued) is Outcome.CANCELLED
    world.end(run, "returned" if succeeds else "raised")
    assert world.outcome(turn) is (Outcome.SUCCEEDED if succeeds else Outcome.FAILED)


@pytest.mark.requirement("D2")
@pytest.mark.requirement("D3")
@pytest.mark.requirement("D4")
@pytest.mark.requirement("D5")
@pytest.mark.requirement("D11")
@pytest.mark.requirement("B36")
def test_closing_refuses_then_cancels_everything_and_twice_is_harmless() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    running, queued = world.delegate(turn, 2)
    kept = world.run(turn, detached=True)
    waiting = world.open_turn(busy="queue")
    world.shutdown()
    assert world.last.events[0][0].kind == "coordinator_stopping"
    assert [world.outcome(n) for n in (queued, kept, waiting)] == [Outcome.CANCELLED] * 3
    assert world.cause(running).kind is CauseKind.SHUTDOWN
    count = len(world.events)
    world.shutdown()
    assert len(world.events) == count
    world.open_turn("s2")
    assert isinstance(world.last.error, CoordinatorClosing)
    assert world.delegate_all(turn, [world.request()]).error is not None
    world.unwind(running)
    world.finish(turn, "cancelled")
    assert world.live() == []


@pytest.mark.requirement("D18")
def test_a_run_that_failed_before_it_began_is_announced_once() -> None:
    world = World(auto_hosts=False)
    turn = world.open_turn()
    run = world.run(turn)
    for _ in range(3):
        for host in list(world.state.hosts):
            world.host_gone(host, "no memory")
    assert (world.outcome(run), world.announced) == (Outcome.FAILED, [run])
    assert "no memory" in world.node(run).error


def test_a_restart_settles_what_was_left_children_first() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn, retries=5)
    child = world.run(parent, retries=5)
    other = world.open_turn("s2")
    stopped = world.run(other)
    world.cancel(other)
    world.restart()
    assert (world.outcome(child), world.cause(child).origin) == (Outcome.CANCELLED, parent)
    assert world.outcome(parent) is Outcome.LOST
    assert world.outcome(stopped) is Outcome.CANCELLED
    # The holders of turns may come back; one that does not has lost them.
    assert world.live() == [turn, other]
    world.client_gone()
    assert [world.outcome(n) for n in (turn, other)] == [Outcome.CANCELLED] * 2
    assert world.cause(turn).kind is CauseKind.PARENT_LOST


def test_prune_forgets_ended_turns_and_keeps_what_lives() -> None:
    world = World(keep_ended_turns=1)
    old = world.open_turn()
    ended = world.run(old)
    world.end(ended)
    waiter = world.run(world.open_turn("s2"))
    hanging = world.run(old, after=(waiter,))
    world.cancel(hanging)
    world.finish(old)
    with_detached = world.open_turn()
    kept = world.run(with_detached, detached=True)
    world.finish(with_detached)
    newest = world.open_turn()
    world.finish(newest)
    assert set(world.decider.prune()) == {old, ended, hanging}
    assert kept in world.state.nodes
    # What came after a run and was forgotten must not stand in the way of its end.
    world.end(waiter)
    assert world.outcome(waiter) is Outcome.SUCCEEDED
    world.end(kept)
    assert world.decider.prune() == [with_detached, kept]


def test_prune_keeps_what_ended_after_the_time_up_to_which_all_has_been_told() -> None:
    world = World(keep_ended_turns=0)
    first = world.open_turn()
    world.finish(first)
    world.advance(1.0)
    told = world.now
    second = world.open_turn("s2")
    world.finish(second)
    assert world.decider.prune(told) == [first]
    world.advance(1.0)
    assert world.decider.prune(world.now) == [second]


def test_prune_goes_by_the_age_of_the_end_and_sooner_where_there_are_many() -> None:
    world = World(keep_ended_s=100.0, keep_recent_s=10.0, keep_recent_nodes=3)
    old = world.open_turn()
    world.finish(old)
    world.advance(50.0)
    assert world.decider.prune(world.now) == []
    turn = world.open_turn("s2")
    runs = [world.run(turn) for _ in range(3)]
    assert world.decider.prune(world.now) == [old]
    for run in runs:
        world.end(run)
    world.finish(turn)
    assert world.decider.prune(world.now) == []
    world.advance(11.0)
    assert world.decider.prune(world.now) == [turn, *runs]
