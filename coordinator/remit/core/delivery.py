"""Carry what a signal has to say into one event loop, in batches.

Any thread may set a signal; a task may only be touched in its own loop. Each
loop has one `LoopDelivery`: ten thousand tasks that are cancelled at once cost
one wake-up of the loop, and tasks that do not stop share one timer.

**Invariants**

1. Whatever is posted runs in a callback of the loop, never inside a task. A
   `Task.cancel()` issued there is always consumed by the task's next step, so
   it cannot be left over for code that the cancel was not meant for.
2. A `LoopDelivery` does not keep its loop alive, nor a finished watcher.
"""

from __future__ import annotations

import contextvars
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # whoever gives a loop has it; a daemon without one need not carry it
    import asyncio

__all__ = ["REDELIVERY_INTERVAL_S", "LoopDelivery", "Watcher"]

REDELIVERY_INTERVAL_S = 0.005
"""Seconds between two deliveries to a task that does not stop."""

_EAGER_ROUNDS = 3
# The share of the loop's time that redelivery may take when very many tasks
# refuse to stop: one part in ten.
_IDLE_FACTOR = 9.0

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Something that is looked at again until it is forgotten."""

    def redeliver(self, *, is_eager: bool) -> None:
        """Deliver again if that is needed.

        Args:
            is_eager: true in the first rounds, one loop iteration apart.
        """
        ...


class LoopDelivery:
    """The way into one event loop; get it with `LoopDelivery.of_loop`."""

    __slots__ = (
        "_context",
        "_eager_left",
        "_fresh",
        "_is_awake",
        "_is_draining",
        "_loop",
        "_posted",
        "_stubborn",
        "_timer",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[Callable[[], None]] = deque()
        self._is_awake = False
        self._is_draining = False
        self._fresh: dict[Watcher, None] = {}
        self._stubborn: dict[Watcher, None] = {}
        self._eager_left = 0
        self._timer: asyncio.TimerHandle | None = None
        # An empty context: a timer must not keep the values of whichever task came by.
        self._context = contextvars.Context()

    @staticmethod
    def of_loop(loop: asyncio.AbstractEventLoop) -> LoopDelivery:
        """Return the one delivery of this loop; call it in the loop's own thread."""
        found = _deliveries.get(loop)
        if found is None:
            found = _deliveries[loop] = LoopDelivery(loop)
        return found

    def post(self, fn: Callable[[], None]) -> None:
        """Run a function in the loop, soon; any thread. Dropped when the loop is closed."""
        self._posted.append(fn)
        # Read after the append and cleared before the drain: no item can be missed.
        if self._is_awake:
            return
        self._is_awake = True
        loop = self._loop()
        try:
            if loop is None:
                raise RuntimeError("the event loop is gone")
            # Also within the loop's own thread: a signal handler may interrupt its wait,
            # and only this call ends that wait.
            loop.call_soon_threadsafe(self._drain, context=self._context)
        except RuntimeError:
            # A closed loop runs no task that could be told anything.
            self._posted.clear()

    def watch(self, watcher: Watcher) -> None:
        """Look at a watcher again, from the next loop iteration on; in the loop's thread."""
        self._stubborn.pop(watcher, None)
        self._fresh[watcher] = None
        if not self._is_draining:
            self._begin_looking()

    def _begin_looking(self) -> None:
        loop = self._loop()
        if self._fresh and self._eager_left == 0 and loop is not None:
            self._eager_left = _EAGER_ROUNDS
            loop.call_soon(self._look_at_fresh, context=self._context)

    def forget(self, watcher: Watcher) -> None:
        """Look at a watcher no more; in the loop's thread."""
        self._fresh.pop(watcher, None)
        self._stubborn.pop(watcher, None)
        if not self._stubborn and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drain(self) -> None:
        self._is_awake = False
        # All are woken before the first is looked at again: those that obey need no look.
        self._is_draining = True
        try:
            for _ in range(len(self._posted)):
                _run(self._posted.popleft())
        finally:
            self._is_draining = False
            self._begin_looking()

    def _look_at_fresh(self) -> None:
        self._eager_left -= 1
        for watcher in list(self._fresh):
            _look_at(watcher, is_eager=True)
        if not self._fresh:
            self._eager_left = 0
            return
        loop = self._loop()
        if loop is None:
            return
        if self._eager_left > 0:
            loop.call_soon(self._look_at_fresh, context=self._context)
            return
        self._stubborn.update(self._fresh)
        self._fresh.clear()
        if self._timer is None:
            self._timer = loop.call_later(REDELIVERY_INTERVAL_S, self._look_at_stubborn, context=self._context)

    def _look_at_stubborn(self) -> None:
        self._timer = None
        loop = self._loop()
        if loop is None:
            return
        started = loop.time()
        for watcher in list(self._stubborn):
            _look_at(watcher, is_eager=False)
        if self._stubborn:
            pause_s = max(REDELIVERY_INTERVAL_S, _IDLE_FACTOR * (loop.time() - started))
            self._timer = loop.call_later(pause_s, self._look_at_stubborn, context=self._context)


def _run(fn: Callable[[], None]) -> None:
    try:
        fn()
    except Exception:
        # One that fails must not keep the others from being told.
        _log.exception("a delivery into the event loop failed")


def _look_at(watcher: Watcher, *, is_eager: bool) -> None:
    try:
        watcher.redeliver(is_eager=is_eager)
    except Exception:
        # A body may await an object whose `cancel` raises: its problem, not that of the
        # others, and no reason for the rounds to stop.
        _log.exception("a redelivery into the event loop failed")


_deliveries: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDelivery] = weakref.WeakKeyDictionary()
