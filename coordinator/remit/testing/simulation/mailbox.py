"""Mailboxes of clients, as a model without an event loop. Keeps the rules of `remit.coordinator.mailbox`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from remit.core.messages import EndedNotice, Notice, OpenClient, PollReply
from remit.testing.simulation.kernel import Event, Kernel
from remit.testing.simulation.session import Answer, Reply

__all__ = ["MailboxModel"]


@dataclass(slots=True)
class _Client:
    """One connected process."""

    hello: OpenClient
    last_seen: float
    last_seq: int = 0
    box: deque[Notice] = field(default_factory=deque[Notice])
    parked: Reply | None = None
    timer: Event | None = None

    @property
    def acked(self) -> int:
        """Number of the last notice that the client has."""
        return self.last_seq - len(self.box)


class MailboxModel:
    """All clients of one life of the coordinator."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._clients: dict[str, _Client] = {}
        self._watchers: dict[str, dict[str, None]] = {}
        self._expected: dict[str, float] = {}

    def __contains__(self, client_id: object) -> bool:
        """Tell whether a client is connected."""
        return client_id in self._clients

    def open(self, hello: OpenClient) -> None:
        """Take in a client; one that is known keeps its mailbox."""
        client = self._clients.get(hello.client_id)
        self._expected.pop(hello.client_id, None)
        if client is None:
            self._clients[hello.client_id] = _Client(hello, self._kernel.now)
        else:
            client.last_seen = self._kernel.now

    def expect(self, client_ids: Iterable[str], until: float) -> None:
        """Give clients of the life before time to come back; then they count as gone."""
        self._expected.update(dict.fromkeys(client_ids, until))

    def overdue(self) -> list[str]:
        """Return, once, the clients that have not come back in time."""
        found = [client_id for client_id, until in self._expected.items() if until < self._kernel.now]
        for client_id in found:
            del self._expected[client_id]
        return found

    def drop(self, client_id: str) -> None:
        """Forget a client."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            self._answer(client)

    def of_host(self, host_id: str) -> str:
        """Return the client that a host is, or the empty text."""
        return next((name for name, client in self._clients.items() if client.hello.host_id == host_id), "")

    def lapsed(self) -> Iterator[str]:
        """Yield clients not heard of for longer than their grace; hosts never lapse."""
        for client_id, client in list(self._clients.items()):
            if not client.hello.host_id and self._kernel.now - client.last_seen > client.hello.grace_s:
                yield client_id

    def watch(self, client_id: str, node_id: str) -> None:
        """Send this client the end of a node that somebody else delegated."""
        self._watchers.setdefault(node_id, {})[client_id] = None

    def post(self, client_id: str, notice: Notice) -> None:
        """Put a notice into a mailbox; nothing happens if the client is gone."""
        client = self._clients.get(client_id)
        if client is not None:
            client.last_seq += 1
            client.box.append(notice)
            self._answer(client)

    def post_end(self, client_id: str, notice: EndedNotice) -> None:
        """Send an end to whoever delegated the node and to all who watch it."""
        self.post(client_id, notice)
        for watcher in self._watchers.pop(notice.node_id, {}):
            if watcher != client_id:
                self.post(watcher, notice)

    def poll(self, client_id: str, ack: int, timeout_s: float, reply: Reply) -> None:
        """Reply with what is new, now or when something comes; -1 to a client that is not known."""
        client = self._clients.get(client_id)
        if client is None:
            reply(Answer(PollReply(-1)))
            return
        client.last_seen = self._kernel.now
        while client.box and client.acked < ack:
            client.box.popleft()
        self._answer(client)
        client.parked = reply
        if client.box:
            self._answer(client)
        else:
            wait_s = min(timeout_s, client.hello.grace_s / 3)
            client.timer = self._kernel.after(wait_s, lambda: self._answer(client))

    def _answer(self, client: _Client) -> None:
        reply, client.parked = client.parked, None
        if client.timer is not None:
            client.timer.cancel()
            client.timer = None
        if reply is not None:
            notices = tuple(client.box)
            reply(Answer(PollReply(client.acked + len(notices), notices)))
