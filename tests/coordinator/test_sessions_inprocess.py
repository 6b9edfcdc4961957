"""Sessions, budgets, effects and partial results through the whole system in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunOptions
from remit.agents.payload import decode
from remit.coordinator import Coordinator, Limits
from remit.core import CauseKind, InvalidArgument, Outcome, RunCancelled, RunFailed, SessionBusy, TurnCancelled
from remit.core.errors import BudgetExceeded, NotFound
from remit.core.events import EffectUncertain
from tests.agents import bodies
from tests.agents.world import World, in_loop, world
from tests.coordinator import conversation_bodies as talk

EFFECTS = ("effect_started", "effect_ended")


def uncertain(w: World) -> list[tuple[str, ...]]:
    return [event.in_flight for event in w.events("effect_uncertain") if isinstance(event, EffectUncertain)]


# -- sessions --------------------------------------------------------------------------


@pytest.mark.requirement("B30")
@in_loop
async def test_a_turn_after_a_cancelled_one_is_told_where_that_was(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held("first", session="s") as first:
            done = await first.delegate(bodies.add, a=1, b=2, options=RunOptions(name="look"))
            assert await done.result() == 3
            await first.delegate(bodies.nap, options=RunOptions(name="edit"))
            await w.stage.until_noted("nap began")
            first.partial("three files are left")
            await w.coordinator.cancel(first.id, "changed my mind")
        async with w.coordinator.turn("second", session="s") as second:
            (told,) = await second.history()
            assert told.describe().startswith("cancelled at step 2 of 2 (edit), user_interrupt")
            assert told.progress == '"three files are left"'
            assert [run.name for run in told.unfinished] == ["edit"]
            run = await second.delegate(bodies.give, value=1)
            await run.result()
        history = await w.coordinator.history("s")
        assert [record.id for record in history] == [first.id, second.id]
        assert [record.is_complete for record in history] == [False, True]
        with pytest.raises(NotFound, match="remit sessions"):
            await w.coordinator.history("nobody's")


@in_loop
async def test_turns_of_a_session_wait_for_each_other_in_their_order(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        begun: list[int] = []

        async def one(number: int) -> None:
            async with w.coordinator.turn(f"t{number}", session="s", busy="queue"):
                begun.append(number)

        async with w.coordinator.turn("first", session="s"):
            waiting = []
            for number in range(4):
                waiting.append(asyncio.ensure_future(one(number)))
                await w.until_asked("open_turn", number + 2)
            (view,) = await w.coordinator.sessions()
            assert (view.turns, len(view.queued), view.last is not None) == (5, 4, True)
            assert not begun
        await asyncio.gather(*waiting)
        assert begun == [0, 1, 2, 3]


@pytest.mark.field_report("B12")
@in_loop
async def test_a_cancel_that_was_held_up_finds_its_turn_ended_and_spares_the_next(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.coordinator.turn("first", session="s") as first:
            w.system.shut("cancel")
            late = asyncio.ensure_future(w.coordinator.cancel(first.id, "too late"))
            await w.until_asked("cancel")
        async with w.coordinator.turn("second", session="s") as second:
            w.system.let_through("cancel")
            receipt = await late
            assert (receipt.accepted, receipt.already) == (False, Outcome.SUCCEEDED)
            assert await (await second.delegate(bodies.add, a=1, b=2)).result() == 3
            assert not second.signal.is_set


@in_loop
async def test_another_user_may_wait_for_a_session_but_not_interrupt_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("first", session="s", user="ada") as first:
        with pytest.raises(SessionBusy, match="ada"):
            async with w.coordinator.turn("second", session="s", user="eve", busy="interrupt"):
                pass
        assert not first.signal.is_set


# -- budgets ---------------------------------------------------------------------------


@pytest.mark.requirement("A24")
@in_loop
async def test_a_turn_ends_with_its_budget(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled) as raised:
            async with w.coordinator.turn("t", limits=Limits(tokens=100, cost=5.0)) as turn:
                await (await turn.delegate(talk.spend, tokens=60, cost=1.5)).result()
                run = await turn.delegate(talk.spend, tokens=60, until="never")
                await run.result()
        cause = raised.value.cause
        assert cause is not None
        assert (cause.kind, cause.origin) == (CauseKind.BUDGET, turn.id)
        assert cause.reason == "its budget is used up: 120 of 100 tokens are spent"
        (view,) = await w.coordinator.turns()
        assert (view.tokens, view.cost) == (120, 1.5)
        assert [run.cause for run in await w.coordinator.runs()][1] == cause


@in_loop
async def test_a_run_that_uses_up_its_own_budget_leaves_the_others_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.spender_of_its_own)
        assert await run.result() == "cancelled"
        assert [view.cause.kind for view in await w.coordinator.runs() if view.cause] == [CauseKind.BUDGET]


@pytest.mark.requirement("D27")
@pytest.mark.field_report("K7")
@in_loop
async def test_what_is_spent_while_unwinding_is_in_the_receipt(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.coordinator.turn("t") as turn:
            run = await turn.delegate(talk.spend, tokens=4, cost=0.5, more=2, until="never")
            await w.stage.until_noted("spent")
            receipt = await (await run.cancel("enough")).quiet(10)
            assert receipt.summary is not None
            assert (receipt.summary.tokens, receipt.summary.cost) == (6, 0.5)
            turn.spend(tokens=10)
        (record,) = await w.coordinator.history(turn.session_id)
        assert (record.tokens, record.cost) == (16, 0.5)


@in_loop
async def test_a_turn_tells_what_it_has_spent_even_if_no_note_of_it_arrives(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.shut("note_spend")
        async with w.coordinator.turn("t", session="s") as turn:
            turn.spend(tokens=3)
            turn.spend(tokens=4, cost=0.5)
            wrong: Any
            for wrong in ({"tokens": -1}, {"cost": float("nan")}, {"tokens": 0.5}):
                with pytest.raises(InvalidArgument):
                    turn.spend(**wrong)
        (record,) = await w.coordinator.history("s")
        assert (record.tokens, record.cost) == (7, 0.5)
        w.system.let_through("note_spend")
        assert (await w.coordinator.history("s")) == (record,), "late copies count for nothing"


@pytest.mark.requirement("A24")
@in_loop
async def test_a_session_without_money_takes_no_turn(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled, match="budget"):
            async with w.coordinator.turn("t", session="s", session_limits=Limits(cost=1.0)) as turn:
                turn.spend(cost=1.0)
                await turn.sleep(600)
        with pytest.raises(BudgetExceeded, match="nothing left to spend"):
            async with w.coordinator.turn("next", session="s"):
                pass
        with pytest.raises(InvalidArgument, match="session_limits"):
            w.coordinator.turn("next", session="s", session_limits=Limits(max_depth=1))


def test_a_workspace_has_no_budget(tmp_path: Path) -> None:
    for limits in (Limits(tokens=1), Limits(cost=1.0)):
        with pytest.raises(InvalidArgument, match="no budget"):
            Coordinator.open(tmp_path, limits=limits)


# -- effects and partial results -------------------------------------------------------


@pytest.mark.requirement("B23")
@pytest.mark.requirement("B31")
@in_loop
async def test_an_effect_under_way_at_the_cancel_is_journalled_as_uncertain(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.post, gate="never")
        await w.stage.until_noted("posted")
        receipt = await (await run.cancel()).quiet(10)
        assert receipt.summary is not None
        assert receipt.summary.effects_uncertain == 1
        assert uncertain(w) == [("POST /deploy",)]


@pytest.mark.requirement("B24")
@in_loop
async def test_an_effect_is_uncertain_unless_it_is_confirmed(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        assert await (await turn.delegate(talk.post)).result() == "done"
        assert uncertain(w) == []
        assert [event.kind for event in w.events("effect_started", "effect_ended")] == [
            "effect_started",
            "effect_ended",
        ]
        for settle in (False, True):
            with pytest.raises(RunFailed, match="no answer"):
                await (await turn.delegate(talk.post, raises=True, settle=settle)).result()
        assert uncertain(w) == [("POST /deploy",)]
        async with turn.effect("mine"):
            pass
        with pytest.raises(InvalidArgument):
            async with turn.effect(""):
                pass
    assert uncertain(w) == [("POST /deploy",)]


@in_loop
async def test_an_effect_that_ends_during_a_cancel_is_confirmed(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.post_shielded, gate="go")
        await w.stage.until_noted("posted")
        receipt = await run.cancel()
        w.stage.open_gate("go")
        await receipt.quiet(20)
        assert await run.wait() is Outcome.CANCELLED
        assert [event.kind for event in w.events(*EFFECTS)] == list(EFFECTS)
        assert uncertain(w) == []
        assert w.stage.notes()[-1] == "another one was not begun"


@pytest.mark.requirement("B35")
@in_loop
async def test_what_a_late_answer_asks_for_is_not_written(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.write_late, path="a.txt")
        await w.stage.until_noted("asked the provider")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert "the provider answers all the same" in w.stage.notes()
        assert not (tmp_path / "a.txt").exists()


@pytest.mark.requirement("A22")
@in_loop
async def test_what_a_cancelled_turn_handed_over_is_in_the_journal(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held(session="s") as turn:
            turn.partial({"files": ["a.py"]})
            turn.partial({"files": ["a.py", "b.py"]})
            await w.until_asked("note_partial", 2)
            await w.coordinator.cancel(turn.id)
        reader = w.system.journal.reader()
        try:
            blob = reader.payload(turn.id, "turn_ended")
        finally:
            reader.close()
        assert blob is not None
        assert decode(blob) == {"files": ["a.py", "b.py"]}
        assert (await w.coordinator.run(turn.id)).preview == '{"files": ["a.py", "b.py"]}'


@in_loop
async def test_a_turn_whose_holder_is_deaf_ends_unconfirmed_in_every_view(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.shut("finish_turn")
        async with w.held(session="s", grace_s=0.05) as turn:
            receipt = await (await w.coordinator.cancel(turn.id)).quiet(20)
            assert receipt.summary is not None
            assert receipt.summary.unconfirmed == (turn.id,)
            assert (await w.coordinator.run(turn.id)).unconfirmed
            (record,) = await w.coordinator.history("s")
            assert record.unconfirmed
            w.system.let_through("finish_turn")


@in_loop
async def test_one_failure_stops_the_others_where_the_turn_wants_that(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t", on_failure="stop") as turn:
        kept = await turn.delegate(bodies.nap)
        await w.stage.until_noted("nap began")
        bad = await turn.delegate(bodies.boom)
        assert await turn.gather(kept, bad, return_outcomes=True) == [Outcome.CANCELLED, Outcome.FAILED]
        assert kept.cause is not None
        assert (kept.cause.kind, kept.cause.reason) == (CauseKind.PARENT_FAILED, "boom did not succeed")
        assert not turn.signal.is_set
