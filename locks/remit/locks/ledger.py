"""The state of a lock table, and the one function that changes it: `apply`.

Deciding and folding share this code, so a table folded from its events is the
table that decided them, edges included.

**Invariants**

1. `waits` and `blocks` mirror each other; only queued claims wait.
2. Where claim A has to stand behind claim B (`Entry.is_behind`), A waits for B,
   or A waits for a queued C that has to stand behind B itself.
3. Events carry consecutive numbers; an event seen before is ignored.
"""

from __future__ import annotations

from typing import Any, assert_never

from remit.core.errors import InternalError
from remit.locks.entry import ClaimState, Entry
from remit.locks.events import (
    ClaimRequest,
    Forgotten,
    Granted,
    LockEvent,
    Quarantined,
    Queued,
    Released,
    Withdrawn,
    WithdrawReason,
)
from remit.locks.survey import blockers
from remit.locks.trie import PathTrie

__all__ = ["Ledger"]


class Ledger:
    """Live claims, their edges, and what was withdrawn before it came."""

    __slots__ = ("_changed", "_stale", "by_id", "by_owner", "by_ticket", "seq", "trie", "withdrawn")

    def __init__(self) -> None:
        self.seq = 0
        """Number of the last change."""
        self.trie: PathTrie[Entry] = PathTrie()
        self.by_ticket: dict[int, Entry] = {}
        self.by_id: dict[str, Entry] = {}
        self.by_owner: dict[str, dict[int, Entry]] = {}
        self.withdrawn: dict[str, dict[str, None]] = {}
        """For each owner that lives, the ids it must not be granted any more."""
        self._changed: dict[int, Entry] = {}
        """Queued claims that wait for less than before; some may be grantable."""
        self._stale: dict[int, Entry] = {}
        """Queued claims that lost a *queued* one they waited for; see `settle`."""

    def apply(self, event: LockEvent) -> None:
        """Change the state as the event says.

        Raises:
            InternalError: an event is missing before this one, or it speaks of
                a claim that is not there.
        """
        if event.seq <= self.seq:
            return
        if event.seq != self.seq + 1:
            raise InternalError(f"lock event {event.seq} follows {self.seq}: events are missing between")
        self.seq = event.seq
        match event:
            case Granted():
                self._apply_granted(event)
            case Queued():
                self.settle()
                entry = self._insert(Entry(event.seq, event.request, event.ahead_of, event.lenders))
                for ticket in event.behind:
                    _link(entry, self._entry(ticket))
            case Released():
                self._remove(self._entry(event.ticket))
            case Withdrawn():
                if event.reason is not WithdrawReason.OWNER_ENDED:
                    self.withdrawn.setdefault(event.owner, {})[event.claim_id] = None
                if event.ticket:
                    self._remove(self._entry(event.ticket))
            case Quarantined():
                entry = self._entry(event.ticket)
                entry.state = ClaimState.QUARANTINED
                entry.since, entry.note = event.at, event.reason
            case Forgotten():
                self.withdrawn.pop(event.owner, None)
            case _:
                assert_never(event)

    def settle(self) -> None:
        """Find again what a queued claim has to wait for after it lost one in line.

        A claim waits for the nearest in line and leaves out what that one waits
        for. When the nearest goes away ungranted, what was left out is looked
        up. Done once for any number of departures in a row, so that a cancel of
        a thousand waiters on one file is not quadratic.
        """
        stale, self._stale = self._stale, {}
        for ticket in sorted(stale):
            entry = stale[ticket]
            behind = blockers(
                self.trie,
                entry.areas,
                entry.lineage,
                lambda other, entry=entry: other is not entry and entry.is_behind(other),  # type: ignore[misc]
            )
            for gone in entry.waits.keys() - behind.keys():
                del entry.waits[gone].blocks[ticket]
            for new in behind.keys() - entry.waits.keys():
                behind[new].blocks[ticket] = entry
            entry.waits = behind

    @property
    def has_changed(self) -> bool:
        """Whether a queued claim waits for less than before, and may be grantable."""
        return bool(self._changed)

    def grantable(self) -> list[Entry]:
        """Return the queued claims that wait for nothing any more, first come first."""
        self.settle()
        changed, self._changed = self._changed, {}
        return [changed[ticket] for ticket in sorted(changed) if not changed[ticket].waits]

    def _apply_granted(self, event: Granted) -> None:
        if self._stale:
            self.settle()  # with the claims as they were when the table decided
        if event.request is None:
            entry = self._entry(event.ticket)
            self._changed.pop(entry.ticket, None)
            for other in entry.waits.values():
                del other.blocks[entry.ticket]
            entry.waits = {}
        else:
            entry = self._insert(Entry(event.ticket, event.request, event.ahead_of, ()))
        entry.state = ClaimState.GRANTED
        entry.token, entry.since = event.token, event.at

    def _insert(self, entry: Entry) -> Entry:
        self.by_ticket[entry.ticket] = entry
        self.by_id[entry.request.claim_id] = entry
        owned = self.by_owner.get(entry.owner)
        if owned is None:
            owned = self.by_owner[entry.owner] = {}
        owned[entry.ticket] = entry
        entry.nodes = tuple([self.trie.add(entry.ticket, area, entry) for area in entry.request.areas])
        for ticket in entry.ahead_of:
            overtaken = self.by_ticket.get(ticket)
            if overtaken is not None:
                _link(overtaken, entry)
        return entry

    def _remove(self, entry: Entry) -> None:
        ticket = entry.ticket
        del self.by_ticket[ticket]
        del self.by_id[entry.request.claim_id]
        owned = self.by_owner[entry.owner]
        del owned[ticket]
        if not owned:
            del self.by_owner[entry.owner]
        for area, node in zip(entry.request.areas, entry.nodes, strict=True):
            self.trie.remove(ticket, area, node)
        for other in entry.waits.values():
            del other.blocks[ticket]
        for waiting in entry.blocks.values():
            del waiting.waits[ticket]
            self._changed[waiting.ticket] = waiting
            if entry.is_queued:
                self._stale[waiting.ticket] = waiting
        if self._changed:
            # Both may name a claim that goes away in the same batch.
            self._changed.pop(ticket, None)
            self._stale.pop(ticket, None)

    def _entry(self, ticket: int) -> Entry:
        entry = self.by_ticket.get(ticket)
        if entry is None:
            raise InternalError(f"no live claim has ticket {ticket}")
        return entry

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data, for JSON and for comparison."""
        self.settle()
        return {
            "seq": self.seq,
            "claims": [_entry_to_dict(entry) for _, entry in sorted(self.by_ticket.items())],
            "withdrawn": {owner: list(ids) for owner, ids in sorted(self.withdrawn.items())},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        """Return the state that `to_dict` wrote."""
        ledger = cls()
        ledger.seq = data["seq"]
        ledger.withdrawn = {owner: dict.fromkeys(ids) for owner, ids in data["withdrawn"].items()}
        for claim in data["claims"]:
            request = ClaimRequest.from_dict(claim["request"])
            # Edges to overtaken claims are among their `waits`, so none are made here.
            entry = ledger._insert(Entry(claim["ticket"], request, (), tuple(claim["lenders"])))
            entry.ahead_of = frozenset(claim["ahead_of"])
            entry.state = ClaimState(claim["state"])
            entry.token, entry.since, entry.note = claim["token"], claim["since"], claim["note"]
        for claim in data["claims"]:
            for ticket in claim["waits"]:
                _link(ledger.by_ticket[claim["ticket"]], ledger.by_ticket[ticket])
        return ledger


def _link(waiting: Entry, awaited: Entry) -> None:
    waiting.waits[awaited.ticket] = awaited
    awaited.blocks[waiting.ticket] = waiting


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    return {
        "ticket": entry.ticket,
        "request": entry.request.to_dict(),
        "state": entry.state.value,
        "token": entry.token,
        "since": entry.since,
        "note": entry.note,
        "ahead_of": sorted(entry.ahead_of),
        "lenders": list(entry.lenders),
        "waits": sorted(entry.waits),
    }
