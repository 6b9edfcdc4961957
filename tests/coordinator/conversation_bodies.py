"""Agents that ask, spend, hand over and have effects, and the stage they share with a test."""

from __future__ import annotations

import asyncio
from typing import Any

from remit.agents import RunContext, RunOptions, SyncRunContext, agent
from remit.coordinator import Limits
from remit.core.errors import RemitError, TurnCancelled
from remit.locks import write
from tests.agents.bodies import Stage


@agent
async def ask(ctx: RunContext, action: str = "deploy prod", timeout_s: float | None = None) -> str:
    stage = Stage(ctx.workspace)
    try:
        approval = await ctx.approve(action, {"to": "prod", "password": "hunter2"}, timeout_s=timeout_s)
    except TurnCancelled as error:
        stage.note(f"unwound: {error.cause.describe() if error.cause else ''}")
        raise
    except RemitError as error:
        stage.note(f"{error.code}: {error}")
        raise
    stage.note(f"acted after the yes of {approval.by}")
    return approval.by


@agent
async def ask_below(ctx: RunContext, depth: int = 1) -> str:
    run = await (ctx.delegate(ask) if depth == 1 else ctx.delegate(ask_below, depth=depth - 1))
    return str(await run.result())


@agent
def ask_plain(ctx: SyncRunContext) -> str:
    ctx.spend(tokens=3)
    with ctx.effect("POST /plain"):
        approval = ctx.approve("plain deploy")
    ctx.partial("asked")
    return f"{approval.by}, {len(ctx.history())} turns before"


@agent
async def ask_or_give_up(ctx: RunContext) -> str:
    try:
        async with asyncio.timeout(0.05):
            await ctx.approve("quick one")
    except TimeoutError:
        return "nobody came"
    return "somebody came"


@agent
async def spend(ctx: RunContext, tokens: int = 0, cost: float = 0.0, more: int = 0, until: str = "") -> int:
    ctx.spend(tokens=tokens, cost=cost)
    if not until:
        return tokens
    Stage(ctx.workspace).note("spent")
    try:
        await Stage(ctx.workspace).pass_gate(until)
        await ctx.sleep(0)
    finally:
        ctx.spend(tokens=more)
    return tokens


@agent
async def spender_of_its_own(ctx: RunContext) -> str:
    run = await ctx.delegate(spend, tokens=5, until="never", options=RunOptions(limits=Limits(tokens=5)))
    return str(await run.wait())


@agent
async def post(ctx: RunContext, gate: str = "", raises: bool = False, settle: bool = False) -> str:
    stage = Stage(ctx.workspace)
    async with ctx.effect("POST /deploy") as effect:
        stage.note("posted")
        if settle:
            effect.settle()
        if raises:
            raise ConnectionError("no answer")
        if gate:
            await stage.pass_gate(gate)
    stage.note("confirmed")
    return "done"


@agent
async def post_shielded(ctx: RunContext, gate: str) -> None:
    stage = Stage(ctx.workspace)
    async with ctx.effect("POST /deploy"), ctx.shielded(30):
        stage.note("posted")
        await stage.pass_gate(gate)
    try:
        async with ctx.effect("POST /again"):
            stage.note("another one was begun")
    except TurnCancelled:
        stage.note("another one was not begun")
        raise


@agent
async def write_late(ctx: RunContext, path: str) -> None:
    """A provider that answers after the cancel: what it asks for must not be done."""
    stage = Stage(ctx.workspace)
    async with ctx.claim(write(path)):
        try:
            stage.note("asked the provider")
            await ctx.sleep(600)
        except TurnCancelled:
            stage.note("the provider answers all the same")
        await ctx.write_text(path, "late")


@agent
async def report_as_text(ctx: RunContext, child: Any = None) -> str:
    """A parent that turns whatever its child does into a text."""
    stage = Stage(ctx.workspace)
    run = await ctx.delegate(ask)
    try:
        return str(await run.result())
    except Exception as error:
        stage.note("made a text of it")
        return f"[sub-agent failed: {error}]"
