"""How turns and runs end: who won, who may end now, who is freed by it.

**Rules**

1. Order in the journal decides. What the body returned before the cancel was
   recorded is a success; after, it is salvage of a cancelled run.
2. A body that raised before its signal was set has failed, whatever came later.
3. Children end before parents; a parent with live children is `settling`.
4. A node ends exactly once, and only here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remit.coordinator.approving import end_approvals
from remit.coordinator.claiming import end_claims, held_claims, request_start
from remit.coordinator.state import Node, NodeState
from remit.coordinator.transaction import Transaction
from remit.core.cause import Cause, CauseKind
from remit.core.errors import TurnCancelled
from remit.core.events import (
    AttemptEnded,
    CancelQuiet,
    EffectUncertain,
    HostDraining,
    RunEnded,
    RunSettling,
    TurnEnded,
    TurnStarted,
)
from remit.core.messages import ReportEnded
from remit.core.outcome import Outcome

__all__ = [
    "Ending",
    "attempt_cause",
    "claim_start",
    "end_blocked",
    "fail_unstarted",
    "settle",
    "settle_report",
    "start_turns",
]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a node is about to end."""

    outcome: Outcome
    cause: Cause | None = None
    unconfirmed: bool = False


def settle_report(tx: Transaction, node: Node, report: ReportEnded) -> None:
    """Take a host's word that the body of a run's current attempt has ended."""
    report = _as_told(node, report)
    before_cancel = report.before_cancel
    if report.report == "returned":
        before_cancel = node.cause is None
    if node.live_children:
        tx.emit(
            RunSettling(
                node_id=node.id,
                turn_id=node.turn_id,
                at=tx.now,
                attempt=node.attempt,
                report=report.report,
                before_cancel=before_cancel,
                error_type=report.error_type,
                error=report.error,
                error_code=report.error_code,
                traceback=report.traceback,
                preview=report.preview,
            ),
            report.payload,
        )
        if report.payload is not None:
            tx.payloads[node.id] = report.payload
        return
    if report.payload is not None:
        tx.payloads[node.id] = report.payload
    _end_attempt(tx, node, report._replace(before_cancel=before_cancel))


def _as_told(node: Node, report: ReportEnded) -> ReportEnded:
    """Correct the word of a body that heard of its stop from a refused request, before its signal was set.

    The host cannot know better: there the error looks like the body's own.
    """
    if report.report != "raised" or report.error_type != TurnCancelled.__name__:
        return report
    if node.cause is not None:
        return report._replace(report="cancelled", before_cancel=False)
    if node.expired_attempt == node.attempt:
        return report._replace(report="timed_out", before_cancel=False)
    return report


def settle(tx: Transaction, node: Node) -> None:
    """End a node if nothing holds it any more, then its parent, and so on up."""
    if node.is_ended or node.live_children:
        return
    if node.is_turn:
        _settle_turn(tx, node)
    elif node.report:
        _end_attempt(tx, node, _stored_report(node))
    elif node.cause is not None and not node.on_host:
        _end_run(tx, node, Ending(_stopped(node), node.cause))


def _stored_report(node: Node) -> ReportEnded:
    return ReportEnded(
        node.id,
        node.attempt,
        node.report,
        before_cancel=node.report_before_cancel,
        error_type=node.error_type,
        error=node.error,
        error_code=node.error_code,
        traceback=node.traceback,
        preview=node.preview,
    )


def _stopped(node: Node) -> Outcome:
    """Tell a node's own deadline apart from every other stop."""
    cause = node.cause
    own = cause is not None and cause.kind is CauseKind.DEADLINE and cause.origin == node.id
    return Outcome.TIMED_OUT if own else Outcome.CANCELLED


def _classify(node: Node, report: ReportEnded) -> Ending:
    """Decide the outcome of a run from its cause and its body's end: the one classifier."""
    word = report.report
    if word == "returned" and report.before_cancel:
        return Ending(Outcome.SUCCEEDED)
    if word == "raised" and report.before_cancel:
        return Ending(Outcome.FAILED)
    if node.cause is not None:
        return Ending(
            _stopped(node),
            node.cause,
            unconfirmed=word in ("lost", "stuck"),
        )
    if word in ("lost", "killed", "moved"):
        return Ending(Outcome.LOST)
    if word in ("timed_out", "stuck"):
        return Ending(Outcome.TIMED_OUT, unconfirmed=word == "stuck")
    # A body that unwound by a cancellation nobody had asked us for: its own doing.
    return Ending(Outcome.FAILED)


def _end_attempt(tx: Transaction, node: Node, report: ReportEnded) -> None:
    """End the attempt, and the run with it unless another attempt is due."""
    ending = _classify(node, report)
    may_start = node.id not in tx.unstartable
    if report.report == "stale_host" and node.cause is None and may_start:
        _leave_stale_host(tx, node, report)
        return
    if report.report == "moved" and node.cause is None and may_start:
        _note_uncertain(tx, node, report.report)
        tx.payloads.pop(node.id, None)
        _try_again(tx, node, report, tx.now)
        return
    retryable = ending.outcome in (Outcome.FAILED, Outcome.LOST, Outcome.TIMED_OUT)
    wanted = node.cause is None and report.report != "stuck" and node.attempt <= node.retries
    if retryable and wanted and may_start:
        _note_uncertain(tx, node, report.report)
        tx.payloads.pop(node.id, None)
        _try_again(tx, node, report, tx.now + node.retry_delay_s)
        return
    if ending.outcome is Outcome.TIMED_OUT and ending.cause is None:
        ending = replace(ending, cause=attempt_cause(tx, node, report.error))
    _end_run(tx, node, ending, report)


def _try_again(tx: Transaction, node: Node, report: ReportEnded, retry_at: float) -> None:
    _end_claims(tx, node, report)
    end_approvals(tx, node)
    tx.emit(
        AttemptEnded(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            attempt=node.attempt,
            report=report.report,
            error_type=report.error_type,
            error=report.error,
            retry_at=retry_at,
        )
    )
    tx.timers.add(retry_at, "retry", node.id, node.attempt)


def _leave_stale_host(tx: Transaction, node: Node, report: ReportEnded) -> None:
    """Begin elsewhere: the host has loaded modules that were edited since."""
    host = tx.state.hosts.get(node.host_id)
    if host is not None and not host.draining:
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=report.error))
    _try_again(tx, node, report, tx.now)


def attempt_cause(tx: Transaction, node: Node, reason: str = "") -> Cause:
    """Return the cause of an attempt that took longer than it may."""
    limit = f"{node.attempt_timeout_s:g} s" if node.attempt_timeout_s is not None else "allowed"
    return Cause(
        CauseKind.ATTEMPT_TIMEOUT,
        origin=node.id,
        actor="coordinator",
        surface="coordinator",
        at_unix_ms=int(tx.now * 1000),
        reason=reason or f"attempt {node.attempt} took longer than {limit}",
    )


def _note_uncertain(tx: Transaction, node: Node, word: str) -> None:
    """Journal what was in flight when its end cannot be known."""
    in_flight = [f"process {p.program} ({p.pid})" for p in (node.processes or {}).values()]
    in_flight.extend((node.effects or {}).values())
    if word in ("lost", "stuck", "killed") and (node.host_id or node.is_turn):
        in_flight.append(f"body on {node.host_id}" if node.host_id else "body of the turn")
        in_flight.extend(f"claim {text}" for text in held_claims(tx, node))
    if in_flight:
        lost = "holder lost" if node.is_turn else "host lost"
        reason = lost if word in ("lost", "killed") else "not confirmed"
        tx.emit(
            EffectUncertain(
                node_id=node.id,
                turn_id=node.turn_id,
                at=tx.now,
                reason=reason,
                in_flight=tuple(in_flight),
            )
        )


def _end_claims(tx: Transaction, node: Node, report: ReportEnded | None) -> None:
    # Most runs have no claims and pay for two look-ups.
    if tx.state.locks.concerns(node.id):
        end_claims(tx, node, _doubt(tx, node, report))


def _doubt(tx: Transaction, node: Node, report: ReportEnded | None) -> str:
    """Return why an attempt may still write, or the empty text if it is proven gone."""
    # Its host may have gone while what was below it still ended: that is the proof.
    if report is not None and report.report == "stuck" and node.host_id in tx.state.hosts:
        return f"its body on {node.host_id} did not stop"
    known = {**(node.old_processes or {}), **(node.processes or {})}
    left = ", ".join(f"{p.program} ({p.pid})" for p in known.values())
    return f"not proven gone: {left}" if left else ""


def _end_run(tx: Transaction, node: Node, ending: Ending, report: ReportEnded | None = None) -> None:
    payload = tx.payloads.pop(node.id, None)
    if report is not None:
        if ending.outcome is not Outcome.SUCCEEDED or node.effects:
            _note_uncertain(tx, node, report.report)
        event = RunEnded(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            outcome=ending.outcome,
            cause=ending.cause,
            error_type=report.error_type,
            error=report.error,
            error_code=report.error_code,
            traceback=report.traceback,
            attempt=node.attempt,
            unconfirmed=ending.unconfirmed,
            salvage=payload is not None and ending.outcome is not Outcome.SUCCEEDED,
            preview=report.preview,
        )
    else:
        event = RunEnded(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            outcome=ending.outcome,
            cause=ending.cause,
            attempt=node.attempt,
            unconfirmed=ending.unconfirmed,
        )
    # What an earlier attempt had left for this one and nobody has taken up, and what this one has left: there is
    # no next attempt that would find it.
    left = {**(node.old_processes or {}), **(node.processes or {})}
    tx.effects.sweep.extend((node.id, process) for process in left.values())
    _end_claims(tx, node, report)
    end_approvals(tx, node)
    tx.emit(event, payload)
    _after_end(tx, node)


def claim_start(tx: Transaction, node: Node) -> None:
    """Ask for what a run must hold before it takes a slot; end it if that is refused."""
    error = request_start(tx, node)
    if error is not None:
        report = ReportEnded(
            node.id,
            node.attempt,
            "raised",
            error_type=type(error).__name__,
            error=str(error),
            error_code=error.code,
        )
        _end_run(tx, node, Ending(Outcome.FAILED), report)


def fail_unstarted(tx: Transaction, node: Node, reason: str) -> None:
    """End a run that cannot be started; it never was."""
    report = ReportEnded(node.id, node.attempt, "raised", error_type="HostNotStarted", error=reason)
    _end_run(tx, node, Ending(Outcome.FAILED), report)


def end_blocked(tx: Transaction, node: Node, dependency: Node) -> None:
    """End a run whose dependency did not succeed; it never starts."""
    label = dependency.name or dependency.id
    cause = Cause(
        CauseKind.PARENT_FAILED,
        origin=dependency.id,
        actor="coordinator",
        surface="coordinator",
        at_unix_ms=int(tx.now * 1000),
        reason=f"blocked: {label!r} {_past(dependency)}",
    )
    end_claims(tx, node)
    tx.emit(
        RunEnded(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            outcome=Outcome.CANCELLED,
            cause=cause,
            blocked_by=dependency.id,
        )
    )
    _after_end(tx, node)


def _past(node: Node) -> str:
    """Return how a node ended as a verb phrase."""
    if node.blocked_by:
        return "was blocked"
    words = {
        Outcome.FAILED: "failed",
        Outcome.CANCELLED: "was cancelled",
        Outcome.TIMED_OUT: "timed out",
        Outcome.LOST: "was lost",
    }
    return words.get(node.outcome or Outcome.FAILED, "did not succeed")


def _after_end(tx: Transaction, node: Node) -> None:
    """Tell who waits for this end: dependents, open cancels, the parent.

    A work list instead of recursion: chains of `after` may be thousands long.
    """
    tx.ended.append(node)
    if tx.draining:
        return
    tx.draining = True
    try:
        while tx.ended:
            _free_waiting(tx, tx.ended.popleft())
    finally:
        tx.draining = False


def _free_waiting(tx: Transaction, node: Node) -> None:
    tx.effects.ended.append(node.id)
    _close_cancels(tx, node)
    if node.dependents and node.outcome is not Outcome.SUCCEEDED:
        for name in node.dependents:
            dependent = tx.state.nodes.get(name)
            if dependent is not None and dependent.state is NodeState.DEPENDING:
                end_blocked(tx, dependent, node)
    elif node.dependents:
        for name in node.dependents:
            dependent = tx.state.nodes.get(name)
            if dependent is None:
                continue
            if dependent.state is NodeState.CLAIMING and not tx.state.locks.concerns(name):
                claim_start(tx, dependent)
    if not node.detached:
        parent = tx.state.nodes[node.parent_id]
        # Most parents have more live children: no call for each of them.
        if not parent.live_children:
            settle(tx, parent)


def _close_cancels(tx: Transaction, node: Node) -> None:
    for request_id in list(tx.state.open_cancels.get(node.id, ())):
        cancel = tx.state.cancels[request_id]
        tx.emit(
            CancelQuiet(
                node_id=node.id,
                turn_id=node.turn_id,
                at=tx.now,
                request_id=request_id,
                seconds=max(0.0, tx.now - cancel.at),
            )
        )
        if cancel.open == 0:
            tx.effects.quiet.append(request_id)


def _settle_turn(tx: Transaction, node: Node) -> None:
    if not node.report:
        never_started = node.started_at is None and node.cause is not None
        if not never_started:
            return
    error_type, error = node.error_type, node.error
    cause = node.cause
    if node.report == "returned" and node.report_before_cancel:
        outcome, cause = Outcome.SUCCEEDED, None
    elif node.report == "raised" and node.report_before_cancel:
        outcome, cause = Outcome.FAILED, None
    elif cause is not None:
        outcome = _stopped(node)
    elif node.report == "follow":
        bad = node.bad_children
        outcome = Outcome.FAILED if bad else Outcome.SUCCEEDED
        if bad:
            error = f"{bad} of {node.child_count} runs did not succeed"
    elif node.report == "lost":
        outcome = Outcome.LOST
    else:
        outcome = Outcome.FAILED
    unconfirmed = node.report == "unconfirmed"
    doubt = "its holder has not said that its body is over" if unconfirmed else ""
    payload = tx.payloads.pop(node.id, None)
    if outcome is Outcome.SUCCEEDED:
        payload = None
    _note_uncertain(tx, node, "stuck" if unconfirmed else node.report)
    end_claims(tx, node, doubt)
    end_approvals(tx, node)
    if node.report in ("vanished", "unconfirmed", "lost"):
        # Its holder can not have ended the programs that it had started itself.
        tx.effects.orphans.append(("", node.id))
    tx.emit(
        TurnEnded(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            outcome=outcome,
            cause=cause,
            error_type=error_type,
            error=error,
            unconfirmed=unconfirmed,
            salvage=payload is not None,
        ),
        payload,
    )
    tx.effects.ended.append(node.id)
    _close_cancels(tx, node)
    start_turns(tx, node.session_id)


def start_turns(tx: Transaction, session_id: str) -> None:
    """Make the next turn of a session active if none is."""
    session = tx.state.sessions.get(session_id)
    if session is None or session.active or not session.queue:
        return
    turn_id = session.queue[0]
    tx.emit(TurnStarted(node_id=turn_id, turn_id=turn_id, at=tx.now))
    tx.effects.turn_started.append(turn_id)
