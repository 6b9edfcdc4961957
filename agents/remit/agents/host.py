"""An agent host as a plain object: begins attempts, hears cancels, reports ends.

The Ray actor around it has no logic. Two threads come in: the body loop (starts,
bodies) and the control thread (cancels), which must get through while a body
blocks the loop.

**Invariants**

1. A cancel is remembered before any attempt it may hit is begun: an attempt that
   comes later finds its signal born set and reports `cancelled` without a body.
2. The signals of a host form the same tree as the runs: an order for an ancestor
   sets everything below it with one message.
3. Every attempt that was received is reported exactly once.
4. From its inventory for a life of the coordinator on, a host refuses what earlier
   lives have sent: what the inventory does not name cannot begin later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from remit.agents.body import (
    ended_before_start,
    failed_before_start,
    run_body,
    stale_host,
    task_factory,
)
from remit.agents.client import ClientSession
from remit.agents.collector import CollectorPause
from remit.agents.context import RunContext
from remit.agents.environment import CodeEnvironment, stale_modules
from remit.agents.link import Link
from remit.agents.outbox import Outbox
from remit.agents.printing import capture_prints
from remit.agents.tooldesk import ToolDesk
from remit.agents.transport import unbundle
from remit.agents.wishes import RunWishes, check_unmoved
from remit.core.cause import Cause, CauseKind
from remit.core.errors import InternalError, Refused
from remit.core.messages import (
    CancelOrder,
    FlushOrder,
    HostInventory,
    LiveAttempt,
    OrderBatch,
    ReportEnded,
    ResumeOrder,
    StartBatch,
    StartItem,
    WaitRefused,
    loads,
)
from remit.core.signal import CancelSignal
from remit.processes.leases import LEASE_S
from remit.telemetry.hosting import HostTelemetry
from remit.telemetry.watching import BodyWatch

__all__ = ["AgentHost"]

logger = logging.getLogger("remit.host")

_NOWHERE = nullcontext()
_STALE_EVERY_S = 0.5
_LOOK_S = 0.02
_MANY = 100
"""Attempts at once for which a pause of the garbage collector is worth its thread."""
MAX_REMEMBERED_CANCELS = 10_000
"""Cancels kept for attempts that have not arrived; they arrive within seconds or never."""


class AgentHost:
    """Runs attempts of one code environment.

    Args:
        host_id: its id.
        link: the way to the coordinator.
        workspace: the workspace's folder.
        max_result_bytes: largest result that may travel.
        own_process: whether this process is the host's alone; then it takes on the
            caller's import path, directory and environment variables.
        node: the node of the cluster that it runs on.
    """

    def __init__(
        self,
        host_id: str,
        link: Link,
        *,
        workspace: Path,
        max_result_bytes: int,
        own_process: bool = True,
        node: str = "",
    ) -> None:
        self.host_id = host_id
        self.machine = socket.gethostname()
        self.pid = os.getpid()
        self.node = node
        self.refused = 0
        """Attempts and orders of earlier lives of the coordinator, and attempts that came after the end."""
        self._link = link
        self._workspace = workspace
        self._max_result_bytes = max_result_bytes
        self._own_process = own_process
        self._outbox = Outbox(host_id, link)
        self._collector = CollectorPause()
        self._telemetry = HostTelemetry(workspace, host_id, own_process=own_process)
        self.lease_left: Callable[[], float] = lambda: LEASE_S
        """Seconds for which the coordinator can still be vouched for."""
        self._desk = ToolDesk(workspace, holder=host_id, lease_left=lambda: self.lease_left())
        self._session: ClientSession | None = None
        self._session_lock = threading.Lock()
        self._env_key = ""
        self._stale_at = 0.0
        self._agents: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._signals: weakref.WeakValueDictionary[str, CancelSignal] = weakref.WeakValueDictionary()
        self._kills: weakref.WeakValueDictionary[str, CancelSignal] = weakref.WeakValueDictionary()
        self._ordered: OrderedDict[str, Cause] = OrderedDict()
        self._ordered_kills: OrderedDict[str, Cause] = OrderedDict()
        self._attempts: dict[str, tuple[int, CancelSignal]] = {}
        self._contexts: dict[str, RunContext] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epoch = 0
        self._ending: Cause | None = None
        self._held: dict[tuple[str, int], None] = {}
        """Attempts from their arrival until their end is in the outbox."""

    # -- starts, in the body loop --------------------------------------------------

    def start(self, blob: bytes) -> None:
        """Begin the attempts of a `StartBatch`; returns when they are scheduled."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.set_task_factory(task_factory)  # type: ignore[arg-type]  # typeshed asks for more than asyncio does
        batch: StartBatch = loads(blob)
        if not self._take_on(batch):
            return
        stale = self.stale()
        if stale:
            for item in batch.items:
                self._report(stale_host(item, stale))
            return
        problem = self._bind(batch)
        for item in batch.items:
            if item.run_id in self._tasks:
                continue
            self._begin(item, batch, problem, loop)

    def _take_on(self, batch: StartBatch) -> bool:
        """Hold the attempts of a batch, unless an earlier life has sent it, or this host ends."""
        with self._lock:
            if batch.epoch < self._epoch or self._ending is not None:
                self.refused += len(batch.items)
                logger.warning("refused %d attempts of life %d", len(batch.items), batch.epoch)
                return False
            self._epoch = batch.epoch
            for item in batch.items:
                self._held[item.run_id, item.attempt] = None
            return True

    def _report(self, report: ReportEnded) -> None:
        """Report the end of an attempt; held until the report is where an inventory finds it."""
        self._outbox.put(report)
        with self._lock:
            self._held.pop((report.run_id, report.attempt), None)

    def _bind(self, batch: StartBatch) -> Exception | None:
        """Take on the caller's code environment; return why that is not possible."""
        try:
            if not self._env_key:
                environment: CodeEnvironment = loads(batch.env)
                if self._own_process:
                    environment.apply()
                    capture_prints()
                self._env_key = batch.env_key
            elif self._env_key != batch.env_key:
                raise InternalError(
                    f"host {self.host_id} is bound to environment {self._env_key} and got work of {batch.env_key}"
                )
        except Exception as error:  # whatever is wrong with the environment fails its runs
            return error
        return None

    def _begin(
        self,
        item: StartItem,
        batch: StartBatch,
        problem: Exception | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        signal = self._signal_of(item)
        if signal.is_set:
            self._report(ended_before_start(item, signal))
            return
        agent: Any = None
        try:
            if problem is not None:
                raise problem
            agent = self._agent(item.agent_key, batch)
            if item.wishes:
                check_unmoved(RunWishes(item.claims, item.wishes), str(self._workspace))
        except Exception as error:  # importing runs user code: anything may come out
            self._report(failed_before_start(item, error))
            return
        watch = BodyWatch(signal) if item.trace else None
        context = RunContext(
            item,
            signal=signal,
            kill_signal=lambda: self._kill_signal_of(item),
            outbox=self._outbox,
            connect=self._connect,
            workspace=self._workspace,
            machine=self.machine,
            max_result_bytes=self._max_result_bytes,
            desk=self._desk,
            watch=watch,
            carrier=self._telemetry.carrier(item.trace, item.run_id, item.attempt),
        )
        self._contexts[item.run_id] = context
        self._attempts[item.run_id] = (item.attempt, signal)
        if self._ending is not None:
            signal.set(self._ending)
        task = loop.create_task(self._attend(agent, item, context, signal, watch))
        self._tasks[item.run_id] = task

    def _agent(self, key: str, batch: StartBatch) -> Any:
        found = self._agents.get(key)
        if found is None:
            found = self._agents[key] = unbundle(batch.agents[key])
            self._telemetry.prepare()
        return found

    async def _attend(
        self,
        agent: Any,
        item: StartItem,
        context: RunContext,
        signal: CancelSignal,
        watch: BodyWatch | None,
    ) -> None:
        try:
            with self._telemetry.inside(item.trace, item.run_id, item.turn_id, item.attempt) if watch else _NOWHERE:
                report = await run_body(
                    agent, item, context, signal=signal, max_result_bytes=self._max_result_bytes, watch=watch
                )
        except Exception as error:  # a hole of ours, but an end that nobody hears of would be waited for without end
            logger.exception("the end of %s could not be told as it was", item.run_id)
            report = ended_before_start(item, signal) if signal.is_set else failed_before_start(item, error)
        finally:
            del self._tasks[item.run_id]
            del self._contexts[item.run_id]
            del self._attempts[item.run_id]
        if signal.is_set:
            self._telemetry.flush_soon()
        self._report(report)

    def stale(self) -> list[str]:
        """Return user modules loaded here whose files were edited since.

        Looked at twice a second at most: whoever could want the edited version has
        to start a new process first, which takes longer.
        """
        now = time.monotonic()
        if not self._own_process or not self._env_key or now < self._stale_at:
            return []
        self._stale_at = now + _STALE_EVERY_S
        return stale_modules()

    # -- signals -------------------------------------------------------------------

    def _signal_of(self, item: StartItem) -> CancelSignal:
        """Return a new signal for an attempt, linked below its ancestors'.

        It stands for its run until the next attempt, so that what the attempt
        delegates is below it, and its time-out ends no later attempt.
        """
        with self._lock:
            parent = self._chain(item.path, self._signals, self._ordered)
            signal = CancelSignal(name=item.run_id) if parent is None else parent.child(item.run_id)
            self._signals[item.run_id] = signal
            cause = item.cause or self._ordered.get(item.run_id)
        if cause is not None:
            signal.set(cause)
        return signal

    def _kill_signal_of(self, item: StartItem) -> CancelSignal:
        """Return the signal that skips the grace of a run's processes; made when one is started."""
        with self._lock:
            kill = self._chain((*item.path, item.run_id), self._kills, self._ordered_kills)
        assert kill is not None
        return kill

    def _chain(
        self,
        names: tuple[str, ...],
        signals: weakref.WeakValueDictionary[str, CancelSignal],
        ordered: OrderedDict[str, Cause],
    ) -> CancelSignal | None:
        """Return the signal of the last of these nodes, each linked below the one before it."""
        parent: CancelSignal | None = None
        for name in names:
            found = signals.get(name)
            if found is None:
                found = CancelSignal(name=name) if parent is None else parent.child(name)
                signals[name] = found
                cause = ordered.get(name)
                if cause is not None:
                    found.set(cause)
            parent = found
        return parent

    # -- control, in any thread ----------------------------------------------------

    def control(self, blob: bytes) -> None:
        """Carry out orders; safe and quick while a body blocks the loop."""
        batch: OrderBatch = loads(blob)
        with self._lock:
            if batch.epoch < self._epoch:
                self.refused += len(batch.orders)
                logger.warning("refused %d orders of life %d", len(batch.orders), batch.epoch)
                return
            self._epoch = batch.epoch
        for order in batch.orders:
            if isinstance(order, CancelOrder):
                self._cancel(order)
                self._telemetry.flush_soon()
            elif isinstance(order, FlushOrder):
                self._telemetry.flush(order.timeout_s)
            else:
                self._in_loop(order)

    def _cancel(self, order: CancelOrder) -> None:
        if order.attempt:
            attempt = self._attempts.get(order.target)
            if attempt is not None and attempt[0] == order.attempt:
                attempt[1].set(order.cause)
            return
        with self._lock:
            _remember(self._ordered, order.target, order.cause)
            signal = self._signals.get(order.target)
            kill: CancelSignal | None = None
            if order.kill:
                _remember(self._ordered_kills, order.target, order.cause)
                kill = self._kills.get(order.target)
        if signal is not None and self._own_process and len(self._attempts) >= _MANY:
            self._collector.begin()
        if kill is not None:
            kill.set(order.cause)
        if signal is not None:
            signal.set(order.cause)

    def _in_loop(self, order: ResumeOrder | WaitRefused) -> None:
        """Carry out an order that belongs to a body, in the loop that the body runs in."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._obey, order)
        except RuntimeError:
            logger.debug("order for %s came after the loop was closed", order.run_id)

    def _obey(self, order: ResumeOrder | WaitRefused) -> None:
        context = self._contexts.get(order.run_id)
        if context is None:
            return
        if isinstance(order, ResumeOrder):
            context.resumed()
        else:
            context.wait_refused(order.wait_id, order.cycle)

    # -- recovery, in any thread ---------------------------------------------------

    def inventory(self, epoch: int) -> HostInventory:
        """Say what is really here, and serve this life of the coordinator from now on.

        Raises:
            Refused: a later life has asked before.
        """
        with self._lock:
            if epoch < self._epoch:
                raise Refused(f"host {self.host_id} serves life {self._epoch} of its coordinator, not {epoch}")
            self._epoch = epoch
            # In this order: an attempt goes from the first into the second.
            held = list(self._held)
        found = [self._look_at(run_id, attempt) for run_id, attempt in held]
        known = set(held)
        found += [LiveAttempt(*name, reported=True) for name in self._outbox.ends() if name not in known]
        return HostInventory(self.host_id, self.pid, self.machine, tuple(found), self.node)

    def _look_at(self, run_id: str, attempt: int) -> LiveAttempt:
        context = self._contexts.get(run_id)
        if context is None or context.attempt != attempt:
            return LiveAttempt(run_id, attempt)
        return context.inventory()

    def end(self, reason: str, timeout_s: float) -> bool:
        """Cancel all bodies with the cause `parent_lost`, take no more, and wait; blocks its thread.

        Args:
            reason: free text for people.
            timeout_s: seconds that the bodies have.

        Returns:
            Whether all of them have ended. What has not ends with the process.
        """
        logger.error("host %s ends itself: %s", self.host_id, reason)
        with self._lock:
            self._ending = Cause(CauseKind.PARENT_LOST, origin=self.host_id, surface="host", reason=reason)
        for _, signal in list(self._attempts.values()):
            signal.set(self._ending)
        are_over = self._wait_for_bodies(timeout_s)
        # What agents and libraries have told of themselves would end with the process.
        self._telemetry.flush()
        return are_over

    def _wait_for_bodies(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._tasks:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    # -- for bodies ----------------------------------------------------------------

    def _connect(self) -> ClientSession:
        """Return this host's connection for delegating, opened on first use.

        It does not wait for the answer: this is called in the loop of all bodies.
        """
        with self._session_lock:
            if self._session is None:
                session = ClientSession(self._link, surface="host", host_id=self.host_id)
                session.open_soon()
                self._session = session
            return self._session

    def statistics(self) -> dict[str, int]:
        """Return counts of what is held, for tests and `remit doctor`."""
        return {
            "attempts": len(self._tasks),
            "signals": len(self._signals),
            "remembered": len(self._ordered),
        }

    def abandon_tools(self) -> None:
        """Leave programs to whoever finds them, as a host that is killed does."""
        self._desk.abandon()

    def close(self) -> None:
        """Cancel what runs and stop listening; bounded."""
        self._outbox.close()
        for task in list(self._tasks.values()):
            task.cancel()
        if self._session is not None:
            self._session.close(say_goodbye=False)

    def close_tools(self) -> None:
        """Stop vouching for programs and watching them, once no body needs that any more."""
        self._desk.close()


def _remember(ordered: OrderedDict[str, Cause], name: str, cause: Cause) -> None:
    ordered.setdefault(name, cause)
    while len(ordered) > MAX_REMEMBERED_CANCELS:
        ordered.popitem(last=False)
