"""The whole system in this process, one client of it, and what the journal says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from remit.coordinator import Coordinator, Turn
from remit.coordinator.transaction import Settings
from remit.core import TurnCancelled
from remit.core.events import Event, decode_event
from remit.testing import InProcess, await_until, open_inprocess
from tests.agents.bodies import Stage

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in a loop of its own, under the guards of `asyncio.run`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class World:
    """A workspace under test."""

    def __init__(self, system: InProcess, coordinator: Coordinator, stage: Stage) -> None:
        self.system = system
        self.coordinator = coordinator
        self.stage = stage

    def events(self, *kinds: str) -> list[Event]:
        """Return what was journalled, in order; of all kinds if none is named."""
        reader = self.system.journal.reader()
        try:
            records = list(reader.read(kinds=kinds or None))
        finally:
            reader.close()
        return [decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in records]

    async def until_asked(self, method: str, times: int = 1) -> None:
        """Wait until so many requests of this name have arrived."""
        await await_until(lambda: self.system.calls.count(method) >= times, message=f"{times} calls of {method}")

    @asynccontextmanager
    async def held(self, name: str = "t", **options: Any) -> AsyncGenerator[Turn]:
        """Hold a turn in a task of its own; whoever is in the block looks on while it is cancelled.

        The holder must have ended with `TurnCancelled` by the end of the block.
        """
        entered: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with self.coordinator.turn(name, **options) as turn:
                entered.set_result(turn)
                await turn.sleep(600)

        holding = asyncio.ensure_future(hold())
        try:
            await asyncio.wait([holding, entered], return_when=asyncio.FIRST_COMPLETED)
            yield entered.result()
            with pytest.raises(TurnCancelled):
                await holding
        finally:
            holding.cancel()
            await asyncio.wait([holding])

    async def until_idle_hosts(self) -> None:
        """Wait until no body is at work on any host."""
        hosts = self.system.engine.hosts
        await await_until(lambda: not any(h.host.statistics()["attempts"] for h in hosts.values()))


@asynccontextmanager
async def world(
    workspace: Path, *, settings: Settings | None = None, grace_s: float = 10.0, poll_s: float = 0.1
) -> AsyncGenerator[World]:
    """Open a workspace in this process for the time of a block."""
    with open_inprocess(workspace, settings=settings, poll_s=poll_s) as system:
        async with system.coordinator(grace_s=grace_s) as coordinator:
            yield World(system, coordinator, Stage(workspace))
