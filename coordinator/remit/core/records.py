"""Frozen records of approvals, turns and sessions: what is kept of them and what people are shown.

They hold texts, numbers and causes only, so that they pickle, fold from the
journal, and outlive the turns that they are about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from remit.core.cause import Cause
from remit.core.outcome import Outcome

__all__ = ["ApprovalRecord", "SessionView", "TurnRecord", "UnfinishedRun"]


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """One request for approval, and its answer once there is one."""

    id: str
    """`approval_...`."""
    node_id: str
    """The turn or run that asks."""
    turn_id: str
    """The turn whose tree it is in."""
    session_id: str
    """The session of that turn."""
    user: str
    """Who that turn is for; may be empty."""
    attempt: int
    """The attempt of the run that asks; 0 for a turn. An answer is for this attempt alone."""
    action: str
    """What is to be done, as rules match it."""
    details: str
    """A bounded, redacted rendering of what the body said about it; may be empty."""
    path: tuple[str, ...]
    """Names from the turn down to whoever asks."""
    asked_at: float
    """In seconds since 1970."""
    expires_at: float | None = None
    """In seconds since 1970; None if only a deadline ends the wait."""
    decision: str = ""
    """`approved`, `denied`, `expired` or `cancelled`; the empty text while it is open."""
    by: str = ""
    """Who answered: a person, `policy`, or `coordinator`."""
    surface: str = ""
    """Through what: `cli`, `python`, `policy`, `coordinator`."""
    reason: str = ""
    """Free text of whoever answered; may be empty."""
    answered_at: float | None = None
    """In seconds since 1970; None while it is open."""
    request_id: str = ""
    """The request that answered it; the same request sent again is the same answer."""
    cause: Cause | None = None
    """Why it was cancelled, where a cancel did that."""

    @property
    def is_open(self) -> bool:
        """Tell whether it waits for an answer."""
        return not self.decision

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a mapping for JSON."""
        data = _shallow(self)
        data["path"] = list(self.path)
        data["cause"] = None if self.cause is None else self.cause.to_dict()
        return data


class UnfinishedRun(NamedTuple):
    """A run of a turn that did not succeed: by name, outcome and reason."""

    name: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of a session, as later turns and people see it."""

    id: str
    """`turn_...`."""
    name: str
    """Name that the caller gave; may be empty."""
    accepted_at: float
    """In seconds since 1970."""
    started_at: float | None = None
    """In seconds since 1970; None if it never became the active one."""
    ended_at: float | None = None
    """In seconds since 1970; None while it has not ended."""
    outcome: Outcome | None = None
    """How it ended; None while it has not."""
    cause: Cause | None = None
    """Why it was stopped; None if nobody asked."""
    steps: int = 0
    """Runs that the turn itself had delegated by its end, or by the cancel that stopped it."""
    steps_done: int = 0
    """How many of these had ended by then."""
    at_work: tuple[str, ...] = ()
    """Names of those that had not, the first few."""
    progress: str = ""
    """A bounded rendering of the latest partial result of the turn's own body; may be empty."""
    unfinished: tuple[UnfinishedRun, ...] = ()
    """Runs of the turn itself that did not succeed, the first few."""
    unfinished_count: int = 0
    """How many there were in all."""
    tokens: int = 0
    """Spent by it and all below it."""
    cost: float = 0.0
    """The same in money."""
    unconfirmed: bool = False
    """Whether it ended without proof that its body is over."""

    @property
    def is_complete(self) -> bool:
        """Tell whether it may claim success: it succeeded, and so did every run that it delegated."""
        return self.outcome is Outcome.SUCCEEDED and not self.unfinished_count

    def describe(self) -> str:
        """Return one line for people: how it ended, at which step, why."""
        if self.outcome is None:
            return "waits for its session" if self.started_at is None else "at work"
        words = "timed out" if self.outcome is Outcome.TIMED_OUT else self.outcome.value
        if self.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.LOST):
            words += f" {self._where()}"
        if self.cause is not None:
            words += f", {self.cause.describe()}"
        return words

    def _where(self) -> str:
        if self.started_at is None:
            return "before it had started"
        if not self.steps:
            return "before its first step"
        if self.steps_done == self.steps:
            return f"after step {self.steps_done} of {self.steps}"
        names = f" ({', '.join(self.at_work)})" if self.at_work else ""
        return f"at step {self.steps_done + 1} of {self.steps}{names}"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a mapping for JSON."""
        data = _shallow(self)
        data["outcome"] = None if self.outcome is None else self.outcome.value
        data["cause"] = None if self.cause is None else self.cause.to_dict()
        data["at_work"] = list(self.at_work)
        data["unfinished"] = [{**run._asdict(), "outcome": run.outcome.value} for run in self.unfinished]
        data["complete"] = self.is_complete
        data["summary"] = self.describe()
        return data


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as it stands."""

    id: str
    """Chosen by the caller, or `session_...`."""
    turns: int
    """Turns that it has had, open ones included."""
    active: str
    """Id of the turn at work; the empty text if there is none."""
    queued: tuple[str, ...]
    """Turns that wait for it, in their order."""
    last: TurnRecord | None
    """Its latest turn; None if that is not remembered any more."""
    tokens: int
    """Spent by all its turns."""
    cost: float
    """The same in money."""
    max_tokens: int | None
    """Its budget; None if it has none."""
    max_cost: float | None
    """The same in money."""
    first_at: float
    """When its first turn was accepted, in seconds since 1970."""
    last_at: float
    """When its latest turn was accepted, in seconds since 1970."""

    def to_dict(self) -> dict[str, Any]:
        """Return the view as a mapping for JSON."""
        data = asdict(self)
        data["queued"] = list(self.queued)
        data["last"] = None if self.last is None else self.last.to_dict()
        return data


def _shallow(record: ApprovalRecord | TurnRecord) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}
