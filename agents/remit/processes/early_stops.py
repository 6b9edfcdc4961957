"""Stops that came before their start, on the disk, so that a daemon's death forgets none.

One line a stop, appended: a cancel of ten thousand runs costs one write. Lines of another
boot of the machine mean nothing, as no start of then can come any more.

**Invariants**

1. A stop is in the file before it is answered, unless the disk refuses it; then it is
   held in memory alone, and the log says so.
2. A line that was cut short by the end of a daemon is passed over, with no other one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remit.processes.jobs import boot_id
from remit.processes.records import EarlyStop, Records

__all__ = ["EarlyStops"]

_COMPACT_BYTES = 1_000_000
"""Size from which the file is written anew with what still counts."""


class EarlyStops:
    """Writes and reads the early stops of one daemon.

    Args:
        path: the file.
        records: whose stops are written, and read into.
        log: takes one line for people.
    """

    def __init__(self, path: Path, records: Records, *, log: Callable[[str], None]) -> None:
        self._path = path
        self._records = records
        self._log = log

    def note(self, stops: Iterable[EarlyStop]) -> None:
        """Append stops; they are in `records` already."""
        data = b"".join(_line(stop) for stop in stops)
        if not data:
            return
        try:
            _append(self._path, data)
        except OSError as error:
            self._log(f"early stops are held in memory alone, {self._path} cannot be written: {error}")

    def load(self, now: float) -> None:
        """Read what earlier daemons of this boot wrote; what is too old is forgotten.

        Args:
            now: monotonic seconds.
        """
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError:  # none was ever written, or it cannot be read: `note` will say so
            return
        for line in lines:
            stop = _read(line)
            if stop is not None:
                self._records.restore_stop(stop)
        self._records.prune_stops(now)

    def compact(self) -> None:
        """Write the file anew when it has grown large."""
        try:
            if self._path.stat().st_size < _COMPACT_BYTES:
                return
            beside = self._path.with_suffix(".new")
            beside.unlink(missing_ok=True)
            _append(beside, b"".join(_line(stop) for stop in self._records.stops()))
            beside.replace(self._path)
        except OSError:  # tried again at the next tick; the longer one says the same
            return


def _line(stop: EarlyStop) -> bytes:
    data = {
        "boot": boot_id(),
        "scope": stop.scope,
        "kind": stop.kind,
        "names": stop.names,
        "generation": stop.generation,
        "at": stop.at,
    }
    # The break comes first as well: what a daemon left half written ends here.
    return b"\n" + json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _read(line: bytes) -> EarlyStop | None:
    try:
        data: dict[str, Any] = json.loads(line)
        if data["boot"] != boot_id():
            return None
        generation = data["generation"]
        return EarlyStop(
            scope=str(data["scope"]),
            kind=str(data["kind"]),
            names=tuple(map(str, data["names"])),
            generation=None if generation is None else int(generation),
            at=float(data["at"]),
        )
    except (ValueError, TypeError, LookupError):
        return None


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
