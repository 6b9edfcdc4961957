"""The blocking API: the same system, seen from threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from remit.agents import RunOptions
from remit.coordinator import sync
from remit.core import CauseKind, Outcome, RunCancelled, RunFailed, TurnCancelled
from remit.core.errors import CoordinatorUnavailable
from remit.testing import InProcess, open_inprocess, wait_until
from tests.agents import bodies
from tests.agents.bodies import Stage

T = TypeVar("T")


@pytest.fixture
def system(tmp_path: Path) -> Iterator[InProcess]:
    with open_inprocess(tmp_path, poll_s=0.1) as system:
        yield system


@pytest.fixture
def coordinator(system: InProcess) -> Iterator[sync.Coordinator]:
    with sync.Coordinator(system.coordinator()) as coordinator:
        yield coordinator


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start work in a thread and return a future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # carried over to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def test_a_plain_caller_delegates_waits_and_looks(coordinator: sync.Coordinator) -> None:
    with coordinator.turn("t", session="s") as turn:
        runs = turn.delegate_many(bodies.add, [{"a": n, "b": 1} for n in range(4)])
        assert turn.gather(*runs) == [1, 2, 3, 4]
        assert turn.gather(*runs, return_outcomes=True) == [Outcome.SUCCEEDED] * 4
        assert {run.value() for run in turn.as_completed(runs)} == {1, 2, 3, 4}
        with pytest.raises(RunFailed, match="ValueError: no"):
            turn.delegate(bodies.boom).result()
        first = turn.delegate(bodies.give, value=1)
        after = turn.delegate(bodies.give, value=2, options=RunOptions(after=(first,)))
        assert after.wait() is Outcome.SUCCEEDED
        assert (turn.session_id, turn.outcome) == ("s", None)
        assert coordinator.tree(turn.id).root.id == turn.id
        assert coordinator.run(first.id).outcome is Outcome.SUCCEEDED
    assert turn.outcome is Outcome.SUCCEEDED
    assert len(coordinator.runs()) == 7
    assert [view.outcome for view in coordinator.turns()] == [Outcome.SUCCEEDED]


@pytest.mark.field_report("M16")
def test_a_turn_in_a_thread_is_stopped_from_another_thread(coordinator: sync.Coordinator, stage: Stage) -> None:
    def work() -> None:
        with coordinator.turn("t", session="s") as turn:
            turn.delegate(bodies.nap).result()

    working = in_thread(work)
    wait_until(lambda: "nap began" in stage.notes())
    receipt = coordinator.cancel("s", "enough", actor="ada")
    assert receipt.accepted
    with pytest.raises(TurnCancelled) as raised:
        working.result(30)
    assert raised.value.cause == receipt.cause
    assert receipt.quiet().runs == {"cancelled": 1}


@pytest.mark.requirement("B5")
def test_a_turn_in_a_thread_is_stopped_through_another_client(
    system: InProcess, coordinator: sync.Coordinator, stage: Stage
) -> None:
    def work() -> None:
        with coordinator.turn("t", session="s") as turn:
            turn.sleep(600)

    working = in_thread(work)
    wait_until(coordinator.turns)
    with sync.Coordinator(system.coordinator(surface="cli")) as other:
        wait_until(lambda: other.cancel("s", "enough").accepted)
        with pytest.raises(TurnCancelled):
            working.result(30)
        assert other.turns()[0].outcome is Outcome.CANCELLED


@pytest.mark.field_report("E3")
@pytest.mark.field_report("M1")
def test_waits_and_cancels_of_one_run_leave_the_others(coordinator: sync.Coordinator, stage: Stage) -> None:
    with coordinator.turn("t") as turn:
        one = turn.delegate(bodies.nap)
        other = turn.delegate(bodies.wait_at, gate="go", value=1)
        wait_until(lambda: len(stage.notes()) == 2)
        assert one.wait(0.0) is None
        receipt = one.cancel("enough").quiet()
        assert receipt.is_quiet
        with pytest.raises(RunCancelled):
            one.result()
        assert other.outcome is None
        stage.open_gate("go")
        assert other.result() == 1


def test_an_error_in_the_block_stops_what_is_below(coordinator: sync.Coordinator, stage: Stage) -> None:
    with pytest.raises(ValueError, match="in the block"), coordinator.turn("t") as turn:
        run = turn.delegate(bodies.nap)
        wait_until(lambda: "nap began" in stage.notes())
        raise ValueError("in the block")
    assert turn.outcome is Outcome.FAILED
    assert run.cause is not None
    assert run.cause.kind is CauseKind.PARENT_FAILED


def test_a_keyboard_interrupt_in_the_block_stops_the_turn_and_stays_one(
    coordinator: sync.Coordinator, stage: Stage
) -> None:
    with pytest.raises(KeyboardInterrupt), coordinator.turn("t") as turn:
        turn.delegate(bodies.nap)
        wait_until(lambda: "nap began" in stage.notes())
        raise KeyboardInterrupt
    assert turn.outcome is Outcome.CANCELLED
    assert turn.cause is not None
    assert turn.cause.kind is CauseKind.USER_INTERRUPT


def test_a_catch_all_does_not_contain_ones_own_cancel(coordinator: sync.Coordinator, stage: Stage) -> None:
    def work() -> str:
        with coordinator.turn("t", session="s") as turn:
            try:
                turn.delegate(bodies.nap).result()
            except Exception:
                return "[error]"
        return "fine"

    working = in_thread(work)
    wait_until(lambda: "nap began" in stage.notes())
    coordinator.cancel("s", "enough")
    with pytest.raises(TurnCancelled):
        working.result(30)


def test_closing_with_a_live_turn_lets_no_thread_wait_for_ever(system: InProcess, stage: Stage) -> None:
    coordinator = sync.Coordinator(system.coordinator())
    with coordinator:

        def work() -> None:
            with coordinator.turn("t") as turn:
                turn.delegate(bodies.nap).result()

        working = in_thread(work)
        wait_until(lambda: "nap began" in stage.notes())
    with pytest.raises((TurnCancelled, CoordinatorUnavailable)):
        working.result(30)
    with pytest.raises(CoordinatorUnavailable):
        coordinator.turns()
