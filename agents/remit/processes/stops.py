"""Stopping jobs: one, all that some runs started, and what nobody vouches for any more.

**Invariants**

1. A stop that finds nothing says so, and with a tombstone refuses the start
   that may still come; a start that is under way is waited for, never taken for
   nothing.
2. "Stopped" is said only with a result, or where the start failed by itself.
3. Background jobs are ended by nothing but a stop of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from remit.core.cause import Cause, CauseKind
from remit.core.clock import Clock
from remit.processes.answers import StopAnswer, StopKind, StopSummary
from remit.processes.jobs import JobResult
from remit.processes.records import EarlyStop, Record, RecordState, StopWish
from remit.processes.supervisor import Supervisor

__all__ = ["Stops"]


class Stops:
    """The stops of one daemon.

    Args:
        supervisor: whose jobs are stopped.
        clock: monotonic seconds of the machine.
        log: takes one line for people.
        came_early: called with the stops that refuse a later start, before they are answered.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        clock: Clock,
        log: Callable[[str], None],
        came_early: Callable[[Iterable[EarlyStop]], None],
    ) -> None:
        self._came_early = came_early
        self._supervisor = supervisor
        self._records = supervisor.records
        self._clock = clock
        self._log = log

    def stop(
        self,
        scope: str,
        *,
        job: str,
        key: str,
        wish: StopWish,
        tombstone: bool,
        generation: int | None,
        limit_s: float | None,
        answered: Callable[[StopAnswer], None],
    ) -> None:
        """Stop one job, by id, else by key; answers when its end is proven or the limit is over."""
        record = (self._records.find(scope, job=job) if job else None) or (
            self._records.find(scope, key=key) if key else None
        )
        if record is None:
            if tombstone:
                now = self._clock.monotonic()
                self._came_early(self._records.bury(scope, job=job, key=key, now=now, generation=generation))
            answered(StopAnswer(kind=StopKind.PROCESS_KEY_NOT_FOUND))
            return
        if not record.is_live:
            answered(StopAnswer(kind=StopKind.NOT_RUNNING, job=record.job, result=record.result))
            return
        name = record.job
        self._supervisor.when_ended(
            name,
            lambda ended, result: answered(self._answer(name, ended, result)),
            limit_s=wish.limit_s if limit_s is None else limit_s,
        )
        self._supervisor.tell_stop(record, wish)

    def _answer(self, job: str, ended: bool, result: JobResult | None) -> StopAnswer:
        if result is not None:
            return StopAnswer(kind=StopKind.STOPPED, job=job, result=result)
        if ended:  # its start failed while we waited, so there is no such process
            return StopAnswer(kind=StopKind.PROCESS_KEY_NOT_FOUND)
        record = self._records.get(job)
        is_pending = record is not None and record.state is RecordState.PENDING
        return StopAnswer(kind=StopKind.START_PENDING if is_pending else StopKind.UNCONFIRMED, job=job)

    def stop_many(
        self,
        scope: str,
        *,
        runs: Collection[str],
        wish: StopWish,
        foreground_only: bool,
        generation: int | None,
        limit_s: float | None,
        answered: Callable[[StopSummary], None],
    ) -> None:
        """Stop what these runs (or turns) started, and refuse what they start later."""
        self._came_early(self._records.arm(scope, runs, now=self._clock.monotonic(), generation=generation))
        found = [record for record in self._records.select(scope=scope, runs=runs) if record.is_live]
        spared = tuple(record.job for record in found if foreground_only and record.background)
        stopping = [record for record in found if record.job not in spared]
        self._stop_all(stopping, wish, spared=spared, limit_s=limit_s, answered=answered)

    def release(self, scope: str, *, wish: StopWish, answered: Callable[[StopSummary], None]) -> None:
        """End the lease of a scope in good order: its foreground jobs stop now."""
        self._supervisor.leases.release(scope)
        self._stop_all(self._records.foreground(scope), wish, limit_s=None, answered=answered)

    def expire(self) -> None:
        """Stop the foreground jobs of every scope whose lease has ended, and of every Ray node that has gone."""
        for lease in self._supervisor.leases.expire(self._clock.monotonic()):
            jobs = self._records.foreground(lease.scope)
            if jobs:
                self._log(
                    f"nobody vouches for {lease.scope} any more ({lease.holder or 'no holder'}): {len(jobs)} jobs end"
                )
            self._end(jobs, _lost_cause(lease.scope, "the lease of the workspace's coordinator ended"))
        gone = self._supervisor.nodes.expire(self._clock.monotonic())
        jobs = tuple(job for name in gone if (job := self._records.get(name)) is not None and job.is_foreground)
        if jobs:
            self._log(f"a Ray node has gone: {len(jobs)} jobs end")
        for job in jobs:
            self._end((job,), _lost_cause(job.spec.scope, "the Ray node that it was started for has gone"))

    def _end(self, jobs: Iterable[Record], cause: Cause) -> None:
        self._stop_all(jobs, StopWish(cause=cause.to_dict()), limit_s=None, answered=_ignore)

    def _stop_all(
        self,
        records: Iterable[Record],
        wish: StopWish,
        *,
        spared: tuple[str, ...] = (),
        limit_s: float | None,
        answered: Callable[[StopSummary], None],
    ) -> None:
        """Stop these at the same time; answers once, when the last has ended or the limit is over."""
        waiting = {record.job for record in records}
        unconfirmed: list[str] = []
        results: list[JobResult] = []

        def waiter(job: str) -> Callable[[bool, JobResult | None], None]:
            def settle(ended: bool, result: JobResult | None) -> None:
                waiting.discard(job)
                if result is not None:
                    results.append(result)
                elif not ended:
                    unconfirmed.append(job)
                if not waiting:
                    finish()

            return settle

        def finish() -> None:
            answered(StopSummary(stopped=tuple(results), unconfirmed=tuple(unconfirmed), spared=spared))

        for record in tuple(records):
            limit = wish.limit_s if limit_s is None else limit_s
            self._supervisor.when_ended(record.job, waiter(record.job), limit_s=limit)
            self._supervisor.tell_stop(record, wish)
        if not waiting:
            finish()


def _lost_cause(scope: str, reason: str) -> Cause:
    return Cause(
        kind=CauseKind.PARENT_LOST,
        origin=scope,
        actor="procd",
        surface="procd",
        at_unix_ms=time.time_ns() // 1_000_000,
        reason=reason,
    )


def _ignore(summary: StopSummary) -> None:
    """Nobody waits for this answer."""
