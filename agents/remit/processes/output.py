"""What a program printed: kept in files, read back as head and tail, or followed.

Files and not pipes: a file has no other end that a forgotten grandchild could
hold open, so the end of output never has to be waited for.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remit.core.errors import InvalidArgument

__all__ = ["STDERR_NAME", "STDOUT_NAME", "Captured", "follow", "open_output", "read_capture"]

STDOUT_NAME = "stdout"
"""Name of the file for standard output in the output directory."""
STDERR_NAME = "stderr"
"""Name of the file for standard error in the output directory."""

HEAD_BYTES = 16_384
"""How much of the start of an output is shown, by default."""
TAIL_BYTES = 16_384
"""How much of the end of an output is shown, by default."""
LINE_BYTES = 16_384
"""How much of one line is shown, by default."""

_NOTE_BYTES = 96
"""Room kept for the line that says what was left out."""
_CHUNK_BYTES = 65_536


class Captured(str):
    """The part of an output that is shown, as a text, and how much there was.

    Head and tail, with one line between them that says what was left out. Equal
    to, and usable as, that text.

    Args:
        text: what is shown.
        total_bytes: bytes that the program wrote.
        omitted_bytes: bytes of those that the text does not show.
        path: file with everything.
    """

    total_bytes: int
    """Bytes that the program wrote."""
    omitted_bytes: int
    """Bytes of those that the text does not show."""
    path: Path
    """File with everything."""

    def __new__(cls, *, text: str, total_bytes: int, omitted_bytes: int, path: Path) -> Captured:
        """Make a text that knows how much it leaves out."""
        self = super().__new__(cls, text)
        self.total_bytes = total_bytes
        self.omitted_bytes = omitted_bytes
        self.path = path
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        """Pickle by the constructor's arguments."""
        return (), {
            "text": self.text,
            "total_bytes": self.total_bytes,
            "omitted_bytes": self.omitted_bytes,
            "path": self.path,
        }

    @property
    def text(self) -> str:
        """Return the text alone, as a plain `str`."""
        return str(self)

    @property
    def truncated(self) -> bool:
        """Tell whether the text is less than everything."""
        return self.omitted_bytes > 0

    @property
    def retained_bytes(self) -> int:
        """Return how many of the written bytes the text shows."""
        return self.total_bytes - self.omitted_bytes

    def __str__(self) -> str:
        """Return the text alone, as a plain `str`."""
        return "".join(self)


def open_output(path: Path) -> int:
    """Open a file for a program to write to; return its descriptor, which the caller closes.

    The file is readable by its owner alone and opened for appending, so that
    several writers do not overwrite each other.

    Raises:
        OSError: the file cannot be made, or the path is a symbolic link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def read_capture(
    path: Path,
    *,
    head_bytes: int = HEAD_BYTES,
    tail_bytes: int = TAIL_BYTES,
    max_line_bytes: int | None = LINE_BYTES,
    offset: int = 0,
) -> Captured:
    """Read an output back: all of it if it is small, else its head and its tail.

    Cuts fall between characters; bytes that are no UTF-8 become U+FFFD. Memory
    and time do not grow with the file. The text, encoded as UTF-8, takes at
    most `head_bytes + tail_bytes`, notes about long lines not counted.

    Args:
        path: file to read; a missing one reads as empty.
        head_bytes: bytes shown of the start, from 0.
        tail_bytes: bytes shown of the end, from 128.
        max_line_bytes: bytes shown of one line, from 1; None shows all.
        offset: where this output begins in the file, in bytes.

    Raises:
        InvalidArgument: a size is out of its range.
        OSError: the file cannot be read.
    """
    _check_sizes(head_bytes, tail_bytes, max_line_bytes, offset)
    try:
        with path.open("rb") as file:
            total = max(0, os.fstat(file.fileno()).st_size - offset)
            if total <= head_bytes + tail_bytes:
                file.seek(offset)
                head, tail = file.read(total), b""
                # A file that shrank meanwhile has this many bytes, not the promised ones.
                total = len(head)
            else:
                file.seek(offset)
                head = file.read(head_bytes)
                file.seek(offset + total - tail_bytes)
                tail = file.read(tail_bytes)
    except FileNotFoundError:
        return Captured(text="", total_bytes=0, omitted_bytes=0, path=path)
    if len(head) == total and _shown_bytes(head) <= head_bytes + tail_bytes:
        text, omitted = _cut_lines(head, max_line_bytes)
    else:
        # All read, but characters shown for bad bytes make it too long: the rest of it is the tail.
        tail = tail or head[head_bytes:]
        text, omitted = _head_and_tail(
            _fit(head[:head_bytes], head_bytes, keep_start=True),
            _fit(tail, tail_bytes - _NOTE_BYTES, keep_start=False),
            total,
            max_line_bytes,
        )
    return Captured(text=text, total_bytes=total, omitted_bytes=omitted, path=path)


def follow(
    path: Path,
    *,
    stopped: Callable[[], bool],
    poll: Callable[[], object] = lambda: time.sleep(0.1),
    offset: int = 0,
) -> Iterator[str]:
    """Yield an output as it grows, in pieces of whole characters.

    Ends when `stopped` says so and everything written before that was yielded.
    A file that is not there yet is waited for.

    Args:
        path: file to read.
        stopped: tells whether the writer is gone.
        poll: called to wait when there is nothing new.
        offset: where to begin in the file, in bytes.

    Yields:
        Pieces of text, never empty; bytes that are no UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = offset
    while True:
        # Asked before reading: what was written before the stop is then read for sure.
        is_last = stopped()
        while data := _read_at(path, position):
            position += len(data)
            if text := decoder.decode(data):
                yield text
        if is_last:
            break
        poll()
    if text := decoder.decode(b"", final=True):
        yield text


def _read_at(path: Path, position: int) -> bytes:
    # Opened for each piece: a generator that is dropped midway then holds no descriptor.
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(_CHUNK_BYTES)
    except FileNotFoundError:
        return b""


def _check_sizes(head_bytes: int, tail_bytes: int, max_line_bytes: int | None, offset: int) -> None:
    if head_bytes < 0 or offset < 0:
        raise InvalidArgument("head_bytes and offset must be 0 or more")
    if tail_bytes < _NOTE_BYTES + 32:
        raise InvalidArgument(
            f"tail_bytes must be at least {_NOTE_BYTES + 32}: the note on what was left out is part of it"
        )
    if max_line_bytes is not None and max_line_bytes < 1:
        raise InvalidArgument("max_line_bytes must be 1 or more, or None")


def _shown_bytes(data: bytes) -> int:
    """Return how long the text of these bytes is: a bad byte is shown as three."""
    return len(data.decode("utf-8", "replace").encode())


def _head_and_tail(head: bytes, tail: bytes, total: int, max_line_bytes: int | None) -> tuple[str, int]:
    """Return head, note and tail as text, and how many bytes are not shown."""
    between = total - len(head) - len(tail)
    head_text, head_cut = _cut_lines(head, max_line_bytes)
    tail_text, tail_cut = _cut_lines(tail, max_line_bytes)
    note = f"\n[... {between} of {total} bytes left out ...]\n"
    return head_text + note + tail_text, between + head_cut + tail_cut


def _fit(data: bytes, limit: int, *, keep_start: bool) -> bytes:
    """Shorten raw bytes, between characters, until their text takes at most `limit` bytes."""
    size = limit
    while True:
        part = _cut_end(data, size) if keep_start else _cut_start(data, size)
        encoded = _shown_bytes(part)
        if encoded <= limit:
            return part
        # Shrinks by at least one byte a turn.
        size = min(len(part) - 1, len(part) * limit // encoded)


def _cut_end(data: bytes, size: int) -> bytes:
    """Return the first `size` bytes or up to three less, so that no character is split."""
    part = data[:size]
    for back in range(1, min(3, len(part)) + 1):
        lead = part[-back]
        if lead & 0xC0 != 0x80:  # not a continuation byte: the last character starts here
            width = 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4 if lead >> 3 == 0b11110 else 1
            return part[:-back] if width > back else part
    return part


def _cut_start(data: bytes, size: int) -> bytes:
    """Return the last `size` bytes or up to three less, so that no character is split."""
    start = max(0, len(data) - size)
    for skip in range(min(3, len(data) - start) + 1):
        if start + skip >= len(data) or data[start + skip] & 0xC0 != 0x80:
            return data[start + skip :]
    return data[start:]  # four continuation bytes: not UTF-8 at all, so there is nothing to split


def _cut_lines(data: bytes, max_line_bytes: int | None) -> tuple[str, int]:
    """Return the text with long lines shortened, and the number of bytes taken away."""
    if max_line_bytes is None or len(data) <= max_line_bytes:
        return data.decode("utf-8", "replace"), 0
    lines: list[str] = []
    cut = 0
    for line in data.split(b"\n"):
        kept = line if len(line) <= max_line_bytes else _cut_end(line, max_line_bytes)
        text = kept.decode("utf-8", "replace")
        if kept is not line:
            cut += len(line) - len(kept)
            text += f" [... {len(line) - len(kept)} bytes of this line left out]"
        lines.append(text)
    return "\n".join(lines), cut
