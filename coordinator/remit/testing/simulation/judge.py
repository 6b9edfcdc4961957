"""Everything that is looked at while a simulation goes on, and when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from remit.coordinator.decider import Decision
from remit.coordinator.transaction import Settings
from remit.core.events import (
    CancelRequested,
    ClaimChanged,
    CoordinatorStarted,
    Event,
    ProcessStarted,
    RunEnded,
    TurnEnded,
)
from remit.core.outcome import Outcome
from remit.locks import Area, ClaimState, Granted, conflict, event_from_dict
from remit.testing.simulation.body import Body, areas_of
from remit.testing.simulation.client import ClientModel
from remit.testing.simulation.fold import Shadow, check_state
from remit.testing.simulation.history import History
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.keepers import Keepers
from remit.testing.simulation.kernel import Kernel, Network, Weather
from remit.testing.simulation.ledger import Ledger
from remit.testing.simulation.runs import RunBody
from remit.testing.simulation.shell import CoordinatorModel
from remit.testing.simulation.violation import require

__all__ = ["Judge", "Scene"]

HEARD_S = 0.1
"""A cancel that is durable has reached every body below it after this time, in fine weather."""

CANCEL_S = 60.0
"""How long an accepted cancel may take to become quiet: lost orders, graces, hosts that are killed."""


class Scene(Protocol):
    """What a judge looks at."""

    kernel: Kernel
    network: Network
    keepers: Keepers
    hosts: dict[str, HostModel]
    clients: list[ClientModel]
    life: CoordinatorModel | None


class Judge:
    """Checks decisions as they are made, and the whole at the end.

    Args:
        scene: the simulation.
        settings: of the workspace.
        weather: says how slow messages are.
    """

    def __init__(self, scene: Scene, settings: Settings, weather: Weather) -> None:
        self._scene = scene
        self._settings = settings
        self._heard_s = HEARD_S + (weather.slow_s if weather.slow else 0.0)
        self._ledger = Ledger()
        self._shadow = Shadow([])
        self._reported: set[int] = set()
        """Processes that are known to the coordinator, on the disk."""

    @property
    def history(self) -> History:
        """The order of events so far."""
        return self._ledger.history

    def new_life(self, durable: list[Event]) -> None:
        """Begin again from what was durable: what was decided and not written never happened."""
        self._ledger = Ledger(durable)
        self._shadow = Shadow(durable)

    # -- after each decision -------------------------------------------------------

    def decided(self, life: CoordinatorModel, decision: Decision) -> None:
        """Look at a decision.

        Raises:
            Violation: something does not hold.
        """
        if not decision.events:
            return
        touched: set[str] = set()
        for event, _ in decision.events:
            self._physical(life, event)
            self._ledger.add(event)
            self._shadow.add(event)
            touched.add(event.node_id)
        self._ledger.decided()
        self._shadow.check(life.state, touched)
        check_state(life.state, self.history, self._settings)

    def _physical(self, life: CoordinatorModel, event: Event) -> None:
        """Compare an event with what is really there."""
        if isinstance(event, RunEnded):
            self._check_body_gone(life, event)
        elif isinstance(event, ClaimChanged):
            change = event_from_dict(event.change)
            if isinstance(change, Granted):
                self._check_alone(life, change)

    def _check_body_gone(self, life: CoordinatorModel, event: RunEnded) -> None:
        if event.unconfirmed:
            return
        for host in self._scene.hosts.values():
            # Of a host that is lost from sight, or about to be ended, nobody can say more.
            if host.id in life.dispatch.links and not host.is_zombie and event.node_id in host.attempts():
                known = life.state.hosts.get(host.id)
                killed = known is None or known.killed
                require(killed, "an end is proven", f"{event.node_id} ended while its body works on {host.id}")

    def _check_alone(self, life: CoordinatorModel, change: Granted) -> None:
        view = life.state.locks.claim(change.claim_id)
        if view is None or view.state is not ClaimState.GRANTED:
            return  # granted and over in the same decision
        entries = life.state.locks.to_dict()["claims"]
        request = next(e["request"] for e in entries if e["request"]["claim_id"] == change.claim_id)
        wanted = [Area.from_dict(area) for area in request["areas"]]
        for owner, areas in self._writers(life):
            if not self._related(owner, change.owner) and _meet(wanted, areas):
                require(False, "claims exclude each other", f"{change.owner} is granted what {owner} still holds")

    def _writers(self, life: CoordinatorModel) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield whoever is at work under a claim, known to this life."""
        for host in self._scene.hosts.values():
            known = life.state.hosts.get(host.id)
            if host.is_zombie or known is None or known.killed:
                continue
            for body in host.bodies.values():
                for areas in body.holds.values():
                    yield body.node_id, areas
        for process in self._scene.keepers.alive.values():
            if process.pid in self._reported:
                yield process.run_id, process.areas

    def _related(self, one: str, two: str) -> bool:
        return one == two or two in self._line(one) or one in self._line(two)

    def _line(self, name: str) -> Iterator[str]:
        while name := self.history.parents.get(name, ""):
            yield name

    # -- as bodies begin -----------------------------------------------------------

    def begun(self, life: CoordinatorModel, host: HostModel, body: RunBody) -> None:
        """Look at a body that begins.

        Raises:
            Violation: its attempt is over, and nobody had to leave that open.
        """
        known = life.state.hosts.get(host.id)
        if host.is_zombie or known is None or known.killed or known.draining:
            return
        end = self.history.ends.get(body.node_id)
        if end is None:
            right = self.history.is_running(body.node_id, body.attempt)
            require(right, "one start", f"attempt {body.attempt} of {body.node_id} begins after it was over")
        else:
            require(end.unconfirmed, "nothing after the end", f"a body of {body.node_id} begins after its end")

    # -- after each commit ---------------------------------------------------------

    def durable(self, life: CoordinatorModel, decision: Decision) -> None:
        """Look at a decision that has reached the disk."""
        for event, _ in decision.events:
            if isinstance(event, ProcessStarted):
                self._reported.add(event.pid)
            elif isinstance(event, CancelRequested):
                self._expect_heard(life, event.node_id)
            elif isinstance(event, CoordinatorStarted):
                # The order may never have left the life before.
                for name in self.history.causes.keys() - self.history.ends.keys():
                    self._expect_heard(life, name)

    def _expect_heard(self, life: CoordinatorModel, target: str) -> None:
        """See to it that every body below a cancel hears of it, if nothing stands in its way."""
        bodies = [
            (host, body)
            for host in self._scene.hosts.values()
            if not host.is_zombie and host.id in life.dispatch.links
            for body in host.bodies.values()
            if target in body.above
        ]

        def check() -> None:
            for host, body in bodies:
                gone = life.is_over or host.is_dead or host.is_zombie
                heard = body.is_over or body.cause is not None
                excused = host.id in self._scene.network.dropped_orders
                require(
                    gone or heard or excused, "cancels are heard", f"{body.node_id} did not hear the cancel of {target}"
                )

        if bodies:
            self._scene.kernel.after(self._heard_s, check)

    # -- when it has been calm -----------------------------------------------------

    def calm_for_long(self, *, is_finite: bool) -> None:
        """Look whether all that should have ended has, long after the last fault.

        Args:
            is_finite: whether every body ends by itself.

        Raises:
            Violation: a cancel is not quiet, or something goes on.
        """
        life = self._scene.life
        assert life is not None
        long_ago = self._scene.kernel.now - CANCEL_S
        for request_id in (name for names in life.state.open_cancels.values() for name in names):
            asked = life.state.cancels[request_id].at
            require(asked > long_ago, "cancels become quiet", f"{request_id} is not quiet after {CANCEL_S:g} s")
        # Somebody may wait for a claim that only a person can free.
        is_blocked = any(view.state is ClaimState.QUARANTINED for view in life.state.locks.claims())
        if is_finite and not is_blocked:
            live = [node for node in life.state.nodes.values() if not node.is_ended]
            named = ", ".join(f"{node.id} is {node.state}" for node in live)
            require(not live, "everything ends", f"long after the last fault: {named}")

    # -- at the end ----------------------------------------------------------------

    def all_over(self, durable: list[Event]) -> None:
        """Look at the whole, once everything should have ended.

        Raises:
            Violation: something is left, or what somebody was told is not so.
        """
        life = self._scene.life
        assert life is not None
        ledger = Ledger(durable)
        history = ledger.history
        left = [name for name in history.parents if name not in history.ends]
        require(not left, "one end", f"no terminal event for {', '.join(left)}")
        open_cancels = [name for name, targets in history.open_cancels.items() if targets]
        require(not open_cancels, "cancels become quiet", f"never quiet: {', '.join(open_cancels)}")
        require(not any(life.state.used.values()), "no slot is held by what is over", f"used: {life.state.used}")
        require(not life.state.sessions, "one end", f"sessions are still busy: {life.state.sessions}")
        held = [view for view in life.state.locks.claims() if view.state is not ClaimState.QUARANTINED]
        require(not held, "no claim is held by what is over", f"left: {held}")
        self._check_promises(history, ledger)

    def programs_over(self) -> None:
        """Look for programs whose owners are all over, and for claims that are kept because of some.

        Raises:
            Violation: one was left, although it can be ended.
        """
        keepers, life = self._scene.keepers, self._scene.life
        assert life is not None
        for view in life.state.locks.claims():
            if view.state is ClaimState.QUARANTINED:
                node = life.state.nodes[view.owner]
                doubtful = node.unconfirmed and (node.is_turn or node.host_id in life.state.hosts)
                kept = doubtful or view.owner in keepers.doubtful
                rule = "no claim is held by what is over"
                require(kept, rule, f"{view.claim_id} of {view.owner} is kept for nothing: {view.note}")
        left = [p for p in keepers.alive.values() if p.run_id not in keepers.doubtful]
        named = ", ".join(f"{p.pid} of {p.run_id}" for p in left)
        require(not left, "no program is left", f"long after the end of its owner: {named}")

    def _check_promises(self, history: History, ledger: Ledger) -> None:
        """Compare what clients and bodies were told with what the journal says."""
        for client in self._scene.clients:
            for request_id, answer in client.cancels.items():
                kept = not answer.accepted or request_id in history.requests
                require(kept, "what was answered is kept", f"the accepted cancel {request_id} is not in the journal")
            for record in client.approved.values():
                same = ledger.decisions.get(record.id) == record.decision
                require(same, "what was answered is kept", f"{record.id} was told to be {record.decision}")
            for turn in client.turns:
                kept = not turn.accepted or turn.node_id in history.parents
                require(kept, "what was answered is kept", f"the accepted {turn.node_id} is not in the journal")
                if turn.notice is not None:
                    self._check_told(history.ends, turn.node_id, turn.notice.outcome)
        for body in self._bodies():
            for run_id in body.accepted_runs:
                require(run_id in history.parents, "what was answered is kept", f"{run_id} is not in the journal")
            for approval_id, decision in body.answers.items():
                known = ledger.decisions.get(approval_id)
                require(known == decision, "what was told is so", f"{approval_id} was told to be {decision}: {known}")
            for run_id, outcome in body.told.items():
                self._check_told(history.ends, run_id, outcome)
        begun = [(body.node_id, body.attempt) for host in self._scene.hosts.values() for body in host.seen]
        twice = {each for each in begun if begun.count(each) > 1}
        require(not twice, "one start", f"begun more than once: {sorted(twice)}")
        for host in self._scene.hosts.values():
            for run_id, cause in host.refused.items():
                end = history.ends.get(run_id)
                own = cause is not None and history.causes.get(run_id) == cause
                failed = own and end is not None and end.outcome is Outcome.FAILED
                rule = "a refused body is cancelled"
                require(not failed, rule, f"{run_id} failed because it was told of its own cancel")

    def _bodies(self) -> Iterator[Body]:
        for client in self._scene.clients:
            yield from client.turns
        for host in self._scene.hosts.values():
            yield from host.seen

    def _check_told(self, ends: dict[str, RunEnded | TurnEnded], node_id: str, outcome: Outcome) -> None:
        end = ends.get(node_id)
        same = end is not None and end.outcome is outcome
        known = None if end is None else end.outcome
        require(same, "what was told is so", f"{node_id} was announced as {outcome}; the journal says {known}")


def _meet(wanted: list[Area], areas: tuple[str, ...]) -> bool:
    held = [Area.from_dict(area) for area in areas_of(areas)]
    return any(conflict(one, two) for one in wanted for two in held)
