"""Taking old turns out of a journal, whole, and never what a snapshot still knows.

Safe beside a writer: only rows up to the latest snapshot go, of turns that are not
in it any more, so no fold can miss them. `base` says so in the same transaction
as the first of them goes. A transaction is short; a writer waits for milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remit.core.errors import JournalError
from remit.journal.connection import Connection
from remit.journal.location import is_url
from remit.journal.schema import SqliteConnection, connect_reader, connect_writer, translate

if TYPE_CHECKING:
    from remit.journal.postgres import PostgresConnection

__all__ = ["OldTurn", "old_turns", "remove_turns"]

_TURNS_AT_ONCE = 20
_FREE_PAGES_AT_ONCE = 2_000


@dataclass(frozen=True, slots=True)
class OldTurn:
    """A turn that may go."""

    turn_id: str
    runs: tuple[str, ...]
    """Ids of its runs."""
    records: int
    """Rows that it has."""


def old_turns(
    location: Path | str, *, ended_before_unix_ms: int, keep: Collection[str], whole: bool = False
) -> list[OldTurn]:
    """Return the turns of which everything ended before a time, oldest first.

    Args:
        location: path or URL of a journal that is there.
        ended_before_unix_ms: in milliseconds since 1970.
        keep: ids of turns and runs that stay, because the latest snapshot has them.
        whole: look at all records, as if there were a snapshot of this moment.

    Raises:
        JournalError: the journal cannot be read.
    """
    with closing(_connect(location, reads=True)) as connection:
        try:
            last = 2**62 if whole else connection.query("SELECT coalesce(max(seq), 0) FROM snapshots")[0][0]
            return list(_old_turns(connection, ended_before_unix_ms, keep, last))
        except Exception as error:  # each database has its own tree of errors; all become ours
            raise connection.explain(error, doing="read") from error


def _old_turns(connection: Connection, before: int, keep: Collection[str], last: int) -> Iterator[OldTurn]:
    found = connection.query(
        "SELECT node_id FROM events WHERE terminal = 1 AND node_id = turn_id"
        " AND seq <= ? AND at_unix_ms < ? ORDER BY seq",
        last,
        before,
    )
    for (turn_id,) in found:
        if turn_id in keep:
            continue
        ends = connection.query(
            "SELECT node_id, at_unix_ms, seq FROM events WHERE turn_id = ? AND terminal = 1", turn_id
        )
        # A detached run may have ended long after its turn.
        if any(at >= before or seq > last or node_id in keep for node_id, at, seq in ends):
            continue
        count = connection.query("SELECT count(*) FROM events WHERE turn_id = ? AND seq <= ?", turn_id, last)[0][0]
        yield OldTurn(turn_id, tuple(row[0] for row in ends if row[0] != turn_id), count)


def remove_turns(
    location: Path | str,
    turns: Collection[OldTurn],
    *,
    ended_before_unix_ms: int,
    each: Callable[[OldTurn], None],
) -> int:
    """Take turns out of a journal, and what happened to hosts and coordinators before that time.

    Stopped half-way it has removed some of them, each one whole or by a part of
    its records that nobody reads; calling it again removes the rest.

    Args:
        location: path or URL of the journal.
        turns: what `old_turns` has returned.
        ended_before_unix_ms: as for `old_turns`.
        each: called before a turn goes, to remove what belongs to it elsewhere.

    Returns:
        How many records there were.

    Raises:
        JournalError: the journal cannot be written.

    Durability: on return they are gone for good. The file gets smaller where it was
        made by format 2; otherwise its room is used again.
    """
    with closing(_connect(location)) as connection:
        try:
            return _remove(connection, list(turns), ended_before_unix_ms, each)
        except Exception as error:  # as above
            raise connection.explain(error, doing="write") from error


def _remove(connection: Connection, turns: list[OldTurn], before: int, each: Callable[[OldTurn], None]) -> int:
    removed = 0
    last = connection.query("SELECT coalesce(max(seq), 0) FROM snapshots")[0][0]
    if not last:
        return 0
    for at in range(0, len(turns) + 1, _TURNS_AT_ONCE):
        group = turns[at : at + _TURNS_AT_ONCE]
        for turn in group:
            each(turn)
        connection.begin()
        connection.query(
            "INSERT INTO meta (name, value) VALUES ('base', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            str(last),
        )
        for turn in group:
            connection.query("DELETE FROM events WHERE turn_id = ? AND seq <= ?", turn.turn_id, last)
            removed += turn.records
        if at == 0:
            own = "turn_id = '' AND seq <= ? AND at_unix_ms < ?"
            removed += connection.query(f"SELECT count(*) FROM events WHERE {own}", last, before)[0][0]
            connection.query(f"DELETE FROM events WHERE {own}", last, before)
        connection.commit()
    _give_back(connection)
    return removed


def _give_back(connection: Connection) -> None:
    """Return the room of what is gone to the file system, a little at a time."""
    if not isinstance(connection, SqliteConnection):
        return  # PostgreSQL does so by itself
    while (free := connection.query("PRAGMA freelist_count")[0][0]) > 0:
        connection.query(f"PRAGMA incremental_vacuum({_FREE_PAGES_AT_ONCE})")
        if connection.query("PRAGMA freelist_count")[0][0] >= free:
            return  # a file of format 1 keeps its room


def _connect(location: Path | str, *, reads: bool = False) -> SqliteConnection | PostgresConnection:
    """Open a journal to look, or to take something away, whoever owns it."""
    if is_url(location):
        from remit.journal.postgres import connect_maintenance

        return connect_maintenance(str(location))
    path = Path(location)
    if reads:
        return connect_reader(path)
    if not path.is_file():
        raise JournalError(f"there is no journal at {str(path)!r}: nothing has run in this workspace yet")
    try:
        return connect_writer(path)
    except Exception as error:  # as above
        translate(error, path, doing="write")
