"""The way of a cancel as spans: request, then delivery and observation, hop by hop.

All of it lies in the trace of the turn that is cancelled, below the span of the
node that was asked, so that depth reads as hops also where links are thrown away.

**What a hop is.** An order goes from the coordinator to each host, and to the
holder of a turn; inside a host the signal goes down the tree of runs. So the first
run of a host is one hop from the request, and a run below it in the same host one
hop further. A tool process is one hop from its run.

**Invariants**

1. Each run that a cancel met alive has one delivery, and one observation if it
   observed it; what had not begun has none and is counted.
2. A hop's times come from one clock each: the order's from the coordinator, those
   between receipt, observation and end from the host's monotonic clock.
"""

from __future__ import annotations

from remit.core.cause import Cause
from remit.core.events import CancelRequested, ProcessEnded
from remit.core.messages import BodyTiming
from remit.core.outcome import Outcome
from remit.telemetry.carrier import Parent
from remit.telemetry.hops import Hop
from remit.telemetry.names import SpanKind
from remit.telemetry.nodes import NodeFacts, cause_attributes, link_to, source_of
from remit.telemetry.processes import process_span_id
from remit.telemetry.record import Attributes, Batch, LogRecord, SpanEvent, SpanLink, SpanRecord, span_id

__all__ = ["Cancel"]

_LOGGED = (
    "remit.turn.id",
    "remit.run.id",
    "remit.cancel.id",
    "remit.cancel.hop",
    "remit.cancel.target.kind",
    "remit.cancel.mechanism",
    "remit.cancel.delivery",
    "remit.cancel.observed_at",
)
_ERRORS = {"no_ack": "cancel_timeout", "escalated": "term_grace_exceeded"}


class Cancel:
    """One accepted cancel, from its request until nothing below runs."""

    def __init__(self, event: CancelRequested, cause: Cause, target: NodeFacts, requester: Parent | None) -> None:
        self.id = event.request_id
        self.cause = cause
        self.target = target
        self.at = event.at
        self.live = event.live
        self.kill = event.kill
        self.span = span_id("cancel", self.id, target.id)
        self.requester = requester
        self.joined = ""
        """The cancel that had come first; then all hops are that one's."""
        self.hops: dict[str, Hop] = {}
        self.processes: list[Hop] = []
        self.unbegun = 0
        self.leftovers = 0
        self.outcome: Outcome | None = None

    def attributes(self) -> Attributes:
        """Return what every span of this cancel says of it."""
        return cause_attributes(self.cause, self.id)

    def brief(self) -> Attributes:
        """Return what its steps say of it; a cancel of ten thousand runs has forty thousand of them."""
        return {
            "remit.cancel.id": self.id,
            "remit.cancel.source": source_of(self.cause),
            "remit.cancel.reason": self.cause.reason,
        }

    # -- what happens --------------------------------------------------------------

    def met(self, hop: Hop) -> None:
        """Note something that was alive when the cancel came."""
        self.hops[hop.node_id] = hop
        if hop.delivery == "no_ack":
            self.leftovers += 1

    def stopped_process(self, run: NodeFacts, started_at: float, ended: ProcessEnded) -> None:
        """Note a tool process that was stopped."""
        delivery = "no_ack" if ended.survivors else "escalated" if ended.escalated else "acknowledged"
        self.leftovers += len(ended.survivors)
        self.processes.append(
            Hop(
                run.id,
                "process",
                run.host_id,
                (),
                {**run.common(), "process.pid": ended.pid},
                process_span_id(run.id, ended.pid, started_at),
                ended.at,
                None,
                delivery,
            )
        )

    # -- spans ---------------------------------------------------------------------

    def close(self, batch: Batch, at: float, *, is_quiet: bool) -> None:
        """Add all spans, records and measurements of this cancel."""
        for hop in self.hops.values():
            self._close_hop(batch, hop)
        for hop in self.processes:
            self._close_process(batch, hop)
        seconds = max(0.0, at - self.at)
        result = "incomplete" if self.leftovers else "quiet" if is_quiet else "open"
        batch.spans.append(self._request_span(at, result))
        batch.measure("remit.cancel.quiesce.duration", seconds, result=result)
        if self.leftovers:
            batch.measure("remit.cancel.leftovers", self.leftovers)
        batch.logs.append(
            LogRecord(
                at,
                "remit.cancel.quiet",
                self.target.trace,
                self.span,
                bool(self.leftovers),
                {**self.attributes(), "remit.cancel.seconds": seconds, "remit.cancel.orphans": self.leftovers},
            )
        )

    def _request_span(self, at: float, result: str) -> SpanRecord:
        target = self.target
        attributes: Attributes = {
            **target.common(),
            **self.attributes(),
            "remit.cancel.scope": "turn" if target.is_turn else "subtree",
            "remit.cancel.target.run_id": target.id,
            "remit.cancel.targets": self.live,
            "remit.cancel.unbegun": self.unbegun,
            "remit.cancel.orphans": self.leftovers,
            "remit.cancel.result": result,
            "remit.cancel.kill": self.kill,
        }
        if self.joined:
            attributes["remit.cancel.joined"] = self.joined
        if self.outcome is not None:
            attributes["remit.outcome"] = self.outcome.value
        links: list[SpanLink] = []
        if self.requester is not None:
            attributes["remit.cancel.requester.trace_id"] = f"{self.requester.trace_id:032x}"
            links.append(link_to(self.requester, "requested_by"))
        links += [SpanLink(target.trace, hop.target, {"remit.link": "cancels"}) for hop in self.hops.values()]
        return SpanRecord(
            "cancel.request",
            target.trace,
            self.span,
            target.span,
            self.at,
            max(self.at, at),
            attributes,
            error="cancel_incomplete" if self.leftovers else "",
            links=links,
            is_sampled=target.is_sampled,
        )

    def _sender(self, hop: Hop) -> Hop | None:
        """Return the hop in the same host that handed the signal on, or None for the coordinator."""
        for name in hop.above:
            found = self.hops.get(name)
            if found is not None and found.place == hop.place and found.timing is not None:
                return found
        return None

    def _number(self, hop: Hop) -> int:
        """Return how many hops away this is; a work list, since trees may be deep."""
        path = [hop]
        while not path[-1].number:
            sender = self._sender(path[-1])
            if sender is None:
                path[-1].number = 1
                break
            path.append(sender)
        for sender, receiver in zip(reversed(path), reversed(path[:-1]), strict=False):
            receiver.number = sender.number + 1
        return hop.number

    def _observation(self, node_id: str) -> int:
        return span_id("cancel.observe", self.id, node_id)

    def _close_hop(self, batch: Batch, hop: Hop) -> None:
        sender, timing = self._sender(hop), hop.timing
        number = self._number(hop)
        mechanism = "actor_call" if sender is None else "task_cancel"
        attributes: Attributes = {
            **hop.attributes,
            **self.brief(),
            "remit.cancel.hop": number,
            "remit.cancel.target.run_id": hop.node_id,
            "remit.cancel.target.kind": hop.kind,
            "remit.cancel.mechanism": mechanism,
            "remit.cancel.attempt": hop.attempt,
            "remit.cancel.delivery": hop.delivery,
        }
        if hop.outcome is not None:
            attributes["remit.outcome"] = hop.outcome.value
        # Inside a host the signal is there at once; over a wire the order is on its way until its answer.
        is_local = sender is not None and timing is not None
        start = timing.told_at if is_local and timing is not None else self.at
        end = timing.observed_at if is_local and timing is not None else hop.ended_at
        delivery = SpanRecord(
            "cancel.deliver",
            self.target.trace,
            span_id("cancel.deliver", self.id, hop.node_id),
            self.span if sender is None else self._observation(sender.node_id),
            start,
            max(start, end),
            attributes,
            kind=SpanKind.CLIENT if sender is None else SpanKind.INTERNAL,
            error=_ERRORS.get(hop.delivery, ""),
            links=[SpanLink(self.target.trace, hop.target, {"remit.link": "cancels"})],
            is_sampled=self.target.is_sampled,
        )
        batch.spans.append(delivery)
        batch.measure("remit.cancel.delivery.duration", delivery.seconds, mechanism=mechanism, delivery=hop.delivery)
        self._log(batch, "remit.cancel.delivered", delivery, hop.ended_at)
        if timing is not None:
            self._observe(batch, hop, timing, delivery)

    def _observe(self, batch: Batch, hop: Hop, timing: BodyTiming, delivery: SpanRecord) -> None:
        attributes: Attributes = {
            key: value
            for key, value in delivery.attributes.items()
            if key not in ("remit.cancel.mechanism", "remit.cancel.delivery", "remit.cancel.attempt")
        }
        observed_s, cleanup_s = timing.observation_s, timing.cleanup_s
        attributes["remit.cancel.observed_at"] = timing.where
        attributes["remit.cancel.observation_s"] = round(observed_s, 6)
        attributes["remit.cancel.cleanup_s"] = round(cleanup_s, 6)
        end = max(timing.told_at, timing.ended_at)
        observation = SpanRecord(
            "cancel.observe",
            self.target.trace,
            self._observation(hop.node_id),
            delivery.span_id,
            timing.told_at,
            end,
            attributes,
            kind=SpanKind.SERVER if delivery.kind is SpanKind.CLIENT else SpanKind.INTERNAL,
            error="cleanup_failed" if hop.failed_cleanup else "",
            events=[
                SpanEvent(timing.observed_at, "observed", {"remit.cancel.observed_at": timing.where}),
                SpanEvent(timing.observed_at, "cleanup.start", {}),
                SpanEvent(end, "quiesced", {}),
            ],
            is_sampled=self.target.is_sampled,
        )
        batch.spans.append(observation)
        batch.measure("remit.cancel.observation.duration", observed_s, observed_at=timing.where)
        batch.measure("remit.cancel.cleanup.duration", cleanup_s, observed_at=timing.where)
        self._log(batch, "remit.cancel.observed", observation, timing.observed_at)

    def _close_process(self, batch: Batch, hop: Hop) -> None:
        run = self.hops.get(hop.node_id)
        timing = run.timing if run is not None else None
        start = timing.told_at if timing is not None else self.at
        attributes: Attributes = {
            **hop.attributes,
            **self.brief(),
            "remit.cancel.hop": 1 if run is None else self._number(run) + 1,
            "remit.cancel.target.run_id": hop.node_id,
            "remit.cancel.target.kind": hop.kind,
            "remit.cancel.mechanism": "signal",
            "remit.cancel.delivery": hop.delivery,
        }
        delivery = SpanRecord(
            "cancel.deliver",
            self.target.trace,
            span_id("cancel.deliver", self.id, hop.node_id, hop.target),
            self.span if timing is None else self._observation(hop.node_id),
            start,
            max(start, hop.ended_at),
            attributes,
            kind=SpanKind.CLIENT,
            error=_ERRORS.get(hop.delivery, ""),
            links=[SpanLink(self.target.trace, hop.target, {"remit.link": "cancels"})],
            is_sampled=self.target.is_sampled,
        )
        batch.spans.append(delivery)
        batch.measure("remit.cancel.delivery.duration", delivery.seconds, mechanism="signal", delivery=hop.delivery)
        self._log(batch, "remit.cancel.delivered", delivery, hop.ended_at)

    def _log(self, batch: Batch, name: str, span: SpanRecord, at: float) -> None:
        kept: Attributes = {key: span.attributes[key] for key in _LOGGED if key in span.attributes}
        batch.logs.append(LogRecord(at, name, span.trace_id, span.span_id, bool(span.error), kept))

    def requested(self, batch: Batch) -> None:
        """Add what is known when the cancel has been accepted."""
        batch.measure("remit.cancel.requests", 1, source=source_of(self.cause))
        batch.logs.append(
            LogRecord(
                self.at,
                "remit.cancel.requested",
                self.target.trace,
                self.span,
                False,
                {**self.target.common(), **self.attributes(), "remit.cancel.targets": self.live},
            )
        )
