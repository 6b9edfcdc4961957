"""Sends to collectors with the OpenTelemetry SDK, in our own processes only.

Loaded only where a variable asks for an exporter. Queues, batches, time-outs and
retries are those of the SDK, set by its standard variables; a collector that is
dead, slow or missing fills a bounded queue whose overflow is counted here.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remit.core.texts import clean_text
from remit.telemetry.names import METRICS, SCOPE, SELDOM, MetricKind, SpanKind
from remit.telemetry.record import Batch, LogRecord, Measurement, SpanRecord
from remit.telemetry.settings import TelemetrySettings

__all__ = ["CollectorSink", "load_exporters"]

logger = logging.getLogger("remit.telemetry")

QUEUE_SPANS = 65_536
"""Spans that may wait for a collector, unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise: ten thousand
runs that end at once give more than the SDK's default of 2,048."""


def load_exporters(signal: str, names: Sequence[str]) -> list[Any]:
    """Return exporters by the names that the standard variables use; one that is missing is told of.

    Args:
        signal: `traces`, `metrics` or `logs`.
        names: `otlp`, `console`, or any name that an installed package registers.
    """
    found: list[Any] = []
    for name in names:
        entry = name
        if name == "otlp":
            protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or os.environ.get(
                "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
            )
            entry = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        points = importlib.metadata.entry_points(group=f"opentelemetry_{signal}_exporter", name=entry)
        if not points:
            logger.warning(
                "exporter %r for %s is not installed, nothing is sent there; `pip install 'remit[otlp]'` brings otlp",
                name,
                signal,
            )
            continue
        try:
            found.append(next(iter(points)).load()())
        except Exception as error:
            # A wrong endpoint or a broken package: work goes on without it.
            logger.warning("exporter %r for %s cannot be used: %s", name, signal, error)
    return found


class _Counting:
    """An exporter that counts what it could not send. Raises nothing."""

    def __init__(self, exporter: Any, failed: Callable[[int], None], success: Any) -> None:
        self._exporter = exporter
        self._failed = failed
        self._success = success

    def export(self, items: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send, and count what was refused."""
        result: Any = None
        try:
            result = self._exporter.export(items, *args, **kwargs)
        finally:
            if result is not self._success:
                self._failed(len(items))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)


class CollectorSink:
    """Sends spans, records and measurements through the SDK's exporters.

    Args:
        settings: which exporters.
        resource: attributes of this process, below those of the standard variables.
    """

    def __init__(self, settings: TelemetrySettings, *, resource: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        own: dict[str, Any] = dict(resource)
        if "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            own.pop("service.name", None)
        self._resource = Resource.create(own)
        # Only for the sampler that the variables name.
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._lock = threading.Lock()
        self.dropped = 0
        """Spans that no collector has taken."""
        self._processors = [self._processor(each) for each in load_exporters("traces", settings.traces)]
        self._meters = _Meters(load_exporters("metrics", settings.metrics), self._resource)
        self._logs = _Logs(load_exporters("logs", settings.logs), self._resource)
        self._make = _SpanMaker(self._resource)

    def _processor(self, exporter: Any) -> Any:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

        counting: Any = _Counting(exporter, self._count, SpanExportResult.SUCCESS)
        size = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else QUEUE_SPANS
        return BatchSpanProcessor(counting, max_queue_size=size)

    def _count(self, lost: int) -> None:
        with self._lock:
            self.dropped += lost

    @property
    def is_measured(self) -> bool:
        """Tell whether there is an exporter for metrics."""
        return bool(self._meters.providers)

    def is_sampled(self, trace: int) -> bool:
        """Tell what `OTEL_TRACES_SAMPLER` says of a trace that begins here."""
        result = self._sampler.should_sample(None, trace, "invoke_workflow")
        decision: Any = result.decision
        return bool(decision.is_sampled())

    def export(self, batch: Batch) -> None:
        """Queue what a batch holds."""
        for span in batch.spans:
            if span.is_sampled and self._processors:
                ready = self._make(span)
                for processor in self._processors:
                    processor.on_end(ready)
        for record in batch.logs:
            self._logs.emit(record)
        for measurement in batch.measurements:
            self._meters.add(measurement)

    def _all(self) -> list[Any]:
        return [*self._processors, *self._meters.providers, *self._logs.providers]

    def flush(self, timeout_s: float) -> None:
        """Send what waits; bounded, whatever the collector does."""
        _bounded([lambda part=part: part.force_flush(int(timeout_s * 1000)) for part in self._all()], timeout_s)  # type: ignore[misc]

    def close(self, timeout_s: float) -> None:
        """Send what waits and stop; bounded, whatever the collector does."""
        self.flush(timeout_s)
        _bounded([part.shutdown for part in self._all()], max(_LEAST_S, timeout_s / 2))


_LEAST_S = 0.2


def _bounded(calls: Sequence[Callable[[], Any]], timeout_s: float) -> None:
    """Make calls side by side in daemon threads, and wait for them no longer than that.

    The SDK's own time-outs do not bound a request that is under way.
    """

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception:
            # Exporters are not ours; what they could not send is counted elsewhere.
            logger.debug("an exporter could not be flushed", exc_info=True)

    limit = time.monotonic() + timeout_s
    threads = [threading.Thread(target=run, args=(call,), name="remit-flush", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))


class _SpanMaker:
    """Makes spans of the SDK out of records: those with ids of our own and with an end."""

    def __init__(self, resource: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.status import Status, StatusCode

        self._trace = trace
        self._event = Event
        self._span = ReadableSpan
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE)
        self._unset, self._error = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
        self._kinds = {
            SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
            SpanKind.SERVER: trace.SpanKind.SERVER,
            SpanKind.CLIENT: trace.SpanKind.CLIENT,
        }

    def _context(self, trace_id: int, span_id: int) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    def __call__(self, span: SpanRecord) -> Any:
        """Return the span."""
        attributes = _kept(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        return self._span(
            clean_text(span.name),
            context=self._context(span.trace_id, span.span_id),
            parent=self._context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self._resource,
            attributes=attributes,
            events=[self._event(e.name, _kept(e.attributes), _nanoseconds(e.at)) for e in span.events],
            links=[
                self._trace.Link(self._context(link.trace_id, link.span_id), _kept(link.attributes))
                for link in span.links
            ],
            kind=self._kinds[span.kind],
            status=self._error if span.error else self._unset,
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )


def _kept(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as an exporter takes them: one text that UTF-8 cannot hold would cost its whole batch."""
    return {
        key: clean_text(value) if isinstance(value, str) else value
        for key, value in attributes.items()
        if value != "" and value != ()
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _Meters:
    """The metrics of `names.METRICS`."""

    def __init__(self, exporters: Sequence[Any], resource: Any) -> None:
        self.providers: list[Any] = []
        self._instruments: dict[str, Callable[..., None]] = {}
        if not exporters:
            return
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers = [PeriodicExportingMetricReader(exporter) for exporter in exporters]
        provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self.providers.append(provider)
        meter = provider.get_meter(SCOPE)
        for name, metric in METRICS.items():
            match metric.kind:
                case MetricKind.COUNTER:
                    self._instruments[name] = meter.create_counter(name, metric.unit, metric.description).add
                case MetricKind.UP_DOWN:
                    self._instruments[name] = meter.create_up_down_counter(name, metric.unit, metric.description).add
                case MetricKind.HISTOGRAM:
                    self._instruments[name] = meter.create_histogram(name, metric.unit, metric.description).record
        for name, attributes in SELDOM:
            self.add(Measurement(name, 0, attributes))

    def add(self, measurement: Measurement) -> None:
        """Add one value."""
        instrument = self._instruments.get(measurement.name)
        if instrument is not None:
            instrument(measurement.value, dict(measurement.attributes))


class _Logs:
    """Log records, with the ids that lead to their spans."""

    def __init__(self, exporters: Sequence[Any], resource: Any) -> None:
        self.providers: list[Any] = []
        if not exporters:
            return
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        provider = LoggerProvider(resource, shutdown_on_exit=False)
        for exporter in exporters:
            provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self.providers.append(provider)
        self._logger = provider.get_logger(SCOPE)

    def emit(self, record: LogRecord) -> None:
        """Queue one record."""
        if not self.providers:
            return
        from opentelemetry._logs import LogRecord as ApiRecord
        from opentelemetry._logs import SeverityNumber
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        where = SpanContext(record.trace_id, record.span_id, is_remote=False, trace_flags=TraceFlags(1))
        self._logger.emit(
            ApiRecord(
                timestamp=_nanoseconds(record.at),
                context=set_span_in_context(NonRecordingSpan(where)),
                severity_number=SeverityNumber.WARN if record.is_warning else SeverityNumber.INFO,
                severity_text="WARN" if record.is_warning else "INFO",
                body=record.name,
                attributes=_kept(record.attributes),
                event_name=record.name,
            )
        )
