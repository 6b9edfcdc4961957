"""The tables of the SQLite journal: making, checking and opening them.

Format 1, the only one so far: `meta` holds texts by name (`format_version`,
`epoch`), `events` one row a record. The partial unique index on terminal events
is what makes a second end of one node impossible, whatever the code above does.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NoReturn

from remit.core.errors import JournalError
from remit.journal.ownership import open_private

__all__ = ["FORMAT_VERSION", "begin_epoch", "connect_reader", "connect_writer", "translate"]

FORMAT_VERSION = 1
"""Format that this version writes, and the newest that it reads."""

_BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for a foreign connection, such as somebody's `sqlite3` shell."""

_CHECKPOINT_PAGES = 4000
"""Pages (4 KiB each) of write-ahead log that are folded into the file at once.

Four times SQLite's default: a checkpoint costs two fsyncs and happens within a
commit, while the log may well be 16 MB.
"""

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
    "CREATE INDEX events_node ON events (node_id)",
    "CREATE INDEX events_turn ON events (turn_id)",
    f"INSERT INTO meta VALUES ('format_version', '{FORMAT_VERSION}'), ('epoch', '0')",
)


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing, and make it if there is none.

    Missing folders are made with mode 0700, the file with 0600; SQLite gives the
    file's mode to its `-wal` and `-shm` files.

    Args:
        path: database file; the caller holds its writer lock.

    Raises:
        OSError: the file cannot be made.
        JournalError: it is no journal, of a newer format, or cannot keep a write-ahead log.
        sqlite3.Error: anything else that SQLite says.
    """
    if not path.exists():
        # Never opened if it is there: POSIX drops all locks that a process has on
        # a file when it closes any descriptor of it, so this would unlock readers
        # in this process (https://www.sqlite.org/howtocorrupt.html, 2.2).
        os.close(open_private(path))
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        is_new = not _check_format(connection, path)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"the file system of {str(path)!r} cannot keep a write-ahead log; put the workspace on a local disk"
            )
        connection.execute("PRAGMA synchronous = FULL")
        # On macOS fsync alone leaves the data in the drive's cache; elsewhere this does nothing.
        connection.execute("PRAGMA fullfsync = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if is_new:
            _create(connection)
            _sync_folder(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def begin_epoch(connection: sqlite3.Connection) -> tuple[int, int]:
    """Count the writer's life up, durably.

    Args:
        connection: from `connect_writer`.

    Returns:
        The new epoch, and the place of the last record.

    Raises:
        sqlite3.Error: it cannot be written.
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE name = 'epoch'")
    epoch = int(connection.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()[0])
    last_seq = int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
    connection.execute("COMMIT")
    return epoch, last_seq


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open the database for reading only.

    Args:
        path: database file, with or without a writer at work.

    Raises:
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
    except (OSError, sqlite3.Error, JournalError) as error:
        if connection is not None:
            connection.close()
        translate(error, path, doing="read")
    return connection


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


def _check_format(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the tables are there; refuse a database that is not ours to touch."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return False
    found = None
    if {"meta", "events"} <= tables:
        found = connection.execute("SELECT value FROM meta WHERE name = 'format_version'").fetchone()
    if found is None or not str(found[0]).isdecimal():
        raise JournalError(f"{str(path)!r} is a database but not a journal; move it aside to begin a new one")
    if int(found[0]) > FORMAT_VERSION:
        raise JournalError(
            f"the journal {str(path)!r} has format {found[0]}, this version knows formats up to {FORMAT_VERSION}; "
            "install the newer remit that wrote it"
        )
    return True


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
