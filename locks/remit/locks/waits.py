"""Who waits for whom: owners, over claims, children and runs, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remit.locks.entry import Entry

__all__ = ["WaitEdge", "WaitKind", "WaitersOf", "nobody", "way_back", "who_waits_for"]

WaitersOf = Callable[[str], Iterable[str]]
"""Given a node, the nodes that wait for its end otherwise than by claims.

Among them its parent, unless it is detached, and whoever awaits its result.
"""


def nobody(owner: str) -> Iterable[str]:
    """Return no waiters: what is known of the owner's ancestors is all there is."""
    return ()


class WaitKind(StrEnum):
    """What a node waits for."""

    CLAIM = "claim"
    """A claim that the other holds, or stands in line for ahead of it."""
    CHILD = "child"
    """The end of its child."""
    RUN = "run"
    """The end of a run that it awaits."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """One wait of a cycle."""

    waiter: str
    """Who waits."""
    awaited: str
    """For whom."""
    kind: WaitKind
    """For what of it."""
    wish: str = ""
    """The areas that are waited for, for people; empty for a child or a run."""

    def describe(self) -> str:
        """Return the wait as one clause."""
        match self.kind:
            case WaitKind.CLAIM:
                return f"{self.waiter} wants {self.wish}, which waits for {self.awaited}"
            case WaitKind.CHILD:
                return f"{self.waiter} waits for its child {self.awaited}"
            case WaitKind.RUN:
                return f"{self.waiter} waits for {self.awaited} to end"

    def to_dict(self) -> dict[str, Any]:
        """Return the wait as a mapping of texts, for JSON."""
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WaitEdge:
        """Return the wait that `to_dict` wrote."""
        return cls(**{**data, "kind": WaitKind(data["kind"])})


def who_waits_for(
    owner: str,
    ancestors: Iterable[str],
    entries_of: Mapping[str, Mapping[int, Entry]],
    waiters_of: WaitersOf,
) -> dict[str, WaitEdge | None]:
    """Return everybody who waits for this owner, through any number of others.

    Time grows with the number of those who do, not with the claims held. The
    waits are between owners, not between claims: an owner that waits for one
    claim keeps all its others, so whoever wants those waits too.

    Args:
        owner: the node asked about.
        ancestors: its parent, its parent's parent, and so on.
        entries_of: the claims of each owner.
        waiters_of: waits for the end of a node.

    Returns:
        each waiter with its first step on the way back to the owner; the owner
        itself with None.
    """
    found: dict[str, WaitEdge | None] = {owner: None}
    todo = [owner]
    _add_line(owner, ancestors, found, todo)
    while todo:
        current = todo.pop()
        lineage: tuple[str, ...] = ()
        for entry in entries_of.get(current, {}).values():
            lineage = entry.lineage
            for waiting in entry.blocks.values():
                if waiting.owner not in found:
                    wish = waiting.request.describe()
                    found[waiting.owner] = WaitEdge(waiting.owner, current, WaitKind.CLAIM, wish)
                    todo.append(waiting.owner)
        _add_line(current, lineage[1:], found, todo)
        for waiter in waiters_of(current):
            if waiter not in found:
                found[waiter] = WaitEdge(waiter, current, WaitKind.RUN)
                todo.append(waiter)
    return found


def _add_line(owner: str, ancestors: Iterable[str], found: dict[str, WaitEdge | None], todo: list[str]) -> None:
    """Add the ancestors, each of which waits for the next one down."""
    child = owner
    for ancestor in ancestors:
        if ancestor not in found:
            found[ancestor] = WaitEdge(ancestor, child, WaitKind.CHILD)
            todo.append(ancestor)
        child = ancestor


def way_back(start: str, found: Mapping[str, WaitEdge | None]) -> tuple[WaitEdge, ...]:
    """Return the waits from one of the waiters to the owner that `found` is about."""
    way: list[WaitEdge] = []
    edge = found[start]
    while edge is not None:
        way.append(edge)
        edge = found[edge.awaited]
    return tuple(way)
