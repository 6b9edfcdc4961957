"""Looking at a workspace without Ray: views folded from its journal."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from remit.coordinator.api import resolve_workspace
from remit.coordinator.life import fold, journal_path
from remit.coordinator.state import Node, WorkspaceState
from remit.core.errors import NotFound
from remit.journal import JournalReader, SqliteJournalReader

__all__ = ["Records", "opened"]


@dataclass(slots=True)
class Records:
    """What a workspace's journal says, as of now."""

    workspace: str
    """Absolute path of the workspace."""
    state: WorkspaceState
    """The folded state; empty where nothing has ever run."""
    reader: JournalReader | None
    """For payloads; None where nothing has ever run."""
    is_live: bool
    """Whether a coordinator is at work on it."""
    now: float
    """Wall time of the reading, in seconds since 1970."""

    def find(self, text: str) -> Node:
        """Return the turn or run that an id, or a unique part of one, means.

        Raises:
            NotFound: none or several match.
        """
        nodes = self.state.nodes
        if text in nodes:
            return nodes[text]
        found = [node for name, node in nodes.items() if name.endswith(text) or name.startswith(text)]
        found = found or [node for node in nodes.values() if node.name and node.name == text]
        if len(found) == 1:
            return found[0]
        if not found:
            raise NotFound(f"no turn or run {text!r} in {self.workspace}; `remit ps --all` lists them")
        names = ", ".join(node.id for node in found[:5])
        raise NotFound(f"{text!r} may mean {len(found)} turns or runs ({names}, ...); give more of the id")

    def latest_turn(self) -> Node:
        """Return the turn that was accepted last.

        Raises:
            NotFound: nothing has ever run here.
        """
        turns = list(self.state.turns.values())
        if not turns:
            raise NotFound(f"nothing has run in {self.workspace} yet")
        return turns[-1]

    def payload(self, node_id: str) -> bytes | None:
        """Return the stored result or partial result of a run, or None."""
        kind = "turn_ended" if node_id in self.state.turns else "run_ended"
        return None if self.reader is None else self.reader.payload(node_id, kind)


@contextmanager
def opened(workspace: str | Path) -> Generator[Records]:
    """Read a workspace's journal for the time of a block; nothing is started.

    Raises:
        InvalidArgument: no such workspace.
        JournalError: the journal cannot be read.
    """
    root = resolve_workspace(workspace)
    path = journal_path(root)
    if not path.exists():
        yield Records(root, WorkspaceState(), None, False, time.time())
        return
    reader = SqliteJournalReader.open(path)
    try:
        yield Records(root, fold(reader), reader, reader.writer_alive(), time.time())
    finally:
        reader.close()
