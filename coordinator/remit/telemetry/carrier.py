"""Trace context in our own messages: one text, as the W3C headers would carry it.

Ray's own tracing hook stays off: its hidden argument breaks streaming actor calls.
The text has one or two lines: `traceparent`, and `tracestate` where there is one. It
is read here without OpenTelemetry, which a process may not have loaded.

Source: W3C Trace Context (https://www.w3.org/TR/trace-context/), version 00.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

__all__ = ["Parent", "current_carrier", "format_carrier", "read_carrier"]

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Parent(NamedTuple):
    """The span that something came from."""

    trace_id: int
    span_id: int
    is_sampled: bool


def format_carrier(trace_id: int, span_id: int, *, is_sampled: bool = True) -> str:
    """Return the `traceparent` of a span."""
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if is_sampled else '00'}"


def read_carrier(text: str) -> Parent | None:
    """Return the span that a carrier names; None for an empty or an unusable one."""
    found = _TRACEPARENT.match(text)
    if found is None:
        return None
    trace_id, span_id = int(found[1], 16), int(found[2], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[3], 16) & 1))


def current_carrier() -> str:
    """Return the carrier of the caller's current span; the empty text where there is none.

    Imports nothing: where nobody has loaded OpenTelemetry nobody has a span.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return carrier_of(context)


def carrier_of(context: Any) -> str:
    """Return the carrier of an OpenTelemetry span context.

    Of baggage nothing is sent: it would reach providers and tools in clear.
    """
    head = format_carrier(context.trace_id, context.span_id, is_sampled=context.trace_flags.sampled)
    state = context.trace_state.to_header() if context.trace_state else ""
    return f"{head}\n{state}" if state else head
