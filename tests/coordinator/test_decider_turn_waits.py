"""Turns that wait for runs of other turns: in the graph of waits like everybody else."""

from __future__ import annotations

import pytest

from remit.core.errors import WaitCycle
from remit.core.events import TurnWaiting
from remit.locks import DeadlockDetected
from tests.coordinator.claims_world import ClaimWorld


def two_turns(world: ClaimWorld) -> tuple[str, str, str, str]:
    """Return turn A with a run, turn B with a run."""
    a, b = world.open_turn(session="a"), world.open_turn(session="b")
    return a, world.run(a), b, world.run(b)


@pytest.mark.field_report("E13")
def test_a_run_that_wants_what_a_turn_holds_that_waits_for_it_is_refused() -> None:
    world = ClaimWorld()
    a, _, _, b1 = two_turns(world)
    world.claim(a, "w:x")
    assert world.turn_waits(a, b1).error is None
    error = world.ask(b1, "w:x/y").error
    assert isinstance(error, DeadlockDetected)
    assert [(edge.waiter, edge.awaited) for edge in error.cycle] == [(b1, a), (a, b1)]
    # Its wait is over: now it is a wait like any other.
    world.turn_waits(a)
    assert world.claim(b1, "w:x/y").held_by == (a,)


@pytest.mark.field_report("E13")
def test_a_turn_that_would_wait_for_who_waits_for_its_claim_is_refused_and_the_cycle_named() -> None:
    world = ClaimWorld()
    a, a1, _, b1 = two_turns(world)
    world.claim(a, "w:x")
    world.claim(b1, "w:x")
    error = world.turn_waits(a, b1).error
    assert isinstance(error, WaitCycle)
    assert error.cycle == (a, b1, a)
    assert f"{a} -> {b1} -> {a}" in str(error)
    # Through others too: b1 waits for a run of A that wants what A holds.
    world.give_up(b1, world.state.locks.claims(b1)[0].claim_id)
    world.wait(b1, a1)
    world.claim(world.run(b1), "w:x")
    error = world.turn_waits(a, b1).error
    assert isinstance(error, WaitCycle)
    assert (error.cycle[0], error.cycle[-1]) == (a, a)


def test_turns_that_wait_for_runs_of_each_other_wait_in_no_circle() -> None:
    """Each run ends by itself, whatever the turn does that delegated it."""
    world = ClaimWorld()
    a, a1, b, b1 = two_turns(world)
    assert world.turn_waits(a, b1).error is None
    assert world.turn_waits(b, a1).error is None
    world.claim(a, "w:x")
    world.claim(b, "w:y")
    # Until a run wants what the turn holds that waits for it, over the other one.
    world.claim(a1, "w:x")  # lent
    error = world.ask(a1, "w:y").error
    assert isinstance(error, DeadlockDetected)
    assert {edge.waiter for edge in error.cycle} == {a1, b}


@pytest.mark.parametrize("ending", ["over", "cancelled", "ended"])
def test_a_wait_that_is_over_or_broken_is_in_nobodys_way(ending: str) -> None:
    world = ClaimWorld()
    a, _, _, b1 = two_turns(world)
    world.claim(a, "w:x")
    world.turn_waits(a, b1)
    if ending == "over":
        world.turn_waits(a)
    elif ending == "cancelled":
        world.cancel(a)
    else:
        world.finish(a)
    assert world.claim(b1, "w:x").held_by == (a,)


def test_a_run_whose_wait_a_cancel_has_broken_is_in_nobodys_way() -> None:
    world = ClaimWorld()
    _, a1, _, b1 = two_turns(world)
    world.claim(a1, "w:x")
    world.wait(a1, b1)
    world.cancel(a1)
    assert world.claim(b1, "w:x").held_by == (a1,)


def test_copies_and_late_words_change_nothing() -> None:
    world = ClaimWorld()
    a, _, _, b1 = two_turns(world)
    world.turn_waits(a, b1, number=1_000)
    events = len(world.events)
    world.turn_waits(a, b1, number=1_000)
    world.turn_waits(a, number=999)
    assert world.node(a).waiting_on == (b1,)
    world.turn_waits(a, number=1_001)
    world.turn_waits(a, number=1_002)  # nothing to say
    world.turn_waits(a, b1, number=1_000)
    world.turn_waits("turn_none", b1)
    assert world.node(a).waiting_on == ()
    assert [type(event) for event in world.events[events:]] == [TurnWaiting]
    world.finish(a)
    world.turn_waits(a, b1, number=1_003)
    assert world.state.awaited == {}
