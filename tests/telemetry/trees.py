"""Turns of many kinds, drawn by seeds: what they come to is for the journal to say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from remit.agents import RunContext, RunOptions, agent
from remit.core import RunCancelled, RunFailed, RunLost, RunTimedOut, TurnCancelled
from remit.core.errors import RemitError
from remit.core.events import (
    ApprovalAnswered,
    CancelRequested,
    Event,
    RunEnded,
    RunSettling,
    RunStarted,
    TurnEnded,
    TurnStarted,
)
from remit.locks import write
from remit.testing import await_until
from tests.agents.bodies import Stage
from tests.telemetry.bodies import boom
from tests.telemetry.world import Traced

_LONG_S = 600.0


@agent
async def grow(ctx: RunContext, seed: int, depth: int) -> int:
    """Do something of everything, by a seed."""
    choice = random.Random(seed)
    for _ in range(choice.randrange(4)):
        await asyncio.sleep(0)
    if depth:
        runs = [
            await ctx.delegate(grow, seed=seed * 7 + number, depth=depth - 1) for number in range(choice.randrange(3))
        ]
        try:
            if choice.random() < 0.8:
                await ctx.gather(*runs)
        except (RunFailed, RunCancelled, RunTimedOut, RunLost):
            if choice.random() < 0.5:
                raise
    what = choice.random()
    if what < 0.15:
        raise ValueError("by the seed")
    if what < 0.5:
        async with ctx.claim(write(f"file-{choice.randrange(3)}")):
            await ctx.sleep(0.001 * choice.randrange(30))
    elif what < 0.8:
        await ctx.sleep(0.001 * choice.randrange(60))
    return seed


@agent
async def waits(ctx: RunContext, word: str) -> None:
    Stage(ctx.workspace).note(word)
    await ctx.sleep(_LONG_S)


@agent(isolation="actor")
async def waits_alone(ctx: RunContext, word: str) -> None:
    """Wait in a host of its own, which can be killed without harm to others."""
    Stage(ctx.workspace).note(word)
    await ctx.sleep(_LONG_S)


@agent
async def leaves(ctx: RunContext, word: str, how: str) -> str:
    """End before what it has delegated has ended."""
    await ctx.delegate(waits, word=word)
    if how == "fails":
        raise ValueError(word)
    return word


@agent
async def asks(ctx: RunContext, word: str) -> str:
    return (await ctx.approve(f"deploy {word}")).by


async def random_tree(world: Traced, choice: random.Random, seed: int) -> None:
    """Stop something of a random tree, or nothing, at a random moment."""
    deadline_s = choice.choice([None, None, None, 0.02])
    options = RunOptions(retries=choice.choice([0, 0, 1]), deadline_s=choice.choice([None, None, 0.03]))
    async with world.coordinator.turn(f"turn {seed}", deadline_s=deadline_s) as turn:
        arguments = [{"seed": seed * 31 + number, "depth": 2} for number in range(choice.randrange(1, 4))]
        runs = await turn.delegate_many(grow, arguments, options=options)
        for _ in range(choice.randrange(40)):
            await asyncio.sleep(0)
        what = choice.random()
        if what < 0.3:
            await world.coordinator.cancel(turn.id, f"seed {seed}")
        elif what < 0.6:
            await choice.choice(runs).cancel(f"seed {seed}")
        elif what < 0.7:
            raise ValueError("by the seed")
        await turn.gather(*runs, return_outcomes=True)


async def stopped_while_settling(world: Traced, choice: random.Random, seed: int) -> None:
    """Stop a run, or its turn, when its body has ended, well or badly, and its child has not."""
    word = f"settles {seed}"
    async with world.coordinator.turn(word) as turn:
        run = await turn.delegate(leaves, word=word, how=choice.choice(["fails", "returns"]))
        await Stage(world.system.workspace).until_noted(word)
        # A body that fails stops its child, and may have ended with it by now.
        while (await world.coordinator.run(run.id)).state not in ("settling", "cancelling", "ended"):
            await asyncio.sleep(0.01)
        await world.coordinator.cancel(choice.choice([turn.id, run.id]), word)
        await run.wait()


async def never_begun(world: Traced, choice: random.Random, seed: int) -> None:
    """Stop what waits for another run."""
    word = f"unbegun {seed}"
    async with world.coordinator.turn(word) as turn:
        first = await turn.delegate(waits, word=word)
        later = await turn.delegate(waits, word="never", options=RunOptions(after=(first,)))
        await Stage(world.system.workspace).until_noted(word)
        await (later.cancel(word) if choice.random() < 0.5 else turn.cancel(word))
        await first.cancel(word)


async def session_stopped(world: Traced, choice: random.Random, seed: int) -> None:
    """Stop a session with a turn at work, and maybe one behind it that never begins."""
    word = f"session-{seed}"

    async def behind() -> None:
        with suppress(TurnCancelled):
            async with world.coordinator.turn("behind", session=word, busy="queue"):
                raise AssertionError("it began")

    waiting: list[asyncio.Future[None]] = []
    try:
        async with world.coordinator.turn(word, session=word) as turn:
            run = await turn.delegate(waits, word=word)
            await Stage(world.system.workspace).until_noted(word)
            if choice.random() < 0.7:
                waiting.append(asyncio.ensure_future(behind()))
                while not any(t.name == "behind" and t.session_id == word for t in await world.coordinator.turns()):
                    await asyncio.sleep(0.01)
            await world.coordinator.cancel(word, "session")
            await run.wait()
    finally:
        for each in waiting:
            await each


async def approval_answered(world: Traced, choice: random.Random, seed: int) -> None:
    """Deny, approve, or stop what asks; by a rule or by a person."""
    word = f"asks {seed}"
    rule = choice.choice(["ask", "ask", "deny"])
    async with world.coordinator.turn(word, approvals=rule) as turn:
        run = await turn.delegate(asks, word=word)
        if rule == "ask":
            while not (asked := [a for a in await world.coordinator.approvals() if a.action == f"deploy {word}"]):
                await asyncio.sleep(0.01)
            answer = choice.choice([world.coordinator.deny, world.coordinator.approve, None])
            if answer is None:
                await run.cancel(word)
            else:
                await answer(asked[0].id, by="ann")
        await run.wait()


async def tried_again(world: Traced, choice: random.Random, seed: int) -> None:
    """Fail at each of several attempts."""
    async with world.coordinator.turn(f"tries {seed}") as turn:
        run = await turn.delegate(boom, options=RunOptions(retries=choice.randrange(1, 3)))
        await run.wait()


async def host_lost(world: Traced, choice: random.Random, seed: int) -> None:
    """Lose the host of a run, which was maybe being stopped."""
    word = f"lost {seed}"
    async with world.coordinator.turn(word) as turn:
        run = await turn.delegate(waits_alone, word=word, options=RunOptions(retries=choice.choice([0, 0, 1])))
        await Stage(world.system.workspace).until_noted(word)
        world.system.engine.hosts[(await world.coordinator.run(run.id)).host_id].kill()
        if choice.random() < 0.5:
            await run.cancel(word)
        else:
            await await_until(lambda: run.is_settled or Stage(world.system.workspace).notes().count(word) > 1)
            await run.cancel(word)
        await run.wait()


async def too_late(world: Traced, choice: random.Random, seed: int) -> None:
    """Let a deadline pass: of the turn, of a run, or of an attempt."""
    options = choice.choice(
        [
            RunOptions(),
            RunOptions(deadline_s=0.05),
            RunOptions(attempt_timeout_s=0.05),
            RunOptions(attempt_timeout_s=0.05, retries=1),
        ]
    )
    deadline_s = 0.2 if options == RunOptions() else None
    async with world.coordinator.turn(f"late {seed}", deadline_s=deadline_s) as turn:
        run = await turn.delegate(waits, word="late", options=options)
        await run.wait()


Kind = Callable[[Traced, random.Random, int], Awaitable[None]]
KINDS: tuple[Kind, ...] = (
    random_tree,
    random_tree,
    random_tree,
    stopped_while_settling,
    never_begun,
    session_stopped,
    approval_answered,
    tried_again,
    host_lost,
    too_late,
)


async def one_turn(world: Traced, seed: int) -> None:
    """Hold one turn, or the turns of one session, to the end that the seed leads to."""
    try:
        await KINDS[seed % len(KINDS)](world, random.Random(seed), seed)
    except (TurnCancelled, ValueError, RemitError):
        return


def seen(events: Iterable[Event]) -> set[str]:
    """Return by name what of the corners of a life the journal has seen."""
    found: set[str] = set()
    begun: set[str] = set()
    settling: dict[str, str] = {}
    for event in events:
        if isinstance(event, (RunStarted, TurnStarted)):
            begun.add(event.node_id)
        elif isinstance(event, RunSettling):
            settling[event.node_id] = event.turn_id
        elif isinstance(event, CancelRequested):
            if event.node_id in settling or event.node_id in settling.values():
                found.add("stopped while settling")
            if event.cause is not None and event.cause.reason == "session":
                found.add("session stopped")
        elif isinstance(event, ApprovalAnswered):
            found.add(f"approval {event.decision}")
        elif isinstance(event, (RunEnded, TurnEnded)):
            settling.pop(event.node_id, None)
            what = "turn" if isinstance(event, TurnEnded) else "run"
            found.add(f"{what} {event.outcome.value}")
            if event.node_id not in begun:
                found.add(f"{what} never begun")
            if isinstance(event, RunEnded) and event.attempt > 1:
                found.add("run tried again")
    return found
