"""What follows from a decision, as a model of `remit.coordinator.dispatch`: starts, orders, notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remit.coordinator.state import Node, WorkspaceState
from remit.coordinator.transaction import Effects
from remit.core.messages import (
    CancelOrder,
    EndedNotice,
    Notice,
    ResumeOrder,
    StartItem,
    TurnCancelledNotice,
    TurnStartedNotice,
    WaitRefused,
)
from remit.testing.simulation.engine import EngineModel
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.kernel import Network
from remit.testing.simulation.mailbox import MailboxModel
from remit.testing.simulation.session import COORDINATOR

__all__ = ["DispatchModel", "end_of"]


class DispatchModel:
    """Carries out effects of one life.

    Args:
        state: the decider's.
        network: carries starts and orders.
        clients: carry notices.
        engine: starts and ends hosts.
        epoch: number of this life.
        spool: runs whose agent and arguments are kept for later lives.
    """

    def __init__(
        self,
        state: WorkspaceState,
        network: Network,
        clients: MailboxModel,
        engine: EngineModel,
        *,
        epoch: int,
        spool: set[str],
    ) -> None:
        self.links: dict[str, HostModel] = {}
        """Hosts that this life has a connection to."""
        self._state = state
        self._network = network
        self._clients = clients
        self._engine = engine
        self.epoch = epoch
        self._spool = spool
        live = (node.id for node in state.nodes.values() if not node.is_ended)
        self.briefed = {name for name in live if name in spool}
        """Runs whose agent and arguments are at hand."""

    def remember(self, run_ids: Iterable[str]) -> None:
        """Keep what hosts will need of these runs."""
        self.briefed.update(run_ids)

    def keep(self, run_ids: Iterable[str]) -> None:
        """Keep it for later lives too."""
        self._spool.update(run_ids)

    def forget(self, run_ids: Iterable[str]) -> None:
        """Drop what was kept of runs that will not start."""
        dropped = set(run_ids)
        self.briefed -= dropped
        self._spool -= dropped

    def act(self, effects: Effects) -> None:
        """Carry out what a decision asked for. Cancels go before starts."""
        for host_id, cancels in effects.cancels.items():
            self._order(host_id, tuple(cancels))
        for host_id, refusals in effects.wait_refusals.items():
            self._order(host_id, tuple(WaitRefused(*refusal) for refusal in refusals))
        for host_id, run_ids in effects.resumes.items():
            self._order(host_id, tuple(ResumeOrder(run_id) for run_id in run_ids))
        for host_id, run_ids in effects.starts.items():
            self._start(host_id, run_ids)
        for host_id in effects.spawn:
            self._engine.spawn(host_id, self._state.drained)
        self.end_programs(effects)
        for host_id, _ in effects.kill:
            self._engine.kill(host_id)
        self._notify(effects)

    def end_programs(self, effects: Effects) -> None:
        """End programs that nobody looks after any more."""
        for run_id, process in effects.sweep:
            self._engine.sweep(run_id, process.pid)
        for _, owner in effects.orphans:
            self._engine.end_orphans(owner)

    def _order(self, host_id: str, orders: tuple[CancelOrder | ResumeOrder | WaitRefused, ...]) -> None:
        host = self.links.get(host_id)
        if host is not None:
            # Cancels are safe to lose: whoever does not hear one is stopped by force.
            exact = not isinstance(orders[0], CancelOrder)
            kind = "answer to a wait" if exact else "order"
            self._send(host_id, kind, lambda: host.control(self.epoch, orders), exact=exact)

    def _start(self, host_id: str, run_ids: list[str]) -> None:
        host = self.links.get(host_id)
        nodes = [self._state.nodes.get(run_id) for run_id in run_ids]
        items = [self._item(n) for n in nodes if n is not None and not n.is_ended and n.id in self.briefed]
        if host is not None and items:
            self._send(host_id, "start", lambda: host.start(self.epoch, items), exact=True)

    def _send(self, host_id: str, kind: str, deliver: Callable[[], None], *, exact: bool) -> None:
        self._network.send(COORDINATOR, host_id, kind, deliver, exact=exact, life=self.epoch)

    def _item(self, node: Node) -> StartItem:
        return StartItem(
            run_id=node.id,
            attempt=node.attempt,
            turn_id=node.turn_id,
            session_id=node.session_id,
            path=tuple(ancestor.id for ancestor in reversed(self._state.ancestors(node))),
            agent_key="agent",
            agent_name=node.agent,
            name=node.name,
            depth=node.depth,
            arguments=b"",
            lineage=node.lineage,
            cause=node.cause,
        )

    def _notify(self, effects: Effects) -> None:
        for owner_id, notice in effects.claims:
            self._tell_owner(owner_id, notice)
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
            if node is not None:
                self.forget((node_id,))
                self._clients.post_end(node.client_id, end_of(node))

    def _tell_owner(self, owner_id: str, notice: Notice) -> None:
        owner = self._state.nodes.get(owner_id)
        if owner is not None:
            client_id = owner.client_id if owner.is_turn else self._clients.of_host(owner.host_id)
            self._clients.post(client_id, notice)


def end_of(node: Node) -> EndedNotice:
    """Return the notice of an ended node."""
    assert node.outcome is not None
    return EndedNotice(node.id, node.outcome, cause=node.cause, unconfirmed=node.unconfirmed, attempt=node.attempt)
