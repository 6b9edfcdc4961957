"""Bodies of runs, as models: one attempt at work in a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remit.core.cause import CauseKind
from remit.core.errors import TurnCancelled
from remit.core.messages import (
    LiveAttempt,
    ReportEnded,
    ReportProcess,
    ReportProgress,
    ReportResume,
    ReportSpend,
    ReportWaiting,
    StartItem,
)
from remit.testing.simulation.body import Body
from remit.testing.simulation.keepers import MACHINE, ToolProcess
from remit.testing.simulation.plan import RunPlan, Step
from remit.testing.simulation.script import Script

if TYPE_CHECKING:
    from remit.testing.simulation.host import HostModel

__all__ = ["RunBody"]

_PROCESS_STOP_S = 0.1
_ATTEMPT_WORDS = {CauseKind.ATTEMPT_TIMEOUT: "timed_out", CauseKind.WORKER_MOVED: "moved"}


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
        self.wait: ReportWaiting | None = None
        """The wait that it is in."""
        self._host = host
        self._plan = plan
        self._wait_number = 0
        self._has_slot = True
        self._lineage = item.lineage
        self._programs = 0
        self._process: ToolProcess | None = None
        if plan.claims:
            self.holds[f"start of {item.run_id}"] = plan.claims

    def begins_wait(self, on: tuple[str, ...], what: str) -> None:
        """Give up the slot for the time of a wait."""
        self._wait_number += 1
        self.wait = ReportWaiting(self.node_id, self.attempt, self._wait_number, on, what)
        self._host.put(self.wait)

    def ends_wait(self) -> None:
        """Ask for a slot again, unless this body is to stop anyway."""
        self.wait = None
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

    def inventory(self) -> LiveAttempt:
        """Return what this body is at, for a coordinator that was begun again."""
        return LiveAttempt(self.node_id, self.attempt, waiting=self.wait, resuming=not self._has_slot)

    def spends(self) -> None:
        """Report what this body has spent in all."""
        self._host.put(ReportSpend(self.node_id, self.attempt, self.spent, 0.0))

    def work(self, step: Step) -> Script:
        """Hand over a partial result, or run a process."""
        if step.verb == "partial":
            self._host.put(ReportProgress(self.node_id, self.attempt, "half", b"half"))
            yield self.pause(0.0)
            return
        areas = tuple(area for held in self.holds.values() for area in held)
        self._programs += 1
        key = f"{self._lineage}:{self._programs}"
        self._process = self._host.keepers.start(self.node_id, key, areas, self._host.id)
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
        """Stop the process that runs, unless the next attempt is to find it."""
        if self._process is not None and (self.cause is None or self.cause.stops_foreground):
            yield self.pause(_PROCESS_STOP_S)
            self._process_over()

    def ending(self) -> str:
        """Return what the plan says of this attempt."""
        return self._plan.ends[min(self.attempt, len(self._plan.ends)) - 1]

    def ended(self, word: str, error: BaseException | None) -> None:
        """Report the end; see `remit.agents.body` for the rules."""
        was_set = self.cause is not None
        if self.cause is not None and self.cause.kind in _ATTEMPT_WORDS:
            word = _ATTEMPT_WORDS[self.cause.kind]
        elif word in ("stray", "stale_host"):
            word = "raised"
        if self.attempt > 1 and (self.cause is None or self.cause.stops_foreground):
            # What an earlier attempt had left running and this one did not ask for again.
            self._host.keepers.end_all(self.node_id)
        name = "" if error is None else type(error).__name__
        if isinstance(error, TurnCancelled):
            self._host.refused[self.node_id] = error.cause
        payload = b"result" if word == "returned" else None
        report = ReportEnded(
            self.node_id, self.attempt, word, before_cancel=not was_set, error_type=name, payload=payload
        )
        self._host.over(self, report)
