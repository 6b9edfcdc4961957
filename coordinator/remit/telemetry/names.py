"""Names of spans, attributes and metrics: one table, so that a moving convention is followed in one place.

Sources: `gen_ai.*` follows the OpenTelemetry GenAI conventions
(open-telemetry/semantic-conventions-genai, development status), `process.*` and
`error.type` the registry of semantic-conventions 1.44, both written as literals
because the Python constants are marked as moved. Everything else is ours, `remit.*`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

__all__ = ["METRICS", "SCOPE", "SELDOM", "MetricKind", "MetricName", "ObservedAt", "SpanKind"]

SCOPE = "remit"
"""Name of the instrumentation scope of all that is made here."""


class SpanKind(IntEnum):
    """Kinds of spans, numbered as in OTLP (opentelemetry-proto, trace.proto)."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class ObservedAt(StrEnum):
    """What a body was at when it observed its cancel: a closed set."""

    CHECKPOINT = "checkpoint"
    """Its own code: it computed, slept, or waited for something that is not ours."""
    LOCK_WAIT = "lock_wait"
    """It stood in line for a claim."""
    CHILD_WAIT = "child_wait"
    """It waited for runs that it had delegated."""
    TOOL_WAIT = "tool_wait"
    """It waited for a tool process."""
    APPROVAL_WAIT = "approval_wait"
    """It waited for somebody's decision."""
    PROVIDER_STREAM = "provider_stream"
    """It waited for a model provider."""
    CLEANUP = "cleanup"
    """It was cleaning up already, behind a shield."""


class MetricKind(StrEnum):
    """How values of a metric add up."""

    COUNTER = "counter"
    UP_DOWN = "up_down_counter"
    HISTOGRAM = "histogram"


class MetricName(NamedTuple):
    """What a metric is."""

    kind: MetricKind
    unit: str
    description: str


_SECONDS = "s"

METRICS: dict[str, MetricName] = {
    "remit.turn.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "Turns, from acceptance to the terminal event."),
    "gen_ai.invoke_agent.duration": MetricName(
        MetricKind.HISTOGRAM, _SECONDS, "Runs, from acceptance to the terminal event."
    ),
    "remit.runs.queued": MetricName(MetricKind.UP_DOWN, "{run}", "Runs that were accepted and have not begun."),
    "remit.runs.active": MetricName(MetricKind.UP_DOWN, "{run}", "Runs that have begun and not ended."),
    "remit.run.queue.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "From acceptance to the first start."),
    "remit.lock.wait.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "Waits for claims, by result."),
    "remit.lock.hold.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "Leases, from grant to release."),
    "remit.lock.waiters": MetricName(MetricKind.UP_DOWN, "{claim}", "Claims that stand in line."),
    "remit.approval.wait.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "Waits for approvals, by decision."),
    "remit.approvals.pending": MetricName(MetricKind.UP_DOWN, "{approval}", "Approvals that wait for an answer."),
    "remit.process.duration": MetricName(MetricKind.HISTOGRAM, _SECONDS, "Tool processes, until nothing was left."),
    "remit.process.kills": MetricName(MetricKind.COUNTER, "{process}", "Tool processes that we stopped, by signal."),
    "remit.cancel.requests": MetricName(MetricKind.COUNTER, "{request}", "Cancels that were accepted, by source."),
    "remit.cancel.quiesce.duration": MetricName(
        MetricKind.HISTOGRAM, _SECONDS, "From the acceptance of a cancel until nothing below its target runs."
    ),
    "remit.cancel.delivery.duration": MetricName(
        MetricKind.HISTOGRAM, _SECONDS, "From the order until the end of what it stopped was reported."
    ),
    "remit.cancel.observation.duration": MetricName(
        MetricKind.HISTOGRAM, _SECONDS, "In the host, from receipt until the body observed it."
    ),
    "remit.cancel.cleanup.duration": MetricName(
        MetricKind.HISTOGRAM, _SECONDS, "In the host, from the observation to the end of the body."
    ),
    "remit.cancel.escalations": MetricName(MetricKind.COUNTER, "{escalation}", "Graces that ran out."),
    "remit.cancel.leftovers": MetricName(MetricKind.COUNTER, "{leftover}", "What a cancel could not prove gone."),
    "remit.effects.uncertain": MetricName(MetricKind.COUNTER, "{effect}", "Effects whose end is not known."),
    "remit.reports.refused": MetricName(MetricKind.COUNTER, "{report}", "Reports that came after a terminal event."),
    "remit.telemetry.dropped": MetricName(MetricKind.COUNTER, "{item}", "Spans and records that were not kept."),
}
"""Every metric, by name. Attributes never hold ids: what they hold is small closed sets."""

SELDOM: tuple[tuple[str, dict[str, str]], ...] = (
    ("remit.cancel.leftovers", {}),
    ("remit.effects.uncertain", {}),
    ("remit.reports.refused", {}),
    ("remit.telemetry.dropped", {}),
    *(("remit.cancel.escalations", {"step": step}) for step in ("process", "drain_host", "kill_host")),
)
"""Counters that alerts look at. They begin with 0: the increase of a series that begins with 1 is none."""
