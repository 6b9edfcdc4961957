"""One span a turn and one a run, ended in every case, with the outcome on them.

Where no OpenTelemetry SDK is set up in the process nothing is imported and nothing
is made. The rule for the status: UNSET and `remit.outcome` for what was stopped on
purpose, ERROR where something failed, timed out by its own deadline, was lost, or
is not confirmed. The context managers of OpenTelemetry are not used: they leave a
cancelled span UNSET or mark it ERROR, depending on which one it is.

Source: names and attributes follow the OpenTelemetry GenAI conventions
(open-telemetry/semantic-conventions-genai, development status) as literals.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from remit.core.cause import Cause
from remit.core.outcome import Outcome

__all__ = ["NodeSpan", "start_run_span", "start_turn_span"]

logger = logging.getLogger("remit.telemetry")

_ERRORS = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)


class NodeSpan:
    """The span of one turn or run; does nothing where there is no SDK.

    Args:
        span: an OpenTelemetry span, or None.
    """

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def carrier(self) -> str:
        """The `traceparent` to hand to what is started below; the empty text without a span."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        flags = int(context.trace_flags)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def event(self, name: str, cause: Cause | None = None) -> None:
        """Note something that happened while the span was open."""
        if self._span is not None:
            self._span.add_event(name, _cause_attributes(cause))

    def end(
        self,
        outcome: Outcome,
        *,
        cause: Cause | None = None,
        error_type: str = "",
        unconfirmed: bool = False,
    ) -> None:
        """End the span with its outcome. Telemetry that fails changes nothing else."""
        if self._span is None:
            return
        span, self._span = self._span, None
        try:
            span.set_attribute("remit.outcome", outcome.value)
            for key, value in _cause_attributes(cause).items():
                span.set_attribute(key, value)
            if outcome in _ERRORS or unconfirmed:
                _mark_error(span, error_type or ("timeout" if outcome is Outcome.TIMED_OUT else outcome.value))
        except Exception:
            # Exporters and processors are the user's; the outcome stands without them.
            logger.debug("a span could not be completed", exc_info=True)
        finally:
            span.end()


def _mark_error(span: Any, error_type: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR))


def _cause_attributes(cause: Cause | None) -> dict[str, str]:
    if cause is None:
        return {}
    return {
        "remit.cancel.id": cause.request_id,
        "remit.cancel.kind": cause.kind.value,
        "remit.cancel.origin": cause.origin,
        "remit.cancel.source": cause.surface,
        "remit.cancel.reason": cause.reason,
    }


def _tracer() -> Any:
    """Return a tracer if this process has set up an SDK, else None; imports nothing by itself."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer("remit")


def _parent(carrier: str) -> Any:
    """Return the context behind a `traceparent`, or None for the current one."""
    if not carrier:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": carrier})


def start_turn_span(turn_id: str, *, name: str, session_id: str) -> NodeSpan:
    """Start the span of a turn, below whatever span the caller has open."""
    tracer = _tracer()
    if tracer is None:
        return NodeSpan()
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name or "turn",
        "gen_ai.conversation.id": session_id,
        "remit.turn.id": turn_id,
    }
    return NodeSpan(tracer.start_span(f"invoke_workflow {name or 'turn'}", attributes=attributes))


def start_run_span(run_id: str, *, turn_id: str, parent_id: str, agent: str, attempt: int, carrier: str) -> NodeSpan:
    """Start the span of one attempt of a run, below the span that delegated it."""
    tracer = _tracer()
    if tracer is None:
        return NodeSpan()
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": agent,
        "remit.run.id": run_id,
        "remit.parent_run.id": parent_id,
        "remit.turn.id": turn_id,
        "remit.attempt": attempt,
    }
    return NodeSpan(tracer.start_span(f"invoke_agent {agent}", context=_parent(carrier), attributes=attributes))
