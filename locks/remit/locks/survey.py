"""What stands in a request's way: whom it waits for, whom it overtakes, or which cycle.

The rules, for each live claim that conflicts with the new one:

1. A claim of the owner itself or of an ancestor never blocks it (lending). An
   ancestor's that is still queued waits for the new one.
2. A queued claim whose owner waits, through any number of others, for the new
   owner or for an ancestor of it, is overtaken: it waits for the new one. This
   is what lets a child in where its parent holds, past those who wait for the
   parent, and what lets a single reader become a writer.
3. A *held* claim whose owner waits like that closes a cycle: refused.
4. Everything else is waited for, held or queued: first come, first served.
5. A claim inside what its owner holds already overtakes everything queued, and
   waits only where a descendant holds.

Source: soft and hard edges follow the lock manager of PostgreSQL
(src/backend/storage/lmgr/README), lending follows Moss, Nested Transactions
(1985).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from remit.locks.area import Area, includes
from remit.locks.entry import Entry
from remit.locks.events import ClaimRequest
from remit.locks.trie import PathTrie
from remit.locks.waits import WaitEdge, WaitersOf, WaitKind, way_back, who_waits_for

__all__ = ["Survey", "blockers", "survey"]


@dataclass(slots=True)
class Survey:
    """What a request would meet."""

    behind: dict[int, Entry] = field(default_factory=dict[int, Entry])
    """Claims to wait for, by ticket, without those that these wait for."""
    ahead_of: dict[int, Entry] = field(default_factory=dict[int, Entry])
    """Queued claims that will wait for this one."""
    lenders: set[str] = field(default_factory=set[str])
    """Those of the owner and its ancestors whose claims it overlaps and may enter."""
    cycle: tuple[WaitEdge, ...] = ()
    """The waits that would close, if any would."""


def survey(
    request: ClaimRequest,
    trie: PathTrie[Entry],
    entries_of: Mapping[str, Mapping[int, Entry]],
    waiters_of: WaitersOf,
) -> Survey | None:
    """Look at everything that conflicts with a request.

    Args:
        request: the new request.
        trie: all live claims.
        entries_of: the claims of each owner.
        waiters_of: waits for the end of a node.

    Returns:
        what it meets, or None if it meets nothing, which is the common case.
    """
    areas = request.areas
    if all(map(trie.is_free, areas)):
        return None
    found = Survey()
    waiting = who_waits_for(request.owner, request.ancestors, entries_of, waiters_of)
    lineage = {request.owner, *request.ancestors}

    def stands_in_the_way(other: Entry) -> bool:
        if other.owner in lineage:
            found.lenders.add(other.owner)
            if other.is_queued and other.owner != request.owner:
                found.ahead_of[other.ticket] = other
            return False
        if other.owner not in waiting:
            return True
        if other.is_queued:
            found.ahead_of[other.ticket] = other
        elif not found.cycle:
            first = WaitEdge(request.owner, other.owner, WaitKind.CLAIM, request.describe())
            found.cycle = (first, *way_back(other.owner, waiting))
        return False

    held = [own for own in entries_of.get(request.owner, {}).values() if not own.is_queued]
    is_inside = _is_inside(areas, held)
    found.behind = blockers(trie, areas, lineage, stands_in_the_way, use_shadow=not is_inside)
    if is_inside and not found.cycle and all(other.is_queued for other in found.behind.values()):
        found.behind = {}
    for entry in found.behind.values():
        # What lies in the shadow of this one was not looked at; its lenders count.
        found.lenders.update(lender for lender in entry.lenders if lender in lineage)
    return found


def blockers(
    trie: PathTrie[Entry],
    areas: tuple[Area, ...],
    lineage: Iterable[str],
    stands_in_the_way: Callable[[Entry], bool],
    *,
    use_shadow: bool = True,
) -> dict[int, Entry]:
    """Return the claims to wait for, without those that one of them waits for anyway.

    A queued writer that covers all the areas *shadows* what is older: whatever
    conflicts with us conflicts with it, so where it waits, we need not. On a
    file with a long line this leaves one claim to wait for, and, if the shadow
    makes no exceptions that we would not make, nothing older need be looked at.

    Args:
        trie: all live claims.
        areas: what is asked for.
        lineage: the owner that asks, and its ancestors.
        stands_in_the_way: whether a conflicting claim must be waited for; asked
            for each one that is looked at.
        use_shadow: False to return all of them, none left out.
    """
    behind: dict[int, Entry] = {}
    shadow: Entry | None = None
    floor = 0
    for area in areas:
        for layer in trie.conflicts(area):
            for other in reversed(layer.values()):
                if other.ticket < floor:
                    break
                if not stands_in_the_way(other):
                    continue
                behind[other.ticket] = other
                if use_shadow and shadow is None and other.is_queued and other.shadows(areas):
                    shadow = other
                    if not shadow.ahead_of and set(shadow.lenders) <= set(lineage):
                        floor = shadow.ticket
    if shadow is None:
        return behind
    return {ticket: other for ticket, other in behind.items() if not shadow.is_behind(other)}


def _is_inside(areas: tuple[Area, ...], held: Iterable[Entry]) -> bool:
    """Tell whether the owner holds all of this already, in a sufficient mode."""
    own = [area for entry in held for area in entry.areas]
    return bool(own) and all(any(includes(wide, area) for wide in own) for area in areas)
