"""Spans of turns and runs, through OpenTelemetry if the process has set it up."""

from remit.telemetry.spans import NodeSpan, start_run_span, start_turn_span

__all__ = ["NodeSpan", "start_run_span", "start_turn_span"]
