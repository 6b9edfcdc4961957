"""Turns in the Python API: opening, leaving, and what happens when the world around them ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from remit.coordinator import Limits
from remit.core import CauseKind, Outcome, RunFailed, TurnCancelled
from remit.core.errors import (
    CoordinatorClosing,
    CoordinatorUnavailable,
    InvalidArgument,
    NotFound,
    SessionBusy,
)
from remit.core.events import TurnEnded
from remit.testing import await_until, open_inprocess
from tests.agents import bodies
from tests.agents.world import in_loop, world


@pytest.mark.requirement("D17")
@pytest.mark.requirement("A2")
@in_loop
async def test_leaving_a_turn_waits_for_what_was_delegated_in_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.coordinator.turn("t", session="s") as turn:
            run = await turn.delegate(bodies.wait_at, gate="go", value=1)
            await w.stage.until_noted(" waits")
            asyncio.get_running_loop().call_soon(w.stage.open_gate, "go")
        assert turn.outcome is Outcome.SUCCEEDED
        assert run.value() == 1
        async with w.coordinator.turn("next", session="s"):
            pass


@pytest.mark.field_report("C6")
@in_loop
async def test_an_error_in_the_block_stops_what_is_below_and_comes_out_as_it_is(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        error = ValueError("in the block")
        with pytest.raises(ValueError, match="in the block") as raised:
            async with w.coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                raise error
        assert raised.value is error
        assert turn.outcome is Outcome.FAILED
        assert run.outcome is Outcome.CANCELLED
        assert run.cause is not None
        assert run.cause.kind is CauseKind.PARENT_FAILED
        (ended,) = w.events("turn_ended")
        assert isinstance(ended, TurnEnded)
        assert (ended.error_type, ended.error) == ("ValueError", "in the block")


@in_loop
async def test_a_failed_run_that_the_block_lets_out_is_the_turns_failure(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(RunFailed):
            async with w.coordinator.turn("t") as turn:
                await (await turn.delegate(bodies.boom)).result()
        assert turn.outcome is Outcome.FAILED


@pytest.mark.requirement("B27")
@in_loop
async def test_a_timeout_around_a_turn_keeps_its_meaning_and_stops_the_runs(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as timeout, w.coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                timeout.reschedule(0)
                await turn.sleep(600)
        assert (turn.outcome, run.outcome) == (Outcome.CANCELLED, Outcome.CANCELLED)
        assert turn.cause is not None
        assert "its holder was cancelled" in turn.cause.reason
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.requirement("B27")
@in_loop
async def test_a_timeout_inside_a_turn_is_nobody_elses_business(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await turn.sleep(600)
        assert not turn.signal.is_set
        assert await (await turn.delegate(bodies.add, a=1, b=2)).result() == 3


@pytest.mark.parametrize("where", ["in the block", "while leaving"])
@in_loop
async def test_a_task_that_is_cancelled_from_outside_stays_cancelled_and_its_runs_are_stopped(
    where: str, tmp_path: Path
) -> None:
    async with world(tmp_path) as w:

        async def hold() -> None:
            async with w.coordinator.turn("t", session="s") as turn:
                await turn.delegate(bodies.nap)
                if where == "in the block":
                    await turn.sleep(600)

        task = asyncio.ensure_future(hold())
        await w.stage.until_noted("nap began")
        if where == "while leaving":
            await w.until_asked("finish_turn")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (turn,) = await w.coordinator.turns()
        # What had returned before the cancel stays a success.
        assert turn.outcome is (Outcome.CANCELLED if where == "in the block" else Outcome.SUCCEEDED)
        assert turn.cause is not None
        assert turn.cause.kind is CauseKind.USER_INTERRUPT
        assert [run.outcome for run in await w.coordinator.runs()] == [Outcome.CANCELLED]
        assert w.stage.notes()[-1].startswith("nap unwound")


@in_loop
async def test_a_cancel_from_outside_wins_over_our_own(tmp_path: Path) -> None:
    async with world(tmp_path) as w:

        async def hold() -> None:
            async with w.coordinator.turn("t") as turn:
                w.stage.note(turn.id)
                await turn.sleep(600)

        task = asyncio.ensure_future(hold())
        await await_until(w.stage.notes)
        (turn_id,) = w.stage.notes()
        task.cancel()
        await w.coordinator.cancel(turn_id, "enough")
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.requirement("B25")
@pytest.mark.requirement("B19")
@pytest.mark.requirement("C1")
@pytest.mark.field_report("E8")
@in_loop
async def test_a_session_is_busy_until_its_turn_has_unwound(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held(session="s") as first:
        with pytest.raises(SessionBusy):
            async with w.coordinator.turn("second", session="s"):
                pass
        async with w.coordinator.turn("elsewhere", session="other"):
            pass
        assert not first.signal.is_set, "a message for another session, or a refused one, stops nothing"
        async with w.coordinator.turn("third", session="s", busy="interrupt") as third:
            view = await w.coordinator.run(first.id)
            assert view.outcome is Outcome.CANCELLED
            assert view.cause is not None
            assert view.cause.kind is CauseKind.USER_INTERRUPT
            assert third.id in view.cause.reason


@in_loop
async def test_a_queued_turn_that_its_caller_gives_up_does_not_keep_the_session_busy(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.coordinator.turn("first", session="s"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), w.coordinator.turn("second", session="s", busy="queue"):
                    pytest.fail("the session is busy")
        async with w.coordinator.turn("third", session="s", busy="queue"):
            first, second, third = await w.coordinator.turns()
            assert (first.outcome, second.outcome, third.state) == (Outcome.SUCCEEDED, Outcome.CANCELLED, "running")


@pytest.mark.requirement("B2")
@in_loop
async def test_a_queued_turn_that_is_cancelled_raises_where_it_would_have_begun(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("first", session="s"):

        async def second() -> None:
            async with w.coordinator.turn("second", session="s", busy="queue"):
                pytest.fail("it was cancelled before it began")

        waiting = asyncio.ensure_future(second())
        await w.until_asked("open_turn", 2)
        queued = (await w.coordinator.turns())[1]
        assert queued.waiting_for == "session s"
        await w.coordinator.cancel(queued.id, "enough")
        with pytest.raises(TurnCancelled):
            await waiting
        assert (await w.coordinator.run(queued.id)).outcome is Outcome.CANCELLED


@pytest.mark.requirement("B26")
@pytest.mark.requirement("A1")
@in_loop
async def test_looking_and_stopping_by_id_session_and_user(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        assert not (await w.coordinator.cancel("s", "nothing there")).accepted
        async with w.held(session="s", user="ada") as turn:
            run = await turn.delegate(bodies.nap)
            await w.stage.until_noted("nap began")
            with pytest.raises(NotFound):
                await w.coordinator.tree("run_of_nobody")
            assert not (await w.coordinator.cancel("s", "not mine", user="eve")).accepted
            rehearsal = await w.coordinator.cancel("s", "rehearsal", dry_run=True)
            assert (set(rehearsal.nodes), rehearsal.live) == ({turn.id, run.id}, 1)
            assert not turn.signal.is_set
            with pytest.raises(InvalidArgument, match="subtree"):
                await w.coordinator.cancel("s", scope="all")
            assert (await w.coordinator.cancel("s", "enough", user="ada")).accepted
            again = await w.coordinator.cancel("s", "once more", user="ada")
            assert again.cause is None or again.cause.reason == "enough"


@pytest.mark.requirement("D3")
@pytest.mark.requirement("D5")
@in_loop
async def test_a_coordinator_that_closes_refuses_new_turns_and_closes_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held() as turn:
            w.system.shut("finish_turn")
            closing = asyncio.ensure_future(w.coordinator.shutdown("for tonight"))
            await await_until(lambda: turn.signal.is_set)
            with pytest.raises(CoordinatorClosing):
                async with w.coordinator.turn("late"):
                    pass
            again = asyncio.ensure_future(w.coordinator.shutdown("twice"))
            w.system.let_through("finish_turn")
            assert await closing
            assert await again


@pytest.mark.requirement("D10")
def test_nothing_is_reached_without_an_open_coordinator(tmp_path: Path) -> None:
    with open_inprocess(tmp_path) as system:
        coordinator = system.coordinator()
        with pytest.raises(CoordinatorUnavailable, match="is not open"):
            coordinator.turn("t")
        coordinator.connect()
        with pytest.raises(InvalidArgument, match="open already"):
            coordinator.connect()
        for wrong in ({"deadline_s": 0}, {"grace_s": -1}):
            with pytest.raises(InvalidArgument):
                coordinator.turn("t", **wrong)  # type: ignore[arg-type]
        coordinator.close()
        coordinator.close()
        with pytest.raises(CoordinatorUnavailable):
            coordinator.turn("t")


@in_loop
async def test_limits_of_a_turn_hold_for_all_below_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t", limits=Limits(max_depth=1)) as turn:
        with pytest.raises(RunFailed, match="max_depth"):
            await (await turn.delegate(bodies.chain, depth=1)).result()


@pytest.mark.requirement("D11")
@in_loop
async def test_closing_a_connection_with_live_turns_stops_them_and_lets_nobody_wait_for_ever(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        other = w.system.coordinator()
        other.connect()

        async def hold() -> None:
            async with other.turn("t") as turn:
                await (await turn.delegate(bodies.nap)).result()

        holding = asyncio.ensure_future(hold())
        await w.stage.until_noted("nap began")
        await asyncio.to_thread(other.close)
        async with asyncio.timeout(10):
            with pytest.raises(TurnCancelled) as raised:
                await holding
        assert raised.value.cause is not None
        assert raised.value.cause.kind is CauseKind.PARENT_LOST
        await await_until(lambda: w.events("turn_ended"))
        assert [view.outcome for view in await w.coordinator.runs()] == [Outcome.CANCELLED]


@pytest.mark.parametrize("ends", ["returns", "raises"])
@in_loop
async def test_a_turn_whose_coordinator_is_gone_ends_within_a_bound_and_says_what_counts(
    ends: str, tmp_path: Path
) -> None:
    with open_inprocess(tmp_path, poll_s=0.1) as system:
        link = system.link()
        coordinator = system.coordinator()
        coordinator._connect = lambda: link
        coordinator.connect()
        coordinator.session._give_up_s = 0.2
        began = time.monotonic()
        with pytest.raises(ValueError if ends == "raises" else CoordinatorUnavailable):
            async with coordinator.turn("t"):
                link.is_cut = True
                if ends == "raises":
                    raise ValueError("what the body had to say")
        assert time.monotonic() - began < 10
        await asyncio.to_thread(coordinator.close)


@in_loop
async def test_a_wait_in_a_turn_whose_coordinator_is_gone_raises(tmp_path: Path) -> None:
    with open_inprocess(tmp_path, poll_s=0.1) as system:
        link = system.link()
        coordinator = system.coordinator()
        coordinator._connect = lambda: link
        coordinator.connect()
        coordinator.session._give_up_s = 0.2
        async with asyncio.timeout(10):
            with pytest.raises(TurnCancelled) as raised:
                async with coordinator.turn("t") as turn:
                    run = await turn.delegate(bodies.nap)
                    link.is_cut = True
                    await run.result()
        assert raised.value.cause is not None
        assert "has not answered" in raised.value.cause.reason
        await asyncio.to_thread(coordinator.close)
