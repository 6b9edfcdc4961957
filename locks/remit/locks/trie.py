"""A trie over path names that finds the areas which overlap a given one.

Looking up costs the depth of the path, plus what truly overlaps, plus the globs
anchored on the way down (each of which is compared). It does not depend on how
many other claims there are.

**Invariants**

1. `Node.writers` is the number of writing areas at the node and below.
2. A node without areas and without children is not in the trie, so an empty
   table has an empty trie.
3. The items of a node are in the order of their tickets.

Source: per-node counts do what intention locks do in a lock hierarchy (Gray et
al., Granularity of Locks in a Shared Data Base, 1975).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Generic, TypeVar

from remit.locks.area import Area, AreaKind, overlap, pattern_of
from remit.locks.claims import Mode
from remit.locks.glob import DEEP, Name, names_meet

__all__ = ["Node", "PathTrie"]

# Read once: looking up a member of an enumeration costs as much as a step in the trie.
_WRITE: Final = Mode.WRITE
_GLOB: Final = AreaKind.GLOB
_INODE: Final = AreaKind.INODE

Item = TypeVar("Item")
"""What hangs in the trie; known here by its ticket alone."""


class Node(Generic[Item]):
    """One name on the way to an area."""

    __slots__ = ("children", "globs", "name", "parent", "readers_here", "writers", "writers_here")

    def __init__(self, parent: Node[Item] | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.children: dict[str, Node[Item]] | None = None
        # Path areas anchored here, by ticket; None instead of an empty mapping
        # because most nodes have one kind at most.
        self.writers_here: dict[int, Item] | None = None
        self.readers_here: dict[int, Item] | None = None
        self.globs: dict[tuple[int, str], tuple[Area, Item]] | None = None
        self.writers = 0

    @property
    def is_bare(self) -> bool:
        """Whether nothing hangs here or below."""
        return not (self.children or self.writers_here or self.readers_here or self.globs)


class PathTrie(Generic[Item]):
    """Areas by the literal names they begin with."""

    __slots__ = ("_inodes", "_paths")

    def __init__(self) -> None:
        self._paths: Node[Item] = Node(None, "")
        # Inodes have a trie of their own: no path and no glob may reach them.
        self._inodes: Node[Item] = Node(None, "")

    @property
    def is_empty(self) -> bool:
        """Whether nothing hangs anywhere."""
        return self._paths.is_bare and self._inodes.is_bare

    def roots(self) -> tuple[Node[Item], Node[Item]]:
        """Return the root of the paths and that of the inodes, for checkers."""
        return self._paths, self._inodes

    def add(self, ticket: int, area: Area, item: Item) -> Node[Item]:
        """Hang an item up; return the node, which `remove` needs.

        Args:
            ticket: larger than all before, so that items stay in order.
            area: what the item covers; at most once for a ticket.
            item: what to find there.
        """
        node = self._inodes if area.kind is _INODE else self._paths
        writes = 1 if area.mode is _WRITE else 0
        node.writers += writes
        for name in _anchor(area):
            children = node.children
            if children is None:
                children = node.children = {}
            child = children.get(name)
            if child is None:
                child = children[name] = Node(node, name)
            node = child
            node.writers += writes
        if area.kind is _GLOB:
            if node.globs is None:
                node.globs = {}
            node.globs[ticket, area.key] = (area, item)
        elif writes:
            if node.writers_here is None:
                node.writers_here = {}
            node.writers_here[ticket] = item
        else:
            if node.readers_here is None:
                node.readers_here = {}
            node.readers_here[ticket] = item
        return node

    def remove(self, ticket: int, area: Area, node: Node[Item]) -> None:
        """Take an item off the node where `add` hung it."""
        writes = 1 if area.mode is _WRITE else 0
        if area.kind is _GLOB:
            if node.globs is not None:
                del node.globs[ticket, area.key]
        else:
            here = node.writers_here if writes else node.readers_here
            if here is not None:
                del here[ticket]
        current: Node[Item] | None = node
        may_be_bare = True
        while current is not None:
            current.writers -= writes
            parent = current.parent
            # One that stays keeps all above it.
            may_be_bare = may_be_bare and current.is_bare
            if may_be_bare and parent is not None and parent.children is not None:
                del parent.children[current.name]
            current = parent

    def is_free(self, area: Area) -> bool:
        """Tell whether certainly nothing conflicts; globs on the way are not compared.

        The quick answer for the common case, without the machinery of `conflicts`.
        """
        writes = area.mode is _WRITE
        node = self._inodes if area.kind is _INODE else self._paths
        for name in _anchor(area):
            if node.writers_here or node.globs or (writes and node.readers_here):
                return False
            child = node.children.get(name) if node.children else None
            if child is None:
                return True
            node = child
        return node.is_bare if writes else not node.writers

    def conflicts(self, area: Area) -> Iterator[dict[int, Item]]:
        """Yield mappings of ticket to item that together hold all that conflicts.

        Each mapping is in the order of its tickets. An item with several areas
        may come more than once.
        """
        writes = area.mode is _WRITE
        node = self._inodes if area.kind is _INODE else self._paths
        for name in _anchor(area):
            # A path area above covers everything below itself.
            if node.writers_here:
                yield node.writers_here
            if writes and node.readers_here:
                yield node.readers_here
            if node.globs:
                yield _globs(node.globs, area)
            if node.children is None:
                return
            child = node.children.get(name)
            if child is None or not (writes or child.writers):
                return
            node = child
        if area.kind is _GLOB:
            yield from _below_glob(node, area, writes)
        else:
            yield from _below_path(node, writes)


def _anchor(area: Area) -> list[str] | tuple[str, ...]:
    if area.kind is _GLOB:
        return pattern_of(area.kind, area.key).anchor
    return area.key.split("/") if area.key else ()


def _globs(globs: Mapping[tuple[int, str], tuple[Area, Item]], area: Area) -> dict[int, Item]:
    """Return the globs of a node that conflict with an area."""
    writes = area.mode is _WRITE
    return {
        ticket: item
        for (ticket, _), (other, item) in globs.items()
        if (writes or other.mode is _WRITE) and overlap(area, other)
    }


def _below_path(start: Node[Item], writes: bool) -> Iterator[dict[int, Item]]:
    """Yield what hangs at a node and below: a path area there overlaps all of it."""
    todo = [start]
    while todo:
        node = todo.pop()
        if node.writers_here:
            yield node.writers_here
        if writes and node.readers_here:
            yield node.readers_here
        if node.globs:
            yield {ticket: item for (ticket, _), (other, item) in node.globs.items() if writes or other.mode is _WRITE}
        if node.children:
            todo.extend(child for child in node.children.values() if writes or child.writers)


def _below_glob(start: Node[Item], area: Area, writes: bool) -> Iterator[dict[int, Item]]:
    """Yield what hangs at the anchor of a glob and below, pruned by the pattern.

    While names are read, the pattern may stand at several places at once (the
    states of its automaton). No place left: nothing below can be matched.
    """
    tail = pattern_of(area.kind, area.key).tail
    todo = [(start, _skip_deep(tail, {0}))]
    while todo:
        node, places = todo.pop()
        if node.writers_here:
            yield node.writers_here
        if writes and node.readers_here:
            yield node.readers_here
        if node.globs:
            yield _globs(node.globs, area)
        for name, child in (node.children or {}).items():
            if writes or child.writers:
                reached = _read_name(tail, places, name)
                if reached:
                    todo.append((child, reached))


def _read_name(tail: tuple[Name, ...], places: set[int], name: str) -> set[int]:
    """Return where the pattern may stand after one more name."""
    reached: set[int] = set()
    for place in places:
        if place < len(tail):
            if tail[place] == DEEP:
                reached.add(place)
            elif names_meet(tail[place], name):
                reached.add(place + 1)
    return _skip_deep(tail, reached)


def _skip_deep(tail: tuple[Name, ...], places: set[int]) -> set[int]:
    """Add the places behind each `**`, which may match no name at all."""
    found = set(places)
    for place in sorted(places):
        while place < len(tail) and tail[place] == DEEP:
            place += 1
            found.add(place)
    return found
