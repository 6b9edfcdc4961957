"""A coordinator that dies at the worst moment and is begun again, with hosts and clients living on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.agents.client import ClientSession
from remit.coordinator import dispatch
from remit.coordinator.engine import ClusterNode
from remit.coordinator.transaction import Settings
from remit.core import CauseKind, Outcome, RunLost, TurnCancelled
from remit.core.errors import NotFound
from remit.core.events import RunEnded
from remit.core.messages import OpenTurn
from remit.locks import write
from remit.testing import await_until
from remit.testing.inprocess import InProcessLink
from tests.agents import bodies
from tests.agents.bodies import Stage
from tests.agents.world import World, in_loop, world


@agent
async def two_steps(ctx: RunContext) -> list[int]:
    """Delegate, wait, and delegate again after a gate."""
    stage = Stage(ctx.workspace)
    first = await ctx.delegate(bodies.wait_at, options=RunOptions(name="first"), gate="one", value=1)
    found = [await first.result()]
    stage.note("first step")
    await stage.pass_gate("two")
    second = await ctx.delegate(bodies.give, value=2)
    return [*found, await second.result()]


@agent
async def leave_child(ctx: RunContext) -> str:
    """Return while a child still runs."""
    await ctx.delegate(bodies.wait_at, options=RunOptions(name="left"), gate="go")
    return "returned early"


@agent
async def hold(ctx: RunContext, label: str) -> int:
    """Hold a claim until a gate is open."""
    stage = Stage(ctx.workspace)
    stage.note(f"{label} asks")
    async with ctx.claim(write("a.txt")) as lease:
        stage.note(f"{label} holds")
        await stage.pass_gate(label)
        await ctx.write_text("a.txt", label)
        return lease.token


@agent
async def where(ctx: RunContext) -> int:
    """Tell which attempt this is, once the gate is open."""
    stage = Stage(ctx.workspace)
    stage.note(f"attempt {ctx.attempt}")
    while not stage.is_open("go"):
        await ctx.sleep(0.005)
    return ctx.attempt


async def crashed(w: World) -> None:
    """Kill the coordinator; hosts and clients go on by themselves."""
    await asyncio.to_thread(w.system.crash_coordinator)


async def restarted(w: World) -> None:
    """Begin the next life."""
    await asyncio.to_thread(w.system.restart_coordinator)


async def died(w: World) -> None:
    """Wait until the coordinator has died at its failpoint, and begin the next life."""
    await await_until(w.system.died.is_set, timeout_s=30.0, message="the failpoint")
    await restarted(w)


def starts(w: World) -> int:
    return sum(host.received.count("start") for host in w.system.engine.hosts.values())


@pytest.mark.requirement("F14")
@pytest.mark.field_report("I4")
@in_loop
async def test_bodies_wait_delegate_and_return_across_two_restarts(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.coordinator.turn("t") as turn:
            run = await turn.delegate(two_steps)
            await w.stage.until_noted("first waits")
            hosts = set(w.system.engine.hosts)
            await restarted(w)
            w.stage.open_gate("one")
            await w.stage.until_noted("first step")
            await crashed(w)
            # The body asks for a delegation that nobody is there to take.
            w.stage.open_gate("two")
            await restarted(w)
            assert await run.result() == [1, 2]
        assert turn.outcome is Outcome.SUCCEEDED
        assert hosts <= set(w.system.engine.hosts)
        assert {event.attempt for event in w.events("run_ended") if isinstance(event, RunEnded)} == {1}
        assert len(w.events("coordinator_started")) == 3


@pytest.mark.requirement("D18")
@in_loop
async def test_a_result_that_came_while_nobody_listened_is_the_result(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(5)])
        await await_until(lambda: len(w.stage.notes()) == 5)
        await crashed(w)
        w.stage.open_gate("go")
        await w.until_idle_hosts()
        await restarted(w)
        assert await turn.gather(*runs) == list(range(5))
        assert starts(w) == 1


@pytest.mark.requirement("F7")
@pytest.mark.field_report("I7")
@pytest.mark.field_report("I6")
@in_loop
async def test_a_cancel_that_nobody_was_told_of_lands_once_with_its_cause(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.held() as turn:
            await turn.delegate(bodies.catch_all)
            await w.stage.until_noted("child began")
            w.system.die_after("cancel_requested")
            asked = asyncio.ensure_future(w.coordinator.cancel(turn.id, "enough", actor="ada"))
            await died(w)
            receipt = await (await asked).quiet()
            assert (receipt.is_quiet, dict(receipt.runs)) == (True, {"cancelled": 2})
        tree = await w.coordinator.tree(turn.id)
        assert {node.cause for node in tree.nodes} == {receipt.cause}
        assert {node.outcome for node in tree.nodes} == {Outcome.CANCELLED}
        assert w.stage.notes() == ["child began", "child unwound by TurnCancelled"]
        assert len(w.events("cancel_requested")) == 1
        assert [event.node_id for event in w.events("turn_ended", "run_ended")].count(turn.id) == 1


@in_loop
async def test_a_start_that_was_decided_and_not_sent_is_sent_by_the_next_life(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        await (await turn.delegate(bodies.give)).result()
        w.system.die_after("run_started")
        delegating = asyncio.ensure_future(turn.delegate(where))
        await died(w)
        run = await delegating
        w.stage.open_gate("go")
        assert await run.result() == 1
        assert w.stage.notes() == ["attempt 1"]
        assert len(w.events("run_accepted")) == len(w.events("run_started")) == 2


@in_loop
async def test_a_result_that_waits_for_a_child_outlives_its_coordinator(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        w.system.die_after("run_settling")
        run = await turn.delegate(leave_child)
        await died(w)
        await w.stage.until_noted("left waits")
        w.stage.open_gate("go")
        assert await run.result() == "returned early"
        view = await w.coordinator.run(run.id)
        assert "returned early" in view.preview


@in_loop
async def test_a_partial_result_outlives_its_coordinator(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.partial_nap)
        await w.stage.until_noted("partial given")
        await await_until(lambda: w.events("run_progressed"))
        await restarted(w)
        await run.cancel("enough")
        assert await run.wait() is Outcome.CANCELLED
        assert run.exception().partial == {"found": ["a.py", "b.py"]}


@pytest.mark.parametrize("kind", ["run_accepted", "run_ended", "turn_settling", "turn_ended", "turn_accepted"])
@in_loop
async def test_whatever_was_durable_when_it_died_is_true_afterwards(kind: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.die_after(kind)

        async def work() -> list[object]:
            found: list[object] = []
            async with w.coordinator.turn("t") as turn:
                found = await turn.gather(*await turn.delegate_many(bodies.give, [{"value": n} for n in range(3)]))
            return found

        working = asyncio.ensure_future(work())
        await died(w)
        assert await working == [0, 1, 2]
        ends = [event.node_id for event in w.events("run_ended", "turn_ended")]
        assert (len(ends), len(set(ends))) == (4, 4)


@in_loop
async def test_a_host_that_died_meanwhile_has_lost_its_runs_and_a_retry_begins_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        once = await turn.delegate(where)
        again = await turn.delegate(where, options=RunOptions(retries=1))
        await await_until(lambda: w.stage.notes() == ["attempt 1"] * 2)
        await crashed(w)
        for host in list(w.system.engine.hosts.values()):
            host.kill()
        w.stage.open_gate("go")
        await restarted(w)
        with pytest.raises(RunLost):
            await once.result()
        assert await again.result() == 2


@in_loop
async def test_a_host_that_does_not_answer_is_ended_and_its_runs_are_settled(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(where, options=RunOptions(retries=1))
        await w.stage.until_noted("attempt 1")
        for host in w.system.engine.hosts.values():
            host.is_deaf = True
        await restarted(w)
        await w.stage.until_noted("attempt 2")
        w.stage.open_gate("go")
        assert await run.result() == 2


@pytest.mark.parametrize("lives", [True, False])
@in_loop
async def test_a_host_that_an_earlier_life_asked_for_is_taken_in_when_it_answers(lives: bool, tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.shut("hello")
        earlier = dict(w.system.engine.hosts)
        for host in earlier.values():
            host.kill()
        async with w.coordinator.turn("t") as turn:
            run = await turn.delegate(bodies.give, value=7)
            await await_until(lambda: w.system.engine.hosts.keys() - earlier.keys())
            await crashed(w)
            asked_for = w.system.engine.hosts.keys() - earlier.keys()
            for host_id in asked_for if not lives else ():
                w.system.engine.hosts[host_id].kill()
            await restarted(w)
            assert await run.result() == 7
        ready = {event.node_id for event in w.events("host_ready")}
        assert ready & asked_for == (asked_for if lives else set())


@pytest.mark.requirement("F6")
@in_loop
async def test_programs_of_what_is_over_are_ended_by_the_next_life_until_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_AGAIN_S", 0.01)
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        over = await turn.delegate(bodies.give, value=1)
        await over.result()
        live = await turn.delegate(where)
        await w.stage.until_noted("attempt 1")
        engine = w.system.engine
        engine.owners = frozenset({over.id, live.id, turn.id, "run_forgotten"})
        engine.sweeps_succeed = False
        await restarted(w)
        await await_until(lambda: min(engine.swept_owners.count(name) for name in (over.id, "run_forgotten")) >= 3)
        engine.sweeps_succeed = True
        assert set(engine.swept_owners) == {over.id, "run_forgotten"}
        w.stage.open_gate("go")
        assert await live.result() == 1


@in_loop
async def test_claims_are_held_and_waited_for_across_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        first = await turn.delegate(hold, label="one")
        await w.stage.until_noted("one holds")
        second = await turn.delegate(hold, label="two")
        await await_until(lambda: len([e for e in w.events("run_waiting") if e.node_id == second.id]) == 1)
        await restarted(w)
        assert len(await w.coordinator.locks()) == 2
        w.stage.open_gate("one")
        w.stage.open_gate("two")
        assert await first.result() < await second.result()
        assert (tmp_path / "a.txt").read_text() == "two"
        assert await w.coordinator.locks() == ()


@in_loop
async def test_what_waits_for_a_slot_is_begun_by_the_next_life_with_its_arguments(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_shared=1)) as w, w.coordinator.turn("t") as turn:
        runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(4)])
        await await_until(lambda: len(w.stage.notes()) == 1)
        await restarted(w)
        w.stage.open_gate("go")
        assert await turn.gather(*runs) == list(range(4))
        await await_until(lambda: _kept(tmp_path) == 0, message="arguments of ended runs are gone")


def _kept(workspace: Path) -> int:
    return sum(path.stat().st_size for path in (workspace / ".remit" / "briefs").iterdir())


@in_loop
async def test_what_nobody_has_the_arguments_of_is_lost_and_says_so(tmp_path: Path) -> None:
    async with world(tmp_path, settings=Settings(max_shared=1)) as w, w.coordinator.turn("t") as turn:
        runs = await turn.delegate_many(bodies.wait_at, [{"gate": "go", "value": n} for n in range(2)])
        await await_until(lambda: len(w.stage.notes()) == 1)
        await crashed(w)
        for path in (tmp_path / ".remit" / "briefs").iterdir():
            path.unlink()
        await restarted(w)
        with pytest.raises(RunLost, match="arguments are gone"):
            await runs[1].result()
        w.stage.open_gate("go")
        assert await runs[0].result() == 0


@in_loop
async def test_a_holder_that_does_not_come_back_has_lost_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        link = w.system.link()
        turn_id = await _turn_of_a_client_that_is_cut_off(link)
        await crashed(w)
        link.is_cut = True
        await restarted(w)
        # Its time is over at once: nobody waits ten seconds here.
        clients = w.system.life.service._clients
        monkeypatch.setattr(clients, "_expected", dict.fromkeys(clients._expected, 0.0))
        await await_until(lambda: [e for e in w.events("turn_ended") if e.node_id == turn_id])
        view = await w.coordinator.run(turn_id)
        assert (view.outcome, view.cause is not None and view.cause.kind) == (
            Outcome.CANCELLED,
            CauseKind.PARENT_LOST,
        )


async def _turn_of_a_client_that_is_cut_off(link: InProcessLink) -> str:
    session = ClientSession(link)
    request = OpenTurn("turn_cut", session.client_id, "s")
    await asyncio.to_thread(session.request_blocking, "open_client", session._open_request)
    await asyncio.to_thread(session.request_blocking, "open_turn", request)
    return request.turn_id


@pytest.mark.requirement("F6")
@in_loop
async def test_a_host_that_is_left_alone_ends_its_work_and_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(TurnCancelled):
            async with w.coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.nap)
                await w.stage.until_noted("nap began")
                (host,) = [h for h in w.system.engine.hosts.values() if h.host.statistics()["attempts"]]
                assert await asyncio.to_thread(host.lifeline.look)
                await crashed(w)
                assert await asyncio.to_thread(host.lifeline.look)
                host.lifeline._heard -= 31.0
                assert not await asyncio.to_thread(host.lifeline.look)
                assert host.is_dead
                assert w.stage.notes()[-1] == "nap unwound by TurnCancelled"
                await restarted(w)
                with pytest.raises(RunLost):
                    await run.result()
                await turn.cancel("enough")
                await turn.sleep(600)


@in_loop
async def test_a_host_that_was_settled_without_it_ends_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(bodies.nap)
        await w.stage.until_noted("nap began")
        (host,) = [h for h in w.system.engine.hosts.values() if h.host.statistics()["attempts"]]
        # For the coordinator it is gone, as behind a cut in the network.
        w.system.loop.call_soon_threadsafe(host._on_gone, "out of reach")
        with pytest.raises(RunLost):
            await run.result()
        assert not await asyncio.to_thread(host.lifeline.look)
        assert (host.is_dead, w.stage.notes()[-1]) == (True, "nap unwound by TurnCancelled")


@pytest.mark.field_report("I11")
@in_loop
async def test_orders_of_an_earlier_life_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(where)
        await w.stage.until_noted("attempt 1")
        (host,) = [h for h in w.system.engine.hosts.values() if h.host.statistics()["attempts"]]
        sent: list[bytes] = []
        monkeypatch.setattr(host, "start", sent.append)
        late = await turn.delegate(where)
        await await_until(lambda: sent)
        monkeypatch.undo()
        await restarted(w)
        await await_until(lambda: w.stage.notes().count("attempt 1") == 2)
        # What the life before had sent arrives now.
        host.start(sent[0])
        await await_until(lambda: host.host.refused == 1)
        w.stage.open_gate("go")
        assert await turn.gather(run, late) == [1, 1]
        assert w.stage.notes() == ["attempt 1"] * 2


@pytest.mark.field_report("I1")
@pytest.mark.field_report("I2")
@in_loop
async def test_work_moves_off_a_drained_node_and_a_body_that_swallows_it_has_not_succeeded(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(where)
        swallowing = await turn.delegate(bodies.swallow)
        await w.stage.until_noted("attempt 1", "swallow began")
        w.system.engine.cluster.append(ClusterNode("node_2", "there", "10.0.0.2"))
        with pytest.raises(NotFound, match=r"node_1 \(here\)"):
            await w.coordinator.drain("nowhere")
        answer = await w.coordinator.drain("here", "repairs")
        assert (answer.node, answer.name, answer.runs) == ("node_1", "here", 2)
        await w.stage.until_noted("attempt 2")
        await await_until(lambda: w.stage.notes().count("swallow began") == 2)
        w.stage.open_gate("go")
        assert await run.result() == 2
        await swallowing.cancel("enough")
        assert await swallowing.wait() is Outcome.CANCELLED
        moved = {host.id: host.node for host in w.system.engine.hosts.values()}
        views = [await w.coordinator.run(each.id) for each in (run, swallowing)]
        assert {moved[view.host_id] for view in views} == {"node_2"}
        await w.coordinator.drain("10.0.0.2", undo=True)
