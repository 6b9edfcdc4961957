"""What is remembered of a turn or run while its span is open."""

from __future__ import annotations

from typing import NamedTuple

from remit.core.cause import Cause, CauseKind
from remit.core.events import RunAccepted, TurnAccepted
from remit.core.messages import BodyTiming, ReportEnded
from remit.core.outcome import Outcome
from remit.telemetry.carrier import Parent, read_carrier
from remit.telemetry.record import Attributes, SpanEvent, SpanLink, span_id, trace_id

__all__ = ["NodeFacts", "ProcessFacts", "cause_attributes", "error_type_of", "source_of"]

_SOURCES = {
    CauseKind.USER_INTERRUPT: "user",
    CauseKind.DEADLINE: "deadline",
    CauseKind.ATTEMPT_TIMEOUT: "deadline",
    CauseKind.BUDGET: "budget",
    CauseKind.PARENT_FAILED: "failure",
    CauseKind.PARENT_LOST: "parent",
    CauseKind.SHUTDOWN: "shutdown",
    CauseKind.WORKER_MOVED: "failure",
}
_PROTOCOLS = ("mcp", "a2a")


class ProcessFacts(NamedTuple):
    """A tool process whose end was not told."""

    started_at: float
    program: str
    handle: str
    background: bool


class NodeFacts:
    """A turn or run that has not ended, as its spans will need it."""

    __slots__ = (
        "accepted_at",
        "agent",
        "arguments",
        "attempt",
        "attempt_at",
        "body_ended_at",
        "escalated",
        "events",
        "host_id",
        "id",
        "is_sampled",
        "is_turn",
        "links",
        "name",
        "parent_id",
        "parent_span",
        "processes",
        "report",
        "reported_at",
        "session_id",
        "span",
        "started_at",
        "surface",
        "timing",
        "trace",
        "turn_id",
        "user",
    )

    def __init__(self, node_id: str, turn_id: str, at: float) -> None:
        self.id = node_id
        self.turn_id = turn_id
        self.is_turn = node_id == turn_id
        self.span = span_id("turn" if self.is_turn else "run", node_id)
        self.accepted_at = at
        self.parent_id = ""
        self.parent_span = 0
        self.trace = 0
        self.is_sampled = True
        self.name = ""
        self.agent = ""
        self.session_id = ""
        self.user = ""
        self.surface = ""
        self.arguments = ""
        self.started_at: float | None = None
        self.attempt = 0
        self.attempt_at = at
        self.host_id = ""
        self.body_ended_at: float | None = None
        self.escalated = ""
        self.report: ReportEnded | None = None
        self.reported_at = 0.0
        self.timing: BodyTiming | None = None
        self.processes: dict[int, ProcessFacts] = {}
        self.events: list[SpanEvent] = []
        self.links: list[SpanLink] = []

    @classmethod
    def of_turn(cls, event: TurnAccepted, *, is_sampled: bool) -> NodeFacts:
        """Return the facts of a turn that was accepted, in its holder's trace if that has one."""
        turn = cls(event.node_id, event.node_id, event.at)
        parent = read_carrier(event.trace)
        turn.trace = parent.trace_id if parent else trace_id(event.node_id)
        turn.parent_span = parent.span_id if parent else 0
        turn.is_sampled = parent.is_sampled if parent else is_sampled
        turn.name, turn.session_id, turn.user, turn.surface = event.name, event.session_id, event.user, event.surface
        return turn

    @classmethod
    def of_run(cls, event: RunAccepted, parent: NodeFacts | None) -> NodeFacts:
        """Return the facts of a run that was accepted, below what its parent was doing."""
        run = cls(event.node_id, event.turn_id, event.at)
        run.parent_id, run.agent, run.name, run.arguments = event.parent_id, event.agent, event.name, event.arguments
        inner = read_carrier(event.trace)
        if parent is None:
            run.trace, run.parent_span = trace_id(event.turn_id), 0
        else:
            run.trace, run.parent_span, run.is_sampled = parent.trace, parent.here, parent.is_sampled
        if inner is not None and inner.trace_id == run.trace:
            run.parent_span = inner.span_id
        elif inner is not None:
            run.links.append(link_to(inner, "requested_by"))
        return run

    @property
    def here(self) -> int:
        """The span below which everything happens that it does now."""
        if self.is_turn or not self.attempt:
            return self.span
        return self.attempt_span(self.attempt)

    def attempt_span(self, attempt: int) -> int:
        """Return the span of one attempt, in its host."""
        return span_id("attempt", self.id, attempt)

    def common(self) -> Attributes:
        """Return the attributes that all spans of this turn or run have."""
        found: Attributes = {"remit.turn.id": self.turn_id}
        if not self.is_turn:
            found["remit.run.id"] = self.id
            found["remit.parent_run.id"] = self.parent_id
            found["gen_ai.agent.name"] = self.agent
        return found


def link_to(target: Parent, role: str) -> SpanLink:
    """Return a link; `role` says what the other span is to this one."""
    return SpanLink(target.trace_id, target.span_id, {"remit.link": role})


def source_of(cause: Cause) -> str:
    """Return who a cancel came from, in one of a few words fit for metrics."""
    if cause.kind is CauseKind.USER_INTERRUPT:
        if cause.surface in _PROTOCOLS:
            return cause.surface
        return "parent" if cause.actor.startswith(("run_", "turn_")) else "user"
    return _SOURCES[cause.kind]


def cause_attributes(cause: Cause, cancel_id: str) -> Attributes:
    """Return what spans say of the cause of a stop."""
    return {
        "remit.cancel.id": cancel_id or cause.request_id,
        "remit.cancel.kind": cause.kind.value,
        "remit.cancel.source": source_of(cause),
        "remit.cancel.surface": cause.surface,
        "remit.cancel.requester": cause.actor,
        "remit.cancel.origin": cause.origin,
        "remit.cancel.reason": cause.reason,
    }


def error_type_of(outcome: Outcome, error_type: str = "", *, unconfirmed: bool = False) -> str:
    """Return the `error.type` of a node's span, or the empty text for status UNSET.

    What was stopped on purpose is no error; a stop that is not confirmed is one,
    and so is the one node whose own deadline passed.
    """
    if unconfirmed:
        return "cancel_timeout"
    match outcome:
        case Outcome.FAILED:
            return {"HostNotStarted": "start_failed", "HostLost": "worker_lost"}.get(error_type, error_type or "failed")
        case Outcome.TIMED_OUT:
            return "timeout"
        case Outcome.LOST:
            return "worker_lost"
        case Outcome.SUCCEEDED | Outcome.CANCELLED:
            return ""
