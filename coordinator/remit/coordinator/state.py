"""What the coordinator knows: turns, runs, hosts, slots. Plain data, no rules.

**Invariants**

1. A node (turn or run) is in `nodes` from its acceptance until it is pruned, and
   is pruned only after its whole turn has ended.
2. `live_children` of a node are its attached children that have not ended.
3. A run holds a slot between `RunStarted` or `RunResumed` and the next of
   `RunWaiting`, `RunSettling`, `AttemptEnded`, `RunEnded`; `used` counts them.
4. `cause` is set once. A set cause on a node means that it is on all attached
   live descendants too.
5. Everything here is a fold of the journal and equal after a replay, except the
   waiting rooms (`queues`, `resuming`, `delayed`, `parked`, `parking`, and with
   them the state `resuming`), the count `refused`, `idle_cancels`, `past_turns`, and what was
   pruned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remit.coordinator.conversation import Conversation
from remit.core.cause import Cause
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from remit.core.records import ApprovalRecord
from remit.locks import LockTable

__all__ = [
    "CancelState",
    "HostState",
    "Node",
    "NodeState",
    "Pool",
    "ProcessState",
    "SessionState",
    "WorkspaceState",
]


class NodeState(StrEnum):
    """Where a turn or run is on its way; `ended` is the only final one."""

    QUEUED = "queued"
    """Accepted; waits for its session (turn) or for a slot and a host (run)."""
    DEPENDING = "depending"
    """Waits for the runs named in `after`."""
    CLAIMING = "claiming"
    """Waits for the claims that it must hold before it takes a slot."""
    RUNNING = "running"
    """The body runs."""
    WAITING = "waiting"
    """The body waits for other runs, without a slot."""
    RESUMING = "resuming"
    """The body's wait is over; it waits for a slot to go on."""
    SETTLING = "settling"
    """The body has ended; delegated runs have not."""
    RETRYING = "retrying"
    """An attempt has ended; the next one is due."""
    CANCELLING = "cancelling"
    """A cancel was accepted; it has not ended yet."""
    ENDED = "ended"
    """It has its terminal event."""


class Pool(StrEnum):
    """Which kind of slot a run takes."""

    SHARED = "shared"
    """Many runs in one host."""
    DEDICATED = "actor"
    """A host to itself, which can be killed."""


@dataclass(slots=True)
class ProcessState:
    """A tool process that a run started and that is not proven gone."""

    pid: int
    start_time: float
    machine: str
    program: str
    handle: str = ""
    """Its id, `proc_...`, as `remit processes` shows it."""


class Node:
    """One turn or run. Fields are written by `evolve` only."""

    __slots__ = (
        "accepted_at",
        "after",
        "agent",
        "approvals",
        "arguments",
        "asking",
        "attempt",
        "attempt_timeout_s",
        "bad_children",
        "below_used",
        "blocked_by",
        "cancel_at",
        "cause",
        "child_count",
        "claims",
        "claims_freed",
        "client_id",
        "cost",
        "deadline_at",
        "depth",
        "dependents",
        "detached",
        "effects",
        "ended_at",
        "env_key",
        "error",
        "error_code",
        "error_type",
        "expired_attempt",
        "git_locks_left",
        "git_locks_removed",
        "grace_s",
        "holds_slot",
        "host_id",
        "id",
        "kill",
        "limits",
        "lineage",
        "live_children",
        "moved_attempt",
        "name",
        "old_processes",
        "on_disconnect",
        "outcome",
        "own_cost",
        "own_tokens",
        "parent_id",
        "parked",
        "pending",
        "pool",
        "preview",
        "processes",
        "processes_left",
        "processes_stopped",
        "report",
        "report_before_cancel",
        "resources_key",
        "retries",
        "retry_at",
        "retry_delay_s",
        "salvage",
        "session_id",
        "started_at",
        "state",
        "surface",
        "tokens",
        "trace",
        "traceback",
        "turn_id",
        "uncertain",
        "unconfirmed",
        "user",
        "wait_number",
        "waiting_on",
        "waiting_since",
        "waiting_what",
    )

    def __init__(self, id: str, turn_id: str, parent_id: str, at: float) -> None:
        self.id = id
        self.turn_id = turn_id
        self.parent_id = parent_id
        self.state = NodeState.QUEUED
        self.name = ""
        self.agent = ""
        self.depth = 0
        self.client_id = ""
        self.session_id = ""
        self.user = ""
        self.surface = ""
        self.trace = ""
        self.on_disconnect = "cancel"
        self.pool = Pool.SHARED
        self.env_key = ""
        self.resources_key = ""
        self.detached = False
        self.arguments = ""
        self.limits: Limits | None = None
        self.grace_s = 5.0
        self.deadline_at: float | None = None
        self.attempt_timeout_s: float | None = None
        self.retries = 0
        self.retry_delay_s = 0.0
        self.retry_at = 0.0
        self.after: tuple[str, ...] = ()
        self.pending = 0
        self.dependents: list[str] | None = None
        self.live_children: dict[str, None] | None = None
        self.child_count = 0
        self.claims: tuple[Mapping[str, Any], ...] = ()
        self.claims_freed = 0
        self.approvals: tuple[Mapping[str, Any], ...] = ()
        self.asking: dict[str, None] | None = None
        self.effects: dict[str, str] | None = None
        self.tokens = 0
        self.cost = 0.0
        self.own_tokens = 0
        self.own_cost = 0.0
        self.bad_children = 0
        self.below_used = 0
        self.parked: dict[str, None] | None = None
        self.attempt = 0
        self.expired_attempt = 0
        self.moved_attempt = 0
        self.host_id = ""
        self.holds_slot = False
        self.waiting_on: tuple[str, ...] = ()
        self.wait_number = 0
        """Number of a turn's last word about its waits."""
        self.waiting_what = ""
        self.waiting_since = at
        self.processes: dict[int, ProcessState] | None = None
        self.lineage = 1
        """First attempt of which the present one is the continuation: it may find the programs of those again."""
        self.old_processes: dict[int, ProcessState] | None = None
        self.processes_stopped = 0
        self.processes_left: tuple[str, ...] = ()
        self.git_locks_removed: tuple[str, ...] = ()
        self.git_locks_left: tuple[str, ...] = ()
        self.uncertain = 0
        self.cause: Cause | None = None
        self.cancel_at = 0.0
        self.kill = False
        self.report = ""
        self.report_before_cancel = True
        self.outcome: Outcome | None = None
        self.error_type = ""
        self.error = ""
        self.error_code = ""
        self.traceback = ""
        self.preview = ""
        self.unconfirmed = False
        self.salvage = False
        self.blocked_by = ""
        self.accepted_at = at
        self.started_at: float | None = None
        self.ended_at: float | None = None

    @property
    def is_turn(self) -> bool:
        """Tell whether this node is a turn."""
        return self.depth == 0

    @property
    def is_ended(self) -> bool:
        """Tell whether the terminal event is there."""
        return self.state is NodeState.ENDED

    @property
    def on_host(self) -> bool:
        """Tell whether a host has this run's body and has not reported its end."""
        return bool(self.host_id) and not self.report and self.state is not NodeState.ENDED


@dataclass(slots=True)
class SessionState:
    """Turns of one session: at most one active, the others in order."""

    active: str = ""
    queue: deque[str] = field(default_factory=deque[str])


@dataclass(slots=True)
class HostState:
    """One agent host."""

    id: str
    resources_key: str = ""
    ready: bool = False
    draining: bool = False
    env_key: str = ""
    pool: Pool | None = None
    runs: dict[str, None] = field(default_factory=dict[str, None])
    idle_since: float = 0.0
    pid: int = 0
    machine: str = ""
    node: str = ""
    killed: bool = False
    reported: int = 0
    """Number of its last report batch that is journalled by number."""


@dataclass(slots=True)
class CancelState:
    """One accepted cancel, until it is quiet and for a while after."""

    request_id: str
    targets: list[str]
    """Several where a whole session was meant, or the runs beside one that failed."""
    open: int
    """Targets that have not ended; quiet when there are none."""
    at: float
    live: int
    quiet_s: float | None = None


class WorkspaceState:
    """Everything that the decider decides upon."""

    def __init__(self) -> None:
        self.epoch = 0
        self.stopping = ""
        self.nodes: dict[str, Node] = {}
        self.turns: dict[str, Node] = {}
        self.sessions: dict[str, SessionState] = {}
        self.hosts: dict[str, HostState] = {}
        self.cancels: dict[str, CancelState] = {}
        self.open_cancels: dict[str, list[str]] = {}
        """Node id -> ids of cancel requests on it that are not quiet yet."""
        self.used: dict[Pool, int] = {Pool.SHARED: 0, Pool.DEDICATED: 0}
        self.queues: dict[Pool, dict[str, None]] = {Pool.SHARED: {}, Pool.DEDICATED: {}}
        self.resuming: dict[Pool, dict[str, None]] = {Pool.SHARED: {}, Pool.DEDICATED: {}}
        self.delayed: dict[str, None] = {}
        self.parking: dict[str, None] = {}
        """Nodes that have runs parked under their `max_concurrent`."""
        self.spawn_failures: dict[str, tuple[int, str]] = {}
        """Resources -> (starts of hosts that failed in a row, last reason)."""
        self.locks = LockTable()
        """All claims on workspace paths; only events change it."""
        self.awaited: dict[str, dict[str, None]] = {}
        """Node id -> runs and turns that wait for its end and are not its parent."""
        self.claim_deadlines: dict[str, float] = {}
        """Queued claim -> when it leaves the line by itself, in seconds since 1970."""
        self.drained: dict[str, str] = {}
        """Node of the cluster -> why it takes no work."""
        self.conversations: dict[str, Conversation] = {}
        """Session id -> what is kept of it over its turns, budget and history."""
        self.approvals: dict[str, ApprovalRecord] = {}
        """Approval id -> request, with its answer once there is one; oldest first."""
        self.answered: dict[str, None] = {}
        """Ids of approvals that have their answer, oldest first."""
        self.fail_fast: dict[str, None] = {}
        """Live turns whose first run that does not succeed cancels the others."""
        self.idle_cancels: dict[str, str] = {}
        """Ids of the latest cancels that found nothing, or whose targets were pruned (then the last of these).

        Sent again, they must not hit what came later.
        """
        self.past_turns: dict[str, None] = {}
        """Ids of the latest turns that were pruned: sent again, they must not be accepted a second time."""
        self.live_runs = 0
        self.live_turns = 0
        self.refused = 0
        """Reports and requests that came too late, counted."""

    def ancestors(self, node: Node) -> list[Node]:
        """Return the attached ancestors of a node, nearest first, without itself."""
        found: list[Node] = []
        while node.parent_id and not node.detached:
            node = self.nodes[node.parent_id]
            found.append(node)
        return found

    def subtree(self, node: Node) -> list[Node]:
        """Return a node and its attached live descendants, parents before children."""
        found = [node]
        for above in found:  # grows as it is walked
            if above.live_children:
                found.extend(map(self.nodes.__getitem__, above.live_children))
        return found
