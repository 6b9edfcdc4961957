"""The seams of the journal: what a writer and a reader promise, whatever lies below.

**Invariants** of every journal

1. `seq` runs from 1 without gaps, in the order of the calls of `append`; retention
   takes records away, and their places are not given out again.
2. The records of one `append` are all there or none is, also after a crash.
3. A node has at most one terminal record; a second one is refused with all that
   was appended in the same call, and with nothing else.
4. A future that has resolved speaks of records that a crash cannot take back.
5. One writer at a time; each has a larger `epoch` than all before it, and one that
   is not the latest any more can write nothing.
6. After the first error of the disk nothing more is written.
7. Whoever reads a snapshot, and the records behind it, misses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from remit.journal.record import JournalRecord, StoredRecord, StoredSnapshot

__all__ = ["DEFAULT_CLOSE_TIMEOUT_S", "Journal", "JournalReader"]

DEFAULT_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for the disk: the bound of all final work."""


class JournalReader(Protocol):
    """Reads a journal, also while another process writes it. Thread-safe."""

    def read(
        self,
        *,
        after_seq: int = 0,
        limit: int | None = None,
        node_id: str | None = None,
        turn_id: str | None = None,
        kinds: Collection[str] | None = None,
    ) -> Iterator[StoredRecord]:
        """Yield durable records in the order of the journal, without payloads.

        Records that are written meanwhile may or may not be among them; none
        is left out before one that is.

        Args:
            after_seq: only records behind this one; 0 for all.
            limit: at most that many; None for no limit.
            node_id: only records about this turn or run.
            turn_id: only records of this turn's tree.
            kinds: only records of these kinds; None for all, an empty one for none.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def payload(self, node_id: str, kind: str) -> bytes | None:
        """Return the latest payload of this kind of record about this node, or None.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def snapshot(self) -> StoredSnapshot | None:
        """Return the latest snapshot, or None if there is none.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def base(self) -> int:
        """Return the place up to which retention may have taken records away; 0 if it never has.

        There is a snapshot of that place, or of a later one.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def ended_turns(self, *, limit: int | None = None) -> list[str]:
        """Return the ids of turns that have ended, the latest end first.

        Args:
            limit: at most that many; None for all.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def find_ended(self, text: str, *, limit: int) -> list[tuple[str, str]]:
        """Return ended turns and runs whose id is, or begins or ends with, a text.

        Args:
            text: an id alone is enough; otherwise a part of one.
            limit: at most that many.

        Returns:
            Pairs of the node's id and that of its turn.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def last_seq(self) -> int:
        """Return the place of the last durable record, 0 in an empty journal.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def epoch(self) -> int:
        """Return the epoch of the latest writer, living or not.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def writer_alive(self) -> bool:
        """Return whether a living writer owns the journal just now."""
        ...

    def close(self) -> None:
        """Let go of the journal. Idempotent; the writer is not affected."""
        ...


class Journal(Protocol):
    """Writes a journal; whoever opened it is its only writer until `close`."""

    @property
    def epoch(self) -> int:
        """Number of this writer's life, from 1; larger than that of every writer before."""
        ...

    def append(self, records: Sequence[JournalRecord]) -> Future[int]:
        """Queue records as one indivisible batch.

        Thread-safe. Never waits for the disk. The future cannot be cancelled:
        what is queued will be written, whoever still waits for it. Its callbacks
        run in the writer's thread and hold up every later commit.

        Args:
            records: in their order; an empty batch resolves once everything that
                was appended before it is durable.

        Returns:
            A future of the place of the last record. It fails with
            `DuplicateTerminalEvent` (this batch was refused, nothing of it is
            there; `node_id` says for which node) or `JournalError` (the journal
            has failed; whether this batch is there is only known after the
            journal was opened again, but it is never there by half).

        Raises:
            InvalidArgument: a record cannot be kept; nothing was queued.

        Durability: when the future has resolved, the batch and all before it
            are on the disk (fsync).
        """
        ...

    def save_snapshot(self, seq: int, data: bytes) -> Future[int]:
        """Keep a state, in the place of all that were kept before.

        Thread-safe. Never waits for the disk. Queued behind everything that was
        appended before.

        Args:
            seq: place of the last record that is part of the state: the result
                of an `append`.
            data: the state; the journal does not look at it.

        Returns:
            A future as that of `append`.

        Durability: when the future has resolved, it is on the disk (fsync).
        """
        ...

    def reader(self) -> JournalReader:
        """Return a new reader of this journal; close it yourself.

        Raises:
            JournalError: the journal cannot be read.
        """
        ...

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Write what is queued, then let go of the journal. Idempotent.

        Later appends fail at once with `JournalError`.

        Args:
            timeout_s: seconds to wait for the disk. What has not been started by
                then fails with `JournalError`.

        Raises:
            JournalError: the disk took longer; the journal stays owned until it answers.

        Durability: on return without an error every future has resolved, and
            every successful one is on the disk.
        """
        ...
