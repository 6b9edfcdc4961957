"""An agent host, as a model: begins attempts, hears cancels, reports ends. Keeps the rules of `remit.agents.host`.

A host may end with its coordinator or outlive it; whoever simulates decides which, and
`inventory` says what is really there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remit.core.cause import Cause, CauseKind
from remit.core.errors import TurnCancelled
from remit.core.messages import (
    CancelOrder,
    Report,
    ReportBatch,
    ReportEnded,
    ReportProcess,
    ReportProgress,
    ReportResume,
    ReportWaiting,
    ResumeOrder,
    StartItem,
    WaitRefused,
)
from remit.testing.simulation.body import Body
from remit.testing.simulation.keepers import MACHINE, Keepers, ToolProcess
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import RunPlan, Step
from remit.testing.simulation.script import Script
from remit.testing.simulation.session import Answer, Session

__all__ = ["HostModel", "RunBody"]

_PROCESS_STOP_S = 0.1


class RunBody(Body):
    """One attempt of a run at work in a host."""

    def __init__(self, host: HostModel, item: StartItem, plan: RunPlan) -> None:
        super().__init__(
            host.kernel,
            host.session,
            node_id=item.run_id,
            attempt=item.attempt,
            steps=plan.steps,
            unwind_s=plan.unwind_s,
            deaf=plan.deaf,
        )
        self.above = (*item.path, item.run_id)
        self._host = host
        self._plan = plan
        self._wait_number = 0
        self._has_slot = True
        self._process: ToolProcess | None = None
        if plan.claims:
            self.holds[f"start of {item.run_id}"] = plan.claims

    def begins_wait(self, on: tuple[str, ...], what: str) -> None:
        """Give up the slot for the time of a wait."""
        self._wait_number += 1
        self._host.put(ReportWaiting(self.node_id, self.attempt, self._wait_number, on, what))

    def ends_wait(self) -> None:
        """Ask for a slot again, unless this body is to stop anyway."""
        if self.cause is None:
            self._has_slot = False
            self._host.put(ReportResume(self.node_id, self.attempt))

    def goes_on(self) -> Script:
        """Wait for the slot."""
        while not self._has_slot:
            yield self.woken_up()

    def resumed(self) -> None:
        """Take note that this run holds a slot again."""
        self._has_slot = True
        self.wake()

    def work(self, step: Step) -> Script:
        """Hand over a partial result, or run a process."""
        if step.verb == "partial":
            self._host.put(ReportProgress(self.node_id, self.attempt, "half", b"half"))
            yield self.pause(0.0)
            return
        areas = tuple(area for held in self.holds.values() for area in held)
        self._process = self._host.keepers.start(self.node_id, self.attempt, areas)
        self._host.put(self._process_report(self._process.pid, ended=False))
        yield self.pause(step.seconds)
        self._process_over()

    def _process_over(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._host.keepers.end(process.pid)
            self._host.put(self._process_report(process.pid, ended=True))

    def _process_report(self, pid: int, *, ended: bool) -> ReportProcess:
        return ReportProcess(
            self.node_id, self.attempt, pid, 1.0, MACHINE, "tool", ended=ended, stopped=ended and self.cause is not None
        )

    def clean_up(self) -> Script:
        """Stop the process that runs."""
        if self._process is not None:
            yield self.pause(_PROCESS_STOP_S)
            self._process_over()

    def ending(self) -> str:
        """Return what the plan says of this attempt."""
        return self._plan.ends[min(self.attempt, len(self._plan.ends)) - 1]

    def ended(self, word: str, error: BaseException | None) -> None:
        """Report the end; see `remit.agents.body` for the rules."""
        was_set = self.cause is not None
        expired = self.cause is not None and self.cause.kind is CauseKind.ATTEMPT_TIMEOUT
        if expired:
            word = "timed_out"
        elif word in ("stray", "stale_host"):
            word = "raised"
        name = "" if error is None else type(error).__name__
        if isinstance(error, TurnCancelled):
            self._host.refused[self.node_id] = error.cause
        payload = b"result" if word == "returned" else None
        report = ReportEnded(
            self.node_id, self.attempt, word, before_cancel=not was_set, error_type=name, payload=payload
        )
        self._host.over(self, report)


class HostModel:
    """One host.

    Args:
        host_id: its id, and its endpoint.
        kernel: the clock.
        session: its connection, for reports and for what its bodies delegate.
        keepers: where tool processes run.
        plans: what runs do, by their place in the tree.
    """

    def __init__(
        self, host_id: str, kernel: Kernel, session: Session, keepers: Keepers, plans: Mapping[str, RunPlan]
    ) -> None:
        self.id = host_id
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
        self._ordered: dict[str, Cause] = {}
        self._waiting: list[Report] = []
        self._sending: ReportBatch | None = None
        self._seq = 0

    # -- what is heard -------------------------------------------------------------

    def start(self, items: Sequence[StartItem]) -> None:
        """Begin attempts."""
        if self.is_dead:
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
        body.begin()

    def control(self, orders: Sequence[CancelOrder | ResumeOrder | WaitRefused]) -> None:
        """Carry out orders."""
        if self.is_dead:
            return
        for order in orders:
            if isinstance(order, CancelOrder):
                self._cancel(order)
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

    def inventory(self) -> dict[str, int]:
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
