"""A host's watch over its coordinator: no coordinator for a while, no host.

A host outlives the coordinator that asked for it, so that the next life of the
coordinator finds it. If none comes, somebody has to end the host and its work, and
nobody else is there to do it.

**Rules**

1. Every few seconds the host says that it is there. An answer renews the lease.
2. After `lease_s` without an answer the work is cancelled with the cause
   `parent_lost` and the host ends.
3. A coordinator that answers and does not know the host has settled its work
   already, so the host ends at once. It must not be believed for a moment only:
   the answer comes from a life that has folded its journal.

Source: leases as in Gray and Cheriton, "Leases: an efficient fault-tolerant
mechanism for distributed file cache consistency", 1989.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from remit.agents.client import answer
from remit.agents.link import Link
from remit.core.clock import Clock, SystemClock
from remit.core.errors import RemitError
from remit.core.messages import dumps

__all__ = ["LEASE_S", "Lifeline"]

logger = logging.getLogger("remit.host")

LEASE_S = 30.0
"""A coordinator is begun again in seconds; after this long none will come."""
_EVERY_S = 2.0
_ANSWER_S = 10.0


class Lifeline:
    """The lease of one host.

    Args:
        host_id: whose lease it is.
        link: the way to the coordinator.
        on_lost: called once, in the thread of the watch, with the reason.
        lease_s: seconds without an answer before the host counts as left alone.
        clock: whose monotonic time is looked at.
    """

    def __init__(
        self,
        host_id: str,
        link: Link,
        on_lost: Callable[[str], None],
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._host_id = host_id
        self._link = link
        self._on_lost = on_lost
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self._heard = self._clock.monotonic()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, in a thread of its own."""
        self._thread = threading.Thread(target=self._watch, name=f"remit-lease-{self._host_id[-8:]}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; bounded. Idempotent."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_EVERY_S)

    def left(self) -> float:
        """Return the seconds for which the coordinator can still be taken to be there; 0 or less if none."""
        return self._lease_s - (self._clock.monotonic() - self._heard)

    def renew(self) -> None:
        """Take note that a coordinator was heard of in another way."""
        self._heard = self._clock.monotonic()

    def look(self) -> bool:
        """Ask once; return whether the host may go on, and tell `on_lost` if it may not."""
        try:
            known: bool = answer(self._link.call_blocking("host_alive", dumps(self._host_id), _ANSWER_S))
        except RemitError as error:
            alone_s = self._clock.monotonic() - self._heard
            if alone_s <= self._lease_s:
                return True
            reason = f"no coordinator has answered for {alone_s:.0f} s: {error}"
        else:
            self._heard = self._clock.monotonic()
            if known:
                return True
            reason = "its coordinator does not know it any more"
        if not self._stopping.is_set():
            self._on_lost(reason)
        return False

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            if not self.look():
                return
