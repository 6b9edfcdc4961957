"""What must hold of the order of events: looked at event by event, as they are decided.

This keeps books of its own, from the events alone, and never asks the state
that the decider keeps: a decider that fools itself must not fool its judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from remit.core.cause import Cause, CauseKind
from remit.core.events import (
    AttemptEnded,
    CancelQuiet,
    CancelRequested,
    Event,
    RunAccepted,
    RunEnded,
    RunResumed,
    RunSettling,
    RunStarted,
    RunWaiting,
    Spent,
    TurnAccepted,
    TurnEnded,
    TurnStarted,
)
from remit.core.outcome import Outcome
from remit.testing.simulation.violation import require

__all__ = ["History", "describe"]

_AFTER_THE_END = {"delegation_refused", "cancel_quiet", "claim_changed", "spent"}
"""About the request the claims or the bill of a node, not about its work: these may follow its end."""


class History:
    """The order rules of one journal.

    Args:
        events: those of earlier lives.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.parents: dict[str, str] = {}
        """Node to its attached parent; the empty text for turns and detached runs."""
        self.causes: dict[str, Cause] = {}
        """Node to the first cause that reached it."""
        self.ends: dict[str, RunEnded | TurnEnded] = {}
        self.accepted_at: dict[str, float] = {}
        self.open_cancels: dict[str, set[str]] = defaultdict(set)
        """Request id to its targets that have not become quiet."""
        self.requests: set[str] = set()
        """Ids of all cancels that were accepted."""
        self.slots: set[str] = set()
        """Runs that hold a slot, by their events."""
        self._children: dict[str, set[str]] = defaultdict(set)
        self._attempts: dict[str, int] = {}
        self._running: set[str] = set()
        self._started_turns: set[str] = set()
        for event in events:
            self.add(event)

    def is_cancelled(self, node_id: str) -> bool:
        """Tell whether a cancel was accepted for a node or for what it is attached to."""
        return node_id in self.causes

    def is_running(self, run_id: str, attempt: int) -> bool:
        """Tell whether this attempt of a run has been started and is not over."""
        return run_id in self._running and self._attempts[run_id] == attempt

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            Violation: it may not follow what there was.
        """
        name = event.node_id
        if name in self.parents and event.kind not in _AFTER_THE_END:
            rule = "one end" if event.terminal else "nothing after the end"
            require(name not in self.ends, rule, f"{event.kind} of {name} after its terminal event")
        if isinstance(event, Spent):
            require(event.late == (name in self.ends), "nothing after the end", f"{name} spends late={event.late}")
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _accepted(self, event: TurnAccepted | RunAccepted) -> None:
        name = event.node_id
        require(name not in self.parents, "one start", f"{name} was accepted twice")
        parent = event.parent_id if isinstance(event, RunAccepted) else ""
        if isinstance(event, RunAccepted):
            require(parent in self.parents, "one start", f"{name} has the unknown parent {parent}")
            require(parent not in self.causes, "nothing starts below a cancel", f"{name} was accepted below {parent}")
            require(parent not in self.ends, "children end before parents", f"{name} was accepted after {parent}")
            if event.detached:
                parent = ""
        self.parents[name] = parent
        self._children[parent].add(name)
        self.accepted_at[name] = event.at

    def _turn_started(self, event: TurnStarted) -> None:
        name = event.node_id
        require(name not in self._started_turns, "one start", f"{name} started twice")
        require(name not in self.causes, "nothing starts below a cancel", f"{name} started after its cancel")
        self._started_turns.add(name)

    def _run_started(self, event: RunStarted) -> None:
        name = event.node_id
        require(name not in self.causes, "nothing starts below a cancel", f"{name} started after its cancel")
        require(name not in self._running, "one start", f"{name} started while an attempt runs")
        expected = self._attempts.get(name, 0) + 1
        require(event.attempt == expected, "one start", f"{name}: attempt {event.attempt} instead of {expected}")
        self._attempts[name] = event.attempt
        self._running.add(name)
        self.slots.add(name)

    def _let_go(self, event: RunWaiting | RunSettling) -> None:
        self.slots.discard(event.node_id)

    def _resumed(self, event: RunResumed) -> None:
        self.slots.add(event.node_id)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        name = event.node_id
        require(name not in self.causes, "no retry after a cancel", f"{name} is to be tried again")
        require(not self._live_below(name), "children end before parents", f"attempt of {name} ended before its runs")
        self._running.discard(name)
        self.slots.discard(name)

    def _live_below(self, name: str) -> set[str]:
        return self._children[name] - self.ends.keys() if name in self._children else set()

    def _cancel_requested(self, event: CancelRequested) -> None:
        name, cause = event.node_id, event.cause
        require(cause is not None, "causes are equal", f"a cancel of {name} without a cause")
        assert cause is not None
        known = self.causes.get(name)
        require(known in (None, cause), "causes are equal", f"a second cause for {name}: {known}, {cause}")
        self.open_cancels[event.request_id].add(name)
        self.requests.add(event.request_id)
        self._mark(name, cause)

    def _mark(self, name: str, cause: Cause) -> None:
        if name in self.ends:
            return
        self.causes.setdefault(name, cause)
        for child in self._children.get(name, ()):
            self._mark(child, cause)

    def _quiet(self, event: CancelQuiet) -> None:
        targets = self.open_cancels[event.request_id]
        require(event.node_id in targets, "cancels become quiet", f"{event.request_id} became quiet twice")
        require(event.node_id in self.ends, "cancels become quiet", f"{event.request_id} is quiet before the end")
        targets.discard(event.node_id)

    def _ended(self, event: RunEnded | TurnEnded) -> None:
        name = event.node_id
        below = self._live_below(name)
        require(not below, "children end before parents", f"{name} ended before {', '.join(sorted(below))}")
        self.ends[name] = event
        self._running.discard(name)
        self.slots.discard(name)
        self._check_cause(event)

    def _check_cause(self, event: RunEnded | TurnEnded) -> None:
        name, rule = event.node_id, "causes are equal"
        first = self.causes.get(name)
        blocked = isinstance(event, RunEnded) and event.blocked_by
        match event.outcome:
            case Outcome.CANCELLED:
                require(
                    blocked or (event.cause is not None and event.cause == first),
                    rule,
                    f"{name} ended cancelled by {event.cause}; its cancel was {first}",
                )
            case Outcome.TIMED_OUT:
                own = event.cause is not None and event.cause.origin == name
                kinds = (CauseKind.DEADLINE, CauseKind.ATTEMPT_TIMEOUT)
                require(
                    own and event.cause is not None and event.cause.kind in kinds,
                    rule,
                    f"{name} timed out by {event.cause}",
                )
            case _:
                require(event.cause is None, rule, f"{name} is {event.outcome} and has the cause {event.cause}")


def describe(event: Event) -> str:
    """Return what a reader wants to know of an event, in a few words."""
    words: list[str] = []
    for name in ("attempt", "host_id", "outcome", "report", "code", "step", "approval_id", "decision", "tokens", "pid"):
        value = getattr(event, name, None)
        if value not in (None, ""):
            words.append(f"{name}={value}")
    cause = getattr(event, "cause", None)
    if cause is not None:
        words.append(f"cause={cause.kind}@{cause.origin}")
    change = getattr(event, "change", None)
    if change is not None:
        words.append(str(change.get("event", "")))
    return " ".join(words)


_HANDLERS: dict[type[Event], Callable[[History, Any], None]] = {
    TurnAccepted: History._accepted,  # pyright: ignore[reportPrivateUsage]
    RunAccepted: History._accepted,  # pyright: ignore[reportPrivateUsage]
    TurnStarted: History._turn_started,  # pyright: ignore[reportPrivateUsage]
    RunStarted: History._run_started,  # pyright: ignore[reportPrivateUsage]
    RunWaiting: History._let_go,  # pyright: ignore[reportPrivateUsage]
    RunSettling: History._let_go,  # pyright: ignore[reportPrivateUsage]
    RunResumed: History._resumed,  # pyright: ignore[reportPrivateUsage]
    AttemptEnded: History._attempt_ended,  # pyright: ignore[reportPrivateUsage]
    CancelRequested: History._cancel_requested,  # pyright: ignore[reportPrivateUsage]
    CancelQuiet: History._quiet,  # pyright: ignore[reportPrivateUsage]
    RunEnded: History._ended,  # pyright: ignore[reportPrivateUsage]
    TurnEnded: History._ended,  # pyright: ignore[reportPrivateUsage]
}
