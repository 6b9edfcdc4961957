"""The words that everything else is written in: ids, clock, causes, signals, errors, events."""

from typing import TYPE_CHECKING, Any

from remit.core.approvals import ApprovalRule
from remit.core.cause import STOPS_FOREGROUND, Cause, CauseKind
from remit.core.clock import Clock, SystemClock
from remit.core.errors import (
    ApprovalDenied,
    ApprovalExpired,
    ApprovalSettled,
    BudgetExceeded,
    CoordinatorClosing,
    InvalidArgument,
    RemitError,
    RunCancelled,
    RunEnded,
    RunFailed,
    RunLost,
    RunTimedOut,
    SessionBusy,
    TurnCancelled,
)
from remit.core.limits import Limits
from remit.core.outcome import Outcome

if TYPE_CHECKING:
    from remit.core.signal import CancelSignal

__all__ = [
    "STOPS_FOREGROUND",
    "ApprovalDenied",
    "ApprovalExpired",
    "ApprovalRule",
    "ApprovalSettled",
    "BudgetExceeded",
    "CancelSignal",
    "Cause",
    "CauseKind",
    "Clock",
    "CoordinatorClosing",
    "InvalidArgument",
    "Limits",
    "Outcome",
    "RemitError",
    "RunCancelled",
    "RunEnded",
    "RunFailed",
    "RunLost",
    "RunTimedOut",
    "SessionBusy",
    "SystemClock",
    "TurnCancelled",
]


def __getattr__(name: str) -> Any:
    """Import the signal when it is asked for: it needs asyncio, which would double the memory of a daemon of forks."""
    if name == "CancelSignal":
        from remit.core.signal import CancelSignal

        return CancelSignal
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
