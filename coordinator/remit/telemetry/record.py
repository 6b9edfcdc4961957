"""Spans, log records and measurements as plain data, before any exporter sees them.

**Invariants**

1. A record is complete: it is made when its span has ended, never before.
2. Ids of spans are computed from the names of what they stand for, so that the
   coordinator and a host name the same span without a message about it, and a
   restarted coordinator goes on with the ids of its earlier life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from remit.telemetry.names import SpanKind

__all__ = [
    "Attributes",
    "Batch",
    "LogRecord",
    "Measurement",
    "SpanEvent",
    "SpanLink",
    "SpanRecord",
    "span_id",
    "trace_id",
]

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = dict[str, Value]


def trace_id(turn_id: str) -> int:
    """Return the trace of a turn whose holder has none: 128 bits, never zero.

    A hash of an id with 50 random bits is as good as random, for samplers too.
    """
    return int.from_bytes(blake2b(turn_id.encode(), digest_size=16, person=b"remit-trace").digest()) or 1


def span_id(*names: object) -> int:
    """Return the id of the span that these names stand for: 64 bits, never zero."""
    text = "\0".join(map(str, names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"remit-span").digest()) or 1


class SpanEvent(NamedTuple):
    """Something that happened within a span."""

    at: float
    """In seconds since 1970."""
    name: str
    attributes: Attributes


class SpanLink(NamedTuple):
    """A reference to another span, maybe of another trace."""

    trace_id: int
    span_id: int
    attributes: Attributes


@dataclass(slots=True)
class SpanRecord:
    """One span that has ended."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0 for the root of a trace."""
    start: float
    """In seconds since 1970."""
    end: float
    """In seconds since 1970, never before `start`."""
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    error: str = ""
    """The `error.type`; the status is ERROR if there is one, else UNSET. OK is never used."""
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])
    links: list[SpanLink] = field(default_factory=list[SpanLink])
    is_sampled: bool = True
    """Whether it goes to collectors; the workspace's own files keep it anyway."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def run_id(self) -> str:
        """The turn or run that it belongs to; may be empty."""
        return str(self.attributes.get("remit.run.id") or self.attributes.get("remit.turn.id") or "")


class LogRecord(NamedTuple):
    """One step of a cancel; kept also where its trace is not sampled."""

    at: float
    """In seconds since 1970."""
    name: str
    """Name of the event, `remit.cancel.*`."""
    trace_id: int
    span_id: int
    is_warning: bool
    attributes: Attributes


class Measurement(NamedTuple):
    """One value of a metric of `names.METRICS`."""

    name: str
    value: float
    attributes: Mapping[str, str]


_METRIC_ATTRIBUTES = {"agent": "gen_ai.agent.name", "error_type": "error.type"}


@dataclass(slots=True)
class Batch:
    """What a piece of history has led to."""

    spans: list[SpanRecord] = field(default_factory=list[SpanRecord])
    logs: list[LogRecord] = field(default_factory=list[LogRecord])
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    is_measured: bool = True
    """Whether anybody wants measurements."""

    def measure(self, name: str, value: float, /, **attributes: str) -> None:
        """Add a value of a metric, with attributes out of small closed sets."""
        if not self.is_measured:
            return
        named = {_METRIC_ATTRIBUTES.get(key, key): text for key, text in attributes.items() if text}
        self.measurements.append(Measurement(name, value, named))
