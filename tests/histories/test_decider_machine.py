"""Random histories of the decider, and the spawn storm, on a manual clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from remit.coordinator.state import Node, NodeState, Pool
from remit.core.limits import Limits
from remit.core.messages import CancelRequest, ReportEnded
from tests.coordinator.decider_world import World

REPORTS = st.sampled_from(["returned", "raised", "cancelled", "timed_out", "stale_host", "moved"])
PICK = st.integers(min_value=0, max_value=10_000)
SECONDS = st.sampled_from([0.1, 0.6, 2.0, 5.0, 30.0])


class DeciderMachine(RuleBasedStateMachine):
    """Anybody may do anything at any time; the world checks every decision."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(auto_hosts=False, max_shared=3, max_dedicated=2, warm_hosts=1, max_starting=3, grow_at=2)
        self.sessions = 0

    def _pick(self, nodes: list[Node], pick: int) -> Node | None:
        return nodes[pick % len(nodes)] if nodes else None

    def _live(self) -> list[Node]:
        return [node for node in self.world.state.nodes.values() if not node.is_ended]

    def _bodies(self) -> list[Node]:
        return [node for node in self._live() if node.on_host]

    @rule(
        busy=st.sampled_from(["reject", "queue", "interrupt"]),
        session=st.integers(0, 2),
        deadline=st.sampled_from([None, 1.0, 20.0]),
        limit=st.sampled_from([None, 1, 2]),
        client=st.integers(0, 1),
        gone=st.sampled_from(["cancel", "continue"]),
    )
    def open_turn(
        self, busy: str, session: int, deadline: float | None, limit: int | None, client: int, gone: str
    ) -> None:
        self.world.open_turn(
            f"session {session}",
            busy=busy,
            deadline_s=deadline,
            client_id=f"client_{client}",
            limits=Limits(max_concurrent=limit, max_depth=4),
            on_disconnect=gone,
        )

    @rule(
        pick=PICK,
        count=st.integers(1, 4),
        dedicated=st.booleans(),
        detached=st.sampled_from([False, False, False, True]),
        retries=st.integers(0, 2),
        delay=st.sampled_from([0.0, 1.0]),
        attempt_timeout=st.sampled_from([None, None, 1.0]),
        deadline=st.sampled_from([None, None, 3.0]),
        chain=st.booleans(),
        env=st.sampled_from(["x", "y"]),
        limit=st.sampled_from([None, None, 1]),
        old=st.booleans(),
    )
    def delegate(
        self,
        pick: int,
        count: int,
        dedicated: bool,
        detached: bool,
        retries: int,
        delay: float,
        attempt_timeout: float | None,
        deadline: float | None,
        chain: bool,
        env: str,
        limit: int | None,
        old: bool,
    ) -> None:
        parents = [node for node in self._live() if node.is_turn or node.on_host]
        parent = self._pick(list(self.world.state.nodes.values()) if old else parents, pick)
        if parent is None:
            return
        runs = [node.id for node in self.world.state.nodes.values() if not node.is_turn]
        requests = []
        before: tuple[str, ...] = ()
        if chain and runs:
            before = (runs[pick % len(runs)],)
        for _ in range(count):
            request = self.world.request(
                pool=(Pool.DEDICATED if dedicated else Pool.SHARED).value,
                detached=detached,
                retries=retries,
                retry_delay_s=delay,
                attempt_timeout_s=attempt_timeout,
                deadline_s=deadline,
                after=before,
                limits=Limits(max_concurrent=limit) if limit else None,
            )
            requests.append(request)
            before = (request.run_id,) if chain else ()
        self.world.delegate_all(parent.id, requests, env_key=env)

    @rule(pick=PICK, report=REPORTS, before=st.booleans())
    def body_ends(self, pick: int, report: str, before: bool) -> None:
        node = self._pick(self._bodies(), pick)
        if node is not None:
            self.world.end(node.id, report, before_cancel=before)

    @rule(pick=PICK, count=st.integers(1, 3))
    def bodies_return(self, pick: int, count: int) -> None:
        for _ in range(count):
            node = self._pick(self._bodies(), pick)
            if node is not None:
                self.world.end(node.id)

    @rule(pick=PICK, report=REPORTS, host=st.sampled_from(["own", "other"]), back=st.integers(0, 1))
    def late_or_foreign_report(self, pick: int, report: str, host: str, back: int) -> None:
        """Say something that only counts if it is about what runs there now."""
        node = self._pick(list(self.world.state.nodes.values()), pick)
        if node is None:
            return
        due = host == "own" and back == 0 and node.on_host
        count = len(self.world.events)
        attempt = node.attempt - back
        if not due:
            host_id = node.host_id if host == "own" else "host_other"
            self.world.report(host_id, ReportEnded(node.id, attempt, report))
            assert not any(event.node_id == node.id for event in self.world.events[count:])

    @rule(pick=PICK, on=st.lists(PICK, min_size=1, max_size=3))
    def body_waits(self, pick: int, on: list[int]) -> None:
        node = self._pick(self._bodies(), pick)
        if node is not None:
            runs = [other.id for other in self.world.state.nodes.values() if not other.is_turn]
            self.world.wait(node.id, *(runs[i % len(runs)] for i in on))

    @rule(pick=PICK)
    def body_waits_for_children(self, pick: int) -> None:
        node = self._pick([n for n in self._bodies() if n.live_children], pick)
        if node is not None:
            self.world.wait(node.id, *(node.live_children or ()))

    @rule(pick=PICK)
    def body_resumes(self, pick: int) -> None:
        node = self._pick([n for n in self._bodies() if n.state is NodeState.WAITING], pick)
        if node is not None:
            self.world.resume(node.id)

    @rule(pick=PICK, kill=st.booleans(), grace=st.sampled_from([None, 0.0, 1.0]), again=st.booleans())
    def cancel(self, pick: int, kill: bool, grace: float | None, again: bool) -> None:
        node = self._pick(list(self.world.state.nodes.values()), pick)
        if node is None:
            return
        self.world.cancel(node.id, kill=kill, grace_s=grace, request_id=f"req_of_{pick}" if again else self._id())

    def _id(self) -> str:
        return self.world.ids.request()

    @rule(session=st.integers(0, 2))
    def cancel_session(self, session: int) -> None:
        self.world.cancel(f"session {session}")

    @rule(pick=PICK, report=st.sampled_from(["returned", "raised", "cancelled", "follow"]))
    def finish_turn(self, pick: int, report: str) -> None:
        turn = self._pick([node for node in self._live() if node.is_turn], pick)
        if turn is not None:
            self.world.finish(turn.id, report)

    @rule(client=st.integers(0, 1))
    def client_is_lost(self, client: int) -> None:
        self.world.client_gone(f"client_{client}")

    @rule(pick=PICK)
    def host_dies(self, pick: int) -> None:
        hosts = list(self.world.state.hosts)
        if hosts:
            self.world.host_gone(hosts[pick % len(hosts)])

    @rule()
    def hosts_answer(self) -> None:
        self.world.settle_hosts()

    @precondition(lambda self: self.world.to_spawn)
    @rule()
    def host_answers(self) -> None:
        self.world.host_ready(self.world.to_spawn.pop(0))

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seed=st.integers(0, 1_000))
    def coordinator_restarts(self, seed: int) -> None:
        chance = random.Random(seed)
        fates = {host: chance.choice(["there", "there", "gone", "silent"]) for host in self.world.state.hosts}
        bodies = [name for host in self.world.state.hosts.values() for name in host.runs]
        self.world.restart(
            self.world.survey(
                gone=[host for host, fate in fates.items() if fate == "gone"],
                silent=[host for host, fate in fates.items() if fate == "silent"],
                missing=[name for name in bodies if chance.random() < 0.3],
                arguments=chance.random() < 0.7,
            )
        )

    @rule(node=st.sampled_from(["n1", "n2"]), undo=st.booleans())
    def a_node_is_drained(self, node: str, undo: bool) -> None:
        self.world.drain_node(node, undo=undo)

    def teardown(self) -> None:
        self.world.drain()


DeciderMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    # Explaining a failure traces every line: minutes on Python 3.11.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.requirement("B22")
@pytest.mark.requirement("F8")
@pytest.mark.requirement("F9")
@pytest.mark.field_report("A8")
@pytest.mark.field_report("B8")
class TestDecider(DeciderMachine.TestCase):  # type: ignore[misc,valid-type]
    """The invariants of `decider.py` over random histories."""


@pytest.mark.slow
class TestDeciderLong(DeciderMachine.TestCase):  # type: ignore[misc,valid-type]
    """The same, longer."""

    settings = settings(
        max_examples=150,
        stateful_step_count=80,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def storm(seed: int) -> None:
    """Delegate from four sides at once while the parent is cancelled somewhere in between."""
    chance = random.Random(seed)
    world = World(check=False, max_shared=chance.choice([1, 4, 64]))
    turn = world.open_turn()
    parent = world.run(turn)
    cancel_at = chance.randrange(1, 60)
    threads = [[world.request() for _ in range(chance.randrange(1, 30))] for _ in range(4)]
    accepted: list[str] = []
    answered: list[str] = []
    for step in range(200):
        if step == cancel_at:
            world.cancel(chance.choice([turn, parent]), request_id="req_storm")
        thread = chance.choice(threads)
        if thread and chance.random() < 0.7:
            request = thread.pop()
            decision = world.delegate_all(parent, [request])
            (answered if decision.error is not None else accepted).append(request.run_id)
        bodies = [node for node in world.state.nodes.values() if node.on_host and node.id != parent]
        if bodies and chance.random() < 0.5:
            node = chance.choice(bodies)
            world.end(node.id, chance.choice(["returned", "raised", "cancelled"]), before_cancel=node.cause is None)
    assert world.cancel(turn, request_id="req_storm").accepted
    started_late = False
    cancelled = False
    for event in world.events:
        cancelled = cancelled or (event.kind == "cancel_requested" and "req_storm" in repr(event))
        started_late = started_late or (cancelled and event.kind == "run_started")
    assert not started_late
    while bodies := [node for node in world.state.nodes.values() if node.on_host]:
        world.unwind(bodies[-1].id)
    world.finish(turn, "cancelled")
    world.check_now()
    assert world.live() == []
    assert set(world.state.used.values()) == {0}
    ends = world.terminal_counts()
    assert all(ends[run_id] == 1 for run_id in [parent, turn, *accepted])
    assert not set(answered) & set(world.state.nodes)
    assert {run_id for refusal in world.refusals() for run_id in refusal.run_ids} == set(answered)


@pytest.mark.requirement("F9")
@pytest.mark.requirement("B22")
@pytest.mark.field_report("B8")
@pytest.mark.field_report("A8")
@pytest.mark.parametrize("block", range(4))
def test_a_storm_of_delegations_against_a_cancel_starts_nothing_after_it(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        storm(seed)


def test_a_request_sent_twice_is_carried_out_once_whatever_came_between() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn)
    first = world.cancel(run, request_id="req_same")
    world.unwind(run)
    count = len(world.events)
    again = world.decider.cancel(CancelRequest("req_same", run), world.now)
    assert (again.events, len(world.events)) == ([], count)
    assert again.answer is not None
    assert (again.answer.accepted, again.answer.cause) == (True, first.cause)
