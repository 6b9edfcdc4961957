"""Budgets in the decider: what counts where, what is stopped, and by whose cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from remit.core.cause import CauseKind
from remit.core.errors import BudgetExceeded, InvalidArgument
from remit.core.events import Spent
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from tests.coordinator.conversation_world import ConversationWorld


def test_what_a_body_spends_counts_for_everything_above_it_and_its_session() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn)
    below = w.run(run)
    let_go = w.run(run, detached=True)
    w.spend(below, 5, 0.5)
    w.spend(let_go, 7, 0.25)
    w.spend(turn, 1)
    totals = {name: (w.node(name).tokens, w.node(name).cost) for name in (turn, run, below, let_go)}
    assert totals == {turn: (13, 0.75), run: (12, 0.75), below: (5, 0.5), let_go: (7, 0.25)}
    assert w.state.conversations["s1"].tokens == 13
    assert (w.history()[0].tokens, w.history()[0].cost) == (13, 0.75)


def test_a_total_that_is_repeated_or_comes_late_counts_once() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn())
    for tokens in (4, 4, 9, 4, 9):
        w.spend(run, tokens)
    assert w.node(run).tokens == 9
    assert [event.tokens for event in w.events if isinstance(event, Spent)] == [4, 5]


@pytest.mark.requirement("A24")
@pytest.mark.parametrize("limits", [Limits(tokens=10), Limits(cost=1.0)])
@pytest.mark.parametrize("whose", ["turn", "run", "below"])
def test_a_budget_that_is_used_up_cancels_its_own_node_and_nothing_above(limits: Limits, whose: str) -> None:
    w = ConversationWorld()
    turn = w.open_turn(limits=limits if whose == "turn" else None)
    run = w.run(turn, limits=limits if whose == "run" else None)
    below, beside = w.run(run, limits=limits if whose == "below" else None), w.run(turn)
    target = {"turn": turn, "run": run, "below": below}[whose]
    w.spend(below, 9, 0.9)
    assert not any(w.node(name).cause for name in (turn, run, below, beside))
    w.spend(below, 10, 1.0)
    for name in (turn, run, below, beside):
        inside = name in [node.id for node in w.state.subtree(w.node(target))]
        assert (w.node(name).cause is not None) is inside, name
        if inside:
            assert (w.cause(name).kind, w.cause(name).origin) == (CauseKind.BUDGET, target)
    reason = w.cause(target).reason
    assert reason == "its budget is used up: " + ("10 of 10 tokens are spent" if limits.tokens else "1 of 1 is spent")
    w.unwind(below)
    assert w.outcome(below) is Outcome.CANCELLED
    w.drain()


def test_tenths_add_up() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn(limits=Limits(cost=1.0)))
    total = 0.0
    for _ in range(10):
        total += 0.1
        w.spend(run, cost=total)
    assert total < 1.0
    assert w.cause(run).kind is CauseKind.BUDGET


def test_of_several_budgets_the_topmost_is_the_cause() -> None:
    w = ConversationWorld()
    turn = w.open_turn(limits=Limits(tokens=10))
    run = w.run(turn, limits=Limits(tokens=10))
    w.spend(run, 12)
    assert w.cause(run).origin == w.cause(turn).origin == turn


@pytest.mark.requirement("A24")
def test_a_session_that_has_nothing_left_stops_its_turns_and_takes_no_more() -> None:
    w = ConversationWorld()
    first = w.open_turn(session_limits=Limits(tokens=10))
    run = w.run(first)
    w.spend(run, 6)
    w.end(run)
    w.finish(first)
    second = w.open_turn()
    queued = w.open_turn(busy="queue")
    other = w.open_turn("s2")
    w.spend(second, 4)
    assert w.cause(second).kind is w.cause(queued).kind is CauseKind.BUDGET
    assert "session 's1'" in w.cause(second).reason
    assert w.outcome(queued) is Outcome.CANCELLED
    assert w.node(queued).started_at is None
    assert w.node(other).cause is None
    w.finish(second, "cancelled")
    refused = w.open_turn(turn_id="turn_late")
    assert isinstance(w.last.error, BudgetExceeded)
    assert "10 of 10 tokens" in str(w.last.error)
    assert refused not in w.state.nodes, "refused before anything could be spent"
    w.open_turn(turn_id="turn_more", session_limits=Limits(tokens=20))
    assert w.last.error is None, "a larger budget is for whoever gives it"


def test_the_end_of_a_turn_by_its_sessions_budget_starts_no_queued_one() -> None:
    w = ConversationWorld(max_shared=2, warm_hosts=0)
    w.run(w.open_turn("s2"))
    first = w.open_turn(session_limits=Limits(tokens=10))
    stuck, waiting = w.delegate(first, 2)
    w.auto_hosts = False  # nothing can start any more
    w.cancel(stuck, grace_s=1.0)
    w.advance(2.0)
    queued = w.open_turn(busy="queue")
    w.finish(first, "follow")
    assert (w.outcome(stuck), w.node(waiting).started_at) == (Outcome.CANCELLED, None)
    w.spend(stuck, 10)
    assert {w.outcome(node) for node in (first, waiting, queued)} == {Outcome.CANCELLED}
    assert w.node(queued).started_at is None


def test_a_smaller_budget_for_a_session_counts_what_was_spent_before() -> None:
    w = ConversationWorld()
    first = w.open_turn()
    w.spend(first, 50)
    w.finish(first)
    w.open_turn(session_limits=Limits(tokens=50))
    assert isinstance(w.last.error, BudgetExceeded)


@pytest.mark.requirement("D27")
@pytest.mark.field_report("K7")
def test_what_a_cancelled_run_spends_while_it_stops_counts() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn)
    w.spend(run, 4)
    w.cancel(run)
    w.spend(run, 6)
    w.unwind(run)
    assert w.outcome(run) is Outcome.CANCELLED
    assert w.node(turn).tokens == w.state.conversations["s1"].tokens == 6


@pytest.mark.requirement("D27")
def test_what_is_heard_of_after_the_end_counts_and_changes_nothing_else() -> None:
    w = ConversationWorld()
    turn = w.open_turn(limits=Limits(tokens=10))
    run, beside = w.delegate(turn, 2)
    w.cancel(run, grace_s=1.0)
    w.advance(2.0)
    assert w.node(run).unconfirmed, "it was given up on, and goes on spending"
    before = w.node(run)
    outcome, cause = before.outcome, before.cause
    w.spend(run, 11)
    assert (w.node(run).outcome, w.node(run).cause) == (outcome, cause)
    assert w.node(turn).tokens == 11
    assert w.cause(turn).kind is w.cause(beside).kind is CauseKind.BUDGET
    assert [event.late for event in w.events if isinstance(event, Spent)] == [True]
    assert w.terminal_counts()[run] == 1


def test_a_spending_of_an_earlier_attempt_or_another_host_is_refused() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn(), retries=1)
    w.spend(run, 3)
    w.end(run, "raised")
    w.advance(1.0)
    refused = w.state.refused
    w.spend(run, 5, attempt=1)
    w.spend(run, 5, host_id="host_other")
    assert w.state.refused == refused + 2
    w.spend(run, 2)
    assert w.node(run).tokens == 5, "both attempts count, each by its own total"


@pytest.mark.parametrize("first", ["spend", "end"])
def test_spending_and_ending_race_and_the_order_decides(first: str) -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn, limits=Limits(tokens=10))
    host = w.node(run).host_id
    steps: list[Callable[[], object]] = [lambda: w.spend(run, 10, host_id=host), lambda: w.end(run)]
    for step in steps if first == "spend" else reversed(steps):
        step()
    assert w.outcome(run) is (Outcome.CANCELLED if first == "spend" else Outcome.SUCCEEDED)
    assert w.node(run).salvage is (first == "spend"), "what came after is kept, and is no success"
    assert w.node(turn).tokens == 10


def test_a_turn_tells_its_whole_spending_at_its_end() -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    w.spend(turn, 3)
    w.finish(turn, tokens=8, cost=0.5)
    w.finish(turn, tokens=8, cost=0.5)
    assert (w.node(turn).tokens, w.node(turn).cost) == (8, 0.5)


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, True, "3"])
def test_amounts_that_are_none_are_refused(wrong: Any) -> None:
    w = ConversationWorld()
    turn = w.open_turn()
    run = w.run(turn)
    assert isinstance(w.spend(turn, wrong).error, InvalidArgument)
    assert isinstance(w.spend(turn, 0, wrong).error, InvalidArgument)
    refused = w.state.refused
    w.spend(run, wrong)
    assert w.state.refused == refused + 1
    assert w.node(turn).tokens == 0


def test_a_used_up_run_has_no_further_attempt() -> None:
    w = ConversationWorld()
    run = w.run(w.open_turn(), retries=3, limits=Limits(tokens=5))
    w.spend(run, 5)
    w.end(run, "raised")
    w.advance(60.0)
    assert (w.outcome(run), w.node(run).attempt) == (Outcome.CANCELLED, 1)
