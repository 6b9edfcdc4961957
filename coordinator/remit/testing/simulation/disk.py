"""The journal of a simulation: the in-memory one, with a disk that is slow and breaks.

**What it may do to a coordinator**

1. A batch is durable a while after it was handed over, several in one commit.
2. A crash takes along what was not durable; part of it may have reached the disk without anybody
   having been told.
3. After the first error nothing more is written in this life. Whether the batch that met
   the error is there, only the next life sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from remit.core.errors import JournalError
from remit.core.events import Event, decode_event
from remit.journal import JournalRecord, MemoryJournal
from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["Disk"]

Done = Callable[[BaseException | None], None]


class Disk:
    """One journal over all lives of the coordinator.

    Args:
        kernel: the clock.
        dice: delays, and what a crash leaves.
    """

    def __init__(self, kernel: Kernel, dice: Dice) -> None:
        self._kernel = kernel
        self._dice = dice
        self._journal: MemoryJournal | None = None
        self._waiting: deque[tuple[Future[int], Done]] = deque()
        self._broken_until = -1.0
        self._fail_next = False
        self._commits = 0
        self._due = False

    @property
    def epoch(self) -> int:
        """Number of the life that writes, or wrote last."""
        return self._journal.epoch if self._journal is not None else 0

    def fail(self, seconds: float) -> None:
        """Let the next write fail, and every other one for some seconds."""
        self._fail_next = True
        self._broken_until = self._kernel.now + seconds

    def heal(self) -> None:
        """End all faults."""
        self._fail_next = False
        self._broken_until = -1.0

    def open(self) -> None:
        """Begin a life as the only writer.

        Raises:
            JournalError: the disk is broken.
        """
        if self._kernel.now < self._broken_until:
            raise JournalError("the simulated disk is broken")
        self._journal = MemoryJournal(hold=True, previous=self._journal)
        self._waiting.clear()
        self._due = False

    def append(self, records: Sequence[JournalRecord], done: Done) -> None:
        """Write a batch; `done` gets None when it is durable, or the error."""
        assert self._journal is not None
        self._waiting.append((self._journal.append(records), done))
        if not self._due:
            self._due = True
            self._commits += 1
            delay = self._dice.between(0.0005, 0.01, "fsync", self._commits)
            if self._dice.chance(0.03, "slow disk", self._commits):
                delay += self._dice.between(0.1, 1.0, "slow disk by", self._commits)
            journal = self._journal
            self._kernel.after(delay, lambda: self._commit(journal))

    def _commit(self, journal: MemoryJournal) -> None:
        if journal is not self._journal:
            return  # that life is over
        self._due = False
        waiting, self._waiting = self._waiting, deque()
        if self._fail_next or self._kernel.now < self._broken_until:
            self._fail_next = False
            written = int(self._dice.unit("written all the same", self._commits) * (len(waiting) + 1))
            journal.release(written)
            journal.crash("the simulated disk failed")
            for _, done in waiting:
                done(JournalError("the simulated disk failed"))
            return
        journal.release()
        for future, done in waiting:
            done(future.exception())

    def crash(self) -> None:
        """End a life: what had not been written may or may not be there, a whole batch or nothing of it."""
        if self._journal is None:
            return
        written = int(self._dice.unit("left by the crash", self._commits, self.epoch) * (len(self._waiting) + 1))
        self._journal.release(written)
        self._journal.crash()
        self._waiting.clear()

    def close(self) -> None:
        """End a life in order: everything is written."""
        if self._journal is not None:
            self._journal.close()
            self._waiting.clear()

    def events(self) -> list[Event]:
        """Return everything durable, read back from its stored form."""
        if self._journal is None:
            return []
        reader = self._journal.reader()
        return [decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in reader.read()]
