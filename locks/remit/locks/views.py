"""Frozen views of the table for people and programs: who holds, who waits, behind whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from remit.locks.entry import ClaimState, Entry

if TYPE_CHECKING:
    from remit.locks.trie import PathTrie

__all__ = ["ClaimView", "TableStatistics", "held_against", "view_of"]


@dataclass(frozen=True, slots=True)
class ClaimView:
    """One live claim."""

    claim_id: str
    """Id of the request."""
    owner: str
    """The turn or run."""
    state: ClaimState
    """Waiting, held, or held without an owner."""
    wants: tuple[str, ...]
    """Its areas as people write them: `write src/a.py`."""
    ticket: int
    """Its place in line; smaller came first."""
    token: int
    """Fencing token of the lease; 0 while it waits."""
    since: float
    """When it came into this state, in seconds since 1970."""
    behind: tuple[str, ...] = ()
    """Owners it is directly behind in line, oldest first; empty once granted."""
    held_by: tuple[str, ...] = ()
    """Owners that hold what it waits for, oldest first; empty once granted."""
    note: str = ""
    """Why it is quarantined; empty otherwise."""

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain data, for JSON."""
        data = asdict(self)
        for name in ("wants", "behind", "held_by"):
            data[name] = list(data[name])
        return data


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """How full a table is."""

    held: int
    """Claims that are granted."""
    waiting: int
    """Claims in line."""
    quarantined: int
    """Claims whose owner is gone but may still write."""
    owners: int
    """Owners with at least one live claim."""
    last_seq: int
    """Number of the last change."""


def held_against(entry: Entry, trie: PathTrie[Entry]) -> tuple[Entry, ...]:
    """Return the held claims of others that a queued claim waits for, oldest grant first."""
    found: dict[int, Entry] = {}
    for area in entry.areas:
        for layer in trie.conflicts(area):
            found.update(layer)
    held = (other for other in found.values() if not other.is_queued and entry.is_behind(other))
    return tuple(sorted(held, key=lambda other: other.token))


def view_of(entry: Entry, trie: PathTrie[Entry]) -> ClaimView:
    """Return the view of one live claim."""
    return ClaimView(
        claim_id=entry.request.claim_id,
        owner=entry.owner,
        state=entry.state,
        wants=tuple(area.describe() for area in entry.areas),
        ticket=entry.ticket,
        token=entry.token,
        since=entry.since,
        behind=_owners(entry.waits[ticket] for ticket in sorted(entry.waits)),
        held_by=_owners(held_against(entry, trie)) if entry.is_queued else (),
        note=entry.note,
    )


def _owners(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.owner for entry in entries))
