"""How bodies end, well or badly, and what of them travels."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from remit.agents import CommandAgent, RunContext, RunOptions, agent
from remit.coordinator.transaction import Settings
from remit.core import Outcome, RunCancelled, RunFailed
from remit.core.errors import (
    ArgumentNotPicklable,
    ArgumentTooLarge,
    DependencyError,
    InvalidArgument,
    UnknownAgent,
)
from remit.core.events import ProcessEnded
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.world import in_loop, world


@pytest.mark.field_report("D11")
@pytest.mark.requirement("B20")
@in_loop
async def test_a_cancelled_error_that_nobody_issued_is_a_failure(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.stray_cancel)
        with pytest.raises(RunFailed, match="nobody had cancelled") as raised:
            await run.result()
        assert raised.value.error_type == "CancelledError"
        assert raised.value.cause is None


@pytest.mark.parametrize("word", ["exit", "interrupt", "generator"])
@in_loop
async def test_a_body_that_leaves_the_interpreter_ends_itself_and_not_its_host(word: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        bystander = await turn.delegate(bodies.wait_at, gate="go", value=1)
        await w.stage.until_noted(" waits")
        run = await turn.delegate(bodies.leave, word=word)
        assert await run.wait(30.0) is Outcome.FAILED
        w.stage.open_gate("go")
        assert await bystander.result() == 1
        (host,) = {view.host_id for view in await w.coordinator.runs()}
        assert not w.system.engine.hosts[host].link.is_cut


@pytest.mark.parametrize("word", ["exit", "interrupt"])
@in_loop
async def test_a_task_of_a_body_that_leaves_the_interpreter_ends_its_run_and_not_its_host(
    word: str, tmp_path: Path
) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        bystander = await turn.delegate(bodies.wait_at, gate="go", value=1)
        await w.stage.until_noted(" waits")
        run = await turn.delegate(bodies.leave_in_task, word=word)
        assert await run.wait(30.0) is Outcome.FAILED
        w.stage.open_gate("go")
        assert await bystander.result() == 1


@pytest.mark.field_report("D13")
@pytest.mark.field_report("C7")
@in_loop
async def test_a_task_that_a_body_leaves_behind_is_over_before_its_run_has_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.litter)
        assert await run.result() == "done"
        assert w.stage.notes() == ["task began", "task over"]


@in_loop
async def test_plain_values_and_none_are_results(tmp_path: Path) -> None:
    values: list[object] = [None, "", 0, False, [], {"a": (1, [2.5, b"x"])}, {"nested": [[[[[1]]]]]}, {1, 2}, Path("a")]
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        runs = await turn.delegate_many(bodies.give, [{"value": value} for value in values])
        assert await turn.gather(*runs) == values
        assert {run.outcome for run in runs} == {Outcome.SUCCEEDED}


@pytest.mark.field_report("D5")
@in_loop
async def test_an_empty_result_is_a_success_told_once_it_has_settled(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        w.system.shut("report")
        run = await turn.delegate(bodies.give, value=None)
        await w.until_asked("report")
        assert run.outcome is None, "the body has ended, its run has not: that is for its owner to say"
        w.system.let_through("report")
        assert await run.result() is None
        assert run.outcome is Outcome.SUCCEEDED


@in_loop
async def test_a_result_that_cannot_travel_fails_its_run_in_one_sentence(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_result_bytes=10_000)) as w, w.coordinator.turn("t") as turn:
        with pytest.raises(RunFailed, match="lock and cannot be pickled") as raised:
            await (await turn.delegate(bodies.unpicklable)).result()
        assert raised.value.error_code == "result_not_picklable"
        with pytest.raises(RunFailed, match="limit is 10000; write a file") as raised:
            await (await turn.delegate(bodies.large, size=20_000)).result()
        assert raised.value.error_code == "result_too_large"


@pytest.mark.parametrize("how", ["mute", "odd code", "no text for utf-8", "broken note"])
@in_loop
async def test_a_run_ends_whatever_its_exception_is_made_of(how: str, tmp_path: Path) -> None:
    said = {
        "mute": "<Mute, whose text raised RuntimeError>",
        "odd code": "odd",
        "no text for utf-8": "cannot read 'a\\udcff'",
        "broken note": "noted",
    }[how]
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        async with asyncio.timeout(10):
            with pytest.raises(RunFailed) as raised:
                await (await turn.delegate(bodies.raise_strange, how=how)).result()
        assert str(raised.value).endswith(f": {said}")
        assert raised.value.error_code == ""


@in_loop
async def test_a_turn_ends_whatever_its_exception_is_made_of(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(bodies.Mute):
            async with w.coordinator.turn("t"):
                raise bodies.Mute
        assert [view.error for view in await w.coordinator.turns()] == ["<Mute, whose text raised RuntimeError>"]


@in_loop
async def test_an_end_that_cannot_be_told_as_it_was_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> object:
        raise LookupError("a hole of ours")

    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        monkeypatch.setattr("remit.agents.host.run_body", broken)
        async with asyncio.timeout(10):
            with pytest.raises(RunFailed, match="LookupError: a hole of ours"):
                await (await turn.delegate(bodies.give)).result()


@in_loop
async def test_bad_input_is_a_typed_error_and_starts_nothing(tmp_path: Path) -> None:
    @agent
    async def of_a_lock(ctx: object) -> None:
        lock.acquire()

    lock = threading.Lock()
    options = [RunOptions(after=("b",), name="a"), RunOptions(after=("a",), name="b")]
    async with world(tmp_path, settings=Settings(max_result_bytes=10_000)) as w, w.coordinator.turn("t") as turn:
        with pytest.raises(ArgumentNotPicklable, match="argument 'value' of 'give' is a lock"):
            await turn.delegate(bodies.give, value=lock)
        with pytest.raises(ArgumentNotPicklable, match="agent 'of_a_lock' cannot be pickled"):
            await turn.delegate(of_a_lock)
        with pytest.raises(ArgumentTooLarge):
            await turn.delegate(bodies.give, value=b"x" * 20_000)
        with pytest.raises(InvalidArgument, match="missing a required argument: 'b'"):
            await turn.delegate(bodies.add, a=1)
        with pytest.raises(UnknownAgent, match="no_such_module"):
            await turn.delegate("no_such_module:agent")
        with pytest.raises(InvalidArgument, match="is not an agent"):
            await turn.delegate(print)
        with pytest.raises(InvalidArgument, match="deadline_s"):
            await turn.delegate(bodies.give, options=RunOptions(deadline_s=0))
        with pytest.raises(DependencyError):
            await turn.delegate_many(bodies.give, [{}, {}], options=options)
        assert w.events("run_accepted") == []
        assert (await w.coordinator.statistics())["live_runs"] == 0


@pytest.mark.requirement("B37")
@in_loop
async def test_delegation_deeper_than_the_limit_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        with pytest.raises(RunFailed, match="raise max_depth"):
            await (await turn.delegate(bodies.chain, depth=4)).result()
        assert "level 1 began" not in w.stage.notes()


@pytest.mark.requirement("F10")
@in_loop
async def test_one_slot_is_enough_for_a_tree_that_waits(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_shared=1)) as w, w.coordinator.turn("t") as turn:
        w.stage.open_gate("go")
        values = await (await turn.delegate(tree_of, depth=2)).result()
        assert values == [[7, 7], [7, 7]]
        assert (await w.coordinator.statistics())["slots_used"]["shared"] == 0


@agent
async def tree_of(ctx: RunContext, depth: int) -> object:
    if depth == 0:
        return 7
    runs = await ctx.delegate_many(tree_of, [{"depth": depth - 1}] * 2)
    return await ctx.gather(*runs)


@pytest.mark.requirement("F11")
@in_loop
async def test_a_run_without_a_slot_is_seen_waiting_and_can_be_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_shared=1)) as w, w.coordinator.turn("t") as turn:
        first = await turn.delegate(bodies.wait_at, gate="go", value=1)
        await w.stage.until_noted(" waits")
        async with w.coordinator.turn("another is let in") as other:
            queued = await other.delegate(bodies.nap)
            view = await w.coordinator.run(queued.id)
            assert (view.state, view.waiting_for) == ("queued", "a slot")
            await queued.cancel("not needed")
            assert await queued.wait() is Outcome.CANCELLED
        w.stage.open_gate("go")
        assert await first.result() == 1
        assert w.stage.notes() == [" waits"]


@in_loop
async def test_a_plain_body_delegates_and_waits_as_an_asynchronous_one_does(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        assert await (await turn.delegate(bodies.plain_parent)).result() == [[0, 2, 4], [0, 2, 4], 1]


@pytest.mark.parametrize("body", [bodies.plain_nap, bodies.plain_poll])
@in_loop
async def test_a_plain_body_that_looks_at_its_signal_ends_cancelled(body: object, tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(body)
        await w.stage.until_noted("plain began")
        await run.cancel("enough")
        assert await run.wait() is Outcome.CANCELLED
        assert not run.unconfirmed


@pytest.mark.field_report("B16")
@pytest.mark.field_report("C7")
@in_loop
async def test_a_plain_body_that_ignores_its_signal_loses_its_host_and_gives_its_slot_back(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_dedicated=1)) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.stubborn, options=RunOptions(grace_s=0.05))
        following = await turn.delegate(bodies.plain_parent)
        await w.stage.until_noted(*w.stage.notes()[:1])
        await run.cancel("enough")
        with pytest.raises(RunCancelled):
            await run.result()
        assert await following.result() == [[0, 2, 4], [0, 2, 4], 1]
        w.stage.open_gate("give up")
        await w.stage.until_noted("stubborn over")
        assert (await w.coordinator.run(run.id)).outcome is Outcome.CANCELLED, "what comes later changes nothing"


@pytest.mark.field_report("M14")
@pytest.mark.requirement("E14")
@pytest.mark.requirement("E20")
@in_loop
async def test_what_a_program_had_written_when_it_was_stopped_is_kept_and_marked_as_cut(tmp_path: Path) -> None:
    shell = CommandAgent("echo halfway; touch {flag}; exec sleep 600", shell=True, name="shell", grace_s=5.0)
    flag = tmp_path / "flag"
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(shell, flag=str(flag))
        await await_until(flag.exists)
        await run.cancel("enough")
        with pytest.raises(RunCancelled) as raised:
            await run.result()
        (ended,) = w.events("process_ended")
        assert isinstance(ended, ProcessEnded)
        assert ended.stopped
        partial = raised.value.partial
        assert str(partial.stdout) == "halfway\n"
        assert partial.outcome == "cancelled"
        assert (tmp_path / ".remit" / "output" / run.id / "process_1" / "stdout").read_text() == "halfway\n"


@pytest.mark.field_report("C2")
@pytest.mark.field_report("C1")
@in_loop
async def test_the_signal_is_looked_at_right_before_a_program_is_started(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(late_program)
        await w.stage.until_noted("about to start")
        await run.cancel("enough")
        w.stage.open_gate("on")
        assert await run.wait() is Outcome.CANCELLED
        assert w.events("process_started") == []
        assert not (tmp_path / "effect").exists()


@agent
async def late_program(ctx: RunContext) -> None:
    """Come to the effect late, in the middle of a shield, with the cancel already there."""
    stage = bodies.Stage(ctx.workspace)
    stage.note("about to start")
    async with ctx.shielded(30.0):
        await stage.pass_gate("on")
        await ctx.process(["/bin/touch", str(ctx.workspace / "effect")])


@pytest.mark.requirement("D12")
@in_loop
async def test_clean_up_in_a_shield_is_finished_before_the_run_ends(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(tidy)
        await w.stage.until_noted("tidy began")
        await run.cancel("enough")
        await w.stage.until_noted("tidying")
        assert await run.wait(0.0) is None
        w.stage.open_gate("tidied")
        assert await run.wait() is Outcome.CANCELLED
        assert w.stage.notes() == ["tidy began", "tidying", "tidied"]


@agent
async def tidy(ctx: RunContext) -> None:
    stage = bodies.Stage(ctx.workspace)
    stage.note("tidy began")
    try:
        await ctx.sleep(600)
    finally:
        async with ctx.shielded(30.0):
            stage.note("tidying")
            await stage.pass_gate("tidied")
            stage.note("tidied")
