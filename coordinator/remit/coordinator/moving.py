"""Moving work away from a node of the cluster: by attempt, never by ending a run.

**Rules**

1. From the drain's own step on nothing starts on a host of that node, and no host
   is asked for there.
2. Each attempt there is told to end with the cause `worker_moved`. Its run is not
   cancelled: its next attempt begins elsewhere, and none of the allowed ones is used up.
3. What such an attempt returns or raises after it was told is not the run's: a body
   that swallows the stop has not succeeded. What it had reported before stays.
4. What it has delegated is cancelled with the same kind: the next attempt delegates anew.
5. A body that does not end within its run's grace is killed with its host.
"""

from __future__ import annotations

from remit.coordinator.state import HostState, Node
from remit.coordinator.stopping import cancel_children
from remit.coordinator.transaction import Transaction
from remit.core.cause import Cause, CauseKind
from remit.core.errors import Refused
from remit.core.events import AttemptMoved, HostDraining, NodeDraining
from remit.core.messages import CancelOrder

__all__ = ["drain_node", "leave_drained_node", "move_cause", "undo_drain"]


def drain_node(tx: Transaction, node: str, reason: str, *, others: int) -> tuple[int, int]:
    """Let nothing start on a node of the cluster any more, and move what runs there.

    Args:
        tx: the decision.
        node: id of the node of the cluster.
        reason: free text for people.
        others: further nodes that take work.

    Returns:
        How many hosts are drained, and how many attempts were told to end.

    Raises:
        Refused: there is no other node that could take the work.
    """
    if not others:
        raise Refused(f"node {node[:12]} cannot be drained: no other node of the cluster takes work; add one first")
    if node not in tx.state.drained:
        tx.emit(NodeDraining(node_id=node, turn_id="", at=tx.now, reason=reason or "drained"))
    hosts = [host for host in tx.state.hosts.values() if host.node == node]
    return len(hosts), sum(_move_away(tx, host) for host in hosts)


def undo_drain(tx: Transaction, node: str) -> None:
    """Let a node have work again; the hosts that were drained end all the same."""
    if node in tx.state.drained:
        tx.emit(NodeDraining(node_id=node, turn_id="", at=tx.now, undone=True))


def leave_drained_node(tx: Transaction, host: HostState) -> None:
    """Take a host that has just come up out of service if its node was drained meanwhile."""
    if host.node in tx.state.drained:
        _move_away(tx, host)


def move_cause(tx: Transaction, node: Node) -> Cause:
    """Return the cause of an attempt that ends because its host is drained."""
    host = tx.state.hosts.get(node.host_id)
    why = tx.state.drained.get(host.node, "") if host is not None else ""
    return Cause(
        CauseKind.WORKER_MOVED,
        origin=node.id,
        actor="coordinator",
        surface="coordinator",
        at_unix_ms=int(tx.now * 1000),
        reason=f"attempt {node.attempt} moves to another node" + (f": {why}" if why else ""),
    )


def _move_away(tx: Transaction, host: HostState) -> int:
    """Drain one host and tell its attempts to end; return how many were told now."""
    if not host.draining:
        reason = f"its node {host.node} is drained"
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=reason))
    moved = 0
    for name in list(host.runs):
        node = tx.state.nodes[name]
        # The end of one may have ended others; what is to stop anyway need not move.
        if node.on_host and node.cause is None and node.attempt not in (node.moved_attempt, node.expired_attempt):
            _move(tx, node)
            moved += 1
    return moved


def _move(tx: Transaction, node: Node) -> None:
    cause = move_cause(tx, node)
    tx.emit(AttemptMoved(node_id=node.id, turn_id=node.turn_id, at=tx.now, attempt=node.attempt, reason=cause.reason))
    order = CancelOrder(node.id, cause, attempt=node.attempt)
    tx.effects.cancels.setdefault(node.host_id, []).append(order)
    cancel_children(tx, node, CauseKind.WORKER_MOVED, cause.reason)
    tx.timers.add(tx.now + node.grace_s, "escalate_attempt", node.id, node.attempt)
