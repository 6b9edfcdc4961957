"""A clock that stands still until a test moves it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["ManualClock", "ManualTimer"]


@dataclass(order=True)
class ManualTimer:
    """A callback at a point of manual time."""

    when: float
    order: int
    callback: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Call the timer off; harmless when it has fired."""
        self.callback = None


class ManualClock:
    """Time by hand, for a `Clock` and a `Scheduler`.

    Args:
        start: first value of `now`, in seconds since 1970.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._timers: list[ManualTimer] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Return the manual time."""
        return self._now

    def now(self) -> float:
        """Return the manual time."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> ManualTimer:
        """Call back when `advance` passes that time; at the next `advance` if it has passed."""
        timer = ManualTimer(when, next(self._order), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Move time forward, firing timers in order, each at its own time.

        Args:
            seconds: from 0.
        """
        target = self._now + seconds
        while self._timers and self._timers[0].when <= target:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.when)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self._now = target
