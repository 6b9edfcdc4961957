"""The lock table: decides who may hold which areas of a workspace, and when.

Pure: no clock, no disk, no waiting. Each call decides, applies what it decided
to the table, and returns it as events. A table that `apply`s these events, in
their order, becomes the same table; an event it has seen is ignored, so the
table that decided may be fed its own events as well.

**Invariants**

1. Of the claims that are held on one path, if one writes, the owners form a
   line in the delegation tree: each is an ancestor of the next.
2. A claim changes state as a whole; while it waits it holds nothing.
3. First come, first served among claims that conflict, but for the exceptions
   that `survey` names; claims that do not conflict never wait for each other.
4. The waits of owners (for claims, for descendants, for runs) have no cycle.
5. Fencing tokens grow from grant to grant, also across a fold.
6. A lease ends by release or with its owner, never by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from remit.locks.area import Area, includes, merge
from remit.locks.claims import Mode
from remit.locks.entry import ClaimState, Entry
from remit.locks.errors import LeaseNotHeld, PathNotClaimed
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
)
from remit.locks.ledger import Ledger
from remit.locks.survey import survey
from remit.locks.views import ClaimView, TableStatistics, view_of
from remit.locks.waits import WaitEdge, WaitersOf, WaitKind, nobody, way_back, who_waits_for

__all__ = ["LockTable"]


class LockTable:
    """All claims of one workspace.

    Args:
        max_claims_per_owner: live claims, held and waiting, that one owner may
            have; more are refused, so that one run cannot starve the others.
    """

    __slots__ = ("_ledger", "_max_claims_per_owner")

    def __init__(self, *, max_claims_per_owner: int = 10_000) -> None:
        self._ledger = Ledger()
        self._max_claims_per_owner = max_claims_per_owner

    @property
    def last_seq(self) -> int:
        """Number of the last change; 0 for a new table."""
        return self._ledger.seq

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds, waits for, or has withdrawn anything."""
        return not (self._ledger.by_ticket or self._ledger.withdrawn)

    def concerns(self, owner: str) -> bool:
        """Tell whether the table knows anything of an owner."""
        return owner in self._ledger.by_owner or owner in self._ledger.withdrawn

    def owners(self) -> tuple[str, ...]:
        """Return all that hold or wait for something."""
        return tuple(self._ledger.by_owner)

    def request(self, request: ClaimRequest, *, waiters_of: WaitersOf = nobody) -> Granted | Queued | Refused:
        """Ask for areas; all are granted, or none.

        Asking again with the id of a live claim changes nothing and returns the
        first answer, or the grant if there has been one since: an event whose
        number is not new, which need not be journalled again.

        Args:
            request: what is asked for.
            waiters_of: the waits that are not about claims, as of now. Those of
                the request's ancestors for its owner are known without it.
        """
        ledger = self._ledger
        known = ledger.by_id.get(request.claim_id)
        if known is not None:
            return _again(known) if known.owner == request.owner else _refusal(request, RefusalReason.FOREIGN_ID)
        if len(request.areas) > 1:
            merged = merge(request.areas)
            if len(merged) < len(request.areas):
                request = replace(request, areas=merged)
        reason = self._objection(request)
        if reason is not None:
            return _refusal(request, reason)
        met = survey(request, ledger.trie, ledger.by_owner, waiters_of)
        seq = ledger.seq + 1
        event: Granted | Queued
        if met is None:
            event = Granted(seq, seq, request.claim_id, request.owner, request.at, request)
        elif met.cycle:
            return _refusal(request, RefusalReason.DEADLOCK, met.cycle, met.behind.values())
        elif not met.behind:
            ahead_of = tuple(sorted(met.ahead_of))
            event = Granted(seq, seq, request.claim_id, request.owner, request.at, request, ahead_of)
        elif not request.wait:
            return _refusal(request, RefusalReason.BUSY, (), met.behind.values())
        else:
            behind, ahead_of = tuple(sorted(met.behind)), tuple(sorted(met.ahead_of))
            event = Queued(seq, request, behind, ahead_of, tuple(sorted(met.lenders)))
        ledger.apply(event)
        return event

    def release(self, claim_id: str, owner: str, *, at: float) -> tuple[LockEvent, ...]:
        """End a lease; whoever waited for it alone is granted.

        Args:
            claim_id: the claim.
            owner: who says so; must be its owner.
            at: time, in seconds since 1970.

        Returns:
            what changed; nothing if there is no such claim any more.

        Raises:
            LeaseNotHeld: somebody else's, still waiting, or quarantined.
        """
        ledger = self._ledger
        entry = ledger.by_id.get(claim_id)
        if entry is None:
            return ()
        if entry.owner != owner:
            raise LeaseNotHeld(f"{claim_id} belongs to {entry.owner}, not to {owner}", claim_id=claim_id)
        if entry.state is not ClaimState.GRANTED:
            raise LeaseNotHeld(f"{claim_id} is {entry.state.value}, not held by {owner}", claim_id=claim_id)
        event = self._released(entry, at)
        ledger.apply(event)
        return (event, *self.grant_ready(at=at)) if ledger.has_changed else (event,)

    def withdraw(
        self,
        claim_id: str,
        owner: str,
        *,
        at: float,
        reason: WithdrawReason = WithdrawReason.CANCELLED,
    ) -> tuple[LockEvent, ...]:
        """Take a request back, wherever it is: in line, granted, or not yet arrived.

        Afterwards it is not held and will not be: until its owner ends, a
        request of this id is refused. A granted one is released.

        Args:
            claim_id: the request.
            owner: who asked for it.
            at: time, in seconds since 1970.
            reason: why.

        Raises:
            LeaseNotHeld: the claim belongs to somebody else, or is quarantined.
        """
        entry = self._ledger.by_id.get(claim_id)
        if entry is None:
            if claim_id in self._ledger.withdrawn.get(owner, ()):
                return ()
            return (self._emit(Withdrawn(self._ledger.seq + 1, 0, claim_id, owner, at, reason)),)
        if entry.owner != owner:
            raise LeaseNotHeld(f"{claim_id} belongs to {entry.owner}, not to {owner}", claim_id=claim_id)
        if entry.state is ClaimState.QUARANTINED:
            raise LeaseNotHeld(f"{claim_id} is quarantined; only clear() frees it", claim_id=claim_id)
        return (self._emit(self._withdrawn(entry, at, reason)), *self.grant_ready(at=at))

    def withdraw_waiting(
        self,
        owners: Iterable[str],
        *,
        at: float,
        reason: WithdrawReason = WithdrawReason.CANCELLED,
    ) -> tuple[LockEvent, ...]:
        """Take back all that these owners wait for, in one step; what they hold stays.

        The step of a cancel that comes before their processes are stopped.

        Args:
            owners: the nodes of the cancelled subtree.
            at: time, in seconds since 1970.
            reason: why.
        """
        waiting = [entry for entry in self._entries(owners) if entry.is_queued]
        gone = [self._emit(self._withdrawn(entry, at, reason)) for entry in waiting]
        return (*gone, *self.grant_ready(at=at))

    def end(self, owners: Iterable[str], *, at: float, quarantine: str = "") -> tuple[LockEvent, ...]:
        """Let these owners go, in one step: they hold nothing and wait for nothing after it.

        Name descendants together with, or before, their ancestors.

        Args:
            owners: the nodes that reached their terminal event.
            at: time, in seconds since 1970.
            quarantine: why the owners may still write, if their processes are
                not proven gone: what they hold is kept until `clear`.
        """
        names = list(dict.fromkeys(owners))
        events: list[LockEvent] = []
        for entry in self._entries(names):
            if entry.is_queued:
                events.append(self._emit(self._withdrawn(entry, at, WithdrawReason.OWNER_ENDED)))
            elif entry.state is ClaimState.QUARANTINED:
                continue  # a second end proves nothing about the processes
            elif not quarantine:
                events.append(self._emit(self._released(entry, at)))
            else:
                seq, claim_id = self._ledger.seq + 1, entry.request.claim_id
                events.append(self._emit(Quarantined(seq, entry.ticket, claim_id, entry.owner, at, quarantine)))
        events.extend(self.grant_ready(at=at))
        remembered = [owner for owner in names if owner in self._ledger.withdrawn]
        events.extend(self._emit(Forgotten(self._ledger.seq + 1, owner)) for owner in remembered)
        return tuple(events)

    def clear(self, owner: str, *, at: float) -> tuple[LockEvent, ...]:
        """Release what was quarantined for an owner, now proven gone or given up by a person.

        Args:
            owner: the node that is gone.
            at: time, in seconds since 1970.
        """
        kept = [entry for entry in self._entries([owner]) if entry.state is ClaimState.QUARANTINED]
        freed = [self._emit(self._released(entry, at)) for entry in kept]
        return (*freed, *self.grant_ready(at=at))

    def grant_ready(self, *, at: float) -> tuple[Granted, ...]:
        """Grant all that waits for nothing any more, first come first.

        Every call that frees something does this by itself. It is for the end
        of a recovery whose journal breaks off between a release and the grants
        that followed from it.

        Args:
            at: time, in seconds since 1970.
        """
        granted: list[Granted] = []
        for entry in self._ledger.grantable():
            event = Granted(self._ledger.seq + 1, entry.ticket, entry.request.claim_id, entry.owner, at)
            self._ledger.apply(event)
            granted.append(event)
        return tuple(granted)

    def apply(self, event: LockEvent) -> None:
        """Fold one event into the table; one that it has seen is ignored.

        Raises:
            InternalError: an event is missing before this one.
        """
        self._ledger.apply(event)

    def find_cycle(
        self,
        waiter: str,
        awaited: str,
        *,
        ancestors: Iterable[str] = (),
        waiters_of: WaitersOf = nobody,
    ) -> tuple[WaitEdge, ...]:
        """Return the cycle that would close if one node waited for another to end.

        Waiting for a descendant never closes one: that wait is taken for
        granted when the descendant asks for a claim.

        Args:
            waiter: the node that is about to wait.
            awaited: the node it would wait for.
            ancestors: the waiter's parent, its parent, and so on.
            waiters_of: the waits that are not about claims, as of now.

        Returns:
            the waits of the cycle, the new one first; empty if there is none.
        """
        waiting = who_waits_for(waiter, ancestors, self._ledger.by_owner, waiters_of)
        if awaited not in waiting:
            return ()
        return (WaitEdge(waiter, awaited, WaitKind.RUN), *way_back(awaited, waiting))

    def check(self, owner: str, area: Area) -> int:
        """Return the fencing token under which an owner may use an area now.

        Args:
            owner: the turn or run that is about to use it.
            area: what it is about to do, and where.

        Raises:
            PathNotClaimed: the owner holds no claim that covers it, or a
                descendant has a claim there, which comes before the owner's.
        """
        for entry in self._ledger.by_owner.get(owner, {}).values():
            if entry.state is ClaimState.GRANTED and any(includes(own, area) for own in entry.areas):
                self._check_not_lent(owner, area, entry.request.claim_id)
                return entry.token
        raise PathNotClaimed(f"{owner} holds no claim that covers {area.describe()}")

    def kept_for(self, owner: str) -> tuple[Area, ...]:
        """Return what an owner may write, or is kept for it, and no claim of anybody else is about.

        Unlike `check` also of an owner that is gone: for those who clean up after it.
        """
        found: list[Area] = []
        for entry in self._ledger.by_owner.get(owner, {}).values():
            if not entry.is_queued:
                found.extend(area for area in entry.areas if area.mode is Mode.WRITE and self._is_alone(owner, area))
        return tuple(found)

    def _is_alone(self, owner: str, area: Area) -> bool:
        layers = self._ledger.trie.conflicts(area)
        return all(other.owner == owner or other.is_queued for layer in layers for other in layer.values())

    def holds(self, claim_id: str, token: int) -> bool:
        """Tell whether a lease is held, under this very token, by an owner that lives."""
        entry = self._ledger.by_id.get(claim_id)
        return entry is not None and entry.state is ClaimState.GRANTED and entry.token == token

    def claim(self, claim_id: str) -> ClaimView | None:
        """Return the view of one live claim, or None if it is not in the table."""
        entry = self._ledger.by_id.get(claim_id)
        return view_of(entry, self._ledger.trie) if entry is not None else None

    def claims(self, owner: str | None = None) -> tuple[ClaimView, ...]:
        """Return views of the live claims, of one owner or of all, first come first."""
        entries = self._ledger.by_ticket if owner is None else self._ledger.by_owner.get(owner, {})
        return tuple(view_of(entry, self._ledger.trie) for _, entry in sorted(entries.items()))

    def statistics(self) -> TableStatistics:
        """Return counts. Takes time in proportion to the live claims."""
        states = [entry.state for entry in self._ledger.by_ticket.values()]
        return TableStatistics(
            held=states.count(ClaimState.GRANTED),
            waiting=states.count(ClaimState.QUEUED),
            quarantined=states.count(ClaimState.QUARANTINED),
            owners=len(self._ledger.by_owner),
            last_seq=self._ledger.seq,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the whole table as plain data, for a snapshot in a journal."""
        return self._ledger.to_dict()

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, max_claims_per_owner: int = 10_000) -> LockTable:
        """Return the table that `to_dict` wrote; later events may be applied to it.

        Args:
            data: what `to_dict` returned.
            max_claims_per_owner: as for a new table.
        """
        table = cls(max_claims_per_owner=max_claims_per_owner)
        table._ledger = Ledger.from_dict(data)
        return table

    def _objection(self, request: ClaimRequest) -> RefusalReason | None:
        if not request.areas:
            return RefusalReason.EMPTY
        if request.claim_id in self._ledger.withdrawn.get(request.owner, ()):
            return RefusalReason.WITHDRAWN
        if len(self._ledger.by_owner.get(request.owner, ())) >= self._max_claims_per_owner:
            return RefusalReason.QUOTA
        return None

    def _check_not_lent(self, owner: str, area: Area, claim_id: str) -> None:
        for layer in self._ledger.trie.conflicts(area):
            for other in layer.values():
                if owner in other.lineage[1:] and not other.is_queued:
                    told = f"{area.describe()} is lent to {other.owner} until it is done with it"
                    raise PathNotClaimed(told, claim_id=claim_id)

    def _entries(self, owners: Iterable[str]) -> list[Entry]:
        return [entry for owner in owners for entry in list(self._ledger.by_owner.get(owner, {}).values())]

    def _released(self, entry: Entry, at: float) -> Released:
        return Released(self._ledger.seq + 1, entry.ticket, entry.request.claim_id, entry.owner, at)

    def _withdrawn(self, entry: Entry, at: float, reason: WithdrawReason) -> Withdrawn:
        seq, claim_id = self._ledger.seq + 1, entry.request.claim_id
        return Withdrawn(seq, entry.ticket, claim_id, entry.owner, at, reason)

    def _emit(self, event: LockEvent) -> LockEvent:
        self._ledger.apply(event)
        return event


def _again(entry: Entry) -> Granted | Queued:
    """Return the answer to a request that is in the table already."""
    request = entry.request
    if entry.is_queued:
        return Queued(entry.ticket, request, tuple(sorted(entry.waits)), tuple(sorted(entry.ahead_of)), entry.lenders)
    return Granted(entry.token, entry.ticket, request.claim_id, entry.owner, entry.since)


def _refusal(
    request: ClaimRequest,
    reason: RefusalReason,
    cycle: tuple[WaitEdge, ...] = (),
    behind: Iterable[Entry] = (),
) -> Refused:
    held_by = tuple(dict.fromkeys(entry.owner for entry in behind))
    return Refused(request.claim_id, request.owner, reason, request.describe(), cycle, held_by)
