"""Looking at a workspace without Ray: views folded from its journal."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from remit.coordinator.folding import fold_journal, past_turn
from remit.coordinator.state import Node, WorkspaceState
from remit.coordinator.workspace import resolve_workspace
from remit.core.errors import NotFound
from remit.journal import JournalReader, journal_exists, journal_location, open_reader

__all__ = ["Records", "opened"]


@dataclass(slots=True)
class Records:
    """What a workspace's journal says, as of now."""

    workspace: str
    """Absolute path of the workspace."""
    state: WorkspaceState
    """What is live and recent; empty where nothing has ever run."""
    reader: JournalReader | None
    """For payloads; None where nothing has ever run."""
    is_live: bool
    """Whether a coordinator is at work on it."""
    now: float
    """Wall time of the reading, in seconds since 1970."""
    past: dict[str, WorkspaceState] = field(default_factory=dict[str, WorkspaceState])
    """Turns that are neither and were read from their own events."""

    def find(self, text: str) -> Node:
        """Return the turn or run that an id, or a unique part of one, means.

        What is neither live nor recent is found by its id, or a part of it, and not by its name.

        Raises:
            NotFound: none or several match.
            JournalError: the journal cannot be read.
        """
        nodes = self.state.nodes
        if not text:  # it is a part of every id
            raise NotFound("the id is empty; name a turn or run, `remit ps --all` lists them")
        if text in nodes:
            return nodes[text]
        older = [] if self.reader is None or not text.isascii() else self.reader.find_ended(text, limit=6)
        if older and older[0][0] == text:
            return self._past(*older[0])[0]
        found = [node for name, node in nodes.items() if name.endswith(text) or name.startswith(text)]
        # A name says more than a part of an id that somebody may have had long ago.
        named = [] if found else [node for node in nodes.values() if node.name and node.name == text]
        found = named or found + [n for name, turn in older if name not in nodes for n in self._past(name, turn)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise NotFound(f"no turn or run {text!r} in {self.workspace}; `remit ps --all` lists them")
        names = ", ".join(node.id for node in found[:5])
        raise NotFound(f"{text!r} may mean {len(found)} turns or runs ({names}, ...); give more of the id")

    def state_of(self, node: Node) -> WorkspaceState:
        """Return the state that a node which was found is in."""
        return self.past.get(node.turn_id, self.state)

    def older_turn(self, turn_id: str) -> Node | None:
        """Return an ended turn from its own events, or None if retention has just taken it away.

        Raises:
            JournalError: the journal cannot be read.
        """
        return next(iter(self._past(turn_id, turn_id)), None)

    def ended_turns(self) -> list[str]:
        """Return the ids of all turns that have ended, the latest end first.

        Raises:
            JournalError: the journal cannot be read.
        """
        return [] if self.reader is None else self.reader.ended_turns()

    def _past(self, node_id: str, turn_id: str) -> list[Node]:
        if turn_id not in self.past and self.reader is not None:
            self.past[turn_id] = past_turn(self.reader, turn_id)
        node = self.past[turn_id].nodes.get(node_id) if turn_id in self.past else None
        return [] if node is None else [node]

    def latest_turn(self) -> Node:
        """Return the turn that was accepted last.

        Raises:
            NotFound: nothing has ever run here.
        """
        for turn in reversed(self.state.turns.values()):
            return turn
        for turn_id in self.ended_turns():
            older = self.older_turn(turn_id)
            if older is not None:
                return older
        raise NotFound(f"nothing has run in {self.workspace} yet")

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
    location = journal_location(root)
    if not journal_exists(location):
        yield Records(root, WorkspaceState(), None, False, time.time())
        return
    reader = open_reader(location)
    try:
        yield Records(root, fold_journal(reader).state, reader, reader.writer_alive(), time.time())
    finally:
        reader.close()
