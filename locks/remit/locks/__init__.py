"""Claims on workspace paths: what overlaps, who may hold it, who waits, and why not."""

from remit.locks.area import Area, AreaKind, conflict, includes, overlap
from remit.locks.claims import Claim, Mode, exclusive, read, write
from remit.locks.entry import ClaimState
from remit.locks.errors import (
    ClaimBusy,
    ClaimQuotaExceeded,
    ClaimRefused,
    ClaimTimeout,
    ClaimWithdrawn,
    DeadlockDetected,
    InvalidClaim,
    LeaseNotHeld,
    OutsideWorkspace,
    PathNotClaimed,
)
from remit.locks.events import (
    ClaimRequest,
    Forgotten,
    Granted,
    LockEvent,
    Quarantined,
    Queued,
    RefusalReason,
    Refused,
    Released,
    Withdrawn,
    WithdrawReason,
    event_from_dict,
    event_to_dict,
)
from remit.locks.table import LockTable
from remit.locks.views import ClaimView, TableStatistics
from remit.locks.waits import WaitEdge, WaitersOf, WaitKind
from remit.locks.workspace import Workspace

__all__ = [
    "Area",
    "AreaKind",
    "Claim",
    "ClaimBusy",
    "ClaimQuotaExceeded",
    "ClaimRefused",
    "ClaimRequest",
    "ClaimState",
    "ClaimTimeout",
    "ClaimView",
    "ClaimWithdrawn",
    "DeadlockDetected",
    "Forgotten",
    "Granted",
    "InvalidClaim",
    "LeaseNotHeld",
    "LockEvent",
    "LockTable",
    "Mode",
    "OutsideWorkspace",
    "PathNotClaimed",
    "Quarantined",
    "Queued",
    "RefusalReason",
    "Refused",
    "Released",
    "TableStatistics",
    "WaitEdge",
    "WaitKind",
    "WaitersOf",
    "WithdrawReason",
    "Withdrawn",
    "Workspace",
    "conflict",
    "event_from_dict",
    "event_to_dict",
    "exclusive",
    "includes",
    "overlap",
    "read",
    "write",
]
