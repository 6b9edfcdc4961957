"""An agent host, as a model: begins attempts, hears cancels, reports ends. Keeps the rules of `remit.agents.host`.

A host may end with its coordinator or outlive it; whoever simulates decides which, and
`inventory` says what is really there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remit.core.cause import Cause, CauseKind
from remit.core.messages import (
    CancelOrder,
    FlushOrder,
    HostInventory,
    LiveAttempt,
    Order,
    Report,
    ReportBatch,
    ReportEnded,
    ResumeOrder,
    StartItem,
)
from remit.testing.simulation.keepers import MACHINE, Keepers
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import RunPlan
from remit.testing.simulation.runs import RunBody
from remit.testing.simulation.session import Answer, Session

__all__ = ["HostModel"]


class HostModel:
    """One host.

    Args:
        host_id: its id, and its endpoint.
        kernel: the clock.
        session: its connection, for reports and for what its bodies delegate.
        keepers: where tool processes run.
        plans: what runs do, by their place in the tree.
        node: the node of the cluster that it runs on.
        begun: called with every body that begins here.
    """

    def __init__(
        self,
        host_id: str,
        kernel: Kernel,
        session: Session,
        keepers: Keepers,
        plans: Mapping[str, RunPlan],
        node: str = "node_1",
        begun: Callable[[HostModel, RunBody], None] | None = None,
    ) -> None:
        self.id = host_id
        self.node = node
        self.up_at = kernel.now
        """When it begins to answer."""
        self.epoch = 0
        """The life of the coordinator that it serves; orders of earlier ones are refused."""
        self.kernel = kernel
        self.session = session
        self.keepers = keepers
        self.bodies: dict[str, RunBody] = {}
        self.is_dead = False
        self.is_zombie = False
        """It was taken for dead and acts on."""
        self.seen: list[RunBody] = []
        """Every body that was begun here."""
        self.refused: dict[str, Cause | None] = {}
        """Runs whose body ended because a request was answered with its cancel."""
        self._plans = plans
        self._begun = begun
        self._ordered: dict[str, Cause] = {}
        self._waiting: list[Report] = []
        self._sending: ReportBatch | None = None
        self._seq = 0

    # -- what is heard -------------------------------------------------------------

    def _refuses(self, epoch: int) -> bool:
        """Tell whether a message is of an earlier life of the coordinator, or nobody is here to take it."""
        if self.is_dead or epoch < self.epoch:
            return True
        self.epoch = epoch
        return False

    def start(self, epoch: int, items: Sequence[StartItem]) -> None:
        """Begin attempts."""
        if self._refuses(epoch):
            return
        for item in items:
            if item.run_id not in self.bodies:
                self._begin(item)

    def _begin(self, item: StartItem) -> None:
        plan = self._plans[item.agent_name]
        if plan.ends[min(item.attempt, len(plan.ends)) - 1] == "stale_host":
            self.put(ReportEnded(item.run_id, item.attempt, "stale_host", error="edited"))
            return
        above = (*item.path, item.run_id)
        cause = next((self._ordered[name] for name in above if name in self._ordered), item.cause)
        if cause is not None:
            word = "timed_out" if cause.kind is CauseKind.ATTEMPT_TIMEOUT else "cancelled"
            self.put(ReportEnded(item.run_id, item.attempt, word, before_cancel=False))
            return
        body = RunBody(self, item, plan)
        self.bodies[item.run_id] = body
        self.seen.append(body)
        if self._begun is not None:
            self._begun(self, body)
        body.begin()

    def control(self, epoch: int, orders: Sequence[Order]) -> None:
        """Carry out orders."""
        if self._refuses(epoch):
            return
        for order in orders:
            if isinstance(order, CancelOrder):
                self._cancel(order)
            elif isinstance(order, FlushOrder):
                continue  # there are no spans here
            elif (body := self.bodies.get(order.run_id)) is not None:
                if isinstance(order, ResumeOrder):
                    body.resumed()
                else:
                    body.wake("refused")

    def _cancel(self, order: CancelOrder) -> None:
        if order.attempt:
            target = self.bodies.get(order.target)
            if target is None or target.attempt != order.attempt:
                return
        else:
            self._ordered.setdefault(order.target, order.cause)
        for body in list(self.bodies.values()):
            if order.target in body.above:
                body.stop(order.cause)

    # -- what is said --------------------------------------------------------------

    def put(self, report: Report) -> None:
        """Report something, after all that was reported before; sent again until it is acknowledged."""
        self._waiting.append(report)
        self._flush()

    def over(self, body: RunBody, report: ReportEnded) -> None:
        """Take note of a body's end and report it."""
        if self.bodies.get(body.node_id) is body:
            del self.bodies[body.node_id]
        self.put(report)

    def _flush(self) -> None:
        if self._sending is not None or not self._waiting or self.is_dead:
            return
        self._seq += 1
        self._sending = ReportBatch(self.id, self._seq, tuple(self._waiting))
        self._waiting.clear()
        self.session.request("report", self._sending, self._acknowledged, patience_s=1e9)

    def _acknowledged(self, answer: Answer) -> None:
        self._sending = None
        self._flush()

    # -- life ----------------------------------------------------------------------

    def inventory(self, epoch: int) -> HostInventory | None:
        """Say what is really here, and serve this life from now on; None to an earlier life."""
        if self._refuses(epoch):
            return None
        found = [body.inventory() for body in self.bodies.values()]
        unheard = (*(self._sending.items if self._sending is not None else ()), *self._waiting)
        ends = [LiveAttempt(r.run_id, r.attempt, reported=True) for r in unheard if isinstance(r, ReportEnded)]
        return HostInventory(self.id, 1, MACHINE, (*found, *ends), self.node)

    def attempts(self) -> dict[str, int]:
        """Return the runs whose bodies are at work here, with their attempts."""
        return {run_id: body.attempt for run_id, body in self.bodies.items()}

    def die(self, told: Callable[[], None] | None = None) -> None:
        """Be gone; tool processes stay behind.

        Args:
            told: called at once if this host was still alive.
        """
        if self.is_dead:
            return
        self.is_dead = True
        self.session.close()
        for body in list(self.bodies.values()):
            body.vanish()
        self.bodies.clear()
        if told is not None:
            told()
