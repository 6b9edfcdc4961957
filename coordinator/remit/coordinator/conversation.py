"""What is kept of sessions, their turns and approvals: data and the events that change it.

The handlers here belong to `evolve`: no decisions, no clock, no I/O.

**Invariants**

1. A session that was named by its caller, or that has a budget, is remembered for
   good; of its turns the latest `KEPT_TURNS` are, and of those that are pruned
   `KEPT_PRUNED`. What was named by nobody goes with its turns.
2. An open approval is in `approvals` and in its node's `asking`; an answered one is
   in `approvals` and `answered` until `KEPT_ANSWERS` newer ones are.
3. Spending of a node is in its own totals, in those of everything above it
   (detached or not), in its turn's record and in its session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from remit.core.events import (
    ApprovalAnswered,
    ApprovalRequested,
    CancelRequested,
    EffectEnded,
    EffectStarted,
    Event,
    RunEnded,
    Spent,
    TurnAccepted,
    TurnEnded,
)
from remit.core.records import ApprovalRecord, TurnRecord, UnfinishedRun

if TYPE_CHECKING:
    from remit.coordinator.state import Node, WorkspaceState

__all__ = [
    "HANDLERS",
    "Conversation",
    "forget_turns",
    "note_cancel",
    "note_progress",
    "note_turn_accepted",
    "note_turn_ended",
    "note_turn_started",
    "note_unfinished",
]

KEPT_TURNS = 100
"""Turns of one session that its history shows."""
KEPT_PRUNED = 10
"""Turns that a session keeps in memory once they are pruned; the journal has the others."""
KEPT_ANSWERS = 1_000
"""Answered approvals kept in memory, so that a late answer hears what was decided."""
_SHOWN = 20
"""Names that a record of a turn holds at most."""


@dataclass(slots=True)
class Conversation:
    """One session over all its turns."""

    id: str
    first_at: float
    last_at: float
    count: int = 0
    """Turns that it has ever had."""
    turns: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])
    """The latest ones, oldest first."""
    tokens: int = 0
    cost: float = 0.0
    max_tokens: int | None = None
    max_cost: float | None = None

    @property
    def is_nameless(self) -> bool:
        """Tell whether nobody can come back to it: its id was made for one turn."""
        made = self.id.startswith("session_") and len(self.id) == len("session_") + 20
        return made and self.count == 1 and self.max_tokens is None and self.max_cost is None


# -- turns -----------------------------------------------------------------------------


def _change(state: WorkspaceState, turn: Node, **changes: Any) -> None:
    conversation = state.conversations.get(turn.session_id)
    if conversation is not None and turn.id in conversation.turns:
        conversation.turns[turn.id] = replace(conversation.turns[turn.id], **changes)


def note_turn_accepted(state: WorkspaceState, event: TurnAccepted) -> None:
    """Add a turn to its session."""
    conversation = state.conversations.get(event.session_id)
    if conversation is None:
        conversation = Conversation(event.session_id, event.at, event.at)
        state.conversations[event.session_id] = conversation
    conversation.last_at = event.at
    conversation.count += 1
    if event.session_tokens is not None:
        conversation.max_tokens = event.session_tokens
    if event.session_cost is not None:
        conversation.max_cost = event.session_cost
    conversation.turns[event.node_id] = TurnRecord(event.node_id, event.name, event.at)
    ended = [name for name, turn in conversation.turns.items() if turn.outcome is not None]
    for name in ended[: len(conversation.turns) - KEPT_TURNS]:
        del conversation.turns[name]


def note_turn_started(state: WorkspaceState, turn: Node, at: float) -> None:
    """Note that a turn became the active one."""
    _change(state, turn, started_at=at)


def note_progress(state: WorkspaceState, turn: Node, preview: str) -> None:
    """Note what a turn's body has so far."""
    _change(state, turn, progress=preview)


def note_cancel(state: WorkspaceState, turn: Node, event: CancelRequested) -> None:
    """Note where a turn was when its cancel was accepted; called before anything is marked."""
    if turn.cause is None:
        _change(state, turn, cause=event.cause, **_steps(state, turn))


def _steps(state: WorkspaceState, turn: Node) -> dict[str, Any]:
    live = list(turn.live_children or ())
    begun = [state.nodes[name] for name in live if state.nodes[name].started_at is not None]
    names = tuple(node.name or node.agent or node.id for node in begun[:_SHOWN])
    return {"steps": turn.child_count, "steps_done": turn.child_count - len(live), "at_work": names}


def note_unfinished(state: WorkspaceState, turn: Node, run: Node, event: RunEnded) -> None:
    """Note a run of the turn itself that did not succeed."""
    if turn.bad_children > _SHOWN:
        return  # by the thousand when a wide turn is cancelled; its end tells the count
    conversation = state.conversations.get(turn.session_id)
    record = None if conversation is None else conversation.turns.get(turn.id)
    if conversation is None or record is None:
        return
    reason = event.error or ("" if event.cause is None else event.cause.describe())
    listed = (*record.unfinished, UnfinishedRun(run.name or run.agent or run.id, event.outcome, reason[:200]))
    conversation.turns[turn.id] = replace(record, unfinished=listed, unfinished_count=turn.bad_children)


def note_turn_ended(state: WorkspaceState, turn: Node, event: TurnEnded) -> None:
    """Note how a turn ended; the steps are those of its cancel, if it had one."""
    changes: dict[str, Any] = {
        "ended_at": event.at,
        "outcome": event.outcome,
        "cause": event.cause,
        "unconfirmed": event.unconfirmed,
        "unfinished_count": turn.bad_children,
    }
    if event.cause is None:
        changes.update(steps=turn.child_count, steps_done=turn.child_count, at_work=())
    _change(state, turn, **changes)


def forget_turns(state: WorkspaceState, gone: list[str]) -> None:
    """Forget approvals of pruned nodes, and sessions that were named by nobody and have none left."""
    doomed = set(gone)
    for name in [name for name, record in state.approvals.items() if record.node_id in doomed]:
        del state.approvals[name]
        state.answered.pop(name, None)
    for name, conversation in list(state.conversations.items()):
        if conversation.is_nameless and all(turn in doomed for turn in conversation.turns):
            del state.conversations[name]
            continue
        pruned = [turn for turn in conversation.turns if turn not in state.nodes]
        for turn in pruned[:-KEPT_PRUNED]:
            del conversation.turns[turn]


# -- approvals -------------------------------------------------------------------------


def _approval_requested(state: WorkspaceState, event: ApprovalRequested) -> None:
    node = state.nodes[event.node_id]
    state.approvals[event.approval_id] = ApprovalRecord(
        id=event.approval_id,
        node_id=node.id,
        turn_id=node.turn_id,
        session_id=node.session_id,
        user=node.user,
        attempt=event.attempt,
        action=event.action,
        details=event.details,
        path=event.path,
        asked_at=event.at,
        expires_at=event.expires_at,
    )
    if node.asking is None:
        node.asking = {}
    node.asking[event.approval_id] = None


def _approval_answered(state: WorkspaceState, event: ApprovalAnswered) -> None:
    state.approvals[event.approval_id] = replace(
        state.approvals[event.approval_id],
        decision=event.decision,
        by=event.by,
        surface=event.surface,
        reason=event.reason,
        answered_at=event.at,
        request_id=event.request_id,
        cause=event.cause,
    )
    node = state.nodes[event.node_id]
    if node.asking is not None:
        node.asking.pop(event.approval_id, None)
        if not node.asking:
            node.asking = None
    state.answered[event.approval_id] = None
    while len(state.answered) > KEPT_ANSWERS:
        oldest = next(iter(state.answered))
        del state.answered[oldest]
        state.approvals.pop(oldest, None)


# -- spending and effects --------------------------------------------------------------


def _spent(state: WorkspaceState, event: Spent) -> None:
    node = state.nodes[event.node_id]
    node.own_tokens += event.tokens
    node.own_cost += event.cost
    above: Node | None = node
    while above is not None:
        above.tokens += event.tokens
        above.cost += event.cost
        if above.is_turn:
            _change(state, above, tokens=above.tokens, cost=above.cost)
        above = state.nodes.get(above.parent_id)
    conversation = state.conversations.get(node.session_id)
    if conversation is not None:
        conversation.tokens += event.tokens
        conversation.cost += event.cost


def _effect_started(state: WorkspaceState, event: EffectStarted) -> None:
    node = state.nodes[event.node_id]
    if node.effects is None:
        node.effects = {}
    node.effects[event.effect_id] = event.what


def _effect_ended(state: WorkspaceState, event: EffectEnded) -> None:
    node = state.nodes[event.node_id]
    if node.effects is not None:
        node.effects.pop(event.effect_id, None)
        if not node.effects:
            node.effects = None


HANDLERS: dict[type[Event], Callable[[WorkspaceState, Any], None]] = {
    ApprovalAnswered: _approval_answered,
    ApprovalRequested: _approval_requested,
    EffectEnded: _effect_ended,
    EffectStarted: _effect_started,
    Spent: _spent,
}
"""For `evolve`."""
