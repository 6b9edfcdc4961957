"""How a run or a turn ended: a closed set of words."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Outcome"]


class Outcome(StrEnum):
    """The closed set of endings; exactly one of them for each run and turn."""

    SUCCEEDED = "succeeded"
    """The body returned, and this was recorded before any stop was asked for."""
    FAILED = "failed"
    """The body raised, or could not be started."""
    CANCELLED = "cancelled"
    """A stop was recorded before the body's end was."""
    TIMED_OUT = "timed_out"
    """Its own deadline expired. What it takes down with it is `cancelled`."""
    LOST = "lost"
    """Its host vanished and nobody had asked for a stop: what it did is not known."""
