"""`evolve(state, event)`: what each event changes. The only writer of the state.

No decisions here, no clock, no I/O: the same events give the same state, live and
after a crash. The state is changed in place (ten thousand runs a second leave no
room for copies) and that is why nobody else may write it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remit.coordinator.conversation import (
    HANDLERS as CONVERSATION_HANDLERS,
)
from remit.coordinator.conversation import (
    note_cancel,
    note_progress,
    note_turn_accepted,
    note_turn_ended,
    note_turn_started,
    note_unfinished,
)
from remit.coordinator.state import (
    CancelState,
    HostState,
    Node,
    NodeState,
    Pool,
    ProcessState,
    SessionState,
    WorkspaceState,
)
from remit.core.cause import Cause
from remit.core.errors import InternalError
from remit.core.events import (
    AttemptEnded,
    AttemptExpired,
    AttemptMoved,
    CancelQuiet,
    CancelRequested,
    ClaimChanged,
    CoordinatorStarted,
    CoordinatorStopping,
    DelegationRefused,
    EffectUncertain,
    Event,
    GitLocksFound,
    HostBecameReady,
    HostDraining,
    HostGone,
    HostReported,
    HostRequested,
    KillRequested,
    NodeDraining,
    ProcessEnded,
    ProcessStarted,
    RunAccepted,
    RunEnded,
    RunEscalated,
    RunProgressed,
    RunResumed,
    RunSettling,
    RunStarted,
    RunWaiting,
    TurnAccepted,
    TurnEnded,
    TurnSettling,
    TurnStarted,
    TurnWaiting,
)
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from remit.locks import Granted, Queued, Released, event_from_dict

__all__ = ["evolve"]


CONTINUED = frozenset({"lost", "killed", "timed_out", "moved", "stale_host"})
"""Ends of an attempt that leave its programs to the next one; after any other a program is started anew."""


def evolve(state: WorkspaceState, event: Event) -> WorkspaceState:
    """Apply one event and return the same state.

    Raises:
        InternalError: the event cannot follow what is there.
    """
    _HANDLERS[type(event)](state, event)
    return state


def _take_slot(state: WorkspaceState, node: Node) -> None:
    node.holds_slot = True
    state.used[node.pool] += 1
    for ancestor in state.ancestors(node):
        ancestor.below_used += 1


def _release_slot(state: WorkspaceState, node: Node) -> None:
    if not node.holds_slot:
        return
    node.holds_slot = False
    state.used[node.pool] -= 1
    for ancestor in state.ancestors(node):
        ancestor.below_used -= 1


def _leave_waiting_rooms(state: WorkspaceState, node: Node) -> None:
    state.queues[node.pool].pop(node.id, None)
    state.resuming[node.pool].pop(node.id, None)
    state.delayed.pop(node.id, None)
    if state.parking:
        for ancestor in state.ancestors(node):
            if ancestor.parked is not None:
                ancestor.parked.pop(node.id, None)


def _leave_host(state: WorkspaceState, node: Node, at: float) -> None:
    host = state.hosts.get(node.host_id)
    if host is not None:
        host.runs.pop(node.id, None)
        if not host.runs:
            host.idle_since = at


def _limits(event: TurnAccepted | RunAccepted) -> Limits | None:
    if event.max_depth is event.max_children is event.max_concurrent is event.max_tokens is event.max_cost is None:
        return None
    return Limits(
        max_depth=event.max_depth,
        max_children=event.max_children,
        max_concurrent=event.max_concurrent,
        tokens=event.max_tokens,
        cost=event.max_cost,
    )


def _coordinator_started(state: WorkspaceState, event: CoordinatorStarted) -> None:
    state.epoch = event.epoch
    state.stopping = ""


def _coordinator_stopping(state: WorkspaceState, event: CoordinatorStopping) -> None:
    state.stopping = event.reason or "closing"


def _turn_accepted(state: WorkspaceState, event: TurnAccepted) -> None:
    if event.node_id in state.nodes:
        raise InternalError(f"turn {event.node_id!r} was accepted twice")
    node = Node(event.node_id, event.node_id, "", event.at)
    node.name = event.name
    node.session_id = event.session_id
    node.user = event.user
    node.client_id = event.client_id
    node.surface = event.surface
    node.trace = event.trace
    node.on_disconnect = event.on_disconnect
    node.deadline_at = event.deadline_at
    node.grace_s = event.grace_s
    node.limits = _limits(event)
    node.approvals = event.approvals
    if event.on_failure == "stop":
        state.fail_fast[node.id] = None
    note_turn_accepted(state, event)
    state.nodes[node.id] = state.turns[node.id] = node
    state.live_turns += 1
    state.sessions.setdefault(node.session_id, SessionState()).queue.append(node.id)


def _turn_started(state: WorkspaceState, event: TurnStarted) -> None:
    node = state.nodes[event.node_id]
    session = state.sessions[node.session_id]
    if session.active:
        raise InternalError(f"session {node.session_id!r} has two active turns")
    session.queue.remove(node.id)
    session.active = node.id
    node.started_at = event.at
    note_turn_started(state, node, event.at)
    node.state = NodeState.RUNNING


def _turn_settling(state: WorkspaceState, event: TurnSettling) -> None:
    node = state.nodes[event.node_id]
    node.report = event.report
    node.report_before_cancel = node.cause is None
    node.error_type = event.error_type
    node.error = event.error
    _stop_waiting(state, node)
    if node.cause is None:
        node.state = NodeState.SETTLING


def _turn_ended(state: WorkspaceState, event: TurnEnded) -> None:
    node = state.nodes[event.node_id]
    _stop_waiting(state, node)
    _end(node, event.outcome, event.cause, event.at)
    node.error_type = event.error_type
    node.error = event.error
    node.unconfirmed = event.unconfirmed
    node.salvage = event.salvage
    state.fail_fast.pop(node.id, None)
    note_turn_ended(state, node, event)
    state.live_turns -= 1
    session = state.sessions[node.session_id]
    if session.active == node.id:
        session.active = ""
    elif node.id in session.queue:
        session.queue.remove(node.id)
    if not session.active and not session.queue:
        del state.sessions[node.session_id]


def _run_accepted(state: WorkspaceState, event: RunAccepted) -> None:
    if event.node_id in state.nodes:
        raise InternalError(f"run {event.node_id!r} was accepted twice")
    parent = state.nodes[event.parent_id]
    node = Node(event.node_id, event.turn_id, event.parent_id, event.at)
    node.agent = event.agent
    node.name = event.name
    node.depth = event.depth
    node.client_id = event.client_id
    node.session_id = parent.session_id
    node.user = parent.user
    node.pool = Pool(event.pool)
    node.env_key = event.env_key
    node.resources_key = event.resources_key
    node.deadline_at = event.deadline_at
    node.retries = event.retries
    node.retry_delay_s = event.retry_delay_s
    node.attempt_timeout_s = event.attempt_timeout_s
    node.detached = event.detached
    node.grace_s = event.grace_s
    node.limits = _limits(event)
    node.arguments = event.arguments
    node.claims = event.claims
    node.approvals = event.approvals
    state.nodes[node.id] = node
    # A new request is a new try: what kept hosts from starting may be over.
    if state.spawn_failures:
        state.spawn_failures.clear()
    state.live_runs += 1
    parent.child_count += 1
    if not node.detached:
        if parent.live_children is None:
            parent.live_children = {}
        parent.live_children[node.id] = None
    if event.after:
        _depend(state, node, event.after)
    if node.pending:
        node.state = NodeState.DEPENDING
    else:
        _become_ready(state, node)


def _become_ready(state: WorkspaceState, node: Node) -> None:
    """Let a run that comes after nothing any more wait for its claims, or for a slot."""
    if node.claims:
        node.state = NodeState.CLAIMING
    else:
        node.state = NodeState.QUEUED
        state.queues[node.pool][node.id] = None


def _depend(state: WorkspaceState, node: Node, after: tuple[str, ...]) -> None:
    node.after = after
    for name in after:
        other = state.nodes.get(name)
        if other is None or other.is_ended:
            continue
        node.pending += 1
        if other.dependents is None:
            other.dependents = []
        other.dependents.append(node.id)


def _run_started(state: WorkspaceState, event: RunStarted) -> None:
    node = state.nodes[event.node_id]
    if node.cause is not None:
        raise InternalError(f"run {node.id!r} would start after its cancel")
    _leave_waiting_rooms(state, node)
    node.state = NodeState.RUNNING
    node.attempt = event.attempt
    node.host_id = event.host_id
    node.started_at = event.at
    host = state.hosts.get(event.host_id)
    if host is not None:
        host.runs[node.id] = None
        host.env_key = node.env_key
        host.pool = node.pool
    _take_slot(state, node)


def _run_waiting(state: WorkspaceState, event: RunWaiting) -> None:
    node = state.nodes[event.node_id]
    _release_slot(state, node)
    # A body may wait again before its last wait has given it a slot.
    state.resuming[node.pool].pop(node.id, None)
    _wait_on(state, node, event.on, event.at)
    node.waiting_what = event.what
    if node.cause is None:
        node.state = NodeState.WAITING


def _turn_waiting(state: WorkspaceState, event: TurnWaiting) -> None:
    node = state.nodes[event.node_id]
    node.wait_number = event.number
    _wait_on(state, node, event.on, event.at)


def _wait_on(state: WorkspaceState, node: Node, on: tuple[str, ...], at: float) -> None:
    _forget_awaited(state, node)
    own = node.live_children or ()
    for name in on:
        if name not in own:
            state.awaited.setdefault(name, {})[node.id] = None
    node.waiting_on = on
    node.waiting_since = at


def _forget_awaited(state: WorkspaceState, node: Node) -> None:
    if state.awaited:
        for name in node.waiting_on:
            waiters = state.awaited.get(name)
            if waiters is not None:
                waiters.pop(node.id, None)
                if not waiters:
                    del state.awaited[name]


def _stop_waiting(state: WorkspaceState, node: Node) -> None:
    _forget_awaited(state, node)
    node.waiting_on = ()
    node.waiting_what = ""


def _run_resumed(state: WorkspaceState, event: RunResumed) -> None:
    node = state.nodes[event.node_id]
    state.resuming[node.pool].pop(node.id, None)
    _stop_waiting(state, node)
    if not node.holds_slot:
        _take_slot(state, node)
    if node.cause is None:
        node.state = NodeState.RUNNING


def _run_progressed(state: WorkspaceState, event: RunProgressed) -> None:
    node = state.nodes[event.node_id]
    node.preview = event.preview
    if node.is_turn:
        note_progress(state, node, event.preview)


def _run_settling(state: WorkspaceState, event: RunSettling) -> None:
    node = state.nodes[event.node_id]
    _release_slot(state, node)
    _leave_waiting_rooms(state, node)
    _leave_host(state, node, event.at)
    _stop_waiting(state, node)
    node.report = event.report
    node.report_before_cancel = event.before_cancel
    node.error_type = event.error_type
    node.error = event.error
    node.error_code = event.error_code
    node.traceback = event.traceback
    if event.preview:
        node.preview = event.preview
    if node.cause is None:
        node.state = NodeState.SETTLING


def _attempt_expired(state: WorkspaceState, event: AttemptExpired) -> None:
    state.nodes[event.node_id].expired_attempt = event.attempt


def _attempt_moved(state: WorkspaceState, event: AttemptMoved) -> None:
    state.nodes[event.node_id].moved_attempt = event.attempt


def _attempt_ended(state: WorkspaceState, event: AttemptEnded) -> None:
    node = state.nodes[event.node_id]
    _release_slot(state, node)
    _leave_waiting_rooms(state, node)
    _leave_host(state, node, event.at)
    node.host_id = ""
    node.report = ""
    node.report_before_cancel = True
    node.error_type = event.error_type
    node.error = event.error
    node.traceback = ""
    _stop_waiting(state, node)
    if node.processes:
        # Until they are proven gone the next life has to know of them.
        node.old_processes = {**(node.old_processes or {}), **node.processes}
    node.processes = None
    node.effects = None
    node.own_tokens, node.own_cost = 0, 0.0
    if event.report not in CONTINUED:
        node.lineage = event.attempt + 1
    node.state = NodeState.RETRYING
    node.retry_at = event.retry_at
    # The body was not begun, or not let go on, so this attempt is not one of those that the caller allowed.
    node.retries += event.report in ("stale_host", "moved")
    if not node.claims:
        # One with claims asks for them again when it is due.
        state.delayed[node.id] = None


def _claim_changed(state: WorkspaceState, event: ClaimChanged) -> None:
    change = event_from_dict(event.change)
    state.locks.apply(change)
    if event.expires_at is not None and isinstance(change, Queued):
        state.claim_deadlines[change.request.claim_id] = event.expires_at
    elif state.claim_deadlines:
        state.claim_deadlines.pop(getattr(change, "claim_id", ""), None)
    node = state.nodes.get(event.node_id)
    if node is not None and node.cause is not None and isinstance(change, Released):
        node.claims_freed += 1  # for the receipt: what a cancel let others have
    if node is None or node.state not in (NodeState.CLAIMING, NodeState.RETRYING):
        return
    # A run without a body has one claim at most: the one it takes before its slot.
    if isinstance(change, Granted):
        node.state = NodeState.QUEUED
        state.queues[node.pool][node.id] = None
    elif isinstance(change, Queued):
        node.state = NodeState.CLAIMING


def _process_started(state: WorkspaceState, event: ProcessStarted) -> None:
    node = state.nodes[event.node_id]
    if node.processes is None:
        node.processes = {}
    node.processes[event.pid] = ProcessState(event.pid, event.start_time, event.machine, event.program, event.handle)
    if node.old_processes is not None:
        # An earlier attempt's, found again by its key.
        node.old_processes.pop(event.pid, None)


def _process_ended(state: WorkspaceState, event: ProcessEnded) -> None:
    node = state.nodes[event.node_id]
    node.processes_stopped += event.stopped
    node.processes_left += event.survivors
    if node.processes is not None and not event.survivors:
        node.processes.pop(event.pid, None)
    if node.old_processes is not None and not event.survivors:
        node.old_processes.pop(event.pid, None)


def _git_locks_found(state: WorkspaceState, event: GitLocksFound) -> None:
    node = state.nodes[event.node_id]
    node.git_locks_removed += event.removed
    node.git_locks_left += event.left


def _effect_uncertain(state: WorkspaceState, event: EffectUncertain) -> None:
    state.nodes[event.node_id].uncertain += 1


def _run_ended(state: WorkspaceState, event: RunEnded) -> None:
    node = state.nodes[event.node_id]
    _release_slot(state, node)
    _leave_waiting_rooms(state, node)
    _leave_host(state, node, event.at)
    _forget_awaited(state, node)
    _end(node, event.outcome, event.cause, event.at)
    node.attempt = event.attempt
    node.error_type = event.error_type
    node.error = event.error
    node.error_code = event.error_code
    node.traceback = event.traceback
    node.unconfirmed = event.unconfirmed
    node.salvage = event.salvage
    node.blocked_by = event.blocked_by
    if event.preview:
        node.preview = event.preview
    state.live_runs -= 1
    if not node.detached:
        parent = state.nodes[node.parent_id]
        if parent.live_children is not None:
            parent.live_children.pop(node.id, None)
        if event.outcome is not Outcome.SUCCEEDED:
            parent.bad_children += 1
            if parent.is_turn:
                note_unfinished(state, parent, node, event)
    if node.dependents and event.outcome is Outcome.SUCCEEDED:
        _satisfy(state, node.dependents)


def _satisfy(state: WorkspaceState, dependents: list[str]) -> None:
    for name in dependents:
        other = state.nodes.get(name)
        if other is None:  # pruned with its own turn
            continue
        other.pending -= 1
        if other.pending == 0 and other.state is NodeState.DEPENDING:
            _become_ready(state, other)


def _end(node: Node, outcome: Outcome, cause: Cause | None, at: float) -> None:
    if node.is_ended:
        raise InternalError(f"{node.id!r} would end twice")
    node.state = NodeState.ENDED
    node.outcome = outcome
    node.cause = cause
    node.ended_at = at
    node.live_children = None
    node.parked = None


def _cancel_requested(state: WorkspaceState, event: CancelRequested) -> None:
    target = state.nodes[event.node_id]
    if target.is_turn:
        note_cancel(state, target, event)
    for node in state.subtree(target):
        if node.cause is None:
            node.cause = event.cause
            node.cancel_at = event.at
            node.kill = event.kill
            if node.state is not NodeState.RUNNING:
                _leave_waiting_rooms(state, node)
            node.state = NodeState.CANCELLING
            # What a host owes is the grace of the cancel, not the node's own.
            node.grace_s = event.grace_s
    known = state.cancels.get(event.request_id)
    if known is None:
        state.cancels[event.request_id] = CancelState(event.request_id, [event.node_id], 1, event.at, event.live)
    else:
        known.targets.append(event.node_id)
        known.open += 1
        known.live += event.live
        known.quiet_s = None
    state.open_cancels.setdefault(event.node_id, []).append(event.request_id)


def _kill_requested(state: WorkspaceState, event: KillRequested) -> None:
    for node in state.subtree(state.nodes[event.node_id]):
        node.kill = True


def _cancel_quiet(state: WorkspaceState, event: CancelQuiet) -> None:
    cancel = state.cancels.get(event.request_id)
    if cancel is not None:
        cancel.open -= 1
        if cancel.open == 0:
            cancel.quiet_s = event.seconds
    open_requests = state.open_cancels.get(event.node_id)
    if open_requests is not None:
        open_requests.remove(event.request_id)
        if not open_requests:
            del state.open_cancels[event.node_id]


def _host_requested(state: WorkspaceState, event: HostRequested) -> None:
    state.hosts[event.node_id] = HostState(event.node_id, event.resources_key, idle_since=event.at)


def _host_ready(state: WorkspaceState, event: HostBecameReady) -> None:
    host = state.hosts.get(event.node_id)
    if host is not None:
        host.ready = True
        host.pid = event.pid
        host.machine = event.machine
        host.node = event.node
        host.idle_since = event.at
        state.spawn_failures.pop(host.resources_key, None)


def _host_draining(state: WorkspaceState, event: HostDraining) -> None:
    host = state.hosts.get(event.node_id)
    if host is not None:
        host.draining = True
        host.killed = host.killed or event.kill


def _host_gone(state: WorkspaceState, event: HostGone) -> None:
    host = state.hosts.pop(event.node_id, None)
    if host is not None and not host.ready and not event.expected:
        count, _ = state.spawn_failures.get(host.resources_key, (0, ""))
        state.spawn_failures[host.resources_key] = (count + 1, event.reason)


def _host_reported(state: WorkspaceState, event: HostReported) -> None:
    host = state.hosts.get(event.node_id)
    if host is not None:
        host.reported = event.seq


def _node_draining(state: WorkspaceState, event: NodeDraining) -> None:
    if event.undone:
        state.drained.pop(event.node_id, None)
    else:
        state.drained[event.node_id] = event.reason


def _nothing(state: WorkspaceState, event: Event) -> None:
    """Take note only: the event is there for people and for receipts."""


_HANDLERS: dict[type[Event], Callable[[WorkspaceState, Any], None]] = {
    AttemptEnded: _attempt_ended,
    AttemptExpired: _attempt_expired,
    AttemptMoved: _attempt_moved,
    CancelQuiet: _cancel_quiet,
    CancelRequested: _cancel_requested,
    ClaimChanged: _claim_changed,
    CoordinatorStarted: _coordinator_started,
    CoordinatorStopping: _coordinator_stopping,
    DelegationRefused: _nothing,
    EffectUncertain: _effect_uncertain,
    GitLocksFound: _git_locks_found,
    HostBecameReady: _host_ready,
    HostDraining: _host_draining,
    HostGone: _host_gone,
    HostReported: _host_reported,
    HostRequested: _host_requested,
    KillRequested: _kill_requested,
    NodeDraining: _node_draining,
    ProcessEnded: _process_ended,
    ProcessStarted: _process_started,
    RunAccepted: _run_accepted,
    RunEnded: _run_ended,
    RunEscalated: _nothing,
    RunProgressed: _run_progressed,
    RunResumed: _run_resumed,
    RunSettling: _run_settling,
    RunStarted: _run_started,
    RunWaiting: _run_waiting,
    TurnAccepted: _turn_accepted,
    TurnEnded: _turn_ended,
    TurnSettling: _turn_settling,
    TurnStarted: _turn_started,
    TurnWaiting: _turn_waiting,
    **CONVERSATION_HANDLERS,
}
