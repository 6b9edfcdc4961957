"""From the journal to states: of a whole workspace, and of one turn that has left memory."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from remit.coordinator.evolve import evolve
from remit.coordinator.snapshot import decode
from remit.coordinator.state import Node, WorkspaceState
from remit.core.errors import JournalError
from remit.core.events import ClaimChanged, CoordinatorStarted
from remit.core.migrations import read_event
from remit.journal import JournalReader, StoredRecord

__all__ = ["Folded", "fold_journal", "past_node", "past_turn"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Folded:
    """A workspace as its journal tells it."""

    state: WorkspaceState
    tail: int
    """Records that were folded, those in the snapshot not counted."""


def fold_journal(reader: JournalReader) -> Folded:
    """Return the state that a journal leads to: its latest snapshot, and the events behind it.

    Raises:
        JournalTooNew: it holds what only a newer version can read.
        JournalError: it cannot be read.
    """
    for _ in range(_TRIES):
        with _no_collection():
            snapshot = reader.snapshot()
            state = WorkspaceState() if snapshot is None else decode(snapshot.data)
            begin = 0 if snapshot is None else snapshot.seq
            tail = _apply(state, reader.read(after_seq=begin))
        # Retention may have taken away what we were about to read: up to a newer snapshot, which is there then.
        if reader.base() <= begin:
            return Folded(state, tail)
    raise JournalError("the journal misses its beginning and has no snapshot of it; restore it from a copy")


def past_turn(reader: JournalReader, turn_id: str) -> WorkspaceState:
    """Return a state of one turn alone, from its events; empty if there is no such turn.

    Claims are left out: they belong to the table of the whole workspace.

    Raises:
        JournalTooNew: it holds what only a newer version can read.
        JournalError: the journal cannot be read.
    """
    state = WorkspaceState()
    with _no_collection():
        _apply(state, reader.read(turn_id=turn_id), without=(ClaimChanged, CoordinatorStarted))
    return state


def past_node(reader: JournalReader, node_id: str) -> tuple[WorkspaceState, Node] | None:
    """Return an ended turn or run with the state of its turn, or None if the journal does not know it.

    Args:
        reader: of the journal.
        node_id: the whole id.

    Raises:
        JournalTooNew: it holds what only a newer version can read.
        JournalError: the journal cannot be read.
    """
    for found, turn_id in reader.find_ended(node_id, limit=1):
        if found == node_id:
            state = past_turn(reader, turn_id)
            node = state.nodes.get(node_id)
            return None if node is None else (state, node)
    return None


@contextmanager
def _no_collection() -> Generator[None]:
    """Keep the garbage collector away: a fold makes many objects and keeps them all, so it would find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _apply(state: WorkspaceState, records: Iterable[StoredRecord], *, without: tuple[type, ...] = ()) -> int:
    """Fold records into a state; return how many there were."""
    count = 0
    for record in records:
        count += 1
        event = read_event(record.kind, record.node_id, record.turn_id, record.data, record.version)
        if event is not None and not isinstance(event, without):
            evolve(state, event)
    return count
