"""Turns what the coordinator decided into spans, in a thread of its own.

**Invariants**

1. The coordinator's loop appends a reference and goes on: whatever an exporter,
   a collector or a disk does, or fails to do, changes nothing there but a counter.
2. What waits is bounded; what does not fit is dropped, whole, and counted.
3. Order is kept: reports come before the events that they lead to.
4. Nothing is made while a cancel is on its way to quiet, up to a bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from remit.core.events import Event
from remit.core.messages import BodyTiming, ReportEnded
from remit.telemetry.carrier import format_carrier, read_carrier
from remit.telemetry.fold import Folder
from remit.telemetry.names import METRICS, MetricKind
from remit.telemetry.patience import Patience
from remit.telemetry.record import Batch, LogRecord, span_id, trace_id

__all__ = ["Recorder", "Sink"]

logger = logging.getLogger("remit.telemetry")
cancel_logger = logging.getLogger("remit.cancel")

PAUSE_S = 0.25
"""How long is waited for more before spans are made: one batch for a burst."""
_LOOK_S = 0.05
"""How soon after a cancel is quiet its spans are made."""
MAX_WAITING = 100_000
"""Decisions that may wait; far beyond what a thread that lives falls behind."""
HOLD_S = 1.0
"""How long spans wait for a cancel to become quiet: this thread would take the interpreter from
the loop that sees it through. A cancel that takes longer has them made meanwhile."""
FINAL_S = 5.0
"""Bound of all final work."""

_Item = Callable[[Folder], None]


class Sink(Protocol):
    """Where spans, log records and measurements go. Called in one thread; must not block for long."""

    dropped: int

    @property
    def is_measured(self) -> bool:
        """Tell whether measurements are wanted."""
        ...

    def export(self, batch: Batch) -> None:
        """Take a batch."""
        ...

    def is_sampled(self, trace: int) -> bool:
        """Tell whether a trace that begins here is sampled."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Hand on what waits, within a bound."""
        ...

    def close(self, timeout_s: float) -> None:
        """Hand on what waits and let go of everything, within a bound."""
        ...


class Recorder:
    """Makes the spans of one workspace. Thread-safe.

    Args:
        sinks: where they go.
        now: seconds since 1970, by the coordinator's clock.
        keeps_arguments: whether renderings of arguments become attributes.
        pause_s: how long is waited for more before a batch is made, in seconds.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        now: Callable[[], float] = time.time,
        keeps_arguments: bool = False,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._sinks = tuple(sinks)
        self._now = now
        self._pause_s = pause_s
        self._patience = Patience()
        self._folder = Folder(
            keeps_arguments=keeps_arguments,
            is_measured=any(sink.is_measured for sink in self._sinks),
            is_sampled=self._is_sampled,
        )
        self._waiting: deque[_Item] = deque()
        self._asked: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._carriers: dict[str, str] = {}
        self._told_dropped = 0
        self.dropped = 0
        """Decisions that were not looked at, and batches of sinks that failed."""
        self._thread = threading.Thread(target=self._work, name="remit-telemetry", daemon=True)
        self._thread.start()

    # -- for the coordinator's loop: appends only ----------------------------------

    def events(self, events: Sequence[tuple[Event, bytes | None]]) -> None:
        """Take the events of a decision that is on the disk."""
        if events:
            self._patience.look(events, time.monotonic())
            self._put(lambda folder: _fold(folder, events))

    def reports(self, items: Iterable[object]) -> None:
        """Take what a host has reported, before it is decided upon."""
        at = self._now()
        self._put(lambda folder: _report(folder, items, at))

    def holder(self, turn_id: str, timing: BodyTiming | None) -> None:
        """Take what the holder of a turn tells of the end of its body."""
        at = self._now()
        self._put(lambda folder: folder.holder(turn_id, timing, at))

    def refused(self, count: int) -> None:
        """Count reports that came too late."""
        self._put(lambda folder: folder.measure("remit.reports.refused", count))

    def carrier(self, turn_id: str, holder: str, node_id: str = "") -> str:
        """Return the trace context that goes to hosts with a turn's runs, or that names one of them.

        Args:
            turn_id: the turn.
            holder: the carrier that the turn's holder gave; may be empty.
            node_id: a run whose span is meant; the turn by default.
        """
        if node_id and node_id != turn_id:
            turn = read_carrier(self.carrier(turn_id, holder))
            assert turn is not None
            return format_carrier(turn.trace_id, span_id("run", node_id), is_sampled=turn.is_sampled)
        found = self._carriers.get(turn_id)
        if found is None:
            parent = read_carrier(holder)
            trace = parent.trace_id if parent else trace_id(turn_id)
            sampled = parent.is_sampled if parent else self._is_sampled(trace)
            if len(self._carriers) > _MAX_CARRIERS:
                self._carriers.clear()
            found = self._carriers[turn_id] = format_carrier(trace, span_id("turn", turn_id), is_sampled=sampled)
        return found

    def _is_sampled(self, trace: int) -> bool:
        return all(sink.is_sampled(trace) for sink in self._sinks)

    def _put(self, item: _Item) -> None:
        if self._closing or len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(item)
        if not self._wake.is_set():
            self._wake.set()

    # -- the thread ----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._pause()
            self._wake.clear()
            self._hurry.clear()
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            self._drain()
            for done in asked:
                done.set()
            if self._closing and not self._waiting:
                return

    def _pause(self) -> None:
        """Wait for more, and for a cancel to become quiet, unless somebody is in a hurry."""
        wait_s = self._pause_s
        while wait_s and not self._closing and not self._hurry.wait(wait_s):
            wait_s = min(self._patience.left_s(time.monotonic()), _LOOK_S)

    def _drain(self) -> None:
        for _ in range(len(self._waiting)):
            item = self._waiting.popleft()
            try:
                item(self._folder)
            except Exception:
                # A span that cannot be made is lost; those after it are not.
                self._count("a span could not be made")
        batch = self._folder.take()
        self._add_dropped(batch)
        if not (batch.spans or batch.logs or batch.measurements):
            return
        for record in batch.logs:
            _say(record)
        for sink in self._sinks:
            try:
                sink.export(batch)
            except Exception:
                # Exporters are not ours: whatever they raise costs this batch and nothing else.
                self._count("an exporter failed")

    def _add_dropped(self, batch: Batch) -> None:
        dropped = self.statistics()["dropped"]
        if dropped > self._told_dropped:
            batch.measure("remit.telemetry.dropped", dropped - self._told_dropped)
            self._told_dropped = dropped

    def _count(self, what: str) -> None:
        self.dropped += 1
        logger.debug("%s", what, exc_info=True)

    # -- life ----------------------------------------------------------------------

    def prime(self, events: Iterable[Event]) -> None:
        """Take events of an earlier life, so that what they began can be ended.

        Nothing is exported of them but the present levels: their counters begin at 0 in each process.
        """
        known = list(events)

        def fold(folder: Folder) -> None:
            for event in known:
                folder.event(event)
            for name, value in _levels(folder.take()).items():
                folder.measure(name, value)

        self._put(fold)

    def flush(self, timeout_s: float = FINAL_S) -> bool:
        """Make the spans of all that was taken so far and hand them on.

        Returns:
            Whether that was done within the bound.
        """
        limit = time.monotonic() + timeout_s
        done = threading.Event()
        self._asked.append(done)
        self._hurry.set()
        self._wake.set()
        if self._closing or not done.wait(timeout_s):
            return False
        for sink in self._sinks:
            self._guarded(lambda sink=sink: sink.flush(max(0.0, limit - time.monotonic())))  # type: ignore[misc]
        return time.monotonic() < limit

    def close(self, timeout_s: float = FINAL_S) -> None:
        """End everything, within a bound. Idempotent."""
        if self._closing:
            return
        limit = time.monotonic() + timeout_s
        at = self._now()
        self._put(lambda folder: folder.close(at))
        self._closing = True
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout_s)
        for sink in self._sinks:
            self._guarded(lambda sink=sink: sink.close(max(0.0, limit - time.monotonic())))  # type: ignore[misc]

    def abandon(self) -> None:
        """End as a kill does: nothing more is made, and sinks are left as they are. For tests of crashes."""
        self._closing = True
        self._waiting.clear()
        self._hurry.set()
        self._wake.set()
        self._thread.join(FINAL_S)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._count("an exporter could not be flushed")

    def statistics(self) -> dict[str, int]:
        """Return what waits and what was dropped, for people and tests."""
        return {
            "waiting": len(self._waiting),
            "open": self._folder.open_nodes,
            "dropped": self.dropped + sum(sink.dropped for sink in self._sinks),
        }


_MAX_CARRIERS = 10_000
_BREATH = 64
"""Events after which others get their turn: this thread shares its interpreter with the coordinator's loop."""


def _fold(folder: Folder, events: Sequence[tuple[Event, bytes | None]]) -> None:
    for number, (event, _) in enumerate(events):
        folder.event(event)
        if number % _BREATH == _BREATH - 1:
            time.sleep(0)


def _levels(past: Batch) -> dict[str, float]:
    """Return what values of metrics that go up and down have come to, where that is not 0."""
    found: dict[str, float] = {}
    for name, value, _ in past.measurements:
        if METRICS[name].kind is MetricKind.UP_DOWN:
            found[name] = found.get(name, 0) + value
    return {name: value for name, value in found.items() if value}


def _report(folder: Folder, items: Iterable[object], at: float) -> None:
    for item in items:
        if isinstance(item, ReportEnded):
            folder.report(item, at)


def _say(record: LogRecord) -> None:
    """Write a step of a cancel to Python's log, with the ids that lead to its trace."""
    level = logging.WARNING if record.is_warning else logging.INFO
    if cancel_logger.isEnabledFor(level):
        where = record.attributes.get("remit.run.id") or record.attributes.get("remit.turn.id")
        extra = {
            "otelTraceID": f"{record.trace_id:032x}",
            "otelSpanID": f"{record.span_id:016x}",
            "event_name": record.name,
            "attributes": record.attributes,
        }
        cancel_logger.log(level, "%s %s trace_id=%s", record.name, where, extra["otelTraceID"], extra=extra)
