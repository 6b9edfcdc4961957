"""Approvals through the whole system in one process: bodies, coordinator, people."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from remit.coordinator import sync
from remit.coordinator.transaction import Settings
from remit.core import CauseKind, InvalidArgument, Outcome, RunFailed, RunTimedOut, TurnCancelled
from remit.core.approvals import ApprovalRule
from remit.core.errors import ApprovalDenied, ApprovalExpired, ApprovalSettled, NotFound
from remit.core.records import ApprovalRecord
from remit.testing import await_until, open_inprocess, wait_until
from tests.agents import bodies
from tests.agents.world import World, in_loop, world
from tests.coordinator import conversation_bodies as talk


async def until_asked(w: World, count: int = 1) -> tuple[ApprovalRecord, ...]:
    for _ in range(4_000):
        found = await w.coordinator.approvals()
        if len(found) == count:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} approvals: {await w.coordinator.approvals(everything=True)}")


@in_loop
async def test_a_run_goes_on_after_a_yes_and_not_before(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("release") as turn:
        run = await turn.delegate(talk.ask)
        (record,) = await until_asked(w)
        assert (record.action, record.path, record.node_id) == ("deploy prod", ("release", "ask"), run.id)
        assert "hunter2" not in record.details
        assert '"to": "prod"' in record.details
        assert not w.stage.notes()
        answered = await w.coordinator.approve(record.id, "as agreed", by="ada")
        assert (answered.decision, answered.surface, answered.reason) == ("approved", "python", "as agreed")
        assert await run.result() == "ada"
        assert await w.coordinator.approvals() == ()
        assert await w.coordinator.approvals(everything=True) == (answered,)


@in_loop
async def test_a_no_fails_the_run_with_who_and_why(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask)
        (record,) = await until_asked(w)
        await w.coordinator.deny(record.id, "not on a friday", by="ada")
        with pytest.raises(RunFailed, match="denied by ada: not on a friday") as raised:
            await run.result()
        assert (raised.value.error_type, raised.value.error_code) == ("ApprovalDenied", "approval_denied")
        with pytest.raises(ApprovalSettled, match="denied by ada"):
            await w.coordinator.approve(record.id)
        with pytest.raises(NotFound):
            await w.coordinator.approve("approval_none")


@pytest.mark.requirement("F15")
@pytest.mark.field_report("H1")
@in_loop
async def test_an_approval_from_below_is_shown_with_its_path_and_in_the_tree(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_shared=1, max_depth=4)) as w:
        async with w.coordinator.turn("release") as turn:
            run = await turn.delegate(talk.ask_below, depth=2)
            (record,) = await until_asked(w)
            assert record.path == ("release", "ask_below", "ask_below", "ask")
            await await_until(lambda: w.events("run_waiting"))
            beside = await turn.delegate(bodies.add, a=1, b=2)
            assert await beside.result() == 3, "a wait for approval holds no slot"
            view = await w.coordinator.run(record.node_id)
            assert (view.state, view.waiting_for) == ("waiting", f"approval of deploy prod ({record.id})")
            assert view.since == record.asked_at
            await w.coordinator.approve(record.id, by="ada")
            assert await run.result() == "ada"


@pytest.mark.requirement("B7")
@pytest.mark.field_report("H9")
@pytest.mark.field_report("H4")
@in_loop
async def test_a_cancel_wakes_whoever_waits_for_an_approval_as_a_cancellation(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held() as turn:
            run = await turn.delegate(talk.ask)
            (record,) = await until_asked(w)
            await w.coordinator.cancel(turn.id, "enough")
            with pytest.raises(ApprovalSettled):
                await w.coordinator.approve(record.id)
            await w.stage.until_noted("unwound: user_interrupt through python: enough")
        assert run.outcome is Outcome.CANCELLED
        assert len(w.stage.notes()) == 1, "no answer came, and nothing was done"
        (closed,) = await w.coordinator.approvals(everything=True)
        assert (closed.decision, closed.cause) == ("cancelled", turn.cause)


@pytest.mark.field_report("H9")
@in_loop
async def test_the_word_about_the_approval_alone_is_a_cancellation_too(tmp_path: Path) -> None:
    """The order to stop is held back: what reaches the body first is the end of its question."""
    async with world(tmp_path) as w:
        async with w.held() as turn:
            await turn.delegate(talk.ask)
            await until_asked(w)
            for host in w.system.engine.hosts.values():
                host.control = lambda orders: None  # type: ignore[method-assign]
            await w.coordinator.cancel(turn.id, "enough")
            await w.stage.until_noted("unwound: user_interrupt through python: enough")
        assert [view.outcome for view in await w.coordinator.runs()] == [Outcome.CANCELLED]


@pytest.mark.field_report("H5")
@in_loop
async def test_an_answer_after_the_cancel_and_in_a_newer_turn_sets_nothing_going(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held("old", session="s") as turn:
            await turn.delegate(talk.ask)
            (record,) = await until_asked(w)
            await w.coordinator.cancel(turn.id)
        async with w.coordinator.turn("new", session="s"):
            with pytest.raises(ApprovalSettled):
                await w.coordinator.approve(record.id, by="ada")
        assert not any("acted" in note for note in w.stage.notes())


@pytest.mark.requirement("B9")
@in_loop
async def test_many_answer_at_once_and_one_counts(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask)
        (record,) = await until_asked(w)
        answers = [w.coordinator.approve(record.id, by=f"person {number}") for number in range(5)]
        found = await asyncio.gather(*answers, return_exceptions=True)
        won = [item for item in found if isinstance(item, ApprovalRecord)]
        assert len(won) == 1
        assert all(isinstance(item, ApprovalSettled) for item in found if item is not won[0])
        assert await run.result() == won[0].by


@in_loop
async def test_the_same_answer_sent_twice_is_one(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask)
        (record,) = await until_asked(w)
        first = await w.coordinator.approve(record.id, by="ada", request_id="req_mine")
        assert await w.coordinator.approve(record.id, by="ada", request_id="req_mine") == first
        assert await run.result() == "ada"


@pytest.mark.field_report("H7")
@in_loop
async def test_an_approval_that_nobody_answers_expires(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask, timeout_s=0.05)
        assert await run.wait() is Outcome.FAILED
        assert w.stage.notes()[0].startswith("approval_expired: approval of 'deploy prod'")
        (record,) = await w.coordinator.approvals(everything=True)
        assert record.decision == "expired"


@in_loop
async def test_a_deadline_ends_the_wait_as_a_deadline(tmp_path: Path) -> None:
    from remit.agents import RunOptions

    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask, options=RunOptions(deadline_s=0.1))
        with pytest.raises(RunTimedOut):
            await run.result()
        (record,) = await w.coordinator.approvals(everything=True)
        assert record.decision == "cancelled"
        assert record.cause is not None
        assert record.cause.kind is CauseKind.DEADLINE


@in_loop
async def test_whoever_gives_up_waiting_takes_the_question_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask_or_give_up)
        assert await run.result() == "nobody came"
        await w.until_asked("withdraw_approval")
        (record,) = await w.coordinator.approvals(everything=True)
        assert (record.decision, record.by) == ("cancelled", run.id)


@in_loop
async def test_a_turn_asks_for_itself_and_policies_answer_at_once(tmp_path: Path) -> None:
    rules = [ApprovalRule("read *", "approve"), ApprovalRule("rm *", "deny", "never")]
    async with world(tmp_path) as w, w.coordinator.turn("t", approvals=rules) as turn:
        assert (await turn.approve("read a.py")).by == "policy"
        with pytest.raises(ApprovalDenied, match="denied by policy: never"):
            await turn.approve("rm a.py")
        with pytest.raises(ApprovalExpired):
            await turn.approve("write a.py", timeout_s=0.05)
        for action, timeout_s in (("", None), ("a", 0.0), ("a", float("nan"))):
            with pytest.raises(InvalidArgument):
                await turn.approve(action, timeout_s=timeout_s)
        with pytest.raises(ApprovalDenied):
            await turn.approve("rm --password=hunter2")
        assert "hunter2" not in repr(await w.coordinator.approvals(everything=True))
        waiting = asyncio.ensure_future(turn.approve("write b.py"))
        (record,) = await until_asked(w)
        assert (await w.coordinator.run(turn.id)).waiting_for == f"approval of write b.py ({record.id})"
        await w.coordinator.approve(record.id, by="ada")
        assert (await waiting).by == "ada"


@in_loop
async def test_nobody_asks_after_its_cancel(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.held(approvals="auto") as turn:
        await w.coordinator.cancel(turn.id)
        await await_until(lambda: turn.signal.is_set)
        with pytest.raises(TurnCancelled):
            await turn.approve("anything")
        assert "ask_approval" not in w.system.calls


def test_plain_bodies_and_plain_callers_ask_and_answer_the_same(tmp_path: Path) -> None:
    with open_inprocess(tmp_path) as system, sync.Coordinator(system.coordinator()) as coordinator:
        with coordinator.turn("before", session="s"):
            pass
        with coordinator.turn("t", session="s") as turn:
            run = turn.delegate(talk.ask_plain)
            wait_until(lambda: len(coordinator.approvals()) == 1)
            (record,) = coordinator.approvals()
            assert coordinator.approve(record.id, by="ada").decision == "approved"
            assert run.result() == "ada, 1 turns before"
            answers = threading.Thread(target=lambda: _deny_next(coordinator))
            answers.start()
            with pytest.raises(ApprovalDenied):
                turn.approve("mine")
            answers.join()
            turn.spend(tokens=2)
        assert [record.name for record in coordinator.history("s")] == ["before", "t"]
        (view,) = coordinator.sessions()
        assert (view.id, view.turns, view.tokens) == ("s", 2, 5)
        assert [record.decision for record in coordinator.approvals(everything=True)] == ["approved", "denied"]


def _deny_next(coordinator: sync.Coordinator) -> None:
    wait_until(lambda: len(coordinator.approvals()) == 1)
    coordinator.deny(coordinator.approvals()[0].id, by="ada")


@pytest.mark.requirement("D25")
@in_loop
async def test_a_parent_that_makes_texts_of_errors_makes_none_of_its_own_cancel(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held() as turn:
            run = await turn.delegate(talk.report_as_text)
            await until_asked(w)
            await w.coordinator.cancel(turn.id, "enough")
        assert run.outcome is Outcome.CANCELLED
        assert run.cause == turn.cause
        assert not any("made a text" in note for note in w.stage.notes())
