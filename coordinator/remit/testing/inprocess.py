"""The whole system in one process, without Ray: for tests of agents and of ourselves.

The coordinator runs in a thread with its own event loop, each host in another, as
they do under Ray; only the transport is a function call. A host that is killed
stops answering and its reports are dropped, as if its process were gone. The
coordinator can be crashed and begun again: hosts and clients live on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remit.agents.host import AgentHost
from remit.agents.lifeline import Lifeline
from remit.coordinator.api import Coordinator
from remit.coordinator.engine import ClusterNode, Swept
from remit.coordinator.life import Life, LoopScheduler
from remit.coordinator.service import ServiceOptions
from remit.coordinator.transaction import Settings
from remit.core.errors import CoordinatorUnavailable
from remit.core.messages import HostInventory
from remit.journal import Journal, MemoryJournal
from remit.locks import Area
from remit.telemetry.recorder import Recorder, Sink
from remit.telemetry.settings import TelemetrySettings

__all__ = ["InProcess", "InProcessHost", "open_inprocess"]


class LoopThread:
    """An event loop in a thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Any, timeout_s: float = 30.0) -> Any:
        """Run a coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel what is left in the loop, and end the thread if nothing blocks it."""
        # A host that was killed is closed by a thread of its own while the test closes all.
        with self._closing:
            if self.loop.is_closed():
                return
            self.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._end()))
            self._thread.join(timeout=2.0)
            if not self._thread.is_alive():
                self.loop.close()

    async def _end(self) -> None:
        me = asyncio.current_task()
        until = self.loop.time() + 1.5
        # Again and again: what was on its way here becomes a task meanwhile.
        while left := asyncio.all_tasks() - {me}:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=until - self.loop.time())
            if self.loop.time() >= until:
                break
        self.loop.stop()


class InProcessLink:
    """A link that calls the coordinator in its thread; can be cut."""

    def __init__(self, system: InProcess) -> None:
        self._system = system
        self.is_cut = False
        """While true, nothing arrives and callers are told that nobody answers."""

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        """Send a request and return a future of its answer."""
        outer: Future[bytes] = Future()
        # As under Ray, a waiter that goes away does not cancel the request behind it.
        outer.set_running_or_notify_cancel()
        if self._system.closed or not self._system.take_flight(outer, self):
            outer.set_exception(CoordinatorUnavailable("the link is cut", for_good=self._system.closed))
            return outer
        call = self._system.service_call(method, blob)
        try:
            # Between processes no context variables travel: not the task, span and log of whoever asks.
            inner = contextvars.Context().run(asyncio.run_coroutine_threadsafe, call, self._system.loop)
        except RuntimeError:
            call.close()
            self._system.land(outer)
            outer.set_exception(CoordinatorUnavailable("the coordinator has ended"))
            return outer

        def done(future: Future[bytes]) -> None:
            if not self._system.land(outer):
                return
            if self.is_cut:
                outer.set_exception(CoordinatorUnavailable("the link is cut"))
            elif future.cancelled():
                outer.set_exception(CoordinatorUnavailable("the coordinator has ended"))
            elif (error := future.exception()) is not None:
                outer.set_exception(error)
            else:
                outer.set_result(future.result())

        inner.add_done_callback(done)
        return outer

    def hang_up(self) -> None:
        """Cut it, and end what is parked on it now, as the end of the process that asked does."""
        self.is_cut = True
        self._system.lose_flights("the link is cut", of=self)

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for its answer in this thread."""
        try:
            return self.submit(method, blob).result(timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            raise CoordinatorUnavailable("the coordinator does not answer") from error


class InProcessHost:
    """A host in a thread of this process."""

    def __init__(
        self, host_id: str, system: InProcess, on_gone: Callable[[str], None], limit: int, node: str = "node_1"
    ) -> None:
        self.id = host_id
        self.link = InProcessLink(system)
        self.host = AgentHost(
            host_id,
            self.link,
            workspace=Path(system.workspace),
            max_result_bytes=limit,
            own_process=False,
            node=node,
        )
        self.node = node
        self.pid = os.getpid()
        self.machine = socket.gethostname()
        self.received: list[str] = []
        """What arrived, in order: `start` and `control`."""
        self._held: list[bytes] | None = None
        self.is_deaf = False
        """While true, it does not answer a coordinator that asks what it has."""
        self._thread = LoopThread(f"remit-{host_id[-8:]}")
        self._on_gone = on_gone
        self._dead = False
        self.lifeline = Lifeline(host_id, self.link, self._left_alone)
        """Its watch over the coordinator; `look` by hand, it has no thread here."""

    @property
    def is_dead(self) -> bool:
        """Tell whether it was killed or has ended itself."""
        return self._dead

    def tell(self, on_gone: Callable[[str], None]) -> None:
        """Tell somebody else of its death from now on."""
        self._on_gone = on_gone

    async def inventory(self, epoch: int) -> HostInventory:
        """Say what is here; raises as if nobody answered while `is_deaf`."""
        if self.is_deaf or self._dead:
            raise CoordinatorUnavailable(f"host {self.id} does not answer")
        return self.host.inventory(epoch)

    def _left_alone(self, reason: str) -> None:
        self.host.end(reason, timeout_s=5.0)
        self.kill(reason)

    def start(self, batch: bytes) -> None:
        """Take a batch of attempts."""
        if not self._dead:
            self.received.append("start")
            self._thread.loop.call_soon_threadsafe(self.host.start, batch, context=contextvars.Context())

    def control(self, orders: bytes) -> None:
        """Take orders, in the sender's thread: a blocked loop does not hold them up."""
        if not self._dead:
            self.received.append("control")
            if self._held is None:
                self.host.control(orders)
            else:
                self._held.append(orders)

    def hold_orders(self) -> None:
        """Keep orders back until `pass_orders`: nothing says that they arrive before what notices tell."""
        self._held = []

    def pass_orders(self) -> None:
        """Take the orders that were kept back, and every further one as it comes."""
        held, self._held = self._held, None
        for orders in held or ():
            self.host.control(orders)

    async def flush(self, orders: bytes) -> None:
        """Let spans that have ended be handed on."""
        if not self._dead:
            self.host.control(orders)

    def kill(self, reason: str = "killed") -> None:
        """Vanish: nothing that still runs here is heard of again."""
        if self._dead:
            return
        self._dead = True
        self.link.is_cut = True
        self._on_gone(reason)
        threading.Thread(target=self._bury, name=f"remit-bury-{self.id[-8:]}", daemon=True).start()

    def _bury(self) -> None:
        self.host.abandon_tools()
        self.host.close()
        self._thread.close()

    def close(self) -> None:
        """End the host's thread at the end of a test."""
        self._dead = True
        # Or its long poll would be waited for.
        self.link.hang_up()
        self.host.close()
        self._thread.close()
        self.host.close_tools()


class InProcessEngine:
    """Hosts as threads."""

    def __init__(self, system: InProcess, limit: int) -> None:
        self._system = system
        self._limit = limit
        self.hosts: dict[str, InProcessHost] = {}
        """All hosts ever started, by id."""
        self.swept: list[int] = []
        """Process ids that were to be ended for dead hosts."""
        self.swept_owners: list[str] = []
        """Runs and turns whose programs were to be ended by their names."""
        self.owners: frozenset[str] = frozenset()
        """What is answered to a coordinator that asks of whom programs run."""
        self.sweeps_succeed = True
        """What is answered to them: whether the process is proven gone."""
        self.cluster = [ClusterNode("node_1", "here")]
        """Nodes that hosts are started on: the first one that is not to be avoided."""
        self.aborted = 0
        """How often a coordinator has ended its own life because its journal had failed."""

    async def spawn(
        self,
        host_id: str,
        resources: Mapping[str, Any],
        on_gone: Callable[[str], None],
        *,
        avoid: Collection[str] = (),
    ) -> InProcessHost:
        """Start a host in a thread."""
        await self._system.gate("spawn")
        node = next((node.id for node in self.cluster if node.id not in avoid), None)
        if node is None:
            raise CoordinatorUnavailable("no node of the cluster takes work")
        host = InProcessHost(host_id, self._system, on_gone, self._limit, node)
        self.hosts[host_id] = host
        await self._system.gate("hello")
        return host

    async def find(self, host_id: str, on_gone: Callable[[str], None]) -> InProcessHost | None:
        """Return a host that an earlier life has started."""
        host = self.hosts.get(host_id)
        if host is None or host.is_dead:
            return None
        host.tell(on_gone)
        return host

    async def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the nodes of `cluster`."""
        return tuple(self.cluster)

    async def kill(self, host_id: str) -> None:
        """Make a host vanish."""
        host = self.hosts.get(host_id)
        if host is not None:
            host.kill()

    def sweep(
        self,
        run_id: str,
        pid: int,
        start_time: float,
        machine: str,
        on_done: Callable[[Swept], None],
        claimed: Sequence[Area] = (),
    ) -> None:
        """Note which process would be ended, and say what `sweeps_succeed` says."""
        if pid:
            self.swept.append(pid)
        else:
            self.swept_owners.append(run_id)
        on_done(Swept(self.sweeps_succeed))

    async def programs_gone(self, runs: Collection[str]) -> Mapping[str, frozenset[int]]:
        """Return nothing: hosts in this process outlive their coordinator and tell of their programs."""
        return {}

    async def program_owners(self) -> frozenset[str]:
        """Return `owners`; the programs of hosts in this process end with them."""
        return self.owners

    def vouch(self) -> None:
        """Nothing to say: hosts in this process vouch for their programs themselves."""

    def release_programs(self) -> None:
        """Nothing to end: hosts in this process end their programs themselves."""

    def exit(self) -> None:
        """Nothing to end: the process is the test's."""

    def abort(self) -> None:
        """Count it; the test begins the next life."""
        self.aborted += 1


class InProcess:
    """A coordinator with its hosts in this process.

    Args:
        workspace: folder for outputs.
        settings: the workspace's numbers.
        journal: where events go; in memory by default.
        poll_s: longest time a poll is parked.
        come_back_s: seconds that holders of an earlier life's turns have to come back.
        telemetry: what spans and metrics are made; none by default.
        sinks: further places that they go to.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        settings: Settings | None = None,
        journal: Journal | None = None,
        poll_s: float = 0.5,
        come_back_s: float = 10.0,
        telemetry: TelemetrySettings | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.workspace = str(workspace)
        self.journal: Journal = journal or MemoryJournal()
        self.settings = settings or Settings()
        self.closed = False
        self.calls: list[str] = []
        """Names of the requests that arrived, in order."""
        self._gates: dict[str, asyncio.Event] = {}
        self._poll_s = poll_s
        self._come_back_s = come_back_s
        self._telemetry = telemetry
        self._sinks = tuple(sinks)
        self._fatal: Callable[[Sequence[str]], bool] | None = None
        self.died = threading.Event()
        """Set when the failpoint of `die_after` was reached."""
        self._flying: dict[Future[bytes], InProcessLink] = {}
        self._flights = threading.Lock()
        self._down = False
        self._thread = LoopThread("remit-coordinator")
        self.engine = InProcessEngine(self, self.settings.max_result_bytes)
        try:
            self.life: Life = self._thread.call(self._begin())
        except BaseException:
            self._thread.close()
            raise

    async def _begin(self) -> Life:
        options = ServiceOptions(
            workspace=self.workspace,
            poll_s=self._poll_s,
            housekeeping_s=0.1,
            ask_hosts_s=10.0,
            come_back_s=self._come_back_s,
            failpoint=self._failpoint,
        )
        return await Life.begin(
            options,
            engine=self.engine,
            settings=self.settings,
            scheduler=LoopScheduler(),
            journal=self.journal,
            telemetry=self._telemetry,
            sinks=self._sinks,
        )

    # -- crashes -------------------------------------------------------------------

    def die_after(self, *kinds: str) -> None:
        """Let the coordinator die once events of all these kinds are durable, before their effects.

        It hangs from there on; `died` is set. `restart_coordinator` begins the next life.
        """
        wanted = set(kinds)
        self.died.clear()
        self._fatal = lambda seen: wanted <= set(seen)

    def _failpoint(self, kinds: Sequence[str]) -> bool:
        if self._fatal is None or not self._fatal(kinds):
            return False
        self._fatal = None
        self.died.set()
        return True

    def crash_coordinator(self) -> None:
        """End the coordinator as `kill -9` does; hosts and clients find nobody from now on.

        What the journal had not made durable is gone with it.
        """
        with self._flights:
            self._down = True
        self._fatal = None
        # First the loop: a process that is killed tells nobody that its journal is gone.
        self._thread.close()
        if isinstance(self.journal, MemoryJournal):
            self.journal.crash()
        self.life.spool.close()
        if self.life.recorder is not None:
            self.life.recorder.abandon()
        self._gates.clear()
        self.lose_flights("the coordinator has ended")

    def restart_coordinator(self, journal: Journal | None = None) -> None:
        """Begin the next life, over what was durable; crash the present one first if it is there.

        Args:
            journal: the journal of the next life; by default what follows the one in memory.
        """
        if not self._down:
            self.crash_coordinator()
        if journal is None:
            assert isinstance(self.journal, MemoryJournal)
            journal = MemoryJournal(previous=self.journal)
        self.journal = journal
        self._thread = LoopThread("remit-coordinator")
        self.life = self._thread.call(self._begin())
        with self._flights:
            self._down = False

    def take_flight(self, outer: Future[bytes], link: InProcessLink) -> bool:
        """Take note of a request on its way; false if there is no coordinator, or no way to it."""
        with self._flights:
            # Looked at here, where `lose_flights` waits: what hangs up meanwhile loses this one as well.
            is_there = not (self._down or link.is_cut)
            if is_there:
                self._flying[outer] = link
            return is_there

    def land(self, outer: Future[bytes]) -> bool:
        """Take note of an answer; false if the request was lost in a crash."""
        with self._flights:
            return self._flying.pop(outer, None) is not None

    def lose_flights(self, reason: str, *, of: InProcessLink | None = None) -> None:
        """Answer no request that is on its way: those of one link, or all."""
        with self._flights:
            lost = [outer for outer, link in self._flying.items() if of is None or link is of]
            for outer in lost:
                del self._flying[outer]
        for outer in lost:
            outer.set_exception(CoordinatorUnavailable(reason))

    @property
    def recorder(self) -> Recorder | None:
        """What makes the spans, or None."""
        return self.life.recorder

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The coordinator's event loop."""
        return self._thread.loop

    async def service_call(self, method: str, blob: bytes) -> bytes:
        """Pass a request on, through the gate of its name."""
        self.calls.append(method)
        await self.gate(method)
        return await self.life.service.call(method, blob)

    async def gate(self, name: str) -> None:
        """Wait here while the gate of this name is shut."""
        event = self._gates.get(name)
        if event is not None:
            await event.wait()

    def shut(self, name: str) -> None:
        """Hold back requests of this name, or `spawn`, or `hello` of a host that is up, until `let_through`."""

        async def make() -> None:
            self._gates[name] = asyncio.Event()

        self._thread.call(make())

    def let_through(self, name: str) -> None:
        """Open a gate again."""

        async def release() -> None:
            self._gates.pop(name).set()

        self._thread.call(release())

    def link(self) -> InProcessLink:
        """Return a new link, as another process would have one."""
        return InProcessLink(self)

    def coordinator(self, *, surface: str = "python", grace_s: float = 10.0) -> Coordinator:
        """Return a client, as another process would have one; enter it with `async with`."""
        return Coordinator(self.workspace, self.link, surface=surface, grace_s=grace_s)

    def close(self) -> None:
        """End everything; bounded."""
        if self.closed:
            return
        for host in self.engine.hosts.values():
            host.close()
        self.closed = True
        self._thread.close()
        self.life.spool.close()
        self.journal.close()
        if self.life.recorder is not None:
            self.life.recorder.close()


@contextmanager
def open_inprocess(
    workspace: str | Path,
    *,
    settings: Settings | None = None,
    journal: Journal | None = None,
    poll_s: float = 0.5,
    come_back_s: float = 10.0,
    telemetry: TelemetrySettings | None = None,
    sinks: Sequence[Sink] = (),
) -> Generator[InProcess]:
    """Run a coordinator and its hosts in this process for the time of a block."""
    system = InProcess(
        workspace,
        settings=settings,
        journal=journal,
        poll_s=poll_s,
        come_back_s=come_back_s,
        telemetry=telemetry,
        sinks=sinks,
    )
    try:
        yield system
    finally:
        system.close()
