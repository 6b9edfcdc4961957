"""One life of the coordinator, as a model of `remit.coordinator.service` around the real decider.

**Order of everything**: decide in memory, hand the events to the journal, and only when they
are durable send what follows from them and answer. A life that has ended does nothing of it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from remit.coordinator.approving import answer_approval, ask_approval, withdraw_approval
from remit.coordinator.claiming import missed_notice
from remit.coordinator.decider import Decider, Decision
from remit.coordinator.desk import approval_notice
from remit.coordinator.evolve import evolve
from remit.coordinator.recovering import Survey
from remit.coordinator.spending import take_total
from remit.coordinator.state import WorkspaceState
from remit.coordinator.transaction import Effects, Settings, Transaction
from remit.core.errors import CoordinatorUnavailable, NotFound
from remit.core.events import RunEnded, TurnEnded, encode_event
from remit.core.ids import IdFactory
from remit.core.messages import (
    DelegateRequest,
    EndedNotice,
    NoteSpend,
    Notice,
    OpenClient,
    OpenTurn,
    PollReply,
    ReportBatch,
    TurnCancelledNotice,
    TurnStartedNotice,
)
from remit.journal import JournalRecord
from remit.testing.simulation.disk import Disk
from remit.testing.simulation.dispatch import DispatchModel, end_of
from remit.testing.simulation.engine import EngineModel
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.keepers import MACHINE
from remit.testing.simulation.kernel import Dice, Event, Kernel, Network
from remit.testing.simulation.mailbox import MailboxModel
from remit.testing.simulation.session import Answer, Reply
from remit.testing.simulation.survey import take_survey

__all__ = ["CoordinatorModel", "Surroundings"]

HOUSEKEEPING_S = 1.0
COME_BACK_S = 10.0
"""Seconds that the holders of turns have to come back after a restart."""


class Surroundings(Protocol):
    """What a life is surrounded by, and who looks on."""

    kernel: Kernel
    network: Network
    disk: Disk
    dice: Dice
    silence: float
    spool: set[str]

    def decided(self, decision: Decision) -> None:
        """Look at a decision, before it is durable."""
        ...

    def durable(self, decision: Decision) -> None:
        """Look at a decision that has reached the disk; its effects leave next."""
        ...

    def journal_failed(self, life: CoordinatorModel, error: BaseException) -> None:
        """End a life whose state is ahead of the truth."""
        ...


@dataclass(slots=True)
class _Commit:
    """A decision that waits for the disk."""

    decision: Decision
    reply: Reply | None


class CoordinatorModel:
    """One life: from the fold of what was durable to its crash or its closing.

    Args:
        around: clock, network and disk, and who looks on.
        settings: the workspace's numbers.
        ids: where ids come from.
        engine: starts and ends hosts.
    """

    def __init__(self, around: Surroundings, settings: Settings, ids: IdFactory, engine: EngineModel) -> None:
        self._around = around
        self._engine = engine
        self._kernel = around.kernel
        state = WorkspaceState()
        for event in around.disk.events():
            evolve(state, event)
        self.state = state
        self.decider = Decider(settings=settings, ids=ids, state=state)
        self.is_over = False
        self.is_serving = False
        """Whether it has begun: it asks what is really there before it decides anything."""
        self._early_deaths: list[tuple[str, str]] = []
        self._clients = MailboxModel(self._kernel)
        epoch, spool = around.disk.epoch, around.spool
        self.dispatch = DispatchModel(state, around.network, self._clients, engine, epoch=epoch, spool=spool)
        self._commits: deque[_Commit] = deque()
        self._report_seq: dict[str, int] = {}
        self._timer: Event | None = None
        self._timer_due: float | None = None
        self._methods: dict[str, Callable[[Any, Reply], None]] = {
            "open_client": self._open_client,
            "poll": self._poll,
            "open_turn": self._open_turn,
            "delegate": self._delegate,
            "report": self._report,
            "subscribe": self._subscribe,
            "finish_turn": lambda m, reply: self.commit(self.decider.finish_turn(m, self._kernel.now), reply),
            "cancel": lambda m, reply: self.commit(self.decider.cancel(m, self._kernel.now), reply),
            "claim": lambda m, reply: self.commit(self.decider.ask_claim(m, self._kernel.now), reply),
            "give_up_claim": lambda m, reply: self.commit(self.decider.give_up_claim(m, self._kernel.now), reply),
            "ask_approval": lambda m, reply: self._decide(lambda tx: ask_approval(tx, m), reply),
            "answer_approval": lambda m, reply: self._decide(lambda tx: answer_approval(tx, m), reply),
            "withdraw_approval": lambda m, reply: self._decide(lambda tx: withdraw_approval(tx, m), reply),
            "note_spend": lambda m, reply: self._decide(lambda tx: _take_total(tx, m), reply),
        }

    @property
    def is_writing(self) -> bool:
        """Tell whether decisions wait for the disk."""
        return bool(self._commits)

    def start(self) -> None:
        """Ask the hosts of earlier lives what they have, then settle what is left, then serve."""
        take_survey(self, self._around, self._engine, self._begin)

    def _begin(self, survey: Survey) -> None:
        if self.is_over:
            return
        now = self._kernel.now
        holders = {turn.client_id for turn in self.state.turns.values() if not turn.is_ended}
        self._clients.expect(holders, now + COME_BACK_S)
        self.is_serving = True
        self.commit(self.decider.start(self._around.disk.epoch, 1, now, survey))
        self._kernel.after(self._around.dice.between(0.01, 0.5, "strays", self.dispatch.epoch), self._end_strays)
        early, self._early_deaths = self._early_deaths, []
        for host_id, reason in early:
            self.host_gone(host_id, reason)
        self._keep_house()

    def _end_strays(self) -> None:
        """End the programs of what is over; see `remit.coordinator.dispatch`."""
        for owner in self._engine.program_owners() if not self.is_over else ():
            node = self.state.nodes.get(owner)
            if node is None or node.is_ended:
                self._engine.end_orphans(owner)

    def end(self) -> None:
        """Do nothing any more, whatever is still on its way."""
        self.is_over = True
        self._commits.clear()

    # -- decisions -----------------------------------------------------------------

    def commit(self, decision: Decision, reply: Reply | None = None) -> None:
        """Journal a decision; what follows from it happens when it is durable."""
        self._around.decided(decision)
        if not decision.events and not self._commits:
            self._apply(decision, reply)
            return
        self._commits.append(_Commit(decision, reply))
        records = [
            JournalRecord(e.kind, e.node_id, e.turn_id, int(e.at * 1000), encode_event(e), e.terminal, payload)
            for e, payload in decision.events
        ]
        self._around.disk.append(records, self._written)
        self._arm()

    def _written(self, error: BaseException | None) -> None:
        if self.is_over:
            return
        commit = self._commits.popleft()
        if error is not None:
            self._around.journal_failed(self, error)
            return
        self._around.durable(commit.decision)
        self._apply(commit.decision, commit.reply)

    def _apply(self, decision: Decision, reply: Reply | None) -> None:
        self.dispatch.act(decision.effects)
        if reply is not None:
            reply(Answer(decision.claim or decision.answer or decision.value, decision.error))
        self._arm()

    def _decide(self, rule: Callable[[Transaction], object], reply: Reply) -> None:
        self.commit(self.decider.decide(rule, self._kernel.now), reply)

    def _arm(self) -> None:
        due = self.decider.next_due()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = None if due is None else self._kernel.at(due, self._tick)

    def _tick(self) -> None:
        self._timer_due = None
        if not self.is_over:
            self.commit(self.decider.tick(self._kernel.now))
            self._arm()

    def _keep_house(self) -> None:
        if self.is_over:
            return
        now = self._kernel.now
        for client_id in self._clients.lapsed():
            self._clients.drop(client_id)
            self.commit(self.decider.client_gone(client_id, "not heard of", now))
        for client_id in self._clients.overdue():
            self.commit(self.decider.client_gone(client_id, "it did not come back", now))
        self.commit(self.decider.tick(now))
        pending = next((commit.decision.events for commit in self._commits if commit.decision.events), None)
        self.dispatch.forget(self.decider.prune(now if pending is None else min(now, pending[0][0].at)))
        self._kernel.after(HOUSEKEEPING_S, self._keep_house)

    # -- hosts ---------------------------------------------------------------------

    def host_ready(self, host: HostModel) -> None:
        """A host that was asked for answers; one that nobody wants any more is ended."""
        if self.is_over:
            return
        self.dispatch.links[host.id] = host
        if host.id not in self.state.hosts:
            self._engine.kill(host.id)
        else:
            self.commit(self.decider.host_ready(host.id, 1, MACHINE, self._kernel.now, host.node))

    def host_gone(self, host_id: str, reason: str) -> None:
        """A host died, was killed, or could not be started."""
        if self.is_over:
            return
        if not self.is_serving:
            self._early_deaths.append((host_id, reason))
            return
        self.dispatch.links.pop(host_id, None)
        self._report_seq.pop(host_id, None)
        self._clients.drop(self._clients.of_host(host_id))
        self.commit(self.decider.host_gone(host_id, reason, self._kernel.now))

    def swept(self, run_id: str, pid: int, *, gone: bool) -> None:
        """A process that a dead host had left is gone, or could not be ended."""
        if not self.is_over:
            self.commit(self.decider.swept(run_id, pid, self._kernel.now, gone=gone))

    # -- requests ------------------------------------------------------------------

    def call(self, method: str, message: Any, reply: Reply) -> None:
        """Carry out one request of a client or host; nobody answers before this life has begun."""
        if self.is_serving and not self.is_over:
            self._methods[method](message, reply)

    def _open_client(self, hello: OpenClient, reply: Reply) -> None:
        self._clients.open(hello)
        reply(Answer(self.dispatch.epoch))

    def _poll(self, request: tuple[str, int, float, int], reply: Reply) -> None:
        client_id, ack, timeout_s, epoch = request
        if epoch != self.dispatch.epoch:
            reply(Answer(PollReply(-1)))
            return
        self._clients.poll(client_id, ack, timeout_s, lambda answer: None if self.is_over else reply(answer))

    def _is_known(self, client_id: str, reply: Reply) -> bool:
        if client_id in self._clients:
            return True
        reply(Answer(error=CoordinatorUnavailable(f"client {client_id!r} is not known")))
        return False

    def _open_turn(self, request: OpenTurn, reply: Reply) -> None:
        if self._is_known(request.client_id, reply):
            self.commit(self.decider.open_turn(request, self._kernel.now), reply)

    def _delegate(self, request: DelegateRequest, reply: Reply) -> None:
        if not self._is_known(request.client_id, reply):
            return
        fresh = [run.run_id for run in request.runs if run.run_id not in self.state.nodes]
        self.dispatch.remember(fresh)
        decision = self.decider.delegate(request, self._kernel.now)
        if decision.error is not None:
            self.dispatch.forget(fresh)
        else:
            self.dispatch.keep(fresh)
        self.commit(decision, reply)

    def _report(self, batch: ReportBatch, reply: Reply) -> None:
        if batch.seq <= self._report_seq.get(batch.host_id, 0):
            self._when_all_durable(lambda: reply(Answer()))
            return
        self._report_seq[batch.host_id] = batch.seq
        self.commit(self.decider.report(batch, self._kernel.now), reply)

    def _subscribe(self, request: tuple[str, tuple[str, ...]], reply: Reply) -> None:
        client_id, names = request
        missed: list[Notice] = []
        for name in names:
            if name.startswith("claim_"):
                missed.extend(missed_notice(self.state, name))
                continue
            if name.startswith("approval_"):
                try:
                    answered = approval_notice(self.state, name)
                except NotFound as error:
                    reply(Answer(error=error))
                    return
                missed.extend([] if answered is None else [answered])
                continue
            node = self.state.nodes.get(name)
            if node is None or node.is_ended:
                end = end_of(node) if node is not None else self._past_end(name)
                if end is None:
                    reply(Answer(error=NotFound(f"no turn or run {name!r}")))
                    return
                missed.append(end)
                continue
            self._clients.watch(client_id, name)
            if node.is_turn and node.started_at is not None:
                missed.append(TurnStartedNotice(name))
            if node.is_turn and node.cause is not None:
                missed.append(TurnCancelledNotice(name, node.cause))
        self._when_all_durable(lambda: reply(Answer(tuple(missed))))

    def _past_end(self, name: str) -> EndedNotice | None:
        """Return the end of something that has left memory, from the journal."""
        for event in self._around.disk.events():
            if event.node_id == name and isinstance(event, RunEnded | TurnEnded):
                return EndedNotice(name, event.outcome, cause=event.cause, unconfirmed=event.unconfirmed)
        return None

    def _when_all_durable(self, act: Callable[[], None]) -> None:
        """Do something when everything decided so far is on the disk."""
        self.commit(Decision([], Effects()), lambda _: act())


def _take_total(tx: Transaction, said: NoteSpend) -> None:
    turn = tx.state.turns.get(said.turn_id)
    if turn is not None:
        take_total(tx, turn, said.tokens, said.cost)
