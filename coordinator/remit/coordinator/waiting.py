"""Waits that could never end: cycles over "waits for", "comes after", "ends after its children" and claims."""

from __future__ import annotations

from collections.abc import Iterable

from remit.coordinator.claiming import wait_cycle_over_claims
from remit.coordinator.state import Node, NodeState, WorkspaceState
from remit.coordinator.transaction import Transaction
from remit.core.errors import WaitCycle
from remit.core.events import TurnWaiting
from remit.core.messages import NoteWait

__all__ = ["closed_cycle", "note_wait"]


def closed_cycle(state: WorkspaceState, waiter: Node, on: Iterable[str]) -> list[str] | None:
    """Return the cycle of waits, over runs, children and claims, that a wait would close, or None."""
    return wait_cycle(state, waiter, on) or wait_cycle_over_claims(state, waiter, on)


def note_wait(tx: Transaction, request: NoteWait) -> None:
    """Take note of what a turn's body waits for; words that are out of date are passed over.

    Raises:
        WaitCycle: the wait could never end; what it waited for before stands.
    """
    turn = tx.state.turns.get(request.turn_id)
    if turn is None or turn.is_ended or turn.report or request.number <= turn.wait_number:
        return
    if not request.on and not turn.waiting_on:
        return
    cycle = closed_cycle(tx.state, turn, request.on)
    if cycle and turn.cause is None:
        raise WaitCycle(f"{turn.id} would wait for itself: {' -> '.join(cycle)}", cycle=cycle)
    tx.emit(TurnWaiting(node_id=turn.id, turn_id=turn.id, at=tx.now, on=request.on, number=request.number))


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
        waits = node.waiting_on if node.state is NodeState.WAITING or (node.is_turn and node.cause is None) else ()
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
