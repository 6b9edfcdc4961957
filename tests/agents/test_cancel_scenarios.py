"""A cancel, from the request to the last body: what parents, children and bystanders see."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path

import pytest

from remit.agents import RunOptions
from remit.coordinator import sync
from remit.coordinator.transaction import Settings
from remit.core import CauseKind, Outcome, RunCancelled, RunFailed, TurnCancelled
from remit.core.events import CancelRequested, RunAccepted, RunEnded, RunStarted
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.world import World, in_loop, world


@pytest.mark.requirement("B1")
@pytest.mark.requirement("B11")
@pytest.mark.requirement("B2")
@pytest.mark.requirement("A21")
@pytest.mark.requirement("B10")
@pytest.mark.field_report("A1")
@pytest.mark.field_report("A3")
@pytest.mark.field_report("D15")
@in_loop
async def test_a_parent_that_makes_text_of_any_failure_of_its_child_returns_nothing_when_cancelled(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled) as raised:
            async with w.coordinator.turn("t") as turn:
                parent = await turn.delegate(bodies.catch_all)
                await w.stage.until_noted("child began")
                receipt = await w.coordinator.cancel(turn.id, "enough", actor="ada")
                await turn.sleep(600)
        await receipt.quiet()
        assert "child unwound by TurnCancelled" in w.stage.notes()
        assert "made a text of it" not in w.stage.notes()
        ended = {event.node_id: event for event in w.events("run_ended", "turn_ended")}
        assert len(ended) == 3
        for event in ended.values():
            assert isinstance(event, RunEnded) or event.kind == "turn_ended"
            assert vars_of(event)["outcome"] is Outcome.CANCELLED
            assert vars_of(event)["cause"] == receipt.cause == raised.value.cause
        assert receipt.cause is not None
        assert (receipt.cause.origin, receipt.cause.actor) == (turn.id, "ada")
        with pytest.raises(RunCancelled) as of_child:
            parent.value()
        assert of_child.value.cause == receipt.cause


def vars_of(event: object) -> dict[str, object]:
    return {name: getattr(event, name) for name in ("outcome", "cause")}


@pytest.mark.field_report("D15")
@pytest.mark.field_report("D9")
@in_loop
async def test_a_child_that_cancels_itself_is_an_ordinary_exception_for_its_parent(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        seen = await (await turn.delegate(bodies.parent_of_one_that_stops)).result()
        assert seen == ["RunCancelled", "True", "False"]
        assert not turn.signal.is_set


@pytest.mark.requirement("B20")
@pytest.mark.field_report("D3")
@in_loop
async def test_a_body_that_swallows_its_cancel_ends_cancelled_and_its_value_is_incomplete(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.swallow)
        await w.stage.until_noted("swallow began")
        assert (await run.cancel("enough")).accepted
        with pytest.raises(RunCancelled) as raised:
            await run.result()
        assert raised.value.partial == "made up"


@pytest.mark.requirement("B20")
@in_loop
async def test_an_error_that_surfaces_while_unwinding_counts_as_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.other_error)
        await w.stage.until_noted("other_error began")
        await run.cancel("enough")
        assert await run.wait() is Outcome.CANCELLED


@pytest.mark.requirement("B21")
@in_loop
async def test_a_body_that_raised_before_the_cancel_stays_failed(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        w.system.shut("report")
        run = await turn.delegate(bodies.boom)
        await w.until_asked("report")
        receipt = await run.cancel("too late")
        assert receipt.accepted, "its end is not known to the coordinator yet"
        w.system.let_through("report")
        with pytest.raises(RunFailed, match="ValueError: no"):
            await run.result()


@pytest.mark.requirement("A10")
@pytest.mark.field_report("E1")
@in_loop
async def test_cancel_wait_and_result_answer_at_once_for_what_has_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.give, value=7)
        assert await run.result() == 7
        receipt = await run.cancel("too late")
        assert (receipt.accepted, receipt.already) == (False, Outcome.SUCCEEDED)
        assert (await receipt.quiet()).summary is None
        assert await run.wait(0.0) is Outcome.SUCCEEDED
        assert await run.result() == 7


@pytest.mark.requirement("B1")
@pytest.mark.requirement("F8")
@pytest.mark.field_report("B1")
@pytest.mark.field_report("C1")
@pytest.mark.field_report("C4")
@in_loop
async def test_a_cancel_while_a_child_is_being_started_is_raised_where_it_is_awaited(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held() as turn:
        w.system.shut("delegate")
        delegating = asyncio.ensure_future(turn.delegate(bodies.chain, depth=0))
        await w.until_asked("delegate")
        receipt = await w.coordinator.cancel(turn.id, "enough")
        with pytest.raises(TurnCancelled):
            await delegating
        w.system.let_through("delegate")
        await receipt.quiet()
        await await_until(lambda: w.events("delegation_refused"))
        (refused,) = w.events("delegation_refused")
        assert refused.node_id == turn.id
        assert w.events("run_accepted") == []
        assert w.stage.notes() == []


@pytest.mark.requirement("B1")
@pytest.mark.requirement("B11")
@pytest.mark.requirement("F8")
@pytest.mark.field_report("B1")
@in_loop
async def test_every_level_of_a_nest_raises_while_the_start_of_the_lowest_is_held(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held() as turn:
        await turn.delegate(bodies.chain, depth=2, gated_at=1)
        await w.stage.until_noted("level 2 began", "level 1 began")
        before = w.system.calls.count("delegate")
        w.system.shut("delegate")
        w.stage.open_gate("on")
        await w.until_asked("delegate", before + 1)
        receipt = await w.coordinator.cancel(turn.id, "enough")
        await w.stage.until_noted("level 2 unwound by TurnCancelled", "level 1 unwound by TurnCancelled")
        w.system.let_through("delegate")
        assert (await receipt.quiet()).runs == {"cancelled": 2}
        await await_until(lambda: w.events("delegation_refused"))
    assert "level 0 began" not in w.stage.notes()
    assert turn.outcome is Outcome.CANCELLED


@pytest.mark.requirement("B5")
@pytest.mark.requirement("D20")
@in_loop
async def test_another_client_cancels_and_both_see_the_same(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.system.coordinator(surface="cli") as other:
        with pytest.raises(TurnCancelled) as raised:
            async with w.coordinator.turn("t", session="s1") as turn:
                await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                receipt = await other.cancel("s1", "from another shell", actor="ada")
                assert (receipt.accepted, receipt.live) == (True, 1)
                await turn.sleep(600)
        seen = (await receipt.quiet()).runs
        assert seen == {"cancelled": 1}
        for coordinator in (w.coordinator, other):
            tree = await coordinator.tree(turn.id)
            assert [node.outcome for node in tree.nodes] == [Outcome.CANCELLED] * 2
            assert {node.cause for node in tree.nodes} == {raised.value.cause}
        assert raised.value.cause is not None
        assert raised.value.cause.surface == "cli"
        assert (await w.coordinator.statistics())["live_runs"] == 0


@pytest.mark.requirement("E13")
@pytest.mark.field_report("M1")
@in_loop
async def test_a_cancel_from_a_thread_stops_one_run_and_leaves_its_siblings(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        one, other = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(2)])
        loop = asyncio.get_running_loop()
        accepted: list[bool] = []

        def stop() -> None:
            receipt = asyncio.run_coroutine_threadsafe(one.cancel("not needed"), loop).result(30)
            accepted.append(receipt.accepted)

        thread = threading.Thread(target=stop)
        thread.start()
        assert await one.wait() is Outcome.CANCELLED
        await asyncio.to_thread(thread.join)
        assert accepted == [True]
        w.stage.open_gate("go")
        assert await other.result() == 1


@pytest.mark.requirement("B6")
@pytest.mark.requirement("B5")
@pytest.mark.requirement("F2")
@pytest.mark.field_report("M2")
@in_loop
async def test_a_body_that_blocks_its_host_hears_the_cancel_and_hides_no_view(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.blocking)
        await w.stage.until_noted("blocking began")
        (view,) = await w.coordinator.runs()
        assert view.state == "running"
        assert (await run.cancel("enough")).accepted
        assert await run.wait() is Outcome.CANCELLED
        assert w.stage.notes()[-1] == "blocking saw True"


@pytest.mark.requirement("A15")
@pytest.mark.requirement("B18")
@pytest.mark.field_report("A5")
@pytest.mark.field_report("M2")
@pytest.mark.field_report("M13")
@in_loop
async def test_one_stop_of_a_deep_tree_counts_what_lives_and_reaches_all_of_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held() as turn:
        await turn.delegate(bodies.fan, width=6, depth=2)
        await await_until(lambda: len(w.events("run_started")) == 1 + 6 + 36)
        w.system.shut("report")
        receipt = await w.coordinator.cancel(turn.id, "enough")
        assert (receipt.accepted, receipt.live, receipt.is_quiet) == (True, 43, False)
        tree = await w.coordinator.tree(turn.id)
        assert tree.live == 43, "accepted is not over"
        assert {node.state for node in tree.nodes if node.kind == "run"} == {"cancelling"}
        assert all(node.waiting_for for node in tree.nodes if node.kind == "run")
        w.system.let_through("report")
        receipt = await receipt.quiet()
        assert receipt.is_quiet
        assert receipt.runs == {"cancelled": 43}
        assert len(w.events("cancel_requested")) == 1


@pytest.mark.field_report("B3")
@pytest.mark.field_report("B2")
@pytest.mark.requirement("F3")
@in_loop
async def test_a_cancel_right_behind_the_start_is_never_lost(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        for _ in range(200):
            run = await turn.delegate(bodies.quiet_nap)
            assert (await run.cancel("at once")).accepted
            assert await run.wait(30.0) is Outcome.CANCELLED
        ended = w.events("run_ended")
        assert len(ended) == len({event.node_id for event in ended}) == 200


@pytest.mark.requirement("F1")
@pytest.mark.requirement("A4")
@in_loop
async def test_a_cancel_before_there_is_a_host_ends_the_run_unstarted(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(warm_hosts=0)) as w:
        w.system.shut("spawn")
        async with w.coordinator.turn("t") as turn:
            run = await turn.delegate(bodies.plain_poll)
            await run.cancel("changed my mind")
            assert await run.wait() is Outcome.CANCELLED
        w.system.let_through("spawn")
        assert w.events("run_started") == []
        assert w.stage.notes() == []


@pytest.mark.requirement("B33")
@pytest.mark.field_report("A11")
@in_loop
async def test_a_further_attempt_has_a_new_signal(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        options = RunOptions(retries=1, attempt_timeout_s=1.0)
        run = await turn.delegate(bodies.flaky, options=options)
        assert await run.result() == [2, False]
        assert w.stage.notes() == ["attempt 1", "attempt 2"]


@pytest.mark.requirement("A3")
@pytest.mark.requirement("B12")
@pytest.mark.requirement("B27")
@pytest.mark.field_report("A9")
@pytest.mark.field_report("A3")
@in_loop
async def test_a_task_that_a_body_makes_waits_under_the_signal_without_being_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.in_own_task)
        await w.stage.until_noted("inner began")
        await run.cancel("enough")
        assert await run.wait() is Outcome.CANCELLED
        assert "inner unwound" in w.stage.notes()
        assert not turn.signal.is_set, "downwards only"


@pytest.mark.field_report("A2")
@pytest.mark.field_report("E5")
@in_loop
async def test_nothing_of_a_stopped_tree_wakes_its_parent(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled):
            async with w.coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.catch_all, label="a")
                await w.stage.until_noted("a began")
                # The child's end is on its way while the cancel is decided.
                w.system.shut("report")
                await w.coordinator.cancel(turn.id, "enough")
                w.system.let_through("report")
                await run.result()
        last = w.events()[-1].node_id
        notes = w.stage.notes()
        assert "made a text of it" not in notes
        assert last == turn.id, "the turn ends last, and nothing comes after it"
        assert len(w.events("turn_accepted")) == 1


@pytest.mark.requirement("D9")
@pytest.mark.field_report("D1")
@pytest.mark.field_report("E12")
@in_loop
async def test_what_a_cancelled_run_had_found_is_kept(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.partial_nap)
        await w.stage.until_noted("partial given")
        await run.cancel("enough")
        with pytest.raises(RunCancelled) as raised:
            await run.result()
        assert raised.value.partial == {"found": ["a.py", "b.py"]}
        assert "b.py" in (await w.coordinator.run(run.id)).preview


@pytest.mark.field_report("E10")
@pytest.mark.requirement("D18")
@in_loop
async def test_every_child_can_be_looked_up_after_its_parents_end(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled):
            async with w.coordinator.turn("t") as turn:
                await turn.delegate(bodies.catch_all)
                await w.stage.until_noted("child began")
                await turn.cancel("enough")
                await turn.sleep(600)
        views = await w.coordinator.runs()
        assert len(views) == 2
        for view in views:
            assert view.outcome is Outcome.CANCELLED
            assert view.cause is not None
            assert view.ended_at is not None
        assert views[1].parent_id == views[0].id


@pytest.mark.field_report("M4")
@pytest.mark.field_report("M10")
@in_loop
async def test_a_run_stops_what_it_started_and_not_its_sibling(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        sibling = await turn.delegate(bodies.wait_at, gate="go", value=1)
        seen = await (await turn.delegate(bodies.stop_sibling, sibling=sibling.id)).result()
        assert seen == [True, True, "cancelled"]
        assert await sibling.wait(0.0) is None
        w.stage.open_gate("go")
        assert await sibling.result() == 1


@pytest.mark.requirement("D14")
@pytest.mark.requirement("B25")
@pytest.mark.field_report("B12")
@in_loop
async def test_a_cancel_covers_what_was_there_and_not_the_next_turn(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled):
            async with w.coordinator.turn("first", session="s") as first:
                await first.delegate(bodies.quiet_nap)
                await w.coordinator.cancel("s", "enough")
                await first.sleep(600)
        async with w.coordinator.turn("second", session="s") as second:
            late = await w.coordinator.cancel(first.id, "again")
            assert (late.accepted, late.already) == (False, Outcome.CANCELLED)
            assert await (await second.delegate(bodies.add, a=1, b=2)).result() == 3
        assert second.outcome is Outcome.SUCCEEDED


@pytest.mark.requirement("F9")
@pytest.mark.field_report("A8")
@pytest.mark.field_report("B8")
@pytest.mark.slow
@in_loop
async def test_a_storm_of_delegations_from_four_threads_is_stopped_two_hundred_times(tmp_path: Path) -> None:
    rounds, threads = 200, 4
    async with world(tmp_path) as w:

        def storm(coordinator: sync.Coordinator) -> None:
            with pytest.raises(TurnCancelled), coordinator.turn("storm") as turn:
                begun = threading.Barrier(threads + 1)

                def rush() -> None:
                    begun.wait()
                    try:
                        while True:
                            turn.delegate(bodies.quiet_nap)
                    except TurnCancelled:
                        return

                rushing = [threading.Thread(target=rush) for _ in range(threads)]
                for thread in rushing:
                    thread.start()
                begun.wait()
                turn.delegate(bodies.quiet_nap)
                assert coordinator.cancel(turn.id, "enough").accepted
                for thread in rushing:
                    thread.join()

        def all_storms() -> None:
            with sync.Coordinator(w.system.coordinator()) as coordinator:
                for _ in range(rounds):
                    storm(coordinator)

        await asyncio.to_thread(all_storms)
        cancelled: set[str] = set()
        open_runs: set[str] = set()
        for event in w.events("cancel_requested", "run_accepted", "run_started", "run_ended"):
            if isinstance(event, CancelRequested):
                cancelled.add(event.node_id)
            elif event.kind == "run_accepted":
                assert event.turn_id not in cancelled
                open_runs.add(event.node_id)
            elif isinstance(event, RunStarted):
                assert event.turn_id not in cancelled, "it started below a cancel"
            else:
                open_runs.remove(event.node_id)
        assert len(cancelled) == rounds
        assert open_runs == set()
        statistics = await w.coordinator.statistics()
        assert set(statistics["slots_used"].values()) == {0}
        assert (statistics["live_runs"], statistics["live_turns"]) == (0, 0)
        await w.until_idle_hosts()


@pytest.mark.requirement("F9")
@pytest.mark.field_report("B8")
@in_loop
async def test_a_run_that_storms_from_four_threads_starts_nothing_after_its_cancel(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        for _ in range(10):
            run = await turn.delegate(bodies.storm_below)
            await await_until(functools.partial(started_below, w, run.id))
            await run.cancel("enough")
            assert await run.wait() is Outcome.CANCELLED
            assert started_below(w, run.id, after_cancel=True) == []
        statistics = await w.coordinator.statistics()
        assert set(statistics["slots_used"].values()) == {0}
        accepted = [e.node_id for e in w.events("run_accepted")]
        assert sorted(accepted) == sorted(e.node_id for e in w.events("run_ended"))


def started_below(w: World, run_id: str, *, after_cancel: bool = False) -> list[str]:
    """Return which children of a run have started; with `after_cancel` only those that did after its cancel."""
    children: set[str] = set()
    started: list[str] = []
    for event in w.events("run_accepted", "run_started", "cancel_requested"):
        if isinstance(event, RunAccepted) and event.parent_id == run_id:
            children.add(event.node_id)
        elif isinstance(event, RunStarted) and event.node_id in children:
            started.append(event.node_id)
        elif isinstance(event, CancelRequested) and event.node_id == run_id and after_cancel:
            started.clear()
    return started


@pytest.mark.requirement("B36")
@pytest.mark.requirement("D11")
@in_loop
async def test_closing_cancels_what_runs_with_its_own_cause_and_waits(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled) as raised:
            async with w.coordinator.turn("t") as turn:
                await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                closing = asyncio.ensure_future(w.coordinator.shutdown("for tonight"))
                await turn.sleep(600)
        assert await closing
        assert raised.value.cause is not None
        assert raised.value.cause.kind is CauseKind.SHUTDOWN
        assert "nap unwound by TurnCancelled" in w.stage.notes()
