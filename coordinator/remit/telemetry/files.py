"""Traces as files of a workspace: appended to, in segments, under a limit.

**Invariants**

1. What is written is whole lines; a torn last line is left out by readers.
2. All segments of a folder together stay below the limit: the oldest go first.
3. A disk that fails costs what was to be written, and is counted; nothing else.

Files are readable by their owner alone: reasons of cancels and names of paths are in them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from remit.telemetry.otlp import decode_spans, encode_logs, encode_spans
from remit.telemetry.record import Batch, SpanRecord

__all__ = ["FileSink", "SegmentFile", "read_traces", "traces_folder"]

logger = logging.getLogger("remit.telemetry")

_T = TypeVar("_T")
_LINE_ITEMS = 256
_SEGMENTS = 8
"""Parts of the limit that one segment may take: so much goes at once when it is reached."""


def traces_folder(workspace: str | Path) -> Path:
    """Return where a workspace's traces are."""
    return Path(workspace) / ".remit" / "traces"


class SegmentFile:
    """Appends lines to segments `<stem>-<milliseconds>-<pid>.jsonl` of a folder.

    Args:
        folder: made when the first line comes.
        stem: what the segments hold: `traces`, `logs`, `host`.
        max_bytes: of all segments in the folder together.
    """

    def __init__(self, folder: Path, stem: str, max_bytes: int) -> None:
        self._folder = folder
        self._stem = stem
        self._max_bytes = max_bytes
        self._path: Path | None = None
        self._stamp = 0
        self._size = 0

    def append(self, line: str) -> None:
        """Write one line.

        Raises:
            OSError: the disk refused it.
        """
        data = line.encode("utf-8", "replace") + b"\n"
        if self._path is None or self._size + len(data) > self._max_bytes // _SEGMENTS:
            self._next_segment(len(data))
        assert self._path is not None
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        self._size += len(data)

    def _next_segment(self, room: int) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two that begin in one millisecond are two all the same: the size of each is counted from nothing.
        self._stamp = max(time.time_ns() // 1_000_000, self._stamp + 1)
        self._path = self._folder / f"{self._stem}-{self._stamp:013d}-{os.getpid()}.jsonl"
        self._size = 0
        self._make_room(max(room, self._max_bytes // _SEGMENTS))

    def _make_room(self, wanted: int) -> None:
        """Remove the oldest segments until what is wanted fits below the limit."""
        found = sorted((_age(path), path) for path in self._folder.glob("*.jsonl") if path != self._path)
        total = sum(_size(path) for _, path in found)
        for _, path in found:
            if total + wanted <= self._max_bytes:
                return
            total -= _size(path)
            path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class FileSink:
    """Keeps spans and log records of one process in a folder.

    Args:
        folder: where; see `traces_folder`.
        max_bytes: of all files there.
        resource: attributes of this process.
    """

    def __init__(self, folder: Path, *, max_bytes: int, resource: dict[str, str]) -> None:
        self._spans = SegmentFile(folder, "traces", max_bytes)
        self._logs = SegmentFile(folder, "logs", max_bytes)
        self._resource = resource
        self.dropped = 0
        """Spans and records that could not be written."""

    @property
    def is_measured(self) -> bool:
        """Files hold no measurements."""
        return False

    def export(self, batch: Batch) -> None:
        """Write what a batch holds; a disk that refuses is counted and told once."""
        try:
            for part in _parts(batch.spans):
                self._spans.append(encode_spans(part, self._resource))
            for records in _parts(batch.logs):
                self._logs.append(encode_logs(records, self._resource))
        except OSError as error:
            if not self.dropped:
                logger.warning("traces cannot be written: %s", error)
            self.dropped += len(batch.spans) + len(batch.logs)

    def is_sampled(self, trace: int) -> bool:
        """Files keep every trace."""
        return True

    def flush(self, timeout_s: float) -> None:
        """Nothing waits in here."""

    def close(self, timeout_s: float) -> None:
        """No file stays open between two lines."""


def _parts(items: list[_T]) -> Iterator[list[_T]]:
    """Yield lists of a few hundred: lines that readers and segments can take."""
    for begin in range(0, len(items), _LINE_ITEMS):
        yield items[begin : begin + _LINE_ITEMS]
        time.sleep(0)  # others of this process get their turn


def read_traces(folder: Path, mark: str) -> Iterator[SpanRecord]:
    """Yield the spans in a folder's lines that hold a text, such as the id of a turn.

    Lines that cannot be read, such as the torn last one of a process that was killed, are left out.
    """
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith("logs-"):
            continue
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if mark in line:
                        yield from _spans_of(line)
        except OSError:
            continue  # removed to make room, just now


def _spans_of(line: str) -> list[SpanRecord]:
    try:
        return list(decode_spans(line))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []  # torn, or not of ours
