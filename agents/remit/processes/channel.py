"""One connection of the daemon: whole messages in and out, and never a wait.

**Invariants**

1. `on_close` is called once, and never inside `send`: whoever sends may go on
   over its own state.
2. Nothing is read or written after `close`.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from remit.core.errors import ProcessProtocolError
from remit.processes.frames import FrameReader, encode

__all__ = ["Channel"]

_READ_BYTES = 262_144
_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A peer that does not read its answers is dropped at this point."""


class Channel:
    """A stream socket in a selector, with the messages of `frames`.

    Args:
        selector: calls the registered data, a function of the event mask.
        connection: taken over; closed by `close`.
        on_message: called with each message.
        on_close: called when the peer has gone or speaks something else.
    """

    __slots__ = ("_connection", "_on_close", "_on_message", "_reader", "_selector", "_unsent", "is_closed")

    is_closed: bool
    """Whether `close` was called, here or for the peer's end."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        *,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        connection.setblocking(False)
        self.is_closed = False
        self._selector = selector
        self._connection = connection
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._on_message = on_message
        self._on_close = on_close
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, op: str, **fields: Any) -> None:
        """Send a message as far as the socket takes it, and the rest later; drop it if closed."""
        if self.is_closed:
            return
        self._unsent += encode(op, **fields)
        self._flush()
        self._want_write()

    def release(self) -> socket.socket:
        """Give the connection back, open; from here on nothing is read or written, and `on_close` is not called."""
        self.is_closed = True
        self._selector.unregister(self._connection)
        return self._connection

    def close(self) -> None:
        """End the connection; `on_close` is not called. Harmless twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._selector.unregister(self._connection)
        self._connection.close()

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not self.is_closed:
            self._flush()
            self._want_write()
        if mask & selectors.EVENT_READ and not self.is_closed:
            self._read()
        if not self.is_closed and len(self._unsent) > _MAX_UNSENT_BYTES:
            self._end()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProcessProtocolError):  # broken, or no peer of ours: nothing can be said to it
            data, messages = b"", []
        for message in messages:
            if not self.is_closed:
                self._on_message(self, message)
        if not data and not self.is_closed:
            self._end()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the peer has gone; its end is read soon, and handled there
            self._unsent.clear()

    def _want_write(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._connection).events != events:
            self._selector.modify(self._connection, events, self._ready)

    def _end(self) -> None:
        self.close()
        self._on_close(self)
