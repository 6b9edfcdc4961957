"""Bodies of turns and runs, as models: they do the steps of a plan and keep the rules of `remit.agents`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from remit.core.cause import CauseKind
from remit.core.limits import Limits
from remit.core.messages import (
    ApprovalNotice,
    AskApproval,
    AskClaim,
    CancelRequest,
    ClaimNotice,
    DelegateRequest,
    EndedNotice,
    GiveUpClaim,
    Notice,
    RunRequest,
    WithdrawApproval,
)
from remit.core.outcome import Outcome
from remit.core.records import ApprovalRecord
from remit.locks import Area, Mode
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import RunPlan, Step
from remit.testing.simulation.script import Failed, Script, Scripted, Stopped, Wait
from remit.testing.simulation.session import Answer, Session

__all__ = ["Body", "areas_of"]


def areas_of(texts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return areas as messages carry them: `w:a` writes, `r:a` reads."""
    return tuple(Area(Mode.WRITE if text[0] == "w" else Mode.READ, text[2:]).to_dict() for text in texts)


class Body(Scripted):
    """One turn, or one attempt of a run, at work.

    Args:
        kernel: the clock.
        session: for what it delegates and claims.
        node_id: the turn or run.
        attempt: 0 for a turn.
        steps: what it does.
        unwind_s: seconds of clean-up when its signal is set.
        deaf: it does not listen to its signal.
    """

    def __init__(
        self,
        kernel: Kernel,
        session: Session,
        *,
        node_id: str,
        attempt: int,
        steps: Sequence[Step],
        unwind_s: float,
        deaf: bool,
    ) -> None:
        super().__init__(kernel, node_id, deaf=deaf)
        self.attempt = attempt
        self.accepted_runs: list[str] = []
        """Runs that this body was told are accepted."""
        self.told: dict[str, Outcome] = {}
        """Runs whose end this body was told of."""
        self.answers: dict[str, str] = {}
        """Approvals whose answer this body was told."""
        self.spent = 0
        """Tokens."""
        self._session = session
        self._steps = steps
        self._unwind_s = unwind_s
        self._children: dict[str, Outcome | None] = {}
        self._claimed = 0

    # -- what differs between turns and runs ---------------------------------------

    def begins_wait(self, on: tuple[str, ...], what: str) -> None:
        """Give way to others while this body waits; a turn has nothing to give."""
        return

    def ends_wait(self) -> None:
        """Say that a wait is over, however it went."""
        return

    def goes_on(self) -> Script:
        """Wait for one's place again; a turn has none."""
        yield from ()

    def spends(self) -> None:
        """Say what this body has spent in all."""

    def work(self, step: Step) -> Script:
        """Do a step that only runs can do."""
        yield from ()

    def clean_up(self) -> Script:
        """Leave nothing behind when stopped."""
        yield from ()

    def ending(self) -> str:
        """Return how this body ends if nothing stops it."""
        return "returned"

    def life(self) -> Generator[Wait, Any, str]:
        """Do the steps; clean up if the signal is set on the way."""
        try:
            yield self.pause(0.0)
            for step in self._steps:
                yield from self._do(step)
        except Stopped:
            yield from self.clean_up()
            if self._unwind_s:
                yield self.pause(self._unwind_s)
            return "cancelled"
        return self.ending()

    # -- steps ---------------------------------------------------------------------

    def _do(self, step: Step) -> Script:
        if self.must_stop():
            raise Stopped
        match step.verb:
            case "work":
                yield self.pause(step.seconds)
            case "delegate":
                yield from self._delegate(step.runs)
            case "wait" | "gather":
                yield from self._wait(fail_fast=step.verb == "gather")
            case "claim":
                yield from self._claim(step.areas)
            case "release":
                yield from self._release()
            case "approve":
                yield from self._approve(step.seconds)
            case "spend":
                self.spent += step.amount
                self.spends()
                yield self.pause(0.0)
            case "stop_child":
                yield from self._stop_child()
            case _:
                yield from self.work(step)

    def _ask(self, method: str, message: Any) -> Generator[Wait, Any, Any]:
        answer: Answer = yield lambda done: self._session.request(method, message, done)
        if answer.error is not None:
            raise Failed(answer.error)
        return answer.value

    def _delegate(self, runs: Sequence[RunPlan]) -> Script:
        # Another attempt delegates anew, so its runs have other ids.
        prefix = self.node_id.split("_", 1)[1] + (f"~{self.attempt}" if self.attempt > 1 else "")
        ids = {run.name: f"run_{prefix}.{run.name.rpartition('.')[2]}" for run in runs}
        self._session.open()
        request = DelegateRequest(
            parent_id=self.node_id,
            parent_attempt=self.attempt,
            client_id=self._session.client_id,
            env_key="env",
            env=b"",
            agents={},
            runs=tuple(_request(ids, run) for run in runs),
        )
        for run_id in ids.values():
            self._track(run_id)
        accepted = False
        try:
            yield from self._ask("delegate", request)
            accepted = True
            self.accepted_runs.extend(ids.values())
            for run_id in ids.values():
                self._session.confirm(run_id)
        finally:
            if not accepted:
                for run_id in ids.values():
                    self._session.untrack(run_id)
                    self._children.pop(run_id, None)

    def _track(self, run_id: str) -> None:
        self._children[run_id] = None

        def told(notice: Notice | None) -> None:
            if isinstance(notice, EndedNotice):
                self.told[run_id] = notice.outcome
            elif notice is not None:
                return
            if run_id in self._children:
                self._children[run_id] = Outcome.LOST if notice is None else notice.outcome
            self.wake()

        self._session.track(run_id, told, pending=True)

    def _open(self) -> tuple[str, ...]:
        return tuple(name for name, outcome in self._children.items() if outcome is None)

    def _wait(self, *, fail_fast: bool) -> Script:
        told = False
        if not self._open():
            return
        self.begins_wait(self._open(), "children")
        try:
            while self._open():
                if fail_fast and not told and self._has_failed():
                    told = True
                    first, *others = self._open()
                    self.cancel(first, CauseKind.PARENT_FAILED, also=others)
                if (yield self.woken_up()) == "refused":
                    raise Failed
        finally:
            self.ends_wait()
        yield from self.goes_on()

    def _has_failed(self) -> bool:
        return any(outcome not in (None, Outcome.SUCCEEDED) for outcome in self._children.values())

    def cancel(self, target: str, kind: CauseKind, *, also: Iterable[str] = ()) -> None:
        """Ask for a cancel of something below, without waiting for the answer."""
        self._claimed += 1
        request = CancelRequest(
            f"req_{self.node_id}_{self.attempt}_{self._claimed}",
            target,
            kind,
            actor=self.node_id,
            requester=self.node_id if self.attempt else "",
            also=tuple(also),
        )
        self._session.request("cancel", request, lambda answer: None)

    def _stop_child(self) -> Script:
        if self._children:
            self.cancel(next(reversed(self._children)), CauseKind.USER_INTERRUPT)
        yield self.pause(0.0)

    def _claim(self, areas: tuple[str, ...]) -> Script:
        self._claimed += 1
        claim_id = f"claim_{self.node_id}_{self.attempt}_{self._claimed}"
        grants: list[ClaimNotice | None] = []

        def told(notice: Notice | None) -> None:
            if notice is None or isinstance(notice, ClaimNotice):
                grants.append(notice)
                self.wake()

        self._session.open()
        self._session.track(claim_id, told, pending=True)
        granted = False
        try:
            answer = yield from self._ask("claim", AskClaim(claim_id, self.node_id, self.attempt, areas_of(areas)))
            self._session.confirm(claim_id)
            if not answer.token:
                yield from self._stand_in_line(grants)
            self.holds[claim_id] = areas
            yield from self.goes_on()
            granted = True
        finally:
            self._session.untrack(claim_id)
            if not granted:
                self._give_up(claim_id)

    def _stand_in_line(self, grants: list[ClaimNotice | None]) -> Script:
        self.begins_wait((), "claims")
        try:
            while not grants:
                if (yield self.woken_up()) == "refused":
                    raise Failed
        finally:
            self.ends_wait()
        if grants[0] is None or grants[0].error is not None:
            raise Failed

    def _approve(self, timeout_s: float) -> Script:
        self._claimed += 1
        approval_id = f"approval_{self.node_id}_{self.attempt}_{self._claimed}"
        records: list[ApprovalRecord | None] = []

        def told(notice: Notice | None) -> None:
            if notice is None or isinstance(notice, ApprovalNotice):
                records.append(None if notice is None else notice.record)
                self.wake()

        self._session.open()
        self._session.track(approval_id, told, pending=True)
        request = AskApproval(approval_id, self.node_id, self.attempt, "act", timeout_s=timeout_s or None)
        answered = False
        try:
            record: ApprovalRecord | None = yield from self._ask("ask_approval", request)
            self._session.confirm(approval_id)
            if record is not None and record.is_open:
                record = yield from self._wait_for_answer(records)
            answered = record is not None
        finally:
            self._session.untrack(approval_id)
            if not answered:
                withdrawal = WithdrawApproval(approval_id, self.node_id)
                self._session.request("withdraw_approval", withdrawal, lambda answer: None)
        if record is None:
            raise Failed
        self.answers[approval_id] = record.decision
        if record.decision != "approved":
            raise Failed

    def _wait_for_answer(self, records: list[ApprovalRecord | None]) -> Generator[Wait, Any, ApprovalRecord | None]:
        self.begins_wait((), "approval")
        try:
            while not records:
                if (yield self.woken_up()) == "refused":
                    raise Failed
        finally:
            self.ends_wait()
        yield from self.goes_on()
        return records[0]

    def _give_up(self, claim_id: str) -> None:
        self.holds.pop(claim_id, None)
        self._session.request("give_up_claim", GiveUpClaim(claim_id, self.node_id), lambda answer: None)

    def _release(self) -> Script:
        for claim_id in list(self.holds):
            self._give_up(claim_id)
        yield self.pause(0.0)


def _request(ids: dict[str, str], run: RunPlan) -> RunRequest:
    return RunRequest(
        run_id=ids[run.name],
        agent_key="agent",
        agent_name=run.name,
        name=run.name,
        pool=run.pool,
        after=tuple(ids[name] for name in run.after if name in ids),
        deadline_s=run.deadline_s,
        retries=run.retries,
        retry_delay_s=run.retry_delay_s,
        attempt_timeout_s=run.attempt_timeout_s,
        detached=run.detached,
        grace_s=run.grace_s,
        limits=Limits(max_concurrent=run.max_concurrent, tokens=run.tokens),
        claims=areas_of(run.claims),
    )
