"""One life of a coordinator: open the journal, fold it, begin to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from remit.coordinator.briefs import BriefSpool
from remit.coordinator.decider import Decider
from remit.coordinator.engine import Engine, TimerHandle
from remit.coordinator.folding import fold_journal
from remit.coordinator.redaction import load_redaction
from remit.coordinator.service import CoordinatorService, ServiceOptions
from remit.coordinator.state import WorkspaceState
from remit.coordinator.survey import ProgramWitness
from remit.coordinator.transaction import Settings
from remit.core.clock import Clock, SystemClock
from remit.core.events import decode_event
from remit.journal import Journal, JournalReader, journal_location, open_journal
from remit.telemetry.recorder import Recorder, Sink
from remit.telemetry.settings import TelemetrySettings
from remit.telemetry.setup import open_recorder

__all__ = ["Life", "LoopScheduler", "fold", "journal_path", "stored_payloads"]


def journal_path(workspace: str | Path) -> Path:
    """Return where a workspace's journal is, unless it was put into a database."""
    return Path(workspace) / ".remit" / "journal.db"


def fold(reader: JournalReader) -> WorkspaceState:
    """Return the state that a journal's events lead to.

    Raises:
        JournalError: it cannot be read, or holds events of a newer version.
    """
    return fold_journal(reader).state


def stored_payloads(reader: JournalReader, state: WorkspaceState) -> dict[str, bytes]:
    """Return what bodies of runs that have not ended have returned or handed over so far.

    Raises:
        JournalError: it cannot be read.
    """
    found: dict[str, bytes] = {}
    for node in state.nodes.values():
        if node.is_turn or node.is_ended or not (node.report or node.preview):
            continue
        kind = ""
        # What an earlier attempt handed over is not this one's.
        for record in reader.read(node_id=node.id, kinds=("run_progressed", "run_settling", "attempt_ended")):
            kind = record.kind
        payload = reader.payload(node.id, kind) if kind in ("run_progressed", "run_settling") else None
        if payload is not None:
            found[node.id] = payload
    return found


def _live_runs(state: WorkspaceState) -> frozenset[str]:
    return frozenset(node.id for node in state.nodes.values() if not node.is_turn and not node.is_ended)


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
    spool: BriefSpool
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
        witness: ProgramWitness | None = None,
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
            witness: who knows what became of programs while no coordinator was there.
            telemetry: what spans and metrics are made; none by default.
            sinks: further places that they go to.

        Raises:
            JournalError: the journal cannot be opened, or belongs to another coordinator.
            InvalidArgument: the workspace's rules of redaction do not hold.
        """
        # Before anything is written: rules that cannot be read must not mean that nothing is hidden.
        rules = await asyncio.to_thread(load_redaction, options.workspace)
        if rules is not None:
            settings = replace(settings, redaction=rules)
        if journal is None:
            journal = await asyncio.to_thread(open_journal, journal_location(options.workspace), with_room=True)
        reader = journal.reader()
        try:
            folded = await asyncio.to_thread(fold_journal, reader)
            payloads = await asyncio.to_thread(stored_payloads, reader, folded.state)
            recorder = open_recorder(
                telemetry or TelemetrySettings.off(), options.workspace, now=scheduler.clock.now, extra=sinks
            )
            if recorder is not None:
                await asyncio.to_thread(_prime, recorder, reader, folded.state)
        finally:
            reader.close()
        spool, kept = await asyncio.to_thread(
            BriefSpool.open, Path(options.workspace) / ".remit" / "briefs", journal.epoch, _live_runs(folded.state)
        )
        service = CoordinatorService(
            options,
            journal=journal,
            engine=engine,
            clock=scheduler.clock,
            scheduler=scheduler,
            decider=Decider(settings=settings, state=folded.state, payloads=payloads),
            tail=folded.tail,
            on_busy=on_busy,
            spool=spool,
            kept=kept,
            witness=witness,
            recorder=recorder,
        )
        await service.start()
        return cls(service, journal, spool, recorder)
