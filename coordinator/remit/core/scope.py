"""A cancel scope: delivers a signal to one asyncio task, and tells its cancels from others'.

**Invariants**

1. Delivery is level-triggered: while the signal is set, the task is cancelled
   again at each wait it begins, unless it is shielded.
2. Every `Task.cancel()` that we issue is counted and taken back (`uncancel`) on
   every way out, so that `asyncio.timeout` and task groups keep their meaning.
3. What remains of `Task.cancelling()` beyond our count is somebody else's: then
   the `CancelledError` propagates untouched.
4. We cancel from callbacks of the loop only, never from inside the task, so no
   cancel of ours is left pending after the scope.

Source: structured after the run cancellation of pydantic-ai and the level-triggered
scopes of trio and anyio (see docs/decisions).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from remit.core.cause import Cause
from remit.core.delivery import LoopDelivery
from remit.core.errors import InternalError, InvalidArgument, TurnCancelled
from remit.core.signal import CancelSignal, Registration

__all__ = ["ScopeVerdict", "TaskScope", "current_scope", "shielded"]


@dataclass(frozen=True, slots=True)
class ScopeVerdict:
    """How a scope's body ended, seen from its edge."""

    is_ours: bool
    """It unwound by a cancel that this scope delivered."""
    is_foreign: bool
    """It unwound by somebody else's cancel, which must propagate."""
    was_swallowed: bool
    """A cancel was delivered and the body ended in some other way."""


@final
class TaskScope:
    """Holds one task under one signal, from `enter` to `exit`.

    As a context manager it raises `TurnCancelled` where the body unwound by our
    cancel, or ended in spite of it.

    Args:
        signal: what stops the task.
        task: the task; the current one by default.
    """

    __slots__ = (
        "_active",
        "_base",
        "_delivery",
        "_issued",
        "_registration",
        "_shield_until",
        "_token",
        "signal",
        "task",
    )

    def __init__(self, signal: CancelSignal, *, task: asyncio.Task[Any] | None = None) -> None:
        self.signal = signal
        """The signal that is delivered."""
        self.task = task
        """The task that it is delivered to; set by `enter`."""
        self._active = False
        self._base = 0
        self._issued = 0
        self._shield_until: float | None = None
        self._delivery: LoopDelivery | None = None
        self._registration: Registration | None = None
        self._token: contextvars.Token[TaskScope | None] | None = None

    def enter(self) -> None:
        """Begin to deliver; a signal that is set already strikes at the first wait.

        Raises:
            InternalError: there is no task, or the scope was entered before.
        """
        task = self.task or asyncio.current_task()
        if task is None or self._delivery is not None:
            raise InternalError("a task scope is entered once, inside a task")
        self.task = task
        self._base = task.cancelling()
        self._active = True
        self._delivery = LoopDelivery.of_loop(asyncio.get_running_loop())
        self._token = _current.set(self)
        self._registration = self.signal.add_callback(self._on_set)

    def exit(self, error: BaseException | None) -> ScopeVerdict:
        """Stop delivering, take back what was issued, and say whose cancel it was.

        Args:
            error: what came out of the body, or None.
        """
        task, delivery = self.task, self._delivery
        if task is None or delivery is None or not self._active:
            raise InternalError("a task scope is left once, after it was entered")
        self._active = False
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        delivery.forget(self)
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        issued, self._issued = self._issued, 0
        for _ in range(issued):
            task.uncancel()
        unwound = isinstance(error, asyncio.CancelledError)
        foreign = unwound and (issued == 0 or task.cancelling() > self._base)
        ours = unwound and not foreign
        return ScopeVerdict(ours, foreign, issued > 0 and not unwound)

    def owns_cancellation(self) -> bool:
        """Tell whether every cancel that the task has pending is ours."""
        task = self.task
        if task is None or self._issued == 0:
            return False
        return task.cancelling() - self._base <= self._issued

    def __enter__(self) -> TaskScope:
        """Begin to deliver to the current task."""
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise `TurnCancelled` if the body was stopped by, or ended in spite of, the signal."""
        verdict = self.exit(error)
        ended_in_spite = error is None and self.signal.is_set
        if verdict.is_ours or ended_in_spite:
            raise TurnCancelled(self.signal.cause, node_id=self.signal.name) from None

    # -- delivery, in the loop's thread --------------------------------------------

    def _on_set(self, _: Cause) -> None:
        delivery = self._delivery
        if delivery is not None:
            delivery.post(self._deliver)

    def _deliver(self) -> None:
        """Cancel the task for the first time, and look after it from then on."""
        if not self._active or self._delivery is None:
            return
        if not self._is_shielded():
            self._cancel_task()
        self._delivery.watch(self)

    def redeliver(self, *, is_eager: bool) -> None:
        """Cancel the task again if it waits in spite of the signal (called by the delivery)."""
        task, delivery = self.task, self._delivery
        if not self._active or task is None or delivery is None or task.done():
            if delivery is not None:
                delivery.forget(self)
            return
        # A task without a future that it waits for is about to run: what it got
        # before has not reached it yet. asyncio has no public name for this.
        waits_for = getattr(task, "_fut_waiter", None)
        if waits_for is not None and not waits_for.done() and not self._is_shielded():
            self._cancel_task()

    def _cancel_task(self) -> None:
        assert self.task is not None
        self._issued += 1
        self.task.cancel()

    def _is_shielded(self) -> bool:
        if self._shield_until is None:
            return False
        return asyncio.get_running_loop().time() < self._shield_until

    def shield(self, until: float) -> float | None:
        """Pause delivery until a loop time, or an earlier one that holds already.

        Returns:
            What held before, for `unshield`.
        """
        before = self._shield_until
        self._shield_until = until if before is None else min(until, before)
        self._look_again()
        return before

    def unshield(self, before: float | None) -> None:
        """Go back to what held before a `shield`."""
        self._shield_until = before
        self._look_again()

    def _look_again(self) -> None:
        """Let a signal that is set be delivered once nothing shields the task."""
        if self._active and self.signal.is_set and self._delivery is not None:
            self._delivery.watch(self)


_current: contextvars.ContextVar[TaskScope | None] = contextvars.ContextVar("remit_task_scope", default=None)


def current_scope() -> TaskScope | None:
    """Return the innermost scope of this context, which may be another task's."""
    return _current.get()


@asynccontextmanager
async def shielded(timeout_s: float) -> AsyncGenerator[None]:
    """Protect clean-up in the current task from our cancels, for a bounded time.

    Cancels of others still land. When the time is over, delivery resumes in the
    middle of the block. Outside a scope it does nothing.

    Args:
        timeout_s: seconds, more than 0. A shield without a deadline is not possible.

    Raises:
        InvalidArgument: `timeout_s` is not a positive, finite number.
    """
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgument(f"a shield needs a time in seconds, not {timeout_s!r}")
    scope = current_scope()
    if scope is None or scope.task is not asyncio.current_task():
        yield
        return
    until = asyncio.get_running_loop().time() + timeout_s
    before = scope.shield(until)
    try:
        yield
    finally:
        scope.unshield(before)
