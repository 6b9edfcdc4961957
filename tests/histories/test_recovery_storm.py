"""Many runs with claims while the coordinator and hosts die again and again, at places that a seed chooses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.coordinator.life import fold
from remit.core import TurnCancelled
from remit.core.events import RunAccepted, TurnAccepted
from remit.locks import write
from remit.testing import await_until
from tests.agents.world import World, in_loop, world
from tests.coordinator.decider_world import same

KINDS = (
    "run_accepted",
    "run_started",
    "run_settling",
    "run_ended",
    "run_waiting",
    "run_resumed",
    "host_ready",
    "claim_changed",
    "cancel_requested",
    "attempt_ended",
)


@agent
async def leaf(ctx: RunContext, number: int) -> int:
    """Hold one of three paths for a moment."""
    async with ctx.claim(write(f"file{number % 3}")):
        await ctx.sleep(0.002 * (number % 5))
    return number


@agent
async def branch(ctx: RunContext, number: int) -> int:
    """Wait for a few leaves."""
    runs = await ctx.delegate_many(leaf, [{"number": number + n} for n in range(3)], options=RunOptions(retries=2))
    await ctx.gather(*runs, return_outcomes=True)
    return number


async def storm(w: World, seed: int, *, branches: int = 8, deaths: int = 5) -> None:
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()

    async def dying() -> None:
        for _ in range(deaths):
            if chance.random() < 0.7:
                w.system.die_after(chance.choice(KINDS))
                try:
                    await await_until(w.system.died.is_set, timeout_s=chance.choice([0.2, 1.0]))
                except AssertionError:
                    pass  # nothing of that kind came any more: it dies here
            await loop.run_in_executor(None, w.system.crash_coordinator)
            hosts = [host for host in w.system.engine.hosts.values() if not host.is_dead]
            if hosts and chance.random() < 0.4:
                chance.choice(hosts).kill()
            await loop.run_in_executor(None, w.system.restart_coordinator)

    async def working(number: int, *, stop: bool) -> None:
        try:
            async with w.coordinator.turn(f"turn {number}", grace_s=5.0) as turn:
                options = RunOptions(retries=1)
                runs = await turn.delegate_many(
                    branch, [{"number": 10 * n} for n in range(branches // 2)], options=options
                )
                if stop:
                    await turn.cancel("enough")
                await turn.gather(*runs, return_outcomes=True)
        except TurnCancelled:
            return

    await asyncio.gather(dying(), working(0, stop=False), working(1, stop=chance.random() < 0.5))
    check(w)


def check(w: World) -> None:
    """Check what must hold after any history."""
    events = w.events()
    accepted = [event.node_id for event in events if isinstance(event, RunAccepted | TurnAccepted)]
    assert Counter(event.node_id for event in events if event.terminal) == Counter(accepted)
    state = w.system.life.service._decider.state
    assert (state.live_runs, state.live_turns, set(state.used.values())) == (0, 0, {0})
    assert state.locks.claims() == ()
    reader = w.system.journal.reader()
    try:
        assert same(state, fold(reader)) == ""
    finally:
        reader.close()
    attempts = Counter((event.node_id, event.attempt) for event in events if event.kind == "run_started")  # type: ignore[attr-defined]
    assert set(attempts.values()) <= {1}


@pytest.mark.requirement("B22")
@pytest.mark.requirement("F14")
@pytest.mark.field_report("J1")
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_deaths_leaves_nothing_open(seed: int, tmp_path: Path) -> None:
    _run(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_long_storm_of_deaths_leaves_nothing_open(tmp_path: Path) -> None:
    for seed in range(100, 120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _run(seed, folder)


def _run(seed: int, folder: Path) -> None:
    @in_loop
    async def main() -> None:
        async with world(folder) as w:
            await storm(w, seed)

    main()
