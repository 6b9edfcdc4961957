"""A simulation: all parts put together, what breaks them, and how it goes from beginning to end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from remit.coordinator.approving import answer_approval
from remit.coordinator.decider import Decision
from remit.coordinator.transaction import Settings, Transaction
from remit.core.errors import JournalError
from remit.core.ids import IdFactory
from remit.core.messages import AnswerApproval, CancelRequest
from remit.testing.simulation.client import ClientModel
from remit.testing.simulation.disk import Disk
from remit.testing.simulation.engine import NODES, EngineModel
from remit.testing.simulation.history import describe
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.judge import Judge
from remit.testing.simulation.keepers import Keepers
from remit.testing.simulation.kernel import START_S, Dice, Kernel, Network
from remit.testing.simulation.plan import STORM_S, AnswerPlan, CancelPlan, FaultPlan, Plan, TurnPlan, all_runs
from remit.testing.simulation.runs import RunBody
from remit.testing.simulation.session import COORDINATOR, Reply, Session
from remit.testing.simulation.shell import CoordinatorModel
from remit.testing.simulation.violation import Violation, require

__all__ = ["Simulation", "Summary"]

_T = TypeVar("_T")

RESTART_S = 0.3
PATIENCE_S = 240.0
"""How long all may take to end by itself once it is calm: longest chain of work, graces and leases."""
LAST_PATIENCE_S = 90.0
"""How long it may take once everything has been cancelled."""

SWEEP_S = 2.0
"""How long the end of programs may take that nobody looks after."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a simulation that held."""

    seed: int
    events: int
    """Durable events of the journal."""
    runs: int
    cancels: int
    lives: int
    """Lives of the coordinator."""
    seconds: float
    """Simulated."""


@dataclass(frozen=True, slots=True)
class _Doom:
    """A crash of the coordinator that waits for its next orders."""

    seconds: float
    """Of absence."""
    cancels_alone: bool = False
    """Only orders to stop count, and ends of programs, and not orders to begin."""
    orders_leave: bool = False
    """It crashes when the orders are under way, and not before."""

    def is_met_by(self, decision: Decision) -> bool:
        effects = decision.effects
        stops = effects.cancels or effects.orphans or effects.sweep
        return bool(decision.events and (stops or (effects.starts and not self.cancels_alone)))


class Simulation:
    """One history of a plan.

    Args:
        plan: who does what, and what breaks.
        note: called with (time, line) for everything that a reader would want to see; None for nothing.
    """

    def __init__(self, plan: Plan, note: Callable[[float, str], None] | None = None) -> None:
        self.plan = plan
        self._note = note
        self.kernel = Kernel()
        self.dice = Dice(plan.seed)
        self._calm_at = START_S + STORM_S
        self.network = Network(self.kernel, self.dice, plan.weather, self._calm_at)
        self.disk = Disk(self.kernel, self.dice)
        self.keepers = Keepers(self.kernel, self.dice, self._calm_at)
        self.silence = plan.silence
        self.spool: set[str] = set()
        """Runs whose agent and arguments outlive the coordinator."""
        self._doom: _Doom | None = None
        """What the next orders of the coordinator mean for it."""
        self.clients: list[ClientModel] = []
        self.life: CoordinatorModel | None = None
        self._settings = Settings(
            max_shared=plan.max_shared,
            max_dedicated=plan.max_dedicated,
            grow_at=plan.grow_at,
            idle_host_s=5.0,
            keep_ended_turns=plan.keep_turns,
        )
        bits = random.Random(plan.seed).getrandbits
        self._ids = IdFactory(lambda: int(self.kernel.now * 1000), bits)
        self._runs = {run.name: run for run in all_runs(plan)}
        self._engine = EngineModel(
            self.kernel,
            self.dice,
            self.keepers,
            self._make_host,
            spawn_failure=plan.spawn_failure,
            calm_at=self._calm_at,
        )
        self.hosts = self._engine.hosts
        self.judge = Judge(self, self._settings, plan.weather)

    # -- the whole -----------------------------------------------------------------

    def run(self) -> Summary:
        """Go from beginning to end; once only.

        Raises:
            Violation: something does not hold, or the decider raised what it must not.
        """
        try:
            return self._run()
        except Violation:
            raise
        except Exception as error:  # whatever comes out of the decider is what is looked for
            raise Violation("no decision fails", f"{type(error).__name__}: {error}") from error

    def _run(self) -> Summary:
        self._set_up()
        self.kernel.run(self._calm_at)
        self._calm_down()
        # What never ends by itself is waited for no longer than a cancel may take.
        patience_s = PATIENCE_S if self.plan.is_finite else LAST_PATIENCE_S
        self.kernel.run(self._calm_at + patience_s, self._is_quiet)
        self.judge.calm_for_long(is_finite=self.plan.is_finite)
        self._cancel_all()
        self.kernel.run(self.kernel.now + LAST_PATIENCE_S, self._is_quiet)
        self.kernel.run(self.kernel.now + SWEEP_S)
        self.judge.programs_over()
        self._clear_claims()
        self.kernel.run(self.kernel.now + 5.0)
        durable = self.disk.events()
        self.judge.all_over(durable)
        history = self.judge.history
        return Summary(
            seed=self.plan.seed,
            events=len(durable),
            runs=sum(name.startswith("run_") for name in history.parents),
            cancels=len(history.requests),
            lives=self.disk.epoch,
            seconds=self.kernel.now - START_S,
        )

    def _set_up(self) -> None:
        for index in range(self.plan.clients):
            session = self._session(f"client {index}", f"client_{index}")
            self.clients.append(ClientModel(self.kernel, session, self.keepers))
        self._begin_life()
        for turn in self.plan.turns:
            self.kernel.at(START_S + turn.at, partial(self._open_turn, turn))
        for number, cancel in enumerate(self.plan.cancels):
            self.kernel.at(START_S + cancel.at, partial(self._cancel, number, cancel))
        for number, answer in enumerate(self.plan.answers):
            self.kernel.at(START_S + answer.at, partial(self._answer, number, answer))
        for fault in self.plan.faults:
            self.kernel.at(START_S + fault.at, partial(self._break, fault))

    def _session(self, endpoint: str, client_id: str, host_id: str = "") -> Session:
        return Session(self.kernel, self.network, self, endpoint=endpoint, client_id=client_id, host_id=host_id)

    def _make_host(self, host_id: str, node: str) -> HostModel:
        session = self._session(host_id, f"client_of_{host_id}", host_id)
        return HostModel(host_id, self.kernel, session, self.keepers, self._runs, node, self._begun)

    def _begun(self, host: HostModel, body: RunBody) -> None:
        if self.life is not None:
            self.judge.begun(self.life, host, body)

    def _calm_down(self) -> None:
        self.note("calm: no more faults")
        self.disk.heal()
        self.silence = 0.0
        self._doom = None
        if self.life is None:
            self._begin_life()
        self._undo_drains()
        self._answer_all()

    def _undo_drains(self) -> None:
        life = self.life
        if life is None or not life.is_serving:
            self.kernel.after(1.0, self._undo_drains)
            return
        for node in list(life.state.drained):
            life.commit(life.decider.drain(node, "", self.kernel.now, undo=True))

    def _answer_all(self) -> None:
        """Play the person who answers everything in the end."""
        life = self.life
        if life is not None and life.is_serving and not life.is_over:
            for name in [name for name, record in life.state.approvals.items() if record.is_open]:
                request = AnswerApproval(f"req_late_{name}", name, approve=True)
                life.commit(life.decider.decide(partial(_approve, request), self.kernel.now))
        self.kernel.after(5.0, self._answer_all)

    def _is_quiet(self) -> bool:
        life = self.life
        return (
            life is not None
            and not life.is_over
            and life.is_serving
            and not life.state.live_turns
            and not life.state.live_runs
            and not life.state.open_cancels
            and self.kernel.now > self._calm_at
            and not life.is_writing
            and all(client.session.is_idle for client in self.clients)
        )

    def _cancel_all(self) -> None:
        life = self.life
        assert life is not None
        roots = [n.id for n in life.state.nodes.values() if not n.is_ended and (n.is_turn or n.detached)]
        for number, name in enumerate(roots):
            self.note(f"what is left is cancelled: {name}")
            life.commit(life.decider.cancel(CancelRequest(f"req_last_{number}", name), self.kernel.now))

    def _clear_claims(self) -> None:
        """Play the person who vouches for what could not be proven gone."""
        life = self.life
        assert life is not None
        for process in list(self.keepers.alive):
            self.keepers.end(process)
        for owner in life.state.locks.owners():
            node = life.state.nodes.get(owner)
            if node is not None and node.is_ended:
                life.commit(life.decider.clear_claims(owner, self.kernel.now))
        require(life.state.locks.is_idle, "no claim is held by what is over", "claims are left after all was cleared")

    # -- clients -------------------------------------------------------------------

    def _open_turn(self, plan: TurnPlan) -> None:
        self.note(f"client {plan.client} opens turn_{plan.name} in {plan.session!r}")
        self.clients[plan.client].open_turn(plan)

    def _cancel(self, number: int, plan: CancelPlan) -> None:
        if self.life is None:
            return
        live = [n for n in self.life.state.nodes.values() if not n.is_ended]
        if not live:
            return
        stopping = [n for n in live if n.cause is not None]
        target = _pick(stopping if plan.again and stopping else live, plan.pick).id
        self.note(f"client {plan.client} cancels {target} ({plan.kind}{', kill' if plan.kill else ''})")
        request = CancelRequest(f"req_{number}", target, plan.kind, kill=plan.kill, grace_s=plan.grace_s)
        self.clients[plan.client].cancel(request)

    def _answer(self, number: int, plan: AnswerPlan) -> None:
        records = [] if self.life is None else list(self.life.state.approvals.values())
        wanted = [r for r in records if r.is_open is not plan.late] or records
        if not wanted:
            return
        target = _pick(wanted, plan.pick).id
        self.note(f"client {plan.client} {'approves' if plan.approve else 'denies'} {target}")
        self.clients[plan.client].answer(AnswerApproval(f"req_answer_{number}", target, plan.approve, by="somebody"))

    # -- faults --------------------------------------------------------------------

    def _break(self, fault: FaultPlan) -> None:
        self.note(f"fault: {fault.kind} {fault.seconds:g} s")
        match fault.kind:
            case "coordinator" if fault.pick < 0.6:
                # At the worst moment: when the disk may have what no host has heard of.
                self._doom = _Doom(fault.seconds, cancels_alone=fault.pick < 0.3)
            case "coordinator":
                self._crash(fault.seconds)
            case "late":
                self._doom = _Doom(fault.seconds, cancels_alone=fault.pick < 0.3, orders_leave=True)
            case "disk":
                self.disk.fail(fault.seconds)
            case "close":
                self._close()
            case "host" | "zombie":
                self._break_host(fault)
            case "client":
                _pick(self.clients, fault.pick).vanish()
            case "partition":
                self.network.cut(_pick([f"client {i}" for i in range(self.plan.clients)], fault.pick), fault.seconds)
            case "drain":
                self._drain(fault)
            case _:
                raise ValueError(f"no fault of the kind {fault.kind!r}")

    def _break_host(self, fault: FaultPlan) -> None:
        alive = self._engine.alive()
        if not alive:
            return
        host = _pick(alive, fault.pick)
        self.note(f"{host.id} {'crashes' if fault.kind == 'host' else 'is taken for dead'}")
        if fault.kind == "host":
            self._engine.crash(host)
        else:
            self._engine.disown(host, fault.seconds)

    def _drain(self, fault: FaultPlan) -> None:
        life = self.life
        if life is None or not life.is_serving:
            return
        node = _pick(NODES, fault.pick)
        others = sum(other not in life.state.drained for other in NODES if other != node)
        life.commit(life.decider.drain(node, "planned", self.kernel.now, others=others))

        def undo() -> None:
            now = self.life
            if now is not None and now.is_serving:
                now.commit(now.decider.drain(node, "", self.kernel.now, undo=True))

        self.kernel.after(fault.seconds, undo)

    def _crash(self, seconds: float) -> None:
        """End the coordinator at once; its hosts end with it unless they survive."""
        life = self.life
        if life is None:
            return
        life.end()
        self.disk.crash()
        self._bury(seconds)

    def _bury(self, seconds: float) -> None:
        self.life = self._engine.life = None
        if not self.plan.hosts_survive:
            self._engine.end_all()
        lost = self.plan.spool_loss
        epoch = self.disk.epoch
        self.spool = {name for name in self.spool if not self.dice.chance(lost, "spool", name, epoch)}
        self.kernel.after(RESTART_S + seconds, self._begin_life)

    def _close(self) -> None:
        """Close the coordinator properly: refuse, cancel, wait, bounded; then start another one."""
        life = self.life
        if life is None or not life.is_serving:
            return
        life.commit(life.decider.shutdown("closing", self.kernel.now))

        def closed() -> None:
            if life.is_over:
                return
            life.end()
            self.disk.close()
            self._engine.end_all()
            self._bury(0.0)

        self.kernel.after(5.0, closed)

    def _begin_life(self) -> None:
        if self.life is not None:
            return
        try:
            self.disk.open()
        except JournalError:
            self.kernel.after(1.0, self._begin_life)
            return
        self.note(f"the coordinator begins its life number {self.disk.epoch}")
        self.judge.new_life(self.disk.events())
        self.life = self._engine.life = CoordinatorModel(self, self._settings, self._ids, self._engine)
        self.life.start()

    # -- for the coordinator -------------------------------------------------------

    def call(self, method: str, message: Any, reply: Reply) -> None:
        """Pass a request on to the life that serves; without one nobody answers."""
        if self.life is not None:
            self.life.call(method, message, reply)

    def journal_failed(self, life: CoordinatorModel, error: BaseException) -> None:
        """End a life whose state is ahead of the truth."""
        if not isinstance(error, JournalError) or error.code != JournalError.code:
            raise Violation("one end", f"the journal refused a batch: {error}")
        self.note("the journal failed; the coordinator ends its life")
        life.end()
        self._bury(0.0)

    # -- for the judge and the reader ----------------------------------------------

    def decided(self, decision: Decision) -> None:
        """Look at a decision, before it is durable."""
        if self._note is not None:
            for event, _ in decision.events:
                self.note(f"  {event.kind} {event.node_id} {describe(event)}".rstrip())
        assert self.life is not None
        self.judge.decided(self.life, decision)
        if self._doom is not None and not self._doom.orders_leave and self._doom.is_met_by(decision):
            self._fulfil(self._doom)

    def durable(self, decision: Decision) -> None:
        """Look at a decision that has reached the disk."""
        assert self.life is not None
        self.judge.durable(self.life, decision)
        doom = self._doom
        if doom is not None and doom.orders_leave and doom.is_met_by(decision):
            # What leaves now arrives when the next life asks what is there, or serves already.
            back_s = RESTART_S + doom.seconds
            self.network.hold_up(COORDINATOR, back_s - 0.1, back_s + 1.0)
            self._fulfil(doom)

    def _fulfil(self, doom: _Doom) -> None:
        self._doom = None
        self.kernel.after(0.0, lambda: self._crash(doom.seconds))

    def note(self, line: str) -> None:
        """Write a line of the history."""
        if self._note is not None:
            self._note(self.kernel.now - START_S, line)


def _approve(request: AnswerApproval, tx: Transaction) -> object:
    return answer_approval(tx, request)


def _pick(items: Sequence[_T], share: float) -> _T:
    return items[min(int(share * len(items)), len(items) - 1)]
