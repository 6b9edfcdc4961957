"""The coordinator as a plain object: decides, journals, then acts. No Ray in here.

**Order of everything**: a command is decided at once, its events are handed to the
journal, and only when they are on the disk do its effects happen and its caller
get an answer. Commits come back in the order in which they were made.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from remit.coordinator.decider import Decider, Decision
from remit.coordinator.dispatch import Dispatcher
from remit.coordinator.engine import Engine, Scheduler, TimerHandle
from remit.coordinator.mailbox import Mailboxes
from remit.coordinator.transaction import Settings
from remit.coordinator.views import (
    NodeView,
    TreeView,
    node_view,
    summarise_cancel,
    tree_view,
    turn_views,
)
from remit.core.clock import Clock
from remit.core.errors import (
    CoordinatorUnavailable,
    InternalError,
    JournalError,
    NotFound,
    RemitError,
    TurnCancelled,
)
from remit.core.events import encode_event
from remit.core.messages import (
    PROTOCOL,
    AskClaim,
    CancelAnswer,
    CancelRequest,
    CancelSummary,
    ClaimAnswer,
    ClaimCheck,
    ClientOpened,
    DelegateRequest,
    FinishTurn,
    GiveUpClaim,
    Notice,
    OpenClient,
    OpenTurn,
    PollReply,
    ReportBatch,
    TurnCancelledNotice,
    TurnStartedNotice,
    dumps,
    loads,
)
from remit.journal import Journal, JournalRecord
from remit.locks import ClaimView
from remit.telemetry.recorder import Recorder

__all__ = ["CoordinatorService", "ServiceOptions"]

logger = logging.getLogger("remit.coordinator")

_LAST_SPANS_S = 1.0
"""Seconds for the last spans of a coordinator whose journal has failed."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How a coordinator behaves towards its clients."""

    workspace: str
    poll_s: float = 2.0
    """A poll is answered after this time at the latest; it is also the sign of life."""
    idle_exit_s: float | None = None
    """End when nobody has needed the coordinator for this long; None for never."""
    housekeeping_s: float = 0.5
    """How often lapsed clients and idle hosts are looked for."""


@dataclass(slots=True)
class _Commit:
    """A decision that waits for the disk."""

    written: Future[int]
    decision: Decision
    waiter: asyncio.Future[Any] | None


class CoordinatorService:
    """One workspace's coordinator. Lives on one event loop; `call` is its only door.

    Args:
        options: behaviour.
        journal: open and owned by this object from here on.
        engine: starts and ends hosts.
        clock: coordinator time.
        scheduler: timers on that clock.
        decider: with the state folded from the journal.
        on_busy: called now and then while somebody needs this coordinator.
        recorder: makes spans of what is decided; closed with this object. None for no spans.
    """

    def __init__(
        self,
        options: ServiceOptions,
        *,
        journal: Journal,
        engine: Engine,
        clock: Clock,
        scheduler: Scheduler,
        decider: Decider | None = None,
        on_busy: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._options = options
        self._journal = journal
        self._engine = engine
        self._clock = clock
        self._scheduler = scheduler
        self._decider = decider or Decider(settings=Settings())
        self._on_busy = on_busy
        self._clients = Mailboxes()
        self._recorder = recorder
        carrier = None if recorder is None else recorder.carrier
        self._dispatch = Dispatcher(self._decider.state, engine, self._clients, self, carrier=carrier)
        self._commits: deque[_Commit] = deque()
        self._quiet_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._timer: TimerHandle | None = None
        self._timer_due: float | None = None
        self._housekeeper: TimerHandle | None = None
        self._busy_at = clock.now()
        self._broken: JournalError | None = None
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "open_client": self._open_client,
            "poll": self._poll,
            "close_client": self._close_client,
            "open_turn": self._open_turn,
            "finish_turn": self._finish_turn,
            "delegate": self._delegate,
            "cancel": self._cancel,
            "claim": self._claim,
            "give_up_claim": self._give_up_claim,
            "check_claim": self._check_claim,
            "clear_claims": self._clear_claims,
            "locks": self._locks,
            "cancel_status": self._cancel_status,
            "report": self._report,
            "subscribe": self._subscribe,
            "tree": self._tree,
            "node": self._node,
            "turns": self._turns,
            "runs": self._runs,
            "statistics": self._statistics,
            "shutdown": self._shutdown,
        }

    async def start(self) -> None:
        """Begin this life: journal it and settle what an earlier one left."""
        decision = self._decider.start(self._journal.epoch, os.getpid(), self._clock.now())
        await self._commit(decision)
        self._keep_house()

    async def call(self, method: str, blob: bytes) -> bytes:
        """Carry out one request of a client or host.

        Returns:
            A pickled pair: `("ok", answer)` or `("error", exception)`; exceptions
            travel as data so that they arrive with their attributes.
        """
        handler = self._methods.get(method)
        try:
            if handler is None:
                raise InternalError(f"the coordinator has no method {method!r}")
            return dumps(("ok", await handler(loads(blob))))
        except (RemitError, TurnCancelled) as error:
            return dumps(("error", error))
        except Exception as error:  # the outer edge of a request: it must get an answer
            logger.exception("request %s failed", method)
            return dumps(("error", InternalError(f"{method} failed: {error!r}")))

    # -- decisions -----------------------------------------------------------------

    def _commit(self, decision: Decision) -> asyncio.Future[Any]:
        """Journal a decision; the returned future resolves when its effects are on their way."""
        waiter: asyncio.Future[Any] = self._loop.create_future()
        if self._broken is not None:
            waiter.set_exception(self._broken)
            return waiter
        if not decision.events and not self._commits:
            self._apply(decision, waiter)
            return waiter
        records = [
            JournalRecord(
                event.kind,
                event.node_id,
                event.turn_id,
                int(event.at * 1000),
                encode_event(event),
                event.terminal,
                payload,
            )
            for event, payload in decision.events
        ]
        written = self._journal.append(records)
        self._commits.append(_Commit(written, decision, waiter))
        if written.done():
            self._drain()
        else:
            written.add_done_callback(self._written)
        self._arm()
        return waiter

    def _written(self, _: Future[int]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            logger.debug("journal answered after the loop was closed")

    def _drain(self) -> None:
        """Act on what has reached the disk, in order."""
        while self._commits and self._commits[0].written.done():
            commit = self._commits.popleft()
            error = commit.written.exception()
            if error is None:
                self._apply(commit.decision, commit.waiter)
                continue
            self._break(error)
            if commit.waiter is not None and not commit.waiter.done():
                commit.waiter.set_exception(self._broken or error)

    def _break(self, error: BaseException) -> None:
        """The journal failed: the state is ahead of the truth, so this life is over."""
        if self._broken is not None:
            return
        self._broken = error if isinstance(error, JournalError) else JournalError(f"the journal failed: {error}")
        logger.error("the journal failed, the coordinator ends: %s", error)
        self._dispatch.abandon()
        self._clients.release_all()
        if self._recorder is not None:
            self._recorder.close(_LAST_SPANS_S)
        self._engine.exit()

    def _apply(self, decision: Decision, waiter: asyncio.Future[Any] | None) -> None:
        payloads = {
            event.node_id: payload for event, payload in decision.events if payload is not None and event.terminal
        }
        if self._recorder is not None:
            self._recorder.events(decision.events)
        self._dispatch.apply(decision.effects, payloads)
        for request_id in decision.effects.quiet:
            for quiet in self._quiet_waiters.pop(request_id, ()):
                if not quiet.done():
                    quiet.set_result(None)
        if waiter is not None and not waiter.done():
            if decision.error is not None:
                waiter.set_exception(decision.error)
            else:
                waiter.set_result(decision.answer)
        self._arm()

    def _arm(self) -> None:
        """Set the one timer to whatever is due next."""
        due = self._decider.next_due()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due is not None:
            self._timer = self._scheduler.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_due = None
        self._decide(self._decider.tick(self._clock.now()))
        self._arm()

    def _decide(self, decision: Decision) -> None:
        """Commit a decision that nobody waits for."""
        self._commit(decision).add_done_callback(_ignore)

    # -- hosts, for the dispatcher -------------------------------------------------

    def host_ready(self, host_id: str, pid: int, machine: str) -> None:
        """A host that was asked for answers."""
        self._decide(self._decider.host_ready(host_id, pid, machine, self._clock.now()))

    def host_gone(self, host_id: str, reason: str) -> None:
        """A host died, was killed, or could not be started."""
        self._clients.drop_host(host_id)
        self._decide(self._decider.host_gone(host_id, reason, self._clock.now()))

    def process_swept(self, run_id: str, pid: int, gone: bool, /) -> None:
        """A process that a dead host had left is gone, or could not be ended."""
        self._decide(self._decider.swept(run_id, pid, self._clock.now(), gone=gone))

    # -- requests ------------------------------------------------------------------

    async def _open_client(self, request: OpenClient) -> ClientOpened:
        self._clients.open(request, self._clock.now())
        self._busy_at = self._clock.now()
        return ClientOpened(
            epoch=self._journal.epoch,
            poll_s=self._options.poll_s,
            workspace=self._options.workspace,
            max_result_bytes=self._decider.settings.max_result_bytes,
            protocol=PROTOCOL,
        )

    async def _poll(self, request: tuple[str, int, float]) -> PollReply:
        client_id, ack, timeout_s = request
        if self._broken is not None:
            raise self._broken
        wait_s = min(timeout_s, self._options.poll_s)
        return await self._clients.poll(client_id, ack, wait_s, self._clock.now())

    async def _close_client(self, client_id: str) -> None:
        self._clients.drop(client_id)
        await self._commit(self._decider.client_gone(client_id, "its client went away", self._clock.now()))

    async def _open_turn(self, request: OpenTurn) -> None:
        self._require_client(request.client_id)
        await self._commit(self._decider.open_turn(request, self._clock.now()))

    async def _finish_turn(self, request: FinishTurn) -> None:
        if self._recorder is not None:
            self._recorder.holder(request.turn_id, request.timing)
        await self._commit(self._decider.finish_turn(request, self._clock.now()))

    async def _delegate(self, request: DelegateRequest) -> None:
        self._require_client(request.client_id)
        known = self._decider.state.nodes
        fresh = [run for run in request.runs if run.run_id not in known]
        self._dispatch.remember(request, fresh)
        decision = self._decider.delegate(request, self._clock.now())
        if decision.error is not None:
            self._dispatch.forget(run.run_id for run in fresh)
        await self._commit(decision)

    def _require_client(self, client_id: str) -> None:
        if client_id not in self._clients:
            raise CoordinatorUnavailable(f"client {client_id!r} is not known to this coordinator; it must open again")

    async def _claim(self, request: AskClaim) -> ClaimAnswer:
        decision = self._decider.ask_claim(request, self._clock.now())
        await self._commit(decision)
        assert decision.claim is not None
        return decision.claim

    async def _give_up_claim(self, request: GiveUpClaim) -> None:
        await self._commit(self._decider.give_up_claim(request, self._clock.now()))

    async def _check_claim(self, request: ClaimCheck) -> int:
        if self._broken is not None:
            raise self._broken
        return self._decider.check_claim(request)

    async def _clear_claims(self, node_id: str) -> None:
        await self._commit(self._decider.clear_claims(node_id, self._clock.now()))

    async def _locks(self, _: None) -> tuple[ClaimView, ...]:
        return self._decider.state.locks.claims()

    async def _cancel(self, request: CancelRequest) -> CancelAnswer:
        decision = self._decider.cancel(request, self._clock.now())
        await self._commit(decision)
        assert decision.answer is not None
        return self._traced(decision.answer)

    def _traced(self, answer: CancelAnswer) -> CancelAnswer:
        """Return an answer with the span of what it is about, for whoever asked to link to."""
        node = self._decider.state.nodes.get(answer.target)
        if self._recorder is None or node is None:
            return answer
        turn = self._decider.state.nodes.get(node.turn_id)
        holder = turn.trace if turn is not None else ""
        return replace(answer, trace=self._recorder.carrier(node.turn_id, holder, node.id))

    async def _cancel_status(self, request: tuple[str, float]) -> CancelSummary | None:
        """Return what a cancel has led to, waiting up to a time for quiet."""
        request_id, timeout_s = request
        cancel = self._decider.state.cancels.get(request_id)
        if cancel is None:
            return None
        if cancel.quiet_s is None and timeout_s > 0:
            quiet: asyncio.Future[None] = self._loop.create_future()
            waiters = self._quiet_waiters.setdefault(request_id, [])
            waiters.append(quiet)
            await asyncio.wait([quiet], timeout=min(timeout_s, self._options.poll_s))
            if not quiet.done():
                waiters.remove(quiet)
        return summarise_cancel(self._decider.state, request_id)

    async def _report(self, batch: ReportBatch) -> None:
        if not self._dispatch.is_new(batch):
            return
        if self._recorder is not None:
            self._recorder.reports(batch.items)
        refused = self._decider.state.refused
        decision = self._decider.report(batch, self._clock.now())
        if self._recorder is not None and self._decider.state.refused > refused:
            self._recorder.refused(self._decider.state.refused - refused)
        await self._commit(decision)

    async def _subscribe(self, request: tuple[str, tuple[str, ...]]) -> tuple[Notice, ...]:
        """Watch nodes; what their holder may have missed is answered at once."""
        client_id, names = request
        missed: list[Notice] = []
        for name in names:
            node = self._decider.state.nodes.get(name)
            if node is None:
                raise NotFound(f"no turn or run {name!r} in this workspace")
            if node.is_ended:
                missed.append(self._dispatch.notice(node, self._stored_payload(name)))
                continue
            self._clients.watch(client_id, name)
            if node.is_turn and node.started_at is not None:
                missed.append(TurnStartedNotice(name))
            if node.is_turn and node.cause is not None:
                missed.append(TurnCancelledNotice(name, node.cause))
        return tuple(missed)

    def _stored_payload(self, node_id: str) -> bytes | None:
        reader = self._journal.reader()
        try:
            return reader.payload(node_id, "run_ended")
        finally:
            reader.close()

    async def _tree(self, node_id: str) -> TreeView:
        node = self._decider.state.nodes.get(node_id)
        if node is None:
            raise NotFound(f"no turn or run {node_id!r} in this workspace")
        return tree_view(self._decider.state, node, self._clock.now())

    async def _node(self, node_id: str) -> NodeView:
        node = self._decider.state.nodes.get(node_id)
        if node is None:
            raise NotFound(f"no turn or run {node_id!r} in this workspace")
        return node_view(self._decider.state, node)

    async def _turns(self, _: None) -> tuple[NodeView, ...]:
        return turn_views(self._decider.state)

    async def _runs(self, _: None) -> tuple[NodeView, ...]:
        state = self._decider.state
        return tuple(node_view(state, node) for node in state.nodes.values() if not node.is_turn)

    async def _statistics(self, _: None) -> dict[str, Any]:
        state = self._decider.state
        return {
            "pid": os.getpid(),
            "epoch": state.epoch,
            "live_turns": state.live_turns,
            "live_runs": state.live_runs,
            "limits": self._decider.settings.limits(),
            "slots_used": {pool.value: used for pool, used in state.used.items()},
            "clients": self._clients.people,
            "messages": dict(self._dispatch.messages),
            "refused": state.refused,
            "stopping": state.stopping,
            "telemetry": {} if self._recorder is None else self._recorder.statistics(),
            "hosts": [
                {
                    "id": host.id,
                    "pid": host.pid,
                    "ready": host.ready,
                    "draining": host.draining,
                    "pool": host.pool.value if host.pool else "",
                    "runs": len(host.runs),
                }
                for host in state.hosts.values()
            ],
        }

    # -- housekeeping and end ------------------------------------------------------

    def _keep_house(self) -> None:
        """Look for lapsed clients, idle hosts and the end of one's own usefulness."""
        now = self._clock.now()
        for client in self._clients.lapsed(now):
            client_id = client.opened.client_id
            reason = f"not heard of for {now - client.last_seen:.1f} s"
            self._clients.drop(client_id)
            self._decide(self._decider.client_gone(client_id, reason, now))
        self._decide(self._decider.tick(now))
        self._dispatch.forget(self._decider.prune())
        state = self._decider.state
        if self._clients.people or state.live_turns or state.live_runs:
            self._busy_at = now
            if self._on_busy is not None:
                self._on_busy()
        idle_exit_s = self._options.idle_exit_s
        if idle_exit_s is not None and now - self._busy_at > idle_exit_s:
            self._loop.create_task(self._shutdown(("idle", 0.0)))
            return
        self._housekeeper = self._scheduler.call_at(now + self._options.housekeeping_s, self._keep_house)

    async def _shutdown(self, request: tuple[str, float]) -> bool:
        """Close in order: refuse, signal, cancel, wait (bounded), then let go of resources.

        Returns:
            Whether everything had ended within the bound.
        """
        reason, timeout_s = request
        if self._broken is not None or self._closed.is_set():
            return True
        await self._commit(self._decider.shutdown(reason, self._clock.now()))
        quiet = await self._wait_idle(timeout_s)
        if self._closed.is_set():
            return quiet
        self._closed.set()
        for timer in (self._timer, self._housekeeper):
            if timer is not None:
                timer.cancel()
        await self._dispatch.kill_all("the coordinator is closing")
        self._clients.release_all()
        await asyncio.to_thread(self._journal.close, 5.0)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close, 5.0)
        # The answer to whoever asked must leave before this process does.
        self._loop.call_later(0.2, self._engine.exit)
        return quiet

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline = self._clock.monotonic() + timeout_s
        state = self._decider.state
        while state.live_turns or state.live_runs:
            if self._clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True


def _ignore(future: asyncio.Future[Any]) -> None:
    """Take note of a failed commit: `_break` has already dealt with it."""
    if not future.cancelled():
        future.exception()
