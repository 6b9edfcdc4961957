"""Turns that wait for runs of other turns, through the whole system: circles are refused, and nothing else is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.coordinator import Coordinator, Run, Turn
from remit.core import Outcome, RunFailed
from remit.core.errors import WaitCycle
from remit.locks import ClaimState, write
from remit.testing.inprocess import InProcess, open_inprocess
from remit.testing.wait import await_until

GATES: dict[str, threading.Event] = {}
"""What bodies, which run in this process, wait for."""


@pytest.fixture
def system(tmp_path: Path) -> Generator[InProcess]:
    GATES.clear()
    with open_inprocess(tmp_path) as found:
        yield found


@agent
async def claim_after(ctx: RunContext, gate: str, path: str) -> str:
    """Claim a path once the gate is open."""
    await await_until(GATES.setdefault(gate, threading.Event()).is_set)
    async with ctx.claim(write(path)):
        return "claimed"


Story = Callable[[Coordinator, Turn, Run], Awaitable[None]]


def two_turns(system: InProcess, story: Story) -> None:
    """Give a story turn A, which holds `x`, and a run of turn B that will want it once `go` is open."""

    async def main() -> None:
        async with system.coordinator() as coordinator, coordinator.turn("b", session="b") as b:
            run = await b.delegate(claim_after, gate="go", path="x")
            async with coordinator.turn("a", session="a") as a, asyncio.timeout(20):
                async with a.claim(write("x")):
                    await story(coordinator, a, run)
            assert await run.wait() is not None

    asyncio.run(main())


async def until_queued(coordinator: Coordinator) -> None:
    for _ in range(2_000):
        if any(view.state is ClaimState.QUEUED for view in await coordinator.locks()):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nobody stands in line")


def awaited(system: InProcess) -> list[str]:
    """Return the runs that turns wait for, as the journal has it."""
    reader = system.journal.reader()
    last = {record.node_id: record.data.get("on", ()) for record in reader.read(kinds=["turn_waiting"])}
    reader.close()
    return [name for on in last.values() for name in on]


def open_gate(name: str) -> None:
    GATES.setdefault(name, threading.Event()).set()


@pytest.mark.field_report("E13")
@pytest.mark.parametrize("how", ["gather", "as_completed", "handle"])
def test_a_turn_that_would_wait_for_who_waits_for_its_claim_hears_so_at_once(system: InProcess, how: str) -> None:
    async def story(coordinator: Coordinator, a: Turn, run: Run) -> None:
        open_gate("go")
        await until_queued(coordinator)
        with pytest.raises(WaitCycle, match=f"{a.id} -> {run.id} -> {a.id}") as raised:
            if how == "gather":
                await a.gather(run)
            elif how == "as_completed":
                async for _ in a.as_completed([run]):
                    raise AssertionError
            else:
                await a.run(run.id).result()
        assert raised.value.cycle == (a.id, run.id, a.id)
        assert awaited(system) == []

    two_turns(system, story)


@pytest.mark.field_report("E13")
@pytest.mark.parametrize("crash", [False, True])
def test_a_claim_that_would_wait_for_a_turn_that_waits_for_it_is_refused_at_once(
    system: InProcess, crash: bool
) -> None:
    async def story(coordinator: Coordinator, a: Turn, run: Run) -> None:
        waiting = asyncio.ensure_future(a.gather(run))
        await await_until(lambda: awaited(system))
        if crash:
            await asyncio.to_thread(system.restart_coordinator)
            assert awaited(system) == [run.id]
        open_gate("go")
        with pytest.raises(RunFailed, match=f"{run.id} wants write x, which waits for {a.id}; {a.id} waits for"):
            await waiting

    two_turns(system, story)


@pytest.mark.parametrize("ending", ["expires", "is given up"])
def test_a_wait_that_is_over_refuses_nobody_anything(system: InProcess, ending: str) -> None:
    async def story(coordinator: Coordinator, a: Turn, run: Run) -> None:
        if ending == "expires":
            assert await a.run(run.id).wait(0.01) is None
        else:
            waiting = asyncio.ensure_future(a.gather(run))
            await await_until(lambda: awaited(system))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await await_until(lambda: not awaited(system))
        open_gate("go")
        await until_queued(coordinator)

    two_turns(system, story)


def test_turns_may_wait_for_runs_of_each_other(system: InProcess) -> None:
    async def main() -> None:
        async with system.coordinator() as coordinator:
            async with coordinator.turn("a", session="a") as a, coordinator.turn("b", session="b") as b:
                a1 = await a.delegate(claim_after, gate="a", path="x")
                b1 = await b.delegate(claim_after, gate="b", path="y")
                waits = [asyncio.ensure_future(a.gather(b1)), asyncio.ensure_future(b.gather(a1))]
                await await_until(lambda: len(awaited(system)) == 2)
                open_gate("a")
                open_gate("b")
                assert await asyncio.gather(*waits) == [["claimed"], ["claimed"]]
                await await_until(lambda: not awaited(system))

    asyncio.run(main())


def test_a_wait_for_ones_own_runs_is_no_message(system: InProcess) -> None:
    async def main() -> None:
        async with system.coordinator() as coordinator, coordinator.turn("a") as a:
            open_gate("go")
            run = await a.delegate(claim_after, gate="go", path="x")
            assert await run.wait() is Outcome.SUCCEEDED

    asyncio.run(main())
    assert "note_wait" not in system.calls
