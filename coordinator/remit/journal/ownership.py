"""Who owns a journal: an advisory lock that dies with its process.

The lock is `flock` on a file beside the journal: the kernel frees it when the
writer dies, however it dies, so there is nothing stale to clean up. The text in
the file says who to ask; only the lock itself says whether it still holds.
The file is never removed, since removing it would let two writers lock two files.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

from remit.core.errors import JournalBusy

__all__ = ["WriterLock", "lock_path", "open_private", "writer_alive"]

# A reader that looks whether a writer lives holds the lock shared for some
# microseconds, and a killed writer's lock is freed a moment after its death.
_TRIES = 6
_PAUSE_S = 0.02


def lock_path(journal: Path) -> Path:
    """Return the lock file of a journal.

    Args:
        journal: path of the database file.
    """
    return journal.with_name(journal.name + ".lock")


class WriterLock:
    """The right to write one journal, held until `release` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._guard = threading.Lock()  # guards the descriptor; two closers must not both close its number

    @classmethod
    def acquire(cls, journal: Path) -> WriterLock:
        """Take the lock; waits about a tenth of a second for it at most.

        Args:
            journal: path of the database file; its folder exists.

        Raises:
            JournalBusy: a living process has it; `holder_pid` says which, as far as known.
            OSError: the lock file cannot be opened.
        """
        path = lock_path(journal)
        fd = open_private(path)
        try:
            for _ in range(_TRIES):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_PAUSE_S)
                    continue
                lock = cls(fd)
                lock.sign(epoch=0)
                return lock
            raise _busy(journal, fd)
        except BaseException:
            os.close(fd)
            raise

    def sign(self, *, epoch: int) -> None:
        """Write into the lock file who holds it.

        Args:
            epoch: the holder's epoch; 0 while it is not known yet.
        """
        text = f"{os.getpid()} {epoch}\n".encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    def release(self) -> None:
        """Let the next writer in. Idempotent."""
        with self._guard:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            # Unlocked by name: closing alone would not free it while a forked
            # child still has the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def writer_alive(journal: Path) -> bool:
    """Return whether a living process holds the writer's lock just now.

    Args:
        journal: path of the database file.
    """
    try:
        fd = os.open(lock_path(journal), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # No lock file: nobody ever wrote here. Not readable: not ours to say yes.
        return False
    try:
        # Shared, so that two readers that look do not take each other for a writer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def open_private(path: Path) -> int:
    """Open a file for reading and writing, made with mode 0600 if it is not there.

    A file that exists keeps its mode: whoever widened it meant it.

    Args:
        path: where; its folder exists.

    Raises:
        OSError: it cannot be opened or made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    # The umask can only have taken bits away; our own writing must not depend on it.
    os.fchmod(fd, 0o600)
    return fd


def _busy(journal: Path, fd: int) -> JournalBusy:
    """Name the holder as far as the lock file knows it."""
    words = os.pread(fd, 64, 0).split()
    pid = int(words[0]) if words and words[0].isdigit() else None
    epoch = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
    who = "another process" if pid is None else f"process {pid}"
    return JournalBusy(
        f"the journal {str(journal)!r} is written by {who}; use the coordinator that runs there, or stop it first",
        path=str(journal),
        holder_pid=pid,
        holder_epoch=epoch,
    )
