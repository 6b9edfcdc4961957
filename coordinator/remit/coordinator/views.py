"""Frozen views of what the coordinator knows, for people and programs.

A view is a projection of the journal: the same whether it was asked of a living
coordinator or folded from the file when nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from remit.coordinator.state import Node, NodeState, WorkspaceState
from remit.core.cause import Cause
from remit.core.messages import CancelSummary
from remit.core.outcome import Outcome
from remit.locks import ClaimState, ClaimView

__all__ = ["NodeView", "TreeView", "node_view", "summarise_cancel", "tree_view", "turn_views"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One turn or run as it stands."""

    id: str
    """`turn_...` or `run_...`."""
    kind: str
    """`turn` or `run`."""
    parent_id: str
    """The turn or run that delegated it; the empty text for a turn."""
    turn_id: str
    """The turn whose tree it is in."""
    session_id: str
    """The session of that turn."""
    name: str
    """Name that the caller gave; may be empty."""
    agent: str
    """Name of the agent; the empty text for a turn."""
    depth: int
    """0 for a turn, 1 for what it delegates, and so on."""
    state: str
    """One of `NodeState`, or `blocked` for a run that a dependency kept from starting."""
    outcome: Outcome | None
    """How it ended; None while it has not."""
    cause: Cause | None
    """Why it was stopped; None if nobody asked."""
    attempt: int
    """Which attempt runs or ran last; 0 before the first."""
    host_id: str
    """The agent host of that attempt; may be empty."""
    detached: bool
    """Whether it was let go by name: it is not stopped with its parent."""
    waiting_for: str
    """What it waits for in words; the empty text if it does not wait."""
    since: float
    """When it came into this state or began this wait, in seconds since 1970."""
    accepted_at: float
    """In seconds since 1970."""
    started_at: float | None
    """Start of the last attempt, in seconds since 1970; None before the first."""
    ended_at: float | None
    """In seconds since 1970; None while it has not ended."""
    deadline_at: float | None
    """Its own deadline, in seconds since 1970; None if it has none of its own."""
    processes: tuple[str, ...]
    """Its tool processes that are not proven gone: program and process id."""
    error: str
    """Message of the body's error; may be empty."""
    error_type: str
    """Class name of that error; may be empty."""
    unconfirmed: bool
    """Whether it was given up on without proof that its body is gone."""
    blocked_by: str
    """The dependency that kept it from starting; may be empty."""
    arguments: str
    """A bounded, redacted rendering of its arguments."""
    preview: str
    """A bounded rendering of its result or latest partial result."""
    tokens: int = 0
    """Spent by it and all below it."""
    cost: float = 0.0
    """The same in money."""

    def to_dict(self) -> dict[str, Any]:
        """Return the view as a mapping for JSON."""
        data = asdict(self)
        data["outcome"] = None if self.outcome is None else self.outcome.value
        data["cause"] = None if self.cause is None else self.cause.to_dict()
        return data


@dataclass(frozen=True, slots=True)
class TreeView:
    """A turn with everything below it, parents before children, in order of acceptance."""

    root: NodeView
    """The turn or run that was asked for."""
    nodes: tuple[NodeView, ...]
    """All nodes, the root first."""
    now: float
    """Coordinator time of this view, in seconds since 1970."""

    def children(self, node_id: str) -> tuple[NodeView, ...]:
        """Return the direct children of a node, oldest first."""
        return tuple(node for node in self.nodes if node.parent_id == node_id)

    @property
    def live(self) -> int:
        """Return how many runs have not ended."""
        return sum(node.kind == "run" and node.outcome is None for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as a mapping for JSON."""
        return {"now": self.now, "nodes": [node.to_dict() for node in self.nodes]}


def node_view(state: WorkspaceState, node: Node) -> NodeView:
    """Return the view of one node."""
    claim = _open_claim(state, node)
    asked = [state.approvals[name].asked_at for name in node.asking or ()]
    waiting_for = _claim_text(claim) if claim is not None else _approval_text(state, node) or _waiting_for(state, node)
    return NodeView(
        id=node.id,
        kind="turn" if node.is_turn else "run",
        parent_id=node.parent_id,
        turn_id=node.turn_id,
        session_id=node.session_id,
        name=node.name,
        agent=node.agent,
        depth=node.depth,
        state="blocked" if node.blocked_by else node.state.value,
        outcome=node.outcome,
        cause=node.cause,
        attempt=node.attempt,
        host_id=node.host_id,
        detached=node.detached,
        waiting_for=waiting_for,
        since=claim.since if claim is not None else min(asked) if asked else _since(node),
        accepted_at=node.accepted_at,
        started_at=node.started_at,
        ended_at=node.ended_at,
        deadline_at=node.deadline_at,
        processes=tuple(f"{p.program} ({p.pid})" for p in (node.processes or {}).values()),
        error=node.error,
        error_type=node.error_type,
        unconfirmed=node.unconfirmed,
        blocked_by=node.blocked_by,
        arguments=node.arguments,
        preview=node.preview,
        tokens=node.tokens,
        cost=node.cost,
    )


def _approval_text(state: WorkspaceState, node: Node) -> str:
    """Say which approval a node waits for: `approval of deploy (approval_...)`, or the empty text."""
    asked = [state.approvals[name] for name in node.asking or ()]
    return ", ".join(f"approval of {record.action} ({record.id})" for record in asked)


def _open_claim(state: WorkspaceState, node: Node) -> ClaimView | None:
    """Return the oldest claim that a node waits for, or None."""
    if node.is_ended or state.locks.is_idle or not state.locks.concerns(node.id):
        return None
    waiting = [view for view in state.locks.claims(node.id) if view.state is ClaimState.QUEUED]
    return waiting[0] if waiting else None


def _claim_text(claim: ClaimView) -> str:
    """Say what is waited for: `write src/a.py (held by run_x)`."""
    holders = f"held by {', '.join(claim.held_by)}" if claim.held_by else f"behind {', '.join(claim.behind)}"
    return f"{' and '.join(claim.wants)} ({holders})"


def _since(node: Node) -> float:
    if node.ended_at is not None:
        return node.ended_at
    if node.cause is not None:
        return node.cancel_at
    if node.waiting_on:
        return node.waiting_since
    if node.state in (NodeState.RUNNING, NodeState.SETTLING) and node.started_at is not None:
        return node.started_at
    return node.accepted_at


def _waiting_for(state: WorkspaceState, node: Node) -> str:
    """Say what a node waits for, or the empty text."""
    if node.is_ended:
        return ""
    if node.state is NodeState.DEPENDING:
        open_names = [n for n in node.after if n in state.nodes and not state.nodes[n].is_ended]
        return _names(state, open_names)
    if node.state is NodeState.QUEUED:
        if node.is_turn:
            return f"session {node.session_id}"
        return "a slot"
    if node.state is NodeState.RESUMING:
        return "a slot to go on"
    if node.state is NodeState.RETRYING:
        return f"attempt {node.attempt + 1}"
    if node.live_children and (node.waiting_on or node.state is NodeState.SETTLING):
        return _names(state, list(node.live_children))
    if node.waiting_on:
        return _names(state, list(node.waiting_on))
    if node.state is NodeState.CANCELLING and node.live_children:
        return _names(state, list(node.live_children)) + " to stop"
    if node.processes:
        return "process " + ", ".join(p.program for p in node.processes.values())
    if node.state is NodeState.CANCELLING:
        return "its body to stop"
    return ""


def _names(state: WorkspaceState, ids: list[str]) -> str:
    """Name one run, or count many."""
    if len(ids) == 1:
        node = state.nodes.get(ids[0])
        return (node.name or node.agent or ids[0]) if node is not None else ids[0]
    return f"{len(ids)} runs"


def tree_view(state: WorkspaceState, node: Node, now: float) -> TreeView:
    """Return a node with all below it, ended and detached ones included."""
    below: dict[str, list[Node]] = {}
    for other in state.nodes.values():
        if other.turn_id == node.turn_id and other.parent_id:
            below.setdefault(other.parent_id, []).append(other)
    ordered: list[Node] = []
    stack = [node]
    while stack:
        current = stack.pop()
        ordered.append(current)
        stack.extend(reversed(below.get(current.id, ())))
    views = tuple(node_view(state, other) for other in ordered)
    return TreeView(views[0], views, now)


def turn_views(state: WorkspaceState) -> tuple[NodeView, ...]:
    """Return all turns, oldest first."""
    return tuple(node_view(state, node) for node in state.turns.values())


def summarise_cancel(state: WorkspaceState, request_id: str) -> CancelSummary | None:
    """Return what a cancel has led to so far, or None if the request is not known."""
    cancel = state.cancels.get(request_id)
    roots = [state.nodes[name] for name in cancel.targets if name in state.nodes] if cancel is not None else []
    if cancel is None or not roots:
        return None
    everything = [n for root in roots for n in _attached(state, root)]
    nodes = [n for n in everything if not n.is_turn]
    turns = [root for root in roots if root.is_turn]
    counts: dict[str, int] = {}
    for node in nodes:
        if node.outcome is not None:
            counts[node.outcome.value] = counts.get(node.outcome.value, 0) + 1
    left = [f"{p.program} ({p.pid}) of {n.id}" for n in nodes for p in (n.processes or {}).values()]
    return CancelSummary(
        quiet=cancel.quiet_s is not None,
        seconds_to_quiet=cancel.quiet_s,
        runs=counts,
        processes_stopped=sum(n.processes_stopped for n in nodes),
        processes_left=tuple(left),
        effects_uncertain=sum(n.uncertain for n in [*nodes, *turns]),
        unconfirmed=tuple(n.id for n in [*turns, *nodes] if n.unconfirmed),
        remaining=sum(n.outcome is None for n in nodes),
        claims_freed=sum(n.claims_freed for n in everything),
        claims_quarantined=tuple(_quarantined(state, everything)),
        tokens=sum(root.tokens for root in roots),
        cost=sum(root.cost for root in roots),
        git_locks_removed=tuple(lock for n in everything for lock in n.git_locks_removed),
        git_locks_left=tuple(lock for n in everything for lock in n.git_locks_left),
    )


def _quarantined(state: WorkspaceState, nodes: Iterable[Node]) -> Iterable[str]:
    """Yield what is still kept of nodes that may go on writing: `write src/a.py of run_...`."""
    if state.locks.is_idle:
        return
    for node in nodes:
        for claim in state.locks.claims(node.id):
            if claim.state is ClaimState.QUARANTINED:
                yield f"{' and '.join(claim.wants)} of {node.id}"


def _attached(state: WorkspaceState, root: Node) -> Iterable[Node]:
    """Yield a node and its attached descendants, ended ones included."""
    inside = {root.id}
    # Parents are accepted before their children, so one pass in order is enough.
    for node in state.nodes.values():
        if node is root:
            yield node
        elif node.turn_id == root.turn_id and node.parent_id in inside and not node.detached:
            inside.add(node.id)
            yield node
