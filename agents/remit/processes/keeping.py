"""The life of one job inside its keeper: start, watch, stop, result; without any connection.

**Invariants**

1. There is one cause of the end, taken once: an exit that is there before the
   first signal of a stop, or the first stop that was asked for.
2. The exit status is the kernel's and apart from the cause.
3. There is one result; its file is in its place before anybody is told, and on the disk before the keeper ends.
4. Nothing of the tree is signalled once it is proven empty.
5. A stop that comes before the program's start ends the job without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from remit.core.cause import Cause, CauseKind
from remit.processes.capping import CappedFile, OutputGuard, keep, punch
from remit.processes.connections import InputPipe
from remit.processes.containment import Cgroup, Containment
from remit.processes.draft import Draft
from remit.processes.filing import JobFiles
from remit.processes.jobs import (
    ExitStatus,
    JobOutcome,
    JobPhase,
    JobResult,
    JobSpec,
    JobState,
    StopCause,
    boot_id,
)
from remit.processes.launch import (
    StartFailure,
    Waiting,
    describe_failure,
    environment,
    fork_waiting,
    prefer_as_victim,
    spawn,
)
from remit.processes.output import STDERR_NAME, STDOUT_NAME
from remit.processes.peel import Peel, Reach, StopOutcome, Track, TreeStop
from remit.processes.table import ProcessIdentity
from remit.processes.tree import identify

__all__ = ["FAILPOINTS", "Keeping"]

FAILPOINTS = (
    "recorded",
    "forked",
    "gate_opened",
    "executed",
    "stop_begun",
    "stop_stepped",
    "empty",
    "result_written",
    "told",
)
"""Places in the life of a job, in order, at which a failpoint is called; without a gate, two are passed over."""

_SAMPLE_S = 0.1
"""Pause between two looks at the table where there is no subreaper: who was seen once is remembered."""
_START_LIMIT_S = 1.0
"""How long a stop waits for an exec under way; before it, the program has no handler for SIGTERM."""
_SAVE_DELAY_S = 0.002
"""How long after its start the record of a running program is written; most of the time a core is free then."""
_LINGER_S = 0.5
"""Pause between two attempts to end what could not be ended, or to write what could not be written."""
_LATE_ROUND = 1_000
"""Number of a round in which everything is tried."""


class Keeping:
    """One job, from its start to its result.

    Args:
        spec: what is to be run.
        env: the whole environment of the program, but for the marks.
        jobdir: where state and result are written.
        stdin: bytes for standard input, if the spec says `data`.
        containment: what may be used.
        keeper: identity of this process.
        epoch: of the supervisor that holds the lifeline first.
        reattach_grace_s: seconds that a foreground job goes on without a lifeline.
        tell: called with `started`, `backgrounded` or `ended`, and a JSON object.
        failpoint: called with each word of `FAILPOINTS`.
        digest: fingerprint of the command, for a daemon that does not know the environment.
        cgroup: the group that holds the tree, or None.
        is_gated: whether the program is to wait at a gate and die with its keeper, see
            `remit.processes.launch`; else this process is in the group as well.
        waiting: the child that waits at the gate, forked ahead and in the group; None forks one.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        env: Mapping[str, str],
        jobdir: Path,
        stdin: bytes | None,
        containment: Containment,
        keeper: ProcessIdentity,
        epoch: int,
        reattach_grace_s: float,
        tell: Callable[[str, dict[str, Any]], None],
        failpoint: Callable[[str], None],
        digest: str = "",
        cgroup: Cgroup | None = None,
        is_gated: bool = True,
        waiting: Waiting | None = None,
    ) -> None:
        self.spec = spec
        self.result: JobResult | None = None
        self.input: InputPipe | None = None
        self.report: int | None = None
        self.is_done = False
        self._env = environment(spec, env)
        self._files = JobFiles(jobdir, retry_s=reattach_grace_s)
        self._stdin = stdin
        self._containment = containment
        self._reattach_grace_s = reattach_grace_s
        self._tell = tell
        self._failpoint = failpoint
        self._digest = digest
        self._cgroup = cgroup
        self._is_gated = is_gated
        self._waiting = waiting
        self._reach: Reach | None = None
        self._guard: OutputGuard | None = None
        self._guard_at = 0.0
        self._sample_at = 0.0
        self._orphan_at: float | None = None
        self._timeout_at: float | None = None
        self._cause: StopCause | None = None
        self._cause_data: dict[str, Any] | None = None
        self._grace_s = spec.grace_s
        self._asked_at = 0.0
        self._stop: TreeStop | None = None
        self._failure: StartFailure | None = None
        self._linger_at = 0.0
        self._save_at: float | None = None
        self.state = JobState(
            job=spec.job,
            phase=JobPhase.STARTING,
            boot=boot_id(),
            token=spec.job,
            keeper=keeper,
            epoch=epoch,
            background=spec.background,
            containment=self._level(),
            cgroup="" if self._cgroup is None else str(self._cgroup.path),
            started_at=time.time(),
            started_monotonic=time.monotonic(),
        )

    # -- start ------------------------------------------------------------------------------

    def record(self, draft: Draft | None) -> Draft | None:
        """Make the directory of the job, before anything of the program runs; without it the job has ended.

        Args:
            draft: made ahead; None makes one.

        Returns:
            What became the directory, or None.
        """
        try:
            used = self._files.make(draft, self.spec, self.state, digest=self._digest)
        except OSError as error:
            self._fail("files", error)
            return None
        self._failpoint("recorded")
        return used

    def abandon(self) -> None:
        """Forget a job of which nothing was started and nobody knows."""
        if self._waiting is not None:
            self._waiting.dismiss()
            self._waiting = None
        self._files.remove()
        self.is_done = True

    def start(self) -> None:
        """Start the program; what keeps it from starting becomes the result."""
        if self.result is not None:
            return
        try:
            self._launch()
        except OSError as error:
            self._fail("files" if error.filename else "fork", error)

    def _fail(self, stage: str, error: OSError) -> None:
        text = describe_failure(self.spec, stage=stage, number=error.errno, text=error.strerror or str(error))
        self._failure = StartFailure(error.errno, text)
        if self._reach is None:
            self._finish(StopOutcome(), time.monotonic())

    def _launch(self) -> None:
        folder = Path(self.spec.output_dir)
        _make_folder(folder)
        files = (
            CappedFile.open(folder / STDOUT_NAME, cap=self.spec.output_cap),
            CappedFile.open(folder / STDERR_NAME, cap=self.spec.output_cap),
        )
        self._guard = OutputGuard(files, punch=punch if self._containment.holes else keep)
        waiting = self._take_waiting() if self._is_gated else None
        stdin = self._open_input()
        stdio = (stdin, files[0].descriptor, files[1].descriptor)
        try:
            if waiting is None:
                self._spawn(stdio)
            else:
                self._open_gate(waiting, stdio)
        finally:
            os.close(stdin)
        if self.spec.timeout_s is not None:
            self._timeout_at = time.monotonic() + self.spec.timeout_s

    def _spawn(self, stdio: tuple[int, int, int]) -> None:
        child = spawn(self.spec, self._env, stdio)
        if isinstance(child, StartFailure):
            self._failure = child
            self._finish(StopOutcome(), time.monotonic())
            return
        self._hold(child)
        self._be_running()
        prefer_as_victim(child)

    def _hold(self, pid: int) -> None:
        """Take a child as the root of the tree."""
        root = identify(pid)
        # A child that was not waited for is there, dead or alive.
        self._reach = self._make_reach(root or ProcessIdentity(pid, 0))
        self.state = replace(self.state, root=root)

    def _take_waiting(self) -> Waiting:
        """Return the child that was forked ahead, or a new one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.is_there():
            waiting.dismiss()
            waiting = None
        waiting = waiting or fork_waiting(self._cgroup)
        self.report = waiting.report
        self._hold(waiting.pid)
        self._failpoint("forked")
        return waiting

    def _open_gate(self, waiting: Waiting, stdio: tuple[int, int, int]) -> None:
        # Nothing of the program has run yet, and nothing will if the record cannot be made.
        try:
            self._files.save(self.state)
        except OSError:
            waiting.gate.close()  # the child ends without having executed anything
            raise
        waiting.order(self.spec, self._env, stdio)
        self._failpoint("gate_opened")

    def _make_reach(self, root: ProcessIdentity) -> Reach:
        if self._containment.subreaper:
            return Peel(root, cgroup=self._cgroup, is_inside=not self._is_gated, use_pidfd=self._containment.pidfd)
        return Track(root, token=self.state.token, cgroup=self._cgroup, use_pidfd=self._containment.pidfd)

    def _open_input(self) -> int:
        """Return what becomes standard input; what is to be fed stays with the keeper."""
        if self.spec.stdin == "null":
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reader, writer = os.pipe()
        self.input = InputPipe(writer)
        if self.spec.stdin == "data":
            self.input.write(self._stdin or b"", _nobody)
            self.input.end(_nobody)
            self._stdin = None
        return reader

    def read_report(self) -> None:
        """Take what the child says of its exec: its end is the success."""
        if self.report is None:
            return
        data = os.read(self.report, 65_536)
        os.close(self.report)
        self.report = None
        if data:
            self._failure = StartFailure.from_report(data, self.spec)
        elif self._cause is None:
            self._be_running()

    def _be_running(self) -> None:
        self.state = replace(self.state, phase=JobPhase.RUNNING)
        self._failpoint("executed")
        self._tell("started", {"state": self.state.to_dict()})
        # Afterwards, and not before those that were told have run: whoever adopts the job asks the keeper, and
        # what a dead one left is found without this too.
        self._save_at = time.monotonic() + _SAVE_DELAY_S

    def close(self) -> None:
        """Give back what is held of a job that is done; its tree is empty."""
        if self._guard is not None:
            self._guard.close()
        if self._reach is not None:
            self._reach.close()

    @property
    def has_left_nothing(self) -> bool:
        """Tell whether its tree is proven empty and its result is in its place."""
        return self.result is not None and self._files.is_settled and self._is_empty()

    # -- what others ask --------------------------------------------------------------------

    def stop(self, cause: StopCause, data: dict[str, Any] | None, *, grace_s: float) -> None:
        """Ask for the end. The first cause is kept; a shorter grace counts from now.

        Args:
            cause: why.
            data: the cause to record in the result, as a JSON object, or None.
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        now = time.monotonic()
        if self._stop is not None:
            self._stop.hurry(now=now, grace_s=grace_s)
        elif self._cause is not None:
            self._grace_s = min(self._grace_s, grace_s)
        elif self.result is None:
            self._cause, self._cause_data, self._grace_s, self._asked_at = cause, data, grace_s, now
            if self._reach is None:
                self._finish(StopOutcome(), now)

    def detach(self) -> None:
        """Give the job to the session: no lifeline is needed from now on."""
        if not self.state.background:
            self.state = replace(self.state, background=True)
            self._orphan_at = None
            self._files.save_if_possible(self.state)

    def adopt(self, epoch: int) -> bool:
        """Take a new supervisor; False for one that is not newer than the last."""
        if epoch <= self.state.epoch:
            return False
        self.state = replace(self.state, epoch=epoch)
        self._orphan_at = None
        self._files.save_if_possible(self.state)
        return True

    def lose_lifeline(self) -> None:
        """Note that nobody holds the lifeline; a foreground job ends if that lasts."""
        if not self.state.background and self.result is None:
            self._orphan_at = time.monotonic() + self._reattach_grace_s

    # -- time -------------------------------------------------------------------------------

    def tick(self, *, child_ended: bool) -> float | None:
        """Do what is due; return the seconds until something is due again, or None.

        Args:
            child_ended: whether a child of the keeper may have ended since the last tick.
        """
        now = time.monotonic()
        if self.result is None:
            self._watch(now, child_ended=child_ended)
            self._begin(now)
        if self._stop is not None and self.result is None:
            pause = self._stop.step(now)
            self._failpoint("stop_stepped")
            if not self._stop.is_over:
                return pause
            self._finish(self._stop.outcome(), now)
        if self.result is not None:
            return self._linger(now)
        return self._next(now)

    def _watch(self, now: float, *, child_ended: bool) -> None:
        """Look at the tree, the clock and the output."""
        if self._save_at is not None and now >= self._save_at:
            self._save_at = None
            self._files.save_if_possible(self.state)
        if self._guard is not None and now >= self._guard_at:
            self._guard_at = now + self._guard.look()
            if self._guard.is_over:
                self.stop(StopCause.OUTPUT_LIMIT, None, grace_s=self._grace_s)
        if self._reach is None or self._stop is not None:
            return
        is_peeled = self._containment.subreaper
        if (is_peeled and child_ended) or (not is_peeled and now >= self._sample_at):
            self._reach.look()
            self._sample_at = now + _SAMPLE_S
            if self._reach.remembered != self.state.seen:
                self.state = replace(self.state, seen=self._reach.remembered)
                self._files.save_if_possible(self.state)
        if self._timeout_at is not None and now >= self._timeout_at:
            self._timeout_at = None
            self._time_out()
        if self._orphan_at is not None and now >= self._orphan_at:
            self._orphan_at = None
            self.stop(StopCause.SUPERVISOR_LOST, self._lost_cause().to_dict(), grace_s=self._grace_s)

    def _time_out(self) -> None:
        if self.spec.on_timeout == "stop":
            self.stop(StopCause.TIMED_OUT, None, grace_s=self._grace_s)
            return
        self.detach()
        self._tell("backgrounded", {"state": self.state.to_dict()})

    def _begin(self, now: float) -> None:
        """Begin the end once there is a reason for it, and decide what the reason is."""
        if self._reach is None or self._stop is not None:
            return
        has_exited = self._reach.has_root_exited()
        if not has_exited and not self._may_signal(now):
            return
        if has_exited:
            # There before the first signal: whoever asked for a stop was too late.
            self._cause = None
            self.read_report()
        grace_s = self._grace_s if self.report is None else 0.0
        self._stop = TreeStop(self._reach, now=now, grace_s=grace_s)
        self.state = replace(self.state, phase=JobPhase.STOPPING)
        self._failpoint("stop_begun")

    def _may_signal(self, now: float) -> bool:
        """Tell whether somebody asked for the end, and the program is there to hear it."""
        # A child whose exec failed, or is under way, is about to change; after a while it is not.
        is_settled = self.report is None and self._failure is None
        return self._cause is not None and (is_settled or now >= self._asked_at + _START_LIMIT_S)

    def _next(self, now: float) -> float | None:
        if self._reach is None:
            return None
        due = [self._guard_at, self._timeout_at, self._orphan_at, self._save_at]
        if not self._containment.subreaper:
            due.append(self._sample_at)
        if self._cause is not None:
            due.append(self._asked_at + _START_LIMIT_S)
        return max(0.0, min(at for at in due if at is not None) - now)

    # -- end --------------------------------------------------------------------------------

    def _finish(self, outcome: StopOutcome, now: float) -> None:
        if self._waiting is not None:  # nothing was started
            self._waiting.dismiss()
            self._waiting = None
        self._failpoint("empty")
        if self.input is not None:
            self.input.close()
        status = (None if self._reach is None else self._reach.status) or ExitStatus()
        if self._guard is not None:
            self._guard.look()
        sizes = (0, 0) if self._guard is None else self._guard.sizes()
        failure = self._failure
        self.result = JobResult(
            job=self.spec.job,
            outcome=self._outcome(),
            exit_code=None if failure else status.exit_code,
            signal=None if failure else status.signal,
            cause=self._cause_data if self._cause is not None else None,
            signalled=outcome.signalled,
            escalated=outcome.escalated,
            survivors=outcome.survivors,
            denied=outcome.denied,
            containment=self.state.containment,
            started_at=self.state.started_at,
            ended_at=time.time(),
            duration_s=now - self.state.started_monotonic,
            stdout_bytes=sizes[0],
            stderr_bytes=sizes[1],
            truncated=self._guard is not None and self._guard.is_truncated,
            error=failure.text if failure else "",
            errno=failure.errno if failure else None,
            backgrounded=self.state.background,
        )
        self.state = replace(self.state, phase=JobPhase.ENDED, left=outcome.survivors)
        self._files.file(self.result, now=now)
        self._failpoint("result_written")
        self._tell("ended", {"result": self.result.to_dict()})
        self._failpoint("told")
        # Afterwards, so that nobody waits for a disk; a keeper's or a daemon's death cannot undo the file any more.
        self._files.make_durable()

    def _outcome(self) -> JobOutcome:
        if self._failure is not None:
            return JobOutcome.NOT_STARTED
        return JobOutcome.EXITED if self._cause is None else self._cause.outcome

    def _linger(self, now: float) -> float:
        """Go on with what could not be ended or written; set `is_done` when nothing is left to do."""
        if now >= self._linger_at:
            self._linger_at = now + _LINGER_S
            self._files.retry(now)
            self._sweep()
        self.is_done = self._files.is_settled and self._is_empty()
        return 0.0 if self.is_done else _LINGER_S

    def _is_empty(self) -> bool:
        return self._reach is None or self._reach.is_empty

    def _sweep(self) -> None:
        if self._reach is None or self._is_empty():
            return
        left = self._reach.look()
        self._reach.kill(_LATE_ROUND)
        left = frozenset[int]() if self._is_empty() else self._reach.everybody() | left
        if tuple(sorted(left)) != self.state.left:
            self.state = replace(self.state, left=tuple(sorted(left)))
            self._files.save_if_possible(self.state)

    def _lost_cause(self) -> Cause:
        spec = self.spec
        return Cause(
            CauseKind.PARENT_LOST,
            origin=spec.run or spec.turn or spec.job,
            actor="keeper",
            surface="process",
            at_unix_ms=time.time_ns() // 1_000_000,
            reason=f"nobody took the job over within {self._reattach_grace_s:g} s",
        )

    def _level(self) -> str:
        return replace(self._containment, cgroup=self._cgroup is not None).level


def _make_folder(folder: Path) -> None:
    """Make a directory of this user alone, with those above it."""
    try:
        os.mkdir(folder, 0o700)  # the one above it is there, as a rule
    except OSError:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _nobody(word: str) -> None:
    """Take an answer that nobody waits for."""
