"""Random histories of the decider with claims: the world checks the table after every decision."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from remit.core.messages import ReportProcess
from tests.coordinator.claims_world import ClaimWorld, wish
from tests.histories.test_decider_machine import PICK, DeciderMachine

AREAS = st.lists(
    st.sampled_from(["w:a", "w:a/b", "r:a", "r:a/b", "w:c", "r:c", "w:", "r:"]), min_size=1, max_size=2, unique=True
)


class ClaimsMachine(DeciderMachine):
    """Whatever may happen to turns and runs, while they claim four places."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = ClaimWorld(
            auto_hosts=False, max_shared=3, max_dedicated=2, warm_hosts=1, max_starting=3, grow_at=2
        )
        self.world = self.claims
        self.asked: list[tuple[str, str]] = []

    @rule(areas=st.one_of(st.just([]), AREAS))
    def later_runs_claim(self, areas: list[str]) -> None:
        self.claims.next_claims = wish(*areas)

    @rule(pick=PICK, areas=AREAS, timeout=st.sampled_from([None, None, 1.0]), back=st.sampled_from([0, 0, 0, 1]))
    def body_claims(self, pick: int, areas: list[str], timeout: float | None, back: int) -> None:
        nodes = [node for node in self.world.state.nodes.values() if node.is_turn or node.attempt]
        node = self._pick(nodes, pick)
        if node is not None:
            claim_id = f"claim_{len(self.asked)}"
            self.asked.append((node.id, claim_id))
            attempt = node.attempt - back
            self.claims.ask(node.id, *areas, claim_id=claim_id, timeout_s=timeout, attempt=attempt)

    @rule(pick=PICK, foreign=st.sampled_from([False, False, False, True]))
    def body_gives_back(self, pick: int, foreign: bool) -> None:
        if self.asked:
            owner, claim_id = self.asked[pick % len(self.asked)]
            if foreign:
                owner = self.asked[0][0]
            self.claims.give_up(owner, claim_id)

    @rule(pick=PICK, other=PICK, is_over=st.sampled_from([False, False, True]))
    def turn_waits_for_a_run_of_another(self, pick: int, other: int, is_over: bool) -> None:
        turn = self._pick(list(self.world.state.turns.values()), pick)
        run = self._pick([node for node in self.world.state.nodes.values() if not node.is_turn], other)
        if turn is not None and run is not None:
            self.claims.turn_waits(turn.id, *(() if is_over else (run.id,)))

    @rule(pick=PICK)
    def body_starts_a_process(self, pick: int) -> None:
        node = self._pick([node for node in self._bodies() if not node.processes], pick)
        if node is not None:
            self.world.report(node.host_id, ReportProcess(node.id, node.attempt, 7, 1.0, "here", "cc"))

    @rule(gone=st.booleans())
    def process_is_swept(self, gone: bool) -> None:
        if self.claims.swept:
            run_id, pid = self.claims.swept.pop(0)
            self.claims.process_swept(run_id, pid, gone=gone)

    @rule(pick=PICK)
    def somebody_vouches(self, pick: int) -> None:
        node = self._pick([node for node in self.world.state.nodes.values() if node.is_ended], pick)
        if node is not None:
            self.claims.clear(node.id)

    def teardown(self) -> None:
        super().teardown()
        for owner in self.world.state.locks.owners():
            self.claims.clear(owner)
        assert self.world.state.locks.is_idle
        assert self.world.state.awaited == {}


ClaimsMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.requirement("F12")
@pytest.mark.requirement("F13")
class TestClaims(ClaimsMachine.TestCase):  # type: ignore[misc,valid-type]
    """Exclusion, growing tokens, no lease after a terminal event, and fold equal to live."""


@pytest.mark.slow
class TestClaimsLong(ClaimsMachine.TestCase):  # type: ignore[misc,valid-type]
    """The same, longer."""

    settings = settings(
        max_examples=100,
        stateful_step_count=80,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
