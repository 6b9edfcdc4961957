"""Spans of tool processes: one function from the facts of a start and an end."""

from __future__ import annotations

import signal as signals

from remit.core.events import ProcessEnded
from remit.telemetry.names import SpanKind
from remit.telemetry.nodes import NodeFacts
from remit.telemetry.record import Attributes, Batch, SpanRecord, span_id

__all__ = ["process_result", "process_span", "process_span_id"]

_UNKNOWN = "unknown"


def process_span_id(run_id: str, pid: int, started_at: float) -> int:
    """Return the id of a process's span; numbers of processes come again, so its start is part of it."""
    return span_id("process", run_id, pid, started_at)


def process_span(run: NodeFacts, ended: ProcessEnded, *, started_at: float, program: str) -> SpanRecord:
    """Return the span of a tool process that has ended.

    Args:
        run: the run that had started it.
        ended: how it ended.
        started_at: when it was started, in seconds since 1970.
        program: name of the program; of its arguments nothing is kept.

    A process that our signal ended is no error (the CLI conventions, in development,
    allow for such context); one that somebody else killed, and a status other than 0,
    are. That SIGKILL was needed is told by the delivery of the cancel.
    """
    attributes: Attributes = {
        **run.common(),
        "process.pid": ended.pid,
        "process.executable.name": program,
        # Each tool process leads a session, and so a group, of its own.
        "process.group_leader.pid": ended.pid,
        "remit.process.result": process_result(ended),
        "remit.process.escalated": ended.escalated,
        "remit.process.confirmed": not ended.survivors and not ended.goes_on,
        "remit.process.survivors": ended.survivors,
    }
    if ended.stopped:
        attributes["remit.process.signals"] = ("SIGTERM", "SIGKILL") if ended.escalated else ("SIGTERM",)
    if ended.signal is not None:
        attributes["process.exit.code"] = 128 + ended.signal
        attributes["remit.process.signal"] = signal_name(ended.signal)
        attributes["remit.process.signal.sender"] = "coordinator" if ended.stopped else "other"
    elif ended.exit_code is not None:
        attributes["process.exit.code"] = ended.exit_code
    return SpanRecord(
        program or "process",
        run.trace,
        process_span_id(run.id, ended.pid, started_at),
        run.here,
        started_at,
        ended.at,
        attributes,
        kind=SpanKind.CLIENT,
        error=_error(ended),
        is_sampled=run.is_sampled,
    )


def process_result(ended: ProcessEnded) -> str:
    """Return `exited`, `failed`, `stopped`, `signalled`, `background` (it goes on in its session) or `unknown`."""
    if ended.goes_on:
        return "background"
    if ended.stopped:
        return "stopped"
    if ended.signal is not None:
        return "signalled"
    if ended.exit_code is None:
        return _UNKNOWN
    return "failed" if ended.exit_code else "exited"


def _error(ended: ProcessEnded) -> str:
    if ended.survivors:
        return "survivors"
    if ended.stopped:
        return ""
    if ended.signal is not None:
        return f"signal:{signal_name(ended.signal)}"
    return str(ended.exit_code) if ended.exit_code else ""


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and the number as a text where it has no name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(number)


def measure_process(batch: Batch, span: SpanRecord, ended: ProcessEnded) -> None:
    """Add the metrics of a process that has ended."""
    batch.measure("remit.process.duration", span.seconds, result=process_result(ended))
    if ended.stopped:
        batch.measure("remit.process.kills", 1, signal="SIGKILL" if ended.escalated else "SIGTERM")
