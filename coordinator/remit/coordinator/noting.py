"""What bodies tell of themselves besides their end: partial results of turns, effects, failures of siblings.

**Rules**

1. A partial result of a turn is kept until its terminal event, and with it if the
   turn did not succeed.
2. An effect is journalled before it is begun. One that is still open when its body
   has ended is uncertain: it may have happened or not, and nobody guesses.
3. Of a turn with `on_failure="stop"` the first run that does not succeed cancels the
   others, in the step that ends it, so that nothing of the turn starts in between.
"""

from __future__ import annotations

from remit.coordinator.approving import check_may_act
from remit.coordinator.state import Node
from remit.coordinator.stopping import cancel_children
from remit.coordinator.transaction import Transaction
from remit.core.cause import CauseKind
from remit.core.errors import NotFound
from remit.core.events import EffectEnded, EffectStarted, RunProgressed
from remit.core.messages import NoteEffect, NotePartial
from remit.core.outcome import Outcome

__all__ = ["note_effect", "note_partial", "stop_after_failures"]


def note_partial(tx: Transaction, request: NotePartial) -> None:
    """Keep what a turn's body has so far; too late, it is refused and counted."""
    turn = tx.state.turns.get(request.turn_id)
    if turn is None or turn.is_ended or turn.report:
        tx.state.refused += 1
        return
    tx.payloads[turn.id] = request.payload
    event = RunProgressed(node_id=turn.id, turn_id=turn.id, at=tx.now, preview=request.preview)
    tx.emit(event, request.payload)


def note_effect(tx: Transaction, request: NoteEffect) -> None:
    """Note that an effect is about to begin, or that its end is known; each is noted once.

    Raises:
        NotFound: no such turn or run.
        TurnCancelled: it is being cancelled; the effect must not begin.
        Refused: it has ended, or the request is of an earlier attempt.
    """
    node = tx.node(request.node_id)
    if node is None:
        raise NotFound(f"no turn or run {request.node_id!r} in this workspace; it cannot begin an effect")
    known = request.effect_id in (node.effects or {})
    if request.ended:
        if known and not node.is_ended:
            tx.emit(EffectEnded(node_id=node.id, turn_id=node.turn_id, at=tx.now, effect_id=request.effect_id))
        return
    if known:
        return
    check_may_act(node, request.attempt, "begin an effect")
    tx.emit(
        EffectStarted(node_id=node.id, turn_id=node.turn_id, at=tx.now, effect_id=request.effect_id, what=request.what)
    )


def stop_after_failures(tx: Transaction) -> None:
    """Cancel what runs beside a run that did not succeed, where its turn wants that."""
    index = 0
    # A cancel may end further ones, which are looked at in their turn.
    while index < len(tx.effects.ended):
        node = tx.state.nodes.get(tx.effects.ended[index])
        index += 1
        if node is None or node.is_turn or node.detached or node.outcome is Outcome.SUCCEEDED:
            continue
        turn = tx.state.nodes[node.parent_id]
        if turn.id in tx.state.fail_fast and turn.cause is None and turn.live_children:
            cancel_children(tx, turn, CauseKind.PARENT_FAILED, _did_not_succeed(node))


def _did_not_succeed(node: Node) -> str:
    return f"{node.name or node.agent or node.id} did not succeed"
