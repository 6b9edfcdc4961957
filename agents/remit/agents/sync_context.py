"""The run context of a plain (`def`) body: the same names, blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from remit.agents.context import RunContext
from remit.agents.sync_delegation import SyncRun
from remit.agents.sync_tools import SyncToolHolder

__all__ = ["SyncRunContext"]


class SyncRunContext(SyncToolHolder):
    """What a plain body is given first. It runs in a thread of a host of its own.

    A plain body is never interrupted: look at `ctx.signal` in loops. One that does
    not stop within the grace is killed with its host.
    """

    def __init__(self, context: RunContext, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(context, loop)
        self._context = context

    @property
    def run_id(self) -> str:
        """This run, `run_...`."""
        return self._context.run_id

    @property
    def turn_id(self) -> str:
        """The turn that this run belongs to."""
        return self._context.turn_id

    @property
    def session_id(self) -> str:
        """The session of that turn."""
        return self._context.session_id

    @property
    def parent_id(self) -> str:
        """The turn or run that delegated this run."""
        return self._context.parent_id

    @property
    def name(self) -> str:
        """Name that the caller gave; may be empty."""
        return self._context.name

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._context.attempt

    @property
    def depth(self) -> int:
        """Levels below the turn, from 1."""
        return self._context.depth

    @property
    def workspace(self) -> Path:
        """The workspace's folder."""
        return self._context.workspace

    @property
    def output_dir(self) -> Path:
        """Where this run's output files are."""
        return self._context.output_dir

    @property
    def after(self) -> Mapping[str, SyncRun]:
        """Runs that this one came after, by name."""
        return {name: SyncRun(run, self._loop) for name, run in self._context.after.items()}

    def log(self, text: str) -> None:
        """Append a line to this run's log."""
        self._context.log(text)
