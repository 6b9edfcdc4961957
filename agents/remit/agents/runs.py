"""Handles of runs, and receipts of cancels, as their callers hold them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from remit.agents.client import ClientSession
from remit.agents.payload import decode
from remit.core.approvals import ApprovalRule
from remit.core.cause import Cause, CauseKind
from remit.core.errors import (
    RemitError,
    RunCancelled,
    RunEnded,
    RunFailed,
    RunLost,
    RunTimedOut,
)
from remit.core.limits import Limits
from remit.core.messages import (
    CancelAnswer,
    CancelRequest,
    CancelSummary,
    EndedNotice,
    Notice,
)
from remit.core.outcome import Outcome
from remit.core.scope import shielded
from remit.core.signal import CancelSignal
from remit.locks import Claim
from remit.telemetry.carrier import current_carrier
from remit.telemetry.spans import start_cancel_span

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CancelReceipt", "Run", "RunOptions", "request_cancel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a caller may ask of one run."""

    name: str = ""
    """Shown in trees; unique within one `delegate_many` if others come `after` it."""
    deadline_s: float | None = None
    """Seconds from acceptance until the run is stopped; None: only its ancestors' deadlines."""
    attempt_timeout_s: float | None = None
    """Seconds that one attempt may take before it is stopped and another one begins."""
    retries: int = 0
    """Further attempts after one that failed, timed out or was lost. Off unless asked for."""
    retry_delay_s: float = 0.0
    """Seconds between two attempts."""
    after: tuple[Any, ...] = ()
    """Runs (handles, ids, or names within one `delegate_many`) that must succeed first."""
    detached: bool = False
    """Let it go: it is not cancelled with its parent, and its parent ends without it."""
    grace_s: float | None = None
    """Seconds between asking it to stop and forcing it; None: as its parent."""
    limits: Limits | None = None
    """Bounds for what it delegates in turn."""
    claims: tuple[Claim, ...] = ()
    """Paths that it must hold before it takes a slot, until it has ended; besides those of its agent."""
    approvals: str | tuple[ApprovalRule, ...] = ()
    """`ask`, `auto`, `deny`, or rules for it and all below; narrows what is allowed above, never widens it."""


class Owner(Protocol):
    """Whoever holds run handles: a turn or a run context."""

    @property
    def session(self) -> ClientSession:
        """The connection that the handles came through."""
        ...

    @property
    def signal(self) -> CancelSignal:
        """What it is stopped by."""
        ...

    @property
    def requester(self) -> str:
        """Id of the run that would ask for a cancel; the empty text for a turn."""
        ...

    async def wait_runs(self, runs: Iterable[Run], *, enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for ends of runs, watching one's own signal."""
        ...


class Run:
    """A delegation, as whoever made it holds it. Made by `delegate`, not by hand.

    A handle belongs to the turn or run that delegated it: waiting on it watches
    that one's signal. Dropping a handle changes nothing.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_lock",
        "_owner",
        "_value",
        "_waiters",
        "agent",
        "id",
        "name",
    )

    def __init__(self, owner: Owner, run_id: str, *, name: str = "", agent: str = "") -> None:
        self.id = run_id
        """`run_...`."""
        self.name = name
        """Name that the caller gave; may be empty."""
        self.agent = agent
        """Name of the agent."""
        self._owner = owner
        self._ended: EndedNotice | None = None
        self._error: RemitError | None = None
        self._waiters: list[Callable[[], None]] | None = None
        self._lock = _WAITERS_LOCK

    def __repr__(self) -> str:
        state = self._ended.outcome.value if self._ended else "live"
        return f"<Run {self.id} {self.name or self.agent!r} {state}>"

    # -- what is known now ---------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, or None while its end is not known here."""
        return None if self._ended is None else self._ended.outcome

    @property
    def cause(self) -> Cause | None:
        """Why it was stopped, or None."""
        return None if self._ended is None else self._ended.cause

    @property
    def unconfirmed(self) -> bool:
        """Tell whether it was given up on without proof that its body is gone."""
        return self._ended is not None and self._ended.unconfirmed

    @property
    def is_settled(self) -> bool:
        """Tell whether a wait on this handle would return at once."""
        return self._ended is not None or self._error is not None

    def belongs_to(self, owner: Owner) -> bool:
        """Tell whether this handle was made for a turn or run context."""
        return self._owner is owner

    # -- waiting -------------------------------------------------------------------

    async def result(self) -> Any:
        """Return what the run's body returned.

        Raises:
            RunFailed, RunCancelled, RunTimedOut, RunLost: it did not succeed.
            TurnCancelled: one's own turn or run was cancelled; also if the result is there.
            CoordinatorUnavailable: contact was lost for good.

        Cancellation:
            Always a checkpoint. The run itself goes on.
        """
        await self._owner.wait_runs((self,), enough=lambda: self.is_settled, timeout_s=None)
        return self.value()

    async def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the end and return the outcome, or None if `timeout_s` passed first.

        The time-out never stops the run; wait again as often as you like.

        Args:
            timeout_s: seconds; None waits without end.

        Raises:
            TurnCancelled: one's own turn or run was cancelled.
            CoordinatorUnavailable: contact was lost for good.
        """
        await self._owner.wait_runs((self,), enough=lambda: self.is_settled, timeout_s=timeout_s)
        if self._error is not None:
            raise self._error
        return self.outcome

    def value(self) -> Any:
        """Return the result of a run that has succeeded, or raise how it ended.

        Raises:
            RunFailed, RunCancelled, RunTimedOut, RunLost: it did not succeed.
            RuntimeError: its end is not known here yet.
        """
        if self._error is not None:
            raise self._error
        if self._ended is None:
            raise RuntimeError(f"{self.id} has not ended; await run.result() instead")
        if self._ended.outcome is Outcome.SUCCEEDED:
            return self._payload()
        raise self.exception()

    def exception(self) -> RunEnded:
        """Return the exception for a run that did not succeed."""
        ended = self._ended
        assert ended is not None
        label = f"{self.id} ({self.name or self.agent})" if self.name or self.agent else self.id
        because = f": {ended.cause.describe()}" if ended.cause else ""
        details: dict[str, Any] = {
            "run_id": self.id,
            "cause": ended.cause,
            "partial": self._payload(),
            "error_type": ended.error_type,
            "traceback": ended.traceback,
            "error_code": ended.error_code,
        }
        if ended.outcome is Outcome.CANCELLED:
            return RunCancelled(f"{label} was cancelled{because}", **details)
        if ended.outcome is Outcome.TIMED_OUT:
            return RunTimedOut(f"{label} timed out{because}", **details)
        if ended.outcome is Outcome.LOST:
            return RunLost(f"{label} was lost: {ended.error or 'its host vanished'}", **details)
        kind = f"{ended.error_type}: " if ended.error_type else ""
        return RunFailed(f"{label} failed: {kind}{ended.error}", **details)

    @property
    def payload(self) -> bytes | None:
        """The result or partial result as it came, pickled; None where there is none."""
        return None if self._ended is None else self._ended.payload

    def _payload(self) -> Any:
        if self._ended is None or self._ended.payload is None:
            return None
        return decode(self._ended.payload)

    # -- stopping ------------------------------------------------------------------

    async def cancel(
        self,
        reason: str = "",
        *,
        kill: bool = False,
        kind: CauseKind = CauseKind.USER_INTERRUPT,
    ) -> CancelReceipt:
        """Stop this run and everything below it.

        Args:
            reason: free text for people.
            kill: skip the grace.
            kind: why, in the closed set.

        Returns:
            A receipt: the cancel is durable and everything live has been told.
        """
        return await request_cancel(
            self._owner.session,
            self.id,
            reason=reason,
            kill=kill,
            kind=kind,
            requester=self._owner.requester,
            actor=self._owner.requester,
        )

    # -- for the session -----------------------------------------------------------

    def notice(self, notice: Notice) -> None:
        """Take the end of this run (called by the session)."""
        if isinstance(notice, EndedNotice):
            signal = self._owner.signal
            if notice.above is not None and signal.name == notice.parent_id:
                # The order to stop is on another channel and may be behind: whoever looks at this end
                # has to see its own first.
                signal.set(notice.above)
            self._settle(notice, None)

    def lost_contact(self, error: RemitError) -> None:
        """Take note that the end will never be known here (called by the session)."""
        self._settle(None, error)

    def _settle(self, ended: EndedNotice | None, error: RemitError | None) -> None:
        with self._lock:
            if self.is_settled:
                return
            self._ended, self._error = ended, error
            waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter()

    def add_waiter(self, waiter: Callable[[], None]) -> bool:
        """Call a function when this is settled; return False if it already is."""
        with self._lock:
            if self.is_settled:
                return False
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            return True

    def remove_waiter(self, waiter: Callable[[], None]) -> None:
        """Forget a function given to `add_waiter`."""
        with self._lock:
            if self._waiters is not None and waiter in self._waiters:
                self._waiters.remove(waiter)


# One lock for all handles of a process: held for a few instructions, and ten
# thousand handles need no lock each.
_WAITERS_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class CancelReceipt:
    """What is known of a cancel. `accepted` is an acknowledgement, never "it has stopped"."""

    request_id: str
    """Id of the request; it is in the cause of everything that it stopped."""
    target: str
    """The turn, run or session that was asked for."""
    accepted: bool
    """Whether there was something to stop."""
    live: int
    """Runs below the target that had not ended when the cancel was accepted."""
    already: Outcome | None = None
    """Outcome of a target that had ended before."""
    cause: Cause | None = None
    """The cause that is on record, which may be an earlier one."""
    message: str = ""
    """A sentence where nothing was stopped."""
    nodes: tuple[str, ...] = ()
    """Dry run only: ids of what would be stopped."""
    summary: CancelSummary | None = None
    """What became of it; filled in by `quiet`."""
    session: ClientSession | None = None
    """The connection that `quiet` asks through."""

    @property
    def is_quiet(self) -> bool:
        """Tell whether nothing below the target runs any more, as of the last `quiet`."""
        return self.summary is not None and self.summary.quiet

    @property
    def seconds_to_quiet(self) -> float | None:
        """Seconds from acceptance to quiet, or None if that is not known."""
        return None if self.summary is None else self.summary.seconds_to_quiet

    @property
    def runs(self) -> Mapping[str, int]:
        """Runs below the target by outcome; empty before `quiet`."""
        return {} if self.summary is None else self.summary.runs

    async def quiet(self, timeout_s: float = 30.0) -> CancelReceipt:
        """Wait until nothing below the target runs, and return the receipt filled in.

        It watches no signal: it is how a cancelled caller sees its cancel through.

        Args:
            timeout_s: seconds; when they are over the receipt says `is_quiet` false
                and what remains.
        """
        if not self.accepted or self.session is None:
            return self
        import time

        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            summary: CancelSummary | None = await self.session.request("cancel_status", (self.request_id, left))
            if summary is None or summary.quiet or left <= 0:
                return replace(self, summary=summary)


def receipt_of(session: ClientSession, answer: CancelAnswer) -> CancelReceipt:
    """Return the receipt for a coordinator's answer."""
    return CancelReceipt(
        request_id=answer.request_id,
        target=answer.target,
        accepted=answer.accepted,
        live=answer.live,
        already=answer.already,
        cause=answer.cause,
        message=answer.message,
        nodes=answer.nodes,
        session=session,
    )


async def request_cancel(
    session: ClientSession,
    target: str,
    *,
    also: Sequence[str] = (),
    reason: str = "",
    kind: CauseKind = CauseKind.USER_INTERRUPT,
    kill: bool = False,
    actor: str = "",
    user: str = "",
    grace_s: float | None = None,
    dry_run: bool = False,
    surface: str = "",
    requester: str = "",
    trace: str = "",
) -> CancelReceipt:
    """Ask the coordinator to stop something, and `also` something else, and return the one receipt.

    `trace` is the carrier of whoever started this process, for where no span is open.
    """
    span = start_cancel_span(target, reason)
    request = CancelRequest(
        request_id=session.ids.request(),
        target=target,
        also=tuple(also),
        kind=kind,
        reason=reason,
        actor=actor,
        surface=surface or session.surface,
        user=user,
        requester=requester,
        kill=kill,
        grace_s=grace_s,
        dry_run=dry_run,
        trace=span.carrier or current_carrier() or trace,
    )
    # Whoever cancels the turn that it is in wants the receipt all the same.
    outcome = Outcome.FAILED
    try:
        async with shielded(_ANSWER_S):
            answer: CancelAnswer = await session.request("cancel", request)
        outcome = Outcome.SUCCEEDED
        span.link(answer.trace)
        return receipt_of(session, answer)
    finally:
        span.end(outcome)


_ANSWER_S = 10.0
