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
5. A shield holds back every scope around it, also one of the task that awaits the
   shielded one: a cancel of a task goes on into whatever the task awaits.

Source: structured after the run cancellation of pydantic-ai and the level-triggered
scopes of trio and anyio (see docs/decisions).
"""

from __future__ import annotations

import asyncio
import contextvars
import time
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
        "_outer",
        "_registration",
        "_shields",
        "_struck",
        "signal",
        "struck_at",
        "task",
        "told_at",
    )

    def __init__(self, signal: CancelSignal, *, task: asyncio.Task[Any] | None = None) -> None:
        self.signal = signal
        """The signal that is delivered."""
        self.task = task
        """The task that it is delivered to; set by `enter`."""
        self.told_at: float | None = None
        """When the signal was set, on the monotonic clock; None while it is not, or if that came after `exit`."""
        self.struck_at: float | None = None
        """When the task was first cancelled by this scope, on the same clock."""
        self._active = False
        self._base = 0
        self._issued = 0
        self._delivery: LoopDelivery | None = None
        self._outer: TaskScope | None = None
        self._registration: Registration | None = None
        # Loop times at which the shields end that are held now; of several tasks, maybe.
        self._shields: list[float] = []
        self._struck: object = None

    def enter(self) -> None:
        """Begin to deliver; a signal that is set already strikes at the first wait.

        Raises:
            InternalError: there is no task, or the scope was entered before.
        """
        task = self.task or asyncio.current_task()
        if task is None or self._delivery is not None:
            raise InternalError("a task scope is entered once, inside a task")
        self.task = task
        # A cancel that was asked for before and has not struck yet is foreign, and will
        # strike inside. asyncio has no public name for "not yet".
        is_pending = bool(getattr(task, "_must_cancel", False))
        self._base = max(0, task.cancelling() - is_pending)
        self._active = True
        self._delivery = LoopDelivery.of_loop(asyncio.get_running_loop())
        self._outer = _current.get()
        _current.set(self)
        self._registration = self.signal.add_callback(self._on_set)

    def exit(self, error: BaseException | None) -> ScopeVerdict:
        """Stop delivering, take back what was issued, and say whose cancel it was.

        Args:
            error: what came out of the body, or None.
        """
        issued = self.leave()
        task = self.task
        assert task is not None
        unwound = isinstance(error, asyncio.CancelledError)
        # Under a set signal it is ours even before our own delivery: something that the
        # body awaited was stopped by the same signal first.
        foreign = unwound and (not self.signal.is_set or task.cancelling() > self._base)
        ours = unwound and not foreign
        return ScopeVerdict(ours, foreign, issued > 0 and not unwound)

    def leave(self) -> int:
        """Stop delivering, take back what was issued, and return how many cancels that were."""
        task, delivery = self.task, self._delivery
        if task is None or delivery is None or not self._active:
            raise InternalError("a task scope is left once, after it was entered")
        self._active = False
        if self.signal.is_set:
            # All below a signal is marked before anybody is called: a body that looks may be out before its call.
            self._note_told()
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        delivery.forget(self)
        self._struck = None
        # Not by a token: set-up and clean-up of a fixture may run in two contexts.
        _current.set(self._outer)
        issued, self._issued = self._issued, 0
        for _ in range(issued):
            task.uncancel()
        return issued

    @property
    def is_shielded(self) -> bool:
        """Whether a shield holds back delivery at this moment; asked in the loop's thread."""
        return self._is_shielded()

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
        if self._active:
            self._note_told()
        if delivery is not None:
            delivery.post(self._deliver)

    def _note_told(self) -> None:
        if self.told_at is None:
            self.told_at = time.monotonic()

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
        if self._is_shielded() or getattr(task, "_must_cancel", False):
            return
        # asyncio has no public name for what a task waits for. None: it only let others run.
        waits_for = getattr(task, "_fut_waiter", None)
        if is_eager and waits_for is not None and (waits_for is self._struck or waits_for.done()):
            # Either what it awaits has been told and may still be cleaning up, or it is
            # about to go on with a result; the timer comes by again.
            return
        self._cancel_task()

    def _cancel_task(self) -> None:
        assert self.task is not None
        self._issued += 1
        if self.struck_at is None:
            self.struck_at = time.monotonic()
        self._struck = getattr(self.task, "_fut_waiter", None)
        self.task.cancel()

    def _is_shielded(self) -> bool:
        if not self._shields:
            return False
        return asyncio.get_running_loop().time() < max(self._shields)

    def shield(self, until: float) -> None:
        """Pause delivery, here and in the scopes around, until a loop time or `unshield`."""
        for scope in self._in_this_loop():
            scope._shields.append(until)
            scope._look_again()

    def unshield(self, until: float) -> None:
        """Take back one `shield` of the same time."""
        for scope in self._in_this_loop():
            scope._shields.remove(until)
            scope._look_again()

    def _in_this_loop(self) -> list[TaskScope]:
        """Return this scope and those around it, save those of another thread's loop."""
        delivery = LoopDelivery.of_loop(asyncio.get_running_loop())
        found: list[TaskScope] = []
        scope: TaskScope | None = self
        while scope is not None:
            if scope._delivery is delivery:
                found.append(scope)
            scope = scope._outer
        return found

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
    middle of the block. Outside a scope it does nothing. In a task that a body
    made, it holds back the cancel of the body too, for it would go on into
    whatever the body awaits.

    Args:
        timeout_s: seconds, more than 0. A shield without a deadline is not possible.

    Raises:
        InvalidArgument: `timeout_s` is not a positive, finite number.
    """
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgument(f"a shield needs a time in seconds, not {timeout_s!r}")
    scope = current_scope()
    if scope is None:
        yield
        return
    until = asyncio.get_running_loop().time() + timeout_s
    scope.shield(until)
    try:
        yield
    finally:
        scope.unshield(until)
