"""What is due when, for a loop that waits in `select`."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

__all__ = ["Timer", "Timers"]


class Timer:
    """One call that is due at a time. Harmless to cancel after it ran."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Call it off."""
        self.callback = None


class Timers:
    """Calls by time. Knows no clock: every call is given the time, in monotonic seconds."""

    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Have a function called by the first `run` at or after a time."""
        timer = Timer(when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def next_at(self) -> float:
        """Return when the next call is due; infinity without any."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def run(self, now: float) -> None:
        """Make the calls that are due, in order of time."""
        while self.next_at() <= now:
            _, _, timer = heapq.heappop(self._heap)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
