"""A journal that keeps its promises in memory: for tests and for the in-process engine.

Nothing survives the process, of course. "Durable" here means released: a journal
with `hold=True` keeps what is appended until a test releases it, which forces
every order of "appended" and "durable" that a slow disk could produce.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from remit.core.errors import InvalidArgument, JournalBusy, JournalError
from remit.journal.record import (
    JournalRecord,
    Row,
    StoredRecord,
    StoredSnapshot,
    decode_data,
    duplicate_terminal,
    encode_records,
)
from remit.journal.store import DEFAULT_CLOSE_TIMEOUT_S

__all__ = ["MemoryJournal", "MemoryJournalReader"]


@dataclass(slots=True)
class _Shelf:
    """What outlives one writer. `lock` guards all of it, and is innermost."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    rows: list[tuple[int, Row]] = field(default_factory=list[tuple[int, Row]])
    """Epoch and row of each durable record; `seq` is its place, from 1."""
    ended: set[str] = field(default_factory=set[str])
    epoch: int = 0
    writer: MemoryJournal | None = None
    snapshot: StoredSnapshot | None = None


class MemoryJournal:
    """A `Journal` in memory.

    Args:
        hold: keep appended batches until `release`; otherwise they are durable,
            and their futures resolved, when `append` returns.
        previous: an earlier writer whose durable records this one takes over,
            as after a restart; it must be closed or have crashed.

    Raises:
        JournalBusy: the earlier writer is still alive.
    """

    def __init__(self, *, hold: bool = False, previous: MemoryJournal | None = None) -> None:
        self._hold = hold
        self._shelf: _Shelf = _Shelf() if previous is None else previous._shelf
        self._queue: deque[tuple[list[Row], Future[int], StoredSnapshot | None]] = deque()
        # Guards the queue and orders commits; taken before the shelf's lock.
        # Reentrant, since a future's callback may append; callbacks run under
        # it, so they must not wait for a thread that appends.
        self._lock = threading.RLock()
        self._ended_by = ""
        """Why nothing more is taken; the empty text while this is the writer."""
        with self._shelf.lock:
            if self._shelf.writer is not None:
                raise JournalBusy("this journal has a living writer; close it first", holder_pid=None)
            self._shelf.writer = self
            self._shelf.epoch += 1
            self._epoch = self._shelf.epoch

    @property
    def epoch(self) -> int:
        """Number of this writer's life, from 1."""
        return self._epoch

    @property
    def held(self) -> int:
        """Batches appended and not yet released."""
        return len(self._queue)

    def append(self, records: Sequence[JournalRecord]) -> Future[int]:
        """Queue one batch, or commit it at once; see `Journal.append`.

        Raises:
            InvalidArgument: a record cannot be kept; nothing was queued.

        Durability: none beyond this process.
        """
        return self._put(encode_records(records), None)

    def save_snapshot(self, seq: int, data: bytes) -> Future[int]:
        """Keep a state; see `Journal.save_snapshot`.

        Durability: none beyond this process.
        """
        return self._put([], StoredSnapshot(seq, 0, data))

    def _put(self, rows: list[Row], snapshot: StoredSnapshot | None) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._ended_by:
                self._queue.append((rows, future, snapshot))
                if not self._hold:
                    self.release()
                return future
        future.set_exception(JournalError(self._ended_by))
        return future

    def release(self, batches: int | None = None) -> int:
        """Make the oldest batches durable and resolve their futures.

        Args:
            batches: at most that many; None for all.

        Returns:
            How many there were.
        """
        released = 0
        while batches is None or released < batches:
            with self._lock:
                if not self._queue:
                    break
                rows, future, snapshot = self._queue.popleft()
                verdict = self._commit(rows, snapshot)
                released += 1
                # Under the lock: futures resolve in the order of the journal.
                if isinstance(verdict, JournalError):
                    future.set_exception(verdict)
                else:
                    future.set_result(verdict)
        return released

    def crash(self, reason: str = "the writer died") -> None:
        """Fail everything not yet durable, as a full disk or a dead writer would.

        A journal made with `previous=` this one then plays the next life.

        Args:
            reason: text of the error that waiting and later appends get.
        """
        self._end(reason)

    def reader(self) -> MemoryJournalReader:
        """Return a new reader of this journal; see `Journal.reader`."""
        return MemoryJournalReader(self._shelf)

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Release what is held, then refuse more; see `Journal.close`.

        Args:
            timeout_s: ignored; nothing here takes time.
        """
        with self._lock:
            self.release()
            self._end("the journal is closed")

    def _end(self, reason: str) -> None:
        with self._lock:
            if not self._ended_by:
                self._ended_by = reason
                with self._shelf.lock:
                    self._shelf.writer = None
            while self._queue:
                self._queue.popleft()[1].set_exception(JournalError(self._ended_by))

    def _commit(self, rows: list[Row], snapshot: StoredSnapshot | None) -> int | JournalError:
        """Put one batch on the shelf, or say why not."""
        shelf = self._shelf
        ending: set[str] = set()
        with shelf.lock:
            for _, kind, node_id, _, terminal, _, _ in rows:
                if terminal and (node_id in shelf.ended or node_id in ending):
                    return duplicate_terminal(node_id, kind)
                if terminal:
                    ending.add(node_id)
            shelf.ended |= ending
            shelf.snapshot = snapshot or shelf.snapshot
            shelf.rows.extend((self._epoch, row) for row in rows)
            return len(shelf.rows)


class MemoryJournalReader:
    """A `JournalReader` of a `MemoryJournal`; made by `MemoryJournal.reader`."""

    def __init__(self, shelf: _Shelf) -> None:
        self._shelf = shelf
        self._closed = False

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
            JournalError: the reader is closed.
            InvalidArgument: `after_seq` or `limit` is below zero.
        """
        if after_seq < 0 or (limit is not None and limit < 0):
            raise InvalidArgument(f"after_seq and limit must not be negative, got {after_seq} and {limit}")
        self._open_shelf()
        return self._read(after_seq, limit, node_id, turn_id, None if kinds is None else frozenset(kinds))

    def _read(
        self, seq: int, limit: int | None, node_id: str | None, turn_id: str | None, kinds: frozenset[str] | None
    ) -> Iterator[StoredRecord]:
        left = limit
        while left is None or left > 0:
            shelf = self._open_shelf()
            with shelf.lock:
                if seq >= len(shelf.rows):
                    return
                epoch, row = shelf.rows[seq]
            seq += 1
            at_unix_ms, kind, node, turn, terminal, data, _ = row
            if (node_id is not None and node != node_id) or (turn_id is not None and turn != turn_id):
                continue
            if kinds is not None and kind not in kinds:
                continue
            yield StoredRecord(seq, epoch, kind, node, turn, at_unix_ms, decode_data(data), bool(terminal))
            left = None if left is None else left - 1

    def payload(self, node_id: str, kind: str) -> bytes | None:
        """Return the latest payload; see `JournalReader.payload`.

        Raises:
            JournalError: the reader is closed.
        """
        shelf = self._open_shelf()
        with shelf.lock:
            for _, (_, row_kind, row_node, _, _, _, payload) in reversed(shelf.rows):
                if payload is not None and row_node == node_id and row_kind == kind:
                    return payload
        return None

    def snapshot(self) -> StoredSnapshot | None:
        """Return the latest snapshot; see `JournalReader.snapshot`.

        Raises:
            JournalError: the reader is closed.
        """
        return self._open_shelf().snapshot

    def base(self) -> int:
        """Return 0: nothing is ever taken away here.

        Raises:
            JournalError: the reader is closed.
        """
        self._open_shelf()
        return 0

    def ended_turns(self, *, limit: int | None = None) -> list[str]:
        """Return ended turns, latest first; see `JournalReader.ended_turns`.

        Raises:
            JournalError: the reader is closed.
        """
        ended = [node for node, turn in self._ends() if node == turn]
        return ended[::-1][:limit]

    def find_ended(self, text: str, *, limit: int) -> list[tuple[str, str]]:
        """Return ended nodes by a part of their id; see `JournalReader.find_ended`.

        Raises:
            JournalError: the reader is closed.
        """
        ends = self._ends()
        exact = [pair for pair in ends if pair[0] == text]
        return exact or [pair for pair in ends if pair[0].startswith(text) or pair[0].endswith(text)][:limit]

    def _ends(self) -> list[tuple[str, str]]:
        """Return node and turn of all that have ended, in the order of their ends."""
        shelf = self._open_shelf()
        with shelf.lock:
            return [(node, turn) for _, (_, _, node, turn, terminal, _, _) in shelf.rows if terminal]

    def last_seq(self) -> int:
        """Return the place of the last durable record, 0 in an empty journal.

        Raises:
            JournalError: the reader is closed.
        """
        shelf = self._open_shelf()
        with shelf.lock:
            return len(shelf.rows)

    def epoch(self) -> int:
        """Return the epoch of the latest writer.

        Raises:
            JournalError: the reader is closed.
        """
        return self._open_shelf().epoch

    def writer_alive(self) -> bool:
        """Return whether a writer is neither closed nor crashed.

        Raises:
            JournalError: the reader is closed.
        """
        return self._open_shelf().writer is not None

    def close(self) -> None:
        """Let go of the journal. Idempotent."""
        self._closed = True

    def _open_shelf(self) -> _Shelf:
        if self._closed:
            raise JournalError("this reader of the journal is closed")
        return self._shelf
