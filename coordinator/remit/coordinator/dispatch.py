"""Carrying out effects: what goes to which host and which client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from remit.coordinator.briefs import Briefs, BriefSpool
from remit.coordinator.engine import Engine, HostLink, Swept
from remit.coordinator.mailbox import Mailboxes
from remit.coordinator.recovering import Survey
from remit.coordinator.state import Node, ProcessState, WorkspaceState
from remit.coordinator.survey import ProgramWitness, take_survey
from remit.coordinator.transaction import Effects
from remit.core.errors import RemitError
from remit.core.messages import (
    DelegateRequest,
    EndedNotice,
    FlushOrder,
    Notice,
    Order,
    OrderBatch,
    ReportBatch,
    ResumeOrder,
    RunRequest,
    StartBatch,
    StartItem,
    TurnCancelledNotice,
    TurnStartedNotice,
    WaitRefused,
    dumps,
)

__all__ = ["Dispatcher", "HostEvents"]

logger = logging.getLogger("remit.coordinator")

_COME_UP_S = 120.0
"""Seconds that a host of an earlier life has to come up, as long as one that is started now."""
_AGAIN_S = 1.0
"""Seconds until what could not be ended is ended again; twice as long each time."""
_AGAIN_MOST_S = 300.0
_FLUSH_S = 1.0
"""Seconds that hosts have to hand on spans before they are ended."""


class HostEvents(Protocol):
    """Who is told of what happens to hosts."""

    def host_ready(self, host_id: str, pid: int, machine: str, node: str) -> None:
        """A host answers."""
        ...

    def host_gone(self, host_id: str, reason: str) -> None:
        """A host is not there any more."""
        ...

    def process_swept(self, run_id: str, pid: int, swept: Swept, /) -> None:
        """A process that a dead host had left is gone, or could not be ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Brief:
    """What a host needs to begin a run; kept until the run has ended."""

    run: RunRequest
    delegation: DelegateRequest


class Dispatcher:
    """Sends starts, orders and notices. Belongs to the coordinator's event loop."""

    def __init__(
        self,
        state: WorkspaceState,
        engine: Engine,
        clients: Mailboxes,
        events: HostEvents,
        *,
        epoch: int = 0,
        spool: BriefSpool | None = None,
        carrier: Callable[[str, str], str] | None = None,
    ) -> None:
        self._carrier = carrier
        self._state = state
        self._engine = engine
        self._clients = clients
        self._events = events
        self._links: dict[str, HostLink] = {}
        self._briefs: dict[str, _Brief] = {}
        self._report_seq: dict[str, int] = {}
        self._spawning: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._abandoned = False
        self._epoch = epoch
        self._spool = spool
        self._early_deaths: list[tuple[str, str]] | None = []
        """Hosts that died before this life has decided anything; None from then on."""
        self._coming: frozenset[str] = frozenset()
        """Hosts that an earlier life had asked for and that had not come up."""
        self.messages = {"starts": 0, "orders": 0, "reports": 0}
        """Messages to and from hosts since this life began, by what they carry."""

    def remember(self, delegation: DelegateRequest, runs: Iterable[RunRequest]) -> None:
        """Keep what hosts will need of these runs."""
        for run in runs:
            self._briefs[run.run_id] = _Brief(run, delegation)

    def keep(self, delegation: DelegateRequest, runs: Iterable[RunRequest]) -> None:
        """Keep it for later lives too: these runs are accepted as soon as the disk has them."""
        if self._spool is not None:
            self._spool.keep(delegation, runs)

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drop what was kept of runs that will not start."""
        for run_id in run_ids:
            self._briefs.pop(run_id, None)
            if self._spool is not None:
                self._spool.drop(run_id)

    def tidy(self) -> None:
        """Remove what was kept of runs that have ended, where that is put off."""
        if self._spool is not None:
            self._spool.tidy()

    # -- the lives before ----------------------------------------------------------

    async def look_around(
        self, kept: Iterable[Briefs], *, bound_s: float, witness: ProgramWitness | None = None
    ) -> Survey:
        """Take over what the lives before have left, and return what is really there.

        Args:
            kept: what it takes to begin runs that have not ended.
            bound_s: seconds that a host has to answer.
            witness: who knows of programs.
        """
        for briefs in kept:
            self.remember(briefs.delegation, briefs.delegation.runs)
        survey, self._links = await take_survey(
            self._state,
            self._engine,
            epoch=self._epoch,
            bound_s=bound_s,
            startable=self._briefs.keys(),
            on_gone=self._teller,
            witness=witness,
        )
        self._coming = survey.coming
        return survey

    def begin(self) -> None:
        """Tell of the hosts that died while this life was begun, and of every later one at once."""
        early, self._early_deaths = self._early_deaths or [], None
        for host_id, reason in early:
            self._gone(host_id, reason)
        for host_id in self._coming & self._links.keys():
            self._in_background(self._welcome(host_id, self._links[host_id]))
        self._in_background(self._end_strays())

    async def _end_strays(self) -> None:
        """End the programs of what is over: the lives before may have died before they had that done."""
        failed = 0
        while not self._abandoned:
            try:
                owners = await self._engine.program_owners()
            except RemitError as error:
                logger.warning("nobody says of whom programs run here: %s", error)
                await asyncio.sleep(_again_s(failed))
                failed += 1
                continue
            # Looked at after the programs: whoever has one was accepted before it was started.
            for owner in owners:
                node = self._state.nodes.get(owner)
                if node is None or node.is_ended:
                    self._end_programs("", owner)
            return

    def _teller(self, host_id: str) -> Callable[[str], None]:
        """Return what an engine calls, from any thread, when a host dies."""

        def gone(reason: str) -> None:
            try:
                self._loop.call_soon_threadsafe(self._gone, host_id, reason)
            except RuntimeError:
                logger.debug("host %s died after the loop was closed: %s", host_id, reason)

        return gone

    def is_new(self, batch: ReportBatch) -> bool:
        """Tell whether this report batch was not taken before (hosts send again if unsure)."""
        if batch.seq <= self._report_seq.get(batch.host_id, 0):
            return False
        self._report_seq[batch.host_id] = batch.seq
        self.messages["reports"] += 1
        return True

    def abandon(self) -> None:
        """Stop acting: this coordinator's state is not the truth any more."""
        self._abandoned = True

    def apply(self, effects: Effects, payloads: Mapping[str, bytes]) -> None:
        """Carry out what a decision asked for. Cancels go before starts."""
        if self._abandoned:
            return
        self._send_orders(effects)
        for host_id, run_ids in effects.starts.items():
            self._start(host_id, run_ids)
        for host_id in effects.spawn:
            self._in_background(self._spawn(host_id))
        for run_id, process in effects.sweep:
            self._sweep(run_id, process)
        for machine, node_id in effects.orphans:
            self._end_programs(machine, node_id)
        for host_id, reason in effects.kill:
            self._kill(host_id, reason)
        self._notify(effects, payloads)

    def _send_orders(self, effects: Effects) -> None:
        orders: dict[str, list[Order]] = {}
        for host_id, cancels in effects.cancels.items():
            orders.setdefault(host_id, []).extend(cancels)
        for host_id, refusals in effects.wait_refusals.items():
            orders.setdefault(host_id, []).extend(WaitRefused(*refusal) for refusal in refusals)
        for host_id, run_ids in effects.resumes.items():
            orders.setdefault(host_id, []).extend(ResumeOrder(run_id) for run_id in run_ids)
        for host_id, batch in orders.items():
            link = self._links.get(host_id)
            if link is not None:
                self.messages["orders"] += 1
                link.control(dumps(OrderBatch(self._epoch, tuple(batch))))

    def _start(self, host_id: str, run_ids: list[str]) -> None:
        link = self._links.get(host_id)
        if link is None:
            return
        agents: dict[str, bytes] = {}
        items: list[StartItem] = []
        env_key, env = "", b""
        for run_id in run_ids:
            node = self._state.nodes.get(run_id)
            brief = self._briefs.get(run_id)
            if node is None or brief is None or node.is_ended:
                continue
            key = brief.run.agent_key
            agents[key] = brief.delegation.agents[key]
            env_key, env = brief.delegation.env_key, brief.delegation.env
            items.append(self._item(node, brief))
        if items:
            self.messages["starts"] += 1
            link.start(dumps(StartBatch(env_key, env, agents, tuple(items), self._epoch)))

    def _item(self, node: Node, brief: _Brief) -> StartItem:
        run = brief.run
        path = tuple(ancestor.id for ancestor in reversed(self._state.ancestors(node)))
        nodes = self._state.nodes
        return StartItem(
            run_id=node.id,
            attempt=node.attempt,
            turn_id=node.turn_id,
            session_id=node.session_id,
            path=path,
            agent_key=run.agent_key,
            agent_name=run.agent_name,
            name=node.name,
            depth=node.depth,
            arguments=run.arguments,
            after=node.after,
            after_names=tuple(nodes[name].name if name in nodes else "" for name in node.after),
            deadline_at=node.deadline_at,
            trace=self._trace(node),
            lineage=node.lineage,
            # Cancelled between the decision and the disk: the host reports it, unbegun.
            cause=node.cause,
            claims=run.claims,
            wishes=run.wishes,
        )

    def _trace(self, node: Node) -> str:
        """Return the trace context of a run's turn; the empty text where nothing is traced."""
        if self._carrier is None:
            return ""
        turn = self._state.nodes.get(node.turn_id)
        return self._carrier(node.turn_id, turn.trace if turn is not None else "")

    async def _spawn(self, host_id: str) -> None:
        if self._abandoned:
            return
        host = self._state.hosts.get(host_id)
        resources: dict[str, Any] = {}
        if host is not None and host.resources_key:
            resources = json.loads(host.resources_key)

        try:
            link = await self._engine.spawn(host_id, resources, self._teller(host_id), avoid=tuple(self._state.drained))
        except Exception as error:  # a host that cannot be started is gone, whatever the engine says
            logger.warning("host %s did not start: %s", host_id, error)
            self._gone(host_id, str(error))
            return
        self._links[host_id] = link
        if host_id not in self._state.hosts or self._abandoned:
            await self._engine.kill(host_id)
            return
        self._events.host_ready(host_id, link.pid, link.machine, link.node)

    async def _welcome(self, host_id: str, link: HostLink) -> None:
        """Take in a host that an earlier life has asked for, once it answers."""
        try:
            found = await asyncio.wait_for(link.inventory(self._epoch), _COME_UP_S)
        except Exception as error:  # any way a host can fail to come up; whoever watches it tells of its death
            logger.warning("host %s, which an earlier life asked for, did not come up: %r", host_id, error)
            await self._engine.kill(host_id)
            return
        if host_id not in self._state.hosts or self._abandoned:
            await self._engine.kill(host_id)
            return
        self._events.host_ready(host_id, found.pid, found.machine, found.node)

    def _gone(self, host_id: str, reason: str) -> None:
        if self._early_deaths is not None:
            self._early_deaths.append((host_id, reason))
            return
        self._links.pop(host_id, None)
        self._report_seq.pop(host_id, None)
        if not self._abandoned:
            self._events.host_gone(host_id, reason)

    def _sweep(self, run_id: str, process: ProcessState) -> None:
        def done(swept: Swept) -> None:
            try:
                self._loop.call_soon_threadsafe(self._swept, run_id, process.pid, swept)
            except RuntimeError:
                logger.debug("a process of %s was ended after the loop was closed", run_id)

        claimed = self._state.locks.kept_for(run_id)
        self._engine.sweep(run_id, process.pid, process.start_time, process.machine, done, claimed)

    def _end_programs(self, machine: str, owner: str, failed: int = 0) -> None:
        """End whatever there is of a run or turn; tried again until it is proven gone, since nobody waits for it."""
        if self._abandoned:
            return

        def again() -> None:
            self._loop.call_later(_again_s(failed), self._end_programs, machine, owner, failed + 1)

        def done(swept: Swept) -> None:
            try:
                if not swept.gone:
                    self._loop.call_soon_threadsafe(again)
            except RuntimeError:
                logger.debug("programs of %s were left after the loop was closed", owner)

        self._engine.sweep(owner, 0, 0.0, machine, done)

    def _swept(self, run_id: str, pid: int, swept: Swept) -> None:
        if not self._abandoned:
            self._events.process_swept(run_id, pid, swept)

    def _kill(self, host_id: str, reason: str) -> None:
        logger.info("host %s is ended: %s", host_id, reason)
        self._in_background(self._engine.kill(host_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._spawning.add(task)
        task.add_done_callback(self._spawning.discard)

    async def kill_all(self, reason: str) -> None:
        """End every host; bounded by the engine, and before that by what spans of agents may take."""
        self._abandoned = True
        if self._carrier is not None and self._links:
            orders = dumps(OrderBatch(self._epoch, (FlushOrder(_FLUSH_S),)))
            flushing = [asyncio.ensure_future(link.flush(orders)) for link in self._links.values()]
            await asyncio.wait(flushing, timeout=_FLUSH_S)
            for task in flushing:
                task.cancel()
        logger.info("all hosts are ended: %s", reason)
        await asyncio.gather(*(self._engine.kill(host_id) for host_id in list(self._state.hosts)))

    def _notify(self, effects: Effects, payloads: Mapping[str, bytes]) -> None:
        for owner_id, claimed in effects.claims:
            self._tell_owner(owner_id, claimed)
        for turn_id in effects.turn_started:
            turn = self._state.nodes[turn_id]
            self._clients.post(turn.client_id, TurnStartedNotice(turn_id))
        for turn_id in effects.turn_cancelled:
            turn = self._state.nodes[turn_id]
            if turn.cause is not None:
                self._clients.post(turn.client_id, TurnCancelledNotice(turn_id, turn.cause))
        # After the cancels: whoever waits for an approval sees a cancellation first, and no answer.
        for owner_id, answered in effects.approvals:
            self._tell_owner(owner_id, answered)
        for node_id in effects.ended:
            node = self._state.nodes.get(node_id)
            if node is None:
                continue
            self.forget((node_id,))
            self._clients.post_end(node.client_id, self.notice(node, payloads.get(node_id)))

    def _tell_owner(self, owner_id: str, notice: Notice) -> None:
        owner = self._state.nodes.get(owner_id)
        if owner is not None:
            client_id = owner.client_id if owner.is_turn else self._clients.of_host(owner.host_id)
            self._clients.post(client_id, notice)

    def notice(self, node: Node, payload: bytes | None) -> EndedNotice:
        """Return the notice of an ended node."""
        assert node.outcome is not None
        owner = self._state.nodes.get(node.parent_id)
        return EndedNotice(
            node.id,
            node.outcome,
            cause=node.cause,
            error_type=node.error_type,
            error=node.error,
            error_code=node.error_code,
            traceback=node.traceback,
            payload=payload,
            unconfirmed=node.unconfirmed,
            attempt=node.attempt,
            parent_id=node.parent_id,
            above=owner.cause if owner is not None else None,
        )


def _again_s(failed: int) -> float:
    """Return the seconds after which something is tried again that has failed so often before."""
    return min(_AGAIN_S * 2.0 ** min(failed, 16), _AGAIN_MOST_S)
