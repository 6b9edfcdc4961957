"""The world around the decider, with approvals, spending and effects: bodies and people act by hand."""

from __future__ import annotations

from typing import Any, cast

from remit.coordinator.approving import answer_approval, ask_approval, withdraw_approval
from remit.coordinator.decider import Decision
from remit.coordinator.noting import note_effect, note_partial
from remit.coordinator.spending import take_total
from remit.core.messages import (
    AnswerApproval,
    ApprovalNotice,
    AskApproval,
    NoteEffect,
    NotePartial,
    ReportSpend,
    WithdrawApproval,
)
from remit.core.records import ApprovalRecord, TurnRecord
from tests.coordinator.decider_world import World


class ConversationWorld(World):
    """A world that remembers notices about approvals, and checks that none is held by what is over."""

    def __init__(self, **options: Any) -> None:
        self.told: list[tuple[str, ApprovalNotice]] = []
        super().__init__(**options)

    def _take(self, decision: Decision) -> Decision:
        self.told.extend(decision.effects.approvals)
        return super()._take(decision)

    def check_now(self) -> None:
        """Check the fold, and whose approvals are open."""
        super().check_now()
        open_ones = {name: record for name, record in self.state.approvals.items() if record.is_open}
        asked = {name for node in self.state.nodes.values() for name in node.asking or ()}
        assert asked == set(open_ones)
        for record in open_ones.values():
            node = self.node(record.node_id)
            assert not node.is_ended, f"{record} is open after the end of its node"
            assert node.cause is None, f"{record} is open although its node is cancelled"
            assert record.attempt == node.attempt, f"{record} is open for an attempt that is over"
        for conversation in self.state.conversations.values():
            spent = sum(turn.tokens for turn in conversation.turns.values())
            assert spent == conversation.tokens or conversation.count > len(conversation.turns)

    def ask(self, node_id: str, action: str = "deploy", *, approval_id: str = "", **options: Any) -> Decision:
        """Let a body ask for approval."""
        attempt = options.pop("attempt", self.node(node_id).attempt)
        name = approval_id or f"approval_{next(self._numbers)}"
        request = AskApproval(name, node_id, attempt, action, **options)
        return self._take(self.decider.decide(lambda tx: ask_approval(tx, request), self.now))

    def asked(self, node_id: str, action: str = "deploy", **options: Any) -> ApprovalRecord:
        """Let a body ask for approval, which must be taken on."""
        decision = self.ask(node_id, action, **options)
        assert decision.error is None, decision.error
        return cast("ApprovalRecord", decision.value)

    def answer(self, approval_id: str, *, approve: bool = True, **options: Any) -> Decision:
        """Let somebody answer."""
        options.setdefault("request_id", f"req_{next(self._numbers)}")
        request = AnswerApproval(approval_id=approval_id, approve=approve, **options)
        return self._take(self.decider.decide(lambda tx: answer_approval(tx, request), self.now))

    def withdraw(self, approval_id: str, node_id: str) -> Decision:
        """Let a body wait no more."""
        request = WithdrawApproval(approval_id, node_id)
        return self._take(self.decider.decide(lambda tx: withdraw_approval(tx, request), self.now))

    def approval(self, approval_id: str) -> ApprovalRecord:
        """Return an approval as it stands."""
        return self.state.approvals[approval_id]

    def spend(self, node_id: str, tokens: int = 0, cost: float = 0.0, **options: Any) -> Decision:
        """Let a body say what it has spent in all."""
        node = self.node(node_id)
        if node.is_turn:
            return self._take(self.decider.decide(lambda tx: take_total(tx, node, tokens, cost), self.now))
        attempt = options.pop("attempt", node.attempt)
        host_id = options.pop("host_id", node.host_id)
        return self.report(host_id, ReportSpend(node_id, attempt, tokens, cost))

    def partial(self, turn_id: str, preview: str) -> Decision:
        """Let a turn hand over what it has."""
        request = NotePartial(turn_id, preview, preview.encode())
        return self._take(self.decider.decide(lambda tx: note_partial(tx, request), self.now))

    def effect(self, node_id: str, what: str = "POST /deploy", *, ended: bool = False, effect_id: str = "") -> Decision:
        """Let a body begin an effect, or say that its end is known."""
        request = NoteEffect(node_id, self.node(node_id).attempt, effect_id or f"effect_{what}", what, ended)
        return self._take(self.decider.decide(lambda tx: note_effect(tx, request), self.now))

    def history(self, session: str = "s1") -> list[TurnRecord]:
        """Return the turns of a session, oldest first."""
        return list(self.state.conversations[session].turns.values())
