"""Journal events: immutable records in the past tense, one class for each kind.

An event names the turn or run it is about (`node_id`), the turn whose tree that
is in (`turn_id`) and when it happened; everything else is its own. Fields that
have their default value are left out of the journal, so that a field can be
added without touching what is already written.

**Invariants**

1. An event holds values only: texts, numbers, `Cause`, tuples, and for claims
   mappings that are fit for JSON.
2. `terminal` kinds (`TurnEnded`, `RunEnded`) come once for each node, and last.
3. `decode(encode(event)) == event` for every event.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from remit.core.cause import Cause
from remit.core.errors import JournalTooNew
from remit.core.outcome import Outcome

__all__ = [
    "EVENTS_VERSION",
    "ApprovalAnswered",
    "ApprovalRequested",
    "AttemptEnded",
    "AttemptExpired",
    "AttemptMoved",
    "CancelQuiet",
    "CancelRequested",
    "ClaimChanged",
    "CoordinatorStarted",
    "CoordinatorStopping",
    "DelegationRefused",
    "EffectEnded",
    "EffectStarted",
    "EffectUncertain",
    "Event",
    "GitLocksFound",
    "HostBecameReady",
    "HostDraining",
    "HostGone",
    "HostReported",
    "HostRequested",
    "KillRequested",
    "NodeDraining",
    "ProcessEnded",
    "ProcessStarted",
    "RunAccepted",
    "RunEnded",
    "RunEscalated",
    "RunProgressed",
    "RunResumed",
    "RunSettling",
    "RunStarted",
    "RunWaiting",
    "Spent",
    "TurnAccepted",
    "TurnEnded",
    "TurnSettling",
    "TurnStarted",
    "TurnWaiting",
    "decode_event",
    "encode_event",
]

EVENTS_VERSION = 1
"""Version of the encoding below. A new kind, or a new field with a default, is no step: an older
version refuses the single event. Any other change is one, and `migrations` says how to read what is older."""


@dataclass(frozen=True, slots=True)
class Event:
    """What all events share."""

    kind: ClassVar[str] = ""
    terminal: ClassVar[bool] = False

    node_id: str
    """The turn or run this is about; the empty text for the coordinator itself."""
    turn_id: str
    """The turn whose tree this is in; the empty text for the coordinator itself."""
    at: float
    """Coordinator time, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted(Event):
    """A coordinator opened this workspace; what an earlier one left is settled after this."""

    kind: ClassVar[str] = "coordinator_started"
    epoch: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class CoordinatorStopping(Event):
    """No new turn is taken from here on."""

    kind: ClassVar[str] = "coordinator_stopping"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TurnAccepted(Event):
    """A turn exists and can be cancelled; it waits if its session is busy."""

    kind: ClassVar[str] = "turn_accepted"
    session_id: str = ""
    name: str = ""
    user: str = ""
    client_id: str = ""
    surface: str = ""
    on_disconnect: str = "cancel"
    deadline_at: float | None = None
    grace_s: float = 5.0
    max_depth: int | None = None
    max_children: int | None = None
    max_concurrent: int | None = None
    trace: str = ""
    max_tokens: int | None = None
    max_cost: float | None = None
    session_tokens: int | None = None
    session_cost: float | None = None
    approvals: tuple[Mapping[str, Any], ...] = ()
    on_failure: str = "continue"


@dataclass(frozen=True, slots=True)
class TurnStarted(Event):
    """The turn is the active one of its session."""

    kind: ClassVar[str] = "turn_started"


@dataclass(frozen=True, slots=True)
class TurnSettling(Event):
    """The turn's body has ended; its runs have not all ended yet."""

    kind: ClassVar[str] = "turn_settling"
    report: str = "returned"
    error_type: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class TurnEnded(Event):
    """The one terminal event of a turn."""

    kind: ClassVar[str] = "turn_ended"
    terminal: ClassVar[bool] = True
    outcome: Outcome = Outcome.SUCCEEDED
    cause: Cause | None = None
    error_type: str = ""
    error: str = ""
    unconfirmed: bool = False
    salvage: bool = False


@dataclass(frozen=True, slots=True)
class RunAccepted(Event):
    """A delegation was taken on; from here on exactly one `RunEnded` will follow."""

    kind: ClassVar[str] = "run_accepted"
    parent_id: str = ""
    agent: str = ""
    name: str = ""
    depth: int = 1
    client_id: str = ""
    pool: str = "shared"
    env_key: str = ""
    resources_key: str = ""
    after: tuple[str, ...] = ()
    deadline_at: float | None = None
    retries: int = 0
    retry_delay_s: float = 0.0
    attempt_timeout_s: float | None = None
    detached: bool = False
    grace_s: float = 5.0
    max_depth: int | None = None
    max_children: int | None = None
    max_concurrent: int | None = None
    arguments: str = ""
    claims: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    max_cost: float | None = None
    approvals: tuple[Mapping[str, Any], ...] = ()
    trace: str = ""


@dataclass(frozen=True, slots=True)
class DelegationRefused(Event):
    """A delegation was asked for and not taken on; no run of these ids will exist."""

    kind: ClassVar[str] = "delegation_refused"
    code: str = ""
    reason: str = ""
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """An attempt was handed to a host and holds a slot."""

    kind: ClassVar[str] = "run_started"
    attempt: int = 1
    host_id: str = ""


@dataclass(frozen=True, slots=True)
class RunWaiting(Event):
    """The body waits for other runs and has given up its slot."""

    kind: ClassVar[str] = "run_waiting"
    on: tuple[str, ...] = ()
    what: str = "children"


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """The body's wait is over and it holds a slot again."""

    kind: ClassVar[str] = "run_resumed"


@dataclass(frozen=True, slots=True)
class RunProgressed(Event):
    """The body handed over a partial result; the latest one is kept."""

    kind: ClassVar[str] = "run_progressed"
    preview: str = ""


@dataclass(frozen=True, slots=True)
class RunSettling(Event):
    """The body has ended; runs that it delegated have not all ended yet."""

    kind: ClassVar[str] = "run_settling"
    attempt: int = 1
    report: str = "returned"
    before_cancel: bool = True
    error_type: str = ""
    error: str = ""
    error_code: str = ""
    traceback: str = ""
    preview: str = ""


@dataclass(frozen=True, slots=True)
class AttemptExpired(Event):
    """An attempt took longer than it may and was told to stop; the run is not cancelled."""

    kind: ClassVar[str] = "attempt_expired"
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class AttemptMoved(Event):
    """An attempt was told to end because its node is drained; the run goes on elsewhere."""

    kind: ClassVar[str] = "attempt_moved"
    attempt: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AttemptEnded(Event):
    """An attempt is over and the run goes on with another."""

    kind: ClassVar[str] = "attempt_ended"
    attempt: int = 1
    report: str = "raised"
    error_type: str = ""
    error: str = ""
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnWaiting(Event):
    """A turn's body waits for runs of other turns, or of runs below it; for none, its wait is over."""

    kind: ClassVar[str] = "turn_waiting"
    on: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class ProcessStarted(Event):
    """A run started a tool process."""

    kind: ClassVar[str] = "process_started"
    pid: int = 0
    start_time: float = 0.0
    machine: str = ""
    program: str = ""
    handle: str = ""
    background: bool = False
    """It belongs to the session from its start."""


@dataclass(frozen=True, slots=True)
class ProcessEnded(Event):
    """A tool process and everything below it is gone, or what is left is named, or it goes on in the session."""

    kind: ClassVar[str] = "process_ended"
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    escalated: bool = False
    survivors: tuple[str, ...] = ()
    goes_on: bool = False
    """It was put into the background, and is no business of its run any more."""


@dataclass(frozen=True, slots=True)
class GitLocksFound(Event):
    """Where a program was killed git locks were found: its own are removed, what is not proven to be stays."""

    kind: ClassVar[str] = "git_locks_found"
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """Each with why."""


@dataclass(frozen=True, slots=True)
class Spent(Event):
    """Tokens or money were spent by a body; counts for it, for all above it and for its session.

    `late` marks what became known after the terminal event of the node: it is
    accounting and changes nothing else.
    """

    kind: ClassVar[str] = "spent"
    tokens: int = 0
    cost: float = 0.0
    late: bool = False


@dataclass(frozen=True, slots=True)
class ApprovalRequested(Event):
    """A body asks whether it may take an action, and waits."""

    kind: ClassVar[str] = "approval_requested"
    approval_id: str = ""
    attempt: int = 0
    action: str = ""
    details: str = ""
    path: tuple[str, ...] = ()
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class ApprovalAnswered(Event):
    """The one answer to a request for approval: approved, denied, expired or cancelled."""

    kind: ClassVar[str] = "approval_answered"
    approval_id: str = ""
    decision: str = ""
    by: str = ""
    surface: str = ""
    reason: str = ""
    request_id: str = ""
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class EffectStarted(Event):
    """A body is about to do something outside that cannot be taken back."""

    kind: ClassVar[str] = "effect_started"
    effect_id: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True)
class EffectEnded(Event):
    """The end of such an effect is known."""

    kind: ClassVar[str] = "effect_ended"
    effect_id: str = ""


@dataclass(frozen=True, slots=True)
class EffectUncertain(Event):
    """Something had been dispatched and its end is not known."""

    kind: ClassVar[str] = "effect_uncertain"
    reason: str = ""
    in_flight: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEscalated(Event):
    """A run did not stop within its grace; harder means were used."""

    kind: ClassVar[str] = "run_escalated"
    host_id: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The one terminal event of a run."""

    kind: ClassVar[str] = "run_ended"
    terminal: ClassVar[bool] = True
    outcome: Outcome = Outcome.SUCCEEDED
    cause: Cause | None = None
    error_type: str = ""
    error: str = ""
    error_code: str = ""
    traceback: str = ""
    attempt: int = 0
    unconfirmed: bool = False
    salvage: bool = False
    blocked_by: str = ""
    preview: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequested(Event):
    """A cancel was accepted: from here on nothing below `node_id` starts."""

    kind: ClassVar[str] = "cancel_requested"
    cause: Cause | None = None
    request_id: str = ""
    grace_s: float = 5.0
    kill: bool = False
    live: int = 0
    trace: str = ""


@dataclass(frozen=True, slots=True)
class KillRequested(Event):
    """A cancel under way was asked to skip its grace."""

    kind: ClassVar[str] = "kill_requested"
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CancelQuiet(Event):
    """Nothing below the cancelled node runs any more."""

    kind: ClassVar[str] = "cancel_quiet"
    request_id: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ClaimChanged(Event):
    """A claim on workspace paths was queued, granted, released, withdrawn or quarantined.

    `node_id` is its owner; `change` is the event of the lock table, as
    `remit.locks.event_to_dict` writes it.
    """

    kind: ClassVar[str] = "claim_changed"
    change: dict[str, Any] = field(default_factory=dict[str, Any])
    expires_at: float | None = None
    """When a claim that was queued leaves the line by itself, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class HostRequested(Event):
    """An agent host was asked for; `host_id` is in `node_id`."""

    kind: ClassVar[str] = "host_requested"
    resources_key: str = ""


@dataclass(frozen=True, slots=True)
class HostBecameReady(Event):
    """An agent host answers."""

    kind: ClassVar[str] = "host_ready"
    pid: int = 0
    machine: str = ""
    node: str = ""
    """The node of the cluster that it runs on."""


@dataclass(frozen=True, slots=True)
class HostReported(Event):
    """A host's report of programs was taken; a second copy after a restart is known by its number."""

    kind: ClassVar[str] = "host_reported"
    seq: int = 0


@dataclass(frozen=True, slots=True)
class HostDraining(Event):
    """A host takes no more runs; it ends when the ones it has are over, or is killed now."""

    kind: ClassVar[str] = "host_draining"
    reason: str = ""
    kill: bool = False


@dataclass(frozen=True, slots=True)
class HostGone(Event):
    """A host is no longer there."""

    kind: ClassVar[str] = "host_gone"
    reason: str = ""
    expected: bool = False


@dataclass(frozen=True, slots=True)
class NodeDraining(Event):
    """A node of the cluster (its id is in `node_id`) takes no more work, or takes it again (`undone`)."""

    kind: ClassVar[str] = "node_draining"
    reason: str = ""
    undone: bool = False


_COMMON = ("node_id", "turn_id", "at")


def _all_kinds() -> dict[str, type[Event]]:
    # By name, not by `__subclasses__`: `slots=True` makes each class twice.
    found: dict[str, type[Event]] = {}
    for name in __all__:
        cls = globals().get(name)
        if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event:
            found[cls.kind] = cls
    return found


_KINDS: dict[str, type[Event]] = _all_kinds()
_OWN_FIELDS: dict[type[Event], tuple[tuple[str, Any], ...]] = {
    cls: tuple(
        (each.name, None if each.default is MISSING else each.default)
        for each in fields(cls)
        if each.name not in _COMMON
    )
    for cls in _KINDS.values()
}


def _getter(names: tuple[str, ...]) -> Callable[[Event], tuple[Any, ...]] | None:
    """Return a function that reads several fields as a tuple, or None for no fields."""
    if not names:
        return None
    if len(names) == 1:
        name = names[0]
        return lambda event: (getattr(event, name),)
    return operator.attrgetter(*names)


_GETTERS: dict[type[Event], Callable[[Event], tuple[Any, ...]] | None] = {
    cls: _getter(tuple(name for name, _ in own)) for cls, own in _OWN_FIELDS.items()
}


def encode_event(event: Event) -> dict[str, Any]:
    """Return an event's own fields as a mapping for JSON; defaults are left out."""
    kind = type(event)
    getter = _GETTERS[kind]
    # One call for all fields: thousands of events a second come through here.
    values = getter(event) if getter is not None else ()
    data: dict[str, Any] = {
        name: value
        for (name, default), value in zip(_OWN_FIELDS[kind], values, strict=True)
        if value is not default and value != default
    }
    if "cause" in data:
        data["cause"] = data["cause"].to_dict()
    data["at"] = event.at
    return data


def decode_event(kind: str, node_id: str, turn_id: str, data: Mapping[str, Any]) -> Event:
    """Return the event that `encode_event` wrote.

    Raises:
        JournalTooNew: the kind, or a field of it, is not known to this version.
    """
    cls = _KINDS.get(kind)
    if cls is None:
        raise JournalTooNew(f"the journal holds an event of kind {kind!r}, which this version does not know; {_ADVICE}")
    own: dict[str, Any] | None = None
    for name, restore in _RESTORE[cls]:
        if data.get(name) is not None:
            # Copied by the first that has something to restore: most events have nothing.
            own = dict(data) if own is None else own
            own[name] = restore(data[name])
    values = data if own is None else own
    try:
        return cls(node_id=node_id, turn_id=turn_id, **values)
    except TypeError as error:
        unknown = ", ".join(sorted(values.keys() - cls.__dataclass_fields__.keys()))
        raise JournalTooNew(
            f"a {kind!r} event of {node_id!r} has what this version does not know ({unknown or error}); {_ADVICE}"
        ) from error


_ADVICE = "read the journal with the version of remit that wrote it, or a newer one"


def _restorers(own: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return the fields of a kind that JSON has in another form, and what gives them their own."""
    known: dict[str, Callable[[Any], Any]] = {"cause": Cause.from_dict, "outcome": Outcome}
    tuples = {name: tuple for name, default in own if isinstance(default, tuple)}
    return tuple((name, {**known, **tuples}[name]) for name, _ in own if name in known or name in tuples)


_RESTORE: dict[type[Event], tuple[tuple[str, Callable[[Any], Any]], ...]] = {
    cls: _restorers(own) for cls, own in _OWN_FIELDS.items()
}
