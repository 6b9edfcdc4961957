"""Holes made in the decider by hand, to prove that the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remit.coordinator import admission, approving, decider, evolve, recovering, settling, spending, stopping
from remit.coordinator.decider import Decider, Decision
from remit.coordinator.state import Node, WorkspaceState
from remit.coordinator.transaction import Timers, Transaction
from remit.core.errors import NotFound
from remit.core.events import CancelRequested, Event, RunResumed
from remit.core.messages import AnswerApproval, DelegateRequest, ReportBatch, ReportEnded, ReportResume, ReportWaiting
from remit.core.outcome import Outcome
from remit.testing.simulation import shell
from remit.testing.simulation.dispatch import DispatchModel
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.shell import CoordinatorModel

Mutant = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: Any, **__: Any) -> None:
    """Leave out whatever stands here."""


def a_fence_left_out(patch: pytest.MonkeyPatch) -> None:
    """Reports count whatever attempt they are about and whatever host they come from."""

    def report(self: Any, batch: ReportBatch, now: float) -> Decision:
        tx = self._begin(now)
        for item in batch.items:
            node = self.state.nodes.get(item.run_id)
            if node is None or node.is_ended or not node.host_id:
                continue
            if isinstance(item, ReportEnded):
                self._ended(tx, node, item)
            elif isinstance(item, ReportWaiting):
                self._waiting(tx, node, item)
            elif isinstance(item, ReportResume):
                self._resume(tx, node)
        decision: Decision = self._finish(tx)
        return decision

    patch.setattr(Decider, "report", report)


def a_cause_overwritten(patch: pytest.MonkeyPatch) -> None:
    """The latest cause wins, not the first."""
    handlers = evolve._HANDLERS
    original = handlers[CancelRequested]

    def requested(state: WorkspaceState, event: CancelRequested) -> None:
        original(state, event)
        for node in state.subtree(state.nodes[event.node_id]):
            node.cause = event.cause

    patch.setitem(handlers, CancelRequested, requested)


def a_terminal_event_written_twice(patch: pytest.MonkeyPatch) -> None:
    """An end goes to the journal two times."""
    original = Transaction.emit

    def emit(self: Transaction, event: Event, payload: bytes | None = None) -> None:
        original(self, event, payload)
        if event.terminal:
            self.events.append((event, payload))

    patch.setattr(Transaction, "emit", emit)


def admission_open_below_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """A cancelled node may go on delegating until its body has ended."""
    original = admission._refusal

    def refusal(tx: Transaction, parent: Node, request: DelegateRequest) -> Any:
        if parent.cause is not None and not parent.is_ended and not parent.report:
            return None
        return original(tx, parent, request)

    patch.setattr(admission, "_refusal", refusal)


def a_slot_not_freed(patch: pytest.MonkeyPatch) -> None:
    """Who waits or ends keeps its slot."""
    patch.setattr(evolve, "_release_slot", _nothing)


def a_claim_kept_past_the_end(patch: pytest.MonkeyPatch) -> None:
    """The end of a run leaves its claims where they are."""
    patch.setattr(settling, "_end_claims", _nothing)


def a_parent_that_ends_before_its_children(patch: pytest.MonkeyPatch) -> None:
    """A run ends with its body, whatever still runs below."""

    def settle_report(tx: Transaction, node: Node, report: ReportEnded) -> None:
        settling._end_attempt(tx, node, report._replace(before_cancel=node.cause is None))

    patch.setattr(decider, "settle_report", settle_report)


def a_cancel_order_not_sent(patch: pytest.MonkeyPatch) -> None:
    """Hosts are not told of cancels; only force stops what runs there."""
    patch.setattr(stopping, "_order_hosts", _nothing)


def an_accepted_run_forgotten_at_recovery(patch: pytest.MonkeyPatch) -> None:
    """What cannot go on or begin after a restart is not looked at again."""
    patch.setattr(recovering, "_settle_rest", _nothing)


def a_start_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    """What a host has not received before its coordinator died never begins."""
    patch.setattr(recovering, "_start_again", _nothing)


def a_cancel_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    """Cancels of the life before are left to those who may have heard of them."""
    patch.setattr(recovering, "_cancel_again", _nothing)


def orders_of_earlier_lives_taken(patch: pytest.MonkeyPatch) -> None:
    """A host does what it is told, whichever life says so."""

    def refuses(self: HostModel, epoch: int) -> bool:
        return self.is_dead

    patch.setattr(HostModel, "_refuses", refuses)


def an_approval_left_open(patch: pytest.MonkeyPatch) -> None:
    """A cancel leaves what is asked below it to people."""
    patch.setattr(stopping, "cancel_approvals", _nothing)


def a_second_answer_taken(patch: pytest.MonkeyPatch) -> None:
    """The latest answer stands, not the first."""

    def answer(tx: Transaction, request: AnswerApproval) -> Any:
        if request.approval_id not in tx.state.approvals:
            raise NotFound("no such approval")
        return approving._answer(tx, request.approval_id, "approved" if request.approve else "denied")

    patch.setattr(shell, "answer_approval", answer)


def a_budget_that_stops_nothing(patch: pytest.MonkeyPatch) -> None:
    """What is used up goes on."""
    patch.setattr(spending, "_stop_what_is_used_up", _nothing)


def a_failure_that_stops_nobody(patch: pytest.MonkeyPatch) -> None:
    """`on_failure="stop"` is not looked at."""
    patch.setattr(decider, "stop_after_failures", _nothing)


def programs_of_a_dead_host_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Nobody ends what the bodies of a dead host had started."""
    patch.setattr(DispatchModel, "end_programs", _nothing)


def programs_of_an_earlier_life_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Nobody ends what was to be ended when the life before ended itself."""
    patch.setattr(CoordinatorModel, "_end_strays", _nothing)


def programs_that_could_not_be_ended_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What could not be ended is not tried again."""
    original = Timers.add

    def add(self: Timers, due: float, kind: str, node_id: str, number: int = 0) -> None:
        if kind != "sweep":
            original(self, due, kind, node_id, number)

    patch.setattr(Timers, "add", add)


def a_quarantine_without_a_program(patch: pytest.MonkeyPatch) -> None:
    """The end of a program that an earlier attempt had started frees nothing."""
    patch.setattr(decider, "clear_if_gone", _nothing)


def a_retry_after_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """Attempts that are left are used up, cancel or not."""
    original = settling._end_attempt

    def end_attempt(tx: Transaction, node: Node, report: ReportEnded) -> None:
        if node.attempt <= node.retries and settling._classify(node, report).outcome is not Outcome.SUCCEEDED:
            settling._try_again(tx, node, report, tx.now)
        else:
            original(tx, node, report)

    patch.setattr(settling, "_end_attempt", end_attempt)


def an_escalation_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Who does not stop within the grace is left alone."""
    patch.setattr(decider, "escalate", _nothing)


def a_quiet_not_announced(patch: pytest.MonkeyPatch) -> None:
    """A cancel never becomes quiet."""
    patch.setattr(settling, "_close_cancels", _nothing)


def a_change_that_is_not_journalled(patch: pytest.MonkeyPatch) -> None:
    """A run resumes in memory alone."""
    original = Transaction.emit

    def emit(self: Transaction, event: Event, payload: bytes | None = None) -> None:
        original(self, event, payload)
        if isinstance(event, RunResumed):
            self.events.pop()

    patch.setattr(Transaction, "emit", emit)


def a_wait_for_a_claim_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """Who is cancelled stays in line."""
    patch.setattr(stopping, "withdraw_waiting", _nothing)


def a_retry_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nothing looks at a run with claims when its next attempt is due."""
    original = Timers.add

    def add(self: Timers, due: float, kind: str, node_id: str, number: int = 0) -> None:
        if kind != "retry":
            original(self, due, kind, node_id, number)

    patch.setattr(Timers, "add", add)


def the_runs_of_a_dead_host_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A host goes and its runs stay."""
    patch.setattr(Decider, "_host_of_run_gone", _nothing)


MUTANTS: tuple[Mutant, ...] = (
    a_fence_left_out,
    a_cause_overwritten,
    a_terminal_event_written_twice,
    admission_open_below_a_cancel,
    a_slot_not_freed,
    a_claim_kept_past_the_end,
    a_parent_that_ends_before_its_children,
    a_cancel_order_not_sent,
    an_accepted_run_forgotten_at_recovery,
    a_start_not_sent_again,
    a_cancel_not_sent_again,
    orders_of_earlier_lives_taken,
    an_approval_left_open,
    a_second_answer_taken,
    a_budget_that_stops_nothing,
    a_failure_that_stops_nobody,
    programs_of_a_dead_host_left_behind,
    programs_of_an_earlier_life_left_behind,
    programs_that_could_not_be_ended_forgotten,
    a_quarantine_without_a_program,
    a_retry_after_a_cancel,
    an_escalation_forgotten,
    a_quiet_not_announced,
    a_change_that_is_not_journalled,
    a_wait_for_a_claim_not_withdrawn,
    a_retry_forgotten,
    the_runs_of_a_dead_host_forgotten,
)

SHY_MUTANTS: tuple[Mutant, ...] = (
    a_fence_left_out,
    a_cause_overwritten,
    an_accepted_run_forgotten_at_recovery,
    a_start_not_sent_again,
    programs_of_an_earlier_life_left_behind,
    programs_that_could_not_be_ended_forgotten,
    a_quarantine_without_a_program,
    a_retry_forgotten,
)
"""Those that take more than a few seeds to show."""

SHOWN_FROM: dict[Mutant, int] = {
    a_start_not_sent_again: 700,
    programs_of_an_earlier_life_left_behind: 1_000,
    programs_that_could_not_be_ended_forgotten: 400,
    a_quarantine_without_a_program: 1_800,
}
"""A seed that some are shown soon after: where to look first, to save time."""
