"""Keeping a workspace small: what ended long ago goes, with its output; what is live never does."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from remit.coordinator.folding import fold_journal
from remit.coordinator.snapshot import decode, encode, freeze
from remit.coordinator.state import WorkspaceState
from remit.core.errors import InvalidArgument, JournalBusy
from remit.journal import JournalReader, journal_exists, journal_location, open_journal, open_reader
from remit.journal.retention import OldTurn, old_turns, remove_turns

__all__ = ["Collected", "collect", "forget_turns"]

_PLAIN_NAME = re.compile(r"(?:run|turn)_[A-Za-z0-9_-]{1,80}")


@dataclass(slots=True)
class Collected:
    """What retention has taken away, or would."""

    turns: list[str] = field(default_factory=list[str])
    """Ids of the turns, oldest first."""
    runs: int = 0
    """Runs of these turns."""
    records: int = 0
    """Records in the journal."""
    output_bytes: int = 0
    """Size of what these runs had written to files."""
    held: int = 0
    """Turns that are old enough, and that a coordinator at work still holds in memory."""


def collect(workspace: str, *, older_than_s: float, now: float, dry_run: bool = False) -> Collected:
    """Remove the turns that ended before a time, with their runs, results and output files.

    What has not ended stays, and so does a turn below which a detached run lives or
    whose claims are quarantined. Beside a coordinator at work only that goes which it
    has let go from memory, an hour after its end at the latest. Without one the journal
    is owned for the time of a fold, and a coordinator that starts then is refused.

    Args:
        workspace: absolute path.
        older_than_s: least age of an end, in seconds.
        now: in seconds since 1970.
        dry_run: change nothing, and say what would go.

    Raises:
        InvalidArgument: the age is below zero.
        JournalError: the journal cannot be read or written.

    Durability: on return it is gone for good. Stopped half-way it has removed some
        turns; calling it again removes the rest.
    """
    if older_than_s < 0:
        raise InvalidArgument(f"an age must not be negative, got {older_than_s} s")
    location = journal_location(workspace)
    found = Collected()
    if not journal_exists(location):
        return found
    before = now - older_than_s
    before_ms = int(before * 1000)
    state, is_live = _settle(location, before, dry_run=dry_run)
    keep = state.nodes.keys()
    if is_live:
        found.held = sum(turn.ended_at is not None and turn.ended_at < before for turn in state.turns.values())
    turns = old_turns(location, ended_before_unix_ms=before_ms, keep=keep, whole=dry_run and not is_live)
    output = Path(workspace) / ".remit" / "output"

    def each(turn: OldTurn) -> None:
        found.turns.append(turn.turn_id)
        found.runs += len(turn.runs)
        found.records += turn.records
        # Files first: what is gone from the journal could not be found again.
        for name in (turn.turn_id, *turn.runs):
            found.output_bytes += _remove_output(output, name, dry_run=dry_run)

    if dry_run:
        for turn in turns:
            each(turn)
    else:
        found.records = remove_turns(location, turns, ended_before_unix_ms=before_ms, each=each)
    return found


def _settle(location: Path | str, before: float, *, dry_run: bool) -> tuple[WorkspaceState, bool]:
    """Return the state that the latest snapshot has, and whether a coordinator is at work.

    Where none is, a snapshot is kept first that has nothing old in it.
    """
    with closing(open_reader(location)) as reader:
        if reader.writer_alive():
            return _in_snapshot(reader), True
        if dry_run:
            state = fold_journal(reader).state
            forget_turns(state, before)
            return state, False
    try:
        journal = open_journal(location)
    except JournalBusy:  # it has come in between
        with closing(open_reader(location)) as reader:
            return _in_snapshot(reader), True
    with closing(journal), closing(journal.reader()) as reader:
        state = fold_journal(reader).state
        forget_turns(state, before)
        seq = journal.append(()).result()
        if seq:
            journal.save_snapshot(seq, encode(freeze(state))).result()
        return state, False


def _in_snapshot(reader: JournalReader) -> WorkspaceState:
    snapshot = reader.snapshot()
    return WorkspaceState() if snapshot is None else decode(snapshot.data)


def forget_turns(state: WorkspaceState, before: float) -> list[str]:
    """Take turns out of a state of which everything ended before a time; return the ids of all that went.

    A turn stays while anything of it lives, or its claims are quarantined.

    Args:
        state: changed in place.
        before: in seconds since 1970.
    """
    stays = {node.turn_id for node in state.nodes.values() if node.ended_at is None or node.ended_at >= before}
    stays |= {state.nodes[name].turn_id for name in state.locks.owners() if name in state.nodes}
    gone = [name for name, node in state.nodes.items() if node.turn_id not in stays]
    for name in gone:
        del state.nodes[name]
        state.turns.pop(name, None)
    state.cancels = {name: each for name, each in state.cancels.items() if each.targets[-1] in state.nodes}
    return gone


def _remove_output(folder: Path, name: str, *, dry_run: bool) -> int:
    """Remove what a turn or run has written; return its size in bytes."""
    # The name comes from a database: it must not lead anywhere else.
    if not _PLAIN_NAME.fullmatch(name):
        return 0
    own = folder / name
    if own.is_symlink() or not own.is_dir():
        return 0
    size = sum(path.lstat().st_size for path in own.rglob("*") if path.is_file() and not path.is_symlink())
    if not dry_run:
        shutil.rmtree(own, ignore_errors=True)
    return size
