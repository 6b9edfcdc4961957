"""Every error that `remit` raises, in one tree.

    RemitError                      stable `code`, ids as attributes, pickles
    ├── UsageError                  the caller's mistakes; nothing was started
    │   ├── InvalidArgument         a value is out of range or of the wrong type
    │   ├── UnknownAgent            no agent of that name or place
    │   ├── NotFound                no turn, run or session of that id
    │   ├── ArgumentNotPicklable    an argument cannot travel to a sub-agent
    │   ├── ArgumentTooLarge        arguments above the size limit
    │   ├── DependencyError         unknown, duplicate or cyclic `after`
    │   └── SwarmFileError          a swarm file that does not hold; names file, line, field
    ├── Refused                     policy said no; nothing was started
    │   ├── DepthExceeded           delegation deeper than `max_depth`
    │   ├── ChildLimitExceeded      more children than `max_children`
    │   ├── SessionBusy             a turn of this session is still running
    │   ├── CoordinatorClosing      the coordinator takes no new work
    │   ├── BudgetExceeded          the budget of a session is used up
    │   ├── ApprovalDenied          a person or a policy said no to an action
    │   ├── ApprovalExpired         nobody answered in time
    │   ├── ApprovalSettled         an answer that came too late; the first one stands
    │   └── WaitCycle               a wait that could never end
    ├── RunEnded                    how an awaited run or turn ended, if not well
    │   ├── RunFailed
    │   ├── RunCancelled
    │   ├── RunTimedOut
    │   └── RunLost
    ├── ProcessError                a command line program
    │   ├── CommandFailed           it ended with a status other than zero
    │   ├── CommandTimedOut         it did not end within its own time limit
    │   ├── CommandNotStarted       it could not be executed
    │   ├── ProcessProtocolError    a message or file of a process keeper cannot be understood
    │   │   └── ProcessCallUnsupported   the peer is too old for a call; says nothing of the process
    │   ├── ProcessKeyConflict      the idempotency key stands for another command
    │   └── ProcdUnavailable        the daemon of tool processes cannot be started or reached
    ├── CoordinatorUnavailable      no Ray, no coordinator, or it stopped answering
    ├── JournalError                the journal cannot be read or written
    │   ├── JournalBusy             another coordinator owns this workspace
    │   ├── JournalFenced           another coordinator has taken this journal over
    │   ├── JournalTooNew           written by a version that this one cannot read
    │   └── DuplicateTerminalEvent  a second end of the same run was refused
    └── InternalError               one of our own invariants is broken

    TurnCancelled (BaseException)   one's own turn or run was cancelled

`TurnCancelled` alone stands outside `Exception`: a catch-all in an agent must
not turn its own cancellation into text. `asyncio.CancelledError` is not ours
and propagates untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from remit.core.cause import Cause

__all__ = [
    "ApprovalDenied",
    "ApprovalExpired",
    "ApprovalSettled",
    "ArgumentNotPicklable",
    "ArgumentTooLarge",
    "BudgetExceeded",
    "ChildLimitExceeded",
    "CommandFailed",
    "CommandNotStarted",
    "CommandTimedOut",
    "CoordinatorClosing",
    "CoordinatorUnavailable",
    "DependencyError",
    "DepthExceeded",
    "DuplicateTerminalEvent",
    "InternalError",
    "InvalidArgument",
    "JournalBusy",
    "JournalError",
    "JournalFenced",
    "JournalTooNew",
    "NotFound",
    "ProcdUnavailable",
    "ProcessCallUnsupported",
    "ProcessError",
    "ProcessKeyConflict",
    "ProcessProtocolError",
    "Refused",
    "RemitError",
    "RunCancelled",
    "RunEnded",
    "RunFailed",
    "RunLost",
    "RunTimedOut",
    "SessionBusy",
    "SwarmFileError",
    "TurnCancelled",
    "UnknownAgent",
    "UsageError",
    "WaitCycle",
]


def _rebuild(cls: type[BaseException], data: dict[str, Any]) -> BaseException:
    """Build an error again from its attributes, without running its constructor."""
    error = cls.__new__(cls)
    error.__dict__.update(data)
    BaseException.__init__(error, data.get("message", ""))
    return error


class RemitError(Exception):
    """Base of all ordinary errors.

    Errors with keyword-only constructors do not survive pickling by
    themselves, so this class carries every attribute over in `__reduce__`.

    Args:
        message: one line: what, where, and what to do.
        data: further attributes; plain values that pickle.
    """

    code: ClassVar[str] = "remit_error"
    """Stable word for programs; also chooses the exit status of the command line."""

    message: str

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(data)

    def __str__(self) -> str:
        """Return the message alone."""
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class and its attributes."""
        return _rebuild, (type(self), dict(self.__dict__))


class UsageError(RemitError):
    """The caller's mistake; nothing was started and nothing is left behind."""

    code = "usage_error"


class InvalidArgument(UsageError, ValueError):
    """A value is out of range or of the wrong type."""

    code = "invalid_argument"


class UnknownAgent(UsageError):
    """No agent of that name, or the place it should be imported from has none."""

    code = "unknown_agent"


class NotFound(UsageError, LookupError):
    """No turn, run or session of that id in this workspace."""

    code = "not_found"


class ArgumentNotPicklable(UsageError, TypeError):
    """An argument, or the agent itself, cannot be pickled and so cannot travel."""

    code = "argument_not_picklable"


class ArgumentTooLarge(UsageError):
    """Pickled arguments are above `Limits.max_result_bytes`."""

    code = "argument_too_large"


class DependencyError(UsageError):
    """An `after` that names nothing, names itself through others, or a name given twice."""

    code = "dependency_error"


class SwarmFileError(UsageError):
    """A swarm file does not hold; the message names file, line and field."""

    code = "swarm_file_error"

    problems: tuple[str, ...] = ()
    """Every mistake that was found, one line each; the message holds the first."""


class Refused(RemitError):
    """Policy said no; nothing was started."""

    code = "refused"


class DepthExceeded(Refused):
    """Delegation deeper than the limit. Covers depth alone, not the number of children."""

    code = "depth_exceeded"


class ChildLimitExceeded(Refused):
    """One node delegated more runs than `Limits.max_children`."""

    code = "child_limit_exceeded"


class SessionBusy(Refused):
    """A turn of this session is still running and `busy="reject"` was asked for."""

    code = "session_busy"


class CoordinatorClosing(Refused):
    """The coordinator is closing and takes no new work."""

    code = "coordinator_closing"


class BudgetExceeded(Refused):
    """The budget of a session is used up, so it takes no further turn; see `spent` and `limit`."""

    code = "budget_exceeded"


class ApprovalDenied(Refused):
    """A person or a policy said no to an action: do not take it.

    Carries `approval_id`, `action`, `by` (who said no) and `reason`.
    """

    code = "approval_denied"


class ApprovalExpired(Refused):
    """Nobody answered a request for approval in time: do not take the action. Nobody said no either."""

    code = "approval_expired"


class ApprovalSettled(Refused):
    """An answer to an approval came too late: it was answered, expired or cancelled before.

    Carries `approval_id` and `decision`, the one that stands.
    """

    code = "approval_settled"


class WaitCycle(Refused):
    """A wait that could never end: the run waited for waits, through others, for this one.

    Args:
        message: one line.
        cycle: ids of turns and runs, each of which waits for the next; the refused one at both ends.
    """

    code = "wait_cycle"

    def __init__(self, message: str, *, cycle: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


class RunEnded(RemitError):
    """How an awaited run ended, if it did not succeed. The waiter itself is not cancelled.

    Args:
        message: one line.
        run_id: the run that ended.
        cause: why it was stopped, or None.
        partial: what it had produced, or None; incomplete by definition.
        error_type: class name of the exception in the body, or the empty text.
        traceback: text of the body's traceback, or the empty text.
    """

    code = "run_ended"

    def __init__(
        self,
        message: str,
        *,
        run_id: str,
        cause: Cause | None = None,
        partial: Any = None,
        error_type: str = "",
        traceback: str = "",
        error_code: str = "",
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.cause = cause
        self.partial = partial
        self.error_type = error_type
        self.traceback = traceback
        self.error_code = error_code


class RunFailed(RunEnded):
    """The awaited run's body raised, or could not be started. See `error_type` and `traceback`."""

    code = "run_failed"


class RunCancelled(RunEnded):
    """The awaited run was cancelled. An ordinary exception: the waiter may handle it."""

    code = "run_cancelled"


class RunTimedOut(RunEnded):
    """The awaited run's own deadline expired."""

    code = "run_timed_out"


class RunLost(RunEnded):
    """The awaited run's host vanished; what the run did is not known."""

    code = "run_lost"


class ProcessError(RemitError):
    """A command line program did not do its work."""

    code = "process_error"


class CommandFailed(ProcessError):
    """A command ended with a status other than zero, and nobody had stopped it."""

    code = "command_failed"


class CommandTimedOut(ProcessError):
    """A command did not end within its own time limit and was stopped."""

    code = "command_timed_out"


class CommandNotStarted(ProcessError):
    """A command could not be executed: no such program, or no right to run it."""

    code = "command_not_started"


class ProcessProtocolError(ProcessError):
    """A message or a file of a process keeper cannot be understood; see `version`."""

    code = "process_protocol_error"


class ProcessCallUnsupported(ProcessProtocolError):
    """The daemon or a keeper is too old for a call; says nothing about any process."""

    code = "process_call_unsupported"


class ProcessKeyConflict(ProcessError):
    """The idempotency key stands for another command in this scope; nothing was started."""

    code = "input_mismatch"


class ProcdUnavailable(ProcessError):
    """The daemon of tool processes cannot be started or reached; what runs already is not touched."""

    code = "procd_unavailable"


class CoordinatorUnavailable(RemitError):
    """No Ray at the address, no coordinator, or it has stopped answering."""

    code = "coordinator_unavailable"

    for_good: bool = False
    """Whether it is certain that this coordinator will not answer again."""


class JournalError(RemitError):
    """The journal cannot be opened, read or written."""

    code = "journal_error"


class JournalBusy(JournalError):
    """Another coordinator owns the journal of this workspace."""

    code = "journal_busy"


class JournalFenced(JournalError):
    """Another coordinator has taken this journal over; this one writes nothing any more.

    Unlike `JournalBusy` it comes to a writer that had the journal. The attribute
    `epoch` is its own life, `current_epoch` that of whoever has the journal now.
    """

    code = "journal_fenced"


class JournalTooNew(JournalError):
    """The journal, or something in it, was written by a newer version of `remit`; nothing was changed."""

    code = "journal_too_new"


class DuplicateTerminalEvent(JournalError):
    """A second terminal event of the same run was refused by the journal."""

    code = "duplicate_terminal_event"


class InternalError(RemitError):
    """One of our own invariants is broken; please report it."""

    code = "internal_error"


class TurnCancelled(BaseException):
    """One's own turn or run was cancelled: unwind.

    Raised by every wait of a cancelled turn or run. Not an `Exception`, so that
    no catch-all contains it; let it pass.

    Args:
        cause: why, or None where it is not known.
        node_id: the turn or run that was cancelled.
    """

    code: ClassVar[str] = "turn_cancelled"

    def __init__(self, cause: Cause | None = None, *, node_id: str = "") -> None:
        super().__init__()
        self.cause = cause
        self.node_id = node_id

    @property
    def message(self) -> str:
        """One line: who was cancelled, and why. Put together when it is read: thousands are raised at once."""
        return f"{self.node_id or 'this turn'} was cancelled" + (f": {self.cause.describe()}" if self.cause else "")

    def __str__(self) -> str:
        """Return the message."""
        return self.message

    def __repr__(self) -> str:
        return f"TurnCancelled({self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class and its attributes."""
        return _rebuild, (type(self), dict(self.__dict__))
