"""The words that everything else is written in: ids, clock, causes, signals, errors, events."""

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
