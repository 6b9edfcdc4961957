"""Keep the output of a job on the disk within its cap, without a pipe and without stopping it.

The keeper looks at the sizes of the two files. What lies between the kept head
and the kept tail is given back to the file system (a hole is punched), so the
file keeps its length, counts every byte that was written, and takes no more
than the cap. Where holes cannot be punched the job has to be stopped.

Bounds: between two looks a program may write as much as the disk takes in
`SLOW_S`; that is how far a file may be above its cap for that long.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remit.processes.output import open_output

__all__ = ["CappedFile", "OutputGuard", "keep", "punch"]

FAST_S = 0.02
"""Pause between two looks while a file grows fast."""
SLOW_S = 0.25
"""Pause between two looks while it does not."""

_BLOCK_BYTES = 65_536
_FALLOC_FL_KEEP_SIZE = 1  # fallocate(2)
_FALLOC_FL_PUNCH_HOLE = 2


def punch(descriptor: int, start: int, end: int) -> bool:
    """Give the bytes of a file between two offsets back; tell whether that is possible here.

    Source: fallocate(2), FALLOC_FL_PUNCH_HOLE (ext4, xfs, btrfs, tmpfs, overlayfs).
    """
    if sys.platform != "linux":
        return False
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    return bool(_libc().fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(end - start)) == 0)


def keep(descriptor: int, start: int, end: int) -> bool:
    """Give nothing back: what `punch` does where holes are switched off."""
    return False


@dataclass(slots=True)
class CappedFile:
    """One stream of one job.

    Attributes:
        descriptor: open for writing; given to the program and kept.
        offset: where this job's output begins in the file, in bytes.
        cap: bytes that stay.
        punched_to: end of what was given back, or 0.
    """

    descriptor: int
    offset: int
    cap: int
    punched_to: int = 0
    seen: int = 0

    @classmethod
    def open(cls, path: Path, *, cap: int) -> CappedFile:
        """Open a file to append to.

        Raises:
            OSError: it cannot be made, or is a symbolic link.
        """
        descriptor = open_output(path)
        return cls(descriptor, os.fstat(descriptor).st_size, cap)

    @property
    def _head_end(self) -> int:
        return _round_up(self.offset + self.cap // 2)

    def size(self) -> int:
        """Return how many bytes were written, kept or not."""
        return max(0, os.fstat(self.descriptor).st_size - self.offset)

    def trim(self, punch: Callable[[int, int, int], bool]) -> bool:
        """Give the middle back if the file is above its cap; tell whether that was possible."""
        size = self.size()
        if self.offset + size < self.punched_to:  # the program cut its own file
            self.punched_to = 0
        start = self.punched_to or self._head_end
        if size - (start - self._head_end) <= self.cap:
            return True
        # Half of the tail's share at a time, so that a hole is punched seldom.
        end = _round_down(self.offset + size - self.cap // 4)
        if end <= start:
            return True
        if not punch(self.descriptor, start, end):
            return False
        self.punched_to = end
        return True


class OutputGuard:
    """Both streams of a job, looked at from time to time.

    Args:
        files: standard output, standard error.
        punch: gives bytes back, see `punch`.
    """

    def __init__(self, files: tuple[CappedFile, CappedFile], *, punch: Callable[[int, int, int], bool] = punch) -> None:
        self.files = files
        self.is_over = False
        self._punch = punch

    @property
    def is_truncated(self) -> bool:
        """Tell whether anything was given back."""
        return any(file.punched_to for file in self.files)

    def look(self) -> float:
        """Trim what is above its cap; return seconds until the next look.

        Afterwards `is_over` tells whether a file is above its cap and cannot be trimmed.
        """
        grown = 0
        for file in self.files:
            size = file.size()
            grown = max(grown, size - file.seen)
            file.seen = size
            if not file.trim(self._punch):
                self.is_over = True
        return FAST_S if grown > self.files[0].cap // 64 else SLOW_S

    def close(self) -> None:
        """Close both files."""
        for file in self.files:
            os.close(file.descriptor)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes written to standard output and to standard error."""
        return self.files[0].size(), self.files[1].size()


def _round_up(value: int) -> int:
    return -(-value // _BLOCK_BYTES) * _BLOCK_BYTES


def _round_down(value: int) -> int:
    return value // _BLOCK_BYTES * _BLOCK_BYTES


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
