"""Spans of claims: the wait in line, and the lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remit.core.events import ClaimChanged
from remit.telemetry.nodes import NodeFacts
from remit.telemetry.record import Attributes, Batch, SpanLink, SpanRecord, span_id

__all__ = ["ClaimSpans"]

_RESULTS = {"cancelled": "cancelled", "timeout": "timeout", "owner_ended": "cancelled"}


class _Claim:
    """One claim that is waited for or held."""

    __slots__ = ("depth", "granted_at", "holder", "mode", "name", "queued_at", "ticket", "token", "waited")

    def __init__(self, request: Mapping[str, Any], ticket: int) -> None:
        areas = request["areas"]
        self.name = " and ".join(_label(area) for area in areas)
        modes = {str(area["mode"]) for area in areas}
        self.mode = modes.pop() if len(modes) == 1 else "mixed"
        self.ticket = ticket
        self.queued_at = float(request["at"])
        self.granted_at = 0.0
        self.token = 0
        self.depth = 0
        self.holder = ""
        self.waited = False


def _label(area: Mapping[str, Any]) -> str:
    shown = area.get("label") or next((value for key, value in area.items() if key not in ("mode", "label")), "")
    return str(shown) or "."


class ClaimSpans:
    """Follows the claims of all turns and runs; pure."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[str, _Claim]] = {}
        self._by_ticket: dict[int, str] = {}

    def change(self, batch: Batch, owner: NodeFacts, event: ClaimChanged, *, is_cancelled: bool) -> None:
        """Take one change of the lock table; `is_cancelled` says whether the owner is being stopped."""
        change = event.change
        match change["event"]:
            case "queued":
                self._queued(batch, owner, change)
            case "granted":
                self._granted(batch, owner, change, event.at)
            case "released" | "quarantined":
                claim = self._take(owner.id, change["claim_id"])
                if claim is not None:
                    how = "on_cancel" if is_cancelled else "released"
                    how = "quarantined" if change["event"] == "quarantined" else how
                    self._hold(batch, owner, claim, change["claim_id"], event.at, how)
            case "withdrawn":
                claim = self._take(owner.id, change["claim_id"])
                if claim is not None:
                    result = _RESULTS.get(change["reason"], "cancelled")
                    batch.measure("remit.lock.waiters", -1)
                    self._wait(batch, owner, claim, change["claim_id"], event.at, result)
            case _:
                return

    def end(self, batch: Batch, owner: NodeFacts, at: float) -> None:
        """Close what an owner that has ended still has open."""
        for claim_id, claim in self._claims.pop(owner.id, {}).items():
            self._by_ticket.pop(claim.ticket, None)
            if claim.token:
                self._hold(batch, owner, claim, claim_id, at, "on_cancel")
            else:
                batch.measure("remit.lock.waiters", -1)
                self._wait(batch, owner, claim, claim_id, at, "cancelled")

    def _queued(self, batch: Batch, owner: NodeFacts, change: Mapping[str, Any]) -> None:
        request = change["request"]
        claim = _Claim(request, change["seq"])
        claim.waited = True
        behind = [self._by_ticket[ticket] for ticket in change["behind"] if ticket in self._by_ticket]
        claim.depth = len(change["behind"])
        claim.holder = behind[0] if behind else ""
        self._keep(owner.id, request["claim_id"], claim)
        batch.measure("remit.lock.waiters", 1)

    def _granted(self, batch: Batch, owner: NodeFacts, change: Mapping[str, Any], at: float) -> None:
        claim_id = change["claim_id"]
        if change["request"] is not None:
            claim = _Claim(change["request"], change["ticket"])
            self._keep(owner.id, claim_id, claim)
        else:
            found = self._claims.get(owner.id, {}).get(claim_id)
            if found is None:
                return
            claim = found
            batch.measure("remit.lock.waiters", -1)
            self._wait(batch, owner, claim, claim_id, at, "acquired")
        claim.token, claim.granted_at = change["seq"], at

    def _keep(self, owner_id: str, claim_id: str, claim: _Claim) -> None:
        self._claims.setdefault(owner_id, {})[claim_id] = claim
        self._by_ticket[claim.ticket] = owner_id

    def _take(self, owner_id: str, claim_id: str) -> _Claim | None:
        held = self._claims.get(owner_id)
        claim = held.pop(claim_id, None) if held is not None else None
        if held is not None and not held:
            del self._claims[owner_id]
        if claim is not None:
            self._by_ticket.pop(claim.ticket, None)
        return claim

    def _wait(self, batch: Batch, owner: NodeFacts, claim: _Claim, claim_id: str, at: float, result: str) -> None:
        attributes: Attributes = {
            **owner.common(),
            "remit.lock.name": claim.name,
            "remit.lock.mode": claim.mode,
            "remit.lock.queue.depth": claim.depth,
            "remit.lock.holder.run_id": claim.holder,
            "remit.lock.waited_s": round(max(0.0, at - claim.queued_at), 6),
            "remit.lock.result": result,
        }
        error = "timeout" if result == "timeout" else ""
        span = _span(owner, "lock.wait", claim_id, claim.queued_at, at, attributes, error)
        batch.spans.append(span)
        batch.measure("remit.lock.wait.duration", span.seconds, result=result)

    def _hold(self, batch: Batch, owner: NodeFacts, claim: _Claim, claim_id: str, at: float, how: str) -> None:
        if not claim.token:
            return
        attributes: Attributes = {
            **owner.common(),
            "remit.lock.name": claim.name,
            "remit.lock.mode": claim.mode,
            "remit.lock.fencing_token": claim.token,
            "remit.lock.release": how,
        }
        # What may still be written to is not free: that is what people have to look at.
        error = "quarantined" if how == "quarantined" else ""
        span = _span(owner, "lock.hold", claim_id, claim.granted_at, at, attributes, error)
        if claim.waited:
            span.links.append(SpanLink(owner.trace, span_id("lock.wait", claim_id), {"remit.link": "waited"}))
        batch.spans.append(span)
        batch.measure("remit.lock.hold.duration", span.seconds, release=how)


def _span(
    owner: NodeFacts, name: str, claim_id: str, start: float, end: float, attributes: Attributes, error: str
) -> SpanRecord:
    return SpanRecord(
        name,
        owner.trace,
        span_id(name, claim_id),
        owner.here,
        start,
        max(start, end),
        attributes,
        error=error,
        is_sampled=owner.is_sampled,
    )
