"""What a host has to tell its coordinator: in order, batched while one batch is on its way.

**Invariants**

1. One batch is under way at a time, so batches arrive in order, and load makes
   them larger instead of more.
2. A batch is sent again until it is acknowledged; its number makes a second
   copy harmless.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from remit.agents.client import answer
from remit.agents.link import Link
from remit.core.errors import RemitError
from remit.core.messages import Report, ReportBatch, ReportEnded, dumps

__all__ = ["Outbox"]

logger = logging.getLogger("remit.host")

_RETRY_S = 0.2
_MAX_BATCH = 2_000


class Outbox:
    """Sends reports of one host. Thread-safe; never blocks its caller.

    Args:
        host_id: whose reports these are.
        link: the way to the coordinator.
        on_unreachable: called with the number of failures in a row after each.
    """

    def __init__(self, host_id: str, link: Link, on_unreachable: Callable[[int], None] | None = None) -> None:
        self._host_id = host_id
        self._link = link
        self._on_unreachable = on_unreachable
        self._lock = threading.Lock()
        self._waiting: list[Report] = []
        self._sending: ReportBatch | None = None
        self._seq = 0
        self._failures = 0
        self._closed = False
        self._idle = threading.Event()
        self._idle.set()

    def put(self, report: Report) -> None:
        """Send a report, after all that were put before it."""
        with self._lock:
            self._waiting.append(report)
            self._idle.clear()
            if self._sending is not None:
                return
            batch = self._next_batch()
        self._send(batch)

    def ends(self) -> list[tuple[str, int]]:
        """Return (run, attempt) of the ends that are reported and not acknowledged."""
        with self._lock:
            sending = self._sending.items if self._sending is not None else ()
            return [(item.run_id, item.attempt) for item in (*sending, *self._waiting) if isinstance(item, ReportEnded)]

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everything put so far was acknowledged; for use before an exit."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Send nothing again from here on: nobody listens any more."""
        self._closed = True

    def _next_batch(self) -> ReportBatch:
        self._seq += 1
        items, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
        self._sending = ReportBatch(self._host_id, self._seq, tuple(items))
        return self._sending

    def _send(self, batch: ReportBatch) -> None:
        try:
            future = self._link.submit("report", dumps(batch))
        except RemitError as error:
            self._failed(error)
            return
        future.add_done_callback(self._answered)

    def _answered(self, future: Future[bytes]) -> None:
        try:
            answer(future.result())
        except Exception as error:  # any way a transport can fail: the batch is sent again
            self._failed(error)
            return
        with self._lock:
            self._failures = 0
            self._sending = None
            if not self._waiting:
                self._idle.set()
                return
            batch = self._next_batch()
        self._send(batch)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        logger.debug("report batch not acknowledged (%d): %s", self._failures, error)
        if self._on_unreachable is not None:
            self._on_unreachable(self._failures)
        if self._closed:
            return
        timer = threading.Timer(_RETRY_S, self._again)
        timer.daemon = True
        timer.start()

    def _again(self) -> None:
        with self._lock:
            batch = self._sending
        if batch is not None:
            self._send(batch)
