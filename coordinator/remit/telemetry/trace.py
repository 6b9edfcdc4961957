"""One trace as people look at it: rows in the order of a tree, and the way of each cancel. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from remit.telemetry.record import SpanRecord

__all__ = ["CancelPath", "HopRow", "Row", "Trace", "is_node", "span_dict"]

_STOPPED = ("cancelled", "stopped")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a waterfall."""

    span: SpanRecord
    """What it shows."""
    depth: int
    """Levels below the root."""

    @property
    def is_cancel(self) -> bool:
        """Tell whether it is a step of a cancel."""
        return self.span.name.startswith("cancel.")

    @property
    def kind(self) -> str:
        """Return how it ended, in one of `error`, `stopped`, `cancel` or `plain`."""
        if self.span.error:
            return "error"
        if self.is_cancel:
            return "cancel"
        attributes = self.span.attributes
        words = (
            attributes.get(f"remit.{name}")
            for name in ("outcome", "process.result", "lock.result", "approval.decision")
        )
        return "stopped" if any(word in _STOPPED for word in words) else "plain"

    @property
    def label(self) -> str:
        """Return its name for people."""
        span, attributes = self.span, self.span.attributes
        name = attributes.get("remit.run.name") or ""
        if span.name.startswith("invoke_agent "):
            agent = span.name.removeprefix("invoke_agent ")
            label = f"{name} ({agent})" if name and name != agent else agent
            attempt = attributes.get("remit.attempt")
            return f"{label}, attempt {attempt}" if attempt else label
        if span.name in ("lock.wait", "lock.hold"):
            return f"{span.name} {attributes.get('remit.lock.mode', '')} {attributes.get('remit.lock.name', '')}"
        if span.name == "approval.wait":
            return f"{span.name} {attributes.get('remit.approval.kind', '')}"
        if span.name in ("cancel.deliver", "cancel.observe"):
            word = "to" if span.name == "cancel.deliver" else "by"
            return f"{span.name} {word} {self._target}"
        return span.name

    @property
    def _target(self) -> str:
        """Return whom a step of a cancel reached: a program, an agent, or the holder of the turn."""
        attributes = self.span.attributes
        if attributes.get("remit.cancel.target.kind") == "process":
            return f"process {attributes.get('process.pid', '')}"
        return str(attributes.get("gen_ai.agent.name") or "the turn's holder")

    @property
    def note(self) -> str:
        """Return what is worth saying beside its time."""
        attributes = self.span.attributes
        names = {
            "cancel.request": ("remit.cancel.reason",),
            "cancel.deliver": ("remit.cancel.mechanism", "remit.cancel.delivery"),
            "cancel.observe": ("remit.cancel.observed_at",),
            "lock.wait": ("remit.lock.result",),
            "lock.hold": ("remit.lock.release",),
            "approval.wait": ("remit.approval.decision", "remit.approval.actor.type"),
        }.get(self.span.name, ("remit.outcome", "remit.process.result"))
        words = [str(attributes[name]) for name in names if attributes.get(name)]
        if self.span.error and self.span.error not in words:
            words.append(self.span.error)
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class HopRow:
    """One hop of a cancel: the order and what became of it. Times in seconds; None where not known."""

    number: int
    depth: int
    target: str
    """Id of the turn or run."""
    label: str
    kind: str
    mechanism: str
    delivery: str
    delivered_s: float
    observed_at: str
    observed_s: float | None
    cleanup_s: float | None
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Return the hop as a mapping for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CancelPath:
    """One cancel from its request to the quiet."""

    request: SpanRecord
    hops: tuple[HopRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the way as a mapping for JSON."""
        attributes = self.request.attributes
        found: dict[str, Any] = {
            name: attributes.get(f"remit.cancel.{name}")
            for name in ("id", "kind", "source", "surface", "requester", "reason", "targets", "unbegun", "orphans")
        }
        return {
            **found,
            "target": attributes.get("remit.cancel.target.run_id"),
            "joined": attributes.get("remit.cancel.joined"),
            "result": attributes.get("remit.cancel.result"),
            "seconds": round(self.request.seconds, 6),
            "hops": [hop.to_dict() for hop in self.hops],
        }


class Trace:
    """The spans of one turn.

    Args:
        spans: in any order; the same one twice counts once.
    """

    def __init__(self, spans: Iterable[SpanRecord]) -> None:
        self.spans: dict[int, SpanRecord] = {span.span_id: span for span in spans}
        self._below: dict[int, list[SpanRecord]] = {}
        for span in self.spans.values():
            parent = span.parent_id if span.parent_id in self.spans else 0
            self._below.setdefault(parent, []).append(span)
        self._nodes = {span.run_id: span for span in self.spans.values() if is_node(span)}
        """The spans of turns and runs, as the coordinator has them, by their ids."""
        for children in self._below.values():
            children.sort(key=lambda span: (span.start, span.name.startswith("cancel."), span.end))

    @property
    def trace_id(self) -> str:
        """The trace, in hexadecimal; empty without spans."""
        first = next(iter(self.spans.values()), None)
        return "" if first is None else f"{first.trace_id:032x}"

    @property
    def start(self) -> float:
        """When the first span began, in seconds since 1970."""
        return min((span.start for span in self.spans.values()), default=0.0)

    @property
    def end(self) -> float:
        """When the last span ended, in seconds since 1970."""
        return max((span.end for span in self.spans.values()), default=0.0)

    def rows(self, *, is_whole: bool = False) -> list[Row]:
        """Return the lines of a waterfall, parents first.

        Args:
            is_whole: with the attempt of runs that had only one, which says little beside its run.
        """
        rows: list[Row] = []
        stack = [(span, 0) for span in reversed(self._below.get(0, []))]
        while stack:
            span, depth = stack.pop()
            is_hidden = not is_whole and self._is_only_attempt(span)
            if not is_hidden:
                rows.append(Row(span, depth))
            below = depth if is_hidden else depth + 1
            stack.extend((child, below) for child in reversed(self._below.get(span.span_id, [])))
        return rows

    def _is_only_attempt(self, span: SpanRecord) -> bool:
        if "remit.attempt" not in span.attributes:
            return False
        siblings = [s for s in self._below.get(span.parent_id, []) if "remit.attempt" in s.attributes]
        return span.parent_id in self.spans and len(siblings) == 1

    def cancels(self) -> list[CancelPath]:
        """Return every cancel, the earliest first."""
        requests = sorted((s for s in self.spans.values() if s.name == "cancel.request"), key=lambda s: s.start)
        return [CancelPath(request, tuple(self._hops(request.span_id, 0))) for request in requests]

    def _hops(self, parent: int, depth: int) -> Iterator[HopRow]:
        for span in self._below.get(parent, []):
            if span.name == "cancel.deliver":
                observed = next((s for s in self._below.get(span.span_id, []) if s.name == "cancel.observe"), None)
                yield self._hop(span, observed, depth)
                if observed is not None:
                    yield from self._hops(observed.span_id, depth + 1)

    def _hop(self, delivery: SpanRecord, observed: SpanRecord | None, depth: int) -> HopRow:
        attributes = delivery.attributes
        target = str(attributes.get("remit.cancel.target.run_id", ""))
        seen = observed.attributes if observed is not None else {}
        observed_s, cleanup_s = seen.get("remit.cancel.observation_s"), seen.get("remit.cancel.cleanup_s")
        return HopRow(
            number=int(attributes.get("remit.cancel.hop", 1)),  # type: ignore[arg-type]  # we wrote it
            depth=depth,
            target=target,
            label=self._name_of(target, delivery),
            kind=str(attributes.get("remit.cancel.target.kind", "")),
            mechanism=str(attributes.get("remit.cancel.mechanism", "")),
            delivery=str(attributes.get("remit.cancel.delivery", "")),
            delivered_s=round(delivery.seconds, 6),
            observed_at=str(seen.get("remit.cancel.observed_at", "")),
            observed_s=float(observed_s) if isinstance(observed_s, (int, float)) else None,
            cleanup_s=float(cleanup_s) if isinstance(cleanup_s, (int, float)) else None,
            error=delivery.error or (observed.error if observed is not None else ""),
        )

    def _name_of(self, target: str, delivery: SpanRecord) -> str:
        for link in delivery.links:
            found = self.spans.get(link.span_id)
            if found is not None and not found.name.startswith("invoke_"):
                return f"{found.name} ({found.attributes.get('process.pid', '')})"
        node = self._nodes.get(target)
        if node is not None:
            return Row(node, 0).label.removeprefix("invoke_workflow ")
        return str(delivery.attributes.get("gen_ai.agent.name", "")) or target


def is_node(span: SpanRecord) -> bool:
    """Tell whether it is the span of a turn or run itself: neither that of an attempt nor a library's of an agent."""
    attributes = span.attributes
    return span.name.startswith("invoke_") and "remit.attempt" not in attributes and "otel.scope.name" not in attributes


def span_dict(span: SpanRecord) -> dict[str, Any]:
    """Return a span as a mapping for JSON."""
    return {
        "name": span.name,
        "trace_id": f"{span.trace_id:032x}",
        "span_id": f"{span.span_id:016x}",
        "parent_span_id": f"{span.parent_id:016x}" if span.parent_id else None,
        "kind": span.kind.name,
        "status": "ERROR" if span.error else "UNSET",
        "error_type": span.error or None,
        "start": span.start,
        "end": span.end,
        "attributes": span.attributes,
        "events": [{"at": at, "name": name, "attributes": attributes} for at, name, attributes in span.events],
        "links": [
            {"trace_id": f"{trace:032x}", "span_id": f"{target:016x}", "attributes": attributes}
            for trace, target, attributes in span.links
        ],
    }
