"""How a body takes its cancel: when it is told, what it is at, when it notices.

The innermost of our waits that is unwound by a cancel names what the body was at. So
nothing is done while nothing is cancelled but to enter and leave a block.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from types import TracebackType

from remit.core.errors import TurnCancelled
from remit.core.messages import BodyTiming
from remit.core.signal import CancelSignal
from remit.telemetry.names import ObservedAt

__all__ = ["BodyWatch", "current_watch", "waiting_at"]

current_watch: contextvars.ContextVar[BodyWatch | None] = contextvars.ContextVar("remit_body_watch", default=None)
"""The watch of the running body; set around each body, inherited by its tasks and threads."""


class BodyWatch:
    """Notes of one body, from its beginning to its end.

    Args:
        signal: what the body is stopped by.
    """

    __slots__ = ("_began", "_began_at", "_noted", "_signal", "_where")

    def __init__(self, signal: CancelSignal) -> None:
        self._signal = signal
        self._began_at = time.time()
        self._began = time.monotonic()
        self._where = ObservedAt.CHECKPOINT
        self._noted: float | None = None

    def note(self, where: ObservedAt) -> None:
        """Note what the body was at when the cancel unwound it; the first word stands."""
        if self._noted is None and self._signal.is_set:
            self._noted = time.monotonic()
            self._where = where

    def timing(self, told: float | None, struck: float | None) -> BodyTiming:
        """Return the notes of a body that has just ended.

        Args:
            told: when its signal was set, by the monotonic clock; None if it was not.
            struck: when its task was cancelled, which is when an `async` body notices;
                None for a plain one, whose first unwound wait, or end, counts.
        """
        began = self._began
        ended = time.monotonic()
        if told is None:
            return BodyTiming(self._began_at, ended - began)
        noticed = struck if struck is not None else self._noted if self._noted is not None else ended
        return BodyTiming(
            self._began_at,
            ended - began,
            told_s=max(0.0, told - began),
            observed_s=max(0.0, noticed - began),
            where=self._where.value,
        )


class waiting_at:  # used as a statement, like a function
    """Mark what a body is waiting for: `with waiting_at(ObservedAt.PROVIDER_STREAM): ...`.

    For whoever adds a kind of wait (a provider, an approval): a cancel that unwinds
    the block is told as observed there. Outside a body it does nothing.

    Args:
        where: what is waited for.
        watch: the body's notes; those of the running body by default.
    """

    __slots__ = ("_watch", "_where")

    def __init__(self, where: ObservedAt, watch: BodyWatch | None = None) -> None:
        self._where = where
        self._watch = watch

    def __enter__(self) -> None:
        """Begin to wait."""
        if self._watch is None:
            self._watch = current_watch.get()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note a cancel that unwinds the block; whatever it is passes."""
        if self._watch is not None and isinstance(error, (TurnCancelled, asyncio.CancelledError)):
            self._watch.note(self._where)
