"""Reading events that an older version has written: one step for each version of their encoding.

A journal never rewrites what it holds. Whoever reads it lifts each event, one
version after the other, to the encoding of `EVENTS_VERSION`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from remit.core.errors import JournalTooNew
from remit.core.events import EVENTS_VERSION, Event, decode_event

__all__ = ["STEPS", "Step", "read_event"]

Step: TypeAlias = Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]] | None]
"""Takes kind and data of one version, returns those of the next, or None for an event that is no more.

It may change the mapping that it was given."""

STEPS: dict[int, Step] = {}
"""Version -> the step that leads from it to the next one. Complete below `EVENTS_VERSION`, kept for ever."""


def read_event(
    kind: str,
    node_id: str,
    turn_id: str,
    data: Mapping[str, Any],
    version: int,
    *,
    steps: Mapping[int, Step] = STEPS,
    current: int = EVENTS_VERSION,
) -> Event | None:
    """Return an event as this version understands it.

    Args:
        kind: as it was written.
        node_id: the turn or run that it is about.
        turn_id: the turn whose tree that is in.
        data: as it was written; not changed.
        version: of the encoding in which it was written.
        steps: how to come from each version to the next.
        current: the version to arrive at.

    Returns:
        The event, or None for one that means nothing any more.

    Raises:
        JournalTooNew: its version, kind or a field of it is newer than `current`.
    """
    if version > current:
        raise JournalTooNew(
            f"a {kind!r} event of {node_id!r} has version {version}, this one knows events up to {current}; "
            "install the newer remit that wrote it"
        )
    if version < current:
        values = dict(data)
        for each in range(version, current):
            stepped = steps[each](kind, values)
            if stepped is None:
                return None
            kind, values = stepped
        data = values
    return decode_event(kind, node_id, turn_id, data)
