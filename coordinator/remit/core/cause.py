"""Why something was stopped: a closed set of kinds, and the record that travels.

**Invariants**

1. A cause is made once, where the stop begins, and travels unchanged.
2. It holds texts only, never a reference to a run, a task or an exception, so
   that it pickles, can be journalled, and keeps nothing alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["STOPS_FOREGROUND", "Cause", "CauseKind"]


class CauseKind(StrEnum):
    """The closed set of reasons for a stop; the values are the journal's words."""

    USER_INTERRUPT = "user_interrupt"
    """A person or a caller asked: cancel verb, Ctrl-C, a newer message."""
    DEADLINE = "deadline"
    """The deadline of the node itself or of an ancestor has passed."""
    BUDGET = "budget"
    """A limit on tokens, cost or children was reached."""
    PARENT_FAILED = "parent_failed"
    """The parent's body raised, or a sibling failed under a fail-fast wait."""
    PARENT_LOST = "parent_lost"
    """The client that held the turn is gone past its grace."""
    SHUTDOWN = "shutdown"
    """The coordinator is closing for good."""
    ATTEMPT_TIMEOUT = "attempt_timeout"
    """This attempt took too long; the run may go on with another."""
    WORKER_MOVED = "worker_moved"
    """The host was drained or died; the run goes on elsewhere."""


STOPS_FOREGROUND: frozenset[CauseKind] = frozenset(CauseKind) - {
    CauseKind.ATTEMPT_TIMEOUT,
    CauseKind.WORKER_MOVED,
}
"""Kinds that stop foreground processes; the others leave them to the next attempt."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The first recorded why of a stop."""

    kind: CauseKind
    """Which of the closed set."""
    origin: str
    """Id of the turn or run that was asked to stop."""
    actor: str = ""
    """Who asked: a user name, a run id, or the part of the coordinator."""
    surface: str = ""
    """Through what: `python`, `cli`, `signal`, `coordinator`."""
    request_id: str = ""
    """Id of the request, equal on everything that it stopped."""
    at_unix_ms: int = 0
    """Wall time of the request, in milliseconds since 1970."""
    reason: str = ""
    """Free text for people; may be empty."""

    @property
    def stops_foreground(self) -> bool:
        """Tell whether foreground processes are stopped for this cause."""
        return self.kind in STOPS_FOREGROUND

    def describe(self) -> str:
        """Return one line for people: kind, who, and the reason."""
        by = f" by {self.actor}" if self.actor else ""
        through = f" through {self.surface}" if self.surface else ""
        because = f": {self.reason}" if self.reason else ""
        return f"{self.kind.value}{by}{through}{because}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as a mapping of texts and one integer, for JSON."""
        return {
            "kind": self.kind.value,
            "origin": self.origin,
            "actor": self.actor,
            "surface": self.surface,
            "request_id": self.request_id,
            "at_unix_ms": self.at_unix_ms,
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cause:
        """Return the cause that `to_dict` wrote."""
        rest = {name: value for name, value in data.items() if name != "kind"}
        return cls(kind=CauseKind(data["kind"]), **rest)
