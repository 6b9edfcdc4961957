"""Reading a SQLite journal, from any process, with or without a writer at work."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from remit.core.errors import InvalidArgument, JournalError
from remit.journal.ownership import writer_alive
from remit.journal.record import StoredRecord, decode_data
from remit.journal.schema import connect_reader, translate

__all__ = ["SqliteJournalReader"]

_PAGE_ROWS = 500
"""Rows fetched at once.

Between pages no statement is open: a reader that is slow, or that forgets its
iterator, must not keep the writer from folding its write-ahead log.
"""


class SqliteJournalReader:
    """A `JournalReader` over a SQLite file. Thread-safe; opens the file read-only."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = connection
        self._lock = threading.Lock()  # guards the connection; innermost

    @classmethod
    def open(cls, path: Path | str) -> SqliteJournalReader:
        """Open a journal for reading.

        Args:
            path: database file.

        Raises:
            JournalError: there is no journal, or it cannot be read; nothing was made.
        """
        path = Path(path)
        return cls(path, connect_reader(path))

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
            InvalidArgument: `after_seq` or `limit` is below zero.
        """
        if after_seq < 0 or (limit is not None and limit < 0):
            raise InvalidArgument(f"after_seq and limit must not be negative, got {after_seq} and {limit}")
        where = ["seq > ?"]
        values: list[str] = []
        for column, value in (("node_id", node_id), ("turn_id", turn_id)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if kinds is not None:
            where.append(f"kind IN ({','.join('?' * len(kinds))})")
            values.extend(kinds)
        sql = (
            "SELECT seq, epoch, kind, node_id, turn_id, at_unix_ms, data, terminal FROM events"
            f" WHERE {' AND '.join(where)} ORDER BY seq LIMIT ?"
        )
        self._query("SELECT 1")  # a closed reader says so here, not at the first record
        return self._pages(sql, values, after_seq, limit)

    def _pages(self, sql: str, values: list[str], after_seq: int, left: int | None) -> Iterator[StoredRecord]:
        while left is None or left > 0:
            size = _PAGE_ROWS if left is None else min(left, _PAGE_ROWS)
            rows = self._query(sql, after_seq, *values, size)
            for seq, epoch, kind, node_id, turn_id, at_unix_ms, data, terminal in rows:
                yield StoredRecord(seq, epoch, kind, node_id, turn_id, at_unix_ms, decode_data(data), bool(terminal))
            if len(rows) < size:
                return
            after_seq = rows[-1][0]
            left = None if left is None else left - len(rows)

    def payload(self, node_id: str, kind: str) -> bytes | None:
        """Return the latest payload; see `JournalReader.payload`.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        rows = self._query(
            "SELECT payload FROM events WHERE node_id = ? AND kind = ? AND payload IS NOT NULL"
            " ORDER BY seq DESC LIMIT 1",
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

    def epoch(self) -> int:
        """Return the epoch of the latest writer, living or not.

        Raises:
            JournalError: the journal cannot be read, or the reader is closed.
        """
        return int(self._query("SELECT value FROM meta WHERE name = 'epoch'")[0][0])

    def writer_alive(self) -> bool:
        """Return whether a living process owns the journal just now.

        Raises:
            JournalError: the reader is closed.
        """
        with self._lock:
            self._open_connection()
        return writer_alive(self._path)

    def close(self) -> None:
        """Let go of the file. Idempotent; iterators in use end with `JournalError`."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _query(self, sql: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._lock:
            connection = self._open_connection()
            try:
                return connection.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                translate(error, self._path, doing="read")

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError(f"this reader of the journal {str(self._path)!r} is closed")
        return self._connection
