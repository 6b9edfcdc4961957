"""Approvals: who may ask, who has answered, and what ends the asking.

**Rules**

1. A request belongs to one attempt of one run (or to a turn). With that attempt,
   or with a cancel of anything above it, it is over: `cancelled`, in the same step.
2. The first answer stands, whoever gives it: a person, a policy, the timer, a
   cancel. The same request sent again hears the same; any other is refused.
3. Policies are looked at when it is asked. What they leave to people waits, visibly,
   without a slot, over restarts of the coordinator.
4. Nothing is approved by an error (see `remit.core.approvals`).
"""

from __future__ import annotations

from collections.abc import Iterable

from remit.coordinator.state import Node
from remit.coordinator.transaction import Transaction
from remit.core.approvals import verdict
from remit.core.errors import ApprovalSettled, NotFound, Refused, TurnCancelled
from remit.core.events import ApprovalAnswered, ApprovalRequested
from remit.core.messages import AnswerApproval, ApprovalNotice, AskApproval, WithdrawApproval
from remit.core.records import ApprovalRecord

__all__ = [
    "answer_approval",
    "arm_approvals",
    "ask_approval",
    "cancel_approvals",
    "check_may_act",
    "end_approvals",
    "expire_approval",
    "withdraw_approval",
]


def ask_approval(tx: Transaction, request: AskApproval) -> ApprovalRecord:
    """Take on a request for approval, and answer it at once where a policy does; asked twice, it is asked once.

    Raises:
        NotFound: no such turn or run.
        TurnCancelled: it is being cancelled; nothing was asked.
        Refused: it has ended, or the request is of an earlier attempt.
    """
    node = tx.node(request.node_id)
    if node is None:
        raise NotFound(f"no turn or run {request.node_id!r} in this workspace; it cannot ask for approval")
    known = tx.state.approvals.get(request.approval_id)
    if known is not None:
        return known
    check_may_act(node, request.attempt, "ask for approval")
    tx.emit(
        ApprovalRequested(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            approval_id=request.approval_id,
            attempt=node.attempt,
            action=request.action,
            details=request.details,
            path=tuple(_label(above) for above in _line(tx, node)),
            expires_at=None if request.timeout_s is None else tx.now + request.timeout_s,
        )
    )
    policies = [(above.id, above.approvals) for above in _line(tx, node) if above.approvals]
    said = verdict(policies, request.action)
    if said.word != "ask":
        decision = "approved" if said.word == "approve" else "denied"
        _answer(tx, request.approval_id, decision, by="policy", surface="policy", reason=said.reason)
    elif request.timeout_s is not None:
        tx.timers.add(tx.now + request.timeout_s, "approval", request.approval_id)
    return tx.state.approvals[request.approval_id]


def check_may_act(node: Node, attempt: int, verb: str) -> None:
    """Refuse what no living body of this turn or attempt can have asked for.

    Raises:
        TurnCancelled: it is being cancelled.
        Refused: it has ended, or another attempt runs now.
    """
    if node.cause is not None:
        raise TurnCancelled(node.cause, node_id=node.id)
    if node.is_ended or node.report:
        raise Refused(f"{node.id} has ended and cannot {verb} any more")
    if node.is_turn:
        if node.started_at is None:
            raise Refused(f"{node.id} has not started and cannot {verb} yet")
        return
    if attempt != node.attempt or not node.on_host or node.expired_attempt == attempt:
        raise Refused(f"attempt {attempt} of {node.id} is over and cannot {verb} any more")


def _line(tx: Transaction, node: Node) -> list[Node]:
    """Return a node and all above it, the turn first; a detached run stays in the line of who let it go."""
    line = [node]
    while line[-1].parent_id:
        line.append(tx.state.nodes[line[-1].parent_id])
    line.reverse()
    return line


def _label(node: Node) -> str:
    return node.name or node.agent or node.id


def answer_approval(tx: Transaction, request: AnswerApproval) -> ApprovalRecord:
    """Take an answer; only the first one counts.

    Raises:
        NotFound: no such approval, or it belongs to another user.
        ApprovalSettled: it was answered, expired or cancelled before; nothing has changed.
    """
    record = tx.state.approvals.get(request.approval_id)
    if record is None or (request.user and record.user and request.user != record.user):
        raise NotFound(f"no approval {request.approval_id!r} in this workspace; `remit approvals` lists them")
    if not record.is_open:
        if record.request_id == request.request_id:
            return record
        raise ApprovalSettled(_too_late(record), approval_id=record.id, decision=record.decision)
    return _answer(
        tx,
        record.id,
        "approved" if request.approve else "denied",
        by=request.by,
        surface=request.surface,
        reason=request.reason,
        request_id=request.request_id,
    )


def _too_late(record: ApprovalRecord) -> str:
    by = f" by {record.by}" if record.by else ""
    because = f" ({record.reason})" if record.reason else ""
    return f"{record.id} is not open any more: it was {record.decision}{by}{because}; nothing was changed"


def _answer(tx: Transaction, approval_id: str, decision: str, **said: str) -> ApprovalRecord:
    """Write the one answer of an approval and tell whoever waits for it."""
    record = tx.state.approvals[approval_id]
    node = tx.state.nodes[record.node_id]
    cause = node.cause if decision == "cancelled" else None
    tx.emit(
        ApprovalAnswered(
            node_id=record.node_id,
            turn_id=record.turn_id,
            at=tx.now,
            approval_id=approval_id,
            decision=decision,
            cause=cause,
            **said,
        )
    )
    record = tx.state.approvals[approval_id]
    # What is cancelled without a cause has nobody left that waits for it.
    if decision != "cancelled" or cause is not None:
        tx.effects.approvals.append((record.node_id, ApprovalNotice(approval_id, record)))
    return record


def withdraw_approval(tx: Transaction, request: WithdrawApproval) -> None:
    """Close a request that nobody waits for any more."""
    record = tx.state.approvals.get(request.approval_id)
    if record is not None and record.is_open and record.node_id == request.node_id:
        _answer(tx, record.id, "cancelled", by=record.node_id, reason="whoever asked does not wait any more")


def cancel_approvals(tx: Transaction, nodes: Iterable[Node]) -> None:
    """Close what these nodes ask for: a cancel has reached them."""
    for node in nodes:
        if node.asking:
            cause = node.cause
            _close(tx, node, "its turn or run was cancelled" if cause is None else cause.describe())


def end_approvals(tx: Transaction, node: Node) -> None:
    """Close what a node asks for that has ended, or whose attempt has."""
    if node.asking:
        _close(tx, node, "its attempt is over")


def _close(tx: Transaction, node: Node, reason: str) -> None:
    for approval_id in list(node.asking or ()):
        _answer(tx, approval_id, "cancelled", by="coordinator", surface="coordinator", reason=reason)


def expire_approval(tx: Transaction, approval_id: str) -> None:
    """Close a request whose own time is over and that nobody has answered."""
    record = tx.state.approvals.get(approval_id)
    if record is None or not record.is_open or record.expires_at is None:
        return
    waited_s = record.expires_at - record.asked_at
    reason = f"nobody answered within {waited_s:g} s"
    _answer(tx, approval_id, "expired", by="coordinator", surface="coordinator", reason=reason)


def arm_approvals(tx: Transaction) -> None:
    """Set the timers of open requests again, after a restart."""
    for record in tx.state.approvals.values():
        if record.is_open and record.expires_at is not None:
            tx.timers.add(record.expires_at, "approval", record.id)
