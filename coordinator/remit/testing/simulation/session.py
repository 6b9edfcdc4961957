"""A client's connection to the coordinator, as a model: requests until they are answered, polls, notices.

It keeps the rules of `remit.agents.client`: requests carry ids and are sent again, a notice
counts when the next poll has acknowledged it, and a client that the coordinator
does not know opens again and asks about everything that it still waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from remit.core.errors import CoordinatorUnavailable, NotFound, RemitError, TurnCancelled
from remit.core.messages import EndedNotice, Notice, OpenClient, PollReply
from remit.testing.simulation.kernel import Event, Kernel, Network

__all__ = ["COORDINATOR", "Answer", "Door", "Session"]

COORDINATOR = "coordinator"
"""Endpoint of whichever life of the coordinator serves."""

RETRY_S = 0.7
POLL_S = 4.0
_POLL_MARGIN_S = 1.0

Problem = RemitError | TurnCancelled


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request led to."""

    value: Any = None
    error: Problem | None = None


Reply = Callable[[Answer], None]


class Door(Protocol):
    """Where requests arrive."""

    def call(self, method: str, message: Any, reply: Reply) -> None:
        """Carry out a request and reply, now or later, or never if this life ends first."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    """One request on its way."""

    method: str
    message: Any
    done: Reply
    give_up_at: float
    timer: Event | None = None
    is_over: bool = False


class Session:
    """One process's connection.

    Args:
        kernel: the clock.
        network: between this endpoint and the coordinator.
        door: the coordinator's.
        endpoint: name of this end in the network.
        client_id: id of this client.
        host_id: set if this client is a host.
        grace_s: seconds of silence before this client counts as gone.
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        door: Door,
        *,
        endpoint: str,
        client_id: str,
        host_id: str = "",
        grace_s: float = 10.0,
    ) -> None:
        self._kernel = kernel
        self._network = network
        self._door = door
        self._endpoint = endpoint
        self.client_id = client_id
        self._hello = OpenClient(client_id, host_id=host_id, grace_s=grace_s)
        self._tracked: dict[str, Callable[[Notice | None], None]] = {}
        self._pending: dict[str, int] = {}
        """What the coordinator may not know of yet -> openings when its tracking began."""
        self._openings = 0
        self._ack = 0
        self._epoch = 0
        """The life of the coordinator that has welcomed this client last."""
        self._poll_number = 0
        self._opened = False
        self._welcomed = False
        self._forgotten = False
        self._before_hello: list[_Request] = []
        self._open_requests = 0
        self.closed = False

    # -- requests ------------------------------------------------------------------

    def request(self, method: str, message: Any, done: Reply, *, patience_s: float = 30.0) -> None:
        """Send a request, again and again, until it is answered or the patience is over.

        Args:
            method: name of the request.
            message: its argument.
            done: called once with the answer, or with `CoordinatorUnavailable`; never after `close`.
            patience_s: seconds.
        """
        request = _Request(method, message, done, self._kernel.now + patience_s)
        self._open_requests += 1
        if self._welcomed or method in ("open_client", "report"):
            self._send(request)
        else:
            # The first hello is sent ahead of all else, on a channel that keeps the order.
            self._before_hello.append(request)

    @property
    def is_idle(self) -> bool:
        """Tell whether every request has its answer."""
        return self.closed or not self._open_requests

    def _send(self, request: _Request) -> None:
        if self.closed or request.is_over:
            return
        if self._kernel.now > request.give_up_at:
            self._settle(request, Answer(error=CoordinatorUnavailable("the simulated coordinator does not answer")))
            return
        request.timer = self._kernel.after(RETRY_S, lambda: self._send(request))
        self._post(request.method, request.message, lambda answer: self._answered(request, answer))

    def _post(self, method: str, message: Any, answered: Reply) -> None:
        def reply(answer: Answer) -> None:
            self._network.send(COORDINATOR, self._endpoint, "answer", lambda: answered(answer))

        self._network.send(self._endpoint, COORDINATOR, "request", lambda: self._door.call(method, message, reply))

    def _answered(self, request: _Request, answer: Answer) -> None:
        if isinstance(answer.error, CoordinatorUnavailable):
            return  # not known there, or that life is over: the timer sends it again
        self._settle(request, answer)

    def _settle(self, request: _Request, answer: Answer) -> None:
        if request.is_over or self.closed:
            return
        request.is_over = True
        self._open_requests -= 1
        if request.timer is not None:
            request.timer.cancel()
        request.done(answer)

    # -- life and notices ----------------------------------------------------------

    def open(self) -> None:
        """Say hello and begin to listen; done once, harmless when repeated."""
        if not self._opened:
            self._opened = True
            self._say_hello()

    def close(self) -> None:
        """Fall silent for good, without a word."""
        self.closed = True
        self._tracked.clear()

    def track(self, node_id: str, told: Callable[[Notice | None], None], *, pending: bool = False) -> None:
        """Hand notices about a node to somebody until its end; None means that nothing will come of it.

        What is `pending` is not asked about until `confirm`: the coordinator may not know of it yet.
        """
        self._tracked[node_id] = told
        if pending:
            self._pending[node_id] = self._openings

    def confirm(self, node_id: str) -> None:
        """Say that the coordinator knows of it; what was missed meanwhile is asked for."""
        openings = self._pending.pop(node_id, self._openings)
        if openings != self._openings:
            self._ask_about(node_id)

    def untrack(self, node_id: str) -> None:
        """Stop handing notices on."""
        self._tracked.pop(node_id, None)
        self._pending.pop(node_id, None)

    def _say_hello(self) -> None:
        self.request("open_client", self._hello, self._welcome, patience_s=1e9)

    def _welcome(self, answer: Answer) -> None:
        self._welcomed = True
        self._epoch = answer.value
        waiting, self._before_hello = self._before_hello, []
        for request in waiting:
            self._send(request)
        if self._forgotten:
            self._forgotten = False
            self._ack = 0
            self._openings += 1
            for name in list(self._tracked):
                if name not in self._pending:
                    self._ask_about(name)
        self._poll()

    def _ask_about(self, name: str) -> None:
        def answered(answer: Answer) -> None:
            told = self._tracked.get(name)
            if isinstance(answer.error, NotFound) and told is not None:
                del self._tracked[name]
                told(None)
            elif answer.error is None:
                self._hand_out(answer.value)

        self.request("subscribe", (self.client_id, (name,)), answered, patience_s=1e9)

    def _poll(self) -> None:
        if self.closed:
            return
        self._poll_number += 1
        number = self._poll_number
        request = (self.client_id, self._ack, POLL_S, self._epoch)
        self._post("poll", request, lambda answer: self._polled(number, answer))
        self._kernel.after(POLL_S + _POLL_MARGIN_S, lambda: self._poll_lost(number))

    def _poll_lost(self, number: int) -> None:
        if number == self._poll_number:
            self._poll()

    def _polled(self, number: int, answer: Answer) -> None:
        if self.closed or number != self._poll_number:
            return
        if answer.error is not None:
            return  # the timer asks again
        reply: PollReply = answer.value
        if reply.seq < 0:
            self._poll_number += 1
            self._forgotten = True
            self._say_hello()
            return
        self._ack = reply.seq
        self._hand_out(reply.notices)
        self._poll()

    def _hand_out(self, notices: tuple[Notice, ...]) -> None:
        for notice in notices:
            told = self._tracked.get(notice.node_id)
            if told is None:
                continue
            if isinstance(notice, EndedNotice):
                del self._tracked[notice.node_id]
            told(notice)
