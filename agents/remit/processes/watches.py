"""One thread that hears of the ends of all the jobs that a client watches.

**Invariants**

1. Each watch calls back at most once, never after `Watch.close` or
   `Watches.close` returned in another thread than the callback's.
2. The thread lives while there is something to watch, and no longer.
3. A watch survives the daemon: when the connection breaks, the next daemon is
   found or started and asked again; when there is none, the files answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from remit.core.errors import ProcdUnavailable, ProcessProtocolError
from remit.processes.answers import decode_result
from remit.processes.frames import FrameReader, connect, send
from remit.processes.jobs import RESULT_NAME, JobOutcome, JobResult, read_record
from remit.processes.place import Place

__all__ = ["Watch", "Watches"]

_logger = logging.getLogger(__name__)
_RETRY_S = 0.5
_SEND_LIMIT_S = 30.0


class Watch:
    """One job that is watched."""

    __slots__ = ("_callback", "_lock", "_watches", "job")

    job: str
    """Id of the job."""

    def __init__(self, watches: Watches, job: str, callback: Callable[[JobResult], None]) -> None:
        self.job = job
        self._watches = watches
        self._callback: Callable[[JobResult], None] | None = callback
        self._lock = threading.RLock()  # re-entrant: a callback may close its own watch

    def close(self) -> None:
        """End the watch; the callback is not called any more. Harmless twice."""
        self.disarm()
        self._watches.remove(self)

    def disarm(self) -> None:
        """Forget the callback, after waiting for a call that is under way."""
        with self._lock:
            self._callback = None

    def tell(self, result: JobResult) -> None:
        """Call back, once."""
        with self._lock:
            callback, self._callback = self._callback, None
            if callback is not None:
                callback(result)


class Watches:
    """All watches of one client.

    Args:
        place: where the daemon is.
        ensure: finds or starts the daemon; raises `ProcdUnavailable`.
    """

    def __init__(self, place: Place, *, ensure: Callable[[], None]) -> None:
        self._place = place
        self._ensure = ensure
        self._lock = threading.Lock()  # guards the three below
        self._watches: dict[str, list[Watch]] = {}
        self._thread: threading.Thread | None = None
        self._wake: int = -1

    def add(self, job: str, callback: Callable[[JobResult], None]) -> Watch:
        """Watch a job; see `ProcessClient.watch`."""
        watch = Watch(self, job, callback)
        with self._lock:
            self._watches.setdefault(job, []).append(watch)
            if self._thread is None:
                reader, self._wake = os.pipe()
                self._thread = threading.Thread(
                    target=self._run, args=(reader, self._wake), name="remit-watch", daemon=True
                )
                self._thread.start()
            else:
                self._nudge()
        return watch

    def remove(self, watch: Watch) -> None:
        """Forget one watch."""
        with self._lock:
            known = self._watches.get(watch.job, [])
            if watch in known:
                known.remove(watch)
            if not known:
                self._watches.pop(watch.job, None)
            if not self._watches:
                self._nudge()

    def close(self) -> None:
        """End all watches, and the thread."""
        with self._lock:
            watches = [watch for known in self._watches.values() for watch in known]
            self._watches.clear()
            thread = self._thread
            self._nudge()
        for watch in watches:
            watch.disarm()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _nudge(self) -> None:
        if self._thread is not None:
            os.write(self._wake, b"\0")

    def _run(self, reader: int, wake: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while not self._is_done(reader, wake):
                try:
                    self._listen(selector, reader)
                except (OSError, ProcessProtocolError):
                    # The daemon has gone, with our connection: what ended meanwhile is in the files.
                    self._tell_from_files()
                    self._restart(selector)

    def _is_done(self, reader: int, wake: int) -> bool:
        """End with the last watch: decided under the lock, so that no new watch misses its thread."""
        with self._lock:
            if self._watches:
                return False
            self._thread = None
            os.close(reader)
            os.close(wake)
            return True

    def _restart(self, selector: selectors.BaseSelector) -> None:
        try:
            self._ensure()
        except ProcdUnavailable:
            selector.select(_RETRY_S)  # or until somebody adds, removes or closes
            self._tell_from_files()

    def _listen(self, selector: selectors.BaseSelector, reader: int) -> None:
        """Hear of ends over one connection, until it breaks or nothing is watched."""
        asked: set[str] = set()
        frames = FrameReader()
        with connect(self._place.socket, timeout_s=_SEND_LIMIT_S) as connection:
            selector.register(connection, selectors.EVENT_READ)
            try:
                while self._ask(connection, asked):
                    for key, _ in selector.select():
                        if key.fileobj == reader:
                            os.read(reader, 4096)
                        else:
                            self._hear(connection, frames, asked)
            finally:
                selector.unregister(connection)

    def _ask(self, connection: socket.socket, asked: set[str]) -> bool:
        """Ask for every job that was not asked for yet; tell whether anything is watched."""
        with self._lock:
            wanted = set(self._watches)
        for job in asked - wanted:
            send(connection, "unwatch", job=job)
        for job in sorted(wanted - asked):
            send(connection, "watch", job=job)
        asked.clear()
        asked.update(wanted)
        return bool(wanted)

    def _hear(self, connection: socket.socket, frames: FrameReader, asked: set[str]) -> None:
        data = connection.recv(262_144)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        for message in frames.feed(data):
            if message.get("op") == "ended":
                self._ended(str(message["job"]), message, asked)

    def _ended(self, job: str, message: dict[str, Any], asked: set[str]) -> None:
        asked.discard(job)
        # Without a result the daemon has forgotten the job, or never knew it.
        self._tell(job, decode_result(message.get("result")) or self._on_disk(job) or _unknown(job))

    def _tell_from_files(self) -> None:
        with self._lock:
            jobs = list(self._watches)
        for job in jobs:
            result = self._on_disk(job)
            if result is not None:
                self._tell(job, result)

    def _on_disk(self, job: str) -> JobResult | None:
        with contextlib.suppress(OSError, ProcessProtocolError):
            return read_record(self._place.job(job) / RESULT_NAME, JobResult)
        return None

    def _tell(self, job: str, result: JobResult) -> None:
        with self._lock:
            watches = self._watches.pop(job, [])
        for watch in watches:
            try:
                watch.tell(result)
            except Exception:  # one that fails must not keep the others from hearing
                _logger.exception("a watch of %s failed", job)


def _unknown(job: str) -> JobResult:
    return JobResult(
        job=job,
        outcome=JobOutcome.KEEPER_LOST,
        error="nobody knows this process any more; how it ended is not known",
        ended_at=time.time(),
    )
