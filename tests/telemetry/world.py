"""A workspace in this process whose spans are looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from remit.coordinator import Coordinator
from remit.coordinator.transaction import Settings
from remit.core.events import Event, decode_event
from remit.telemetry import TelemetrySettings
from remit.telemetry.record import Batch, LogRecord, Measurement, SpanRecord
from remit.testing import InProcess, open_inprocess


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.logs: list[LogRecord] = []
        self.measurements: list[Measurement] = []
        self.dropped = 0
        self.calls: list[str] = []

    @property
    def is_measured(self) -> bool:
        return True

    def export(self, batch: Batch) -> None:
        self.spans += batch.spans
        self.logs += batch.logs
        self.measurements += batch.measurements

    def is_sampled(self, trace: int) -> bool:
        return True

    def flush(self, timeout_s: float) -> None:
        self.calls.append("flush")

    def close(self, timeout_s: float) -> None:
        self.calls.append("close")

    def named(self, name: str) -> list[SpanRecord]:
        return [span for span in self.spans if span.name == name]

    def of_run(self, run_id: str, name: str = "invoke_agent") -> SpanRecord:
        """Return the coordinator's span of a run."""
        found = [
            s
            for s in self.spans
            if s.run_id == run_id and s.name.startswith(name) and "remit.attempt" not in s.attributes
        ]
        assert len(found) == 1, found
        return found[0]


class Traced:
    """A workspace, a client of it, and its spans."""

    def __init__(self, system: InProcess, coordinator: Coordinator, kept: Kept) -> None:
        self.system = system
        self.coordinator = coordinator
        self.kept = kept

    async def spans(self) -> list[SpanRecord]:
        """Return all spans that have ended so far."""
        assert self.system.recorder is not None
        assert await asyncio.to_thread(self.system.recorder.flush, 30.0)
        return self.kept.spans

    def events(self) -> list[Event]:
        """Return the journal."""
        reader = self.system.journal.reader()
        try:
            return [decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in reader.read()]
        finally:
            reader.close()


@asynccontextmanager
async def traced(
    workspace: Path,
    *,
    settings: Settings | None = None,
    telemetry: TelemetrySettings | None = None,
    sinks: Sequence[Kept] = (),
) -> AsyncGenerator[Traced]:
    """Open a workspace whose spans are kept."""
    kept = Kept()
    with open_inprocess(
        workspace,
        settings=settings,
        poll_s=0.1,
        telemetry=telemetry or TelemetrySettings.off(),
        sinks=[kept, *sinks],
    ) as system:
        async with system.coordinator() as coordinator:
            yield Traced(system, coordinator, kept)
