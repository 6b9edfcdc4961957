"""What the lock table decides: one record for each change, fit for a journal.

Every change carries the next number of one series. The number of the event
that queued or granted a request on arrival is its *ticket*, its place in line;
the number of the event that granted it is its *fencing token*. So tokens grow
from grant to grant, and go on growing after a table is folded from its events.

`Refused` changes nothing and has no number; it need not be journalled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from remit.locks.area import Area
from remit.locks.errors import (
    ClaimBusy,
    ClaimQuotaExceeded,
    ClaimRefused,
    ClaimWithdrawn,
    DeadlockDetected,
    InvalidClaim,
)
from remit.locks.waits import WaitEdge

__all__ = [
    "ClaimRequest",
    "Forgotten",
    "Granted",
    "LockEvent",
    "Quarantined",
    "Queued",
    "RefusalReason",
    "Refused",
    "Released",
    "WithdrawReason",
    "Withdrawn",
    "event_from_dict",
    "event_to_dict",
]


class RefusalReason(StrEnum):
    """The closed set of reasons for a refusal."""

    DEADLOCK = "deadlock"
    """Waiting would close a cycle."""
    BUSY = "busy"
    """It would have to wait, and was asked not to."""
    WITHDRAWN = "withdrawn"
    """It had been withdrawn before it arrived."""
    QUOTA = "quota"
    """The owner has too many claims at once."""
    EMPTY = "empty"
    """It claims nothing."""
    FOREIGN_ID = "foreign_id"
    """Another owner has a claim of this id."""


class WithdrawReason(StrEnum):
    """The closed set of reasons for leaving the line."""

    CANCELLED = "cancelled"
    """The owner was told to stop, or took the request back."""
    TIMEOUT = "timeout"
    """The request's own timeout passed."""
    OWNER_ENDED = "owner_ended"
    """The owner reached its terminal event."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """One all-or-nothing request for areas.

    Attributes:
        claim_id: made by the client and never used again; the same id sent
            twice by one owner is one request.
        owner: the turn or run that asks; one sequential activity.
        areas: what is asked for, at least one, from `Workspace.areas`.
        ancestors: the owner's parent, its parent, and so on. A node is taken
            to wait for its descendants, since it cannot end before them; for a
            detached run leave this empty.
        at: time of the request, in seconds since 1970.
        wait: False to be refused instead of queued.
    """

    claim_id: str
    owner: str
    areas: tuple[Area, ...]
    ancestors: tuple[str, ...] = ()
    at: float = 0.0
    wait: bool = True

    def describe(self) -> str:
        """Return the areas as people write them."""
        return " and ".join(area.describe() for area in self.areas)

    def to_dict(self) -> dict[str, Any]:
        """Return the request as plain data, for JSON."""
        return {
            "claim_id": self.claim_id,
            "owner": self.owner,
            "areas": [area.to_dict() for area in self.areas],
            "ancestors": list(self.ancestors),
            "at": self.at,
            "wait": self.wait,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ClaimRequest:
        """Return the request that `to_dict` wrote."""
        return cls(
            claim_id=data["claim_id"],
            owner=data["owner"],
            areas=tuple(Area.from_dict(area) for area in data["areas"]),
            ancestors=tuple(data["ancestors"]),
            at=data["at"],
            wait=data["wait"],
        )


@dataclass(frozen=True, slots=True)
class Queued:
    """A request stands in line and holds nothing.

    Attributes:
        seq: number of this change, and the request's ticket.
        request: what was asked.
        behind: tickets it waits for; what those wait for is left out.
        ahead_of: tickets of queued claims that wait for it although they were
            there before: they wait, through others, for its owner already.
        lenders: those of the owner and its ancestors whose claims it may enter.
    """

    seq: int
    request: ClaimRequest
    behind: tuple[int, ...]
    ahead_of: tuple[int, ...] = ()
    lenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """A request is granted, whole; from now on its areas are leased to its owner.

    Attributes:
        seq: number of this change, and the fencing token of the lease.
        ticket: the request's place in line; equal to `seq` if it never waited.
        claim_id: the request.
        owner: who holds the lease.
        at: time of the grant, in seconds since 1970.
        request: what was asked, if it was granted on arrival; otherwise None,
            since its `Queued` has it.
        ahead_of: as in `Queued`.
    """

    seq: int
    ticket: int
    claim_id: str
    owner: str
    at: float
    request: ClaimRequest | None = None
    ahead_of: tuple[int, ...] = ()

    @property
    def token(self) -> int:
        """The fencing token: larger than that of every earlier grant."""
        return self.seq


@dataclass(frozen=True, slots=True)
class Released:
    """A lease is over.

    Attributes:
        seq: number of this change.
        ticket: the claim's ticket.
        claim_id: the claim.
        owner: who held the lease.
        at: time of the release, in seconds since 1970.
    """

    seq: int
    ticket: int
    claim_id: str
    owner: str
    at: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request has left the line, or is to be refused when it arrives.

    Attributes:
        seq: number of this change.
        ticket: the claim's ticket; 0 if the request has not arrived.
        claim_id: the request; its id is refused until the owner ends.
        owner: who had asked.
        at: time, in seconds since 1970.
        reason: why.
    """

    seq: int
    ticket: int
    claim_id: str
    owner: str
    at: float
    reason: WithdrawReason


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The owner is gone but may still write; its lease goes on until it is cleared.

    Attributes:
        seq: number of this change.
        ticket: the claim's ticket.
        claim_id: the claim.
        owner: who held the lease.
        at: time, in seconds since 1970.
        reason: what could not be proven, for people.
    """

    seq: int
    ticket: int
    claim_id: str
    owner: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An owner has ended, and with it the memory of what it had withdrawn.

    Attributes:
        seq: number of this change.
        owner: the owner.
    """

    seq: int
    owner: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused; the table is as before.

    Attributes:
        claim_id: the request.
        owner: who asked.
        reason: why.
        wish: the areas, for people.
        cycle: for a deadlock, the waits that would have closed, this one first.
        held_by: owners it would have waited for.
    """

    claim_id: str
    owner: str
    reason: RefusalReason
    wish: str
    cycle: tuple[WaitEdge, ...] = ()
    held_by: tuple[str, ...] = ()

    def error(self) -> ClaimRefused | InvalidClaim:
        """Return the error to raise for the caller."""
        match self.reason:
            case RefusalReason.DEADLOCK:
                return DeadlockDetected.from_cycle(self.cycle, claim_id=self.claim_id)
            case RefusalReason.BUSY:
                holders = ", ".join(self.held_by)
                return ClaimBusy(f"{self.wish} is taken by {holders}", claim_id=self.claim_id)
            case RefusalReason.WITHDRAWN:
                return ClaimWithdrawn(f"{self.wish} was withdrawn before it arrived", claim_id=self.claim_id)
            case RefusalReason.QUOTA:
                told = f"{self.owner} has too many claims at once; claim a folder or release some"
                return ClaimQuotaExceeded(told, claim_id=self.claim_id)
            case RefusalReason.EMPTY:
                return InvalidClaim(f"claim {self.claim_id!r} claims nothing; name at least one path")
            case RefusalReason.FOREIGN_ID:
                return InvalidClaim(f"claim id {self.claim_id!r} is in use by another owner; make a new one")


LockEvent = Queued | Granted | Released | Withdrawn | Quarantined | Forgotten
"""Everything that changes a table."""

_TYPES: dict[str, type[LockEvent]] = {
    "queued": Queued,
    "granted": Granted,
    "released": Released,
    "withdrawn": Withdrawn,
    "quarantined": Quarantined,
    "forgotten": Forgotten,
}
_WORDS: dict[type[LockEvent], str] = {cls: word for word, cls in _TYPES.items()}
_TUPLES = frozenset({"behind", "ahead_of", "lenders"})


def event_to_dict(event: LockEvent) -> dict[str, Any]:
    """Return an event as plain data, for JSON; `event` holds its word."""
    data: dict[str, Any] = {"event": _WORDS[type(event)]}
    for each in fields(event):
        value: Any = getattr(event, each.name)
        if each.name in _TUPLES:
            value = list(value)
        elif isinstance(value, ClaimRequest):
            value = value.to_dict()
        data[each.name] = value
    return data


def event_from_dict(data: dict[str, Any]) -> LockEvent:
    """Return the event that `event_to_dict` wrote.

    Raises:
        KeyError: the word of the event is not known.
    """
    cls = _TYPES[data["event"]]
    values = {name: value for name, value in data.items() if name != "event"}
    for name in _TUPLES & values.keys():
        values[name] = tuple(values[name])
    if values.get("request") is not None:
        values["request"] = ClaimRequest.from_dict(values["request"])
    if cls is Withdrawn:
        values["reason"] = WithdrawReason(values["reason"])
    return cls(**values)
