"""Run one command line program to its end, or stop it so that nothing of it is left.

**Invariants**

1. There is one reason for the end, taken once: an exit that is there when a
   stop is asked for, a deadline that has passed, or the cancel; the first wins.
2. Whatever the reason, the whole tree is stopped before the result is made: a
   finished command owns no processes. What cannot be stopped is named.
3. The stop runs in a thread of its own and starts in the thread that asks for
   it, so that neither a busy event loop nor a cancelled task holds it up.
4. The child is waited for last, after its number is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from remit.core.cause import Cause
from remit.core.clock import Clock, SystemClock
from remit.core.errors import InvalidArgument
from remit.core.signal import CancelSignal
from remit.processes.child import Child, ExitStatus, call_in_loop, spawn
from remit.processes.output import STDERR_NAME, STDOUT_NAME, Captured, read_capture
from remit.processes.table import ProcessIdentity
from remit.processes.tree import ProcessTree, StopReport, stop_tree

__all__ = ["CommandOutcome", "CommandResult", "run_command", "run_command_blocking"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FOREIGN_CLOCK_POLL_S = 0.02
"""How often a deadline is looked at when the clock is not the machine's and may jump."""


class CommandOutcome(StrEnum):
    """Why a command ended: a closed set."""

    EXITED = "exited"
    """By itself, well or badly; a stop that came later changed nothing."""
    CANCELLED = "cancelled"
    """It was still running when a stop was asked for."""
    TIMED_OUT = "timed_out"
    """It was still running at its own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. Reason and exit status are independent facts."""

    argv: tuple[str, ...]
    """Program and arguments."""
    pid: int
    """Process number that the program had."""
    outcome: CommandOutcome
    """The one reason."""
    exit_code: int | None
    """Status it gave to exit, from 0; None if a signal ended it, or nobody can know."""
    signal: int | None
    """Number of the signal that ended it, or None."""
    cause: Cause | None
    """Why it was cancelled; None for other outcomes, and for a cancelled asyncio task."""
    stdout: Captured
    """Standard output, head and tail."""
    stderr: Captured
    """Standard error, head and tail."""
    duration_s: float
    """Seconds from the start until nothing was left."""
    escalated: bool
    """Whether SIGKILL was needed."""
    leftovers_stopped: tuple[int, ...]
    """Processes, other than the program itself, that were stopped at the end."""
    survivors: tuple[int, ...]
    """Processes that could not be stopped; empty when nothing is left."""
    denied: tuple[int, ...]
    """Processes that belong to somebody else and could not be signalled."""

    @property
    def timed_out(self) -> bool:
        """Tell whether its own deadline ended it; never true of a cancelled one."""
        return self.outcome is CommandOutcome.TIMED_OUT

    @property
    def cancelled(self) -> bool:
        """Tell whether a stop ended it."""
        return self.outcome is CommandOutcome.CANCELLED

    @property
    def succeeded(self) -> bool:
        """Tell whether it ended by itself with status 0."""
        return self.outcome is CommandOutcome.EXITED and self.exit_code == 0


async def run_command(
    argv: Sequence[str],
    *,
    signal: CancelSignal,
    output_dir: Path,
    mark: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_s: float | None = None,
    grace_s: float = 2.0,
    kill: CancelSignal | None = None,
    on_started: Callable[[ProcessIdentity], None] | None = None,
    on_finished: Callable[[CommandResult], None] | None = None,
    failpoint: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> CommandResult:
    """Run a program and return how it ended, with nothing of it left behind.

    It runs in a session of its own, without a terminal. At its end, for
    whatever reason, its whole tree is stopped: SIGTERM, the grace, SIGKILL.
    This holds for causes that leave processes to a next attempt as well, since
    nothing could attach to them again. A status other than zero is no error
    here, and a cancelled command is returned, not raised.

    Args:
        argv: program and arguments, at least one item.
        signal: stops the program when set.
        output_dir: directory for the files `stdout` and `stderr`, made if
            missing; files that are there are appended to.
        mark: id of the run, given to the program as `REMIT_RUN`; also part of
            `REMIT_PROCESS`, by which processes that broke away are found.
        cwd: working directory, or None for this process's.
        env: the whole environment, or None for this process's; marks are added.
        stdin: what the program reads, or None for nothing (`/dev/null`).
        timeout_s: seconds until it is stopped as timed out, above 0; None for never.
        grace_s: seconds between SIGTERM and SIGKILL, from 0.
        kill: stops the program without (or with what is left of) the grace.
        on_started: called in the loop's thread once the program runs.
        on_finished: called with the result, in another thread, before this
            returns or raises; the only way to see it when the task is cancelled.
        failpoint: called at `spawned` (loop's thread, a stop does not reach the
            program yet) and `stopping` (another thread, before the first signal).
        clock: time of the deadline, or None for the system's.

    Raises:
        TurnCancelled: `signal` or `kill` was set before; nothing was started.
        CommandNotStarted: the program cannot be executed.
        InvalidArgument: an argument is out of its range.

    Cancellation:
        Always a checkpoint once started. A cancelled task stops the tree first,
        at most for the grace and five seconds more, and then re-raises.
    """
    _check(argv, mark, timeout_s, grace_s)
    for stop in (signal, kill):
        if stop is not None:
            stop.raise_if_set()
    clock = clock or SystemClock()
    started = clock.monotonic()
    child = spawn(argv, output_dir=output_dir, mark=mark, cwd=cwd, env=env, stdin=stdin)
    run = _Run(
        tuple(argv),
        child,
        output_dir=output_dir,
        started=started,
        timeout_s=timeout_s,
        grace_s=grace_s,
        clock=clock,
        on_finished=on_finished,
        failpoint=failpoint or _no_failpoint,
    )
    try:
        run.reach("spawned")
        run.begin(signal, kill)
        if on_started is not None:
            on_started(child.identity)
        await run.wait()
    except BaseException:
        # A cancelled task, or a callback that failed: no way out leaves the tree running.
        run.request(CommandOutcome.CANCELLED, None)
        await run.settle()
        raise
    finally:
        run.close()
    return run.result()


def _blocking(fn: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, _T]:
    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return asyncio.run(fn(*args, **kwargs))

    return call


run_command_blocking = _blocking(run_command)
"""`run_command` for a thread without a running event loop; same arguments, same result."""


def _check(argv: Sequence[str], mark: str, timeout_s: float | None, grace_s: float) -> None:
    if isinstance(argv, str) or not argv or not argv[0]:
        raise InvalidArgument("argv must be a list of texts whose first item names a program")
    if not mark or set(mark) & {"\0", "/"}:
        raise InvalidArgument(f"mark must be the id of a run, without a slash, not {mark!r}")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidArgument(f"timeout_s must be a number of seconds above 0, or None, not {timeout_s!r}")
    if not 0 <= grace_s < math.inf:
        raise InvalidArgument(f"grace_s must be a number of seconds from 0, not {grace_s!r}")


def _no_failpoint(name: str) -> None:
    """Do nothing."""


class _Run:
    """One program under way: takes the reason once, then stops and reports in a thread.

    `_lock` guards `_reason` and `_cause`, and is held for bookkeeping only. It
    is re-entrant, since a stop may be asked for by a signal handler that
    interrupts this very code.
    """

    def __init__(
        self,
        argv: tuple[str, ...],
        child: Child,
        *,
        output_dir: Path,
        started: float,
        timeout_s: float | None,
        grace_s: float,
        clock: Clock,
        on_finished: Callable[[CommandResult], None] | None,
        failpoint: Callable[[str], None],
    ) -> None:
        self.reach = failpoint
        self._argv = argv
        self._child = child
        self._tree = ProcessTree(child.identity, token=child.token)
        self._output_dir = output_dir
        self._started = started
        self._deadline = math.inf if timeout_s is None else started + timeout_s
        self._grace_s = grace_s
        self._clock = clock
        self._on_finished = on_finished
        self._hurry = threading.Event()
        self._lock = threading.RLock()
        self._reason: CommandOutcome | None = None
        self._cause: Cause | None = None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[CommandResult] = self._loop.create_future()
        self._closers: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, signal: CancelSignal, kill: CancelSignal | None) -> None:
        """Watch for the exit, the deadline and the signals; one that is set already stops at once."""
        self._closers.append(self._child.watch(self._loop, lambda: self.request(CommandOutcome.EXITED, None)))
        self._look_at_deadline()
        if kill is not None:
            self._closers.append(kill.add_callback(self._kill).close)
        self._closers.append(signal.add_callback(lambda cause: self.request(CommandOutcome.CANCELLED, cause)).close)

    def request(self, reason: CommandOutcome, cause: Cause | None) -> None:
        """End the program for this reason, unless there is one already. Returns at once; thread-safe."""
        with self._lock:
            # Looked at before the check: what a signal handler may put in between then counts as first.
            actual = self._actual(reason)
            if self._reason is not None:
                return
            self._reason = actual
            self._cause = cause if actual is CommandOutcome.CANCELLED else None
        worker = threading.Thread(target=self._finish, name=f"remit-stop-{self._child.pid}")
        try:
            worker.start()
        except RuntimeError:  # no more threads, or the interpreter is closing: here, then; it is bounded
            self._finish()

    def _actual(self, reason: CommandOutcome) -> CommandOutcome:
        """Return what came first, seen from now."""
        if self._child.has_exited():
            return CommandOutcome.EXITED
        return CommandOutcome.TIMED_OUT if self._clock.monotonic() >= self._deadline else reason

    def _kill(self, cause: Cause) -> None:
        self._hurry.set()
        self.request(CommandOutcome.CANCELLED, cause)

    def _look_at_deadline(self) -> None:
        """Stop the program if its time is up, else look again when it may be."""
        if self._deadline == math.inf:
            return
        remaining = self._deadline - self._clock.monotonic()
        if remaining <= 0:
            self.request(CommandOutcome.TIMED_OUT, None)
            return
        if not isinstance(self._clock, SystemClock):
            remaining = min(remaining, _FOREIGN_CLOCK_POLL_S)
        self._timer = self._loop.call_later(remaining, self._look_at_deadline)

    async def wait(self) -> None:
        """Wait for the result to be there."""
        await asyncio.wait({self._done})

    async def settle(self) -> None:
        """Wait for the result, and take further cancels of the task as the one that is known."""
        while not self._done.done():
            try:
                await self.wait()
            except asyncio.CancelledError:
                # The first one is re-raised by the caller; leaving now would leave processes.
                continue

    def result(self) -> CommandResult:
        """Return the result, or raise what kept it from being made."""
        return self._done.result()

    def close(self) -> None:
        """End all watches. In the loop's thread."""
        if self._timer is not None:
            self._timer.cancel()
        while self._closers:
            self._closers.pop()()
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # seen: not to be logged as never retrieved

    def _finish(self) -> None:
        """Stop the tree, make the result and hand it over. In a thread of its own."""
        try:
            result = self._conclude()
        except BaseException as error:  # the waiter must hear of it, whatever it is
            failure = error
            call_in_loop(self._loop, lambda: None if self._done.done() else self._done.set_exception(failure))
        else:
            call_in_loop(self._loop, lambda: None if self._done.done() else self._done.set_result(result))

    def _conclude(self) -> CommandResult:
        self.reach("stopping")
        report = stop_tree(self._tree, grace_s=self._grace_s, hurry=self._hurry)
        # In this order: once the child is waited for, its number may be anybody's.
        self._tree.forget()
        status = self._child.reap() or ExitStatus()
        result = self._result(report, status)
        if self._on_finished is not None:
            self._on_finished(result)
        return result

    def _result(self, report: StopReport, status: ExitStatus) -> CommandResult:
        assert self._reason is not None
        return CommandResult(
            argv=self._argv,
            pid=self._child.pid,
            outcome=self._reason,
            exit_code=status.exit_code,
            signal=status.signal,
            cause=self._cause,
            stdout=read_capture(self._output_dir / STDOUT_NAME, offset=self._child.offsets[0]),
            stderr=read_capture(self._output_dir / STDERR_NAME, offset=self._child.offsets[1]),
            duration_s=self._clock.monotonic() - self._started,
            escalated=report.escalated,
            leftovers_stopped=tuple(pid for pid in report.stopped if pid != self._child.pid),
            survivors=report.survivors,
            denied=report.denied,
        )
