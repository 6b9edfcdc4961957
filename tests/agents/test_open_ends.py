"""A cancel closes whatever a run had open, and what it had written is there before its end is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.core import Outcome, RunCancelled
from remit.core.events import (
    ApprovalAnswered,
    ApprovalRequested,
    EffectStarted,
    EffectUncertain,
    Event,
    ProcessEnded,
    ProcessStarted,
    RunAccepted,
    RunEnded,
)
from remit.locks import write
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.bodies import Stage
from tests.agents.world import in_loop, world


@agent
async def open_everything(ctx: RunContext) -> None:
    """Have a child, a claim, an effect, an approval and a program open, and leave words behind at the end."""
    stage = Stage(ctx.workspace)
    await ctx.delegate(bodies.nap)
    asking = asyncio.create_task(ctx.approve("deploy"))
    async with ctx.claim(write("a.py")), ctx.effect("POST /deploy"):
        try:
            ctx.log("all open")
            await ctx.process(
                ["/bin/sh", "-c", "setsid sleep 60 & touch stage/open; echo half; wait"], cwd=ctx.workspace
            )
        finally:
            ctx.log("last words")
            ctx.partial({"found": 3})
            stage.note("unwound")
            asking.cancel()
            await asyncio.wait([asking])


@agent
async def parked(ctx: RunContext) -> None:
    """Wait for an answer and do nothing about a cancel."""
    await ctx.approve("go on")


def at(events: list[Event], kind: type[Event], node_id: str) -> int:
    """Return where the one event of this kind and node is."""
    (place,) = [number for number, event in enumerate(events) if isinstance(event, kind) and event.node_id == node_id]
    return place


@pytest.mark.requirement("D8", "D7")
@pytest.mark.field_report("F9")
@in_loop
async def test_a_cancel_closes_everything_that_was_open_before_the_end_is_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(open_everything)
        await await_until((tmp_path / "stage" / "open").exists)
        await await_until(lambda: len(w.events("approval_requested", "process_started", "effect_started")) == 3)
        receipt = await run.cancel("enough")
        assert await run.wait() is Outcome.CANCELLED
        log_at_end = (tmp_path / ".remit" / "output" / run.id / "log").read_text().splitlines()
        await receipt.quiet(timeout_s=30)
        events = w.events()

        accepted = {event.node_id for event in events if isinstance(event, RunAccepted)}
        assert len(accepted) == 2
        ended = at(events, RunEnded, run.id)
        for node in accepted:
            assert at(events, RunEnded, node) <= ended
        # The program first, with proof, then the run, whose host lives on.
        (program,) = [event for event in events if isinstance(event, ProcessEnded)]
        assert (program.stopped, program.survivors) == (True, ())
        assert at(events, ProcessStarted, run.id) < at(events, ProcessEnded, run.id) < ended
        assert at(events, ApprovalRequested, run.id) < at(events, ApprovalAnswered, run.id) < ended
        assert at(events, EffectStarted, run.id) < at(events, EffectUncertain, run.id) <= ended
        assert await w.coordinator.locks() == ()
        # What the body wrote last was there when the end was told, and is the run's.
        assert [line.split(" ", 1)[1] for line in log_at_end] == ["all open", "last words"]
        view = await w.coordinator.run(run.id)
        assert view.outcome is Outcome.CANCELLED
        with pytest.raises(RunCancelled) as raised:
            await run.result()
        assert raised.value.partial == {"found": 3}


@pytest.mark.field_report("J4")
@in_loop
async def test_whoever_is_killed_or_parked_has_its_end_written_by_the_owner_of_its_record(tmp_path: Path) -> None:
    """One body does not stop and loses its host, the other waits for a person: neither writes its own end."""
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        deaf = await turn.delegate(bodies.stubborn)
        waiting = await turn.delegate(parked)
        await await_until(lambda: bool(w.stage.notes()) and bool(w.events("approval_requested")))
        for run in (deaf, waiting):
            await w.coordinator.cancel(run.id, "enough", grace_s=0.05)
            assert await run.wait() is Outcome.CANCELLED
        w.stage.open_gate("give up")
        await w.stage.until_noted("stubborn over")
        ends = [event.node_id for event in w.events("run_ended")]
        assert sorted(ends) == sorted([deaf.id, waiting.id])
