"""What a restarted coordinator decides: every run is settled by what is really there.

The shell asks the hosts before this life begins and hands in what they said, as a
`Survey`. The rules, for each run that had a body when the life before ended:

1. Its host has the attempt, or its report under way: it is re-attached. Nothing is
   journalled, since nothing has changed; the report comes, or comes again.
2. Its host is there and has never received the attempt: the order to start it died
   with the coordinator, and is sent again, as the same attempt. The host refuses
   orders of earlier lives from its inventory on, so it cannot have both.
3. Its host is gone: what holds for any host that dies. Another attempt if the run
   was promised one, else `lost`, or `cancelled` where that had been requested.
4. Its host is there and does not answer: it is killed, and its runs are settled
   when it is proven dead, not before: until then they keep their claims.

A host that had not come up when the life before ended has never been sent anything.
Nobody waits for it: it is taken in when it answers, as in any life.

What had not begun waits on, with its place in line. What can never begin, because
nobody has its arguments any more, is `lost`. A cancel that was accepted is ordered
again: the order may never have left. A turn goes on if its holder comes back
within its grace; the shell looks after that.

**Invariants**

1. Nothing here starts an attempt that may have been begun.
2. Nothing here ends a run of which a living host may still report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remit.coordinator.moving import move_cause
from remit.coordinator.settling import attempt_cause, settle, settle_report
from remit.coordinator.state import HostState, Node, NodeState
from remit.coordinator.transaction import Transaction
from remit.core.cause import Cause, CauseKind
from remit.core.events import HostDraining, ProcessEnded
from remit.core.messages import CancelOrder, HostInventory, LiveAttempt, ReportEnded, ReportResume, ReportWaiting

__all__ = ["Survey", "missing_hosts", "note_programs", "recover", "unstartable_runs"]

_RESTARTED = "CoordinatorRestarted"


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found when a coordinator was begun again."""

    hosts: Mapping[str, HostInventory] = field(default_factory=dict[str, HostInventory])
    """Hosts that answered, by id, and what they said."""
    silent: frozenset[str] = frozenset()
    """Hosts that are there and did not answer within the bound."""
    coming: frozenset[str] = frozenset()
    """Hosts that are there, had not come up in the life before, and were not asked."""
    startable: frozenset[str] = frozenset()
    """Runs whose agent and arguments are at hand, so that an attempt of them can be begun."""
    programs_gone: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Run -> its programs, by process id, that a witness outside of the hosts has proven gone."""


def unstartable_runs(tx: Transaction, survey: Survey) -> set[str]:
    """Return the live runs of which no attempt can be begun any more."""
    live = (node.id for node in tx.state.nodes.values() if not node.is_turn and not node.is_ended)
    return {name for name in live if name not in survey.startable}


def missing_hosts(tx: Transaction, survey: Survey) -> list[str]:
    """Return the hosts that were there in the life before and are not now."""
    there = survey.hosts.keys() | survey.silent | survey.coming
    return [name for name in tx.state.hosts if name not in there]


def recover(tx: Transaction, survey: Survey) -> list[ReportWaiting | ReportResume]:
    """Settle what the life before has left, once its missing hosts are dropped.

    Returns:
        What re-attached bodies wait for and ask for: reports of theirs that left no
        trace in the journal, to be taken as if they came now.
    """
    asked: list[ReportWaiting | ReportResume] = []
    for host in list(tx.state.hosts.values()):
        inventory = survey.hosts.get(host.id)
        if inventory is not None and not host.killed:
            asked += _attach(tx, host, inventory)
        elif host.id not in survey.coming:
            _end_host(tx, host)
    _settle_rest(tx)
    _arm(tx)
    for node in list(tx.state.nodes.values()):
        if not node.is_ended and node.cause is not None and _is_topmost(tx, node):
            _cancel_again(tx, node, node.cause)
    return asked


def note_programs(tx: Transaction, survey: Survey) -> None:
    """Journal the ends of programs that ended while nobody could be told."""
    for run_id, pids in survey.programs_gone.items():
        node = tx.state.nodes.get(run_id)
        if node is None or node.is_ended:
            continue
        known = {**(node.old_processes or {}), **(node.processes or {})}
        for pid in sorted(pids & known.keys()):
            tx.emit(ProcessEnded(node_id=run_id, turn_id=node.turn_id, at=tx.now, pid=pid))


def _end_host(tx: Transaction, host: HostState) -> None:
    """Kill a host that was to be killed, or that does not answer; its death settles its runs."""
    reason = "it was to be ended" if host.killed else "it did not answer when its coordinator was restarted"
    if not host.killed:
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=reason, kill=True))
    tx.effects.kill.append((host.id, reason))


def _attach(tx: Transaction, host: HostState, inventory: HostInventory) -> list[ReportWaiting | ReportResume]:
    there = {(attempt.run_id, attempt.attempt): attempt for attempt in inventory.attempts}
    asked: list[ReportWaiting | ReportResume] = []
    for run in [tx.state.nodes[name] for name in host.runs]:
        found = there.pop((run.id, run.attempt), None)
        if found is not None:
            asked += _what_it_asks(run, found)
        else:
            _start_again(tx, run)
    for attempt in there.values():
        _stop_stale(tx, host, attempt)
    return asked


def _what_it_asks(run: Node, found: LiveAttempt) -> list[ReportWaiting | ReportResume]:
    """Return the reports of a body that may have been taken without a trace."""
    if found.reported or run.cause is not None:
        return []
    if found.waiting is not None and found.waiting.on != run.waiting_on:
        return [found.waiting]
    return [ReportResume(run.id, run.attempt)] if found.resuming else []


def _start_again(tx: Transaction, run: Node) -> None:
    """Order again a start that its host has never received, unless it should not begin any more."""
    word, reason = "", ""
    if run.cause is not None:
        word = "cancelled"
    elif run.expired_attempt == run.attempt:
        word, reason = "timed_out", attempt_cause(tx, run).reason
    elif run.moved_attempt == run.attempt:
        word = "moved"
    elif run.id in tx.unstartable:
        word, reason = "lost", "its coordinator was restarted before it had begun, and its arguments are gone"
    if not word:
        tx.effects.starts.setdefault(run.host_id, []).append(run.id)
        return
    error_type = _RESTARTED if word == "lost" else ""
    report = ReportEnded(run.id, run.attempt, word, before_cancel=False, error_type=error_type, error=reason)
    settle_report(tx, run, report)


def _stop_stale(tx: Transaction, host: HostState, attempt: LiveAttempt) -> None:
    """Stop an attempt that was given up on while its body went on."""
    if attempt.reported:
        return
    node = tx.state.nodes.get(attempt.run_id)
    cause = node.cause if node is not None else None
    if cause is None:
        cause = Cause(
            CauseKind.WORKER_MOVED,
            origin=attempt.run_id,
            actor="coordinator",
            surface="coordinator",
            at_unix_ms=int(tx.now * 1000),
            reason=f"attempt {attempt.attempt} had been given up on",
        )
    order = CancelOrder(attempt.run_id, cause, attempt=attempt.attempt)
    tx.effects.cancels.setdefault(host.id, []).append(order)


def _settle_rest(tx: Transaction) -> None:
    """End what can neither go on nor begin, children before parents."""
    live = [node for node in tx.state.nodes.values() if not node.is_ended]
    for node in sorted(live, key=lambda n: -n.depth):
        if node.is_ended:
            continue
        if node.is_turn or node.report or node.cause is not None:
            settle(tx, node)
        elif node.on_host:
            if node.host_id not in tx.state.hosts:
                _lose(tx, node, f"its host {node.host_id} is not there any more")
        elif node.id in tx.unstartable:
            _lose(tx, node, "it had not begun when its coordinator was restarted, and its arguments are gone")


def _lose(tx: Transaction, node: Node, reason: str) -> None:
    report = ReportEnded(node.id, node.attempt, "lost", before_cancel=False, error_type=_RESTARTED, error=reason)
    settle_report(tx, node, report)


def _is_topmost(tx: Transaction, node: Node) -> bool:
    """Tell whether a cancelled node is where its cancel hit the tree."""
    if not node.parent_id or node.detached:
        return True
    return tx.state.nodes[node.parent_id].cause != node.cause


def _cancel_again(tx: Transaction, node: Node, cause: Cause) -> None:
    """Send a cancel to all hosts that it concerns, and begin its grace anew: it may never have left."""
    order = CancelOrder(node.id, cause, node.kill)
    for host_id in {below.host_id for below in tx.state.subtree(node) if below.on_host}:
        tx.effects.cancels.setdefault(host_id, []).append(order)
    if node.is_turn:
        tx.effects.turn_cancelled.append(node.id)
    wait_s = min(node.grace_s, tx.settings.kill_grace_s) if node.kill else node.grace_s
    tx.timers.add(tx.now + wait_s, "escalate", node.id)


def _arm(tx: Transaction) -> None:
    """Set the timers of everything that lives; those of the life before went with it."""
    for node in tx.state.nodes.values():
        if node.is_ended or node.cause is not None:
            continue
        if node.deadline_at is not None:
            tx.timers.add(node.deadline_at, "deadline", node.id)
        if node.state is NodeState.RETRYING:
            tx.timers.add(node.retry_at, "retry", node.id, node.attempt)
        elif node.on_host:
            _arm_attempt(tx, node)
    for claim_id, due in tx.state.claim_deadlines.items():
        tx.timers.add(due, "claim", claim_id)


def _arm_attempt(tx: Transaction, node: Node) -> None:
    ended: Cause | None = None
    if node.expired_attempt == node.attempt:
        ended = attempt_cause(tx, node)
    elif node.moved_attempt == node.attempt:
        ended = move_cause(tx, node)
    if ended is not None:
        order = CancelOrder(node.id, ended, attempt=node.attempt)
        tx.effects.cancels.setdefault(node.host_id, []).append(order)
        tx.timers.add(tx.now + node.grace_s, "escalate_attempt", node.id, node.attempt)
    elif node.attempt_timeout_s is not None and node.started_at is not None:
        tx.timers.add(node.started_at + node.attempt_timeout_s, "attempt", node.id, node.attempt)
