"""Closing a coordinator: once, in order, bounded, whoever asks and however often.

The order: refuse new turns and cancel all (one decision, so that nothing is let in
between the two; everything that is under way has the lifetime's signal through its
turn) -> wait, bounded -> end the hosts -> release the clients -> close what is kept
(journal, telemetry), each bounded -> end the process. The journal can be written
until everything has ended.

**Invariants**

1. The steps are taken once. Whoever asks later waits for the same end.
2. The shortest patience of all who have asked is the bound of the wait.
3. A resource that does not close in time is left behind, with a word in the log;
   the others are closed all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from remit.core.clock import Clock

__all__ = ["Closing", "Steps"]

logger = logging.getLogger("remit.coordinator")

_RESOURCE_S = 5.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done at each step; see `Closing`."""

    stop: Callable[[str], Awaitable[None]]
    """Refuse new turns and cancel all, durably; given the reason."""
    is_idle: Callable[[], bool]
    """Tell whether nothing runs any more."""
    end_hosts: Callable[[], Awaitable[None]]
    """End all hosts."""
    release: Callable[[], None]
    """Let every parked request return."""
    resources: Sequence[tuple[str, Callable[[], None]]]
    """(name, close) in their order; called in a thread, for they may block."""
    leave: Callable[[], None]
    """End the process, or whatever this coordinator lives in."""


class Closing:
    """The way down of one coordinator. Belongs to its event loop.

    Args:
        steps: what is done.
        clock: for the bound.
    """

    def __init__(self, steps: Steps, clock: Clock) -> None:
        self._steps = steps
        self._clock = clock
        self._work: asyncio.Task[bool] | None = None
        self._until = 0.0
        self.taken: list[str] = []
        """Names of the steps that were taken, in order."""

    @property
    def has_begun(self) -> bool:
        """Tell whether anybody has asked for it."""
        return self._work is not None

    async def close(self, reason: str, timeout_s: float) -> bool:
        """Close, or wait for the close that is under way.

        Args:
            reason: free text for people; of the first who asks.
            timeout_s: seconds to wait for everything to end; what has not is left to
                the end of the hosts.

        Returns:
            Whether everything had ended in time.

        Cancellation:
            Ends this wait alone; the close goes on.
        """
        until = self._clock.monotonic() + max(0.0, timeout_s)
        self._until = until if self._work is None else min(self._until, until)
        if self._work is None:
            self._work = asyncio.ensure_future(self._close(reason))
        return await asyncio.shield(self._work)

    async def _close(self, reason: str) -> bool:
        self.taken.append("stop")
        await self._steps.stop(reason)
        self.taken.append("wait")
        idle = await self._wait_idle()
        self.taken.append("end hosts")
        await self._steps.end_hosts()
        self.taken.append("release")
        self._steps.release()
        for name, close in self._steps.resources:
            self.taken.append(f"close {name}")
            await self._close_one(name, close)
        self.taken.append("leave")
        self._steps.leave()
        return idle

    async def _wait_idle(self) -> bool:
        while not self._steps.is_idle():
            if self._clock.monotonic() >= self._until:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _close_one(self, name: str, close: Callable[[], None]) -> None:
        closing = asyncio.ensure_future(asyncio.to_thread(close))
        await asyncio.wait([closing], timeout=_RESOURCE_S)
        if not closing.done():
            logger.error("the %s did not close within %g s and is left behind", name, _RESOURCE_S)
        elif closing.exception() is not None:
            logger.error("the %s could not be closed: %s", name, closing.exception())
