"""Agents for traces: each waits in its own way."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from remit.agents import RunContext, agent
from remit.agents.sync_context import SyncRunContext
from remit.core import RunCancelled
from remit.locks import write
from remit.telemetry import ObservedAt, waiting_at
from tests.agents.bodies import Stage

DEAF = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
)


@agent
async def holder(ctx: RunContext) -> None:
    async with ctx.claim(write("shared.txt")):
        Stage(ctx.workspace).note("held")
        await asyncio.sleep(600)


@agent
async def in_line(ctx: RunContext) -> None:
    async with ctx.claim(write("shared.txt")):
        raise AssertionError("granted")


@agent
async def deaf_program(ctx: RunContext) -> None:
    await ctx.process([sys.executable, "-c", DEAF, str(ctx.workspace / "stage" / "deaf")], grace_s=0.1)


@agent
async def asks(ctx: RunContext) -> None:
    await ctx.approve("deploy prod", details={"token": "not to be told"})


@agent
async def streams(ctx: RunContext) -> None:
    with waiting_at(ObservedAt.PROVIDER_STREAM):
        Stage(ctx.workspace).note("streams")
        await asyncio.sleep(600)


@agent
async def computes(ctx: RunContext) -> None:
    Stage(ctx.workspace).note("computes")
    while True:
        await asyncio.sleep(0.01)  # not as often as it could: others of this process have to get on


@agent
def plain(ctx: SyncRunContext) -> None:
    Stage(ctx.workspace).note("plain")
    while True:
        ctx.signal.wait_blocking(600)
        ctx.signal.raise_if_set()


@agent
async def middle(ctx: RunContext) -> None:
    """Three levels: this one, and below it one of each way to wait."""
    runs = [await ctx.delegate(each) for each in (holder, deaf_program, asks, computes, streams)]
    await ctx.gather(*runs)


@agent
async def waits_for_one(ctx: RunContext) -> str:
    """Make the best of a child that was stopped, as no parent may that is stopped itself."""
    run = await ctx.delegate(plain)
    while not run.is_settled:  # has its slot all the while, and so needs no order to go on
        await asyncio.sleep(0.01)
    try:
        await run.result()
    except RunCancelled:
        Stage(ctx.workspace).note("made up")
        raise
    return "done"


@agent
async def looks_on(ctx: RunContext, run_id: str) -> str:
    """Wait for a run that somebody else has delegated."""
    run = ctx.run(run_id)
    Stage(ctx.workspace).note("looks on")
    outcome = await run.wait()
    assert outcome is not None
    return outcome.value


@agent
async def boom(ctx: RunContext) -> None:
    raise ValueError("the secret is 12345")


@agent
async def give(ctx: RunContext, value: Any = None) -> Any:
    return value


@agent
async def tidy(ctx: RunContext) -> None:
    """Clean up, shielded, after the cancel."""
    from remit.telemetry import span

    Stage(ctx.workspace).note("tidy")
    try:
        await ctx.sleep(600)
    finally:
        async with ctx.shielded(5.0):
            with span("clean up"):
                await asyncio.sleep(0)


@agent
async def bad_tidy(ctx: RunContext) -> None:
    Stage(ctx.workspace).note("bad tidy")
    try:
        await ctx.sleep(600)
    finally:
        raise OSError("no space left")


@agent
async def spends(ctx: RunContext) -> None:
    """Report what was used so far; the clean-up comes to more."""
    ctx.partial({"tokens": 4})
    Stage(ctx.workspace).note("spent")
    try:
        await ctx.sleep(600)
    finally:
        async with ctx.shielded(5.0):
            await asyncio.sleep(0)
            ctx.partial({"tokens": 6})
