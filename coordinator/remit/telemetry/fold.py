"""Spans as a fold of the journal: events and reports in, finished spans out. Pure.

**Invariants**

1. Each turn, run and attempt that has ended gives exactly one span, with the
   outcome of its terminal event. Nothing that a host only believes becomes an outcome.
2. No span is open anywhere but in here, and `close` ends them all.
3. An event of a node that is not known (its acceptance was in a journal that was
   not folded) is left out.

Hosts tell when bodies began, heard a cancel, observed it and ended, in the report of
the body's end; so no span is lost with a host, and none is made on the hot path.
"""

from __future__ import annotations

from collections.abc import Callable

from remit.core.cause import Cause
from remit.core.events import (
    ApprovalAnswered,
    ApprovalRequested,
    AttemptEnded,
    CancelQuiet,
    CancelRequested,
    ClaimChanged,
    EffectUncertain,
    Event,
    KillRequested,
    ProcessEnded,
    ProcessStarted,
    RunAccepted,
    RunEnded,
    RunEscalated,
    RunSettling,
    RunStarted,
    TurnAccepted,
    TurnEnded,
    TurnSettling,
    TurnStarted,
)
from remit.core.messages import BodyTiming, ReportEnded
from remit.core.outcome import Outcome
from remit.telemetry.approvals import ApprovalSpans
from remit.telemetry.cancels import Cancel
from remit.telemetry.carrier import read_carrier
from remit.telemetry.claims import ClaimSpans
from remit.telemetry.hops import hop_of
from remit.telemetry.node_spans import attempt_span, run_span, turn_span
from remit.telemetry.nodes import NodeFacts, ProcessFacts, cause_attributes, error_type_of
from remit.telemetry.processes import measure_process, process_span
from remit.telemetry.record import Attributes, Batch, SpanEvent

__all__ = ["Folder"]

_ATTEMPT_OUTCOMES = {"raised": Outcome.FAILED, "cancelled": Outcome.FAILED, "timed_out": Outcome.TIMED_OUT}


class Folder:
    """Makes spans of what happened in one workspace.

    Args:
        keeps_arguments: whether renderings of arguments become attributes.
        is_measured: whether measurements are made.
        is_sampled: tells by its trace id whether a turn without a parent is sampled.
    """

    def __init__(
        self,
        *,
        keeps_arguments: bool = False,
        is_measured: bool = True,
        is_sampled: Callable[[int], bool] = lambda trace: True,
    ) -> None:
        self._keeps_arguments = keeps_arguments
        self._is_sampled = is_sampled
        self._nodes: dict[str, NodeFacts] = {}
        self._first: dict[str, Cancel] = {}
        """The cancel that set the cause of a node, by the node that was asked."""
        self._open: dict[tuple[str, str], Cancel] = {}
        self._claims = ClaimSpans()
        self._approvals = ApprovalSpans(keeps_arguments=keeps_arguments)
        self._is_measured = is_measured
        self._batch = Batch(is_measured=is_measured)
        self._handlers: dict[type[Event], Callable[..., None]] = {
            TurnStarted: self._turn_started,
            RunStarted: self._run_started,
            RunSettling: self._body_ended,
            TurnSettling: self._body_ended,
            AttemptEnded: self._attempt_ended,
            RunEnded: self._run_ended,
            TurnEnded: self._turn_ended,
            RunEscalated: self._escalated,
            ProcessStarted: self._process_started,
            ProcessEnded: self._process_ended,
            ClaimChanged: self._claim_changed,
            ApprovalRequested: self._approval_requested,
            ApprovalAnswered: self._approval_answered,
            EffectUncertain: self._uncertain,
            CancelRequested: self._cancel_requested,
            KillRequested: self._kill_requested,
        }

    @property
    def open_nodes(self) -> int:
        """How many turns and runs have no span yet."""
        return len(self._nodes)

    # -- in and out ----------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Take one event, in the order of the journal."""
        if isinstance(event, TurnAccepted):
            self._turn_accepted(event)
        elif isinstance(event, RunAccepted):
            self._run_accepted(event)
        elif isinstance(event, CancelQuiet):
            self._cancel_quiet(event)  # its target has ended just before
        else:
            handler = self._handlers.get(type(event))
            node = self._nodes.get(event.node_id)
            if handler is not None and node is not None:
                handler(node, event)

    def report(self, report: ReportEnded, at: float) -> None:
        """Take a host's report of the end of a body, before the events that come of it."""
        node = self._nodes.get(report.run_id)
        if node is not None and node.attempt == report.attempt:
            node.report, node.reported_at, node.timing = report, at, report.timing

    def holder(self, turn_id: str, timing: BodyTiming | None, at: float) -> None:
        """Take what the holder of a turn tells of the end of its body."""
        node = self._nodes.get(turn_id)
        if node is not None:
            node.timing, node.reported_at = timing, at

    def measure(self, name: str, value: float) -> None:
        """Add a measurement that no event tells of."""
        self._batch.measure(name, value)

    def take(self) -> Batch:
        """Return what has come together since the last call."""
        batch, self._batch = self._batch, Batch(is_measured=self._is_measured)
        return batch

    def close(self, at: float) -> None:
        """End every cancel that is still open: nothing more will be heard of it."""
        for cancel in list(self._open.values()):
            cancel.close(self._batch, at, is_quiet=False)
        self._open.clear()

    # -- turns and runs ------------------------------------------------------------

    def _turn_accepted(self, event: TurnAccepted) -> None:
        turn = NodeFacts.of_turn(event, is_sampled=True)
        if not read_carrier(event.trace):
            turn.is_sampled = self._is_sampled(turn.trace)
        self._nodes[turn.id] = turn

    def _turn_started(self, turn: NodeFacts, event: TurnStarted) -> None:
        turn.started_at = event.at
        turn.events.append(SpanEvent(event.at, "remit.turn.started", {}))

    def _run_accepted(self, event: RunAccepted) -> None:
        self._nodes[event.node_id] = NodeFacts.of_run(event, self._nodes.get(event.parent_id))
        self._batch.measure("remit.runs.queued", 1)

    def _run_started(self, run: NodeFacts, event: RunStarted) -> None:
        run.attempt, run.attempt_at, run.host_id = event.attempt, event.at, event.host_id
        run.report, run.timing, run.body_ended_at, run.escalated = None, None, None, ""
        if run.started_at is None:
            run.started_at = event.at
            self._batch.measure("remit.runs.queued", -1)
            self._batch.measure("remit.runs.active", 1)
            self._batch.measure("remit.run.queue.duration", event.at - run.accepted_at)

    def _body_ended(self, node: NodeFacts, event: RunSettling | TurnSettling) -> None:
        node.body_ended_at = event.at
        if node.is_turn and event.report in ("unconfirmed", "vanished"):
            node.escalated = event.report

    def _attempt_ended(self, run: NodeFacts, event: AttemptEnded) -> None:
        if event.report == "stale_host":
            return  # its body never began
        outcome = _ATTEMPT_OUTCOMES.get(event.report, Outcome.LOST)
        error = error_type_of(outcome, event.error_type)
        self._batch.spans.append(attempt_span(run, event, outcome, error, event.report, {}))

    def _run_ended(self, run: NodeFacts, event: RunEnded) -> None:
        del self._nodes[run.id]
        cancel = self._cancel_of(run, event.cause)
        stop = self._stop_attributes(cancel, event.cause, event.at)
        error = error_type_of(event.outcome, event.error_type, unconfirmed=event.unconfirmed)
        if cancel is not None:
            self._meet(cancel, run, event, unconfirmed=event.unconfirmed)
        self._claims.end(self._batch, run, event.at)
        self._approvals.end(self._batch, run, event.at)
        self._close_processes(run, event.at)
        if run.attempt:
            word = run.report.report if run.report is not None else ""
            self._batch.spans.append(attempt_span(run, event, event.outcome, error, word, stop))
        span = run_span(run, event, error, stop, keeps_arguments=self._keeps_arguments)
        self._batch.spans.append(span)
        self._batch.measure(
            "gen_ai.invoke_agent.duration",
            span.seconds,
            agent=run.agent,
            outcome=event.outcome.value,
            error_type=error,
        )
        self._batch.measure("remit.runs.queued" if run.started_at is None else "remit.runs.active", -1)

    def _turn_ended(self, turn: NodeFacts, event: TurnEnded) -> None:
        del self._nodes[turn.id]
        cancel = self._cancel_of(turn, event.cause)
        stop = self._stop_attributes(cancel, event.cause, event.at)
        error = error_type_of(event.outcome, event.error_type)
        if cancel is not None and turn.started_at is not None:
            self._meet(cancel, turn, event, unconfirmed=turn.escalated == "unconfirmed")
        self._claims.end(self._batch, turn, event.at)
        self._approvals.end(self._batch, turn, event.at)
        span = turn_span(turn, event, error, stop)
        self._batch.spans.append(span)
        self._batch.measure("remit.turn.duration", span.seconds, outcome=event.outcome.value, error_type=error)

    def _escalated(self, run: NodeFacts, event: RunEscalated) -> None:
        run.escalated = event.step
        run.events.append(SpanEvent(event.at, "remit.run.escalated", {"remit.escalation": event.step}))
        self._batch.measure("remit.cancel.escalations", 1, step=event.step)

    def _uncertain(self, node: NodeFacts, event: EffectUncertain) -> None:
        attributes: Attributes = {"remit.effect.reason": event.reason, "remit.effect.in_flight": event.in_flight}
        node.events.append(SpanEvent(event.at, "remit.effect.uncertain", attributes))
        self._batch.measure("remit.effects.uncertain", len(event.in_flight))

    # -- processes and claims ------------------------------------------------------

    def _process_started(self, run: NodeFacts, event: ProcessStarted) -> None:
        known = run.processes.get(event.pid)
        if known is not None and event.handle and known.handle == event.handle:
            return  # an earlier attempt's, found again by its key: it has one span from its start
        run.processes[event.pid] = ProcessFacts(event.at, event.program, event.handle, event.background)

    def _process_ended(self, run: NodeFacts, event: ProcessEnded) -> None:
        process = run.processes.pop(event.pid, None)
        started_at, program = (event.at, "") if process is None else (process.started_at, process.program)
        span = process_span(run, event, started_at=started_at, program=program)
        self._batch.spans.append(span)
        measure_process(self._batch, span, event)
        if event.escalated:
            self._batch.measure("remit.cancel.escalations", 1, step="process")
        cancel = self._cancel_above(run)
        if event.stopped and cancel is not None:
            cancel.stopped_process(run, started_at, event)

    def _close_processes(self, run: NodeFacts, at: float) -> None:
        """End the spans of processes whose end nobody has told of: they go on, or their host is gone."""
        for pid, process in run.processes.items():
            ended = ProcessEnded(node_id=run.id, turn_id=run.turn_id, at=at, pid=pid, goes_on=process.background)
            span = process_span(run, ended, started_at=process.started_at, program=process.program)
            span.attributes["remit.process.confirmed"] = False
            self._batch.spans.append(span)
        run.processes.clear()

    def _claim_changed(self, owner: NodeFacts, event: ClaimChanged) -> None:
        self._claims.change(self._batch, owner, event, is_cancelled=self._cancel_above(owner) is not None)

    def _approval_requested(self, owner: NodeFacts, event: ApprovalRequested) -> None:
        self._approvals.asked(self._batch, owner, event)

    def _approval_answered(self, owner: NodeFacts, event: ApprovalAnswered) -> None:
        self._approvals.answered(self._batch, owner, event)

    # -- cancels -------------------------------------------------------------------

    def _ancestors(self, node: NodeFacts) -> list[NodeFacts]:
        """Return the node and what is above it, nearest first."""
        found: list[NodeFacts] = []
        current: NodeFacts | None = node
        while current is not None:
            found.append(current)
            current = self._nodes.get(current.parent_id)
        return found

    def _cancel_above(self, node: NodeFacts) -> Cancel | None:
        """Return the nearest cancel that a node is under."""
        if not self._first:
            return None
        return next((self._first[a.id] for a in self._ancestors(node) if a.id in self._first), None)

    def _cancel_of(self, node: NodeFacts, cause: Cause | None) -> Cancel | None:
        """Return the cancel that a node has ended by; it may be a detached run under a cancelled parent."""
        if cause is None or not self._first:
            return None
        for above in self._ancestors(node):
            found = self._first.get(above.id)
            if found is not None and found.cause == cause:
                return found
        return None

    def _cancel_requested(self, target: NodeFacts, event: CancelRequested) -> None:
        cause = event.cause
        if cause is None:
            return
        cancel = Cancel(event, cause, target, read_carrier(event.trace))
        earlier = self._cancel_of(target, cause)
        if earlier is None:
            self._first[target.id] = cancel
        else:
            cancel.joined = earlier.id
        self._open[cancel.id, target.id] = cancel
        cancel.requested(self._batch)
        noted = SpanEvent(event.at, "remit.cancel.requested", cancel.attributes())
        target.events.append(noted)
        turn = self._nodes.get(target.turn_id)
        if turn is not None and turn is not target:
            turn.events.append(noted)

    def _kill_requested(self, target: NodeFacts, event: KillRequested) -> None:
        target.events.append(SpanEvent(event.at, "remit.cancel.kill", {"remit.cancel.id": event.request_id}))

    def _stop_attributes(self, cancel: Cancel | None, cause: Cause | None, at: float) -> Attributes:
        if cause is None:
            return {}
        found = cause_attributes(cause, cancel.id if cancel is not None else "")
        if cancel is not None:
            found["remit.cancel.seconds"] = round(max(0.0, at - cancel.at), 6)
        return found

    def _meet(self, cancel: Cancel, node: NodeFacts, event: RunEnded | TurnEnded, *, unconfirmed: bool) -> None:
        """Note how a node took its cancel, if it was alive when that came."""
        if cancel.target is node:
            cancel.outcome = event.outcome
        if not node.is_turn and not node.attempt:
            cancel.unbegun += 1
            return
        above = tuple(ancestor.id for ancestor in self._ancestors(node)[1:])
        hop = hop_of(node, event, cancel.at, above, unconfirmed=unconfirmed)
        if hop is not None:
            cancel.met(hop)

    def _cancel_quiet(self, event: CancelQuiet) -> None:
        target_id = event.node_id
        cancel = self._open.pop((event.request_id, target_id), None)
        if cancel is not None:
            cancel.close(self._batch, event.at, is_quiet=True)
        first = self._first.get(target_id)
        if first is not None and (first.id, target_id) not in self._open:
            del self._first[target_id]
