"""How a tool process ended, as the caller of `ctx.process` sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from remit.core.cause import Cause
from remit.core.errors import CommandNotStarted
from remit.processes.jobs import JobOutcome, JobResult, JobSpec
from remit.processes.output import STDERR_NAME, STDOUT_NAME, Captured, read_capture

__all__ = ["CommandOutcome", "CommandResult", "backgrounded_result", "command_result"]


class CommandOutcome(StrEnum):
    """Why a command ended, or why nobody waits for it any more: a closed set."""

    EXITED = "exited"
    """By itself, well or badly; a stop that came later changed nothing."""
    CANCELLED = "cancelled"
    """It was still running when a stop was asked for."""
    TIMED_OUT = "timed_out"
    """It was still running at its own deadline and was stopped."""
    BACKGROUNDED = "backgrounded"
    """It was still running at its own deadline and goes on, as a process of the session."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than may stay on the disk and was stopped."""
    KEEPER_LOST = "keeper_lost"
    """Its keeper was killed: the tree was swept, and how it would have ended is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. Reason and exit status are independent facts."""

    handle: str
    """Id of the process, `proc_...`, as `remit processes` and `remit kill` know it."""
    argv: tuple[str, ...]
    """Program and arguments."""
    pid: int
    """Process number that the program had."""
    outcome: CommandOutcome
    """The one reason."""
    exit_code: int | None
    """Status it gave to exit, from 0; None if a signal ended it, it goes on, or nobody can know."""
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
    containment: str = ""
    """What held its processes together, strongest first, such as `subreaper+pidfd`."""
    git_locks_removed: tuple[str, ...] = ()
    """Git locks that were taken away after it was killed: they were its own, with proof."""
    git_locks_left: tuple[str, ...] = ()
    """Git locks that stay where it was killed, each with why."""

    @property
    def timed_out(self) -> bool:
        """Tell whether its own deadline passed; never true of a cancelled one."""
        return self.outcome in (CommandOutcome.TIMED_OUT, CommandOutcome.BACKGROUNDED)

    @property
    def cancelled(self) -> bool:
        """Tell whether a stop ended it."""
        return self.outcome is CommandOutcome.CANCELLED

    @property
    def succeeded(self) -> bool:
        """Tell whether it ended by itself with status 0."""
        return self.outcome is CommandOutcome.EXITED and self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Tell whether `stdout` or `stderr` shows less than was written."""
        return self.stdout.truncated or self.stderr.truncated


def command_result(spec: JobSpec, result: JobResult, *, pid: int, output_dir: Path) -> CommandResult:
    """Return what the caller sees of a keeper's result; reads the output back.

    Raises:
        CommandNotStarted: it could not be executed.
    """
    if result.outcome is JobOutcome.NOT_STARTED:
        program = spec.argv[0]
        raise CommandNotStarted(
            result.error or f"{program!r} could not be executed", program=program, errno=result.errno
        )
    return CommandResult(
        handle=result.job,
        argv=spec.argv,
        pid=pid,
        outcome=CommandOutcome(result.outcome.value),
        exit_code=result.exit_code,
        signal=result.signal,
        cause=None if result.cause is None else Cause.from_dict(result.cause),
        stdout=read_capture(output_dir / STDOUT_NAME),
        stderr=read_capture(output_dir / STDERR_NAME),
        duration_s=result.duration_s,
        escalated=bool(result.escalated),
        leftovers_stopped=tuple(number for number in result.signalled if number != pid),
        survivors=result.survivors,
        denied=result.denied,
        containment=result.containment,
    )


def backgrounded_result(spec: JobSpec, job: str, *, pid: int, output_dir: Path, duration_s: float) -> CommandResult:
    """Return what is known of a process that goes on behind its caller: its handle, and its output so far."""
    return CommandResult(
        handle=job,
        argv=spec.argv,
        pid=pid,
        outcome=CommandOutcome.BACKGROUNDED,
        exit_code=None,
        signal=None,
        cause=None,
        stdout=read_capture(output_dir / STDOUT_NAME),
        stderr=read_capture(output_dir / STDERR_NAME),
        duration_s=duration_s,
        escalated=False,
        leftovers_stopped=(),
        survivors=(),
        denied=(),
    )
