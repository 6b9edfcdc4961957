"""One life of a coordinator: open the journal, fold it, begin to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from remit.coordinator.decider import Decider
from remit.coordinator.engine import Engine, TimerHandle
from remit.coordinator.evolve import evolve
from remit.coordinator.service import CoordinatorService, ServiceOptions
from remit.coordinator.state import WorkspaceState
from remit.coordinator.transaction import Settings
from remit.core.clock import Clock, SystemClock
from remit.core.events import decode_event
from remit.journal import Journal, JournalReader, SqliteJournal
from remit.telemetry.recorder import Recorder, Sink
from remit.telemetry.settings import TelemetrySettings
from remit.telemetry.setup import open_recorder

__all__ = ["Life", "LoopScheduler", "fold", "journal_path"]


def journal_path(workspace: str | Path) -> Path:
    """Return where a workspace's journal is."""
    return Path(workspace) / ".remit" / "journal.db"


def fold(reader: JournalReader) -> WorkspaceState:
    """Return the state that a journal's events lead to.

    Raises:
        JournalError: it cannot be read, or holds events of a newer version.
    """
    state = WorkspaceState()
    for record in reader.read():
        evolve(state, decode_event(record.kind, record.node_id, record.turn_id, record.data))
    return state


def _prime(recorder: Recorder, reader: JournalReader, state: WorkspaceState) -> None:
    """Tell a recorder what an earlier life had begun, so that its spans can end."""
    for turn_id in dict.fromkeys(node.turn_id for node in state.nodes.values() if not node.is_ended):
        records = reader.read(turn_id=turn_id)
        recorder.prime(decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in records)


class LoopScheduler:
    """Timers of the running event loop on the system's clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()

    @property
    def clock(self) -> Clock:
        """The clock that these timers follow."""
        return self._clock

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back once `when` (seconds since 1970) has come."""
        delay = max(0.0, when - self._clock.now())
        return asyncio.get_running_loop().call_later(delay, callback)


@dataclass(slots=True)
class Life:
    """A serving coordinator."""

    service: CoordinatorService
    journal: Journal
    recorder: Recorder | None = None
    """Makes spans of what is decided; closed with the service."""

    @classmethod
    async def begin(
        cls,
        options: ServiceOptions,
        *,
        engine: Engine,
        settings: Settings,
        scheduler: LoopScheduler,
        on_busy: Callable[[], None] | None = None,
        journal: Journal | None = None,
        telemetry: TelemetrySettings | None = None,
        sinks: Sequence[Sink] = (),
    ) -> Life:
        """Open the workspace's journal, fold it, settle what was left, and serve.

        Args:
            options: behaviour.
            engine: where hosts come from.
            settings: the workspace's numbers.
            scheduler: timers and the clock behind them.
            on_busy: called now and then while somebody needs this coordinator.
            journal: an open journal; the workspace's own by default.
            telemetry: what spans and metrics are made; none by default.
            sinks: further places that they go to.

        Raises:
            JournalError: the journal cannot be opened, or belongs to another coordinator.
        """
        if journal is None:
            journal = await asyncio.to_thread(SqliteJournal.open, journal_path(options.workspace))
        reader = journal.reader()
        recorder = open_recorder(
            telemetry or TelemetrySettings.off(), options.workspace, now=scheduler.clock.now, extra=sinks
        )
        try:
            state = await asyncio.to_thread(fold, reader)
            if recorder is not None:
                await asyncio.to_thread(_prime, recorder, reader, state)
        finally:
            reader.close()
        service = CoordinatorService(
            options,
            journal=journal,
            engine=engine,
            clock=scheduler.clock,
            scheduler=scheduler,
            decider=Decider(settings=settings, state=state),
            on_busy=on_busy,
            recorder=recorder,
        )
        await service.start()
        return cls(service, journal, recorder)
