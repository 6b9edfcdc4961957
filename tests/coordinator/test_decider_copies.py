"""Copies of requests that come late: after a refusal, and after what they were about was pruned."""

from __future__ import annotations

import pytest

from remit.coordinator import decider
from remit.core.errors import DependencyError, SessionBusy
from tests.coordinator.decider_world import World


def pruned_turn(w: World, turn_id: str = "turn_a") -> None:
    """Let a turn come and go, and be forgotten."""
    w.open_turn(turn_id=turn_id)
    w.finish(turn_id)
    assert w.decider.prune() == [turn_id]


def test_a_turn_that_was_pruned_is_not_accepted_a_second_time() -> None:
    w = World(keep_ended_turns=0)
    pruned_turn(w)
    before = len(w.events)
    w.open_turn(turn_id="turn_a")
    assert (w.last.error, w.events[before:]) == (None, [])


def test_only_so_many_pruned_turns_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decider, "_PAST_TURNS", 1)
    w = World(keep_ended_turns=0)
    pruned_turn(w, "turn_a")
    pruned_turn(w, "turn_b")
    assert list(w.state.past_turns) == ["turn_b"]


def test_a_turn_that_was_refused_stays_refused_when_its_session_is_free() -> None:
    w = World()
    first = w.open_turn()
    w.open_turn(turn_id="turn_a")
    refused = w.last.error
    assert isinstance(refused, SessionBusy)
    w.finish(first)
    w.open_turn(turn_id="turn_a")
    assert w.last.error is refused
    assert "turn_a" not in w.state.nodes


def test_a_delegation_that_was_refused_stays_refused_when_its_reason_is_gone() -> None:
    w = World()
    one, two = w.delegate(w.open_turn(), 2)
    w.wait(one, two)
    requests = [w.request(after=(one,))]
    assert isinstance(w.delegate_all(two, requests).error, DependencyError)
    w.resume(one)
    w.end(one)
    assert isinstance(w.delegate_all(two, requests).error, DependencyError)
    assert len(w.refusals()) == 1


def test_a_cancel_of_a_session_whose_turn_was_pruned_does_not_hit_the_next_one() -> None:
    w = World(keep_ended_turns=0)
    first = w.open_turn()
    answer = w.cancel("s1", request_id="req_a")
    w.finish(first, "cancelled")
    assert w.decider.prune() == [first]
    later = w.open_turn()
    again = w.cancel("s1", request_id="req_a")
    assert (again.accepted, again.target, again.live) == (answer.accepted, first, 0)
    assert w.node(later).cause is None
