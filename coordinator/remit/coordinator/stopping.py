"""Cancels, deadlines, escalation: how a tree is stopped.

**Rules**

1. `CancelRequested` marks the whole attached subtree in one step. In the same
   step everything that has not begun ends, so nothing below starts afterwards.
2. One order goes to each host that has live runs below, whatever their number.
3. The first cause of a node stays. A repeated cancel is acknowledged; with
   `kill` it shortens the grace.
4. After the grace: a dedicated host is killed; a shared host whose runs are all
   being stopped is killed too; otherwise it is drained and the run that will not
   stop ends `unconfirmed`.
"""

from __future__ import annotations

from remit.coordinator.approving import cancel_approvals
from remit.coordinator.claiming import clear_claims, withdraw_waiting
from remit.coordinator.settling import attempt_cause, settle, settle_report
from remit.coordinator.state import HostState, Node, Pool, WorkspaceState
from remit.coordinator.transaction import Transaction
from remit.core.cause import Cause, CauseKind
from remit.core.errors import Refused
from remit.core.events import (
    AttemptExpired,
    CancelRequested,
    CoordinatorStopping,
    HostDraining,
    KillRequested,
    RunEscalated,
    TurnSettling,
)
from remit.core.messages import CancelAnswer, CancelOrder, CancelRequest, ReportEnded
from remit.core.wellformed import check_number

__all__ = [
    "cancel",
    "cancel_children",
    "cancel_node",
    "client_gone",
    "escalate",
    "expire",
    "expire_attempt",
    "forget_cancels",
    "stop_everything",
]


_IDLE_CANCELS = 1_000
"""Requests that found nothing and are remembered; copies arrive within seconds or never."""


def cancel(tx: Transaction, request: CancelRequest) -> CancelAnswer:
    """Decide a cancel request from outside; sent twice, it is carried out once.

    Raises:
        InvalidArgument: the grace is out of range.
        Refused: a run asks for a stop of what it has not started.
    """
    check_number("grace_s", request.grace_s)
    known = tx.state.cancels.get(request.request_id)
    if known is not None:
        target = known.targets[-1]
        node = tx.state.nodes.get(target)
        cause = node.cause if node is not None else None
        named = target if len(known.targets) == 1 else request.target
        return CancelAnswer(request.request_id, named, True, known.live, cause=cause)
    past = tx.state.idle_cancels.get(request.request_id)
    if past:
        told = f"{past} has ended, and only the journal knows of it"
        return CancelAnswer(request.request_id, past, True, message=told)
    targets = [] if request.request_id in tx.state.idle_cancels else _targets(tx, request)
    if not targets:
        _remember_idle(tx, request)
        what = f"session {request.target!r}" if not _is_node_id(request.target) else request.target
        return CancelAnswer(request.request_id, request.target, False, message=f"no active turn in {what}")
    answers = [_cancel_one(tx, request, node) for node in targets]
    if len(answers) == 1:
        return answers[0]
    accepted = [answer for answer in answers if answer.accepted]
    joint = tx.state.cancels.get(request.request_id)
    if joint is not None and joint.open:
        # The first target may have ended before the others were marked.
        tx.effects.quiet = [name for name in tx.effects.quiet if name != request.request_id]
    return CancelAnswer(
        request.request_id,
        request.target,
        bool(accepted),
        sum(answer.live for answer in accepted),
        cause=accepted[-1].cause if accepted else None,
        nodes=tuple(name for answer in answers for name in answer.nodes),
    )


def _remember_idle(tx: Transaction, request: CancelRequest) -> None:
    """Keep the id of a cancel that found nothing: a late copy must not hit the session's next turn."""
    if request.dry_run:
        return
    idle = tx.state.idle_cancels
    idle[request.request_id] = ""
    while len(idle) > _IDLE_CANCELS:
        del idle[next(iter(idle))]


def forget_cancels(state: WorkspaceState) -> None:
    """Forget cancels of what is pruned, but for their ids: a late copy must not hit the session's next turn."""
    gone = [cancel for cancel in state.cancels.values() if cancel.targets[-1] not in state.nodes]
    for cancel in gone:
        del state.cancels[cancel.request_id]
        state.idle_cancels[cancel.request_id] = cancel.targets[-1]
    while len(state.idle_cancels) > _IDLE_CANCELS:
        del state.idle_cancels[next(iter(state.idle_cancels))]


def _is_node_id(text: str) -> bool:
    return text.startswith(("run_", "turn_"))


def _targets(tx: Transaction, request: CancelRequest) -> list[Node]:
    """Return the nodes that a request means; a foreign user's are not found."""
    if _is_node_id(request.target):
        nodes = [tx.node(name) for name in (request.target, *request.also)]
        found = [node for node in nodes if node is not None]
    else:
        session = tx.state.sessions.get(request.target)
        # The queue first: the end of the active turn must start nothing.
        names = [] if session is None else [*session.queue, session.active]
        found = [tx.state.nodes[name] for name in names if name]
    found = [n for n in found if not (request.user and n.user and n.user != request.user)]
    if request.requester:
        for node in found:
            _check_ancestry(tx, node, request.requester)
    return found


def _check_ancestry(tx: Transaction, node: Node, requester: str) -> None:
    """Refuse a run that wants to stop what it did not start, detached runs of its own aside.

    Raises:
        Refused: the node is neither the requester nor below it.
    """
    current: Node | None = node
    while current is not None:
        if current.id == requester:
            return
        current = tx.node(current.parent_id) if current.parent_id else None
    raise Refused(f"{requester} may stop itself and what it has started; {node.id} is neither")


def _cancel_one(tx: Transaction, request: CancelRequest, node: Node) -> CancelAnswer:
    if node.is_ended:
        return CancelAnswer(
            request.request_id,
            node.id,
            False,
            already=node.outcome,
            cause=node.cause,
            message=f"{node.id} has already ended: {node.outcome}",
        )
    live = tx.state.subtree(node)
    runs = len(live) - node.is_turn
    if request.dry_run:
        names = tuple(below.id for below in live)
        return CancelAnswer(request.request_id, node.id, True, runs, cause=node.cause, nodes=names)
    if node.cause is None:
        cause = Cause(
            request.kind,
            origin=node.id,
            actor=request.actor or request.user,
            surface=request.surface,
            request_id=request.request_id,
            at_unix_ms=int(tx.now * 1000),
            reason=request.reason,
        )
        grace_s = node.grace_s if request.grace_s is None else request.grace_s
        cancel_node(tx, node, cause, grace_s=grace_s, kill=request.kill, trace=request.trace)
    else:
        _join_cancel(tx, node, request.request_id, runs, trace=request.trace)
        if request.kill and not node.kill:
            _kill(tx, node, request.request_id)
    return CancelAnswer(request.request_id, node.id, True, runs, cause=node.cause)


def cancel_node(
    tx: Transaction, node: Node, cause: Cause, *, grace_s: float | None = None, kill: bool = False, trace: str = ""
) -> None:
    """Accept a cancel of a live node: mark its subtree, end what never began, order the rest."""
    if node.is_ended or node.cause is not None:
        return
    grace = node.grace_s if grace_s is None else grace_s
    affected = [n for n in tx.state.subtree(node) if n.cause is None]
    live = len(affected) - node.is_turn
    request_id = cause.request_id or tx.ids.request()
    tx.emit(
        CancelRequested(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            cause=cause,
            request_id=request_id,
            grace_s=grace,
            kill=kill,
            live=live,
            trace=trace,
        )
    )
    withdraw_waiting(tx, affected)
    cancel_approvals(tx, affected)
    if node.is_turn:
        tx.effects.turn_cancelled.append(node.id)
    wait = min(grace, tx.settings.kill_grace_s) if kill else grace
    tx.timers.add(tx.now + wait, "escalate", node.id)
    hosts: set[str] = set()
    # Leaves first, so that a parent that never began ends after its children.
    for other in reversed(affected):
        if other.on_host:
            hosts.add(other.host_id)
        elif not other.live_children and not other.is_ended:
            settle(tx, other)
    _order_hosts(tx, node, hosts, cause, kill=kill)


def _join_cancel(tx: Transaction, node: Node, request_id: str, live: int, *, trace: str = "") -> None:
    """Acknowledge a further cancel of a node: the first cause stays, the new receipt hears of the quiet."""
    tx.emit(
        CancelRequested(
            node_id=node.id,
            turn_id=node.turn_id,
            at=tx.now,
            cause=node.cause,
            request_id=request_id,
            grace_s=node.grace_s,
            kill=node.kill,
            live=live,
            trace=trace,
        )
    )


def _order_hosts(tx: Transaction, node: Node, hosts: set[str], cause: Cause, *, kill: bool) -> None:
    order = CancelOrder(node.id, cause, kill)
    for host_id in hosts:
        tx.effects.cancels.setdefault(host_id, []).append(order)


def _kill(tx: Transaction, node: Node, request_id: str) -> None:
    tx.emit(KillRequested(node_id=node.id, turn_id=node.turn_id, at=tx.now, request_id=request_id))
    if node.cause is not None:
        hosts = {below.host_id for below in tx.state.subtree(node) if below.on_host}
        _order_hosts(tx, node, hosts, node.cause, kill=True)
    tx.timers.add(tx.now + tx.settings.kill_grace_s, "escalate", node.id)


def cancel_children(tx: Transaction, node: Node, kind: CauseKind, reason: str) -> None:
    """Cancel the live children of a node whose own body is over."""
    for name in list(node.live_children or ()):
        child = tx.state.nodes[name]
        cause = Cause(
            kind,
            origin=node.id,
            actor="coordinator",
            surface="coordinator",
            at_unix_ms=int(tx.now * 1000),
            reason=reason,
        )
        cancel_node(tx, child, cause)


def expire(tx: Transaction, node: Node) -> None:
    """Stop a node whose own deadline has passed."""
    if node.is_ended or node.cause is not None or node.deadline_at is None:
        return
    cause = Cause(
        CauseKind.DEADLINE,
        origin=node.id,
        actor="coordinator",
        surface="coordinator",
        at_unix_ms=int(tx.now * 1000),
        reason=f"its deadline of {node.deadline_at - node.accepted_at:g} s has passed",
    )
    cancel_node(tx, node, cause)


def expire_attempt(tx: Transaction, node: Node, attempt: int) -> None:
    """Stop one attempt that took too long; the run may go on with another."""
    if node.is_ended or node.cause is not None or not node.on_host or node.attempt != attempt:
        return
    cause = attempt_cause(tx, node)
    tx.emit(AttemptExpired(node_id=node.id, turn_id=node.turn_id, at=tx.now, attempt=attempt))
    order = CancelOrder(node.id, cause, attempt=attempt)
    tx.effects.cancels.setdefault(node.host_id, []).append(order)
    cancel_children(tx, node, CauseKind.ATTEMPT_TIMEOUT, cause.reason)
    tx.timers.add(tx.now + node.grace_s, "escalate_attempt", node.id, attempt)


def escalate(tx: Transaction, node: Node, attempt: int | None = None) -> None:
    """Use harder means on whatever below a node has outlived the grace."""
    if node.is_ended:
        return
    if attempt is not None:
        if node.on_host and node.attempt == attempt and node.cause is None:
            if node.moved_attempt == attempt and not _may_kill_host_of(tx, node):
                # The others there end too, each in its own grace; none of them is given up on.
                tx.timers.add(
                    tx.now + max(node.grace_s, tx.settings.kill_grace_s), "escalate_attempt", node.id, attempt
                )
                return
            _escalate_run(tx, node)
        return
    for other in reversed(tx.state.subtree(node)):
        if other.is_ended:
            continue
        if other.is_turn:
            _give_up_on_holder(tx, other)
        elif other.on_host and other.cause is not None:
            _escalate_run(tx, other)


def _give_up_on_holder(tx: Transaction, turn: Node, *, report: str = "unconfirmed") -> None:
    """End a cancelled turn whose holder has not said that its body is over, or is gone."""
    if turn.is_ended or turn.report or turn.cause is None:
        return
    tx.emit(TurnSettling(node_id=turn.id, turn_id=turn.id, at=tx.now, report=report))
    settle(tx, turn)


def _escalate_run(tx: Transaction, run: Node) -> None:
    host = tx.state.hosts.get(run.host_id)
    if host is None:
        settle_report(tx, run, ReportEnded(run.id, run.attempt, "lost", before_cancel=False))
        return
    if host.killed:
        return
    alone = run.pool is Pool.DEDICATED or _all_being_stopped(tx, host)
    step = "kill_host" if alone else "drain_host"
    tx.emit(RunEscalated(node_id=run.id, turn_id=run.turn_id, at=tx.now, host_id=host.id, step=step))
    reason = f"{run.id} did not stop within its grace"
    if alone:
        # Its end is reported by the death of the host, not guessed here.
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=reason, kill=True))
        tx.effects.kill.append((host.id, reason))
        return
    if not host.draining:
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=reason))
    settle_report(tx, run, ReportEnded(run.id, run.attempt, "stuck", before_cancel=False))


def _may_kill_host_of(tx: Transaction, run: Node) -> bool:
    host = tx.state.hosts.get(run.host_id)
    return host is None or run.pool is Pool.DEDICATED or _all_being_stopped(tx, host)


def _all_being_stopped(tx: Transaction, host: HostState) -> bool:
    """Tell whether killing a shared host would hit nothing that should live there."""
    now, nodes = tx.now, tx.state.nodes
    return all(
        nodes[name].moved_attempt == nodes[name].attempt
        if nodes[name].cause is None
        else nodes[name].kill or nodes[name].cancel_at + nodes[name].grace_s <= now + 1e-6
        for name in host.runs
    )


def client_gone(tx: Transaction, client_id: str, reason: str) -> None:
    """Cancel the turns that a vanished client held, unless they were told to go on."""
    # Later ones first: the end of an active turn must not start one that waits behind it.
    for turn in reversed(list(tx.state.turns.values())):
        if turn.client_id != client_id:
            continue
        if turn.is_ended:
            clear_claims(tx, turn.id)
            if turn.unconfirmed:
                # Its body went on until now, and may have started programs.
                tx.effects.orphans.append(("", turn.id))
            continue
        # A turn whose body never began has nothing to go on with.
        if turn.on_disconnect == "cancel" or turn.started_at is None:
            cause = Cause(
                CauseKind.PARENT_LOST,
                origin=turn.id,
                actor=client_id,
                surface="coordinator",
                at_unix_ms=int(tx.now * 1000),
                reason=reason,
            )
            cancel_node(tx, turn, cause)
            _give_up_on_holder(tx, turn, report="vanished")
        elif not turn.report:
            tx.emit(TurnSettling(node_id=turn.id, turn_id=turn.id, at=tx.now, report="follow"))
            # Its runs go on; what its holder had started itself has nobody any more.
            tx.effects.orphans.append(("", turn.id))
            settle(tx, turn)


def stop_everything(tx: Transaction, reason: str) -> None:
    """Take no new turns and cancel all that live."""
    if not tx.state.stopping:
        tx.emit(CoordinatorStopping(node_id="", turn_id="", at=tx.now, reason=reason))
    roots = [n for n in tx.state.nodes.values() if n.is_turn or n.detached]
    for node in reversed(roots):
        if node.is_ended:
            continue
        cause = Cause(
            CauseKind.SHUTDOWN,
            origin=node.id,
            actor="coordinator",
            surface="coordinator",
            at_unix_ms=int(tx.now * 1000),
            reason=reason,
        )
        cancel_node(tx, node, cause)
