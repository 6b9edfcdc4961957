"""A body may hear of its stop from the answer to a request, before its signal is set."""

from __future__ import annotations

import pytest

from remit.core.cause import CauseKind
from remit.core.errors import TurnCancelled
from remit.core.outcome import Outcome
from tests.coordinator.decider_world import World


@pytest.mark.requirement("B20")
@pytest.mark.field_report("D1")
def test_a_body_that_a_refused_request_tells_of_its_cancel_ends_cancelled() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, retries=1)
    world.cancel(turn, reason="enough")
    refused = world.delegate_all(run, [world.request()])
    assert isinstance(refused.error, TurnCancelled)
    # The order to the host is slower than the answer: the body raises with its signal not set.
    world.end(run, "raised", before_cancel=True, error_type="TurnCancelled", error="cancelled")
    world.finish(turn, "cancelled")
    assert world.outcome(run) is Outcome.CANCELLED
    assert world.cause(run) == world.cause(turn)


def test_a_body_that_a_refused_request_tells_of_its_attempts_end_has_timed_out() -> None:
    world = World()
    turn = world.open_turn()
    run = world.run(turn, attempt_timeout_s=1.0)
    world.advance(1.0)
    refused = world.delegate_all(run, [world.request()])
    assert isinstance(refused.error, TurnCancelled)
    world.end(run, "raised", before_cancel=True, error_type="TurnCancelled", error="took too long")
    assert world.outcome(run) is Outcome.TIMED_OUT
    assert world.cause(run).kind is CauseKind.ATTEMPT_TIMEOUT


def test_a_body_that_raises_the_error_of_a_cancel_without_one_has_failed() -> None:
    world = World()
    run = world.run(world.open_turn())
    world.end(run, "raised", before_cancel=True, error_type="TurnCancelled", error="made up")
    assert world.outcome(run) is Outcome.FAILED
