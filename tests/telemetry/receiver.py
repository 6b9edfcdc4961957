"""A receiver of OTLP over HTTP on loopback: real protobuf, and the moods that collectors have."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from remit.testing import wait_until

_KINDS: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Receiver:
    """What has arrived. With `answers` false it accepts connections and never answers them."""

    def __init__(self, *, answers: bool = True) -> None:
        self._lock = threading.Lock()
        self._requests: list[tuple[str, Any]] = []
        self.release = threading.Event()
        self.asked = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.asked.set()
                if not answers:
                    receiver.release.wait(60)
                    return
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="otlp-receiver")
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        message = _KINDS[path]()
        message.ParseFromString(body)
        with self._lock:
            self._requests.append((path, message))

    def _all(self, path: str) -> list[Any]:
        with self._lock:
            return [message for kind, message in self._requests if kind == path]

    def spans(self) -> list[Any]:
        """Return all spans, as protobuf has them."""
        return [
            span
            for message in self._all("/v1/traces")
            for resource in message.resource_spans
            for scoped in resource.scope_spans
            for span in scoped.spans
        ]

    def metrics(self) -> dict[str, Any]:
        """Return the latest state of each metric, by name."""
        return {
            metric.name: metric
            for message in self._all("/v1/metrics")
            for resource in message.resource_metrics
            for scoped in resource.scope_metrics
            for metric in scoped.metrics
        }

    def logs(self) -> list[Any]:
        """Return all log records."""
        return [
            record
            for message in self._all("/v1/logs")
            for resource in message.resource_logs
            for scoped in resource.scope_logs
            for record in scoped.log_records
        ]

    def until_spans(self, count: int) -> list[Any]:
        """Wait until so many spans are there."""
        wait_until(lambda: len(self.spans()) >= count, timeout_s=30.0)
        return self.spans()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def receiving(*, answers: bool = True) -> Generator[Receiver]:
    """Receive for the time of a block."""
    receiver = Receiver(answers=answers)
    try:
        yield receiver
    finally:
        receiver.close()


def attributes_of(item: Any) -> dict[str, Any]:
    """Return the attributes of a protobuf span, event, link, point or record."""
    found: dict[str, Any] = {}
    for pair in item.attributes:
        kind = pair.value.WhichOneof("value")
        value: Any = getattr(pair.value, kind) if kind else None
        found[pair.key] = tuple(v.string_value for v in value.values) if kind == "array_value" else value
    return found
