"""The journal in one SQLite file: a write-ahead log, an fsync for each commit, a lock that dies with its process."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from remit.journal.ownership import WriterLock
from remit.journal.reader import SqliteJournalReader
from remit.journal.schema import begin_epoch, connect_writer, make_room, translate
from remit.journal.writer import FAILPOINTS, DatabaseJournal, JournalStatistics

__all__ = ["FAILPOINTS", "JournalStatistics", "SqliteJournal"]


class SqliteJournal(DatabaseJournal):
    """A `Journal` in a SQLite file; made by `SqliteJournal.open`."""

    _path: Path

    @classmethod
    def open(
        cls, path: Path | str, *, failpoint: Callable[[str], None] | None = None, with_room: bool = False
    ) -> SqliteJournal:
        """Own a journal, and make it if there is none; one of an older format is brought up to date.

        Args:
            path: database file; missing folders are made, for this user only.
            failpoint: called in the writer thread with each word of `FAILPOINTS`;
                what it raises counts as an error of the disk. For tests.
            with_room: take the 16 MB of the log at once, some 30 ms, so that each commit is faster.

        Raises:
            JournalBusy: a living process writes it; `holder_pid` says which.
            JournalTooNew: a newer version has written in it; nothing was changed.
            JournalError: it cannot be written, or is damaged.

        Durability: the new epoch is on the disk.
        """
        path = Path(path)
        lock = None
        connection = None
        try:
            _make_folder(path.absolute().parent)
            lock = WriterLock.acquire(path)
            connection = connect_writer(path)
            epoch, last_seq = begin_epoch(connection)
            lock.sign(epoch=epoch)
            if with_room:
                make_room(connection, path)
            journal = cls(connection, lock, epoch=epoch, last_seq=last_seq, failpoint=failpoint)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | sqlite3.Error):
                translate(error, path, doing="write")
            raise
        journal._path = path
        return journal

    @property
    def path(self) -> Path:
        """The database file."""
        return self._path

    def reader(self) -> SqliteJournalReader:
        """Return a new reader of this journal; see `Journal.reader`.

        Raises:
            JournalError: the journal cannot be read.
        """
        return SqliteJournalReader.open(self._path)


def _make_folder(folder: Path) -> None:
    """Make missing folders for this user only, whatever the umask."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        os.mkdir(folder, 0o700)
        os.chmod(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
