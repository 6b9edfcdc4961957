"""Answers that are lost, clients that are slow or silent: what reaches whom, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.agents.runs import Run
from remit.coordinator import Coordinator
from remit.core import CauseKind, Outcome, TurnCancelled
from remit.core.messages import Notice
from remit.testing import await_until
from remit.testing.inprocess import InProcessLink
from tests.agents import bodies
from tests.agents.world import World, in_loop, world


def connected(w: World, *, grace_s: float = 10.0, surface: str = "python") -> tuple[Coordinator, InProcessLink]:
    """Return a further client and the link that it can be cut off by."""
    link = w.system.link()
    coordinator = Coordinator(w.system.workspace, lambda: link, grace_s=grace_s, surface=surface)
    coordinator.connect()
    return coordinator, link


@pytest.mark.requirement("D18")
@in_loop
async def test_what_happened_while_the_link_was_cut_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    notice = Run.notice

    def count(run: Run, news: Notice) -> None:
        told.append(run.id)
        notice(run, news)

    monkeypatch.setattr(Run, "notice", count)
    async with world(tmp_path) as w:
        coordinator, link = connected(w)
        async with coordinator.turn("t") as turn:
            runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(20)])
            link.is_cut = True
            w.stage.open_gate("go")
            await await_until(lambda: len(w.events("run_ended")) == 20)
            assert told == []
            link.is_cut = False
            assert await turn.gather(*runs) == list(range(20))
        assert sorted(told) == sorted(run.id for run in runs)
        await asyncio.to_thread(coordinator.close)


@pytest.mark.requirement("B22")
@in_loop
async def test_reports_that_a_host_sends_again_count_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(5)])
        await await_until(lambda: len(w.stage.notes()) == 5)
        links = [host.link for host in w.system.engine.hosts.values()]
        for link in links:
            link.is_cut = True
        w.stage.open_gate("go")
        await w.until_idle_hosts()
        assert w.events("run_ended") == []
        for link in links:
            link.is_cut = False
        assert await turn.gather(*runs) == list(range(5))
        assert len(w.events("run_ended")) == 5


@pytest.mark.requirement("D19")
@pytest.mark.field_report("B15")
@in_loop
async def test_a_watcher_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    count = 300
    async with world(tmp_path) as w:
        slow, link = connected(w)
        async with w.coordinator.turn("t") as turn:
            runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(count)])
            watched = [Run(turn, run.id) for run in runs]
            for run in watched:
                slow.session.watch(run.id, run)
            await w.until_asked("subscribe", count)
            link.is_cut = True
            w.stage.open_gate("go")
            assert await turn.gather(*runs) == list(range(count))
            assert not any(run.is_settled for run in watched)
            link.is_cut = False
            await await_until(lambda: all(run.is_settled for run in watched))
        await asyncio.to_thread(slow.close)


@pytest.mark.requirement("D20")
@in_loop
async def test_a_client_that_goes_away_stops_its_own_turns_only(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("mine") as mine:
        other, _ = connected(w)
        with pytest.raises(TurnCancelled):
            async with other.turn("theirs") as theirs:
                await theirs.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                await asyncio.to_thread(other.close)
                await theirs.sleep(600)
        await await_until(lambda: w.events("turn_ended"))
        (view,) = [view for view in await w.coordinator.turns() if view.id == theirs.id]
        assert view.cause is not None
        assert view.cause.kind is CauseKind.PARENT_LOST
        assert not mine.signal.is_set


@in_loop
async def test_a_silent_client_loses_its_turns_after_its_grace_and_hears_of_it_when_it_is_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        coordinator, link = connected(w, grace_s=0.3)
        with pytest.raises(TurnCancelled) as raised:
            async with coordinator.turn("t") as turn:
                await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                link.is_cut = True
                await await_until(lambda: w.events("turn_ended"))
                link.is_cut = False
                await turn.sleep(600)
        assert raised.value.cause is not None
        assert raised.value.cause.kind is CauseKind.PARENT_LOST
        assert turn.outcome is Outcome.CANCELLED
        await asyncio.to_thread(coordinator.close)


@in_loop
async def test_a_client_that_is_only_idle_does_not_lapse_though_its_grace_is_shorter_than_a_poll(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, poll_s=60.0, grace_s=0.3) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.wait_at, gate="go", value=1)
        # Twelve polls at a third of the grace each, which one poll of a minute would not survive.
        await w.until_asked("poll", 12)
        w.stage.open_gate("go")
        assert await run.result() == 1


@in_loop
async def test_a_turn_that_may_go_on_without_its_client_does(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        other, link = connected(w, grace_s=0.3)

        async def hold() -> None:
            async with other.turn("t", on_disconnect="continue") as turn:
                run = await turn.delegate(bodies.wait_at, gate="go", value=1)
                w.stage.note("delegated")
                await run.result()

        holding = asyncio.ensure_future(hold())
        await w.stage.until_noted(" waits", "delegated")
        link.is_cut = True
        await await_until(lambda: w.events("turn_settling"), message="the client has lapsed")
        assert w.events("cancel_requested") == []
        w.stage.open_gate("go")
        await await_until(lambda: w.events("turn_ended"))
        assert [view.outcome for view in await w.coordinator.turns()] == [Outcome.SUCCEEDED]
        link.is_cut = False
        await holding
        await asyncio.to_thread(other.close)


@pytest.mark.requirement("B22")
@pytest.mark.requirement("D16")
@in_loop
async def test_a_host_that_vanishes_makes_its_runs_lost_and_another_takes_over(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.nap)
        await w.stage.until_noted("nap began")
        view = await w.coordinator.run(run.id)
        w.system.engine.hosts[view.host_id].kill("killed by the test")
        assert await run.wait() is Outcome.LOST
        assert run.cause is None
        assert await (await turn.delegate(bodies.add, a=1, b=2)).result() == 3
        assert len(w.events("run_ended")) == 2
