"""The journal in PostgreSQL: a schema for each journal, an advisory lock for its writer.

The lock belongs to the writer's connection, so the server frees it when that is
gone, however it went. It alone would not do: a writer whose connection was cut
off by a proxy may not know it yet. So each transaction also reads the epoch's row
`FOR UPDATE`: whoever takes the journal over waits for the transactions that had
begun, and those that begin later find another epoch.

On the disk when a commit returns: `synchronous_commit` is set to `on` for the
writer, whatever the server's default is, so its write-ahead log has been through
fsync (and is on the standbys that the server waits for).
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from remit.core.errors import InvalidArgument, JournalBusy, JournalError
from remit.journal.connection import (
    EVENT_COLUMNS,
    FORMAT_VERSION,
    Connection,
    EventRow,
    check_format,
    check_versions,
)
from remit.journal.reader import DatabaseReader
from remit.journal.schema import begin_epoch
from remit.journal.writer import DatabaseJournal

__all__ = ["PostgresConnection", "PostgresJournal", "PostgresReader", "connect_maintenance"]

_CONNECT_TIMEOUT_S = 10
_TRIES = 6
_PAUSE_S = 0.05
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE events (seq BIGINT PRIMARY KEY, epoch BIGINT NOT NULL, at_unix_ms BIGINT NOT NULL,"
    " kind TEXT NOT NULL, node_id TEXT NOT NULL, turn_id TEXT NOT NULL, terminal SMALLINT NOT NULL,"
    " data TEXT NOT NULL, payload BYTEA)",
    "CREATE UNIQUE INDEX events_one_end ON events (node_id) WHERE terminal = 1",
    "CREATE INDEX events_turn ON events (turn_id)",
    "CREATE INDEX events_turn_end ON events (seq) WHERE terminal = 1 AND node_id = turn_id",
    "CREATE TABLE epochs (epoch BIGINT PRIMARY KEY, events_version BIGINT NOT NULL, opened_at_unix_ms BIGINT NOT NULL,"
    " pid BIGINT NOT NULL, machine TEXT NOT NULL)",
    "CREATE TABLE snapshots (seq BIGINT PRIMARY KEY, at_unix_ms BIGINT NOT NULL, data BYTEA NOT NULL)",
    f"INSERT INTO meta VALUES ('format_version', '{FORMAT_VERSION}'), ('epoch', '0')",
)
_COPY = f"COPY events ({', '.join(EVENT_COLUMNS)}) FROM STDIN".encode()


def split_url(url: str) -> tuple[str, str]:
    """Return what the server's library understands of a journal's URL, and the schema.

    Args:
        url: `postgresql://user@host/database#schema`; the schema is `remit` where it is left out.

    Raises:
        InvalidArgument: it is no such URL.
    """
    address, _, schema = url.partition("#")
    if not address.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument(f"a journal's URL begins with postgresql://, got {address.partition(':')[0]!r}")
    return address, schema or "remit"


class PostgresConnection:
    """A `Connection` to one schema of a PostgreSQL database."""

    refusals: tuple[type[Exception], ...] = (psycopg.IntegrityError, psycopg.DataError)

    def __init__(self, address: str, schema: str) -> None:
        try:
            parts = conninfo_to_dict(address)
        except psycopg.ProgrammingError as error:
            raise InvalidArgument(f"the journal's URL cannot be read: {str(error).strip()}") from error
        place = parts.get("host") or parts.get("hostaddr") or "localhost"
        self.where = repr(f"postgresql://{place}/{parts.get('dbname') or ''}#{schema}")
        self.schema = schema
        try:
            self.raw: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(
                address, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S, application_name="remit"
            )
        except psycopg.Error as error:
            raise self.explain(error, doing="reach") from error
        self.query("SELECT set_config('search_path', ?, false)", f'"{schema}"')

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Carry out one statement; see `Connection.query`."""
        cursor = self.raw.execute(sql.replace("?", "%s").encode(), values or None)
        return cursor.fetchall() if cursor.description is not None else []

    def begin(self) -> None:
        """Begin to write, and hold the epoch's row until the end."""
        self.raw.execute("BEGIN")
        self.raw.execute("SELECT value FROM meta WHERE name = 'epoch' FOR UPDATE")

    def insert(self, rows: Iterable[EventRow]) -> None:
        """Add rows to `events`."""
        with self.raw.cursor() as cursor, cursor.copy(_COPY) as copy:
            for row in rows:
                copy.write_row(row)

    def commit(self) -> None:
        """End the transaction; on return the server's write-ahead log has been through fsync."""
        self.raw.execute("COMMIT")

    def rollback(self) -> None:
        """Take the transaction back."""
        self.raw.execute("ROLLBACK")

    def check_place(self) -> None:
        """Do nothing: what has been committed is in the schema, or the commit would have failed."""

    def tidy(self) -> None:
        """Free the writer's lock now: the server notices the end of a connection a moment later."""
        with suppress(psycopg.Error):  # then it does so all the same
            self.raw.execute("SELECT pg_advisory_unlock_all()")

    def close(self) -> None:
        """Let go of it; the server takes an open transaction back and frees the lock."""
        self.raw.close()

    def explain(self, error: Exception, *, doing: str) -> JournalError:
        """Return an error as a `JournalError`; see `Connection.explain`."""
        if isinstance(error, JournalError):
            return error
        text = str(error).strip().replace("\n", " ")
        return JournalError(
            f"cannot {doing} the journal {self.where}: {text}; "
            "see that the server is up and that this user may use the schema"
        )

    def tables(self) -> set[str]:
        """Return the names of the tables in the schema."""
        return {
            row[0]
            for row in self.query(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = ?", self.schema
            )
        }


def connect_maintenance(url: str) -> PostgresConnection:
    """Open a journal to take something away from it, whoever writes it.

    Raises:
        JournalTooNew: a newer version has written in it.
        JournalError: the server cannot be reached, or there is no journal; nothing was made.
    """
    connection = PostgresConnection(*split_url(url))
    try:
        if not _check(connection):
            raise JournalError(f"there is no journal at {connection.where}: nothing has run in this workspace yet")
    except BaseException as error:
        connection.close()
        raise _told(connection, error, doing="read") from error
    return connection


class _AdvisoryLock:
    """The ownership of a PostgreSQL journal: it ends with the writer's connection."""

    def release(self) -> None:
        """Do nothing: the connection is closed by whoever calls this, and the lock went with it."""


class PostgresReader(DatabaseReader):
    """A `JournalReader` over a PostgreSQL schema; made by `PostgresReader.open`."""

    @classmethod
    def open(cls, url: str) -> PostgresReader:
        """Open a journal for reading.

        Args:
            url: as for `PostgresJournal.open`.

        Raises:
            JournalTooNew: a newer version has written in it.
            JournalError: the server cannot be reached, or there is no journal; nothing was made.
        """
        connection = PostgresConnection(*split_url(url))
        try:
            connection.query("SET default_transaction_read_only = on")
            if not _check(connection):
                raise JournalError(f"there is no journal at {connection.where}: nothing has run in this workspace yet")
        except BaseException as error:
            connection.close()
            raise _told(connection, error, doing="read") from error
        return cls(connection, _is_locked)


class PostgresJournal(DatabaseJournal):
    """A `Journal` in a PostgreSQL schema; made by `PostgresJournal.open`."""

    _url: str

    @classmethod
    def open(cls, url: str, *, failpoint: Callable[[str], None] | None = None) -> PostgresJournal:
        """Own a journal, and make its schema and tables if there are none.

        Args:
            url: `postgresql://user@host/database#schema`. Each workspace has a schema
                of its own; the user must be allowed to make it, or it must be there.
            failpoint: see `SqliteJournal.open`.

        Raises:
            JournalBusy: another coordinator writes it; `holder_pid` and `machine` say which.
            JournalTooNew: a newer version has written in it; nothing was changed.
            JournalError: the server cannot be reached, or refuses.
            InvalidArgument: it is no such URL.

        Durability: the new epoch is on the server's disk.
        """
        connection = PostgresConnection(*split_url(url))
        try:
            connection.query("SET synchronous_commit = on")
            _own(connection)
            if not _check(connection):
                _create(connection)
            epoch, last_seq = begin_epoch(connection, machine=socket.gethostname())
        except BaseException as error:
            connection.close()
            raise _told(connection, error, doing="write") from error
        journal = cls(connection, _AdvisoryLock(), epoch=epoch, last_seq=last_seq, failpoint=failpoint)
        journal._url = url
        return journal

    def reader(self) -> PostgresReader:
        """Return a new reader of this journal; see `Journal.reader`.

        Raises:
            JournalError: the journal cannot be read.
        """
        return PostgresReader.open(self._url)


def _lock_key(schema: str) -> int:
    """Return the key of a schema's advisory lock; such locks are apart for each database."""
    return int.from_bytes(hashlib.sha256(f"remit:{schema}".encode()).digest()[:8], "big", signed=True)


def _own(connection: PostgresConnection) -> None:
    """Take the writer's lock.

    Raises:
        JournalBusy: another connection has it.
    """
    # A killed writer's lock is freed a moment after its death.
    for _ in range(_TRIES):
        if connection.query("SELECT pg_try_advisory_lock(?)", _lock_key(connection.schema))[0][0]:
            return
        time.sleep(_PAUSE_S)
    pid = epoch = None
    machine = ""
    if "epochs" in connection.tables():
        latest = connection.query("SELECT epoch, pid, machine FROM epochs ORDER BY epoch DESC LIMIT 1")
        epoch, pid, machine = latest[0] if latest else (None, None, "")
    who = "another coordinator" if pid is None else f"process {pid} on {machine}"
    raise JournalBusy(
        f"the journal {connection.where} is written by {who}; use the coordinator that runs there, or stop it first",
        path=connection.where,
        holder_pid=pid,
        holder_epoch=epoch,
        machine=machine,
    )


def _is_locked(connection: Connection) -> bool:
    """Tell whether some connection holds the writer's lock."""
    held = cast(PostgresConnection, connection)
    key = _lock_key(held.schema) & (2**64 - 1)
    # A 64-bit key stands in two columns (https://www.postgresql.org/docs/current/view-pg-locks.html).
    try:
        rows = held.query(
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
            " AND classid = ? AND objid = ?"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            key >> 32,
            key & 0xFFFFFFFF,
        )
    except psycopg.Error as error:
        raise held.explain(error, doing="read") from error
    return bool(rows)


def _check(connection: PostgresConnection) -> bool:
    """Return whether the tables are there; refuse what is not ours, or too new."""
    tables = connection.tables()
    if not tables:
        return False
    found: list[tuple[Any, ...]] = []
    if {"meta", "events", "epochs"} <= tables:
        found = connection.query("SELECT value FROM meta WHERE name = 'format_version'")
    check_format(str(found[0][0]) if found else "", connection.where)
    check_versions([row[0] for row in connection.query("SELECT events_version FROM epochs")], connection.where)
    return True


def _create(connection: PostgresConnection) -> None:
    """Make schema and tables, all or none."""
    with connection.raw.transaction():
        connection.raw.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(connection.schema)))
        for statement in _TABLES:
            connection.query(statement)


def _told(connection: PostgresConnection, error: BaseException, *, doing: str) -> BaseException:
    """Return what went wrong as ours, if it is the server's."""
    if isinstance(error, errors.Error):
        return connection.explain(error, doing=doing)
    return error
