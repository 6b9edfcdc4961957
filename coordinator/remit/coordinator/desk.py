"""Requests about approvals, budgets, effects, waits and sessions: passed to their rules, answered from the state.

A part of the service without a life of its own: it belongs to the coordinator's
event loop and answers when what was decided is on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from remit.coordinator.approving import answer_approval, ask_approval, withdraw_approval
from remit.coordinator.conversation import Conversation
from remit.coordinator.decider import Decider, Decision
from remit.coordinator.noting import note_effect, note_partial
from remit.coordinator.spending import take_total
from remit.coordinator.state import WorkspaceState
from remit.coordinator.transaction import Transaction
from remit.coordinator.waiting import note_wait
from remit.core.clock import Clock
from remit.core.errors import NotFound
from remit.core.messages import (
    AnswerApproval,
    ApprovalNotice,
    AskApproval,
    NoteEffect,
    NotePartial,
    NoteSpend,
    NoteWait,
    WithdrawApproval,
)
from remit.core.records import ApprovalRecord, SessionView, TurnRecord

__all__ = ["Desk", "approval_notice", "history_of", "session_views"]


class Desk:
    """The methods of the service for what this module is about.

    Args:
        decider: whose rules decide.
        clock: coordinator time.
        commit: journals a decision; what it returns resolves once that is on the disk.
    """

    def __init__(self, decider: Decider, clock: Clock, commit: Callable[[Decision], asyncio.Future[Any]]) -> None:
        self._decider = decider
        self._clock = clock
        self._commit = commit

    def methods(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the methods by the names that requests have."""
        return {
            "ask_approval": self._ask,
            "answer_approval": self._answer,
            "withdraw_approval": self._withdraw,
            "approvals": self._approvals,
            "note_spend": self._spend,
            "note_partial": self._partial,
            "note_effect": self._effect,
            "note_wait": self._wait,
            "sessions": self._sessions,
            "history": self._history,
        }

    async def _decide(self, rule: Callable[[Transaction], object]) -> Any:
        decision = self._decider.decide(rule, self._clock.now())
        await self._commit(decision)
        return decision.value

    async def _ask(self, request: AskApproval) -> ApprovalRecord:
        record: ApprovalRecord = await self._decide(lambda tx: ask_approval(tx, request))
        return record

    async def _answer(self, request: AnswerApproval) -> ApprovalRecord:
        record: ApprovalRecord = await self._decide(lambda tx: answer_approval(tx, request))
        return record

    async def _withdraw(self, request: WithdrawApproval) -> None:
        await self._decide(lambda tx: withdraw_approval(tx, request))

    async def _approvals(self, everything: bool) -> tuple[ApprovalRecord, ...]:
        records = self._decider.state.approvals.values()
        return tuple(record for record in records if everything or record.is_open)

    async def _spend(self, request: NoteSpend) -> None:
        def rule(tx: Transaction) -> None:
            turn = tx.state.turns.get(request.turn_id)
            if turn is not None:
                take_total(tx, turn, request.tokens, request.cost)

        await self._decide(rule)

    async def _partial(self, request: NotePartial) -> None:
        await self._decide(lambda tx: note_partial(tx, request))

    async def _effect(self, request: NoteEffect) -> None:
        await self._decide(lambda tx: note_effect(tx, request))

    async def _wait(self, request: NoteWait) -> None:
        await self._decide(lambda tx: note_wait(tx, request))

    async def _sessions(self, _: None) -> tuple[SessionView, ...]:
        return session_views(self._decider.state)

    async def _history(self, session_id: str) -> tuple[TurnRecord, ...]:
        return history_of(self._decider.state, session_id)


def approval_notice(state: WorkspaceState, approval_id: str) -> ApprovalNotice | None:
    """Return what whoever waits for an approval may have missed, or None while it is open.

    Raises:
        NotFound: no such approval.
    """
    record = state.approvals.get(approval_id)
    if record is None:
        raise NotFound(f"no approval {approval_id!r} in this workspace")
    return None if record.is_open else ApprovalNotice(approval_id, record)


def session_views(state: WorkspaceState) -> tuple[SessionView, ...]:
    """Return all sessions, the one with the latest turn last."""
    ordered = sorted(state.conversations.values(), key=lambda conversation: conversation.last_at)
    return tuple(_session_view(state, conversation) for conversation in ordered)


def _session_view(state: WorkspaceState, conversation: Conversation) -> SessionView:
    session = state.sessions.get(conversation.id)
    return SessionView(
        id=conversation.id,
        turns=conversation.count,
        active="" if session is None else session.active,
        queued=() if session is None else tuple(session.queue),
        last=next(reversed(conversation.turns.values()), None),
        tokens=conversation.tokens,
        cost=conversation.cost,
        max_tokens=conversation.max_tokens,
        max_cost=conversation.max_cost,
        first_at=conversation.first_at,
        last_at=conversation.last_at,
    )


def history_of(state: WorkspaceState, session_id: str) -> tuple[TurnRecord, ...]:
    """Return the turns of a session, oldest first, the latest hundred of them.

    Raises:
        NotFound: no such session.
    """
    conversation = state.conversations.get(session_id)
    if conversation is None:
        raise NotFound(f"no session {session_id!r} in this workspace; `remit sessions` lists them")
    return tuple(conversation.turns.values())
