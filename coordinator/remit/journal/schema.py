"""The tables of the SQLite journal: making, checking, opening them, and bringing older ones up to date.

The partial unique index on terminal events is what makes a second end of one
node impossible, whatever the code above does. It also finds an ended node, so
there is no index of all events by node: that was a quarter of the cost of writing.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from remit.core.errors import JournalError
from remit.core.events import EVENTS_VERSION
from remit.journal.connection import FORMAT_VERSION, Connection, EventRow, check_format, check_versions
from remit.journal.ownership import open_private

__all__ = ["SqliteConnection", "begin_epoch", "connect_reader", "connect_writer", "make_room", "translate"]

logger = logging.getLogger("remit.journal")

_BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for a foreign connection, such as somebody's `sqlite3` shell."""

_CHECKPOINT_PAGES = 4000
"""Pages (4 KiB each) of write-ahead log that are folded into the file at once.

Four times SQLite's default: a checkpoint costs two fsyncs and happens within a
commit, while the log may well be 16 MB.
"""

_ROOM_BYTES = 32 + _CHECKPOINT_PAGES * (4096 + 24)
"""Length of a write-ahead log that is full, header and frames.
Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

_EPOCHS = """CREATE TABLE epochs (
        epoch INTEGER PRIMARY KEY,
        events_version INTEGER NOT NULL,
        opened_at_unix_ms INTEGER NOT NULL,
        pid INTEGER NOT NULL,
        machine TEXT NOT NULL
    )"""
_SNAPSHOTS = "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, at_unix_ms INTEGER NOT NULL, data BLOB NOT NULL)"
_TURN_ENDS = "CREATE INDEX events_turn_end ON events (seq) WHERE terminal = 1 AND node_id = turn_id"
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        epoch INTEGER NOT NULL,
        at_unix_ms INTEGER NOT NULL,
        kind TEXT NOT NULL,
        node_id TEXT NOT NULL,
        turn_id TEXT NOT NULL,
        terminal INTEGER NOT NULL,
        data TEXT NOT NULL,
        payload BLOB
    )""",
    "CREATE UNIQUE INDEX events_one_end ON events (node_id) WHERE terminal = 1",
    "CREATE INDEX events_turn ON events (turn_id)",
    _EPOCHS,
    _SNAPSHOTS,
    _TURN_ENDS,
    f"INSERT INTO meta VALUES ('format_version', '{FORMAT_VERSION}'), ('epoch', '0')",
)
_UPGRADES: dict[int, tuple[str, ...]] = {
    1: (
        _EPOCHS,
        _SNAPSHOTS,
        # All that format 1 ever held are events of version 1.
        "INSERT INTO epochs SELECT epoch, 1, min(at_unix_ms), 0, '' FROM events GROUP BY epoch",
        "DROP INDEX IF EXISTS events_node",
        _TURN_ENDS,
    ),
}
"""Format -> what leads to the next one."""
_INSERT = (
    "INSERT INTO events (seq, epoch, at_unix_ms, kind, node_id, turn_id, terminal, data, payload)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


class SqliteConnection:
    """A `Connection` to a SQLite file."""

    refusals: tuple[type[Exception], ...] = (sqlite3.IntegrityError, sqlite3.DataError)

    def __init__(self, path: Path, raw: sqlite3.Connection) -> None:
        self.path = path
        self.raw = raw
        self.where = repr(str(path))
        self._file = os.stat(path)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Carry out one statement; see `Connection.query`."""
        return self.raw.execute(sql, values).fetchall()

    def begin(self) -> None:
        """Begin to write; waits some seconds for a foreign connection."""
        # IMMEDIATE: the write lock now or never, not at some later statement.
        self.raw.execute("BEGIN IMMEDIATE")

    def insert(self, rows: Iterable[EventRow]) -> None:
        """Add rows to `events`."""
        self.raw.executemany(_INSERT, rows)

    def commit(self) -> None:
        """End the transaction; it is in the write-ahead log, which has been through fsync."""
        self.raw.execute("COMMIT")

    def rollback(self) -> None:
        """Take the transaction back."""
        self.raw.execute("ROLLBACK")

    def check_place(self) -> None:
        """Refuse to go on in a file that nobody can find again: SQLite itself does not notice.

        Raises:
            FileNotFoundError: the file is gone from its place, or another one is there.
        """
        try:
            is_there = os.path.samestat(self._file, os.stat(self.path))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise FileNotFoundError("the file was removed or replaced while it was in use")

    def tidy(self) -> None:
        """Fold the write-ahead log into the file, as far as it can."""
        # A reader in the way must not hold up the end, and without this all
        # is still durable: it only leaves one file instead of two.
        self.raw.execute("PRAGMA busy_timeout = 0")
        with suppress(sqlite3.Error):  # the log stays, and the next writer reads it
            self.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let go of the file; an open transaction is taken back."""
        self.raw.close()

    def explain(self, error: Exception, *, doing: str) -> JournalError:
        """Return an error as a `JournalError`; see `Connection.explain`."""
        try:
            translate(error, self.path, doing=doing)
        except JournalError as told:
            return told


def connect_writer(path: Path) -> SqliteConnection:
    """Open the database for writing, and make it if there is none.

    Missing folders are made with mode 0700, the file with 0600; SQLite gives the
    file's mode to its `-wal` and `-shm` files.

    Args:
        path: database file; the caller holds its writer lock.

    Raises:
        OSError: the file cannot be made.
        JournalTooNew: a newer version has written in it; nothing was changed.
        JournalError: it is no journal, or cannot keep a write-ahead log.
        sqlite3.Error: anything else that SQLite says.
    """
    if not path.exists():
        # Never opened if it is there: POSIX drops all locks that a process has on
        # a file when it closes any descriptor of it, so this would unlock readers
        # in this process (https://www.sqlite.org/howtocorrupt.html, 2.2).
        os.close(open_private(path))
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        found = _check_format(connection, path)
        if found == 0:
            # Before the first table, or never: retention can then give room back without a rewrite of the file.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"the file system of {str(path)!r} cannot keep a write-ahead log; put the workspace on a local disk"
            )
        connection.execute("PRAGMA synchronous = FULL")
        # On macOS fsync alone leaves the data in the drive's cache; elsewhere this does nothing.
        connection.execute("PRAGMA fullfsync = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if found == 0:
            _create(connection)
            _sync_folder(path.parent)
        elif found < FORMAT_VERSION:
            _upgrade(connection, found)
    except BaseException:
        connection.close()
        raise
    return SqliteConnection(path, connection)


def make_room(connection: SqliteConnection, path: Path) -> None:
    """Write the whole length of the write-ahead log once, so that commits find their blocks there.

    An fsync of a log that grows has to bring its new length and blocks to the disk as well, which takes two
    to three times as long as one of a log that only changes. SQLite goes round in the log once it was full
    and knows by its checksums where it ends; what lies behind does not matter to it, as after each round.

    No room on the disk is no error: then the log grows as it would have.

    Args:
        connection: of the writer; nobody else writes while this does, since it would be written over.
        path: database file.
    """
    log = path.with_name(path.name + "-wal")
    connection.begin()
    try:
        descriptor = os.open(log, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _fill(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.debug("no room was made for the journal %s: %s", path, error)
    finally:
        connection.rollback()


def _fill(descriptor: int, length: int) -> None:
    """Write zeros behind a file's end, or leave it as long as it was."""
    if length >= _ROOM_BYTES:
        return  # an earlier life has left it
    zeros = bytes(1024 * 1024)
    try:
        for at in range(length, _ROOM_BYTES, len(zeros)):
            os.pwrite(descriptor, zeros[: _ROOM_BYTES - at], at)
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, length)
        raise


def begin_epoch(connection: Connection, *, machine: str = "") -> tuple[int, int]:
    """Count the writer's life up, durably, and note which version of the events it writes.

    Args:
        connection: of a writer, outside of a transaction.
        machine: where this process runs, for people.

    Returns:
        The new epoch, and the place of the last record that there ever was.

    Raises:
        sqlite3.Error: it cannot be written.
    """
    connection.begin()
    connection.query("UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) WHERE name = 'epoch'")
    epoch = int(connection.query("SELECT value FROM meta WHERE name = 'epoch'")[0][0])
    now = time.time_ns() // 1_000_000
    connection.query("INSERT INTO epochs VALUES (?, ?, ?, ?, ?)", epoch, EVENTS_VERSION, now, os.getpid(), machine)
    # Retention may have taken the last rows away; their places are not given out again.
    last_seq = max(
        int(connection.query(sql)[0][0])
        for sql in (
            "SELECT coalesce(max(seq), 0) FROM events",
            "SELECT coalesce(max(seq), 0) FROM snapshots",
        )
    )
    connection.commit()
    return epoch, last_seq


def connect_reader(path: Path) -> SqliteConnection:
    """Open the database for reading only.

    Args:
        path: database file, with or without a writer at work.

    Raises:
        JournalTooNew: a newer version has written in it.
        JournalError: there is none, or it cannot be read.
    """
    connection = None
    try:
        if not path.is_file():
            raise JournalError(f"there is no journal at {str(path)!r}: nothing has run in this workspace yet")
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        if not _check_format(connection, path):
            raise JournalError(f"there is nothing in the journal {str(path)!r} yet; try again in a moment")
        return SqliteConnection(path, connection)
    except (OSError, sqlite3.Error, JournalError) as error:
        if connection is not None:
            connection.close()
        translate(error, path, doing="read")


def translate(error: Exception, path: Path, *, doing: str) -> NoReturn:
    """Raise what went wrong as a `JournalError` that says what to do.

    Args:
        error: from the file system or from SQLite; a `JournalError` is raised as it is.
        path: database file.
        doing: what was tried, as a verb.

    Raises:
        JournalError: always.
    """
    if isinstance(error, JournalError):
        raise error
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        raise JournalError(
            f"{str(path)!r} is damaged or not a journal ({error}); "
            "move it aside (with its -wal file) to begin a new one, and keep it if you need what is in it"
        ) from error
    raise JournalError(
        f"cannot {doing} the journal {str(path)!r}: {error}; "
        f"see that {str(path.parent)!r} is a folder that this user may {doing}, with room left on its disk"
    ) from error


def _check_format(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format of the tables, 0 if there are none; refuse a database that is not ours to touch."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return 0
    found = None
    if {"meta", "events"} <= tables:
        found = connection.execute("SELECT value FROM meta WHERE name = 'format_version'").fetchone()
    where = repr(str(path))
    number = check_format("" if found is None else str(found[0]), where)
    if number >= 2:
        check_versions([row[0] for row in connection.execute("SELECT events_version FROM epochs")], where)
    return number


def _upgrade(connection: sqlite3.Connection, found: int) -> None:
    """Bring tables of an older format up to date, all or none."""
    connection.execute("BEGIN IMMEDIATE")
    for each in range(found, FORMAT_VERSION):
        for statement in _UPGRADES[each]:
            connection.execute(statement)
    connection.execute("UPDATE meta SET value = ? WHERE name = 'format_version'", (str(FORMAT_VERSION),))
    connection.execute("COMMIT")


def _create(connection: sqlite3.Connection) -> None:
    """Make the tables, all or none."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute("COMMIT")


def _sync_folder(folder: Path) -> None:
    """Make the file's name as durable as what is in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
