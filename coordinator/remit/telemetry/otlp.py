"""The OTLP JSON file format: spans and log records as lines, and back.

One line is one `TracesData` or `LogsData` in OTLP JSON, as the OpenTelemetry
Collector's file receiver and exporter have it. Written here because the package
that does it (opentelemetry-exporter-otlp-json-file, beta) needs the SDK, which
takes a coordinator a fifth of a second and ten megabytes to load, and knows no
limit to a file's size.

Source: https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ and the JSON
mapping of https://opentelemetry.io/docs/specs/otlp/ (ids in hexadecimal, 64-bit
integers as texts, enumerations as numbers).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remit.telemetry.names import SCOPE, SpanKind
from remit.telemetry.record import Attributes, LogRecord, SpanEvent, SpanLink, SpanRecord

__all__ = ["decode_spans", "encode_logs", "encode_spans"]

_ERROR = 2
_INFO, _WARN = 9, 13
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=str)


def encode_spans(spans: Iterable[SpanRecord], resource: Mapping[str, Any], *, scope: str = SCOPE) -> str:
    """Return spans as one line, without its end."""
    scoped = {"scope": {"name": scope}, "spans": [_span(span) for span in spans]}
    return _JSON.encode({"resourceSpans": [{"resource": _resource(resource), "scopeSpans": [scoped]}]})


def encode_logs(records: Iterable[LogRecord], resource: Mapping[str, Any]) -> str:
    """Return log records as one line, without its end."""
    scoped = {"scope": {"name": SCOPE}, "logRecords": [_log(record) for record in records]}
    return _JSON.encode({"resourceLogs": [{"resource": _resource(resource), "scopeLogs": [scoped]}]})


def _resource(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"attributes": _attributes(attributes)}


def _span(span: SpanRecord) -> dict[str, Any]:
    data: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": _nanoseconds(span.start),
        "endTimeUnixNano": _nanoseconds(span.end),
        "attributes": _attributes(_with_error(span)),
        "status": {"code": _ERROR} if span.error else {},
    }
    if span.parent_id:
        data["parentSpanId"] = f"{span.parent_id:016x}"
    if span.events:
        data["events"] = [
            {"timeUnixNano": _nanoseconds(at), "name": name, "attributes": _attributes(attributes)}
            for at, name, attributes in span.events
        ]
    if span.links:
        data["links"] = [
            {"traceId": f"{trace:032x}", "spanId": f"{target:016x}", "attributes": _attributes(attributes)}
            for trace, target, attributes in span.links
        ]
    return data


def _with_error(span: SpanRecord) -> Mapping[str, Any]:
    return {**span.attributes, "error.type": span.error} if span.error else span.attributes


def _log(record: LogRecord) -> dict[str, Any]:
    return {
        "timeUnixNano": _nanoseconds(record.at),
        "severityNumber": _WARN if record.is_warning else _INFO,
        "severityText": "WARN" if record.is_warning else "INFO",
        "eventName": record.name,
        "body": {"stringValue": record.name},
        "attributes": _attributes(record.attributes),
        "traceId": f"{record.trace_id:032x}",
        "spanId": f"{record.span_id:016x}",
    }


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return attributes as OTLP has them; empty texts and lists are left out."""
    return [{"key": key, "value": _value(value)} for key, value in attributes.items() if value != "" and value != ()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Sequence):
        return {"arrayValue": {"values": [_value(item) for item in value]}}  # pyright: ignore[reportUnknownVariableType]
    return {"stringValue": str(value)}


# -- and back ---------------------------------------------------------------------------


def decode_spans(line: str) -> Iterator[SpanRecord]:
    """Yield the spans of a line; nothing for a line of another kind.

    Raises:
        ValueError: it is not JSON, as the last line of a process that was killed may be.
        KeyError: a span lacks what every span has.
    """
    data = json.loads(line)
    for resource in data.get("resourceSpans", ()):
        for scoped in resource.get("scopeSpans", ()):
            scope = scoped.get("scope", {}).get("name", "")
            for span in scoped.get("spans", ()):
                yield _read_span(span, scope)


def _read_span(data: Mapping[str, Any], scope: str) -> SpanRecord:
    attributes = _read_attributes(data.get("attributes", ()))
    is_error = data.get("status", {}).get("code") == _ERROR
    if scope != SCOPE:
        attributes["otel.scope.name"] = scope
    return SpanRecord(
        data["name"],
        int(data["traceId"], 16),
        int(data["spanId"], 16),
        int(data.get("parentSpanId") or "0", 16),
        int(data["startTimeUnixNano"]) / 1e9,
        int(data["endTimeUnixNano"]) / 1e9,
        attributes,
        kind=_kind(data.get("kind", 1)),
        error=str(attributes.pop("error.type", "") or "error") if is_error else "",
        events=[
            SpanEvent(int(e["timeUnixNano"]) / 1e9, e["name"], _read_attributes(e.get("attributes", ())))
            for e in data.get("events", ())
        ],
        links=[
            SpanLink(int(link["traceId"], 16), int(link["spanId"], 16), _read_attributes(link.get("attributes", ())))
            for link in data.get("links", ())
        ],
    )


def _kind(number: int) -> SpanKind:
    try:
        return SpanKind(number)
    except ValueError:
        return SpanKind.INTERNAL


def _read_attributes(items: Iterable[Mapping[str, Any]]) -> Attributes:
    return {item["key"]: _read_value(item.get("value", {})) for item in items}


def _read_value(value: Mapping[str, Any]) -> Any:
    match next(iter(value.items()), ("", "")):
        case ("intValue", number):
            return int(number)
        case ("arrayValue", array):
            return tuple(_read_value(item) for item in array.get("values", ()))
        case (_, other):
            return other
