"""Spans wait while a cancel is under way: making them would take the interpreter from what sees it through."""

from __future__ import annotations

from collections.abc import Sequence

from remit.core.events import CancelQuiet, CancelRequested, Event

__all__ = ["HOLD_S", "Patience"]

HOLD_S = 1.0
"""How long is waited for one cancel. Spans of one that takes longer are made meanwhile."""


class Patience:
    """Knows which cancels are not quiet yet. One thread looks at events, another one asks.

    Args:
        hold_s: seconds from the acceptance of a cancel for which it is waited for.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._under_way: dict[tuple[str, str], float] = {}
        """Until when is waited for each, by its request and its target."""

    def look(self, events: Sequence[tuple[Event, bytes | None]], now: float) -> None:
        """Note cancels that begin or are quiet; `now` is in seconds, on any clock that only goes on."""
        kinds = {type(event) for event, _ in events}  # most decisions have thousands of others, and none of these
        if CancelRequested in kinds:
            self._under_way = {key: limit for key, limit in self._under_way.items() if limit > now}
        elif CancelQuiet not in kinds:
            return
        for event, _ in events:
            if isinstance(event, CancelRequested):
                self._under_way[event.request_id, event.node_id] = now + self._hold_s
            elif isinstance(event, CancelQuiet):
                self._under_way.pop((event.request_id, event.node_id), None)

    def left_s(self, now: float) -> float:
        """Return for how many seconds spans should still wait; 0 where nothing is under way."""
        return max(0.0, max(list(self._under_way.values()), default=now) - now)
