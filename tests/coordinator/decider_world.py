"""A small world around the decider: it plays clients and hosts by hand, on a manual clock.

Every decision is checked as it is made: events survive their encoding, a second
state that is only ever folded from them stays equal to the live one, and the
invariants at the top of `decider.py` hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from remit.coordinator.decider import Decider, Decision
from remit.coordinator.evolve import evolve
from remit.coordinator.recovering import Survey
from remit.coordinator.state import Node, NodeState, Pool, WorkspaceState
from remit.coordinator.transaction import Settings
from remit.coordinator.waiting import note_wait
from remit.core.cause import Cause, CauseKind
from remit.core.events import (
    CancelRequested,
    DelegationRefused,
    Event,
    RunAccepted,
    RunEnded,
    RunStarted,
    TurnAccepted,
    TurnEnded,
    decode_event,
    encode_event,
)
from remit.core.ids import IdFactory
from remit.core.limits import Limits
from remit.core.messages import (
    CancelAnswer,
    CancelOrder,
    CancelRequest,
    DelegateRequest,
    FinishTurn,
    HostInventory,
    LiveAttempt,
    NoteWait,
    OpenTurn,
    Report,
    ReportBatch,
    ReportEnded,
    ReportResume,
    ReportWaiting,
    RunRequest,
)
from remit.core.outcome import Outcome

_WAITING_ROOM_FIELDS = {"parked", "state"}


def same(live: WorkspaceState, folded: WorkspaceState) -> str:
    """Return what differs between two states, or the empty text.

    Waiting rooms, the count of refusals and pruned nodes are not part of the fold
    (invariant 5 of `state.py`), nor is the state `resuming`, which is one of them.
    """
    for name in ("epoch", "stopping", "used", "sessions", "hosts", "open_cancels", "spawn_failures", "drained"):
        if getattr(live, name) != getattr(folded, name):
            return f"{name}: {getattr(live, name)} is not {getattr(folded, name)}"
    if live.locks.to_dict() != folded.locks.to_dict():
        return f"claims: {live.locks.claims()} is not {folded.locks.claims()}"
    if live.claim_deadlines != folded.claim_deadlines:
        return f"claim deadlines: {live.claim_deadlines} is not {folded.claim_deadlines}"
    if live.awaited != folded.awaited:
        return f"awaited: {live.awaited} is not {folded.awaited}"
    if (live.live_runs, live.live_turns) != (folded.live_runs, folded.live_turns):
        return "counts of live nodes"
    if live.fail_fast != folded.fail_fast:
        return f"fail_fast: {live.fail_fast} is not {folded.fail_fast}"
    for session_id, conversation in live.conversations.items():
        whole = folded.conversations[session_id]
        turns = {name: turn for name, turn in whole.turns.items() if name in conversation.turns}
        if dataclasses.replace(whole, turns=turns) != conversation:
            return f"{conversation} is not {whole}"
    for approval_id, record in live.approvals.items():
        if folded.approvals[approval_id] != record:
            return f"{record} is not {folded.approvals[approval_id]}"
    for request_id, cancel in live.cancels.items():
        if folded.cancels[request_id] != cancel:
            return f"cancel {cancel} is not {folded.cancels[request_id]}"
    for node in live.nodes.values():
        difference = _same_node(node, folded.nodes[node.id])
        if difference:
            return difference
    return ""


def _same_node(live: Node, folded: Node) -> str:
    for name in Node.__slots__:
        if name not in _WAITING_ROOM_FIELDS and getattr(live, name) != getattr(folded, name):
            return f"{live.id}.{name}: {getattr(live, name)!r} is not {getattr(folded, name)!r}"
    state = NodeState.WAITING if live.state is NodeState.RESUMING else live.state
    return "" if state is folded.state else f"{live.id} is {state}, folded {folded.state}"


def through_json(event: Event) -> Event:
    """Return an event as a journal gives it back."""
    data = json.loads(json.dumps(encode_event(event)))
    return decode_event(event.kind, event.node_id, event.turn_id, data)


class World:
    """One decider with everybody around it.

    Args:
        auto_hosts: hosts that are asked for answer at once, killed ones are gone at once.
        check: compare the folded state after every decision (slow for thousands of runs).
        settings: numbers of the workspace.
    """

    def __init__(self, *, auto_hosts: bool = True, check: bool = True, **settings: Any) -> None:
        self.now = 1_000.0
        random_bits = random.Random(7)
        self.ids = IdFactory(lambda: int(self.now * 1000), random_bits.getrandbits)
        self.decider = Decider(settings=Settings(**settings), ids=self.ids)
        self.folded = WorkspaceState()
        self.events: list[Event] = []
        self.last: Decision = self.decider.start(1, 1, self.now)
        self.orders: list[tuple[str, CancelOrder]] = []
        self.resumed: list[str] = []
        self.refused_waits: list[str] = []
        self.announced: list[str] = []
        self.quiet: list[str] = []
        self.to_spawn: list[str] = []
        self.to_kill: list[str] = []
        self.starts: list[tuple[str, str]] = []
        self.auto_hosts = auto_hosts
        self.check = check
        self._numbers = itertools.count(1)
        self._nodes = itertools.cycle(["n1", "n2", "n3"])
        self._seen = _History()
        self._take(self.last)

    @property
    def state(self) -> WorkspaceState:
        """Return the live state."""
        return self.decider.state

    def node(self, node_id: str) -> Node:
        """Return a turn or run."""
        return self.state.nodes[node_id]

    def _take(self, decision: Decision) -> Decision:
        self.last = decision
        for event, _ in decision.events:
            restored = through_json(event)
            assert restored == event
            evolve(self.folded, restored)
            self._seen.add(event)
            self.events.append(event)
        effects = decision.effects
        for host_id, orders in effects.cancels.items():
            self.orders.extend((host_id, order) for order in orders)
        self.starts.extend((host_id, name) for host_id, names in effects.starts.items() for name in names)
        self.resumed.extend(name for names in effects.resumes.values() for name in names)
        self.refused_waits.extend(cycle for found in effects.wait_refusals.values() for _, _, cycle in found)
        self.announced.extend(effects.ended)
        self.quiet.extend(effects.quiet)
        self.to_spawn.extend(effects.spawn)
        self.to_kill.extend(host_id for host_id, _ in effects.kill)
        if self.check:
            self.check_now()
        if self.auto_hosts:
            self.settle_hosts()
        return decision

    def settle_hosts(self) -> None:
        """Let hosts that were asked for answer and killed ones go."""
        while self.to_spawn or self.to_kill:
            if self.to_spawn:
                self.host_ready(self.to_spawn.pop(0))
            else:
                self.host_gone(self.to_kill.pop(0), "killed")

    def check_now(self) -> None:
        """Check that the state is a fold of the events, and its counts."""
        state = self.state
        difference = same(state, self.folded)
        assert not difference, difference
        for pool in Pool:
            holding = sum(node.holds_slot for node in state.nodes.values() if node.pool is pool)
            assert 0 <= state.used[pool] == holding <= self.decider.settings.capacity(pool)
        for node in state.nodes.values():
            below = [n for n in state.nodes.values() if n.holds_slot and node in state.ancestors(n)]
            assert node.below_used == len(below)
            assert not (node.is_ended and node.holds_slot)
            if node.limits is not None and node.limits.max_concurrent is not None:
                assert node.below_used <= node.limits.max_concurrent
            if node.cause is not None and not node.is_ended:
                assert all(below.cause is not None for below in state.subtree(node))
        for host in state.hosts.values():
            assert all(state.nodes[name].on_host and state.nodes[name].host_id == host.id for name in host.runs)

    # -- clients -------------------------------------------------------------------

    def open_turn(self, session: str = "s1", **options: Any) -> str:
        """Open a turn and return its id; look at `last.error` for a refusal."""
        turn_id = options.pop("turn_id", f"turn_{next(self._numbers)}")
        options.setdefault("client_id", "client_1")
        self._take(self.decider.open_turn(OpenTurn(turn_id=turn_id, session_id=session, **options), self.now))
        return str(turn_id)

    def finish(self, turn_id: str, report: str = "returned", **options: Any) -> Decision:
        """Say that a turn's body has ended."""
        return self._take(self.decider.finish_turn(FinishTurn(turn_id, report, **options), self.now))

    def request(self, **options: Any) -> RunRequest:
        """Return a request of one run."""
        run_id = options.pop("run_id", None) or f"run_{next(self._numbers)}"
        return RunRequest(run_id=run_id, agent_key="a", agent_name="agent", **options)

    def delegate_all(self, parent_id: str, requests: Iterable[RunRequest], **options: Any) -> Decision:
        """Send one delegation; look at the decision's error for a refusal."""
        parent = self.state.nodes.get(parent_id)
        attempt = options.pop("attempt", parent.attempt if parent is not None else 0)
        message = DelegateRequest(
            parent_id=parent_id,
            parent_attempt=attempt,
            client_id="client_1",
            env_key=options.pop("env_key", "env"),
            env=b"",
            agents={},
            runs=tuple(requests),
        )
        return self._take(self.decider.delegate(message, self.now))

    def delegate(self, parent_id: str, count: int = 1, **options: Any) -> list[str]:
        """Delegate some equal runs that must be accepted; return their ids."""
        requests = [self.request(**options) for _ in range(count)]
        decision = self.delegate_all(parent_id, requests)
        assert decision.error is None, decision.error
        return [request.run_id for request in requests]

    def run(self, parent_id: str, **options: Any) -> str:
        """Delegate one run that must be accepted; return its id."""
        return self.delegate(parent_id, 1, **options)[0]

    def cancel(self, target: str, **options: Any) -> CancelAnswer:
        """Ask for a cancel and return the answer."""
        options.setdefault("request_id", f"req_{next(self._numbers)}")
        decision = self._take(self.decider.cancel(CancelRequest(target=target, **options), self.now))
        assert decision.answer is not None
        return decision.answer

    def client_gone(self, client_id: str = "client_1") -> Decision:
        """A client is not heard of any more."""
        return self._take(self.decider.client_gone(client_id, "silent", self.now))

    def shutdown(self) -> Decision:
        """Begin to close."""
        return self._take(self.decider.shutdown("closing", self.now))

    # -- hosts ---------------------------------------------------------------------

    def host_ready(self, host_id: str, node: str = "") -> Decision:
        """A host answers; by default on one of two nodes, in turns."""
        node = node or next(node for node in self._nodes if node not in self.state.drained)
        return self._take(self.decider.host_ready(host_id, 1, "here", self.now, node))

    def drain_node(self, node: str, **options: Any) -> Decision:
        """Move work away from a node of the cluster."""
        return self._take(self.decider.drain(node, "repairs", self.now, **options))

    def host_gone(self, host_id: str, reason: str = "exit 1") -> Decision:
        """A host is no longer there."""
        return self._take(self.decider.host_gone(host_id, reason, self.now))

    def report(self, host_id: str, *items: Report) -> Decision:
        """Let a host say something."""
        return self._take(self.decider.report(ReportBatch(host_id, next(self._numbers), items), self.now))

    def end(self, run_id: str, report: str = "returned", **options: Any) -> Decision:
        """Let the host of a run say that its body has ended; as a real one, it knows the signal."""
        node = self.node(run_id)
        attempt = options.pop("attempt", node.attempt)
        options.setdefault("before_cancel", node.cause is None)
        if report == "returned":
            options.setdefault("payload", b"result")
        return self.report(node.host_id, ReportEnded(run_id, attempt, report, **options))

    def unwind(self, run_id: str) -> Decision:
        """Let a body that was cancelled end by its cancellation."""
        return self.end(run_id, "cancelled", before_cancel=False)

    def wait(self, run_id: str, *on: str) -> Decision:
        """Let a body wait for other runs."""
        node = self.node(run_id)
        return self.report(node.host_id, ReportWaiting(run_id, node.attempt, next(self._numbers), on))

    def turn_waits(self, turn_id: str, *on: str, number: int = 0) -> Decision:
        """Let a turn's body wait for runs of others; for none, its wait is over."""
        request = NoteWait(turn_id, number or next(self._numbers), on)
        return self._take(self.decider.decide(lambda tx: note_wait(tx, request), self.now))

    def resume(self, run_id: str) -> Decision:
        """Let a body whose wait is over ask for its slot."""
        node = self.node(run_id)
        return self.report(node.host_id, ReportResume(run_id, node.attempt))

    # -- time and looking ----------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, with a tick at every point where one is due."""
        until = self.now + seconds
        while (due := self.decider.next_due()) is not None and due <= until:
            self.now = max(self.now, due)
            self._take(self.decider.tick(self.now))
        self.now = until
        self._take(self.decider.tick(self.now))

    def restart(self, survey: Survey | None = None) -> None:
        """Begin another life from the folded state, as after a crash; by default nothing else is left."""
        self.decider = Decider(settings=self.decider.settings, ids=self.ids, state=self.folded)
        self.folded = WorkspaceState()
        for event in self.events:
            evolve(self.folded, event)
        self.orders.clear()
        self.starts.clear()
        self.to_spawn.clear()
        self.to_kill.clear()
        self._take(self.decider.start(self.state.epoch + 1, 2, self.now, survey))

    def survey(
        self,
        *,
        gone: Iterable[str] = (),
        silent: Iterable[str] = (),
        missing: Iterable[str] = (),
        arguments: bool = True,
        attempts: Iterable[LiveAttempt] = (),
    ) -> Survey:
        """Return what a restarted coordinator would find.

        Args:
            gone: hosts that are not there.
            silent: hosts that do not answer.
            missing: runs that their host has never received.
            arguments: whether agents and arguments are at hand.
            attempts: what the hosts say of these runs, instead of "at work".
        """
        told = {attempt.run_id: attempt for attempt in attempts}
        coming = {h.id for h in self.state.hosts.values() if not h.ready and not h.killed} - {*gone, *silent}
        inventories: dict[str, HostInventory] = {}
        for host in self.state.hosts.values():
            if host.id in (*gone, *silent, *coming):
                continue
            found = [
                told.get(name, LiveAttempt(name, self.node(name).attempt)) for name in host.runs if name not in missing
            ]
            others = [attempt for name, attempt in told.items() if self.node(name).host_id == host.id]
            inventories[host.id] = HostInventory(host.id, 1, "here", tuple(dict.fromkeys([*found, *others])))
        names = frozenset(self.state.nodes) if arguments else frozenset[str]()
        return Survey(inventories, frozenset(silent), frozenset(coming), names)

    def kinds(self, node_id: str) -> list[str]:
        """Return the kinds of a node's events in order."""
        return [event.kind for event in self.events if event.node_id == node_id]

    def outcome(self, node_id: str) -> Outcome | None:
        """Return how a node ended, or None."""
        return self.node(node_id).outcome

    def cause(self, node_id: str) -> Cause:
        """Return a node's cause, which must be there."""
        cause = self.node(node_id).cause
        assert cause is not None
        return cause

    def running(self) -> list[str]:
        """Return the runs that hold a slot, oldest first."""
        return [node.id for node in self.state.nodes.values() if node.holds_slot]

    def live(self) -> list[str]:
        """Return the nodes that have not ended, oldest first."""
        return [node.id for node in self.state.nodes.values() if not node.is_ended]

    def refusals(self) -> list[DelegationRefused]:
        """Return the delegations that were refused."""
        return [event for event in self.events if isinstance(event, DelegationRefused)]

    def terminal_counts(self) -> Counter[str]:
        """Return how many terminal events each node has."""
        return Counter(event.node_id for event in self.events if event.terminal)

    def drain(self) -> None:
        """Let all go by force: shut down, and let no body unwind by itself."""
        self.shutdown()
        for _ in range(4):
            self.settle_hosts()
            self.advance(60.0)
        self.settle_hosts()
        assert self.live() == []
        assert set(self.state.used.values()) == {0}
        assert self.state.open_cancels == {}
        assert not self.state.sessions
        accepted = {event.node_id for event in self.events if isinstance(event, RunAccepted | TurnAccepted)}
        assert self.terminal_counts() == Counter(accepted)


class _History:
    """The order rules of one journal, checked event by event."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._children: dict[str, set[str]] = {}
        self._causes: dict[str, Cause] = {}
        self._ended: set[str] = set()

    def add(self, event: Event) -> None:
        name = event.node_id
        # A refusal and a quiet are about the request, and may come after the end.
        # So is the end of a quarantine, once the proof is there, and money that was spent all the same;
        # and what was found where its programs were killed.
        late = ("delegation_refused", "cancel_quiet", "claim_changed", "git_locks_found")
        if name in self._parents and event.kind not in late and not getattr(event, "late", False):
            assert name not in self._ended, f"{event.kind} after the end of {name}"
        if isinstance(event, TurnAccepted | RunAccepted):
            assert name not in self._parents
            attached = isinstance(event, RunAccepted) and not event.detached
            self._parents[name] = event.parent_id if isinstance(event, RunAccepted) and attached else ""
            self._children.setdefault(self._parents[name], set()).add(name)
            if attached:
                assert self._parents[name] not in self._causes, "accepted below a cancel"
        elif isinstance(event, CancelRequested):
            assert event.cause is not None
            self._mark(name, event.cause)
        elif isinstance(event, RunStarted):
            assert name not in self._causes, "started below a cancel"
        elif isinstance(event, RunEnded | TurnEnded):
            self._end(event)

    def _mark(self, name: str, cause: Cause) -> None:
        if name in self._ended:
            return
        self._causes.setdefault(name, cause)
        for child in self._children.get(name, ()):
            # One that was cancelled earlier keeps its own cause; so does all below it.
            self._mark(child, cause)

    def _end(self, event: RunEnded | TurnEnded) -> None:
        name = event.node_id
        below = self._children.get(name, set())
        assert below <= self._ended, "a parent ended before its child"
        self._ended.add(name)
        if event.outcome is Outcome.CANCELLED and not getattr(event, "blocked_by", ""):
            assert event.cause == self._causes[name], "the cause changed on its way"
        if event.outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.LOST):
            assert event.cause is None
        if event.outcome is Outcome.TIMED_OUT:
            assert event.cause is not None
            assert event.cause.origin == name
            assert event.cause.kind in (CauseKind.DEADLINE, CauseKind.ATTEMPT_TIMEOUT)


LIMIT_ONE = Limits(max_concurrent=1)
