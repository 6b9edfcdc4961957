"""The seam between a client and its coordinator: requests in, answers out, as bytes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

__all__ = ["Link"]


class Link(Protocol):
    """A way to one coordinator, usable from any thread.

    Both methods raise, or resolve to, `CoordinatorUnavailable` when the
    coordinator cannot be reached; the request may or may not have arrived.
    """

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        """Send a request and return a future of its answer."""
        ...

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for its answer in this thread."""
        ...
