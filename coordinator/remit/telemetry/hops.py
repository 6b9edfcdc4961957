"""What a cancel met alive, and what became of it; pure."""

from __future__ import annotations

from dataclasses import dataclass

from remit.core.events import RunEnded, TurnEnded
from remit.core.messages import BodyTiming
from remit.core.outcome import Outcome
from remit.telemetry.nodes import NodeFacts
from remit.telemetry.record import Attributes

__all__ = ["Hop", "hop_of"]

_GONE = ("HostLost", "CoordinatorRestarted")


@dataclass(slots=True)
class Hop:
    """One thing that a cancel met alive, and what became of it."""

    node_id: str
    kind: str
    """`turn`, `run` or `process`."""
    place: str
    """Where it ran: a host, or the holder of the turn."""
    above: tuple[str, ...]
    """Its ancestors, nearest first."""
    attributes: Attributes
    """What all spans of its turn or run have."""
    target: int
    """Its own span."""
    ended_at: float
    """When the coordinator heard of its end."""
    outcome: Outcome | None
    delivery: str
    """`acknowledged`, `already_done`, `target_gone`, `no_ack` or `escalated`."""
    timing: BodyTiming | None = None
    failed_cleanup: bool = False
    attempt: int = 0
    number: int = 0
    """How many hops from the request; 0 until it is known."""


def hop_of(
    node: NodeFacts, event: RunEnded | TurnEnded, cancelled_at: float, above: tuple[str, ...], *, unconfirmed: bool
) -> Hop | None:
    """Return how a turn or run took its cancel, or None if its body was over before.

    Args:
        node: what was remembered of it.
        event: its end.
        cancelled_at: when the cancel was accepted, in seconds since 1970.
        above: its ancestors, nearest first.
        unconfirmed: whether it was given up on without proof.
    """
    if node.body_ended_at is not None and node.body_ended_at < cancelled_at:
        return None  # only what it had delegated was alive
    ended_at = node.reported_at or node.body_ended_at or event.at
    timing = node.timing if node.timing is not None and node.timing.told_s is not None else None
    report = node.report
    return Hop(
        node.id,
        "turn" if node.is_turn else "run",
        f"holder of {node.id}" if node.is_turn else node.host_id,
        above,
        node.common(),
        node.span if node.is_turn else node.attempt_span(node.attempt),
        max(ended_at, cancelled_at),
        event.outcome,
        _delivery(node, timing, event.error_type, unconfirmed=unconfirmed),
        timing=timing,
        failed_cleanup=report is not None and report.report == "raised" and not report.before_cancel,
        attempt=max(1, node.attempt),
    )


def _delivery(node: NodeFacts, timing: BodyTiming | None, error_type: str, *, unconfirmed: bool) -> str:
    """Return what became of the order to stop a node."""
    if unconfirmed or node.escalated == "drain_host":
        return "no_ack"
    if error_type in _GONE:
        return "escalated" if node.escalated == "kill_host" else "target_gone"
    if node.is_turn and node.escalated:
        return "target_gone"  # its holder has vanished
    if timing is None and node.timing is not None:
        return "already_done"  # its body was over when the order came
    return "acknowledged"
