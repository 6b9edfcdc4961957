"""Who vouches for the foreground processes of a scope, and until when: pure.

**Invariants**

1. A scope is vouched for until its lease ends; each renewal moves the end
   forward, never back.
2. An end is reported once: by `expire` or by `release`, whichever comes first.
3. Starting or attaching counts as a sign of life, so that a scope whose
   coordinator has not renewed yet is not taken for a dead one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LEASE_S", "MAX_TTL_S", "Lease", "Leases"]

LEASE_S = 30.0
"""How long a scope is vouched for by one sign of life, by default, in seconds."""

MAX_TTL_S = 3600.0
"""Longest lease that may be asked for, in seconds."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One scope's lease."""

    scope: str
    """The workspace."""
    holder: str
    """Who renewed it last, for people; empty for a sign of life without a name."""
    until: float
    """When it ends, in monotonic seconds of the machine."""

    def to_dict(self) -> dict[str, Any]:
        """Return the lease as a mapping for JSON."""
        return {"scope": self.scope, "holder": self.holder, "until": self.until}


class Leases:
    """The leases of all scopes. Holds no clock: every call is given the time."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def renew(self, scope: str, *, now: float, holder: str = "", ttl_s: float = LEASE_S) -> Lease:
        """Vouch for a scope until at least `ttl_s` seconds from now.

        Args:
            scope: the workspace.
            now: monotonic seconds.
            holder: who renews; empty keeps the name that is known.
            ttl_s: seconds, above 0.
        """
        known = self._leases.get(scope)
        until = max(now + ttl_s, known.until if known else -math.inf)
        lease = Lease(scope, holder or (known.holder if known else ""), until)
        self._leases[scope] = lease
        return lease

    def release(self, scope: str) -> Lease | None:
        """End a lease now; None if there is none."""
        return self._leases.pop(scope, None)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Take away and return the leases that have ended, oldest end first."""
        ended = sorted((lease for lease in self._leases.values() if lease.until <= now), key=lambda lease: lease.until)
        for lease in ended:
            del self._leases[lease.scope]
        return tuple(ended)

    def next_end(self) -> float:
        """Return when the first lease ends, in monotonic seconds; infinity without any."""
        return min((lease.until for lease in self._leases.values()), default=math.inf)

    def get(self, scope: str) -> Lease | None:
        """Return the lease of a scope, or None."""
        return self._leases.get(scope)

    def all(self) -> tuple[Lease, ...]:
        """Return every lease, by scope."""
        return tuple(self._leases[scope] for scope in sorted(self._leases))

    def restore(self, data: Mapping[str, Any], *, now: float, limit_s: float) -> None:
        """Take over one lease that an earlier daemon wrote.

        Args:
            data: what `Lease.to_dict` returned, in the same boot of the machine.
            now: monotonic seconds.
            limit_s: never trust an end further away than this.

        Raises:
            KeyError, TypeError, ValueError: the data is no such mapping.
        """
        scope, holder, until = str(data["scope"]), str(data["holder"]), float(data["until"])
        if not math.isfinite(until):
            raise ValueError(f"a lease must end: {until!r}")
        self._leases[scope] = Lease(scope, holder, min(until, now + limit_s))
