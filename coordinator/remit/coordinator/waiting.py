"""Waits that could never end: cycles over "waits for", "comes after" and "ends after its children"."""

from __future__ import annotations

from collections.abc import Iterable

from remit.coordinator.state import Node, NodeState, WorkspaceState

__all__ = ["wait_cycle"]


def wait_cycle(state: WorkspaceState, waiter: Node, on: Iterable[str]) -> list[str] | None:
    """Return the cycle that a wait would close, as ids with the waiter at both ends, or None.

    An edge goes from a node to whatever it needs an end of: the runs it waits for,
    the runs it comes after, and its own live children (it ends after them). A wait
    for one's own children closes nothing: that edge is there already.

    Source: depth-first search in a wait-for graph (Coffman, Elphick, Shoshani,
    "System Deadlocks", 1971).
    """
    own = waiter.live_children or {}
    targets = [name for name in on if name not in own]
    if not targets:
        return None
    came_from: dict[str, str] = {}
    stack = [name for name in targets if name in state.nodes]
    for name in stack:
        came_from.setdefault(name, waiter.id)
    while stack:
        name = stack.pop()
        if name == waiter.id:
            return _path(came_from, waiter.id)
        node = state.nodes.get(name)
        if node is None or node.is_ended:
            continue
        # A wait that is over, or that a cancel has broken, holds nobody.
        waits = node.waiting_on if node.state is NodeState.WAITING else ()
        for following in (*waits, *node.after, *(node.live_children or ())):
            if following == waiter.id:
                came_from[following] = name
                return _path(came_from, waiter.id)
            if following not in came_from:
                came_from[following] = name
                stack.append(following)
    return None


def _path(came_from: dict[str, str], waiter: str) -> list[str]:
    path = [waiter]
    name = came_from[waiter]
    while name != waiter:
        path.append(name)
        name = came_from[name]
    path.append(waiter)
    path.reverse()
    return path
