"""Agents that stop as they should, and agents that do not."""

from __future__ import annotations

import asyncio
import sys

from remit.agents import RunContext, RunOptions, agent
from remit.locks import write


@agent
async def child(ctx: RunContext) -> str:
    await ctx.sleep(0.001)
    return "done"


@agent
async def tidy(ctx: RunContext, path: str) -> str:
    async with ctx.claim(write(path)):
        run = await ctx.delegate(child)
        await run.result()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ctx.sleep(0.001))
    try:
        await asyncio.sleep(0.001)
    finally:
        async with ctx.shielded(5.0):
            await asyncio.sleep(0.001)
    return path


@agent
async def with_a_process(ctx: RunContext) -> int | None:
    done = await ctx.process([sys.executable, "-c", "pass"])
    return done.exit_code


@agent
async def swallows(ctx: RunContext) -> str:
    try:
        await asyncio.sleep(0.001)
    except BaseException:
        return "never mind"
    await asyncio.sleep(0.001)
    return "done"


@agent
async def renames(ctx: RunContext) -> str:
    try:
        await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        raise ValueError("something else") from None
    return "done"


_kept: list[asyncio.Task[None]] = []


@agent
async def leaves_a_task(ctx: RunContext) -> str:
    _kept.append(asyncio.ensure_future(asyncio.sleep(0.05)))
    await asyncio.sleep(0.001)
    await _kept.pop()
    return "done"


@agent
async def leaves_a_run(ctx: RunContext) -> str:
    await ctx.delegate(sleeper, options=RunOptions(detached=True))
    await asyncio.sleep(0.001)
    return "done"


@agent
async def sleeper(ctx: RunContext) -> None:
    await ctx.sleep(2.0)


@agent
async def will_not_stop(ctx: RunContext) -> str:
    for _ in range(200):
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue
    return "done"


@agent
async def fails(ctx: RunContext) -> None:
    await asyncio.sleep(0)
    raise RuntimeError("broken anyway")


@agent
def plain(ctx: RunContext) -> None:
    """Not one that this is for."""
