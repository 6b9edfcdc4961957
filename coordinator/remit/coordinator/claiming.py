"""Claims of turns and runs: the decider's dealings with the lock table.

The table decides and changes itself; what it decided goes to the journal as
`ClaimChanged`, and the same event finds itself applied already. Folding the
journal gives the same table.

**Rules**

1. Nobody asks, waits or is granted after a cancel has reached it: a cancel takes
   its whole subtree out of line in its own step.
2. The terminal event of a node, and the end of an attempt, end all its claims in
   the same step. What may still write is quarantined until it is proven gone.
3. A workspace without claims pays for none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

from remit.coordinator.state import Node, ProcessState, WorkspaceState
from remit.coordinator.transaction import Transaction
from remit.core.errors import NotFound, Refused, RemitError, TurnCancelled
from remit.core.events import ClaimChanged, GitLocksFound
from remit.core.messages import AskClaim, ClaimAnswer, ClaimCheck, ClaimNotice, GiveUpClaim
from remit.locks import (
    Area,
    ClaimRequest,
    ClaimState,
    ClaimTimeout,
    ClaimWithdrawn,
    Granted,
    LeaseNotHeld,
    LockEvent,
    Queued,
    WaitersOf,
    WithdrawReason,
    event_to_dict,
)
from remit.locks import Refused as ClaimDenied

__all__ = [
    "answer_claim",
    "check_claim",
    "clear_claims",
    "clear_host",
    "clear_swept",
    "end_claims",
    "expire_claim",
    "give_up_claim",
    "held_claims",
    "missed_notice",
    "note_git_locks",
    "request_start",
    "start_claim_id",
    "start_sweeps",
    "wait_cycle_over_claims",
    "withdraw_waiting",
]


def start_claim_id(node: Node) -> str:
    """Return the id of the claim that a run's next attempt takes before its slot."""
    return f"claim_of_{node.id}_{node.attempt + 1}"


def answer_claim(tx: Transaction, request: AskClaim) -> ClaimAnswer:
    """Grant areas to a body, or put it in line; asked twice, it is asked once.

    Raises:
        NotFound: no such turn or run.
        TurnCancelled: it is being cancelled; nothing is held or queued.
        Refused: it has ended, or the request is of an earlier attempt.
        ClaimRefused, InvalidClaim: what the table says.
    """
    node = tx.node(request.owner_id)
    if node is None:
        raise NotFound(f"no turn or run {request.owner_id!r} in this workspace; it cannot claim")
    _check_may_ask(node, request.attempt)
    areas = tuple(Area.from_dict(dict(area)) for area in request.areas)
    expires_at = None if request.timeout_s is None else tx.now + request.timeout_s
    denied = _request(tx, node, request.claim_id, areas, expires_at)
    if denied is not None:
        raise denied.error()
    view = tx.state.locks.claim(request.claim_id)
    assert view is not None  # granted or queued just now
    if view.state is ClaimState.QUEUED and request.timeout_s is not None:
        tx.timers.add(tx.now + request.timeout_s, "claim", request.claim_id)
    return ClaimAnswer(request.claim_id, view.token, view.held_by)


def _check_may_ask(node: Node, attempt: int) -> None:
    if node.cause is not None:
        raise TurnCancelled(node.cause, node_id=node.id)
    if node.is_ended or node.report:
        raise Refused(f"{node.id} has ended and cannot claim any more")
    if node.is_turn:
        return
    if attempt != node.attempt or not node.on_host or attempt in (node.expired_attempt, node.moved_attempt):
        raise Refused(f"attempt {attempt} of {node.id} is over and cannot claim any more")


def request_start(tx: Transaction, node: Node) -> RemitError | None:
    """Ask for what a run must hold before it takes a slot; return why it is refused, or None."""
    areas = tuple(Area.from_dict(dict(area)) for area in node.claims)
    denied = _request(tx, node, start_claim_id(node), areas)
    return None if denied is None else denied.error()


def _request(
    tx: Transaction, node: Node, claim_id: str, areas: tuple[Area, ...], expires_at: float | None = None
) -> ClaimDenied | None:
    locks = tx.state.locks
    ancestors = tuple(ancestor.id for ancestor in tx.state.ancestors(node))
    before = locks.last_seq
    answer = locks.request(
        ClaimRequest(claim_id, node.id, areas, ancestors, tx.now),
        waiters_of=_waiters_of(tx.state),
    )
    if isinstance(answer, ClaimDenied):
        return answer
    if answer.seq > before:
        _emit(tx, (answer,), expires_at if isinstance(answer, Queued) else None)
    return None


def _waiters_of(state: WorkspaceState) -> WaitersOf:
    """Return who waits for the end of a node: its parent, what comes after it, who awaits it."""

    def found(name: str) -> Iterable[str]:
        node = state.nodes.get(name)
        if node is None:
            return
        if node.parent_id and not node.detached:
            yield node.parent_id
        yield from node.dependents or ()
        for waiter in state.awaited.get(name, ()):
            # A wait that a cancel has broken is about to end, whatever becomes of this node.
            if state.nodes[waiter].cause is None:
                yield waiter

    return found


def wait_cycle_over_claims(state: WorkspaceState, waiter: Node, on: Iterable[str]) -> list[str] | None:
    """Return the cycle of claims and waits that waiting for these runs would close, or None."""
    if state.locks.is_idle:
        return None
    own = waiter.live_children or {}
    ancestors = [ancestor.id for ancestor in state.ancestors(waiter)]
    for name in on:
        target = state.nodes.get(name)
        if name in own or target is None or target.is_ended:
            continue
        cycle = state.locks.find_cycle(waiter.id, name, ancestors=ancestors, waiters_of=_waiters_of(state))
        if cycle:
            return [edge.waiter for edge in cycle] + [cycle[-1].awaited]
    return None


def give_up_claim(tx: Transaction, request: GiveUpClaim) -> None:
    """Release a lease or take a request back, wherever it is.

    Raises:
        NotFound: no such turn or run.
        LeaseNotHeld: the claim is somebody else's.
    """
    node = tx.node(request.owner_id)
    if node is None:
        raise NotFound(f"no turn or run {request.owner_id!r} in this workspace")
    if node.is_ended:
        return  # with it ended all that it had
    locks = tx.state.locks
    view = locks.claim(request.claim_id)
    if view is not None and view.state is ClaimState.GRANTED:
        _emit(tx, locks.release(request.claim_id, request.owner_id, at=tx.now))
    else:
        _emit(tx, locks.withdraw(request.claim_id, request.owner_id, at=tx.now))


def check_claim(state: WorkspaceState, request: ClaimCheck) -> int:
    """Return the fencing token under which a writer may write now.

    Raises:
        TurnCancelled: the writer is being cancelled, and this is not for its clean-up.
        LeaseNotHeld: the lease is over.
        PathNotClaimed: no lease covers the area, or it is lent to a child just now.
    """
    node = state.nodes.get(request.owner_id)
    if node is not None and node.cause is not None and not request.in_clean_up:
        raise TurnCancelled(node.cause, node_id=node.id)
    if request.area is not None:
        return state.locks.check(request.owner_id, Area.from_dict(dict(request.area)))
    view = state.locks.claim(request.claim_id)
    held = view is not None and view.owner == request.owner_id
    if not held or not state.locks.holds(request.claim_id, request.token):
        raise LeaseNotHeld(
            f"{request.owner_id} does not hold lease {request.claim_id} with token {request.token} any more",
            claim_id=request.claim_id,
        )
    return request.token


def missed_notice(state: WorkspaceState, claim_id: str) -> tuple[ClaimNotice, ...]:
    """Return what somebody who has not been heard of may have missed about a claim in line."""
    view = state.locks.claim(claim_id)
    if view is None:
        told = f"claim {claim_id} left the line while its owner could not be reached; ask for it again"
        return (ClaimNotice(claim_id, error=ClaimWithdrawn(told, claim_id=claim_id)),)
    return (ClaimNotice(claim_id, view.token),) if view.state is ClaimState.GRANTED else ()


def expire_claim(tx: Transaction, claim_id: str) -> None:
    """Take a request out of line whose own timeout has passed; a granted one stays."""
    locks = tx.state.locks
    view = locks.claim(claim_id)
    if view is None or view.state is not ClaimState.QUEUED:
        return
    _emit(tx, locks.withdraw(claim_id, view.owner, at=tx.now, reason=WithdrawReason.TIMEOUT))
    waited_s = tx.now - view.since
    holders = ", ".join(view.held_by or view.behind)
    error = ClaimTimeout(
        f"{' and '.join(view.wants)} was not granted within {waited_s:g} s; it waited for {holders}",
        claim_id=claim_id,
        waited_s=waited_s,
        held_by=view.held_by,
    )
    tx.effects.claims.append((view.owner, ClaimNotice(claim_id, error=error)))


def withdraw_waiting(tx: Transaction, nodes: Iterable[Node]) -> None:
    """Take all that these nodes wait for out of line; what they hold stays."""
    if not tx.state.locks.is_idle:
        _emit(tx, tx.state.locks.withdraw_waiting([node.id for node in nodes], at=tx.now))


def end_claims(tx: Transaction, node: Node, doubt: str = "") -> None:
    """End all claims of a node that has ended, or whose attempt has.

    Args:
        tx: the decision.
        node: whose claims.
        doubt: why it may still write; then what it holds is quarantined.
    """
    if tx.state.locks.concerns(node.id):
        _emit(tx, tx.state.locks.end([node.id], at=tx.now, quarantine=doubt))


def held_claims(tx: Transaction, node: Node) -> list[str]:
    """Return what a node may write just now, in words."""
    if not tx.state.locks.concerns(node.id):
        return []
    held = [view for view in tx.state.locks.claims(node.id) if view.state is ClaimState.GRANTED]
    return [" and ".join(view.wants) for view in held]


def clear_claims(tx: Transaction, owner: str) -> None:
    """Free what is quarantined for a node that is proven gone, or vouched for."""
    if tx.state.locks.concerns(owner):
        _emit(tx, tx.state.locks.clear(owner, at=tx.now))


def note_git_locks(tx: Transaction, node_id: str, removed: tuple[str, ...], left: tuple[str, ...]) -> None:
    """Journal what became of the git locks where a program of a node was killed, if there were any."""
    node = tx.node(node_id)
    if node is not None and (removed or left):
        tx.emit(GitLocksFound(node_id=node.id, turn_id=node.turn_id, at=tx.now, removed=removed, left=left))


def clear_host(tx: Transaction, host_id: str) -> None:
    """Free what bodies on a host had held that would not stop: they went with the host."""
    for node in _quarantined(tx):
        if node.host_id != host_id or not node.is_ended:
            continue
        left = _left_behind(node)
        if not left:
            clear_claims(tx, node.id)
        else:
            _sweep_once(tx, node, left)


def clear_swept(tx: Transaction, node_id: str) -> None:
    """Free what is quarantined for a node whose programs are proven gone, unless its body may be at work still."""
    node = tx.node(node_id)
    if node is None or not _may_be_at_work(tx, node):
        clear_claims(tx, node_id)


def clear_if_gone(tx: Transaction, node: Node) -> None:
    """Free what is quarantined for a node once no program is left that could still write there.

    For programs that were seen to end otherwise than by a sweep: by a next attempt
    that had found them again, or by a witness.
    """
    if tx.state.locks.concerns(node.id) and not (node.old_processes or node.processes):
        quarantined = any(view.state is ClaimState.QUARANTINED for view in tx.state.locks.claims(node.id))
        if quarantined and not _may_be_at_work(tx, node):
            clear_claims(tx, node.id)


def _may_be_at_work(tx: Transaction, node: Node) -> bool:
    """Tell whether a body that was given up on may be on its host still: the end of the host is the proof then."""
    return node.is_ended and node.unconfirmed and node.host_id in tx.state.hosts


def start_sweeps(tx: Transaction) -> None:
    """End again what earlier lives have not proven gone: whether they had begun to is not known.

    The proof frees claims.
    """
    for node in tx.state.nodes.values():
        if node.is_ended and not _may_be_at_work(tx, node):
            _sweep_once(tx, node, _left_behind(node))
    for node in _quarantined(tx):
        if not node.is_ended:
            _sweep_once(tx, node, _left_behind(node))
        clear_if_gone(tx, node)


def _left_behind(node: Node) -> list[ProcessState]:
    """Return the programs of a node that may be there still, without those of an attempt that runs."""
    now = {} if node.on_host else node.processes or {}
    return list({**(node.old_processes or {}), **now}.values())


def _sweep_once(tx: Transaction, node: Node, processes: list[ProcessState]) -> None:
    known = {process.pid for run_id, process in tx.effects.sweep if run_id == node.id}
    tx.effects.sweep.extend((node.id, process) for process in processes if process.pid not in known)


def _quarantined(tx: Transaction) -> list[Node]:
    if tx.state.locks.is_idle:
        return []
    owners = {view.owner: None for view in tx.state.locks.claims() if view.state is ClaimState.QUARANTINED}
    return [tx.state.nodes[owner] for owner in owners if owner in tx.state.nodes]


def _emit(tx: Transaction, changes: Iterable[LockEvent], expires_at: float | None = None) -> None:
    """Journal what the table has decided, and tell those whose turn has come."""
    for change in changes:
        owner = change.request.owner if isinstance(change, Queued) else change.owner
        node = tx.state.nodes.get(owner)
        turn_id = node.turn_id if node is not None else ""
        told = event_to_dict(change)
        tx.emit(ClaimChanged(node_id=owner, turn_id=turn_id, at=tx.now, change=told, expires_at=expires_at))
        if isinstance(change, Granted) and change.request is None and node is not None and not _is_start(node, change):
            tx.effects.claims.append((owner, ClaimNotice(change.claim_id, change.token)))


def _is_start(node: Node, change: Granted) -> bool:
    return change.claim_id == start_claim_id(node)
