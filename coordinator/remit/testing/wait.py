"""The one place that polls: wait until something is true, with a limit and a message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["await_until", "wait_until"]

_PAUSE_S = 0.005


def wait_until(predicate: Callable[[], object], *, timeout_s: float = 10.0, message: str = "") -> None:
    """Return once the predicate is true.

    Args:
        predicate: looked at every five milliseconds.
        timeout_s: seconds until the wait fails.
        message: what was waited for, for the error.

    Raises:
        AssertionError: the time is up.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not true after {timeout_s:g} s: {message or predicate}")
        time.sleep(_PAUSE_S)


async def await_until(predicate: Callable[[], object], *, timeout_s: float = 10.0, message: str = "") -> None:
    """Return once the predicate is true, letting other tasks run; see `wait_until`.

    Raises:
        AssertionError: the time is up.

    Cancellation:
        A checkpoint at each look. Nothing is left behind.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not true after {timeout_s:g} s: {message or predicate}")
        await asyncio.sleep(_PAUSE_S)
