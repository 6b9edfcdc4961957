"""The journal in one SQLite file: one writer, one thread, one fsync for many batches.

Group commit: while one commit is on its way to the disk, everything that is
appended queues up, and goes into the next transaction together. The slower the
disk, the larger the groups; the caller never waits for it.

**Invariants**

1. Only the writer thread touches the connection, from `open` on.
2. `_queue`, `_closing` and `_refusal` are guarded by `_wake`; nothing else is
   locked while it is held, and no future is resolved under it.
3. A queued future is resolved by the writer thread, exactly once, unless `close`
   ran out of time and took it from the queue first.
4. The ownership lock is freed only after the connection is closed.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from remit.core.errors import JournalError
from remit.journal.ownership import WriterLock
from remit.journal.reader import SqliteJournalReader
from remit.journal.record import JournalRecord, Row, duplicate_terminal, encode_records
from remit.journal.schema import begin_epoch, connect_writer, translate
from remit.journal.store import DEFAULT_CLOSE_TIMEOUT_S

__all__ = ["FAILPOINTS", "JournalStatistics", "SqliteJournal"]

FAILPOINTS = ("before_begin", "before_insert", "before_commit", "after_commit")
"""Places of a commit, in order, at which a failpoint is called in the writer thread."""

_Batch: TypeAlias = tuple[list[Row], "Future[int]"]
_Verdict: TypeAlias = int | JournalError

_INSERT = (
    "INSERT INTO events (seq, epoch, at_unix_ms, kind, node_id, turn_id, terminal, data, payload)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """What a writer has done since it was opened."""

    records: int
    """Records made durable."""
    batches: int
    """Batches made durable."""
    commits: int
    """Transactions, each one fsync."""
    refused: int
    """Batches refused for a second terminal event."""
    queued: int
    """Batches that wait for the next transaction."""


class SqliteJournal:
    """A `Journal` in a SQLite file; made by `SqliteJournal.open`."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        lock: WriterLock,
        failpoint: Callable[[str], None] | None,
    ) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._failpoint = failpoint
        self._epoch, self._last_seq = begin_epoch(connection)
        self._file = os.stat(path)
        lock.sign(epoch=self._epoch)
        self._records = self._batches = self._commits = self._refused = 0
        self._wake = threading.Condition(threading.Lock())
        self._queue: list[_Batch] = []
        self._closing = False
        self._refusal: tuple[str, BaseException | None] | None = None
        """Why nothing more is taken, and what that came from."""
        # A daemon: a caller that forgets `close` must not hang the interpreter's
        # exit. What has not resolved by then was never promised.
        self._thread = threading.Thread(target=self._run, name="remit-journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path | str, *, failpoint: Callable[[str], None] | None = None) -> SqliteJournal:
        """Own a journal, and make it if there is none.

        Args:
            path: database file; missing folders are made, for this user only.
            failpoint: called in the writer thread with each word of `FAILPOINTS`;
                what it raises counts as an error of the disk. For tests.

        Raises:
            JournalBusy: a living process writes it; `holder_pid` says which.
            JournalError: it cannot be written, is damaged, or has a newer format.

        Durability: the new epoch is on the disk.
        """
        path = Path(path)
        lock = None
        connection = None
        try:
            _make_folder(path.absolute().parent)
            lock = WriterLock.acquire(path)
            connection = connect_writer(path)
            return cls(path, connection, lock, failpoint)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | sqlite3.Error):
                translate(error, path, doing="write")
            raise

    @property
    def epoch(self) -> int:
        """Number of this writer's life, from 1."""
        return self._epoch

    @property
    def path(self) -> Path:
        """The database file."""
        return self._path

    def append(self, records: Sequence[JournalRecord]) -> Future[int]:
        """Queue one batch for the next transaction; see `Journal.append`.

        Raises:
            InvalidArgument: a record cannot be kept; nothing was queued.

        Durability: when the future has resolved, the batch and all before it
            have been through fsync.
        """
        rows = encode_records(records)
        future: Future[int] = Future()
        # Running from the start: a waiter that is cancelled (asyncio hands its
        # cancellation on to such futures) takes nothing back from the journal.
        future.set_running_or_notify_cancel()
        with self._wake:
            refusal = self._refusal
            if refusal is None:
                self._queue.append((rows, future))
                if len(self._queue) == 1:
                    self._wake.notify()
                return future
        future.set_exception(_refused(refusal))
        return future

    def statistics(self) -> JournalStatistics:
        """Return what was done so far."""
        return JournalStatistics(
            records=self._records,
            batches=self._batches,
            commits=self._commits,
            refused=self._refused,
            queued=len(self._queue),
        )

    def reader(self) -> SqliteJournalReader:
        """Return a new reader of this journal; see `Journal.reader`.

        Raises:
            JournalError: the journal cannot be read.
        """
        return SqliteJournalReader.open(self._path)

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Write what is queued, fold the write-ahead log into the file, let go of both.

        Idempotent; see `Journal.close`. Called from a future's callback it asks
        for the end and returns at once.

        Args:
            timeout_s: seconds to wait for the disk.

        Raises:
            JournalError: the disk took longer. What had not been started has
                failed; the ownership ends when the disk answers.

        Durability: on return without an error every future has resolved, and
            every successful one is on the disk.
        """
        with self._wake:
            self._closing = True
            if self._refusal is None:
                self._refusal = (f"the journal {str(self._path)!r} is closed", None)
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandon(timeout_s)
        self._lock.release()

    def _abandon(self, timeout_s: float) -> None:
        """Give up what the disk has not been asked for yet."""
        with self._wake:
            left, self._queue = self._queue, []
        reason = f"the disk of the journal {str(self._path)!r} did not answer within {timeout_s} s of its closing"
        for _, future in left:
            future.set_exception(JournalError(f"{reason}; this batch was not written"))
        raise JournalError(f"{reason}; {len(left)} queued batches were not written")

    # --- the writer thread -------------------------------------------------

    def _run(self) -> None:
        """Commit group after group until closed or failed."""
        while group := self._next_group():
            try:
                verdicts = self._write(group)
            # The outer edge of this thread: whatever it is, everyone who waits
            # must hear of it, or they wait for ever.
            except BaseException as error:
                self._fail(error, group)
                break
            for (_, future), verdict in zip(group, verdicts, strict=True):
                if isinstance(verdict, int):
                    future.set_result(verdict)
                else:
                    future.set_exception(verdict)
        self._release_file()

    def _next_group(self) -> list[_Batch]:
        """Wait for batches and take all there are; none once closed and drained."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            group, self._queue = self._queue, []
            return group

    def _write(self, group: list[_Batch]) -> list[_Verdict]:
        """Make a group durable; return for each batch its last place or why it was refused."""
        if not any(rows for rows, _ in group):
            return [self._last_seq] * len(group)
        try:
            return self._write_together(group)
        except (sqlite3.IntegrityError, sqlite3.DataError):
            # One batch in the group cannot be. That is rare, so savepoints for
            # each batch are paid for only now that we must know which one.
            self._connection.execute("ROLLBACK")
            return self._write_singly(group)

    def _write_together(self, group: list[_Batch]) -> list[_Verdict]:
        first = seq = self._last_seq
        verdicts: list[_Verdict] = []
        for rows, _ in group:
            seq += len(rows)
            verdicts.append(seq)
        self._begin()
        self._connection.executemany(_INSERT, self._numbered(chain.from_iterable(rows for rows, _ in group), first))
        self._commit()
        self._count(seq, batches=len(group))
        return verdicts

    def _write_singly(self, group: list[_Batch]) -> list[_Verdict]:
        seq = self._last_seq
        verdicts: list[_Verdict] = []
        self._begin()
        for rows, _ in group:
            self._connection.execute("SAVEPOINT batch")
            try:
                self._connection.executemany(_INSERT, self._numbered(iter(rows), seq))
                seq += len(rows)
                verdicts.append(seq)
            except (sqlite3.IntegrityError, sqlite3.DataError) as error:
                self._connection.execute("ROLLBACK TO batch")
                verdicts.append(self._why_refused(rows, error))
            self._connection.execute("RELEASE batch")
        self._commit()
        refused = sum(not isinstance(verdict, int) for verdict in verdicts)
        self._count(seq, batches=len(group) - refused)
        self._refused += refused
        return verdicts

    def _numbered(self, rows: Iterator[Row], seq: int) -> Iterator[tuple[Any, ...]]:
        epoch = self._epoch
        for row in rows:
            seq += 1
            yield (seq, epoch, *row)

    def _begin(self) -> None:
        self._reach("before_begin")
        # IMMEDIATE: the write lock now or never, not at some later statement.
        self._connection.execute("BEGIN IMMEDIATE")
        self._reach("before_insert")

    def _commit(self) -> None:
        self._reach("before_commit")
        self._connection.execute("COMMIT")
        self._reach("after_commit")
        self._check_place()

    def _check_place(self) -> None:
        """Refuse to go on in a file that nobody can find again: SQLite itself does not notice.

        Raises:
            FileNotFoundError: the file is gone from its place, or another one is there.
        """
        try:
            is_there = os.path.samestat(self._file, os.stat(self._path))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise FileNotFoundError("the file was removed or replaced while it was in use")

    def _count(self, last_seq: int, *, batches: int) -> None:
        self._records += last_seq - self._last_seq
        self._last_seq = last_seq
        self._batches += batches
        self._commits += 1

    def _why_refused(self, rows: list[Row], error: sqlite3.Error) -> JournalError:
        """Name the node that had ended already; the batch has been taken out again."""
        ending: set[str] = set()
        for _, kind, node_id, _, terminal, _, _ in rows:
            if not terminal:
                continue
            found = self._connection.execute("SELECT 1 FROM events WHERE node_id = ? AND terminal = 1", (node_id,))
            if node_id in ending or found.fetchone():
                return duplicate_terminal(node_id, kind)
            ending.add(node_id)
        if isinstance(error, sqlite3.IntegrityError):
            # Somebody else wrote the same place: we are not alone, so nothing may go on.
            raise error
        return JournalError(f"SQLite cannot keep this batch: {error}; nothing of it was written")

    def _reach(self, point: str) -> None:
        if self._failpoint is not None:
            self._failpoint(point)

    def _fail(self, error: BaseException, group: list[_Batch]) -> None:
        """Take nothing more, and tell everyone who waits."""
        reason = (
            f"the journal {str(self._path)!r} has failed and takes nothing more: {error}; "
            "see that its disk works and has room, then start again"
        )
        with self._wake:
            self._refusal = (reason, error)
            queued, self._queue = self._queue, []
        try:
            # Before anyone hears of it: what they look at next must be what stays.
            self._connection.close()
        finally:
            for _, future in (*group, *queued):
                future.set_exception(_refused((reason, error)))

    def _release_file(self) -> None:
        """Close the database, and free the ownership if `close` has been called."""
        try:
            # A reader in the way must not hold up the end, and without this all
            # is still durable: it only leaves one file instead of two.
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            pass  # closed already after a failure, or a full disk: the log stays, and the next writer reads it
        self._connection.close()
        if self._closing:
            self._lock.release()


def _refused(refusal: tuple[str, BaseException | None]) -> JournalError:
    """Return a new error each time: one object raised in many threads would mix their tracebacks."""
    reason, cause = refusal
    error = JournalError(reason)
    error.__cause__ = cause
    return error


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
