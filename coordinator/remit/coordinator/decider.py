"""The decider: one command in, events and effects out. Pure: no I/O, no clock, no Ray.

**Invariants**

1. One `RunAccepted` gives exactly one `RunEnded`, and nothing of the run after it.
2. No `RunStarted` below a node after its `CancelRequested`.
3. Children end before parents (detached runs are nobody's children).
4. A slot is taken at `RunStarted`/`RunResumed` and given back by any way out.
5. Folding the emitted events over an empty state gives the live state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from remit.coordinator.admission import delegate, open_turn
from remit.coordinator.approving import arm_approvals, expire_approval
from remit.coordinator.claiming import (
    answer_claim,
    check_claim,
    clear_claims,
    clear_host,
    clear_if_gone,
    clear_swept,
    expire_claim,
    give_up_claim,
    note_git_locks,
    start_sweeps,
)
from remit.coordinator.conversation import forget_turns
from remit.coordinator.moving import drain_node, leave_drained_node, undo_drain
from remit.coordinator.noting import stop_after_failures
from remit.coordinator.placement import fail_hopeless, let_idle_hosts_go, pump
from remit.coordinator.recovering import Survey, missing_hosts, note_programs, recover, unstartable_runs
from remit.coordinator.settling import claim_start, settle, settle_report
from remit.coordinator.spending import take_report, take_total
from remit.coordinator.state import Node, NodeState, ProcessState, WorkspaceState
from remit.coordinator.stopping import (
    cancel,
    cancel_children,
    client_gone,
    escalate,
    expire,
    expire_attempt,
    forget_cancels,
    stop_everything,
)
from remit.coordinator.transaction import Effects, Settings, Timers, Transaction
from remit.coordinator.waiting import closed_cycle
from remit.core.cause import CauseKind
from remit.core.errors import InternalError, RemitError, TurnCancelled
from remit.core.events import (
    CoordinatorStarted,
    Event,
    HostBecameReady,
    HostGone,
    HostReported,
    ProcessEnded,
    ProcessStarted,
    RunProgressed,
    RunWaiting,
    TurnSettling,
)
from remit.core.ids import IdFactory
from remit.core.messages import (
    AskClaim,
    CancelAnswer,
    CancelRequest,
    ClaimAnswer,
    ClaimCheck,
    DelegateRequest,
    DrainAnswer,
    FinishTurn,
    GiveUpClaim,
    OpenTurn,
    ReportBatch,
    ReportEnded,
    ReportProcess,
    ReportProgress,
    ReportResume,
    ReportSpend,
    ReportWaiting,
)
from remit.processes.gitlocks import Aftermath

__all__ = ["Decider", "Decision"]

_SWEEP_AGAIN_S = 1.0
"""Seconds until programs that could not be ended are ended again; twice as long each time."""
_SWEEP_AGAIN_MOST_S = 300.0
_REFUSALS = 1_000
"""Refused turns and delegations that are remembered; copies arrive within seconds or never."""
_PAST_TURNS = 10_000
"""Ids of pruned turns that are remembered: less than a megabyte."""


@dataclass(slots=True)
class Decision:
    """What one command led to."""

    events: list[tuple[Event, bytes | None]]
    effects: Effects
    answer: CancelAnswer | None = None
    error: RemitError | TurnCancelled | None = None
    claim: ClaimAnswer | None = None
    drain: DrainAnswer | None = None
    value: object = None
    """What the rule of `Decider.decide` returned."""


class Decider:
    """Holds the state of one workspace and decides commands, one at a time.

    Args:
        settings: the workspace's numbers.
        ids: where ids of hosts and requests come from.
        state: a folded state to go on from, or None for an empty one.
        payloads: results and partial results of runs of that state that have not ended.
    """

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        ids: IdFactory | None = None,
        state: WorkspaceState | None = None,
        payloads: dict[str, bytes] | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.state = state or WorkspaceState()
        self._ids = ids or IdFactory()
        self._timers = Timers()
        self._payloads: dict[str, bytes] = dict(payloads or {})
        self._unstartable: set[str] = set()
        self._refused: dict[str, RemitError | TurnCancelled] = {}
        """Request (see `_name_of`) -> why it was refused: a late copy of the request hears the same."""
        self._sweeping: dict[str, dict[int, ProcessState]] = {}
        """Run or turn -> its programs that somebody was asked to end, without a proof so far."""
        self._failed_sweeps: dict[tuple[str, int], int] = {}
        """(Run or turn, process id) -> how often it could not be ended."""
        self._begun: Transaction | None = None
        """The decision that is being made."""

    @property
    def is_torn(self) -> bool:
        """Whether a decision was left in the middle by an error: the state is ahead of every journal.

        That is a hole of ours. The state is no use any more; the journal is, and the next life begins with it.
        """
        return self._begun is not None and self._begun.has_changed

    def next_due(self) -> float | None:
        """Return when `tick` is wanted next, in seconds since 1970, or None."""
        return self._timers.next_due()

    def _begin(self, now: float) -> Transaction:
        if self.is_torn:
            raise InternalError("a decision was left in the middle; this life of the coordinator is over")
        self._begun = Transaction(
            state=self.state,
            settings=self.settings,
            timers=self._timers,
            payloads=self._payloads,
            ids=self._ids,
            now=now,
            unstartable=self._unstartable,
        )
        return self._begun

    def _finish(
        self,
        tx: Transaction,
        *,
        answer: CancelAnswer | None = None,
        error: RemitError | TurnCancelled | None = None,
        claim: ClaimAnswer | None = None,
        value: object = None,
    ) -> Decision:
        if tx.state.spawn_failures:
            fail_hopeless(tx)
        if tx.state.fail_fast:
            stop_after_failures(tx)
        pump(tx)
        for run_id, process in tx.effects.sweep:
            self._sweeping.setdefault(run_id, {})[process.pid] = process
        self._begun = None
        return Decision(tx.events, tx.effects, answer, error, claim, value=value)

    def decide(self, rule: Callable[[Transaction], object], now: float) -> Decision:
        """Decide by a rule of another module; what it returns is `value`, what it raises is `error`."""
        tx = self._begin(now)
        try:
            value = rule(tx)
        except (RemitError, TurnCancelled) as error:
            return self._finish(tx, error=error)
        return self._finish(tx, value=value)

    def start(self, epoch: int, pid: int, now: float, survey: Survey | None = None) -> Decision:
        """Begin a life of the coordinator; settle what an earlier one left (see `recovering`).

        Args:
            epoch: number of this life.
            pid: process id of the coordinator.
            now: in seconds since 1970.
            survey: what is really there; by default nothing is.
        """
        tx = self._begin(now)
        found = survey or Survey()
        self._unstartable |= unstartable_runs(tx, found)
        tx.emit(CoordinatorStarted(node_id="", turn_id="", at=now, epoch=epoch, pid=pid))
        note_programs(tx, found)
        for host_id in missing_hosts(tx, found):
            self._drop_host(tx, host_id, "it was gone when its coordinator was restarted", expected=True)
        for item in recover(tx, found):
            node = self.state.nodes[item.run_id]
            if isinstance(item, ReportWaiting):
                self._waiting(tx, node, item)
            else:
                self._resume(tx, node)
        start_sweeps(tx)
        arm_approvals(tx)
        return self._finish(tx)

    def open_turn(self, request: OpenTurn, now: float) -> Decision:
        """Accept a turn, or refuse it (see `admission.open_turn`); sent again, it hears the same."""
        return self._admit(request, lambda tx: open_turn(tx, request), now)

    def _admit(
        self, request: OpenTurn | DelegateRequest, rule: Callable[[Transaction], object], now: float
    ) -> Decision:
        """Decide about a request for something new, once: what was refused is not accepted later."""
        tx = self._begin(now)
        known = self._refused.get(_name_of(request)) if self._refused else None
        if known is not None:
            return self._finish(tx, error=known)
        try:
            rule(tx)
        except (RemitError, TurnCancelled) as error:
            self._refused[_name_of(request)] = error
            while len(self._refused) > _REFUSALS:
                del self._refused[next(iter(self._refused))]
            return self._finish(tx, error=error)
        return self._finish(tx)

    def finish_turn(self, request: FinishTurn, now: float) -> Decision:
        """Take the holder's word that a turn's body has ended."""
        tx = self._begin(now)
        turn = self.state.turns.get(request.turn_id)
        if turn is not None:
            take_total(tx, turn, request.tokens, request.cost)
        if turn is not None and turn.is_ended:
            # Its holder is late, but now it is proven that its body writes no more.
            clear_claims(tx, turn.id)
        if turn is None or turn.is_ended or turn.report:
            self.state.refused += turn is not None and turn.is_ended
            return self._finish(tx)
        tx.emit(
            TurnSettling(
                node_id=turn.id,
                turn_id=turn.id,
                at=now,
                report=request.report,
                error_type=request.error_type,
                error=request.error,
            )
        )
        if turn.cause is None and request.report not in ("returned", "follow"):
            cancel_children(tx, turn, CauseKind.PARENT_FAILED, "the turn's body raised")
        settle(tx, turn)
        return self._finish(tx)

    def delegate(self, request: DelegateRequest, now: float) -> Decision:
        """Accept all runs of a delegation, or none (see `admission.delegate`); sent again, it hears the same."""
        return self._admit(request, lambda tx: delegate(tx, request), now)

    def cancel(self, request: CancelRequest, now: float) -> Decision:
        """Decide a cancel (see `stopping.cancel`)."""
        tx = self._begin(now)
        try:
            answer = cancel(tx, request)
        except RemitError as error:
            return self._finish(tx, error=error)
        return self._finish(tx, answer=answer)

    def ask_claim(self, request: AskClaim, now: float) -> Decision:
        """Grant areas, queue the request, or refuse it (see `claiming.answer_claim`)."""
        tx = self._begin(now)
        try:
            claim = answer_claim(tx, request)
        except (RemitError, TurnCancelled) as error:
            return self._finish(tx, error=error)
        return self._finish(tx, claim=claim)

    def give_up_claim(self, request: GiveUpClaim, now: float) -> Decision:
        """Release a lease or take a request back; whoever waited for it alone is granted."""
        tx = self._begin(now)
        try:
            give_up_claim(tx, request)
        except RemitError as error:
            return self._finish(tx, error=error)
        return self._finish(tx)

    def check_claim(self, request: ClaimCheck) -> int:
        """Return the token under which a writer may write now (see `claiming.check_claim`)."""
        return check_claim(self.state, request)

    def clear_claims(self, node_id: str, now: float) -> Decision:
        """Free what is quarantined for a node: somebody vouches that it writes no more."""
        tx = self._begin(now)
        clear_claims(tx, node_id)
        return self._finish(tx)

    def swept(self, run_id: str, pid: int, now: float, *, gone: bool, aftermath: Aftermath | None = None) -> Decision:
        """A process that a dead host had left is gone, with what it had left behind; or it is tried again."""
        tx = self._begin(now)
        if aftermath is not None:
            note_git_locks(tx, run_id, aftermath.removed, aftermath.left)
        left = self._sweeping.get(run_id, {})
        if pid in left and gone:
            del left[pid]
            self._failed_sweeps.pop((run_id, pid), None)
            if not left:
                del self._sweeping[run_id]
                clear_swept(tx, run_id)
        elif pid in left:
            # Whoever ends programs may have died over it.
            failed = self._failed_sweeps.get((run_id, pid), 0)
            self._failed_sweeps[run_id, pid] = failed + 1
            wait_s = min(_SWEEP_AGAIN_S * 2.0 ** min(failed, 16), _SWEEP_AGAIN_MOST_S)
            tx.timers.add(now + wait_s, "sweep", run_id, pid)
        return self._finish(tx)

    def client_gone(self, client_id: str, reason: str, now: float) -> Decision:
        """A client has not been heard of for its grace."""
        tx = self._begin(now)
        client_gone(tx, client_id, reason)
        return self._finish(tx)

    def shutdown(self, reason: str, now: float) -> Decision:
        """Take no new turn and cancel everything; idempotent."""
        tx = self._begin(now)
        stop_everything(tx, reason)
        return self._finish(tx)

    def host_ready(self, host_id: str, pid: int, machine: str, now: float, node: str = "") -> Decision:
        """A host that was asked for answers."""
        tx = self._begin(now)
        host = self.state.hosts.get(host_id)
        if host is not None:
            tx.emit(HostBecameReady(node_id=host_id, turn_id="", at=now, pid=pid, machine=machine, node=node))
            leave_drained_node(tx, host)
        return self._finish(tx)

    def drain(self, node: str, reason: str, now: float, *, others: int = 1, undo: bool = False) -> Decision:
        """Move work away from a node of the cluster, or let it have work again (see `moving`).

        Args:
            node: id of the node.
            reason: free text for people.
            now: in seconds since 1970.
            others: further nodes that take work.
            undo: let it have work again.
        """
        tx = self._begin(now)
        hosts = runs = 0
        try:
            if undo:
                undo_drain(tx, node)
            else:
                hosts, runs = drain_node(tx, node, reason, others=others)
        except RemitError as error:
            return self._finish(tx, error=error)
        decision = self._finish(tx)
        decision.drain = DrainAnswer(node, node, hosts, runs)
        return decision

    def host_gone(self, host_id: str, reason: str, now: float) -> Decision:
        """A host died or was killed: settle its runs."""
        tx = self._begin(now)
        self._drop_host(tx, host_id, reason)
        return self._finish(tx)

    def _drop_host(self, tx: Transaction, host_id: str, reason: str, *, expected: bool = False) -> None:
        host = self.state.hosts.get(host_id)
        if host is None:
            return
        runs = [self.state.nodes[name] for name in host.runs]
        known = set(host.runs)
        killed = host.killed
        tx.emit(HostGone(node_id=host_id, turn_id="", at=tx.now, reason=reason, expected=killed or expected))
        for run in runs:
            if run.on_host:
                self._host_of_run_gone(tx, run, killed=killed, reason=reason)
            if run.state is not NodeState.RETRYING:
                # A next attempt would find its programs by their keys; nobody else looks for these.
                if not run.is_ended:
                    tx.effects.sweep.extend((run.id, process) for process in (run.processes or {}).values())
                tx.effects.orphans.append((host.machine, run.id))
        for run in self.state.nodes.values():
            # Bodies that were given up on went with it; what they had started meanwhile nobody was told of.
            if run.unconfirmed and run.host_id == host_id and run.id not in known:
                tx.effects.orphans.append((host.machine, run.id))
        clear_host(tx, host_id)

    def _host_of_run_gone(self, tx: Transaction, run: Node, *, killed: bool, reason: str) -> None:
        word = "killed" if killed else "lost"
        if run.cause is None and run.expired_attempt == run.attempt:
            word = "timed_out"
        elif run.cause is None and run.moved_attempt == run.attempt:
            word = "moved"
        if run.cause is None:
            kinds = {"timed_out": CauseKind.ATTEMPT_TIMEOUT, "moved": CauseKind.WORKER_MOVED}
            kind = kinds.get(word, CauseKind.PARENT_FAILED)
            cancel_children(tx, run, kind, f"its parent was lost with its host: {reason}")
        settle_report(
            tx,
            run,
            ReportEnded(run.id, run.attempt, word, before_cancel=False, error_type="HostLost", error=reason),
        )

    def report(self, batch: ReportBatch, now: float) -> Decision:
        """Take what a host has to say. What comes too late is refused and counted."""
        tx = self._begin(now)
        host = self.state.hosts.get(batch.host_id)
        if host is not None and batch.seq <= host.reported:
            # It was taken by an earlier life, whose answer was lost: all that counts is known.
            self.state.refused += len(batch.items)
            return self._finish(tx)
        if host is not None and any(isinstance(item, ReportProcess) for item in batch.items):
            # Programs are counted, so a second copy would show. Every other report is harmless twice.
            tx.emit(HostReported(node_id=host.id, turn_id="", at=now, seq=batch.seq))
        for item in batch.items:
            if isinstance(item, ReportSpend):
                self.state.refused += not take_report(tx, batch.host_id, item)
                continue
            node = self.state.nodes.get(item.run_id)
            stale = node is None or node.is_ended or not node.host_id or node.attempt != item.attempt
            if node is None or stale or node.host_id != batch.host_id:
                self.state.refused += 1
            elif isinstance(item, ReportEnded):
                self._ended(tx, node, item)
            elif isinstance(item, ReportWaiting):
                self._waiting(tx, node, item)
            elif isinstance(item, ReportResume):
                self._resume(tx, node)
            elif isinstance(item, ReportProgress):
                self._progress(tx, node, item)
            else:
                self._process(tx, node, item)
        return self._finish(tx)

    def _ended(self, tx: Transaction, node: Node, item: ReportEnded) -> None:
        if node.report:
            self.state.refused += 1
            return
        if item.report != "returned" and node.cause is None and node.live_children:
            expired = item.report == "timed_out"
            kind = CauseKind.ATTEMPT_TIMEOUT if expired else CauseKind.PARENT_FAILED
            kind = CauseKind.WORKER_MOVED if item.report == "moved" else kind
            cancel_children(tx, node, kind, f"{node.name or node.id} {item.report}: {item.error}")
        settle_report(tx, node, item)

    def _waiting(self, tx: Transaction, node: Node, item: ReportWaiting) -> None:
        if node.report:
            return
        cycle = closed_cycle(self.state, node, item.on)
        if cycle:
            tx.effects.wait_refusals.setdefault(node.host_id, []).append((node.id, item.wait_id, " -> ".join(cycle)))
            return
        tx.emit(RunWaiting(node_id=node.id, turn_id=node.turn_id, at=tx.now, on=item.on, what=item.what))

    def _resume(self, tx: Transaction, node: Node) -> None:
        if node.state is NodeState.WAITING:
            node.state = NodeState.RESUMING
            self.state.resuming[node.pool][node.id] = None
        elif node.state is NodeState.RUNNING:
            tx.effects.resumes.setdefault(node.host_id, []).append(node.id)

    def _progress(self, tx: Transaction, node: Node, item: ReportProgress) -> None:
        if node.report:  # the result is there already; a partial one must not replace it
            self.state.refused += 1
            return
        tx.payloads[node.id] = item.payload
        tx.emit(
            RunProgressed(node_id=node.id, turn_id=node.turn_id, at=tx.now, preview=item.preview),
            item.payload,
        )

    def _process(self, tx: Transaction, node: Node, item: ReportProcess) -> None:
        if not item.ended:
            tx.emit(
                ProcessStarted(
                    node_id=node.id,
                    turn_id=node.turn_id,
                    at=tx.now,
                    pid=item.pid,
                    start_time=item.start_time,
                    machine=item.machine,
                    program=item.program,
                    handle=item.handle,
                    background=item.background,
                )
            )
            return
        tx.emit(
            ProcessEnded(
                node_id=node.id,
                turn_id=node.turn_id,
                at=tx.now,
                pid=item.pid,
                exit_code=item.exit_code,
                signal=item.signal,
                stopped=item.stopped,
                escalated=item.escalated,
                survivors=item.survivors,
                goes_on=item.goes_on,
            )
        )
        note_git_locks(tx, node.id, item.git_locks_removed, item.git_locks_left)
        clear_if_gone(tx, node)

    def tick(self, now: float) -> Decision:
        """Do what is due: deadlines, attempt time-outs, escalations, retries, idle hosts."""
        tx = self._begin(now)
        # A parent's deadline goes before a child's of the same instant.
        due = self._timers.pop_due(now)
        due.sort(key=lambda timer: (timer.due, self._depth(timer.node_id)))
        for timer in due:
            if timer.kind == "claim":
                expire_claim(tx, timer.node_id)
                continue
            if timer.kind == "approval":
                expire_approval(tx, timer.node_id)
                continue
            if timer.kind == "sweep":
                process = self._sweeping.get(timer.node_id, {}).get(timer.number)
                tx.effects.sweep.extend([] if process is None else [(timer.node_id, process)])
                continue
            node = self.state.nodes.get(timer.node_id)
            if node is None:
                continue
            if timer.kind == "retry":
                if node.state is NodeState.RETRYING and node.claims and node.attempt == timer.number:
                    claim_start(tx, node)
            elif timer.kind == "deadline":
                expire(tx, node)
            elif timer.kind == "attempt":
                expire_attempt(tx, node, timer.number)
            elif timer.kind == "escalate":
                escalate(tx, node)
            elif timer.kind == "escalate_attempt":
                escalate(tx, node, timer.number)
        let_idle_hosts_go(tx)
        return self._finish(tx)

    def _depth(self, node_id: str) -> int:
        node = self.state.nodes.get(node_id)
        return -1 if node is None else node.depth

    def prune(self, now: float | None = None) -> list[str]:
        """Forget the oldest ended turns and their runs; return the forgotten ids.

        The journal keeps them. A turn with a detached run that still lives stays.

        Args:
            now: coordinator time up to which everything is on the disk and told, in seconds
                since 1970: what ended later stays. None not to look at times.
        """
        ended = [turn for turn in self.state.turns.values() if turn.is_ended]
        surplus = len(ended) - self.settings.keep_ended_turns
        if len(self.state.nodes) > self.settings.keep_nodes:
            # The latest turn stays, so that whoever waits for its receipt gets one.
            surplus = max(surplus, len(ended) - 1)
        doomed = {turn.id for turn in ended[: max(0, surplus)]}
        if now is not None:
            crowded = len(self.state.nodes) > self.settings.keep_recent_nodes
            oldest = now - (self.settings.keep_recent_s if crowded else self.settings.keep_ended_s)
            doomed.update(turn.id for turn in ended if turn.ended_at is not None and turn.ended_at < oldest)
            doomed -= {turn.id for turn in ended if turn.ended_at is not None and turn.ended_at >= now}
        if not doomed:
            return []
        live = {n.turn_id for n in self.state.nodes.values() if not n.is_ended}
        doomed -= live
        # What is quarantined is shown with its owner. And the end of a host, or of programs, is the
        # proof for bodies that were given up on: whatever these have started is ended by their names.
        names = {*self.state.locks.owners(), *self._sweeping}
        doomed -= {self.state.nodes[name].turn_id for name in names if name in self.state.nodes}
        hosts = self.state.hosts
        doomed -= {n.turn_id for n in self.state.nodes.values() if n.unconfirmed and n.host_id in hosts}
        gone = [name for name, node in self.state.nodes.items() if node.turn_id in doomed]
        for name in gone:
            del self.state.nodes[name]
            if self.state.turns.pop(name, None) is not None:
                self.state.past_turns[name] = None
        while len(self.state.past_turns) > _PAST_TURNS:
            del self.state.past_turns[next(iter(self.state.past_turns))]
        forget_turns(self.state, gone)
        forget_cancels(self.state)
        self._unstartable.difference_update(gone)
        return gone


def _name_of(request: OpenTurn | DelegateRequest) -> str:
    """Return a short text that copies of one request share, and no other request has."""
    if isinstance(request, OpenTurn):
        return request.turn_id
    asked = (request.parent_id, request.parent_attempt, [(run.run_id, run.after) for run in request.runs])
    return blake2b(repr(asked).encode(), digest_size=16).hexdigest()
