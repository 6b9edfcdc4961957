"""The sub-agents of the benchmarks; a module of its own, so that a host has one copy of its counts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from remit.agents import RunContext, agent

_WRITE_EVERY_S = 0.05


class Watch:
    """How many bodies of this process wait, and when the last one was stopped."""

    def __init__(self) -> None:
        self.entered = 0
        self.stopped = 0
        self._due = False

    def enter(self, folder: Path) -> None:
        """Count a body that is about to wait; the file follows a moment later."""
        self.entered += 1
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_WRITE_EVERY_S, self._tell, folder)

    def _tell(self, folder: Path) -> None:
        self._due = False
        _write(folder / f"entered-{os.getpid()}", {"count": self.entered})

    def stop(self, folder: Path) -> None:
        """Count a body that has observed its cancel; the last one writes down when that was."""
        self.stopped += 1
        if self.stopped == self.entered:
            _write(folder / f"stopped-{os.getpid()}", {"count": self.stopped, "last": time.monotonic()})
            self.entered = self.stopped = 0


_watch = Watch()


def _write(path: Path, value: dict[str, float]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.rename(path)


@agent
async def empty(ctx: RunContext, i: int) -> int:
    """Return at once."""
    return i


@agent
async def waiting(ctx: RunContext, folder: str) -> None:
    """Wait until cancelled, and note when that was observed."""
    _watch.enter(Path(folder))
    try:
        await ctx.sleep(3600)
    except BaseException:  # the point is to see whatever stops this body
        _watch.stop(Path(folder))
        raise
