"""Spans of turns, runs and attempts from what was remembered of them; pure."""

from __future__ import annotations

from remit.core.events import AttemptEnded, RunEnded, TurnEnded
from remit.core.outcome import Outcome
from remit.telemetry.names import SpanKind
from remit.telemetry.nodes import NodeFacts
from remit.telemetry.record import Attributes, SpanEvent, SpanRecord

__all__ = ["attempt_span", "run_span", "turn_span"]


def turn_span(turn: NodeFacts, event: TurnEnded, error: str, stop: Attributes) -> SpanRecord:
    """Return the span of a turn.

    Args:
        turn: what was remembered of it.
        event: its end.
        error: its `error.type`, or the empty text.
        stop: what is said of the cancel that it ended by.
    """
    name = turn.name or "turn"
    attributes: Attributes = {
        **turn.common(),
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name,
        "gen_ai.conversation.id": turn.session_id,
        # For Phoenix, which has kinds of its own and shows what it does not know as unknown.
        "openinference.span.kind": "CHAIN",
        "remit.surface": turn.surface,
        "remit.outcome": event.outcome.value,
        **stop,
    }
    return _span(turn, f"invoke_workflow {name}", event.at, attributes, error, SpanKind.INTERNAL)


def run_span(run: NodeFacts, event: RunEnded, error: str, stop: Attributes, *, keeps_arguments: bool) -> SpanRecord:
    """Return the span of a run as the coordinator sees it; arguments as for `turn_span`."""
    attributes: Attributes = {
        **run.common(),
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "remit",
        "gen_ai.agent.id": run.id,
        "remit.run.name": run.name,
        "remit.outcome": event.outcome.value,
        "remit.attempts": event.attempt,
        "remit.placement.host_id": run.host_id,
        **stop,
    }
    if run.started_at is not None:
        attributes["remit.queue.duration"] = round(run.started_at - run.accepted_at, 6)
    if event.blocked_by:
        attributes["remit.blocked_by"] = event.blocked_by
    if event.unconfirmed:
        attributes["remit.unconfirmed"] = True
    if keeps_arguments and run.arguments:
        attributes["remit.arguments"] = run.arguments
    return _span(run, f"invoke_agent {run.agent}", event.at, attributes, error, SpanKind.CLIENT)


def _span(node: NodeFacts, name: str, at: float, attributes: Attributes, error: str, kind: SpanKind) -> SpanRecord:
    return SpanRecord(
        name,
        node.trace,
        node.span,
        node.parent_span,
        node.accepted_at,
        max(node.accepted_at, at),
        attributes,
        kind=kind,
        error=error,
        events=node.events,
        links=node.links,
        is_sampled=node.is_sampled,
    )


def attempt_span(
    run: NodeFacts, event: RunEnded | AttemptEnded, outcome: Outcome, error: str, word: str, stop: Attributes
) -> SpanRecord:
    """Return the span of one attempt: by the host's clock if it told, else by the coordinator's.

    Args:
        run: what was remembered of the run.
        event: the end of the attempt, or of the run with it.
        outcome: as the journal has it.
        error: its `error.type`, or the empty text.
        word: the host's own word for how the body ended.
        stop: what is said of the cancel that it ended by.
    """
    timing = run.timing
    start = timing.began_at if timing is not None else run.attempt_at
    end = timing.ended_at if timing is not None else run.body_ended_at or event.at
    attributes: Attributes = {
        **run.common(),
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "remit",
        "remit.attempt": run.attempt,
        "remit.attempt.report": word,
        "remit.placement.host_id": run.host_id,
        "remit.outcome": outcome.value,
        **stop,
    }
    events: list[SpanEvent] = []
    if timing is not None and timing.told_s is not None:
        observed: Attributes = {
            "remit.cancel.observed_at": timing.where,
            "remit.cancel.observation_s": round(timing.observation_s, 6),
        }
        if "remit.cancel.id" in stop:
            observed["remit.cancel.id"] = stop["remit.cancel.id"]
        events.append(SpanEvent(timing.observed_at, "remit.cancel.observed", observed))
    return SpanRecord(
        f"invoke_agent {run.agent}",
        run.trace,
        run.attempt_span(run.attempt),
        run.span,
        start,
        max(start, end),
        attributes,
        error=error,
        events=events,
        is_sampled=run.is_sampled,
    )
