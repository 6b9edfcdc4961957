"""Random histories in which the fold begins anew, from a snapshot of any moment."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import rule

from remit.coordinator.snapshot import decode, encode, freeze
from tests.coordinator.decider_world import same
from tests.histories.test_claims_machine import ClaimsMachine


class SnapshotMachine(ClaimsMachine):
    """Whatever may happen; the world compares the live state with snapshot and tail after every decision."""

    @rule()
    def keep_a_snapshot(self) -> None:
        thawed = decode(encode(freeze(self.world.state)))
        difference = same(self.world.state, thawed)
        assert not difference, difference
        assert same(self.world.folded, thawed) == "" or len(thawed.nodes) < len(self.world.folded.nodes)
        waiting = {pool: set(names) for pool, names in self.world.folded.queues.items()}
        assert {pool: set(names) for pool, names in thawed.queues.items()} == waiting
        assert thawed.delayed == self.world.folded.delayed
        self.world.folded = thawed

    @rule()
    def forget_what_is_old(self) -> None:
        self.world.decider.prune(self.world.now)


SnapshotMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.requirement("F14")
class TestSnapshots(SnapshotMachine.TestCase):  # type: ignore[misc,valid-type]
    """A snapshot and the events behind it give the live state, waiting rooms included."""
