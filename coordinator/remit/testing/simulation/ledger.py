"""Books about approvals, budgets, sessions and turns that stop after a failure, from the events alone.

As in `history`: nothing here asks the state that the decider keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from remit.core.cause import CauseKind
from remit.core.events import (
    ApprovalAnswered,
    ApprovalRequested,
    AttemptEnded,
    CancelRequested,
    Event,
    RunAccepted,
    RunEnded,
    Spent,
    TurnAccepted,
    TurnEnded,
    TurnStarted,
)
from remit.core.outcome import Outcome
from remit.testing.simulation.history import History
from remit.testing.simulation.violation import require

__all__ = ["Ledger"]

_APPROVALS = "no approval is open of what is over"
_BUDGETS = "a budget stops its own node"
_SESSIONS = "turns of a session take turns"
_FAILURES = "a failure stops its siblings"


@dataclass(slots=True)
class _Account:
    """What a node may spend and has spent, with all below it."""

    above: str
    session: str
    limit: int | None
    spent: int = 0


class Ledger:
    """The books of one journal.

    Args:
        events: those of earlier lives.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.history = History()
        """Which nodes are cancelled and over."""
        self.decisions: dict[str, str] = {}
        """Approval -> its answer."""
        self._asked: dict[str, str] = {}
        """Open approval -> who asks."""
        self._accounts: dict[str, _Account] = {}
        self._sessions: dict[str, _Account] = {}
        self._active: dict[str, str] = {}
        self._queues: dict[str, list[str]] = defaultdict(list)
        self._stop_after: set[str] = set()
        self._siblings: dict[str, set[str]] = defaultdict(set)
        self._doomed: dict[str, str] = {}
        """Run that must be cancelled or over when the decision is -> the failure that stops it."""
        for event in events:
            self.add(event)
        self._doomed.clear()

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            Violation: it may not follow what there was.
        """
        self.history.add(event)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def decided(self) -> None:
        """Look at the books when a decision is complete.

        Raises:
            Violation: something that the decision should have stopped goes on.
        """
        over = self._is_over
        for approval_id, owner in self._asked.items():
            require(not over(owner), _APPROVALS, f"{approval_id} is open and {owner} is cancelled or over")
        for name, account in self._accounts.items():
            used_up = account.limit is not None and account.spent >= account.limit
            require(not used_up or over(name), _BUDGETS, f"{name} goes on with {account.spent} of {account.limit}")
            session = self._sessions.get(account.session)
            if session is not None and session.limit is not None and not account.above and not over(name):
                require(session.spent < session.limit, _BUDGETS, f"{name} goes on in {account.session}")
        for name, failed in self._doomed.items():
            require(over(name), _FAILURES, f"{name} goes on after the end of {failed}")
        self._doomed.clear()

    def _is_over(self, name: str) -> bool:
        return name in self.history.ends or name in self.history.causes

    # -- turns and runs ------------------------------------------------------------

    def _turn_accepted(self, event: TurnAccepted) -> None:
        self._accounts[event.node_id] = _Account("", event.session_id, event.max_tokens)
        session = self._sessions.setdefault(event.session_id, _Account("", "", None))
        if event.session_tokens is not None:
            session.limit = event.session_tokens
        self._queues[event.session_id].append(event.node_id)
        if event.on_failure == "stop":
            self._stop_after.add(event.node_id)

    def _turn_started(self, event: TurnStarted) -> None:
        session = self._accounts[event.node_id].session
        active = self._active.get(session)
        require(active is None, _SESSIONS, f"{event.node_id} started while {active} is active")
        queue = self._queues[session]
        require(queue[:1] == [event.node_id], _SESSIONS, f"{event.node_id} started out of its order in {session!r}")
        queue.pop(0)
        self._active[session] = event.node_id

    def _turn_ended(self, event: TurnEnded) -> None:
        session = self._accounts[event.node_id].session
        if self._active.get(session) == event.node_id:
            del self._active[session]
        elif event.node_id in self._queues[session]:
            self._queues[session].remove(event.node_id)

    def _run_accepted(self, event: RunAccepted) -> None:
        session = self._accounts[event.turn_id].session
        self._accounts[event.node_id] = _Account(event.parent_id, session, event.max_tokens)
        if not event.detached and event.parent_id in self._stop_after:
            self._siblings[event.parent_id].add(event.node_id)

    def _run_ended(self, event: RunEnded) -> None:
        turn = self._accounts[event.node_id].above
        siblings = self._siblings.get(turn)
        if siblings is None or event.node_id not in siblings:
            return
        siblings.discard(event.node_id)
        if event.outcome is not Outcome.SUCCEEDED:
            self._doomed.update(dict.fromkeys(siblings, event.node_id))

    # -- budgets -------------------------------------------------------------------

    def _spent(self, event: Spent) -> None:
        name = event.node_id
        self._sessions[self._accounts[name].session].spent += event.tokens
        while name:
            account = self._accounts[name]
            account.spent += event.tokens
            name = account.above

    def _cancel_requested(self, event: CancelRequested) -> None:
        cause = event.cause
        if cause is None or cause.kind is not CauseKind.BUDGET or cause.actor != "coordinator":
            return
        if cause.origin != event.node_id:
            return  # a further request for what the budget of something above has stopped
        account = self._accounts[event.node_id]
        session = self._sessions[account.session]
        own = account.limit is not None and account.spent >= account.limit
        whole = not account.above and session.limit is not None and session.spent >= session.limit
        require(own or whole, _BUDGETS, f"{event.node_id} is stopped with {account.spent} of {account.limit} spent")

    # -- approvals -----------------------------------------------------------------

    def _asked_for(self, event: ApprovalRequested) -> None:
        name = event.approval_id
        require(
            name not in self._asked and name not in self.decisions, "the first answer stands", f"{name} asked twice"
        )
        require(not self._is_over(event.node_id), _APPROVALS, f"{name} is asked by {event.node_id}, which is over")
        self._asked[name] = event.node_id

    def _answered(self, event: ApprovalAnswered) -> None:
        name = event.approval_id
        require(name in self._asked, "the first answer stands", f"{name} is answered again: {event.decision}")
        if self._is_over(event.node_id):
            require(event.decision == "cancelled", _APPROVALS, f"{name} of a stopped node is {event.decision}")
        del self._asked[name]
        self.decisions[name] = event.decision

    def _attempt_ended(self, event: AttemptEnded) -> None:
        left = [name for name, owner in self._asked.items() if owner == event.node_id]
        require(not left, _APPROVALS, f"{', '.join(left)} outlives its attempt")


_HANDLERS: dict[type[Event], Callable[[Ledger, Any], None]] = {
    ApprovalAnswered: Ledger._answered,  # pyright: ignore[reportPrivateUsage]
    ApprovalRequested: Ledger._asked_for,  # pyright: ignore[reportPrivateUsage]
    AttemptEnded: Ledger._attempt_ended,  # pyright: ignore[reportPrivateUsage]
    CancelRequested: Ledger._cancel_requested,  # pyright: ignore[reportPrivateUsage]
    RunAccepted: Ledger._run_accepted,  # pyright: ignore[reportPrivateUsage]
    RunEnded: Ledger._run_ended,  # pyright: ignore[reportPrivateUsage]
    Spent: Ledger._spent,  # pyright: ignore[reportPrivateUsage]
    TurnAccepted: Ledger._turn_accepted,  # pyright: ignore[reportPrivateUsage]
    TurnEnded: Ledger._turn_ended,  # pyright: ignore[reportPrivateUsage]
    TurnStarted: Ledger._turn_started,  # pyright: ignore[reportPrivateUsage]
}
