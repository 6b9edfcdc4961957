"""What the daemon knows of every job: keys, states, stops that came first. Pure.

No clock, no I/O: every call is given the time in monotonic seconds, and what
has to be done is returned.

**Invariants**

1. A key of a scope names at most one job, from its reservation until it is
   released or forgotten; a reservation is there before anything is spawned.
2. A job is `pending`, then `running`, then `ended`, never backwards; a result
   is set once.
3. What is pending or running is never forgotten. Age counts from the end.
4. A stop that came first (tombstone of an id or key, arming of a run) refuses every
   later start that it covers, until it is forgotten by age.
5. A key is looked up inside its scope alone: a foreign key and an unknown one
   look the same.
6. Forgetting one job never removes another one that took its key since.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from remit.core.errors import InternalError
from remit.processes.jobs import JobResult, JobSpec

__all__ = ["Claim", "ClaimKind", "EarlyStop", "Record", "RecordState", "Records", "StopWish"]

_Name = tuple[str, str, str]
"""Scope, kind of name (`job`, `key` or `run`), and name: what an early stop covers."""

RETENTION_S = 3600.0
"""How long the result of an ended job stays known, in seconds."""
TOMBSTONE_S = 600.0
"""How long a stop that came before its start is remembered, in seconds."""
HARD_LIMIT_S = 5.0
"""Seconds after the grace within which a keeper reports, survivors included (`peel`, T_hard)."""
KEEPER_MARGIN_S = 2.0
"""Seconds beyond that until a keeper counts as stuck, is killed, and its tree swept."""
SWEEP_MARGIN_S = 1.0
"""Seconds beyond the hard limit of a sweep until its answer is given up."""
MAX_ENDED = 5_000
"""How many ended jobs are kept at most; the oldest go first."""


class RecordState(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    """Reserved; whether it runs is not known yet."""
    RUNNING = "running"
    """Its program runs, or a stop of it is under way."""
    ENDED = "ended"
    """Nothing of it is left, or what is left stands in the result."""


class ClaimKind(StrEnum):
    """What became of a request to start."""

    START = "start"
    """The key was free and is now reserved: spawn it."""
    ATTACHED = "attached"
    """It is there already, pending or running."""
    FINISHED = "finished"
    """It has ended already; the result is known."""
    TOMBSTONED = "tombstoned"
    """A stop came first; nothing may be started."""
    CONFLICT = "conflict"
    """The key stands for another command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWish:
    """A stop that somebody asked for."""

    cause: dict[str, Any] | None = None
    """Encoded cause, or None."""
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL."""
    kill: bool = False
    """Whether the grace is skipped."""

    @property
    def patience_s(self) -> float:
        """Return after how many seconds a keeper that has not reported counts as stuck."""
        return (0.0 if self.kill else self.grace_s) + HARD_LIMIT_S + KEEPER_MARGIN_S

    @property
    def limit_s(self) -> float:
        """Return after how many seconds a stop is proven or will not be, a sweep included."""
        return self.patience_s + HARD_LIMIT_S + SWEEP_MARGIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one job."""

    spec: JobSpec
    """What was asked for."""
    fingerprint: str
    """Digest of the command, see `JobSpec`."""
    state: RecordState = RecordState.PENDING
    """Where it stands."""
    generation: int = 0
    """Highest generation that started it or attached to it."""
    background: bool = False
    """Whether it outlives turns and leases."""
    pid: int = 0
    """Number of its program, 0 before it runs."""
    wish: StopWish | None = None
    """The first stop that was asked for, or None."""
    result: JobResult | None = None
    """How it ended, once it has."""
    asked_at: float = 0.0
    """When it was asked for, in monotonic seconds."""
    ended_at: float = math.inf
    """When it ended, in monotonic seconds."""

    @property
    def job(self) -> str:
        """Return the job's id."""
        return self.spec.job

    @property
    def is_live(self) -> bool:
        """Tell whether it has not ended."""
        return self.state is not RecordState.ENDED

    @property
    def is_foreground(self) -> bool:
        """Tell whether it has not ended, and ends with whoever vouches for it."""
        return self.is_live and not self.background


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to a request to start."""

    kind: ClaimKind
    """What became of it."""
    record: Record | None = None
    """The job it is about; None when a stop came first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """A stop that came before its start."""

    scope: str
    """The workspace."""
    kind: str
    """What the names are: `job`, `key` or `run`."""
    names: tuple[str, ...]
    """Which starts it refuses."""
    generation: int | None
    """The highest generation that it refuses; None for all."""
    at: float
    """When it came, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A stop that came first: which generations it covers, and when it came."""

    generation: float
    at: float

    def covers(self, generation: int) -> bool:
        return generation <= self.generation


class Records:
    """All jobs, keys and early stops of one daemon."""

    __slots__ = ("_jobs", "_keys", "_tombstones")

    def __init__(self) -> None:
        self._jobs: dict[str, Record] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._tombstones: dict[_Name, _Stopped] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._jobs.values()))

    def get(self, job: str) -> Record | None:
        """Return a job by its id, whatever its scope."""
        return self._jobs.get(job)

    def find(self, scope: str, *, job: str = "", key: str = "") -> Record | None:
        """Return a job of this scope by id, else by key; None for foreign and unknown ones alike."""
        record = self._jobs.get(job) if job else self._jobs.get(self._keys.get((scope, key), ""))
        return record if record is not None and record.spec.scope == scope else None

    def claim(self, spec: JobSpec, fingerprint: str, *, now: float) -> Claim:
        """Decide on a request to start; reserve id and key if it is the first.

        The same job id twice is the same request sent twice. An empty key is
        nobody's and never attaches.
        """
        record = self.find(spec.scope, job=spec.job) or (self.find(spec.scope, key=spec.key) if spec.key else None)
        if record is None and spec.job in self._jobs:
            return Claim(ClaimKind.CONFLICT)  # an id of another scope: made up, never ours to show
        if record is not None and record.fingerprint != fingerprint:
            return Claim(ClaimKind.CONFLICT, record)
        if record is not None and not record.is_live:
            return Claim(ClaimKind.FINISHED, record)
        if self._is_refused(spec):
            return Claim(ClaimKind.TOMBSTONED)
        if record is not None:
            return Claim(
                ClaimKind.ATTACHED, self._put(replace(record, generation=max(record.generation, spec.generation)))
            )
        record = Record(
            spec=spec, fingerprint=fingerprint, generation=spec.generation, background=spec.background, asked_at=now
        )
        return Claim(ClaimKind.START, self._reserve(record))

    def adopt(
        self,
        spec: JobSpec,
        fingerprint: str,
        *,
        pid: int = 0,
        is_running: bool = True,
        background: bool,
        asked_at: float,
    ) -> Record:
        """Take over a job that an earlier daemon started; `end` follows if it has ended."""
        return self._reserve(
            Record(
                spec=spec,
                fingerprint=fingerprint,
                state=RecordState.RUNNING if is_running else RecordState.PENDING,
                generation=spec.generation,
                background=background,
                pid=pid,
                asked_at=asked_at,
            )
        )

    def publish(self, job: str, *, pid: int) -> Record:
        """Note that a pending job runs; its `wish`, if any, has to be carried out now."""
        record = self._live(job)
        if record.state is not RecordState.PENDING:
            raise InternalError(f"job {job!r} was published twice")
        return self._put(replace(record, state=RecordState.RUNNING, pid=pid))

    def release(self, job: str) -> None:
        """Give id and key of a job back whose program was never started."""
        if self._live(job).state is not RecordState.PENDING:
            raise InternalError(f"job {job!r} runs; it cannot be released")
        self._forget(job)

    def end(self, job: str, result: JobResult, *, now: float) -> Record:
        """Note how a job ended; a second result is ignored and the first returned."""
        record = self._jobs.get(job)
        if record is None:
            raise InternalError(f"job {job!r} ended and is not known")
        if not record.is_live:
            return record
        return self._put(replace(record, state=RecordState.ENDED, result=result, ended_at=now))

    def wish_stop(self, job: str, wish: StopWish) -> Record:
        """Note that a live job is to stop. The first cause stays, a shorter grace wins."""
        record = self._live(job)
        if record.wish is not None:
            first = record.wish
            wish = replace(first, grace_s=min(first.grace_s, wish.grace_s), kill=first.kill or wish.kill)
        return self._put(replace(record, wish=wish))

    def detach(self, job: str) -> Record:
        """Make a live job a background one."""
        return self._put(replace(self._live(job), background=True))

    def bury(
        self, scope: str, *, now: float, job: str = "", key: str = "", generation: int | None = None
    ) -> tuple[EarlyStop, ...]:
        """Refuse later starts of this id and this key, up to a generation; None refuses all. Return the stops."""
        stops = tuple(
            EarlyStop(scope=scope, kind=kind, names=(name,), generation=generation, at=now)
            for kind, name in (("job", job), ("key", key))
            if name
        )
        for stop in stops:
            self.restore_stop(stop)
        return stops

    def arm(
        self, scope: str, runs: Collection[str], *, now: float, generation: int | None = None
    ) -> tuple[EarlyStop, ...]:
        """Refuse later starts by these runs, up to a generation; None refuses all. Return the stop, if there is one."""
        if not runs:
            return ()
        stop = EarlyStop(scope=scope, kind="run", names=tuple(runs), generation=generation, at=now)
        self.restore_stop(stop)
        return (stop,)

    def restore_stop(self, stop: EarlyStop) -> None:
        """Take a stop over, in addition to those that are known."""
        for text in stop.names:
            name = (stop.scope, stop.kind, text)
            self._tombstones[name] = _merge(self._tombstones.get(name), stop.generation, stop.at)

    def stops(self) -> Iterator[EarlyStop]:
        """Return all early stops that are not forgotten."""
        together: dict[tuple[str, str, _Stopped], list[str]] = {}
        for (scope, kind, name), stop in self._tombstones.items():
            together.setdefault((scope, kind, stop), []).append(name)
        for (scope, kind, stop), names in together.items():
            generation = None if math.isinf(stop.generation) else int(stop.generation)
            yield EarlyStop(scope=scope, kind=kind, names=tuple(names), generation=generation, at=stop.at)

    def prune_stops(self, now: float) -> None:
        """Forget the early stops that are old."""
        self._tombstones = _younger(self._tombstones, now)

    def select(
        self,
        *,
        scope: str | None = None,
        session: str | None = None,
        turn: str | None = None,
        runs: Collection[str] | None = None,
    ) -> tuple[Record, ...]:
        """Return the jobs that match everything given, oldest first."""
        return tuple(
            record
            for record in self._jobs.values()
            if (scope is None or record.spec.scope == scope)
            and (session is None or record.spec.session == session)
            and (turn is None or record.spec.turn == turn)
            and (runs is None or record.spec.run in runs or (not record.spec.run and record.spec.turn in runs))
        )

    def foreground(self, scope: str) -> tuple[Record, ...]:
        """Return the live jobs of a scope that end with its lease."""
        return tuple(record for record in self.select(scope=scope) if record.is_foreground)

    def prune(self, now: float, *, retention_s: float = RETENTION_S, max_ended: int = MAX_ENDED) -> tuple[Record, ...]:
        """Forget what is old; return the jobs that were forgotten, oldest end first."""
        self.prune_stops(now)
        ended = sorted((record for record in self._jobs.values() if not record.is_live), key=lambda r: r.ended_at)
        surplus = max(0, len(ended) - max_ended)
        old = [record for at, record in enumerate(ended) if at < surplus or record.ended_at + retention_s <= now]
        for record in old:
            self._forget(record.job)
        return tuple(old)

    def _is_refused(self, spec: JobSpec) -> bool:
        names = (("job", spec.job), ("key", spec.key), ("run", spec.run or spec.turn))
        stops = [self._tombstones.get((spec.scope, kind, name)) for kind, name in names if name]
        return any(stop is not None and stop.covers(spec.generation) for stop in stops)

    def _live(self, job: str) -> Record:
        record = self._jobs.get(job)
        if record is None or not record.is_live:
            raise InternalError(f"job {job!r} is not live")
        return record

    def _reserve(self, record: Record) -> Record:
        if record.spec.key:
            self._keys[record.spec.scope, record.spec.key] = record.job
        return self._put(record)

    def _put(self, record: Record) -> Record:
        self._jobs[record.job] = record
        return record

    def _forget(self, job: str) -> None:
        record = self._jobs.pop(job)
        name = (record.spec.scope, record.spec.key)
        if self._keys.get(name) == job:
            del self._keys[name]


def _merge(known: _Stopped | None, generation: int | None, now: float) -> _Stopped:
    covered = math.inf if generation is None else generation
    return _Stopped(max(covered, known.generation if known else -math.inf), max(now, known.at if known else now))


def _younger(stops: dict[_Name, _Stopped], now: float) -> dict[_Name, _Stopped]:
    return {name: stop for name, stop in stops.items() if stop.at + TOMBSTONE_S > now}
