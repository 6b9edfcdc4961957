"""Connections to the daemon that are kept between calls, so that a call costs one message each way.

**Invariants**

1. A connection carries one call at a time, and is kept only after its whole answer.
2. It is never used by two processes: one that came over a fork is let go.
3. A call on a kept connection that turns out to be broken is made again on a new one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from remit.processes.frames import connect

__all__ = ["Lines"]

_T = TypeVar("_T")


class Lines:
    """Connections to one socket. Thread-safe.

    Args:
        path: of the socket.
        connect_s: seconds that a connection may take.
        kept: how many stay open between calls.
    """

    __slots__ = ("_connect_s", "_free", "_kept", "_lock", "_owner", "_path")

    def __init__(self, path: Path, *, connect_s: float, kept: int) -> None:
        self._path = path
        self._connect_s = connect_s
        self._kept = kept
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []

    def call(self, talk: Callable[[socket.socket], _T]) -> _T:
        """Have one conversation; twice, if the first was on a connection that had broken meanwhile.

        Args:
            talk: sends a message and returns its answer; whatever it raises ends the connection.

        Raises:
            OSError: nobody listens, or the connection broke.
        """
        kept = self._take()
        if kept is not None:
            try:
                return self._talk(kept, talk)
            except TimeoutError:
                raise
            except OSError:  # the daemon has gone since, and with it the other connections
                self._drop()
        return self._talk(connect(self._path, timeout_s=self._connect_s), talk)

    def close(self) -> None:
        """Let go of all connections, and keep none from now on."""
        self._kept = 0
        self._drop()

    def _talk(self, connection: socket.socket, talk: Callable[[socket.socket], _T]) -> _T:
        try:
            answer = talk(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._free) < self._kept:
                self._free.append(connection)
                return answer
        connection.close()
        return answer

    def _take(self) -> socket.socket | None:
        if self._owner != os.getpid():
            # Closed here, and still open in the process that made them. Another thread may have held the lock.
            self._owner, self._lock = os.getpid(), threading.Lock()
            self._drop()
        with self._lock:
            return self._free.pop() if self._free else None

    def _drop(self) -> None:
        with self._lock:
            dropped, self._free = self._free, []
        for connection in dropped:
            connection.close()
