"""Traces as files: the standard format, whole lines, a limit."""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from remit.telemetry.files import FileSink, SegmentFile, read_traces, traces_folder
from remit.telemetry.names import SpanKind
from remit.telemetry.otlp import decode_spans, encode_logs, encode_spans
from remit.telemetry.record import Batch, LogRecord, SpanEvent, SpanLink, SpanRecord

# It has no annotations.
json_format: Any = importlib.import_module("google.protobuf.json_format")

NASTY = 'a "quoted" \\ path\nwith a line, a tab\t, ümlauts 🙂 and \x07 and </script>'


def record(**changes: Any) -> SpanRecord:
    values: dict[str, Any] = {
        "name": f"invoke_agent {NASTY}",
        "trace_id": 0xABC,
        "span_id": 0x1,
        "parent_id": 0x2,
        "start": 1.5,
        "end": 2.25,
        "attributes": {
            "text": NASTY,
            "number": -(2**53),
            "float": 0.25,
            "large": 1e300,
            "flag": True,
            "list": ("a", NASTY),
            "empty": "",
            "none": (),
        },
        "kind": SpanKind.CLIENT,
        "error": "timeout",
        "events": [SpanEvent(1.75, "noted", {"at": 0.5})],
        "links": [SpanLink(0xDEF, 0x3, {"remit.link": "cancels"})],
    }
    return SpanRecord(**{**values, **changes})


def hex_to_base64(data: Any) -> Any:
    """Turn ids as OTLP JSON has them into what protobuf's own JSON expects."""
    if isinstance(data, dict):
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else hex_to_base64(value)
            for key, value in data.items()
        }
    return [hex_to_base64(item) for item in data] if isinstance(data, list) else data


def test_a_line_is_otlp_as_protobuf_reads_it() -> None:
    line = encode_spans([record(), record(span_id=4, parent_id=0, error="")], {"service.name": "remit"})
    assert "\n" not in line
    data: Any = json_format.ParseDict(hex_to_base64(json.loads(line)), TracesData())
    scoped = data.resource_spans[0].scope_spans[0]
    assert scoped.scope.name == "remit"
    first, second = scoped.spans
    assert first.trace_id == bytes.fromhex(f"{0xABC:032x}")
    assert first.parent_span_id == bytes.fromhex(f"{2:016x}")
    assert second.parent_span_id == b""
    assert first.kind == Span.SPAN_KIND_CLIENT
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1_500_000_000, 2_250_000_000)
    assert (first.status.code, second.status.code) == (2, 0)
    found = {pair.key: pair.value for pair in first.attributes}
    assert set(found) == {"text", "number", "float", "large", "flag", "list", "error.type"}
    assert found["text"].string_value == NASTY
    assert found["number"].int_value == -(2**53)
    assert found["flag"].bool_value is True
    assert found["large"].double_value == 1e300
    assert [v.string_value for v in found["list"].array_value.values] == ["a", NASTY]
    assert first.events[0].time_unix_nano == 1_750_000_000
    assert first.links[0].span_id == bytes.fromhex(f"{3:016x}")


def test_what_is_not_finite_is_a_text_as_protobuf_has_it() -> None:
    line = encode_spans([record(attributes={"a": float("inf"), "b": float("nan")})], {})
    data: Any = json_format.ParseDict(hex_to_base64(json.loads(line)), TracesData())
    values = [pair.value.double_value for pair in data.resource_spans[0].scope_spans[0].spans[0].attributes[:2]]
    assert values[0] == float("inf")
    assert values[1] != values[1]


def test_a_log_line_is_otlp_too() -> None:
    line = encode_logs([LogRecord(3.0, "remit.cancel.quiet", 0xABC, 0x1, True, {"x": NASTY})], {"a": "b"})
    data: Any = json_format.ParseDict(hex_to_base64(json.loads(line)), LogsData())
    log = data.resource_logs[0].scope_logs[0].log_records[0]
    assert (log.event_name, log.severity_text, log.severity_number) == ("remit.cancel.quiet", "WARN", 13)
    assert log.span_id == bytes.fromhex(f"{1:016x}")


def test_spans_come_back_as_they_were() -> None:
    kept = {k: v for k, v in record().attributes.items() if v not in ("", ())}
    assert list(decode_spans(encode_spans([record()], {}))) == [record(attributes=kept)]


def test_files_are_for_their_owner_alone_and_in_segments_under_a_limit(tmp_path: Path) -> None:
    folder = traces_folder(tmp_path)
    lines = SegmentFile(folder, "traces", 80_000)
    for number in range(400):
        lines.append(json.dumps({"turn": f"turn_{number}", "padding": "x" * 1_000}))
    files = sorted(folder.glob("*.jsonl"))
    assert sum(path.stat().st_size for path in files) <= 80_000
    assert 2 <= len(files) <= 9
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "turn_399" in "".join(path.read_text() for path in files)
    assert "turn_0" not in "".join(path.read_text() for path in files)


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_bytes=1_000_000, resource={})
    sink.export(Batch(spans=[record(attributes={"remit.turn.id": "turn_x"})]))
    path = next(tmp_path.glob("traces-*.jsonl"))
    with path.open("a") as file:
        file.write('{"resourceSpans": "turn_x"}\n[1, "turn_x"]\n' + encode_spans([record()], {})[:-40] + "turn_x")
    assert [span.span_id for span in read_traces(tmp_path, "turn_x")] == [1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"name":"x"', '"name":5'),
        ('"name":"x"', '"name":null'),
        ('"traceId":"', '"traceId":"zz'),
        ('"startTimeUnixNano":"', '"startTimeUnixNano":"' + "9" * 400),
        ('"startTimeUnixNano":"', '"startTimeUnixNano":"x'),
        ('"attributes":[', '"attributes":[5,'),
        ('"attributes":[', '"attributes":[{"key":"k","value":"v"},'),
        ('{"resourceSpans":', "[" * 200_000 + '{"resourceSpans":'),
    ],
)
def test_a_line_that_is_broken_anywhere_costs_nothing_but_itself(tmp_path: Path, old: str, new: str) -> None:
    good = encode_spans([record(name="x", attributes={"remit.turn.id": "turn_x"})], {})
    assert old in good
    (tmp_path / "traces-1.jsonl").write_text(f"{good.replace(old, new)}\n{good}\n\x00turn_x\n")
    (tmp_path / "traces-2.jsonl").mkdir()
    assert [span.name for span in read_traces(tmp_path, "turn_x")] == ["x"]


@pytest.mark.requirement("G8")
def test_a_disk_that_refuses_is_counted(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    sink = FileSink(blocked / "traces", max_bytes=1_000_000, resource={})
    sink.export(Batch(spans=[record(), record()]))
    assert sink.dropped == 2
