"""Waiting for runs: whoever waits neither owns nor stops what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.agents import RunOptions
from remit.agents.runs import Run
from remit.core import CauseKind, Outcome, RunFailed, RunTimedOut, TurnCancelled
from remit.core.events import CancelRequested, RunEnded
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.world import in_loop, world


@pytest.mark.field_report("E3")
@pytest.mark.field_report("E15")
@in_loop
async def test_a_wait_that_expires_stops_nothing_and_the_next_gets_the_result(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.wait_at, gate="go", value=7)
        await w.stage.until_noted(" waits")
        for _ in range(3):
            assert await run.wait(0.0) is None
        assert (await w.coordinator.run(run.id)).state == "running"
        w.stage.open_gate("go")
        assert await run.wait() is Outcome.SUCCEEDED
        assert await run.result() == 7


@pytest.mark.field_report("E7")
@in_loop
async def test_giving_up_a_wait_leaves_the_run_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.wait_at, gate="go", value=7)
        await w.stage.until_noted(" waits")
        waiting = asyncio.ensure_future(run.result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await run.result()
        assert w.events("cancel_requested") == []
        w.stage.open_gate("go")
        assert await run.result() == 7


@pytest.mark.field_report("C6")
@in_loop
async def test_the_first_failure_in_a_gather_stops_the_others_and_is_raised_when_they_are_over(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        others = [await turn.delegate(bodies.nap, label=f"nap {n}") for n in range(3)]
        await w.stage.until_noted(*(f"nap {n} began" for n in range(3)))
        failing = await turn.delegate(bodies.boom, options=RunOptions(name="boom"))
        with pytest.raises(RunFailed, match="ValueError: no") as raised:
            await turn.gather(*others, failing)
        assert raised.value.run_id == failing.id
        for run in others:
            assert run.outcome is Outcome.CANCELLED, "they are over before the failure is seen"
            assert run.cause is not None
            assert run.cause.kind is CauseKind.PARENT_FAILED
            assert "boom did not succeed" in run.cause.reason
        cancels = [event for event in w.events() if isinstance(event, CancelRequested)]
        assert len(cancels) == 3
        assert len({cancel.request_id for cancel in cancels}) == 1, "they are told together"
        assert turn.outcome is None


@in_loop
async def test_a_gather_of_outcomes_stops_nobody(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        waiting = await turn.delegate(bodies.wait_at, gate="go")
        failing = await turn.delegate(bodies.boom)
        assert await failing.wait() is Outcome.FAILED
        w.stage.open_gate("go")
        outcomes = await turn.gather(waiting, failing, return_outcomes=True)
        assert outcomes == [Outcome.SUCCEEDED, Outcome.FAILED]
        assert await turn.gather() == []


@in_loop
async def test_runs_come_as_they_complete_whatever_their_outcome(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        runs = [
            await turn.delegate(bodies.wait_at, gate=f"go {n}", value=n, options=RunOptions(name=f"r{n}"))
            for n in range(3)
        ]
        failing = await turn.delegate(bodies.boom, gate="fail", options=RunOptions(name="boom"))
        order = iter(["go 2", "fail", "go 0", "go 1", "nobody"])
        w.stage.open_gate(next(order))
        seen: list[str] = []
        async for run in turn.as_completed([*runs, failing]):
            seen.append(run.name)
            w.stage.open_gate(next(order))
        assert seen == ["r2", "boom", "r0", "r1"]


@pytest.mark.field_report("B15")
@pytest.mark.field_report("M13")
@in_loop
async def test_a_cancel_comes_before_what_is_left_to_read(tmp_path: Path) -> None:
    count = 1000
    async with world(tmp_path) as w:
        read: list[str] = []
        with pytest.raises(TurnCancelled):
            async with w.coordinator.turn("t") as turn:
                runs = await turn.delegate_many(bodies.give, [{"value": n} for n in range(count)])
                assert set(await turn.gather(*runs, return_outcomes=True)) == {Outcome.SUCCEEDED}
                async for run in turn.as_completed(runs):
                    read.append(run.id)
                    if len(read) == 10:
                        await turn.cancel("seen enough")
        assert len(read) == 10
        assert turn.outcome is Outcome.CANCELLED


@pytest.mark.requirement("F4")
@pytest.mark.requirement("B11")
@pytest.mark.requirement("B2")
@in_loop
async def test_every_kind_of_wait_raises_ones_own_cancel_even_if_what_it_waits_for_is_there(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held() as turn:
        done = await turn.delegate(bodies.give, value=1)
        open_run = await turn.delegate(bodies.nap)
        assert await done.result() == 1
        await w.stage.until_noted("nap began")

        async def all_of(runs: list[Run]) -> None:
            async for _ in turn.as_completed(runs):
                pass

        parked = [
            asyncio.ensure_future(wait)
            for wait in (open_run.result(), open_run.wait(), turn.gather(open_run), all_of([open_run]), turn.sleep(600))
        ]
        await asyncio.sleep(0)
        await w.coordinator.cancel(turn.id, "enough")
        await await_until(lambda: turn.signal.is_set)
        late = [done.result(), done.wait(), turn.gather(done), turn.sleep(0), turn.delegate(bodies.nap)]
        ends = await asyncio.gather(*parked, *late, return_exceptions=True)
        assert {type(end) for end in ends} == {TurnCancelled}
        assert {end.cause for end in ends if isinstance(end, TurnCancelled)} == {turn.cause}


@pytest.mark.field_report("D7")
@pytest.mark.field_report("E4")
@in_loop
async def test_a_deadline_is_told_as_one_and_names_whose_it_was(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.catch_all, options=RunOptions(deadline_s=0.1))
        with pytest.raises(RunTimedOut) as raised:
            await run.result()
        assert raised.value.cause is not None
        assert (raised.value.cause.kind, raised.value.cause.origin) == (CauseKind.DEADLINE, run.id)
        for event in w.events("run_ended"):
            assert isinstance(event, RunEnded)
            assert event.outcome is (Outcome.TIMED_OUT if event.node_id == run.id else Outcome.CANCELLED)
        assert turn.outcome is None


@pytest.mark.field_report("D2")
@in_loop
async def test_a_turns_own_deadline_times_the_turn_out(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled) as raised:
            async with w.coordinator.turn("t", deadline_s=0.1) as turn:
                await (await turn.delegate(bodies.nap)).result()
        assert turn.outcome is Outcome.TIMED_OUT
        assert raised.value.cause is not None
        assert raised.value.cause.kind is CauseKind.DEADLINE
        assert {view.outcome for view in await w.coordinator.runs()} <= {Outcome.CANCELLED}
