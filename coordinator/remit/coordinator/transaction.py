"""One decision under way: the state, the time, what was decided so far, what follows from it."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from remit.coordinator.evolve import evolve
from remit.coordinator.redaction import Redaction
from remit.coordinator.state import Node, Pool, ProcessState, WorkspaceState
from remit.core.events import Event
from remit.core.ids import IdFactory
from remit.core.limits import Limits
from remit.core.messages import ApprovalNotice, CancelOrder, ClaimNotice

__all__ = ["WORKSPACE_LIMITS", "Effects", "Settings", "Timer", "Timers", "Transaction"]

WORKSPACE_LIMITS = ("max_depth", "max_children", "max_shared", "max_dedicated", "max_result_bytes")
"""Fields of `Limits` that a workspace has."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of a workspace; see `Limits` for what users may narrow."""

    max_depth: int = 3
    max_shared: int = 256
    max_dedicated: int = 4
    max_children: int | None = None
    max_result_bytes: int = 16 * 1024 * 1024
    max_shared_hosts: int = 2
    """Hosts that share the runs of one code environment: one a CPU is plenty."""
    grow_at: int = 512
    """Runs on the least loaded shared host before another one is asked for."""
    warm_hosts: int = 1
    """Hosts kept ready and not bound to any code yet."""
    max_starting: int = 4
    """Hosts asked for at once; each costs a second of CPU and 55 to 140 MB."""
    idle_host_s: float = 60.0
    """A bound host without runs for this long is let go."""
    kill_grace_s: float = 0.5
    """Grace of a cancel with `kill`: time for the report of what was killed."""
    redaction: Redaction | None = None
    """What the workspace hides, beside what is always hidden; None for nothing more."""
    keep_ended_turns: int = 200
    """Ended turns kept in memory; older ones are read from the journal."""
    keep_nodes: int = 50_000
    """Turns and runs kept in memory, live ones aside: about a kilobyte each."""
    keep_ended_s: float = 3600.0
    """An ended turn is kept in memory for this long at most."""
    keep_recent_nodes: int = 5_000
    """Above this many turns and runs an ended turn is kept for `keep_recent_s` only."""
    keep_recent_s: float = 60.0
    """Time for whoever waits for the end of a turn, or for the receipt of its cancel, to ask."""

    def bounded(self, limits: Limits) -> Settings:
        """Return these settings with what `limits` says of a workspace."""
        given = {name: getattr(limits, name) for name in WORKSPACE_LIMITS}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def limits(self) -> dict[str, int | None]:
        """Return the bounds of the workspace by the names they have in `Limits`."""
        return {name: getattr(self, name) for name in WORKSPACE_LIMITS}

    def capacity(self, pool: Pool) -> int:
        """Return the number of slots of a pool."""
        return self.max_shared if pool is Pool.SHARED else self.max_dedicated


@dataclass(frozen=True, slots=True, order=True)
class Timer:
    """Something that is due at a point in time."""

    due: float
    order: int
    kind: str = field(compare=False)
    node_id: str = field(compare=False)
    number: int = field(compare=False, default=0)


class Timers:
    """Due times, earliest first. Stale ones are recognised when they fire."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._order = itertools.count()

    def add(self, due: float, kind: str, node_id: str, number: int = 0) -> None:
        """Remember to look at a node at that time."""
        heapq.heappush(self._heap, Timer(due, next(self._order), kind, node_id, number))

    def next_due(self) -> float | None:
        """Return the earliest due time, in seconds since 1970, or None."""
        return self._heap[0].due if self._heap else None

    def pop_due(self, now: float) -> list[Timer]:
        """Remove and return everything due, earliest first."""
        found: list[Timer] = []
        while self._heap and self._heap[0].due <= now:
            found.append(heapq.heappop(self._heap))
        return found


@dataclass(slots=True)
class Effects:
    """What the shell must do once the events are durable; grouped by receiver."""

    starts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Host id -> runs to begin there."""
    cancels: dict[str, list[CancelOrder]] = field(default_factory=dict[str, list[CancelOrder]])
    """Host id -> orders; one an accepted cancel, not one a run."""
    resumes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Host id -> runs whose body may go on."""
    wait_refusals: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict[str, list[tuple[str, int, str]]])
    """Host id -> (run, wait, sentence) for waits that could never end."""
    spawn: list[str] = field(default_factory=list[str])
    """Hosts to start."""
    kill: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(host, reason) to end now."""
    ended: list[str] = field(default_factory=list[str])
    """Turns and runs that have their terminal event, children first."""
    turn_started: list[str] = field(default_factory=list[str])
    """Turns that became active."""
    turn_cancelled: list[str] = field(default_factory=list[str])
    """Turns whose holder must be told of a cancel."""
    quiet: list[str] = field(default_factory=list[str])
    """Cancel requests that became quiet."""
    claims: list[tuple[str, ClaimNotice]] = field(default_factory=list[tuple[str, ClaimNotice]])
    """(owner, notice) for claims that stood in line."""
    approvals: list[tuple[str, ApprovalNotice]] = field(default_factory=list[tuple[str, ApprovalNotice]])
    """(who asked, notice) for approvals that have their answer."""
    sweep: list[tuple[str, ProcessState]] = field(default_factory=list[tuple[str, ProcessState]])
    """(run, process) that nobody looks after any more: to be ended by somebody else."""
    orphans: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(machine, run or turn) whose programs nobody may have told of: whatever there is of them is to be ended.
    No machine stands for the coordinator's own."""


class Transaction:
    """Collects events while a command is decided; each is applied at once.

    Later decisions of the same command must see earlier ones (a slot that was
    just taken is gone), so an event changes the state when it is emitted. If the
    journal then refuses the events the coordinator must die: its state is ahead
    of the truth.
    """

    __slots__ = (
        "draining",
        "effects",
        "ended",
        "events",
        "has_changed",
        "ids",
        "now",
        "payloads",
        "settings",
        "state",
        "timers",
        "unstartable",
    )

    def __init__(
        self,
        *,
        state: WorkspaceState,
        settings: Settings,
        timers: Timers,
        payloads: dict[str, bytes],
        ids: IdFactory,
        now: float,
        unstartable: set[str] | None = None,
    ) -> None:
        self.state = state
        self.settings = settings
        self.timers = timers
        self.payloads = payloads
        """Run id -> result or partial of a body, until its terminal event is written."""
        self.ids = ids
        self.now = now
        self.events: list[tuple[Event, bytes | None]] = []
        self.has_changed = False
        """Whether the state is another one than before, be it only in part."""
        self.effects = Effects()
        self.ended: deque[Node] = deque()
        self.draining = False
        self.unstartable: set[str] = set() if unstartable is None else unstartable
        """Runs of earlier lives whose arguments are gone: no attempt of them can be begun."""

    def emit(self, event: Event, payload: bytes | None = None) -> None:
        """Record an event and apply it."""
        if self.settings.redaction is not None:
            event = self.settings.redaction.clean(event)
        self.has_changed = True
        evolve(self.state, event)
        self.events.append((event, payload))

    def node(self, node_id: str) -> Node | None:
        """Return a turn or run, or None where it is not known."""
        return self.state.nodes.get(node_id)
