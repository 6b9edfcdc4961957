"""What is let in: turns and delegations, checked as a whole before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remit.coordinator.moving import move_cause
from remit.coordinator.settling import attempt_cause, claim_start, end_blocked, start_turns
from remit.coordinator.spending import check_session_budget
from remit.coordinator.state import Node, NodeState
from remit.coordinator.stopping import cancel_node
from remit.coordinator.transaction import Transaction
from remit.coordinator.waiting import closed_cycle
from remit.core.cause import Cause, CauseKind
from remit.core.errors import (
    ArgumentTooLarge,
    ChildLimitExceeded,
    CoordinatorClosing,
    DependencyError,
    DepthExceeded,
    InvalidArgument,
    NotFound,
    Refused,
    RemitError,
    SessionBusy,
    TurnCancelled,
)
from remit.core.events import DelegationRefused, RunAccepted, TurnAccepted
from remit.core.limits import Limits
from remit.core.messages import DelegateRequest, OpenTurn, RunRequest
from remit.core.outcome import Outcome
from remit.core.wellformed import check_number

__all__ = ["delegate", "open_turn"]


def open_turn(tx: Transaction, request: OpenTurn) -> None:
    """Accept a turn; it starts at once unless its session is busy.

    Raises:
        CoordinatorClosing: the coordinator takes no new turns.
        SessionBusy: `busy="reject"` and another turn of the session has not ended; or
            `busy="interrupt"` and one of them is another user's.
        BudgetExceeded: the session has nothing left to spend.
        InvalidArgument: `busy`, `on_disconnect` or `on_failure` is not one of its words, or a time is out of range.
    """
    if request.turn_id in tx.state.nodes or request.turn_id in tx.state.past_turns:
        return
    if tx.state.stopping:
        raise CoordinatorClosing(
            "the coordinator of this workspace is closing and takes no new turn; "
            "wait until it is gone and open the workspace again"
        )
    _check_word("busy", request.busy, ("reject", "queue", "interrupt"))
    _check_word("on_disconnect", request.on_disconnect, ("cancel", "continue"))
    _check_word("on_failure", request.on_failure, ("continue", "stop"))
    check_number("deadline_s", request.deadline_s, above_zero=True)
    check_number("grace_s", request.grace_s)
    check_session_budget(tx, request)
    session = tx.state.sessions.get(request.session_id)
    if session is not None and (session.active or session.queue):
        running = session.active or session.queue[0]
        if request.busy == "reject":
            raise SessionBusy(
                f"session {request.session_id!r} is busy with {running}; wait for it, "
                'or open the turn with busy="queue" or busy="interrupt"',
                turn_id=running,
            )
        if request.busy == "interrupt":
            _check_user(tx, [*session.queue, running], request)
            # The queue first: the end of the active turn must start nothing of it.
            _interrupt(tx, [*session.queue, running], request)
    limits = request.limits or Limits()
    budget = request.session_limits or Limits()
    tx.emit(
        TurnAccepted(
            node_id=request.turn_id,
            turn_id=request.turn_id,
            at=tx.now,
            session_id=request.session_id,
            name=request.name,
            user=request.user,
            client_id=request.client_id,
            surface=request.surface,
            on_disconnect=request.on_disconnect,
            deadline_at=_deadline(tx, request.deadline_s),
            grace_s=request.grace_s,
            max_depth=limits.max_depth,
            max_children=limits.max_children,
            max_concurrent=limits.max_concurrent,
            trace=request.trace,
            max_tokens=limits.tokens,
            max_cost=limits.cost,
            session_tokens=budget.tokens,
            session_cost=budget.cost,
            approvals=request.approvals,
            on_failure=request.on_failure,
        )
    )
    if request.deadline_s is not None:
        tx.timers.add(tx.now + request.deadline_s, "deadline", request.turn_id)
    start_turns(tx, request.session_id)


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise InvalidArgument(f"{name} must be one of {', '.join(words)}, not {value!r}")


def _check_user(tx: Transaction, turn_ids: Iterable[str], request: OpenTurn) -> None:
    """Refuse to interrupt what another user runs in the same session."""
    for turn_id in turn_ids:
        owner = tx.state.nodes[turn_id].user
        if owner and request.user and owner != request.user:
            raise SessionBusy(
                f"session {request.session_id!r} is busy with {turn_id}, which belongs to {owner!r}; wait for it",
                turn_id=turn_id,
            )


def _deadline(tx: Transaction, deadline_s: float | None) -> float | None:
    return None if deadline_s is None else tx.now + deadline_s


def _interrupt(tx: Transaction, turn_ids: Iterable[str], request: OpenTurn) -> None:
    """Cancel everything of the session that was accepted before this turn."""
    for turn_id in list(dict.fromkeys(turn_ids)):
        cause = Cause(
            CauseKind.USER_INTERRUPT,
            origin=turn_id,
            actor=request.user or request.client_id,
            surface=request.surface,
            at_unix_ms=int(tx.now * 1000),
            reason=f"superseded by {request.turn_id}",
        )
        cancel_node(tx, tx.state.nodes[turn_id], cause)


def delegate(tx: Transaction, request: DelegateRequest) -> tuple[Node, ...]:
    """Accept all runs of a delegation, or none of them.

    Raises:
        TurnCancelled: the parent is being cancelled; nothing was started.
        NotFound: no such parent.
        Refused: the parent has ended, or the request is of an earlier attempt.
        DepthExceeded, ChildLimitExceeded, DependencyError, ArgumentTooLarge,
        CoordinatorClosing: the request does not hold.
    """
    parent = tx.node(request.parent_id)
    if parent is None:
        raise NotFound(f"no turn or run {request.parent_id!r} in this workspace; it cannot delegate")
    known = [tx.node(run.run_id) for run in request.runs]
    if request.runs and all(known):
        return ()
    error = _refusal(tx, parent, request)
    if error is not None:
        tx.emit(
            DelegationRefused(
                node_id=parent.id,
                turn_id=parent.turn_id,
                at=tx.now,
                code=error.code,
                reason=str(error),
                run_ids=tuple(run.run_id for run in request.runs),
            )
        )
        raise error
    accepted = tuple(_accept(tx, parent, request, run) for run in request.runs)
    for node in accepted:
        if node.after and not node.is_ended:
            _block_if_hopeless(tx, node)
        if node.state is NodeState.CLAIMING:
            claim_start(tx, node)
    return accepted


def _refusal(tx: Transaction, parent: Node, request: DelegateRequest) -> RemitError | TurnCancelled | None:
    """Return why a delegation is refused, or None."""
    if parent.cause is not None and not parent.is_ended:
        return TurnCancelled(parent.cause, node_id=parent.id)
    if parent.is_ended or parent.report:
        if parent.cause is not None:
            return TurnCancelled(parent.cause, node_id=parent.id)
        return Refused(f"{parent.id} has ended and cannot delegate any more")
    stale = _stale_attempt(tx, parent, request)
    if stale is not None:
        return stale
    if tx.state.stopping:
        return CoordinatorClosing("the coordinator of this workspace is closing")
    return (
        _too_deep(tx, parent)
        or _too_many(tx, parent, len(request.runs))
        or _too_large(tx, request)
        or _bad_number(request)
        or _bad_dependency(tx, parent, request)
    )


def _stale_attempt(tx: Transaction, parent: Node, request: DelegateRequest) -> RemitError | TurnCancelled | None:
    """Refuse what no living body can have asked for."""
    if parent.is_turn:
        return (
            None if parent.started_at is not None else Refused(f"{parent.id} has not started; it cannot delegate yet")
        )
    if request.parent_attempt != parent.attempt or not parent.on_host:
        now = f"attempt {parent.attempt} runs now" if parent.on_host else "none runs now"
        return Refused(f"attempt {request.parent_attempt} of {parent.id} is over ({now}) and cannot delegate any more")
    if parent.expired_attempt == parent.attempt:
        return TurnCancelled(attempt_cause(tx, parent), node_id=parent.id)
    if parent.moved_attempt == parent.attempt:
        return TurnCancelled(move_cause(tx, parent), node_id=parent.id)
    return None


def _too_deep(tx: Transaction, parent: Node) -> DepthExceeded | None:
    depth = parent.depth + 1
    allowed, where = tx.settings.max_depth, "the workspace"
    for node in reversed([parent, *tx.state.ancestors(parent)]):
        limits = node.limits
        if limits is None or limits.max_depth is None:
            continue
        # A turn may raise the workspace's default; runs can only narrow it.
        if node.is_turn or node.depth + limits.max_depth < allowed:
            allowed, where = node.depth + limits.max_depth, node.id
    if depth <= allowed:
        return None
    return DepthExceeded(
        f"{parent.id} is at depth {parent.depth} and may not delegate: {where} allows "
        f"{allowed} levels; raise max_depth in the turn's limits if that is meant"
    )


def _too_many(tx: Transaction, parent: Node, count: int) -> ChildLimitExceeded | None:
    allowed = tx.settings.max_children
    for node in reversed([parent, *tx.state.ancestors(parent)]):
        own = node.limits.max_children if node.limits is not None else None
        # As with depth: a turn may raise the default, runs can only narrow it.
        if own is not None and (node.is_turn or allowed is None or own < allowed):
            allowed = own
    if allowed is None or parent.child_count + count <= allowed:
        return None
    return ChildLimitExceeded(
        f"{parent.id} has delegated {parent.child_count} runs and asks for {count} more; max_children is {allowed}"
    )


def _too_large(tx: Transaction, request: DelegateRequest) -> ArgumentTooLarge | None:
    limit = tx.settings.max_result_bytes
    for run in request.runs:
        if len(run.arguments) > limit:
            return ArgumentTooLarge(
                f"the arguments of {run.name or run.agent_name!r} are {len(run.arguments)} bytes "
                f"pickled; the limit is {limit}: pass a path instead of the data"
            )
    return None


def _bad_number(request: DelegateRequest) -> InvalidArgument | None:
    try:
        for run in request.runs:
            check_number("deadline_s", run.deadline_s, above_zero=True)
            check_number("attempt_timeout_s", run.attempt_timeout_s, above_zero=True)
            check_number("grace_s", run.grace_s)
            if run.retries or run.retry_delay_s:
                check_number("retries", run.retries, whole=True)
                check_number("retry_delay_s", run.retry_delay_s)
    except InvalidArgument as error:
        return error
    return None


def _bad_dependency(
    tx: Transaction, parent: Node, request: DelegateRequest
) -> DependencyError | InvalidArgument | None:
    """Check ids, `after` and cycles of a whole batch; O(runs + dependencies)."""
    batch = {run.run_id: run for run in request.runs}
    if len(batch) != len(request.runs):
        return DependencyError("two runs of one delegation have the same id")
    if any(run.run_id in tx.state.nodes for run in request.runs):
        return DependencyError("a run of this delegation exists already, others do not")
    if not any(run.after for run in request.runs):
        return None
    above = {node.id for node in [parent, *tx.state.ancestors(parent)]}
    for run in request.runs:
        for name in run.after:
            if name in above:
                return DependencyError(
                    f"{run.name or run.run_id!r} comes after {name}, which delegates it: it could never start"
                )
            if name in batch:
                continue
            other = tx.state.nodes.get(name)
            if other is None:
                return DependencyError(f"{run.name or run.run_id!r} comes after unknown {name!r}")
            if other.is_turn:
                return DependencyError(f"{run.name or run.run_id!r} comes after {name}, which is no run but a turn")
    cycle = _cycle(batch, lambda run: [name for name in run.after if name in batch])
    if cycle:
        path = " -> ".join(batch[name].name or name for name in cycle)
        return DependencyError(f"runs come after each other in a circle: {path}")
    return _waited_for(tx, parent, request)


def _waited_for(tx: Transaction, parent: Node, request: DelegateRequest) -> DependencyError | None:
    """Refuse runs that come after something that waits for their parent, or for its claims: neither could ever end."""
    before = {name for run in request.runs if not run.detached for name in run.after if name in tx.state.nodes}
    cycle = closed_cycle(tx.state, parent, before - (parent.live_children or {}).keys())
    if cycle is None:
        return None
    return DependencyError("runs would wait for each other: " + " -> ".join(cycle))


def _cycle(batch: dict[str, RunRequest], edges: Callable[[RunRequest], list[str]]) -> list[str] | None:
    """Return one cycle, first node repeated at its end, or None. Iterative depth-first search."""
    done: set[str] = set()
    for root in batch:
        if root in done:
            continue
        path: list[str] = [root]
        on_path = {root}
        stack = [iter(edges(batch[root]))]
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                last = path.pop()
                on_path.discard(last)
                done.add(last)
            elif following in on_path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                on_path.add(following)
                stack.append(iter(edges(batch[following])))
    return None


def _accept(tx: Transaction, parent: Node, request: DelegateRequest, run: RunRequest) -> Node:
    limits = run.limits
    tx.emit(
        RunAccepted(
            node_id=run.run_id,
            turn_id=parent.turn_id,
            at=tx.now,
            parent_id=parent.id,
            agent=run.agent_name,
            name=run.name,
            depth=parent.depth + 1,
            client_id=request.client_id,
            pool=run.pool,
            env_key=request.env_key,
            resources_key=run.resources_key,
            after=run.after,
            deadline_at=_deadline(tx, run.deadline_s),
            retries=run.retries,
            retry_delay_s=run.retry_delay_s,
            attempt_timeout_s=run.attempt_timeout_s,
            detached=run.detached,
            grace_s=parent.grace_s if run.grace_s is None else run.grace_s,
            max_depth=limits.max_depth if limits else None,
            max_children=limits.max_children if limits else None,
            max_concurrent=limits.max_concurrent if limits else None,
            arguments=run.preview,
            claims=run.claims,
            trace=request.trace,
            max_tokens=limits.tokens if limits else None,
            max_cost=limits.cost if limits else None,
            approvals=run.approvals,
        )
    )
    if run.deadline_s is not None:
        tx.timers.add(tx.now + run.deadline_s, "deadline", run.run_id)
    return tx.state.nodes[run.run_id]


def _block_if_hopeless(tx: Transaction, node: Node) -> None:
    """End a run at once if something it comes after has already not succeeded."""
    for name in node.after:
        other = tx.state.nodes.get(name)
        if other is not None and other.is_ended and other.outcome is not Outcome.SUCCEEDED:
            if node.state in (NodeState.DEPENDING, NodeState.CLAIMING, NodeState.QUEUED):
                end_blocked(tx, node, other)
            return
