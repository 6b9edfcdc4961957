"""Reading a journal in a database, from any process, with or without a writer at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from remit.core.errors import InvalidArgument, JournalError, JournalTooNew
from remit.core.events import EVENTS_VERSION
from remit.journal.connection import Connection
from remit.journal.ownership import writer_alive
from remit.journal.record import StoredRecord, StoredSnapshot, decode_many
from remit.journal.schema import connect_reader

__all__ = ["DatabaseReader", "SqliteJournalReader"]

_PAGE_ROWS = 500
"""Rows fetched at once.

Between pages no statement is open: a reader that is slow, or that forgets its
iterator, must not keep the writer from folding its write-ahead log.
"""


class DatabaseReader:
    """A `JournalReader` over a connection to a database. Thread-safe; reads only.

    Args:
        connection: owned by this object from here on.
        is_alive: tells whether a writer owns the journal just now; gets the
            connection, and may use it.
    """

    def __init__(self, connection: Connection, is_alive: Callable[[Connection], bool]) -> None:
        self._connection: Connection | None = connection
        self._where = connection.where
        self._is_alive = is_alive
        self._lock = threading.Lock()  # guards the connection; innermost
        self._versions: dict[int, int] = {}

    def read(
        self,
        *,
        after_seq: int = 0,
        limit: int | None = None,
        node_id: str | None = None,
        turn_id: str | None = None,
        kinds: Collection[str] | None = None,
    ) -> Iterator[StoredRecord]:
        """Yield durable records in order; see `JournalReader.read`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
            JournalTooNew: a newer version has written in it meanwhile.
            InvalidArgument: `after_seq` or `limit` is below zero.
        """
        if after_seq < 0 or (limit is not None and limit < 0):
            raise InvalidArgument(f"after_seq and limit must not be negative, got {after_seq} and {limit}")
        if node_id is not None and turn_id is None:
            # There is no index of all events by node, but one of ends, which name the turn.
            found = self._query("SELECT turn_id FROM events WHERE node_id = ? AND terminal = 1", node_id)
            turn_id = found[0][0] if found else None
        where = ["seq > ?"]
        values: list[str] = []
        for column, value in (("node_id", node_id), ("turn_id", turn_id)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if kinds is not None:
            where.append(f"kind IN ({','.join('?' * len(kinds))})" if kinds else "1 = 0")
            values.extend(kinds)
        sql = (
            "SELECT seq, epoch, kind, node_id, turn_id, at_unix_ms, data, terminal FROM events"
            f" WHERE {' AND '.join(where)} ORDER BY seq LIMIT ?"
        )
        self._query("SELECT 1")  # a closed reader says so here, not at the first record
        return self._pages(sql, values, after_seq, limit)

    def _pages(self, sql: str, values: list[str], after_seq: int, left: int | None) -> Iterator[StoredRecord]:
        versions = self._versions
        while left is None or left > 0:
            size = _PAGE_ROWS if left is None else min(left, _PAGE_ROWS)
            rows = self._query(sql, after_seq, *values, size)
            decoded = decode_many([row[6] for row in rows])
            for (seq, epoch, kind, node_id, turn_id, at_unix_ms, _, terminal), data in zip(rows, decoded, strict=True):
                version = versions.get(epoch) or self._version(epoch)
                yield StoredRecord(seq, epoch, kind, node_id, turn_id, at_unix_ms, data, bool(terminal), version)
            if len(rows) < size:
                return
            after_seq = rows[-1][0]
            left = None if left is None else left - len(rows)

    def _version(self, epoch: int) -> int:
        """Return the version of the events of one writer's life."""
        version = 1
        if self._is_format(2):
            found = self._query("SELECT events_version FROM epochs WHERE epoch = ?", epoch)
            version = int(found[0][0]) if found else 1
        if version > EVENTS_VERSION:
            raise JournalTooNew(
                f"the journal {self._where} holds events of version {version}, this version knows them up to "
                f"{EVENTS_VERSION}; install the newer remit that wrote it"
            )
        self._versions[epoch] = version
        return version

    def payload(self, node_id: str, kind: str) -> bytes | None:
        """Return the latest payload; see `JournalReader.payload`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        ended = self._query(
            "SELECT kind, payload, turn_id FROM events WHERE node_id = ? AND terminal = 1",
            node_id,
        )
        if ended and ended[0][0] == kind:
            return None if ended[0][1] is None else bytes(ended[0][1])
        within = "turn_id = ? AND " if ended else ""
        rows = self._query(
            f"SELECT payload FROM events WHERE {within}node_id = ? AND kind = ? AND payload IS NOT NULL"
            " ORDER BY seq DESC LIMIT 1",
            *([ended[0][2]] if ended else []),
            node_id,
            kind,
        )
        return bytes(rows[0][0]) if rows else None

    def last_seq(self) -> int:
        """Return the place of the last durable record, 0 in an empty journal.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        return int(self._query("SELECT coalesce(max(seq), 0) FROM events")[0][0])

    def base(self) -> int:
        """Return the place up to which records may be missing; see `JournalReader.base`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        found = self._query("SELECT value FROM meta WHERE name = 'base'")
        return int(found[0][0]) if found else 0

    def snapshot(self) -> StoredSnapshot | None:
        """Return the latest snapshot; see `JournalReader.snapshot`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        if not self._is_format(2):
            return None
        found = self._query("SELECT seq, at_unix_ms, data FROM snapshots ORDER BY seq DESC LIMIT 1")
        return StoredSnapshot(found[0][0], found[0][1], bytes(found[0][2])) if found else None

    def ended_turns(self, *, limit: int | None = None) -> list[str]:
        """Return ended turns, latest first; see `JournalReader.ended_turns`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        rows = self._query(
            "SELECT node_id FROM events WHERE terminal = 1 AND node_id = turn_id ORDER BY seq DESC LIMIT ?",
            2**62 if limit is None else limit,
        )
        return [row[0] for row in rows]

    def find_ended(self, text: str, *, limit: int) -> list[tuple[str, str]]:
        """Return ended nodes by a part of their id; see `JournalReader.find_ended`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        exact = self._query("SELECT node_id, turn_id FROM events WHERE node_id = ? AND terminal = 1", text)
        if exact:
            return [(exact[0][0], exact[0][1])]
        plain = text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
        rows = self._query(
            "SELECT node_id, turn_id FROM events WHERE terminal = 1"
            " AND (node_id LIKE ? ESCAPE '!' OR node_id LIKE ? ESCAPE '!') LIMIT ?",
            f"{plain}%",
            f"%{plain}",
            limit,
        )
        return [(row[0], row[1]) for row in rows]

    def epoch(self) -> int:
        """Return the epoch of the latest writer, living or not.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        return int(self._query("SELECT value FROM meta WHERE name = 'epoch'")[0][0])

    def writer_alive(self) -> bool:
        """Return whether a living writer owns the journal just now.

        Raises:
            JournalError: the reader is closed, or the journal cannot be read.
        """
        with self._lock:
            return self._is_alive(self._open_connection())

    def close(self) -> None:
        """Let go of the journal. Idempotent; iterators in use end with `JournalError`."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _is_format(self, least: int) -> bool:
        """Tell whether the tables have this format; a writer may have brought them up to date meanwhile."""
        return int(self._query("SELECT value FROM meta WHERE name = 'format_version'")[0][0]) >= least

    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            connection = self._open_connection()
            try:
                return connection.query(sql, *values)
            except Exception as error:  # each database has its own tree of errors; all become ours
                raise connection.explain(error, doing="read") from error

    def _open_connection(self) -> Connection:
        if self._connection is None:
            raise JournalError(f"this reader of the journal {self._where} is closed")
        return self._connection


class SqliteJournalReader(DatabaseReader):
    """A `JournalReader` over a SQLite file; made by `SqliteJournalReader.open`."""

    @classmethod
    def open(cls, path: Path | str) -> SqliteJournalReader:
        """Open a journal for reading.

        Args:
            path: database file.

        Raises:
            JournalTooNew: a newer version has written in it.
            JournalError: there is no journal, or it cannot be read; nothing was made.
        """
        path = Path(path)
        return cls(connect_reader(path), lambda _: writer_alive(path))
