"""What a host does for the spans of others: a place in the trace, and our ids on them.

Our own spans are made by the coordinator out of what hosts report. Agents and
libraries make spans in the host itself (a provider's client, a framework): they get
the attempt as their parent, `remit.run.id` as an attribute, and, unless the agent's
code has set up OpenTelemetry itself, an SDK from the standard variables.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remit.telemetry.carrier import format_carrier, read_carrier
from remit.telemetry.files import SegmentFile, traces_folder
from remit.telemetry.names import SpanKind
from remit.telemetry.otlp import encode_spans
from remit.telemetry.record import SpanEvent, SpanLink, SpanRecord, span_id
from remit.telemetry.settings import TelemetrySettings

__all__ = ["HostTelemetry", "attempt_carrier"]

logger = logging.getLogger("remit.telemetry")

_current_run: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("remit_run", default=None)
FLUSH_S = 1.0
"""Seconds that a flush before the end of a host may take."""


def attempt_carrier(carrier: str, run_id: str, attempt: int) -> str:
    """Return the trace context of an attempt: what its body delegates, asks or calls comes below it."""
    parent = read_carrier(carrier)
    if parent is None:
        return ""
    return format_carrier(parent.trace_id, span_id("attempt", run_id, attempt), is_sampled=parent.is_sampled)


class HostTelemetry:
    """Spans that agents and libraries make in this process.

    Args:
        workspace: the workspace's folder.
        host_id: this host.
        own_process: whether the process is ours; in another's nothing is set up.
    """

    def __init__(self, workspace: Path, host_id: str, *, own_process: bool) -> None:
        self._workspace = workspace
        self._host_id = host_id
        self._own_process = own_process
        self._provider: Any = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Set up what spans of the code that was just imported need; called after each import of an agent."""
        if "opentelemetry.trace" not in sys.modules or self._provider is not None:
            return
        try:
            self._set_up()
        except Exception:
            # A broken exporter or SDK is no reason for a run not to begin.
            logger.warning("spans of agents cannot be exported", exc_info=True)

    def _set_up(self) -> None:
        from opentelemetry import trace

        provider: Any = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            settings = TelemetrySettings.from_env(os.environ)
            if not (self._own_process and (settings.files or settings.traces)):
                return
            provider = _own_provider(settings, self._workspace, self._host_id)
            provider.add_span_processor(_stamp())
            trace.set_tracer_provider(provider)
        elif hasattr(provider, "add_span_processor"):
            # Set up by the agent's code, which knows where its spans shall go.
            provider.add_span_processor(_stamp())
        self._provider = provider

    def carrier(self, carrier: str, run_id: str, attempt: int) -> str:
        """Return the trace context of an attempt where spans are made here; else the empty text."""
        return attempt_carrier(carrier, run_id, attempt) if "opentelemetry.trace" in sys.modules else ""

    @contextmanager
    def inside(self, carrier: str, run_id: str, turn_id: str, attempt: int) -> Generator[None]:
        """Make an attempt the parent of all spans made in a block."""
        _current_run.set((run_id, turn_id))
        attached: Any = None
        if "opentelemetry.trace" in sys.modules:
            attached = _attach(attempt_carrier(carrier, run_id, attempt))
        try:
            yield
        finally:
            # Not by a token: a body that is thrown away with its loop is closed in another context.
            _current_run.set(None)
            if attached is not None:
                from opentelemetry import context

                context.detach(attached)

    def flush_soon(self) -> None:
        """Hand on what has ended, in a thread of its own: a cancel may be followed by a kill."""
        if self._provider is not None and self._lock.acquire(blocking=False):
            threading.Thread(target=self._flush_and_release, name="remit-flush", daemon=True).start()

    def _flush_and_release(self) -> None:
        try:
            self.flush(FLUSH_S)
        finally:
            self._lock.release()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Hand on what has ended, within a bound; a collector that does not answer costs that and no more."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is None:
            return
        try:
            flush(int(timeout_s * 1000))
        except Exception:
            logger.debug("spans of agents could not be flushed", exc_info=True)


def _attach(carrier: str) -> Any:
    parent = read_carrier(carrier)
    if parent is None:
        return None
    from opentelemetry import context, trace

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else trace.TraceFlags.DEFAULT)
    where = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(where)))


def _own_provider(settings: TelemetrySettings, workspace: Path, host_id: str) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from remit.telemetry.collectors import load_exporters

    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "remit"), "remit.host.id": host_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporters = load_exporters("traces", settings.traces)
    if settings.files and workspace.is_dir():
        exporters.append(_file_exporter(workspace, settings.max_bytes))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _stamp() -> Any:
    """Return a processor that writes the run on every span that begins inside one."""
    from opentelemetry.sdk.trace import SpanProcessor

    class Stamp(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            run = _current_run.get()
            if run is not None:
                span.set_attribute("remit.run.id", run[0])
                span.set_attribute("remit.turn.id", run[1])

    return Stamp()


def _file_exporter(workspace: Path, max_bytes: int) -> Any:
    """Return an exporter of the SDK that writes where `remit trace` reads."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    lines = SegmentFile(traces_folder(workspace), "host", max_bytes)

    class FileExporter(SpanExporter):
        def export(self, spans: Any) -> Any:
            by_scope: dict[str, list[SpanRecord]] = {}
            for span in spans:
                scope = span.instrumentation_scope.name if span.instrumentation_scope else ""
                by_scope.setdefault(scope, []).append(_record_of(span))
            try:
                for scope, records in by_scope.items():
                    lines.append(encode_spans(records, dict(spans[0].resource.attributes), scope=scope))
            except OSError:
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            """No file stays open."""

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True

    return FileExporter()


def _record_of(span: Any) -> SpanRecord:
    """Return a span of the SDK as a record."""
    context = span.get_span_context()
    attributes = dict(span.attributes or {})
    error = ""
    if span.status.status_code.name == "ERROR":
        error = str(attributes.pop("error.type", "error"))
    return SpanRecord(
        span.name,
        context.trace_id,
        context.span_id,
        span.parent.span_id if span.parent is not None else 0,
        span.start_time / 1e9,
        span.end_time / 1e9,
        attributes,
        # The SDK counts its kinds from 0.
        kind=SpanKind(min(3, span.kind.value + 1)),
        error=error,
        events=[SpanEvent(e.timestamp / 1e9, e.name, dict(e.attributes or {})) for e in span.events],
        links=[
            SpanLink(each.context.trace_id, each.context.span_id, dict(each.attributes or {})) for each in span.links
        ],
    )
