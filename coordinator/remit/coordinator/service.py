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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from remit.coordinator.briefs import Briefs, BriefSpool
from remit.coordinator.claiming import missed_notice
from remit.coordinator.closing import Closing, Steps
from remit.coordinator.decider import Decider, Decision
from remit.coordinator.desk import Desk, approval_notice
from remit.coordinator.dispatch import Dispatcher
from remit.coordinator.engine import ClusterNode, Engine, Scheduler, Swept, TimerHandle
from remit.coordinator.folding import past_node
from remit.coordinator.mailbox import Mailboxes
from remit.coordinator.snapshotting import Snapshots
from remit.coordinator.state import Node, WorkspaceState
from remit.coordinator.survey import ProgramWitness
from remit.coordinator.transaction import Effects, Settings
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
    CoordinatorClosing,
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
    DrainAnswer,
    DrainRequest,
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
from remit.core.wellformed import check_message
from remit.journal import Journal, JournalRecord
from remit.locks import ClaimView
from remit.telemetry.recorder import Recorder

__all__ = ["CoordinatorService", "ServiceOptions"]

logger = logging.getLogger("remit.coordinator")

_LAST_SPANS_S = 1.0
"""Seconds for the last spans of a coordinator whose journal has failed."""
_LAST_ANSWER_S = 0.2
"""Seconds for answers that are on their way when a life ends over a hole of ours."""
_AFTER_THE_END = frozenset({"shutdown", "poll", "close_client"})
"""Requests that a closed coordinator still answers: they change nothing."""
_JOURNAL_S = 4.5
"""Seconds that the journal may take to close; within the bound of a closing's resource."""


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
    ask_hosts_s: float = 10.0
    """Seconds that the hosts of an earlier life have to say what they have."""
    come_back_s: float = 10.0
    """Seconds that the holders of turns have to come back after a restart."""
    failpoint: Callable[[Sequence[str]], bool] | None = None
    """For tests: gets the kinds of the events that have become durable; true ends this life before their effects."""


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
        spool: keeps what it takes to begin runs for later lives; None for not at all.
        kept: what earlier lives have kept.
        tail: records that the journal holds behind its latest snapshot.
        witness: who knows what became of programs while no coordinator was there.
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
        spool: BriefSpool | None = None,
        kept: Sequence[Briefs] = (),
        tail: int = 0,
        witness: ProgramWitness | None = None,
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
        self._spool = spool
        self._kept = kept
        self._witness: ProgramWitness = witness or self._ask_engine
        self._recorder = recorder
        self._dispatch = Dispatcher(
            self._decider.state,
            engine,
            self._clients,
            self,
            epoch=journal.epoch,
            spool=spool,
            carrier=None if recorder is None else recorder.carrier,
        )
        self._snapshots = Snapshots(journal, self._decider.state, tail=tail)
        self._commits: deque[_Commit] = deque()
        self._quiet_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._timer: TimerHandle | None = None
        self._timer_due: float | None = None
        self._housekeeper: TimerHandle | None = None
        self._busy_at = clock.now()
        self._broken: JournalError | None = None
        self._died = False
        self._unanswered: list[asyncio.Future[Any] | None] = []
        """Who waits for a life that a test has let die: held, since nothing else holds them."""
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closers: set[asyncio.Task[bool]] = set()
        self.closing = Closing(self._closing_steps(), clock)
        """The way down; see `close`."""
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
            "host_alive": self._host_alive,
            "drain": self._drain_node,
            "subscribe": self._subscribe,
            "tree": self._tree,
            "node": self._node,
            "turns": self._turns,
            "runs": self._runs,
            "statistics": self._statistics,
            "shutdown": self._shutdown,
            **Desk(self._decider, clock, self._commit).methods(),
        }

    async def start(self) -> None:
        """Begin this life: ask what is really there, journal it, and settle what an earlier one left.

        Bounded by `ask_hosts_s` and the disk. Requests are for afterwards.
        """
        bound_s = self._options.ask_hosts_s
        survey = await self._dispatch.look_around(self._kept, bound_s=bound_s, witness=self._witness)
        self._kept = ()
        now = self._clock.now()
        turns = self._decider.state.turns.values()
        self._clients.expect({t.client_id for t in turns if not t.is_ended}, now + self._options.come_back_s)
        await self._commit(self._decider.start(self._journal.epoch, os.getpid(), now, survey))
        self._dispatch.begin()
        if not self.closing.has_begun:
            self._keep_house()

    async def _ask_engine(self, runs: Collection[Node]) -> Mapping[str, frozenset[int]]:
        """Ask who has seen the ends of programs that hosts could not tell of."""
        return await self._engine.programs_gone([run.id for run in runs])

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
            if self._closed.is_set() and method not in _AFTER_THE_END:
                raise CoordinatorClosing("the coordinator of this workspace has closed; open the workspace again")
            if self._broken is not None and method != "shutdown":  # that has nothing more to do, and says so
                raise self._broken
            message = loads(blob)
            check_message(message)
            return dumps(("ok", await handler(message)))
        except (RemitError, TurnCancelled) as error:
            self._look_for_tears()
            return dumps(("error", error))
        except Exception as error:  # the outer edge of a request: it must get an answer
            logger.exception("request %s failed", method)
            self._look_for_tears()
            return dumps(("error", InternalError(f"{method} failed: {error!r}")))

    def _look_for_tears(self) -> None:
        """End this life if its state may be ahead of the journal; whoever asked is answered first."""
        if self._decider.is_torn and self._broken is None:
            self._break(InternalError("a decision was left in the middle"), abort_in_s=_LAST_ANSWER_S)

    # -- decisions -----------------------------------------------------------------

    def _commit(self, decision: Decision) -> asyncio.Future[Any]:
        """Journal a decision; the returned future resolves when its effects are on their way."""
        waiter: asyncio.Future[Any] = self._loop.create_future()
        if self._died:
            self._unanswered.append(waiter)
            return waiter
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
        try:
            written = self._journal.append(records)
        except RemitError as error:
            # What it does not take has been decided already.
            self._break(error, abort_in_s=_LAST_ANSWER_S)
            waiter.set_exception(error)
            return waiter
        self._snapshots.count(len(records))
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

    def _break(self, error: BaseException, *, abort_in_s: float = 0.0) -> None:
        """The state is ahead of the truth, which is the journal, so this life is over.

        Args:
            error: what the journal failed with, or does not hold.
            abort_in_s: seconds in which answers may still leave.
        """
        if self._broken is not None:
            return
        self._broken = error if isinstance(error, JournalError) else JournalError(f"the journal failed: {error}")
        logger.error("the journal failed, this life of the coordinator ends: %s", error)
        self._dispatch.abandon()
        self._clients.release_all()
        if self._recorder is not None:
            self._recorder.close(_LAST_SPANS_S)
        if abort_in_s:
            self._loop.call_later(abort_in_s, self._engine.abort)
        else:
            self._engine.abort()

    def _apply(self, decision: Decision, waiter: asyncio.Future[Any] | None) -> None:
        if self._died_at(decision):
            self._unanswered.append(waiter)
            return
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

    def _died_at(self, decision: Decision) -> bool:
        """Tell whether this life is over: a test has let it die between the disk and the effects."""
        failpoint = self._options.failpoint
        if not self._died and failpoint is not None:
            self._died = failpoint([event.kind for event, _ in decision.events])
        if self._died:
            self._dispatch.abandon()
        return self._died

    def _all_durable(self) -> asyncio.Future[Any]:
        """Return a future that resolves when everything decided so far is on the disk.

        Whoever is told of what is only in memory would be told of what a crash takes back.
        """
        return self._commit(Decision([], Effects()))

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
        self._decide(self._decider.tick)
        self._arm()

    def _decide(self, rule: Callable[[float], Decision]) -> None:
        """Commit a decision that nobody waits for; a rule gets the time."""
        if self._broken is not None:
            return
        try:
            decision = rule(self._clock.now())
        except Exception:  # nobody is there to be told but whoever reads the log
            logger.exception("a decision failed")
            self._look_for_tears()
            return
        self._commit(decision).add_done_callback(_ignore)

    # -- hosts, for the dispatcher -------------------------------------------------

    def host_ready(self, host_id: str, pid: int, machine: str, node: str) -> None:
        """A host that was asked for answers."""
        self._decide(lambda now: self._decider.host_ready(host_id, pid, machine, now, node))

    def host_gone(self, host_id: str, reason: str) -> None:
        """A host died, was killed, or could not be started."""
        self._clients.drop_host(host_id)
        self._decide(lambda now: self._decider.host_gone(host_id, reason, now))

    def process_swept(self, run_id: str, pid: int, swept: Swept, /) -> None:
        """A process that a dead host had left is gone, or could not be ended."""
        gone, aftermath = swept.gone, swept.aftermath
        self._decide(lambda now: self._decider.swept(run_id, pid, now, gone=gone, aftermath=aftermath))

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

    async def _poll(self, request: tuple[str, int, float, int]) -> PollReply:
        client_id, ack, timeout_s, epoch = request
        if epoch != self._journal.epoch:
            # An old hello may have made it known here; it does not know of this life, and what it has missed.
            return PollReply(-1)
        wait_s = min(timeout_s, self._options.poll_s)
        return await self._clients.poll(client_id, ack, wait_s, self._clock.now())

    async def _close_client(self, client_id: str) -> None:
        self._clients.drop(client_id)
        if self._closed.is_set():
            return
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
        else:
            self._dispatch.keep(request, fresh)
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
        summary = summarise_cancel(self._decider.state, request_id)
        await self._all_durable()
        return summary

    async def _report(self, batch: ReportBatch) -> None:
        if not self._dispatch.is_new(batch):
            # The first copy may still wait for the disk, and its sender forgets what is acknowledged.
            await self._all_durable()
            return
        if self._recorder is not None:
            self._recorder.reports(batch.items)
        refused = self._decider.state.refused
        decision = self._decider.report(batch, self._clock.now())
        if self._recorder is not None and self._decider.state.refused > refused:
            self._recorder.refused(self._decider.state.refused - refused)
        await self._commit(decision)

    async def _host_alive(self, host_id: str) -> bool:
        """Renew a host's lease; false tells it that its work was settled without it."""
        return host_id in self._decider.state.hosts

    async def _drain_node(self, request: DrainRequest) -> DrainAnswer:
        nodes = await self._engine.nodes()
        node = _named(nodes, request.node)
        drained = self._decider.state.drained
        others = sum(other.id not in drained for other in nodes if other.id != node.id)
        decision = self._decider.drain(node.id, request.reason, self._clock.now(), others=others, undo=request.undo)
        await self._commit(decision)
        assert decision.drain is not None
        return decision.drain._replace(name=node.name)

    async def _subscribe(self, request: tuple[str, tuple[str, ...]]) -> tuple[Notice, ...]:
        """Watch nodes; what their holder may have missed is answered at once."""
        client_id, names = request
        missed: list[Notice] = []
        for name in names:
            if name.startswith("claim_"):
                missed.extend(missed_notice(self._decider.state, name))
                continue
            if name.startswith("approval_"):
                answered = approval_notice(self._decider.state, name)
                missed.extend([] if answered is None else [answered])
                continue
            _, node = await self._find(name)
            if node.is_ended:
                missed.append(self._dispatch.notice(node, self._stored_payload(node)))
                continue
            self._clients.watch(client_id, name)
            if node.is_turn and node.started_at is not None:
                missed.append(TurnStartedNotice(name))
            if node.is_turn and node.cause is not None:
                missed.append(TurnCancelledNotice(name, node.cause))
        await self._all_durable()
        return tuple(missed)

    def _stored_payload(self, node: Node) -> bytes | None:
        reader = self._journal.reader()
        try:
            return reader.payload(node.id, "turn_ended" if node.is_turn else "run_ended")
        finally:
            reader.close()

    async def _find(self, node_id: str) -> tuple[WorkspaceState, Node]:
        """Return a node with the state that it is in: what has left memory is read from the journal.

        Raises:
            NotFound: nobody knows it, or retention has taken it away.
        """
        state = self._decider.state
        node = state.nodes.get(node_id)
        if node is not None:
            return state, node
        past = await asyncio.to_thread(self._read_past, node_id)
        if past is None:
            raise NotFound(f"no turn or run {node_id!r} in this workspace")
        return past

    def _read_past(self, node_id: str) -> tuple[WorkspaceState, Node] | None:
        reader = self._journal.reader()
        try:
            return past_node(reader, node_id)
        finally:
            reader.close()

    async def _tree(self, node_id: str) -> TreeView:
        state, node = await self._find(node_id)
        return tree_view(state, node, self._clock.now())

    async def _node(self, node_id: str) -> NodeView:
        state, node = await self._find(node_id)
        return node_view(state, node)

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
            self._lose_client(client_id, reason)
        for client_id in self._clients.overdue(now):
            self._lose_client(client_id, "it did not come back after the coordinator was restarted")
        self._decide(self._decider.tick)
        self._dispatch.forget(self._decider.prune(self._told_until(now)))
        self._dispatch.tidy()
        if self._broken is None:
            self._snapshots.consider()
        state = self._decider.state
        if self._clients.people or state.live_turns or state.live_runs:
            self._busy_at = now
            self._engine.vouch()
            if self._on_busy is not None:
                self._on_busy()
        idle_exit_s = self._options.idle_exit_s
        if idle_exit_s is not None and now - self._busy_at > idle_exit_s:
            self.close_soon("idle", 0.0)
            return
        self._housekeeper = self._scheduler.call_at(now + self._options.housekeeping_s, self._keep_house)

    def _lose_client(self, client_id: str, reason: str) -> None:
        self._decide(lambda now: self._decider.client_gone(client_id, reason, now))

    def _told_until(self, now: float) -> float:
        """Return the time before which all ends are on the disk and their holders have been told."""
        pending = next((commit.decision.events for commit in self._commits if commit.decision.events), None)
        return now if pending is None else min(now, pending[0][0].at)

    async def _shutdown(self, request: tuple[str, float]) -> bool:
        reason, timeout_s = request
        return await self.close(reason, timeout_s)

    async def close(self, reason: str, timeout_s: float = 10.0) -> bool:
        """Close in order, once: see `Closing`. What comes later is refused with `CoordinatorClosing`.

        Args:
            reason: free text for people.
            timeout_s: seconds to wait for everything to end.

        Returns:
            Whether everything had ended within the bound.

        Durability:
            The journal is written until everything has ended, and closed when this returns.
        """
        if self._broken is not None:
            return True
        return await self.closing.close(reason, timeout_s)

    def close_soon(self, reason: str, timeout_s: float = 10.0) -> None:
        """Begin to close and return at once; from any thread, and from a signal handler."""

        def begin() -> None:
            task = self._loop.create_task(self.close(reason, timeout_s))
            self._closers.add(task)
            task.add_done_callback(self._closers.discard)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            logger.debug("asked to close after the loop was closed")

    def _closing_steps(self) -> Steps:
        async def stop(reason: str) -> None:
            await self._commit(self._decider.shutdown(reason, self._clock.now()))

        def is_idle() -> bool:
            state = self._decider.state
            return self._broken is not None or not (state.live_turns or state.live_runs)

        async def end_hosts() -> None:
            self._closed.set()
            for timer in (self._timer, self._housekeeper):
                if timer is not None:
                    timer.cancel()
            await self._dispatch.kill_all("the coordinator is closing")
            # Nothing is decided from here on, so the snapshot under way is the last one.
            await self._snapshots.finish(_JOURNAL_S)

        def close_programs() -> None:
            self._engine.release_programs()

        def close_spool() -> None:
            if self._spool is not None:
                self._spool.close()

        def close_telemetry() -> None:
            if self._recorder is not None:
                self._recorder.close(_JOURNAL_S)

        def leave() -> None:
            # The answer to whoever asked must leave before this process does.
            self._loop.call_later(0.2, self._engine.exit)

        return Steps(
            stop=stop,
            is_idle=is_idle,
            end_hosts=end_hosts,
            release=self._clients.release_all,
            resources=(
                ("programs", close_programs),
                ("spool", close_spool),
                ("journal", lambda: self._journal.close(_JOURNAL_S)),
                ("telemetry", close_telemetry),
            ),
            leave=leave,
        )


def _named(nodes: Sequence[ClusterNode], text: str) -> ClusterNode:
    """Return the one node that a text names.

    Raises:
        NotFound: there is none, or there are several.
    """
    found = [node for node in nodes if node.is_called(text)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{node.id[:12]} ({node.name})" for node in found or nodes)
    problem = "means several nodes" if found else "is no node of this cluster"
    raise NotFound(f"{text!r} {problem}; give the id of one of them: {there}")


def _ignore(future: asyncio.Future[Any]) -> None:
    """Take note of a failed commit: `_break` has already dealt with it."""
    if not future.cancelled():
        future.exception()
