"""What happened, as OpenTelemetry spans and metrics: made by the coordinator, kept in files, sent to collectors."""

from remit.telemetry.names import ObservedAt
from remit.telemetry.processes import process_span
from remit.telemetry.settings import TelemetrySettings
from remit.telemetry.spans import span
from remit.telemetry.watching import waiting_at

__all__ = ["ObservedAt", "TelemetrySettings", "process_span", "span", "waiting_at"]
