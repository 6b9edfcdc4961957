"""Clients and their mailboxes: notices wait until their receiver has said that it has them.

**Invariants**

1. A notice stays until a poll acknowledges it, so a lost answer loses nothing.
2. One poll a client is parked at most; a newer one releases the older.
3. A client lapses when no poll of it has arrived for its grace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from remit.core.messages import Notice, OpenClient, PollReply

__all__ = ["Client", "Mailboxes"]

_SHORTEST_POLL_S = 0.05

MAX_NOTICES = 5_000
"""Notices in one answer: a few megabytes at most, so that a poll stays quick."""


@dataclass(slots=True)
class Client:
    """One connected process."""

    opened: OpenClient
    last_seen: float
    last_seq: int = 0
    box: deque[Notice] = field(default_factory=deque[Notice])
    parked: asyncio.Future[None] | None = None

    @property
    def acked(self) -> int:
        """Number of the last notice that the client has."""
        return self.last_seq - len(self.box)


class Mailboxes:
    """All clients of one coordinator. Belongs to its event loop."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._watchers: dict[str, set[str]] = {}
        self._expected: dict[str, float] = {}
        """Clients of the life before, which have until then to come back."""

    def __len__(self) -> int:
        """Return how many clients are connected."""
        return len(self._clients)

    def __contains__(self, client_id: object) -> bool:
        """Tell whether a client is connected."""
        return client_id in self._clients

    @property
    def people(self) -> int:
        """Return how many clients are not hosts."""
        return sum(not client.opened.host_id for client in self._clients.values())

    def open(self, request: OpenClient, now: float) -> None:
        """Take in a client; one that is known keeps its mailbox."""
        client = self._clients.get(request.client_id)
        self._expected.pop(request.client_id, None)
        if client is None:
            self._clients[request.client_id] = Client(request, now)
        else:
            client.last_seen = now

    def expect(self, client_ids: Iterable[str], until: float) -> None:
        """Give clients of the life before time to come back; then they count as gone.

        Args:
            client_ids: who held turns.
            until: in seconds since 1970.
        """
        self._expected.update(dict.fromkeys(client_ids, until))

    def overdue(self, now: float) -> list[str]:
        """Return, once, the clients that have not come back in time."""
        found = [client_id for client_id, until in self._expected.items() if until < now]
        for client_id in found:
            del self._expected[client_id]
        return found

    def drop(self, client_id: str) -> None:
        """Forget a client and release its poll."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            _wake(client)
        for watchers in self._watchers.values():
            watchers.discard(client_id)

    def of_host(self, host_id: str) -> str:
        """Return the client that a host is, or the empty text."""
        for client_id, client in self._clients.items():
            if client.opened.host_id == host_id:
                return client_id
        return ""

    def drop_host(self, host_id: str) -> None:
        """Forget the client that a dead host was."""
        for client_id, client in list(self._clients.items()):
            if client.opened.host_id == host_id:
                self.drop(client_id)

    def watch(self, client_id: str, node_id: str) -> None:
        """Send this client the end of a node that somebody else delegated."""
        self._watchers.setdefault(node_id, set()).add(client_id)

    def post(self, client_id: str, notice: Notice) -> None:
        """Put a notice into a mailbox; nothing happens if the client is gone."""
        client = self._clients.get(client_id)
        if client is None:
            return
        client.last_seq += 1
        client.box.append(notice)
        _wake(client)

    def post_end(self, client_id: str, notice: Notice) -> None:
        """Send the end of a node to whoever delegated it and to all who watch it."""
        self.post(client_id, notice)
        if not self._watchers:
            return
        for watcher in self._watchers.pop(notice.node_id, ()):
            if watcher != client_id:
                self.post(watcher, notice)

    async def poll(self, client_id: str, ack: int, timeout_s: float, now: float) -> PollReply:
        """Return what is new for a client, waiting up to `timeout_s` for it.

        A client that is not known gets `seq` -1: it must open again.
        """
        client = self._clients.get(client_id)
        if client is None:
            return PollReply(-1)
        client.last_seen = now
        # A poll is a sign of life when it comes, not while it is parked.
        timeout_s = min(timeout_s, max(_SHORTEST_POLL_S, client.opened.grace_s / 3))
        while client.box and client.acked < ack:
            client.box.popleft()
        if not client.box:
            _wake(client)
            client.parked = asyncio.get_running_loop().create_future()
            parked = client.parked
            await asyncio.wait([parked], timeout=timeout_s)
            if client.parked is parked:
                client.parked = None
        notices = tuple(client.box)[:MAX_NOTICES]
        return PollReply(client.acked + len(notices), notices)

    def lapsed(self, now: float) -> list[Client]:
        """Return clients not heard of for longer than their grace (hosts never lapse)."""
        return [
            client
            for client in self._clients.values()
            if not client.opened.host_id and now - client.last_seen > client.opened.grace_s
        ]

    def release_all(self) -> None:
        """Let every parked poll return."""
        for client in self._clients.values():
            _wake(client)


def _wake(client: Client) -> None:
    if client.parked is not None and not client.parked.done():
        client.parked.set_result(None)
