"""What a keeper holds open towards others: connections that never block it, and the pipe to standard input."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from remit.core.errors import ProcessProtocolError
from remit.processes import frames

__all__ = ["Connection", "InputPipe"]

_READ_BYTES = 262_144
_MAX_UNSENT_BYTES = 4 * frames.MAX_FRAME_BYTES
"""A peer that reads nothing is let go at this; a keeper must not grow with it."""
_MAX_UNWRITTEN_BYTES = 8 * 1024 * 1024


class Connection:
    """One peer, read and written without waiting.

    Args:
        peer: the socket; owned and closed by this object.
    """

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.peer = peer
        self.is_closed = False
        self._reader = frames.FrameReader()
        self._unsent = bytearray()

    @property
    def wants_to_send(self) -> bool:
        """Tell whether something waits until the peer reads."""
        return bool(self._unsent) and not self.is_closed

    @property
    def is_midway(self) -> bool:
        """Tell whether part of a message has come and its end has not, or something is not sent yet."""
        return self._reader.is_midway or bool(self._unsent)

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come; closes at the peer's end, or when it sends none of ours."""
        messages: list[dict[str, Any]] = []
        try:
            while data := self.peer.recv(_READ_BYTES):
                messages += self._reader.feed(data)
            self.close()
        except BlockingIOError:
            pass
        except (OSError, ProcessProtocolError):
            self.close()
        return messages

    def send(self, op: str, **fields: Any) -> None:
        """Send a message, now as far as the peer takes it, the rest later; to a closed one nothing."""
        if self.is_closed:
            return
        self._unsent += frames.encode(op, **fields)
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self.close()

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it now."""
        try:
            while self._unsent and not self.is_closed:
                del self._unsent[: self.peer.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone
            self.close()

    def close(self) -> None:
        """Close the socket; a second time does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.peer.close()


class InputPipe:
    """Standard input of a program: bytes in order, each part reported when it was written.

    Args:
        descriptor: the writing end; owned and closed by this object.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.is_closed = False
        self._parts: deque[tuple[memoryview, Callable[[str], None]]] = deque()
        self._unwritten = 0
        self._is_ending: list[Callable[[str], None]] = []

    @property
    def wants_to_write(self) -> bool:
        """Tell whether something waits until the program reads."""
        return not self.is_closed and bool(self._parts)

    def write(self, data: bytes, told: Callable[[str], None]) -> None:
        """Write bytes after all that came before.

        Args:
            data: what.
            told: called once, with `written`, `stdin_closed` (the program or we closed it,
                part of the bytes may have been read) or `stdin_full` (nothing was taken).
        """
        if self.is_closed or self._is_ending:
            told("stdin_closed")
        elif self._unwritten + len(data) > _MAX_UNWRITTEN_BYTES:
            told("stdin_full")
        else:
            self._parts.append((memoryview(data), told))
            self._unwritten += len(data)
            self.flush()

    def end(self, told: Callable[[str], None]) -> None:
        """Close the pipe once everything before is written; then call `told` with `stdin_closed`."""
        if self.is_closed:
            told("stdin_closed")
        else:
            self._is_ending.append(told)
            self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the pipe takes it now."""
        try:
            while self._parts:
                data, told = self._parts[0]
                size = os.write(self.descriptor, data)
                self._unwritten -= size
                if size < len(data):
                    self._parts[0] = (data[size:], told)
                    continue
                self._parts.popleft()
                told("written")
        except BlockingIOError:
            return
        except OSError:  # the program has closed its end
            self.close()
            return
        if self._is_ending:
            self.close()

    def close(self) -> None:
        """Close the pipe now; what was not written is answered `stdin_closed`."""
        if self.is_closed:
            return
        self.is_closed = True
        os.close(self.descriptor)
        for _, told in self._parts:
            told("stdin_closed")
        for told in self._is_ending:
            told("stdin_closed")
        self._parts.clear()
        self._is_ending.clear()
