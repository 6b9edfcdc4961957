"""The writer of every journal in a database: one thread, one fsync for many batches.

Group commit: while one commit is on its way to the disk, everything that is
appended queues up, and goes into the next transaction together. The slower the
disk, the larger the groups; the caller never waits for it.

Fencing: each transaction looks whether this writer's epoch is still the one in
the database, and keeps it so until its end. Whoever takes a journal over counts
the epoch up, so a writer that is believed dead and is not can add nothing.

**Invariants**

1. Only the writer thread touches the connection, from `__init__` on.
2. `_queue`, `_closing` and `_refusal` are guarded by `_wake`; nothing else is
   locked while it is held, and no future is resolved under it.
3. A queued future is resolved by the writer thread, exactly once, unless `close`
   ran out of time and took it from the queue first.
4. The ownership is given up only after the connection is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from remit.core.errors import JournalError, JournalFenced
from remit.journal.connection import Connection, EventRow
from remit.journal.record import JournalRecord, Row, duplicate_terminal, encode_records
from remit.journal.store import DEFAULT_CLOSE_TIMEOUT_S, JournalReader

__all__ = ["FAILPOINTS", "DatabaseJournal", "JournalStatistics", "Ownership"]

FAILPOINTS = ("before_begin", "before_insert", "before_commit", "after_commit")
"""Places of a commit, in order, at which a failpoint is called in the writer thread."""


class Ownership(Protocol):
    """The right to write one journal; ends by itself with the process or its connection."""

    def release(self) -> None:
        """Let the next writer in. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A state to keep, of everything up to a place."""

    seq: int
    data: bytes


_Batch: TypeAlias = "tuple[list[Row], Future[int], _Snapshot | None]"
_Verdict: TypeAlias = int | JournalError


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


class DatabaseJournal:
    """A `Journal` over a connection to a database. Begins its life, durably, when it is made.

    Args:
        connection: owned by this object from here on.
        ownership: released after the connection is closed.
        epoch: of this life, already counted up.
        last_seq: place of the last record.
        failpoint: see `SqliteJournal.open`.
    """

    def __init__(
        self,
        connection: Connection,
        ownership: Ownership,
        *,
        epoch: int,
        last_seq: int,
        failpoint: Callable[[str], None] | None,
    ) -> None:
        self._connection = connection
        self._ownership = ownership
        self._failpoint = failpoint
        self._epoch = epoch
        self._last_seq = last_seq
        self._records = self._batches = self._commits = self._refused = 0
        self._wake = threading.Condition(threading.Lock())
        self._queue: list[_Batch] = []
        self._closing = False
        self._refusal: tuple[JournalError, BaseException | None] | None = None
        """Why nothing more is taken, and what that came from."""
        # A daemon: a caller that forgets `close` must not hang the interpreter's
        # exit. What has not resolved by then was never promised.
        self._thread = threading.Thread(target=self._run, name="remit-journal", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Number of this writer's life, from 1."""
        return self._epoch

    @property
    def where(self) -> str:
        """The journal's place, for people."""
        return self._connection.where

    def append(self, records: Sequence[JournalRecord]) -> Future[int]:
        """Queue one batch for the next transaction; see `Journal.append`.

        Raises:
            InvalidArgument: a record cannot be kept; nothing was queued.

        Durability: when the future has resolved, the batch and all before it
            have been through fsync.
        """
        return self._put(encode_records(records), None)

    def save_snapshot(self, seq: int, data: bytes) -> Future[int]:
        """Keep a state in place of those before; see `Journal.save_snapshot`.

        Durability: when the future has resolved, it has been through fsync.
        """
        return self._put([], _Snapshot(seq, data))

    def _put(self, rows: list[Row], snapshot: _Snapshot | None) -> Future[int]:
        future: Future[int] = Future()
        # Running from the start: a waiter that is cancelled (asyncio hands its
        # cancellation on to such futures) takes nothing back from the journal.
        future.set_running_or_notify_cancel()
        with self._wake:
            refusal = self._refusal
            if refusal is None:
                self._queue.append((rows, future, snapshot))
                if len(self._queue) == 1:
                    self._wake.notify()
                return future
        future.set_exception(_refused(refusal))
        return future

    def reader(self) -> JournalReader:
        """Return a new reader of this journal; see `Journal.reader`.

        Raises:
            JournalError: the journal cannot be read.
        """
        raise NotImplementedError  # each database has its own

    def statistics(self) -> JournalStatistics:
        """Return what was done so far."""
        return JournalStatistics(
            records=self._records,
            batches=self._batches,
            commits=self._commits,
            refused=self._refused,
            queued=len(self._queue),
        )

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Write what is queued and let go of the journal.

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
                self._refusal = (JournalError(f"the journal {self.where} is closed"), None)
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandon(timeout_s)
        self._ownership.release()

    def _abandon(self, timeout_s: float) -> None:
        """Give up what the disk has not been asked for yet."""
        with self._wake:
            left, self._queue = self._queue, []
        reason = f"the disk of the journal {self.where} did not answer within {timeout_s} s of its closing"
        for _, future, _ in left:
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
                return
            for (_, future, _), verdict in zip(group, verdicts, strict=True):
                if isinstance(verdict, int):
                    future.set_result(verdict)
                else:
                    future.set_exception(verdict)
        self._connection.tidy()
        self._end()

    def _end(self) -> None:
        """Close the database, and free the ownership if `close` has been called."""
        self._connection.close()
        if self._closing:
            self._ownership.release()

    def _next_group(self) -> list[_Batch]:
        """Wait for batches and take all there are; none once closed and drained."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            group, self._queue = self._queue, []
            return group

    def _write(self, group: list[_Batch]) -> list[_Verdict]:
        """Make a group durable; return for each batch its last place or why it was refused."""
        if not any(rows or snapshot for rows, _, snapshot in group):
            return [self._last_seq] * len(group)
        try:
            return self._write_together(group)
        except self._connection.refusals:
            # One batch in the group cannot be. That is rare, so savepoints for
            # each batch are paid for only now that we must know which one.
            self._connection.rollback()
            return self._write_singly(group)

    def _write_together(self, group: list[_Batch]) -> list[_Verdict]:
        seq = self._last_seq
        verdicts: list[_Verdict] = []
        numbered: list[EventRow] = []
        for rows, _, _ in group:
            seq = self._number(rows, seq, numbered)
            verdicts.append(seq)
        self._begin()
        if numbered:
            self._connection.insert(numbered)
        self._write_snapshots(group)
        self._commit()
        self._count(seq, batches=len(group))
        return verdicts

    def _write_singly(self, group: list[_Batch]) -> list[_Verdict]:
        seq = self._last_seq
        verdicts: list[_Verdict] = []
        self._begin()
        for rows, _, _ in group:
            numbered: list[EventRow] = []
            last = self._number(rows, seq, numbered)
            self._connection.query("SAVEPOINT batch")
            try:
                self._connection.insert(numbered)
                seq = last
                verdicts.append(seq)
            except self._connection.refusals as error:
                self._connection.query("ROLLBACK TO SAVEPOINT batch")
                verdicts.append(self._why_refused(rows, error))
            self._connection.query("RELEASE SAVEPOINT batch")
        self._write_snapshots(group)
        self._commit()
        refused = sum(not isinstance(verdict, int) for verdict in verdicts)
        self._count(seq, batches=len(group) - refused)
        self._refused += refused
        return verdicts

    def _number(self, rows: list[Row], seq: int, into: list[EventRow]) -> int:
        """Give rows their places; return the last one."""
        epoch = self._epoch
        for row in rows:
            seq += 1
            into.append((seq, epoch, *row))
        return seq

    def _write_snapshots(self, group: list[_Batch]) -> None:
        for _, _, snapshot in group:
            if snapshot is not None:
                at = time.time_ns() // 1_000_000
                query = self._connection.query
                query("DELETE FROM snapshots")
                query("INSERT INTO snapshots (seq, at_unix_ms, data) VALUES (?, ?, ?)", snapshot.seq, at, snapshot.data)

    def _begin(self) -> None:
        self._reach("before_begin")
        self._connection.begin()
        found = self._connection.query("SELECT value FROM meta WHERE name = 'epoch'")
        current = int(found[0][0]) if found else 0
        if current != self._epoch:
            raise JournalFenced(
                f"the journal {self.where} was taken over by another coordinator (life {current}, this one is "
                f"{self._epoch}); this one writes nothing any more, use the other",
                epoch=self._epoch,
                current_epoch=current,
            )
        self._reach("before_insert")

    def _commit(self) -> None:
        self._reach("before_commit")
        self._connection.commit()
        self._reach("after_commit")
        self._connection.check_place()

    def _count(self, last_seq: int, *, batches: int) -> None:
        self._records += last_seq - self._last_seq
        self._last_seq = last_seq
        self._batches += batches
        self._commits += 1

    def _why_refused(self, rows: list[Row], error: Exception) -> JournalError:
        """Name the node that had ended already; the batch has been taken out again."""
        ending: set[str] = set()
        for _, kind, node_id, _, terminal, _, _ in rows:
            if not terminal:
                continue
            found = self._connection.query("SELECT 1 FROM events WHERE node_id = ? AND terminal = 1", node_id)
            if node_id in ending or found:
                return duplicate_terminal(node_id, kind)
            ending.add(node_id)
        if "unique" in str(error).lower():
            # Somebody else wrote the same place: we are not alone, so nothing may go on.
            raise error
        return JournalError(f"the database cannot keep this batch: {error}; nothing of it was written")

    def _reach(self, point: str) -> None:
        if self._failpoint is not None:
            self._failpoint(point)

    def _fail(self, error: BaseException, group: list[_Batch]) -> None:
        """Take nothing more, and tell everyone who waits."""
        if isinstance(error, JournalFenced):
            told: JournalError = error
        else:
            told = JournalError(
                f"the journal {self.where} has failed and takes nothing more: {str(error).strip()}; "
                "see that its disk works and has room, then start again"
            )
        with self._wake:
            self._refusal = (told, error)
            queued, self._queue = self._queue, []
        try:
            # Before anyone hears of it: what they look at next must be what stays.
            self._end()
        finally:
            for _, future, _ in (*group, *queued):
                future.set_exception(_refused((told, error)))


def _refused(refusal: tuple[JournalError, BaseException | None]) -> JournalError:
    """Return a new error each time: one object raised in many threads would mix their tracebacks."""
    told, cause = refusal
    error = type(told)(**told.__dict__)
    error.__cause__ = cause
    return error
