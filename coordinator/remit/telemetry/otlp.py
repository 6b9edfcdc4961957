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
import json.encoder
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from remit.telemetry.names import SCOPE, SpanKind
from remit.telemetry.record import Attributes, LogRecord, SpanEvent, SpanLink, SpanRecord

__all__ = ["decode_spans", "encode_logs", "encode_spans"]

_ERROR = 2
_INFO, _WARN = 9, 13
_text: Callable[[str], str] = json.encoder.encode_basestring
"""A text as JSON has it, with its quotation marks."""


def encode_spans(spans: Iterable[SpanRecord], resource: Mapping[str, Any], *, scope: str = SCOPE) -> str:
    """Return spans as one line, without its end."""
    parts = ",".join(map(_span, spans))
    scoped = f'{{"scope":{{"name":{_text(scope)}}},"spans":[{parts}]}}'
    return f'{{"resourceSpans":[{{"resource":{{{_attributes(resource)}}},"scopeSpans":[{scoped}]}}]}}'


def encode_logs(records: Iterable[LogRecord], resource: Mapping[str, Any]) -> str:
    """Return log records as one line, without its end."""
    parts = ",".join(map(_log, records))
    scoped = f'{{"scope":{{"name":{_text(SCOPE)}}},"logRecords":[{parts}]}}'
    return f'{{"resourceLogs":[{{"resource":{{{_attributes(resource)}}},"scopeLogs":[{scoped}]}}]}}'


# Put together by hand: a dictionary of dictionaries for each span, encoded afterwards, takes
# four times as long, and this thread shares its interpreter with the coordinator's loop.


def _span(span: SpanRecord) -> str:
    parent = f'"parentSpanId":"{span.parent_id:016x}",' if span.parent_id else ""
    attributes = {**span.attributes, "error.type": span.error} if span.error else span.attributes
    events = f',"events":[{",".join(map(_event, span.events))}]' if span.events else ""
    links = f',"links":[{",".join(map(_link, span.links))}]' if span.links else ""
    status = f'{{"code":{_ERROR}}}' if span.error else "{}"
    return (
        f'{{"traceId":"{span.trace_id:032x}","spanId":"{span.span_id:016x}",{parent}"name":{_text(span.name)},'
        f'"kind":{int(span.kind)},"startTimeUnixNano":"{_nanoseconds(span.start)}",'
        f'"endTimeUnixNano":"{_nanoseconds(span.end)}",{_attributes(attributes)}{events}{links},"status":{status}}}'
    )


def _event(event: SpanEvent) -> str:
    at, name, attributes = event
    return f'{{"timeUnixNano":"{_nanoseconds(at)}","name":{_text(name)},{_attributes(attributes)}}}'


def _link(link: SpanLink) -> str:
    trace, target, attributes = link
    return f'{{"traceId":"{trace:032x}","spanId":"{target:016x}",{_attributes(attributes)}}}'


def _log(record: LogRecord) -> str:
    number, word = (_WARN, "WARN") if record.is_warning else (_INFO, "INFO")
    return (
        f'{{"timeUnixNano":"{_nanoseconds(record.at)}","severityNumber":{number},"severityText":"{word}",'
        f'"eventName":{_text(record.name)},"body":{{"stringValue":{_text(record.name)}}},'
        f'{_attributes(record.attributes)},"traceId":"{record.trace_id:032x}","spanId":"{record.span_id:016x}"}}'
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(attributes: Mapping[str, Any]) -> str:
    """Return attributes as a member of an object; empty texts and lists are left out."""
    parts = [
        f'{_key(key)}{{"stringValue":{_text(value)}}}}}' if type(value) is str else f"{_key(key)}{_value(value)}}}"
        for key, value in attributes.items()
        if value != "" and value != ()
    ]
    return f'"attributes":[{",".join(parts)}]'


@lru_cache(maxsize=1024)
def _key(key: str) -> str:
    return f'{{"key":{_text(key)},"value":'


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'{{"stringValue":{_text(value)}}}'
    if isinstance(value, bool):
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if isinstance(value, int):
        return f'{{"intValue":"{value:d}"}}'
    if isinstance(value, float):
        # JSON has no word for these; the mapping of protobuf has texts.
        text = repr(value) if math.isfinite(value) else _text(_NOT_FINITE[str(value)])
        return f'{{"doubleValue":{text}}}'
    if isinstance(value, (list, tuple)):
        items = ",".join(map(_value, cast("Sequence[Any]", value)))
        return f'{{"arrayValue":{{"values":[{items}]}}}}'
    return f'{{"stringValue":{_text(str(value))}}}'


_NOT_FINITE = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}


# -- and back ---------------------------------------------------------------------------


def decode_spans(line: str) -> Iterator[SpanRecord]:
    """Yield the spans of a line; nothing for a line of another kind.

    Raises:
        ValueError: it is not JSON, as the last line of a process that was killed may be.
        KeyError: a span lacks what every span has.
        TypeError, AttributeError, OverflowError, RecursionError: it is JSON, and no span.
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
        _text_of(data["name"]),
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


def _text_of(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a span is a text, not {name!r}")
    return name


def _kind(number: int) -> SpanKind:
    try:
        return SpanKind(number)
    except ValueError:
        return SpanKind.INTERNAL


def _read_attributes(items: Iterable[Mapping[str, Any]]) -> Attributes:
    found: Attributes = {}
    for item in items:
        value = item.get("value", {})
        # Nearly all are texts, and a trace of ten thousand runs has most of a million of them.
        text = value.get("stringValue")
        found[item["key"]] = _read_value(value) if text is None else text
    return found


def _read_value(value: Mapping[str, Any]) -> Any:
    match next(iter(value.items()), ("", "")):
        case ("intValue", number):
            return int(number)
        case ("arrayValue", array):
            return tuple(_read_value(item) for item in array.get("values", ()))
        case (_, other):
            return other
