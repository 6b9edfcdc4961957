"""A client of a coordinator: one long poll in a thread, requests from anywhere.

**Invariants**

1. The poll runs in a thread of its own, so user code that blocks its event loop
   loses neither its lease nor a notice.
2. A run or turn that is tracked hears of its end exactly once.
3. When contact is lost for longer than `give_up_s`, or the session is closed,
   everything tracked is told so; nobody waits for ever.
4. One tracked object that fails does not end the poll of the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Collection, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

from remit.agents.link import Link
from remit.agents.tooldesk import ToolDesk
from remit.core.errors import CoordinatorUnavailable, NotFound, RemitError
from remit.core.ids import IdFactory
from remit.core.messages import (
    PROTOCOL,
    ClientOpened,
    EndedNotice,
    Notice,
    OpenClient,
    PollReply,
    dumps,
    loads,
)
from remit.processes.leases import LEASE_S

__all__ = ["ClientSession", "Tracked"]

logger = logging.getLogger("remit.client")

GIVE_UP_S = 30.0
"""Contact may be lost this long (a coordinator restarts in a few seconds)."""
_RETRY_S = 0.2
_CALL_MARGIN_S = 20.0


class Tracked(Protocol):
    """Something that notices are about."""

    def notice(self, notice: Notice) -> None:
        """Take a notice; called in the poll thread."""
        ...

    def lost_contact(self, error: RemitError) -> None:
        """The coordinator cannot be reached any more; called in the poll thread."""
        ...


class _Both:
    """Two that track the same node."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Tracked, second: Tracked) -> None:
        self._first = first
        self._second = second

    def notice(self, notice: Notice) -> None:
        """Hand a notice to both."""
        self._first.notice(notice)
        self._second.notice(notice)

    def lost_contact(self, error: RemitError) -> None:
        """Tell both."""
        self._first.lost_contact(error)
        self._second.lost_contact(error)


class ClientSession:
    """One process's connection to one coordinator.

    Args:
        link: the way there.
        surface: what this client is: `python`, `cli`, `host`.
        grace_s: seconds without a sign of life before this client counts as gone.
        host_id: set if this client is an agent host.
        ids: where ids come from.
        give_up_s: seconds without contact before waits raise.
    """

    def __init__(
        self,
        link: Link,
        *,
        surface: str = "python",
        grace_s: float = 10.0,
        host_id: str = "",
        ids: IdFactory | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.link = link
        self.ids = ids or IdFactory()
        self.surface = surface
        self.client_id = self.ids.client()
        self._open_request = OpenClient(self.client_id, surface, grace_s, host_id, os.getpid())
        self._give_up_s = give_up_s
        self._tracked: dict[str, Tracked] = {}
        self._unanswered: set[str] = set()
        self._asked_for: set[str] = set()
        """Nodes and claims whose request has no answer yet: the coordinator need not know them."""
        self._pending: dict[str, int] = {}
        """Names that the coordinator may not know yet, with `_openings` as it was then."""
        self._openings = 0
        self._hello: Future[bytes] | None = None
        """What `open_soon` said, until it is answered."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failed: RemitError | None = None
        self._thread: threading.Thread | None = None
        self.opened = ClientOpened(0, 2.0, "", 16 * 1024 * 1024)
        self._heard = time.monotonic()
        self._desk: ToolDesk | None = None

    # -- life ----------------------------------------------------------------------

    def open(self) -> None:
        """Say hello and start to listen; blocks for one round trip.

        A coordinator that is being restarted is waited for, as long as contact may be lost later.

        Raises:
            CoordinatorUnavailable: nobody answers.
        """
        self.opened = self._say_hello()
        if self.opened.protocol != PROTOCOL:
            raise CoordinatorUnavailable(
                f"the running coordinator speaks protocol {self.opened.protocol} and this program "
                f"{PROTOCOL}: stop it (remit down) so that the installed version starts"
            )
        self._start_listening()

    def _say_hello(self) -> ClientOpened:
        began = time.monotonic()
        while True:
            try:
                opened: ClientOpened = self.request_blocking("open_client", self._open_request)
                return opened
            except CoordinatorUnavailable as error:
                if error.for_good or time.monotonic() - began >= self._give_up_s:
                    raise
            self._stopping.wait(_RETRY_S)

    def open_soon(self) -> None:
        """Say hello without waiting for the answer; what is sent meanwhile waits for it.

        Two calls of one async actor may be begun in either order, and the coordinator
        has no notices for a client that it does not know. If the hello does not arrive,
        the poll finds that out and says it again.
        """

        def answered(done: Future[bytes]) -> None:
            try:
                self.opened = answer(done.result())
            except Exception as error:  # any way a transport can fail
                logger.debug("hello did not arrive: %s", error)
            self._hello = None

        self._hello = hello = self.link.submit("open_client", dumps(self._open_request))
        hello.add_done_callback(answered)
        self._start_listening()

    def _start_listening(self) -> None:
        self._thread = threading.Thread(target=self._listen, name=f"remit-poll-{self.client_id[-6:]}", daemon=True)
        self._thread.start()

    def close(self, *, say_goodbye: bool = True) -> None:
        """Stop listening; turns still held here are cancelled by the coordinator. Idempotent.

        Whoever still waits for something is told that nothing more will be heard.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        if say_goodbye and self._failed is None:
            try:
                self.request_blocking("close_client", self.client_id, timeout_s=5.0)
            except RemitError as error:
                # It will notice by our silence.
                logger.debug("goodbye did not arrive: %s", error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self.opened.poll_s + 5.0)
        if self._failed is None:
            self._fail(CoordinatorUnavailable("this connection to the coordinator was closed"))
        if self._desk is not None:
            self._desk.close()

    @property
    def closed(self) -> bool:
        """Tell whether this session was closed or has given up."""
        return self._stopping.is_set() or self._failed is not None

    @property
    def desk(self) -> ToolDesk:
        """The programs that are started through this connection itself: those of turns, not of runs."""
        with self._lock:
            if self._desk is None:
                self._desk = ToolDesk(self.opened.workspace, holder=self.client_id, lease_left=self._lease_left)
            return self._desk

    def _lease_left(self) -> float:
        return LEASE_S - (time.monotonic() - self._heard)

    # -- requests ------------------------------------------------------------------

    def submit(self, method: str, message: object) -> Future[bytes]:
        """Send a request; the future gives the undecoded answer (see `answer`)."""
        if self._failed is not None:
            raise self._failed
        blob, hello = dumps(message), self._hello
        return self.link.submit(method, blob) if hello is None else self._submit_after(hello, method, blob)

    def _submit_after(self, hello: Future[bytes], method: str, blob: bytes) -> Future[bytes]:
        later: Future[bytes] = Future()
        # As with any request, a waiter that goes away does not take it back.
        later.set_running_or_notify_cancel()

        def pass_on(done: Future[bytes]) -> None:
            error = done.exception()
            if error is not None:
                later.set_exception(error)
            else:
                later.set_result(done.result())

        def send(_: Future[bytes]) -> None:
            try:
                self.link.submit(method, blob).add_done_callback(pass_on)
            except Exception as error:  # any way a transport can fail: somebody waits for an answer
                later.set_exception(error)

        hello.add_done_callback(send)
        return later

    async def request(self, method: str, message: object) -> Any:
        """Send a request and wait for its answer.

        Raises:
            RemitError, TurnCancelled: whatever the coordinator answered.
            CoordinatorUnavailable: it has ended for good, or has not answered until the session gave up.

        A coordinator that is being restarted is asked again, until this session gives
        it up: requests carry ids, so asking twice is asking once.

        Cancellation:
            A checkpoint. The request has been sent either way.
        """
        while True:
            try:
                return answer(await asyncio.wrap_future(self.submit(method, message)))
            except CoordinatorUnavailable as error:
                if method == "shutdown" or not self._may_come_back(error):
                    raise
            await asyncio.sleep(_RETRY_S)

    def _may_come_back(self, error: CoordinatorUnavailable) -> bool:
        """Tell whether the coordinator may answer again while somebody here listens for it."""
        return self._thread is not None and not self.closed and not error.for_good

    def request_blocking(self, method: str, message: object, timeout_s: float = 30.0) -> Any:
        """Send a request and wait for its answer in this thread."""
        return answer(self.link.call_blocking(method, dumps(message), timeout_s))

    # -- notices -------------------------------------------------------------------

    def track(self, node_id: str, tracked: Tracked, *, pending: bool = False) -> None:
        """Hand notices about a node or claim to somebody, and to whoever tracks it already, until its end.

        Args:
            node_id: what the notices are about.
            tracked: who takes them.
            pending: the coordinator may not know of it yet; say `confirm` once it does.
        """
        with self._lock:
            if pending:
                self._pending[node_id] = self._openings
            earlier = self._tracked.get(node_id)
            # Runs of one host share a session, and several may come after one and the same run.
            self._tracked[node_id] = tracked if earlier is None or earlier is tracked else _Both(earlier, tracked)
        if self._failed is not None:
            tracked.lost_contact(self._failed)

    @contextmanager
    def asking_for(self, names: Collection[str]) -> Generator[None]:
        """Hold on to what is tracked while the request for it has no answer; enter it before `track`.

        A coordinator that was begun again meanwhile may not know it: it will be asked again.
        """
        with self._lock:
            self._asked_for.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._asked_for.difference_update(names)

    def watch(self, node_id: str, tracked: Tracked) -> None:
        """Track a node that somebody else delegated; its end may be there already."""
        self.track(node_id, tracked)
        self._subscribe(node_id)

    def confirm(self, node_id: str) -> None:
        """Say that the coordinator knows of something that was tracked before it did.

        If it has forgotten this client in between, it is asked what was missed.
        """
        with self._lock:
            openings = self._pending.pop(node_id, self._openings)
        if openings != self._openings:
            self._subscribe(node_id)

    def _subscribe(self, node_id: str) -> None:
        future = self.submit("subscribe", (self.client_id, (node_id,)))

        def answered(done: Future[bytes]) -> None:
            try:
                self._hand_out(answer(done.result()))
            except CoordinatorUnavailable as error:
                if self._thread is None or self.closed:
                    self._lose(node_id, error)
                    return
                with self._lock:
                    self._unanswered.add(node_id)
            except RemitError as error:
                self._lose(node_id, error)
            except Exception as error:  # any other way a transport can fail: nobody may wait for ever
                self._lose(node_id, CoordinatorUnavailable(f"{node_id} cannot be watched: {error!r}"))

        future.add_done_callback(answered)

    def tracked(self) -> list[Tracked]:
        """Return what waits for notices."""
        with self._lock:
            return list(self._tracked.values())

    def untrack(self, node_id: str) -> None:
        """Stop handing notices about a node on."""
        with self._lock:
            self._tracked.pop(node_id, None)
            self._pending.pop(node_id, None)

    def _listen(self) -> None:
        """Poll until closed; open again when the coordinator has forgotten us."""
        hello = self._hello
        if hello is not None:
            wait([hello], timeout=self.opened.poll_s)
        ack = 0
        forgotten = False
        self._heard = time.monotonic()
        while not self._stopping.is_set():
            try:
                if forgotten:
                    # Until it has worked to its end: half of it would leave somebody waiting for ever.
                    self._open_again()
                    forgotten = False
                self._watch_again()
                reply = self._poll(ack)
                if reply.seq < 0:
                    ack, forgotten = 0, True
                    continue
                self._heard = time.monotonic()
                ack = reply.seq
                self._hand_out(reply.notices)
            except RemitError as error:
                if self._stopping.is_set():
                    return
                if time.monotonic() - self._heard > self._give_up_s:
                    self._give_up(error)
                    return
                self._stopping.wait(_RETRY_S)

    def _poll(self, ack: int) -> PollReply:
        poll_s = self.opened.poll_s
        request = (self.client_id, ack, poll_s, self.opened.epoch)
        reply: PollReply = self.request_blocking("poll", request, poll_s + _CALL_MARGIN_S)
        return reply

    def _open_again(self) -> None:
        """Connect to a coordinator that does not know us and ask for what we missed."""
        self.opened = self.request_blocking("open_client", self._open_request)
        with self._lock:
            self._openings += 1
            names = tuple(name for name in self._tracked if name not in self._pending)
        try:
            self._hand_out(self.request_blocking("subscribe", (self.client_id, names)))
        except NotFound:
            # One of them is not known: ask for each by itself, to tell that one.
            for name in names:
                self._watch_now(name)

    def _watch_again(self) -> None:
        """Ask again about what could not be asked because the link was down."""
        while self._unanswered:
            name = next(iter(self._unanswered))
            self._watch_now(name)
            with self._lock:
                self._unanswered.discard(name)

    def _watch_now(self, name: str) -> None:
        with self._lock:
            # Seen before we ask: by the time the answer is here, its own request may have been answered too.
            was_asked_for = name in self._asked_for
        try:
            missed = self.request_blocking("subscribe", (self.client_id, (name,)))
        except NotFound:
            if was_asked_for:
                return
            # The journal of the earlier life does not hold it: nothing will come of it.
            self._lose(name, CoordinatorUnavailable(f"{name} is not known any more"))
            return
        self._hand_out(missed)

    def _hand_out(self, notices: tuple[Notice, ...]) -> None:
        with self._lock:
            found = [(self._tracked.get(notice.node_id), notice) for notice in notices]
            for notice in notices:
                if isinstance(notice, EndedNotice):
                    self._tracked.pop(notice.node_id, None)
        for tracked, notice in found:
            if tracked is None:
                continue
            try:
                tracked.notice(notice)
            except Exception:
                # Its event loop may be closed; all others must still be told.
                logger.exception("a notice about %s could not be handed over", notice.node_id)

    def _give_up(self, error: RemitError) -> None:
        self._fail(CoordinatorUnavailable(f"the coordinator has not answered for {self._give_up_s:.0f} s: {error}"))

    def _fail(self, error: RemitError) -> None:
        """Tell everything tracked that nothing more will be heard, and refuse new requests."""
        self._failed = error
        with self._lock:
            names = list(self._tracked)
        for name in names:
            self._lose(name, error)

    def _lose(self, name: str, error: RemitError) -> None:
        with self._lock:
            tracked = self._tracked.pop(name, None)
        if tracked is None:
            return
        try:
            tracked.lost_contact(error)
        except Exception:
            # As for notices: one that fails must not keep the others from being told.
            logger.exception("the loss of %s could not be handed over", name)


def answer(blob: bytes) -> Any:
    """Return the value of an answer, or raise the error that it carries."""
    word, value = loads(blob)
    if word == "error":
        raise value
    return value
