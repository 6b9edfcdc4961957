"""Bodies of turns and runs, as models: they do the steps of a plan and keep the rules of `remit.agents`.

A body is a generator that yields what it waits for. Whoever drives it throws `Stopped` into
it when its signal is set, at the wait that it is in, as a task scope does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from remit.core.cause import Cause, CauseKind
from remit.core.limits import Limits
from remit.core.messages import (
    AskClaim,
    CancelRequest,
    ClaimNotice,
    DelegateRequest,
    EndedNotice,
    GiveUpClaim,
    Notice,
    RunRequest,
)
from remit.core.outcome import Outcome
from remit.locks import Area, Mode
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import RunPlan, Step
from remit.testing.simulation.session import Answer, Session

__all__ = ["Body", "Failed", "Stopped", "Wait", "areas_of"]

Wait = Callable[[Callable[[Any], None]], None]
"""Begins a wait and is given what to call, with the result, when it is over."""

Script = Generator[Wait, Any, None]


class Stopped(Exception):
    """The signal of this body is set."""


class Failed(Exception):
    """A step did not work; the body raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(str(error))
        self.error = error


def areas_of(texts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return areas as messages carry them: `w:a` writes, `r:a` reads."""
    return tuple(Area(Mode.WRITE if text[0] == "w" else Mode.READ, text[2:]).to_dict() for text in texts)


class Body(ABC):
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
        self.node_id = node_id
        self.attempt = attempt
        self.cause: Cause | None = None
        self.holds: dict[str, tuple[str, ...]] = {}
        """Claims that this body believes to hold, and their areas."""
        self.accepted_runs: list[str] = []
        """Runs that this body was told are accepted."""
        self.told: dict[str, Outcome] = {}
        """Runs whose end this body was told of."""
        self.is_over = False
        self._kernel = kernel
        self._session = session
        self._steps = steps
        self._unwind_s = unwind_s
        self._deaf = deaf
        self._children: dict[str, Outcome | None] = {}
        self._claimed = 0
        self._woken: Callable[[Any], None] | None = None
        self._ticket = 0
        self._script: Generator[Wait, Any, str] = self._life()

    # -- what differs between turns and runs ---------------------------------------

    @abstractmethod
    def ended(self, word: str, error: BaseException | None) -> None:
        """Say how this body ended: `returned`, `raised`, `cancelled`, `stray`."""

    def begins_wait(self, on: tuple[str, ...], what: str) -> None:
        """Give way to others while this body waits; a turn has nothing to give."""
        return

    def ends_wait(self) -> None:
        """Say that a wait is over, however it went."""
        return

    def goes_on(self) -> Script:
        """Wait for one's place again; a turn has none."""
        yield from ()

    def work(self, step: Step) -> Script:
        """Do a step that only runs can do."""
        yield from ()

    def clean_up(self) -> Script:
        """Leave nothing behind when stopped."""
        yield from ()

    def ending(self) -> str:
        """Return how this body ends if nothing stops it."""
        return "returned"

    # -- driving -------------------------------------------------------------------

    def begin(self) -> None:
        """Do everything up to the first wait."""
        self._advance(lambda: next(self._script))

    def stop(self, cause: Cause) -> None:
        """Set the signal; the first cause stays."""
        if self.cause is not None or self.is_over:
            return
        self.cause = cause
        if not self._deaf:
            self._ticket += 1
            # As a delivery: in a callback of its own, never inside a step.
            self._kernel.after(0.0, lambda: self._throw(self._ticket))

    def vanish(self) -> None:
        """Be gone, with the process that this body is in."""
        self.is_over = True
        self._ticket += 1
        self.holds.clear()
        self._script.close()

    def _throw(self, ticket: int) -> None:
        if not self.is_over and ticket == self._ticket:
            self._advance(lambda: self._script.throw(Stopped()))

    def _resume(self, ticket: int, value: Any) -> None:
        if not self.is_over and ticket == self._ticket:
            self._advance(lambda: self._script.send(value))

    def _advance(self, move: Callable[[], Wait]) -> None:
        error: BaseException | None = None
        word = ""
        try:
            begin = move()
        except StopIteration as done:
            word = str(done.value)
        except Failed as failed:
            word, error = "raised", failed.error
        else:
            self._ticket += 1
            ticket = self._ticket
            begin(partial(self._resume, ticket))
            return
        self.is_over = True
        self.ended(word, error)
        self.holds.clear()

    def _life(self) -> Generator[Wait, Any, str]:
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

    def pause(self, seconds: float) -> Wait:
        """Return a wait of that many seconds."""
        return lambda done: _ignore(self._kernel.after(seconds, lambda: done(None)))

    # -- steps ---------------------------------------------------------------------

    def _do(self, step: Step) -> Script:
        if self.cause is not None and not self._deaf:
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

        self._session.track(run_id, told)

    def wake(self, word: str = "") -> None:
        """Let a body look again at what it waits for; `refused` fails the wait."""
        woken, self._woken = self._woken, None
        if woken is not None:
            self._kernel.after(0.0, lambda: woken(word))

    def woken_up(self) -> Wait:
        """Return the wait for the next `wake`."""

        def begin(done: Callable[[Any], None]) -> None:
            self._woken = done

        return begin

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
                    for name in self._open():
                        self.cancel(name, CauseKind.PARENT_FAILED)
                if (yield self.woken_up()) == "refused":
                    raise Failed
        finally:
            self.ends_wait()
        yield from self.goes_on()

    def _has_failed(self) -> bool:
        return any(outcome not in (None, Outcome.SUCCEEDED) for outcome in self._children.values())

    def cancel(self, target: str, kind: CauseKind) -> None:
        """Ask for a cancel of something below, without waiting for the answer."""
        self._claimed += 1
        request = CancelRequest(
            f"req_{self.node_id}_{self.attempt}_{self._claimed}",
            target,
            kind,
            actor=self.node_id,
            requester=self.node_id if self.attempt else "",
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
        self._session.track(claim_id, told)
        granted = False
        try:
            answer = yield from self._ask("claim", AskClaim(claim_id, self.node_id, self.attempt, areas_of(areas)))
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
        limits=Limits(max_concurrent=run.max_concurrent) if run.max_concurrent else None,
        claims=areas_of(run.claims),
    )


def _ignore(value: object) -> None:
    """Drop a value that a wait has no use for."""
