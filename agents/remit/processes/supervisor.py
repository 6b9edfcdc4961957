"""The jobs of a daemon and their keepers: start, attach, hear of the end, sweep after a lost one.

**Invariants**

1. Every request is answered once: at once, when what it waits for has
   happened, or at its limit. An answer to a peer that has gone is dropped, and
   what it had asked for goes on.
2. A reservation is there before a keeper is forked, and everything that comes
   for it meanwhile waits for its outcome.
3. A job ends in exactly one result: the keeper's, or the sweeper's when the
   keeper is gone.
4. A stop reaches the keeper at once, also while the start is under way; a
   keeper that does not end in time is killed and its tree swept.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from remit.core.clock import Clock
from remit.core.errors import CommandNotStarted, ProcessKeyConflict, ProcessProtocolError, RemitError
from remit.processes.answers import StartAnswer, StartKind
from remit.processes.channel import Channel
from remit.processes.jobs import RESULT_NAME, JobOutcome, JobResult, JobSpec, JobState, read_record
from remit.processes.leases import LEASE_S, Leases
from remit.processes.nodes import Nodes
from remit.processes.place import Place
from remit.processes.records import Claim, ClaimKind, Record, Records, RecordState, StopWish
from remit.processes.seams import Forks, Open, Start
from remit.processes.table import ProcessIdentity, SystemTable
from remit.processes.timers import Timer, Timers

__all__ = ["Supervisor"]

_REAP_DELAY_S = 0.05


@dataclass(slots=True)
class _Live:
    """What the daemon holds of a job that has not ended."""

    channel: Channel | None = None
    keeper: ProcessIdentity | None = None
    is_swept: bool = False
    overdue: Timer | None = None
    starters: deque[Start] = field(default_factory=deque[Start])
    on_end: list[Callable[[JobResult | None], None]] = field(default_factory=list[Callable[[JobResult | None], None]])
    on_detach: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Supervisor:
    """All jobs of one daemon, and the rules between them.

    Args:
        place: where the jobs' directories are.
        clock: monotonic seconds of the machine.
        timers: run by the loop.
        forks: makes keepers and sweepers.
        open_channel: makes channels in the loop's selector.
        log: takes one line for people.
        nodes: the Ray nodes that programs were started for.
        lease_s: how long a start vouches for its scope, in seconds.
    """

    def __init__(
        self,
        place: Place,
        *,
        clock: Clock,
        timers: Timers,
        forks: Forks,
        open_channel: Open,
        log: Callable[[str], None],
        nodes: Nodes,
        lease_s: float = LEASE_S,
    ) -> None:
        self.nodes = nodes
        self.lease_s = lease_s
        self.records = Records()
        self.leases = Leases()
        self._place = place
        self._clock = clock
        self._timers = timers
        self._forks = forks
        self._open = open_channel
        self._log = log
        self._live: dict[str, _Live] = {}
        self._channels: set[Channel] = set()
        self._starting: set[str] = set()

    @property
    def live_count(self) -> int:
        """Return how many jobs have not ended."""
        return len(self._live)

    @property
    def is_starting(self) -> bool:
        """Tell whether a keeper is at the start of its program."""
        return bool(self._starting)

    # --- start ---------------------------------------------------------------------------------

    def start(self, start: Start) -> None:
        """Start a job, or attach to it; answers when the program runs or cannot."""
        now = self._clock.monotonic()
        claim = self.records.claim(start.spec, start.fingerprint, now=now)
        if claim.kind in (ClaimKind.START, ClaimKind.ATTACHED) and not start.spec.background:
            self.leases.renew(start.spec.scope, now=now, ttl_s=self.lease_s)
            if claim.record is not None:
                self.nodes.serve(claim.record.job, start.node)
        if claim.kind is ClaimKind.START:
            self._live[start.spec.job] = _Live(starters=deque([start]))
            self._starting.add(start.spec.job)
            self._fork(start)
        elif claim.kind is ClaimKind.ATTACHED and claim.record is not None and not claim.record.pid:
            self._live[claim.record.job].starters.append(start)
        else:
            start.answered(_answer(start.spec, claim))

    def _fork(self, start: Start) -> None:
        spec = start.spec
        jobdir = self._place.job(spec.job)
        try:
            keeper, connection = self._forks.keeper(
                spec, digest=start.fingerprint, env=start.env, jobdir=jobdir, stdin=start.stdin
            )
        except OSError as error:
            what = f"its keeper cannot be started: {error}; free memory or processes"
            self._not_started(spec.job, f"cannot start {spec.argv[0]!r}: {what}", error.errno)
            return
        self._hold(spec.job, connection, keeper)

    def _hold(self, job: str, connection: socket, keeper: ProcessIdentity | None) -> None:
        live = self._live[job]
        live.keeper = keeper

        def on_close(channel: Channel) -> None:
            self._channels.discard(channel)
            # Its status can be taken a moment after its socket closed; no event of ours tells when.
            self._timers.call_at(self._clock.monotonic() + _REAP_DELAY_S, self._forks.reap)
            self._keeper_gone(job)

        def on_message(channel: Channel, message: dict[str, Any]) -> None:
            if message.get("op") == "idle" and keeper is not None and job not in self._live:
                self._channels.discard(channel)
                self._forks.take_back(keeper, channel.release())
            else:
                self._keeper_said(job, message)

        live.channel = self._open(connection, on_message=on_message, on_close=on_close)
        self._channels.add(live.channel)

    def _drop(self, job: str) -> _Live:
        """Forget what is held of a live job; its keeper may linger, and is not told anything any more."""
        live = self._live.pop(job)
        self._starting.discard(job)
        self.nodes.forget(job)
        if live.overdue is not None:
            live.overdue.cancel()
        return live

    def _not_started(self, job: str, error: str, errno: int | None) -> None:
        """Tell the one who asked, give the key back, and let the next one who waits have it."""
        self.records.release(job)
        live = self._drop(job)
        shutil.rmtree(self._place.job(job), ignore_errors=True)
        if live.starters:  # none, if an earlier daemon was asked
            owner = live.starters.popleft()
            owner.answered(CommandNotStarted(error, program=owner.spec.argv[0], errno=errno))
        for told in live.on_end:
            told(None)
        for start in live.starters:
            # Somebody whose connection is gone has nobody to start for any more.
            if start.wanted():
                self.start(start)

    # --- what keepers say ----------------------------------------------------------------------

    def adopt(self, spec: JobSpec, fingerprint: str, state: JobState, connection: socket) -> None:
        """Take over a living keeper that an earlier daemon forked; `connection` is its lifeline."""
        self._live[spec.job] = _Live()
        self.records.adopt(
            spec,
            fingerprint,
            pid=state.root.pid if state.root else 0,
            is_running=state.root is not None,
            background=state.background,
            asked_at=state.started_monotonic or self._clock.monotonic(),
        )
        self._hold(spec.job, connection, state.keeper)

    def adopt_lost(self, spec: JobSpec, fingerprint: str) -> None:
        """Take over a job whose keeper is gone, and sweep it."""
        self._live[spec.job] = _Live()
        now = self._clock.monotonic()
        self.records.adopt(spec, fingerprint, pid=0, background=spec.background, asked_at=now)
        self._keeper_gone(spec.job)

    def adopt_ended(self, spec: JobSpec, fingerprint: str, result: JobResult, *, ended_at: float) -> None:
        """Take over the result of a job that has ended; `ended_at` in monotonic seconds."""
        background = result.backgrounded or spec.background
        self.records.adopt(spec, fingerprint, pid=0, background=background, asked_at=ended_at - result.duration_s)
        self.records.end(spec.job, result, now=ended_at)

    def _keeper_said(self, job: str, message: dict[str, Any]) -> None:
        if job not in self._live:
            return  # it has reported its end and only lingers over survivors
        try:
            self._take(job, message)
        except (ProcessProtocolError, KeyError, TypeError) as error:
            # A keeper of another version; its end is seen all the same, and then its files are read.
            self._log(f"the keeper of {job} said what cannot be understood: {error}")

    def _take(self, job: str, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "started" or (op == "answer" and message.get("kind") == "attached"):
            self._started(job, JobState.from_dict(message["state"]))
        elif op == "backgrounded" or (op == "answer" and message.get("kind") == "detached"):
            self._detached(job)
        elif op == "ended":
            self._ended(job, JobResult.from_dict(message["result"]))

    def _started(self, job: str, state: JobState) -> None:
        live = self._live[job]
        live.keeper = state.keeper
        self._starting.discard(job)
        known = self.records.get(job)
        if state.root is None or (known is not None and known.state is not RecordState.PENDING):
            return  # taken over: before its program was executed, or when that was known already
        record = self.records.publish(job, pid=state.root.pid)
        while live.starters:
            start = live.starters.popleft()
            kind = StartKind.STARTED if start.spec.job == job else StartKind.ATTACHED
            start.answered(StartAnswer(kind=kind, job=job, pid=record.pid, generation=record.generation))

    def _detached(self, job: str) -> None:
        self.records.detach(job)
        live = self._live[job]
        told, live.on_detach = live.on_detach, []
        for call in told:
            call()

    def _ended(self, job: str, result: JobResult) -> None:
        record = self.records.get(job)
        if record is not None and record.state is RecordState.PENDING and result.outcome is JobOutcome.NOT_STARTED:
            self._not_started(job, result.error, result.errno)
            return
        record = self.records.end(job, result, now=self._clock.monotonic())
        live = self._drop(job)
        for start in live.starters:
            start.answered(_answer(start.spec, Claim(ClaimKind.FINISHED, record)))
        for told in live.on_end:
            told(result)
        for call in live.on_detach:
            call()

    def _keeper_gone(self, job: str) -> None:
        live = self._live.get(job)
        if live is None:
            return
        record = self.records.get(job)
        assert record is not None
        live.channel = None
        jobdir = self._place.job(job)
        result = _read_result(jobdir)
        if result is not None:
            self._ended(job, result)
        elif live.is_swept:
            self._ended(job, _lost(job, "its keeper was killed, and so was the process that swept after it"))
        else:
            live.is_swept = True
            self._log(f"the keeper of {job} is gone; sweeping")
            try:
                _, connection = self._forks.sweeper(
                    record.spec,
                    digest=record.fingerprint,
                    jobdir=jobdir,
                    keeper=live.keeper.pid if live.keeper else 0,
                )
            except OSError as error:
                self._ended(job, _lost(job, f"its keeper was killed, and nothing could be swept: {error}"))
            else:
                self._hold(job, connection, None)

    # --- what others build on ------------------------------------------------------------------

    def tell_stop(self, record: Record, wish: StopWish) -> None:
        """Note that a live job is to stop, and tell its keeper, which may not even have started it."""
        record = self.records.wish_stop(record.job, wish)
        wish = record.wish or wish
        live = self._live[record.job]
        if live.channel is not None and not live.is_swept:
            live.channel.send("stop", cause=wish.cause, grace_s=wish.grace_s, kill=wish.kill)
        if live.overdue is not None:
            live.overdue.cancel()
        when = self._clock.monotonic() + wish.patience_s
        live.overdue = self._timers.call_at(when, lambda: self._kill_keeper(live))

    def _kill_keeper(self, live: _Live) -> None:
        """End a keeper that was told to stop and neither did nor reported; its end begins the sweep."""
        if live.channel is not None and live.keeper is not None and not live.is_swept:
            self._log(f"keeper {live.keeper.pid} did not answer a stop; killing it")
            SystemTable().send(live.keeper, signal.SIGKILL)

    def when_ended(
        self, job: str, settled: Callable[[bool, JobResult | None], None], *, limit_s: float | None = None
    ) -> Callable[[], None]:
        """Call back once when a live job has ended, or its start has failed, or the limit is over.

        Args:
            job: id of a live job.
            settled: called with whether it has ended, and its result; ended without a result
                means that its program was never started.
            limit_s: seconds; None waits for ever.

        Returns:
            A function that calls it off.
        """
        is_open = True

        def settle(ended: bool, result: JobResult | None) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                timer.cancel()
                settled(ended, result)

        def call_off() -> None:
            nonlocal is_open
            is_open = False
            timer.cancel()
            # Else a job that runs for days keeps everybody who ever looked.
            live = self._live.get(job)
            if live is not None and on_end in live.on_end:
                live.on_end.remove(on_end)

        def on_end(result: JobResult | None) -> None:
            settle(True, result)

        def expire() -> None:
            call_off()
            settled(False, None)

        when = math.inf if limit_s is None else self._clock.monotonic() + limit_s
        timer = self._timers.call_at(when, expire) if limit_s is not None else Timer(when, expire)
        self._live[job].on_end.append(on_end)
        return call_off

    def detach(self, record: Record, done: Callable[[], None]) -> None:
        """Make a live job the session's; `done` when its keeper knows, or it has ended."""
        live = self._live[record.job]
        live.on_detach.append(done)
        if live.channel is not None:
            live.channel.send("detach")

    def prune(self) -> None:
        """Forget what is old, and remove its directories."""
        for record in self.records.prune(self._clock.monotonic()):
            shutil.rmtree(self._place.job(record.job), ignore_errors=True)

    def close(self) -> None:
        """Let go of every keeper, as a death would; they wait for the next daemon."""
        for channel in self._channels:
            channel.close()


def _answer(spec: JobSpec, claim: Claim) -> StartAnswer | ProcessKeyConflict:
    """Return what a claim means to the one who asked, when nothing has to be waited for."""
    if claim.kind is ClaimKind.CONFLICT:
        return ProcessKeyConflict(
            f"key {spec.key!r} stands for another command in this workspace, not for {spec.argv[0]!r} as given; "
            "use another key, or give the same arguments, directory, environment and input",
            key=spec.key,
        )
    record = claim.record
    if record is None:
        return StartAnswer(kind=StartKind.TOMBSTONED, job=spec.job)
    return StartAnswer(
        kind=StartKind.FINISHED if record.result is not None else StartKind.ATTACHED,
        job=record.job,
        pid=record.pid if record.result is None else 0,
        generation=record.generation,
        result=record.result,
    )


def _read_result(jobdir: Path) -> JobResult | None:
    try:
        return read_record(jobdir / RESULT_NAME, JobResult)
    except (OSError, RemitError):  # garbage is no result: the tree is swept, and the sweep's result stands
        return None


def _lost(job: str, error: str) -> JobResult:
    return JobResult(job=job, outcome=JobOutcome.KEEPER_LOST, error=error, ended_at=time.time())
