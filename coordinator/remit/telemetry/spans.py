"""Spans of the process that one's own code runs in, through the OpenTelemetry API it has set up.

Where no SDK is set up nothing is imported and nothing is made; in a user's process
nothing is ever set up here. The context managers of OpenTelemetry are not used: they
leave a cancelled span UNSET without a word, or mark it ERROR, depending on which it is.

**The rule for the status**: UNSET and `remit.outcome` for what was stopped on purpose,
ERROR and `error.type` where something failed; never OK. Whatever ends a block, its
span ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from remit.core.cause import Cause
from remit.core.errors import RunCancelled, TurnCancelled
from remit.core.outcome import Outcome
from remit.telemetry.carrier import carrier_of, read_carrier
from remit.telemetry.names import SCOPE
from remit.telemetry.nodes import cause_attributes, error_type_of

__all__ = ["NodeSpan", "span", "start_cancel_span", "start_turn_span"]

logger = logging.getLogger("remit.telemetry")

_STOPPED = (TurnCancelled, RunCancelled, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class NodeSpan:
    """A span that is ended by hand; does nothing where there is no SDK.

    Args:
        span: an OpenTelemetry span, or None.
    """

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def carrier(self) -> str:
        """The trace context to send with what is asked for here; the empty text without a span."""
        context = None if self._span is None else self._span.get_span_context()
        # A program may have loaded an SDK and not set it up: its spans are nowhere.
        return carrier_of(context) if context is not None and context.is_valid else ""

    def event(self, name: str, cause: Cause | None = None) -> None:
        """Note something that happened while the span was open."""
        if self._span is not None:
            self._span.add_event(name, {} if cause is None else cause_attributes(cause, cause.request_id))

    def link(self, carrier: str) -> None:
        """Link to another span, known by its carrier."""
        target = read_carrier(carrier)
        if self._span is None or target is None:
            return
        from opentelemetry.trace import SpanContext, TraceFlags

        self._span.add_link(
            SpanContext(target.trace_id, target.span_id, is_remote=True, trace_flags=TraceFlags(target.is_sampled))
        )

    def end(
        self, outcome: Outcome, *, cause: Cause | None = None, error_type: str = "", unconfirmed: bool = False
    ) -> None:
        """End the span with its outcome. Telemetry that fails changes nothing else."""
        if self._span is None:
            return
        ending, self._span = self._span, None
        error = error_type_of(outcome, error_type, unconfirmed=unconfirmed)
        attributes = {} if cause is None else cause_attributes(cause, cause.request_id)
        _finish(ending, {**attributes, "remit.outcome": outcome.value}, error)


def _finish(ending: Any, attributes: Mapping[str, Any], error: str) -> None:
    """End a span: the one place where that is done."""
    try:
        for key, value in attributes.items():
            ending.set_attribute(key, value)
        if error:
            from opentelemetry.trace import Status, StatusCode

            ending.set_attribute("error.type", error)
            ending.set_status(Status(StatusCode.ERROR))
    except Exception:
        # Processors and exporters are the user's; the outcome stands without them.
        logger.debug("a span could not be completed", exc_info=True)
    finally:
        ending.end()


@contextmanager
def span(name: str, /, attributes: Mapping[str, Any] | None = None) -> Generator[NodeSpan]:
    """Make a span of a block, as the current one, and end it by the rule whatever ends the block.

    Args:
        name: a word of few: names of files, ids and so on belong into attributes.
        attributes: what is known when it begins.

    Cancellation:
        Passes, and is no error: the span has `remit.outcome` cancelled and the cause.
    """
    tracer = _tracer()
    if tracer is None:
        yield NodeSpan()
        return
    from opentelemetry import context, trace

    made = tracer.start_span(name, attributes=dict(attributes or {}))
    token = context.attach(trace.set_span_in_context(made))
    outcome, error, cause = Outcome.SUCCEEDED, "", None
    try:
        yield NodeSpan(made)
    except _STOPPED as stopped:
        outcome = Outcome.CANCELLED
        cause = getattr(stopped, "cause", None)
        raise
    except BaseException as raised:
        outcome = Outcome.TIMED_OUT if isinstance(raised, TimeoutError) else Outcome.FAILED
        error = error_type_of(outcome, type(raised).__name__)
        raise
    finally:
        context.detach(token)
        why = {} if cause is None else cause_attributes(cause, cause.request_id)
        _finish(made, {**why, "remit.outcome": outcome.value}, error)


def _tracer() -> Any:
    """Return a tracer if this process has set up an SDK, else None; imports nothing by itself."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer(SCOPE)


def start_turn_span(turn_id: str, *, name: str, session_id: str) -> NodeSpan:
    """Start the holder's span of a turn, below whatever span the caller has open.

    The coordinator's span of the turn comes below it.
    """
    tracer = _tracer()
    if tracer is None:
        return NodeSpan()
    from opentelemetry.trace import SpanKind

    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name or "turn",
        "gen_ai.conversation.id": session_id,
        "remit.turn.id": turn_id,
    }
    made = tracer.start_span(f"invoke_workflow {name or 'turn'}", kind=SpanKind.CLIENT, attributes=attributes)
    return NodeSpan(made)


def start_cancel_span(target: str, reason: str) -> NodeSpan:
    """Start the span of whoever asks for a cancel, in its own trace; the cancel's own way is in the target's."""
    tracer = _tracer()
    if tracer is None:
        return NodeSpan()
    from opentelemetry.trace import SpanKind

    attributes = {"remit.cancel.target.id": target, "remit.cancel.reason": reason}
    return NodeSpan(tracer.start_span("cancel.ask", kind=SpanKind.CLIENT, attributes=attributes))
