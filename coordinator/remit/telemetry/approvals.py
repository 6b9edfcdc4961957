"""Spans of approvals: from the question to its one answer."""

from __future__ import annotations

from remit.core.events import ApprovalAnswered, ApprovalRequested
from remit.telemetry.nodes import NodeFacts
from remit.telemetry.record import Attributes, Batch, SpanRecord, span_id

__all__ = ["ApprovalSpans"]

_KIND_CHARS = 64
_PERSON = "human"


class ApprovalSpans:
    """Follows the questions of all turns and runs; pure.

    Args:
        keeps_arguments: whether the whole action becomes an attribute; its first word always does.
    """

    def __init__(self, *, keeps_arguments: bool = False) -> None:
        self._keeps_arguments = keeps_arguments
        self._open: dict[str, dict[str, ApprovalRequested]] = {}

    def asked(self, batch: Batch, owner: NodeFacts, event: ApprovalRequested) -> None:
        """Take a question."""
        self._open.setdefault(owner.id, {})[event.approval_id] = event
        batch.measure("remit.approvals.pending", 1)

    def answered(self, batch: Batch, owner: NodeFacts, event: ApprovalAnswered) -> None:
        """Take its answer."""
        waiting = self._open.get(owner.id, {})
        asked = waiting.pop(event.approval_id, None)
        if not waiting:
            self._open.pop(owner.id, None)
        if asked is None:
            return
        who = ""
        if event.decision in ("approved", "denied"):
            who = "policy" if event.surface == "policy" else _PERSON
        self._close(batch, owner, asked, event.at, event.decision, who)

    def end(self, batch: Batch, owner: NodeFacts, at: float) -> None:
        """Close what an owner that has ended still asks for."""
        for asked in self._open.pop(owner.id, {}).values():
            self._close(batch, owner, asked, at, "cancelled", "")

    def _close(
        self, batch: Batch, owner: NodeFacts, asked: ApprovalRequested, at: float, decision: str, who: str
    ) -> None:
        attributes: Attributes = {
            **owner.common(),
            "remit.approval.id": asked.approval_id,
            "remit.approval.kind": asked.action.split(maxsplit=1)[0][:_KIND_CHARS] if asked.action.strip() else "",
            "remit.approval.decision": decision,
        }
        if who:
            attributes["remit.approval.actor.type"] = who
        if self._keeps_arguments:
            attributes["remit.approval.action"] = asked.action
        # No answer is an error of the wait: what comes of it is told by the run.
        span = SpanRecord(
            "approval.wait",
            owner.trace,
            span_id("approval.wait", asked.approval_id),
            owner.here,
            asked.at,
            max(asked.at, at),
            attributes,
            is_sampled=owner.is_sampled,
        )
        batch.spans.append(span)
        batch.measure("remit.approvals.pending", -1)
        batch.measure("remit.approval.wait.duration", span.seconds, decision=decision)
