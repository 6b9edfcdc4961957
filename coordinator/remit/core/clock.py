"""The seam for time: every deadline and every time stamp comes from a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the rest of the code may ask about time."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back; its zero means nothing."""
        ...

    def now(self) -> float:
        """Return seconds since 1970 on a clock that never goes back within a process.

        Deadlines are kept on this scale, so that they mean the same after a restart.
        """
        ...


class SystemClock:
    """The real time of this machine.

    `now` is the wall time at construction plus the monotonic time since: an
    adjusted wall clock moves no deadline of a living process.
    """

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def now(self) -> float:
        """Return seconds since 1970 that never go back within this process."""
        return self._offset + time.monotonic()
