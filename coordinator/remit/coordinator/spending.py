"""Budgets: what bodies spend counts for everything above them, and what is used up is stopped.

**Rules**

1. Bodies say what they have spent in all, never "so much more": a lost or repeated
   copy changes nothing.
2. Spending counts for the run, for every turn and run above it (detached or not)
   and for the session; also what a cancelled body spends while it stops, and what
   is heard of after its terminal event.
3. A budget that is used up cancels its own node, with all below it, with the cause
   `budget`; the topmost first, so that what is below carries that one's cause. A
   session's cancels its turns.
4. A session whose budget is used up takes no further turn.
"""

from __future__ import annotations

from remit.coordinator.state import Node
from remit.coordinator.stopping import cancel_node
from remit.coordinator.transaction import Transaction
from remit.core.cause import Cause, CauseKind
from remit.core.errors import BudgetExceeded, InvalidArgument
from remit.core.events import Spent
from remit.core.limits import is_amount
from remit.core.messages import OpenTurn, ReportSpend

__all__ = ["check_session_budget", "take_report", "take_total", "used_up"]

_SLACK = 1e-9
"""Share by which a sum of money may fall short: ten times 0.1 is a little less than 1."""


def take_report(tx: Transaction, host_id: str, item: ReportSpend) -> bool:
    """Take a host's word of what an attempt's body has spent; return whether it counted.

    A body that was given up on goes on spending, and that is money too: it counts
    after the terminal event as well, as long as no other attempt has begun.
    """
    node = tx.node(item.run_id)
    if node is None or node.attempt != item.attempt or node.host_id != host_id:
        return False
    if not is_amount(item.tokens) or not is_amount(item.cost):
        return False  # the rest of the batch must not suffer
    take_total(tx, node, item.tokens, item.cost)
    return True


def take_total(tx: Transaction, node: Node, tokens: int, cost: float) -> None:
    """Count what a body has spent in all, and stop what that uses up.

    Raises:
        InvalidArgument: an amount is negative or no number.
    """
    if not is_amount(tokens) or not is_amount(cost):
        raise InvalidArgument(f"{node.id} cannot have spent {tokens!r} tokens and {cost!r}: give finite numbers from 0")
    more_tokens, more_cost = max(0, tokens - node.own_tokens), max(0.0, cost - node.own_cost)
    if not more_tokens and not more_cost:
        return
    tx.emit(
        Spent(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            tokens=more_tokens,
            cost=more_cost,
            late=node.is_ended,
        )
    )
    _stop_what_is_used_up(tx, node)


def used_up(tokens: int, cost: float, max_tokens: int | None, max_cost: float | None) -> str:
    """Say which limit has been reached, or return the empty text."""
    if max_tokens is not None and tokens >= max_tokens:
        return f"{tokens} of {max_tokens} tokens are spent"
    if max_cost is not None and cost >= max_cost * (1 - _SLACK):
        return f"{cost:g} of {max_cost:g} is spent"
    return ""


def _stop_what_is_used_up(tx: Transaction, node: Node) -> None:
    _stop_session(tx, node)
    line = [node]
    while line[-1].parent_id:
        line.append(tx.state.nodes[line[-1].parent_id])
    for above in reversed(line):
        limits = above.limits
        if above.is_ended or above.cause is not None or limits is None:
            continue
        reason = used_up(above.tokens, above.cost, limits.tokens, limits.cost)
        if reason:
            cancel_node(tx, above, _cause(tx, above, f"its budget is used up: {reason}"))


def _stop_session(tx: Transaction, node: Node) -> None:
    conversation = tx.state.conversations.get(node.session_id)
    session = tx.state.sessions.get(node.session_id)
    if conversation is None or session is None:
        return
    reason = used_up(conversation.tokens, conversation.cost, conversation.max_tokens, conversation.max_cost)
    if not reason:
        return
    # The queue first: the end of the active turn must start nothing.
    for name in [*session.queue, session.active]:
        turn = tx.state.nodes.get(name)
        if turn is not None and not turn.is_ended and turn.cause is None:
            cancel_node(tx, turn, _cause(tx, turn, f"the budget of session {conversation.id!r} is used up: {reason}"))


def _cause(tx: Transaction, node: Node, reason: str) -> Cause:
    return Cause(
        CauseKind.BUDGET,
        origin=node.id,
        actor="coordinator",
        surface="coordinator",
        at_unix_ms=int(tx.now * 1000),
        reason=reason,
    )


def check_session_budget(tx: Transaction, request: OpenTurn) -> None:
    """Refuse a turn of a session that has nothing left to spend.

    Raises:
        BudgetExceeded: by the limits that the session has, or that this turn would give it.
    """
    conversation = tx.state.conversations.get(request.session_id)
    if conversation is None:
        return
    given = request.session_limits
    max_tokens = given.tokens if given is not None and given.tokens is not None else conversation.max_tokens
    max_cost = given.cost if given is not None and given.cost is not None else conversation.max_cost
    reason = used_up(conversation.tokens, conversation.cost, max_tokens, max_cost)
    if reason:
        raise BudgetExceeded(
            f"session {request.session_id!r} has nothing left to spend ({reason}); "
            "give it a larger budget with session_limits, or begin another session",
            session_id=request.session_id,
        )
