"""Whether a state is what its events say, and whether its counts are right."""

from __future__ import annotations

import json
from operator import attrgetter

from remit.coordinator.evolve import evolve
from remit.coordinator.state import Node, NodeState, Pool, WorkspaceState
from remit.coordinator.transaction import Settings
from remit.core.events import Event, decode_event, encode_event
from remit.locks import ClaimState
from remit.testing.simulation.history import History
from remit.testing.simulation.violation import require

__all__ = ["Shadow", "check_state"]

_NOT_FOLDED = {"parked", "state", "live_children", "dependents"}
"""Waiting rooms, and what is compared apart: see invariant 5 of `remit.coordinator.state`."""

_FOLDED = attrgetter(*(name for name in Node.__slots__ if name not in _NOT_FOLDED))
_PARTS = (
    *("epoch", "stopping", "used", "sessions", "hosts", "open_cancels", "awaited", "live_runs", "live_turns"),
    *("claim_deadlines", "drained", "fail_fast"),
)
_WHOLE = attrgetter(*_PARTS)

_RULE = "the fold equals the state"


def _stored(event: Event) -> Event:
    """Return an event as a journal gives it back."""
    data = json.loads(json.dumps(encode_event(event)))
    return decode_event(event.kind, event.node_id, event.turn_id, data)


class Shadow:
    """A second state that is only ever folded from events in their stored form.

    Args:
        events: those of earlier lives.
    """

    def __init__(self, events: list[Event]) -> None:
        self.state = WorkspaceState()
        for event in events:
            evolve(self.state, event)

    def add(self, event: Event) -> None:
        """Fold the next event."""
        evolve(self.state, _stored(event))

    def check(self, live: WorkspaceState, touched: set[str]) -> None:
        """Compare with the live state.

        Args:
            live: the decider's.
            touched: nodes that have changed and may have ended; all that live are looked at anyway.

        Raises:
            Violation: something differs.
        """
        folded = self.state
        if _WHOLE(live) != _WHOLE(folded):
            wrong = [name for name in _PARTS if getattr(live, name) != getattr(folded, name)]
            require(False, _RULE, f"{', '.join(wrong)} differ")
        if not (live.locks.is_idle and folded.locks.is_idle):
            require(live.locks.to_dict() == folded.locks.to_dict(), _RULE, "claims differ")
        for request_id, cancel in live.cancels.items():
            require(folded.cancels.get(request_id) == cancel, _RULE, f"cancel {request_id} differs")
        for name, conversation in live.conversations.items():
            if len(conversation.turns) == len(folded.conversations[name].turns):
                require(folded.conversations[name] == conversation, _RULE, f"session {name} differs")
        for name, record in folded.approvals.items():
            known = live.approvals.get(name, None if record.is_open else record)
            require(known == record, _RULE, f"approval {name} differs")
        for node in live.nodes.values():
            if node.state is not NodeState.ENDED or node.id in touched:
                self._check_node(node, folded.nodes[node.id])

    def _check_node(self, live: Node, folded: Node) -> None:
        if _FOLDED(live) != _FOLDED(folded):
            wrong = [n for n in Node.__slots__ if n not in _NOT_FOLDED and getattr(live, n) != getattr(folded, n)]
            require(False, _RULE, f"{live.id}: {', '.join(wrong)} differ")
        state = NodeState.WAITING if live.state is NodeState.RESUMING else live.state
        require(state is folded.state, _RULE, f"{live.id} is {live.state}, folded {folded.state}")
        same_children = (live.live_children or {}).keys() == (folded.live_children or {}).keys()
        require(same_children, _RULE, f"live children of {live.id} differ")


def check_state(state: WorkspaceState, history: History, settings: Settings) -> None:
    """Check slots, claims and hosts of a state.

    Raises:
        Violation: something is held that must not be.
    """
    _check_slots(state, history, settings)
    _check_hosts(state)
    if not state.locks.is_idle:
        _check_claims(state)


def _check_slots(state: WorkspaceState, history: History, settings: Settings) -> None:
    rule = "no slot is held by what is over"
    holding: dict[Pool, int] = dict.fromkeys(Pool, 0)
    below: dict[str, int] = {}
    for run_id in history.slots:
        node = state.nodes[run_id]
        require(node.holds_slot, rule, f"{run_id} should hold a slot and does not")
        holding[node.pool] += 1
        for ancestor in state.ancestors(node):
            below[ancestor.id] = below.get(ancestor.id, 0) + 1
    for pool in Pool:
        used, capacity = state.used[pool], settings.capacity(pool)
        require(used == holding[pool] <= capacity, rule, f"{used} {pool} slots used, {holding[pool]} held")
    for node in state.nodes.values():
        require(node.below_used == below.get(node.id, 0), rule, f"{node.id} counts {node.below_used} slots below")


def _check_hosts(state: WorkspaceState) -> None:
    for host in state.hosts.values():
        for run_id in host.runs:
            node = state.nodes.get(run_id)
            here = node is not None and node.on_host and node.host_id == host.id
            require(here, "no slot is held by what is over", f"{host.id} still counts {run_id}")


def _check_claims(state: WorkspaceState) -> None:
    rule = "no claim is held by what is over"
    for view in state.locks.claims():
        node = state.nodes.get(view.owner)
        require(node is not None, rule, f"{view.claim_id} of the forgotten {view.owner}")
        assert node is not None
        if view.state is not ClaimState.QUARANTINED:
            require(not node.is_ended, rule, f"{view.claim_id} is {view.state} after the end of {view.owner}")
        if view.state is ClaimState.QUEUED:
            require(node.cause is None, rule, f"{view.claim_id} waits although {view.owner} is cancelled")
            require(view.behind, rule, f"{view.claim_id} waits for nobody")
