"""Errors about claims; they continue the tree of `remit.core.errors`.

Caller's mistakes, below `InvalidArgument`:

- `InvalidClaim`: an empty claim, a bad pattern, a path that cannot be
- `OutsideWorkspace`, one of these: the path, or its link, leads out of the workspace

Refusals, below `Refused`; nothing is held or queued by the request:

- `ClaimRefused`: the base of the following
- `ClaimBusy`: it would have to wait, and was asked not to
- `ClaimQuotaExceeded`: the owner has too many claims at once
- `ClaimWithdrawn`: it had been withdrawn before it arrived
- `DeadlockDetected`: waiting would close a cycle, which is spelled out
- `LeaseNotHeld`: a lease that is over, foreign or not granted yet
- `PathNotClaimed`: a write outside of what the writer has claimed

`ClaimTimeout`, a `RemitError`: the claim's own timeout passed while it was waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remit.core.errors import InvalidArgument, Refused, RemitError

if TYPE_CHECKING:
    from remit.locks.waits import WaitEdge

__all__ = [
    "ClaimBusy",
    "ClaimQuotaExceeded",
    "ClaimRefused",
    "ClaimTimeout",
    "ClaimWithdrawn",
    "DeadlockDetected",
    "InvalidClaim",
    "LeaseNotHeld",
    "OutsideWorkspace",
    "PathNotClaimed",
]


class InvalidClaim(InvalidArgument):
    """A claim that cannot be: empty, a bad pattern, or a path no file can have."""

    code = "invalid_claim"


class OutsideWorkspace(InvalidClaim):
    """The path, or what one of its links points to, lies outside of the workspace."""

    code = "outside_workspace"


class ClaimRefused(Refused):
    """A request for claims was refused; nothing is held or queued because of it.

    Args:
        message: one line.
        claim_id: the request that was refused.
    """

    code = "claim_refused"

    def __init__(self, message: str, *, claim_id: str = "") -> None:
        super().__init__(message)
        self.claim_id = claim_id


class ClaimBusy(ClaimRefused):
    """It would have to wait, and was asked not to. Covers `wait=False`, not a timeout."""

    code = "claim_busy"


class ClaimQuotaExceeded(ClaimRefused):
    """The owner has as many claims, held and waiting, as one owner may have."""

    code = "claim_quota_exceeded"


class ClaimWithdrawn(ClaimRefused):
    """The request was withdrawn before it arrived, as when a cancel overtakes it."""

    code = "claim_withdrawn"


class DeadlockDetected(ClaimRefused):
    """Waiting would close a cycle of waits; safe to ask again after giving something up.

    Args:
        message: one line; `from_cycle` writes it.
        claim_id: the request that was refused.
        cycle: the waits of the cycle, the refused one first; the last one's
            `awaited` is the first one's `waiter`.
    """

    code = "deadlock_detected"

    def __init__(self, message: str, *, claim_id: str = "", cycle: Sequence[WaitEdge] = ()) -> None:
        super().__init__(message, claim_id=claim_id)
        self.cycle = tuple(cycle)

    @classmethod
    def from_cycle(cls, cycle: Sequence[WaitEdge], *, claim_id: str = "") -> DeadlockDetected:
        """Return the error with a message that spells the cycle out.

        Args:
            cycle: the waits, the refused one first.
            claim_id: the request that was refused.
        """
        told = "; ".join(edge.describe() for edge in cycle)
        return cls(f"this claim would wait for ever: {told}", claim_id=claim_id, cycle=cycle)


class LeaseNotHeld(ClaimRefused):
    """The lease is over, belongs to somebody else, or is not granted yet."""

    code = "lease_not_held"


class PathNotClaimed(ClaimRefused):
    """A write outside of what the writer has claimed, or into what it has lent to a child."""

    code = "path_not_claimed"


class ClaimTimeout(RemitError):
    """The claim's own timeout passed while it was waiting. No deadline of a run expired.

    Args:
        message: one line.
        claim_id: the request that was withdrawn.
        waited_s: how long it had waited, in seconds.
        held_by: ids of the owners it was waiting for at the end.
    """

    code = "claim_timeout"

    def __init__(
        self,
        message: str,
        *,
        claim_id: str = "",
        waited_s: float = 0.0,
        held_by: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.claim_id = claim_id
        self.waited_s = waited_s
        self.held_by = tuple(held_by)
