"""What it takes to begin a run, kept in files until the run has ended.

The journal says that a run was accepted and nothing of its agent and arguments:
these may hold anything, and a journal is for ever. A coordinator that is begun
again needs them all the same, for what has not begun and for further attempts. So
they lie beside the journal, readable by the owner alone, and go with their run.

A delegation is appended to the current segment before its acceptance is durable.
A segment is removed when none of its runs lives; the current one is emptied then.

**Durability**: written, not synced: what was written outlives a killed coordinator,
and may not outlive a machine that loses its power. Then the runs that had not begun
are `lost`, and say so. That is the price of no second sync a delegation.

**Invariants**

1. A segment holds whole entries; one that is cut short is the last, and is ignored.
2. Old segments are removed after what lives was copied: a crash in between leaves
   copies, never a gap.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from remit.core.messages import DelegateRequest, RunRequest, dumps, loads

__all__ = ["BriefSpool", "Briefs"]

logger = logging.getLogger("remit.coordinator")

_SEGMENT_BYTES = 8 * 1024 * 1024
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Briefs:
    """Part of a delegation: what hosts need to begin some of its runs."""

    delegation: DelegateRequest
    """With these runs alone."""

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs that can be begun with it."""
        return tuple(run.run_id for run in self.delegation.runs)


class BriefSpool:
    """The segments of one workspace; written by its coordinator alone, from its event loop.

    Writing goes to the page cache and holds the loop up for microseconds a delegation.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self._epoch = epoch
        self._number = 0
        self._live: dict[int, int] = {}
        """Segment -> its runs that have not ended."""
        self._segment_of: dict[str, int] = {}
        self._size = 0
        self._file = -1
        self._failed = False

    @classmethod
    def open(cls, folder: Path, epoch: int, wanted: Collection[str]) -> tuple[BriefSpool, list[Briefs]]:
        """Begin a spool and take over what earlier lives have left of runs that have not ended.

        Args:
            folder: where the segments are; made if it is missing, for the owner alone.
            epoch: number of this life, larger than all before.
            wanted: the runs that have not ended.

        Returns:
            The spool, and what was found of the wanted runs.
        """
        spool = cls(folder, epoch)
        found: list[Briefs] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            old = sorted(folder.glob("*.briefs"))
        except OSError as error:
            spool._give_up(error)
            return spool, found
        left = set(wanted)
        for path in old:
            for delegation in _read(path):
                mine = tuple(run for run in delegation.runs if run.run_id in left)
                if mine:
                    left -= {run.run_id for run in mine}
                    found.append(Briefs(replace(delegation, runs=mine)))
        for briefs in found:
            spool.keep(briefs.delegation, briefs.delegation.runs)
        for path in old:
            path.unlink(missing_ok=True)
        return spool, found

    def keep(self, delegation: DelegateRequest, runs: Iterable[RunRequest]) -> None:
        """Write down what it takes to begin these runs of a delegation.

        A disk that does not take it is no reason to refuse the runs: they can be
        begun now, though not by a later life. It is logged once.
        """
        kept = tuple(runs)
        if self._failed or not kept:
            return
        blob = dumps(delegation if len(kept) == len(delegation.runs) else replace(delegation, runs=kept))
        try:
            if self._file < 0 or self._size > _SEGMENT_BYTES:
                self._next_segment()
            _write_all(self._file, _LENGTH.pack(len(blob)) + blob)
        except OSError as error:
            self._give_up(error)
            return
        self._size += _LENGTH.size + len(blob)
        for run in kept:
            self._segment_of[run.run_id] = self._number
        self._live[self._number] = self._live.get(self._number, 0) + len(kept)

    def drop(self, run_id: str) -> None:
        """Forget a run that has ended; its segment goes with the last of them."""
        number = self._segment_of.pop(run_id, None)
        if number is None:
            return
        self._live[number] -= 1
        if self._live[number] == 0 and number != self._number:
            del self._live[number]
            self._path(number).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Empty the current segment if none of its runs lives; called now and then."""
        if self._file >= 0 and self._size and not self._live.get(self._number):
            os.ftruncate(self._file, 0)
            self._size = 0

    def close(self) -> None:
        """Let go of the file. Idempotent; what is kept stays for the next life."""
        self.tidy()
        self._abandon()

    def _abandon(self) -> None:
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        logger.error("arguments of runs cannot be kept in %s, a restart will lose what waits: %s", self._folder, error)

    def _next_segment(self) -> None:
        self._abandon()
        finished = self._number
        self._number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path(self._number), flags, 0o600)
        self._size = 0
        if self._live.get(finished) == 0:
            del self._live[finished]
            self._path(finished).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._epoch:010d}-{number:06d}.briefs"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(path: Path) -> Iterator[DelegateRequest]:
    """Yield the whole entries of a segment."""
    data = memoryview(path.read_bytes())
    while len(data) >= _LENGTH.size:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        blob = data[_LENGTH.size : _LENGTH.size + length]
        if len(blob) < length:
            return
        try:
            yield loads(bytes(blob))
        except Exception as error:  # damaged bytes, or those of another version, can raise anything
            logger.warning("an entry of %s cannot be read: %s", path.name, error)
        data = data[_LENGTH.size + length :]
