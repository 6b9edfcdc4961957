"""Random histories with approvals, budgets, effects and sessions on top of everything else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from remit.coordinator.state import Node
from remit.core.approvals import ApprovalRule
from remit.core.events import ApprovalAnswered, ApprovalRequested, Spent, TurnStarted
from remit.core.limits import Limits
from tests.coordinator.conversation_world import ConversationWorld
from tests.histories.test_decider_machine import PICK, DeciderMachine

POLICIES = st.sampled_from(["ask", "ask", "ask", "approve", "deny"])


class ConversationMachine(DeciderMachine):
    """Bodies also ask, spend and have effects; people answer, early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.world: ConversationWorld = ConversationWorld(
            auto_hosts=False, max_shared=3, max_dedicated=2, warm_hosts=1, max_starting=3, grow_at=2
        )
        self.totals: Counter[str] = Counter()

    def _speakers(self) -> list[Node]:
        return [node for node in self._live() if node.on_host or (node.is_turn and node.started_at is not None)]

    @rule(
        session=st.integers(0, 2),
        busy=st.sampled_from(["queue", "interrupt"]),
        budget=st.sampled_from([None, 5, 50]),
        own=st.sampled_from([None, 10]),
        policy=POLICIES,
        stop=st.booleans(),
    )
    def open_limited_turn(
        self, session: int, busy: str, budget: int | None, own: int | None, policy: str, stop: bool
    ) -> None:
        self.world.open_turn(
            f"session {session}",
            busy=busy,
            session_limits=Limits(tokens=budget),
            limits=Limits(tokens=own, max_depth=4),
            approvals=(ApprovalRule("*", policy).to_dict(),),
            on_failure="stop" if stop else "continue",
        )

    @rule(pick=PICK, tokens=st.sampled_from([3, 20]), count=st.integers(1, 3))
    def delegate_with_a_budget(self, pick: int, tokens: int, count: int) -> None:
        parent = self._pick(self._speakers(), pick)
        if parent is not None:
            requests = [self.world.request(limits=Limits(tokens=tokens), retries=1) for _ in range(count)]
            self.world.delegate_all(parent.id, requests)

    @rule(pick=PICK, timeout=st.sampled_from([None, 1.0]), anybody=st.booleans(), back=st.integers(0, 1))
    def ask(self, pick: int, timeout: float | None, anybody: bool, back: int) -> None:
        nodes = list(self.world.state.nodes.values()) if anybody else self._speakers()
        node = self._pick(nodes, pick)
        if node is not None:
            self.world.ask(node.id, attempt=node.attempt - back, timeout_s=timeout)

    @rule(pick=PICK, yes=st.booleans(), again=st.booleans())
    def answer(self, pick: int, yes: bool, again: bool) -> None:
        names = list(self.world.state.approvals)
        if names:
            name = names[pick % len(names)]
            self.world.answer(name, approve=yes, request_id=f"req_for_{name}" if again else self._id())

    @rule(pick=PICK)
    def asker_gives_up(self, pick: int) -> None:
        records = list(self.world.state.approvals.values())
        if records:
            record = records[pick % len(records)]
            self.world.withdraw(record.id, record.node_id)

    @rule(pick=PICK, tokens=st.integers(0, 6), ended=st.booleans())
    def spend(self, pick: int, tokens: int, ended: bool) -> None:
        nodes = list(self.world.state.nodes.values()) if ended else self._speakers()
        node = self._pick([node for node in nodes if node.is_turn or node.host_id], pick)
        if node is not None:
            self.world.spend(node.id, node.own_tokens + tokens, tokens / 10)

    @rule(pick=PICK, number=st.integers(0, 2), ended=st.booleans())
    def effect(self, pick: int, number: int, ended: bool) -> None:
        node = self._pick(self._speakers(), pick)
        if node is not None:
            self.world.effect(node.id, f"effect {number}", ended=ended)

    @rule(pick=PICK)
    def turn_has_something(self, pick: int) -> None:
        turn = self._pick(list(self.world.state.turns.values()), pick)
        if turn is not None:
            self.world.partial(turn.id, f"part {pick}")

    def teardown(self) -> None:
        """Everything ends; then each question has one answer, and the sums are right."""
        super().teardown()
        events = self.world.events
        asked = [event.approval_id for event in events if isinstance(event, ApprovalRequested)]
        answered = Counter(event.approval_id for event in events if isinstance(event, ApprovalAnswered))
        assert answered == Counter(asked)
        spent = [event for event in events if isinstance(event, Spent)]
        state = self.world.state
        assert sum(event.tokens for event in spent) == sum(turn.tokens for turn in state.turns.values())
        assert not any(node.effects for node in state.nodes.values() if node.is_ended and not node.uncertain)
        assert not state.fail_fast
        self._check_order_of_turns()

    def _check_order_of_turns(self) -> None:
        """In each session turns have started in the order in which they were accepted."""
        started = [event.node_id for event in self.world.events if isinstance(event, TurnStarted)]
        for conversation in self.world.state.conversations.values():
            accepted = list(conversation.turns)
            mine = [name for name in started if name in conversation.turns]
            assert mine == [name for name in accepted if name in mine]


ConversationMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.requirement("B22")
@pytest.mark.requirement("F14")
@pytest.mark.field_report("J1")
@pytest.mark.field_report("J5")
class TestConversations(ConversationMachine.TestCase):  # type: ignore[misc,valid-type]
    """The invariants of `decider.py`, `approving.py` and `spending.py` over random histories."""
