"""Claims while things are being stopped: what a cancel costs, what is seen meanwhile, what the receipt says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.coordinator import Coordinator, Turn
from remit.coordinator.transaction import Settings
from remit.coordinator.views import summarise_cancel
from remit.core import Outcome, RunCancelled, TurnCancelled
from remit.core.errors import Refused
from remit.core.messages import ClaimCheck
from remit.locks import Area, ClaimState, LeaseNotHeld, Mode, PathNotClaimed, write
from remit.testing.inprocess import InProcess, open_inprocess
from remit.testing.wait import await_until
from tests.coordinator.claims_world import ClaimWorld


class Watched:
    """What bodies of this module, which run in this process, can look at and note."""

    system: InProcess
    seen: list[tuple[list[str], list[str]]]
    """For each body that was stopped: requests to the coordinator, and messages to its host, until then."""
    release: asyncio.Event | None = None


@pytest.fixture
def system(tmp_path: Path) -> Generator[InProcess]:
    with open_inprocess(tmp_path, settings=Settings(max_shared=8)) as found:
        Watched.system, Watched.seen = found, []
        yield found


def in_loop(system: InProcess, story: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        async with system.coordinator() as coordinator:
            await story(coordinator)

    asyncio.run(main())


async def until_claims(coordinator: Coordinator, state: ClaimState, count: int) -> None:
    for _ in range(6_000):
        if sum(view.state is state for view in await coordinator.locks()) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} claims {state}: {await coordinator.locks()}")


@agent
async def keep(ctx: RunContext, path: str) -> None:
    async with ctx.claim(write(path)):
        await ctx.sleep(1_000)


@agent
async def stand_in_line(ctx: RunContext, path: str) -> None:
    try:
        async with ctx.claim(write(path)):
            await ctx.sleep(1_000)
    except TurnCancelled:
        received = [message for host in Watched.system.engine.hosts.values() for message in host.received]
        Watched.seen.append((list(Watched.system.calls), received))
        raise


@agent
async def keep_and_clean_up_slowly(ctx: RunContext, path: str, gate: str) -> None:
    async with ctx.claim(write(path)):
        child = await ctx.delegate(keep, path=f"{path}/below")
        try:
            await child.result()
        finally:
            async with ctx.shielded(30.0):
                await await_until((ctx.workspace / gate).exists, timeout_s=30.0)


@pytest.mark.requirement("A23")
@pytest.mark.requirement("B14")
def test_cancelling_a_waiter_takes_the_cancel_and_one_order_and_no_other_message(system: InProcess) -> None:
    """Invariant I16."""

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            holder = await turn.delegate(keep, path="x")
            await until_claims(coordinator, ClaimState.GRANTED, 1)
            first = await turn.delegate(stand_in_line, path="x")
            await until_claims(coordinator, ClaimState.QUEUED, 1)
            second = await turn.delegate(stand_in_line, path="x")
            await until_claims(coordinator, ClaimState.QUEUED, 2)
            (before,) = [view for view in await coordinator.locks() if view.owner == second.id]
            # Nothing that the body says is taken any more: it must not need an answer to raise.
            for gate in ("give_up_claim", "report", "claim", "check_claim"):
                await asyncio.to_thread(system.shut, gate)
            calls = len(system.calls)
            received = sum(len(host.received) for host in system.engine.hosts.values())
            await first.cancel("enough")
            await await_until(lambda: Watched.seen, timeout_s=30.0)
            ((calls_then, received_then),) = Watched.seen
            # One round trip asks; the next is the order to the host. Polls are parked and go by the clock.
            asked = [name for name in calls_then[calls:] if name not in ("poll", "give_up_claim")]
            assert asked == ["cancel"]
            assert len(received_then) == received + 1
            (after,) = [view for view in await coordinator.locks() if view.owner == second.id]
            assert (after.state, after.ticket, after.since) == (before.state, before.ticket, before.since)
            assert (before.held_by, after.held_by) == ((holder.id,), (holder.id,))
            assert [view.owner for view in await coordinator.locks()] == [holder.id, second.id]
            for gate in ("give_up_claim", "report", "claim", "check_claim"):
                await asyncio.to_thread(system.let_through, gate)
            with pytest.raises(RunCancelled):
                await first.result()
            await holder.cancel()
            await until_claims(coordinator, ClaimState.GRANTED, 1)
            await second.cancel()
        assert await coordinator.locks() == ()

    in_loop(system, story)


@pytest.mark.requirement("F15")
@pytest.mark.field_report("M2")
def test_views_show_claims_children_cause_and_age_while_a_cancel_is_under_way(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn, coordinator.turn("other") as other:
            run = await turn.delegate(keep_and_clean_up_slowly, path="x", gate="go")
            await until_claims(coordinator, ClaimState.GRANTED, 2)
            waiter = await other.delegate(keep, path="x")
            await until_claims(coordinator, ClaimState.QUEUED, 1)
            receipt = await run.cancel("wrong folder")
            tree = await coordinator.tree(run.id)
            assert (tree.root.state, tree.root.outcome) == ("cancelling", None)
            assert tree.root.cause is not None
            assert (tree.root.cause.origin, tree.root.cause.reason) == (run.id, "wrong folder")
            assert 0 <= tree.now - tree.root.since < 600
            (child,) = tree.children(run.id)
            assert child.cause == tree.root.cause
            held = {view.owner: view.state for view in await coordinator.locks()}
            assert held[run.id] is ClaimState.GRANTED
            assert held[waiter.id] is ClaimState.QUEUED
            assert f"write x (held by {run.id}" in (await coordinator.run(waiter.id)).waiting_for
            assert not (await receipt.quiet(0.0)).is_quiet
            Path(system.workspace, "go").touch()
            receipt = await receipt.quiet(30.0)
            assert receipt.is_quiet
            assert receipt.summary is not None
            assert (receipt.summary.claims_freed, receipt.summary.claims_quarantined) == (2, ())
            await until_claims(coordinator, ClaimState.GRANTED, 1)
            await waiter.cancel()

    in_loop(system, story)


def test_a_receipt_counts_leases_and_not_waits_and_names_what_is_quarantined() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    stuck, waiter = world.delegate(turn, 2)
    # The host lives on for it, so that nothing proves the stuck body gone.
    world.run(world.open_turn("s2"))
    world.claim(turn, "w:own")
    world.claim(stuck, "w:a")
    world.claim(stuck, "r:b")
    world.claim(waiter, "w:a")
    world.give_up(stuck, "never asked for")
    answer = world.cancel(turn, grace_s=1.0)
    world.unwind(waiter)
    world.finish(turn, "cancelled")
    summary = summarise_cancel(world.state, answer.request_id)
    assert summary is not None
    assert (summary.quiet, summary.claims_freed) == (False, 0)
    world.advance(1.5)
    summary = summarise_cancel(world.state, answer.request_id)
    assert summary is not None
    assert summary.quiet
    assert summary.claims_freed == 1
    assert summary.claims_quarantined == (f"write a of {stuck}", f"read b of {stuck}")
    world.clear(stuck)
    summary = summarise_cancel(world.state, answer.request_id)
    assert summary is not None
    assert (summary.claims_freed, summary.claims_quarantined) == (3, ())


@pytest.mark.field_report("G5")
def test_a_dead_holder_is_noticed_however_short_the_waits_are() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    holder, waiter = world.run(turn), world.open_turn("s2")
    world.claim(holder, "w:a")
    for _ in range(3):
        world.claim(waiter, "w:a", timeout_s=0.0)
        world.advance(0.0)
        assert world.waiters == []
    world.host_gone(world.node(holder).host_id)
    assert world.claim(waiter, "w:a", timeout_s=0.0).token > 0


@pytest.mark.field_report("G9")
@pytest.mark.field_report("I11")
def test_a_holder_that_was_thought_dead_cannot_write_when_it_wakes() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    paused = world.run(turn)
    host = world.node(paused).host_id
    old = world.claim(paused, "w:a", claim_id="c1")
    world.host_gone(host)
    assert world.outcome(paused) is Outcome.LOST
    late = world.run(turn)
    assert world.claim(late, "w:a").token > old.token
    area = Area(Mode.WRITE, "a").to_dict()
    for stale in (ClaimCheck(paused, area=area), ClaimCheck(paused, claim_id="c1", token=old.token)):
        with pytest.raises((PathNotClaimed, LeaseNotHeld)):
            world.decider.check_claim(stale)
    refused = world.ask(paused, "w:a", claim_id="c2")
    assert isinstance(refused.error, Refused)
    world.give_up(paused, "c1")
    assert world.holders == [late]


@pytest.mark.field_report("G11")
@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_end_gives_its_slot_and_its_claims_back(seed: int) -> None:
    chance = random.Random(seed)
    world = ClaimWorld(max_shared=4, check=False)
    turn = world.open_turn()
    for _ in range(50):
        world.next_claims = (Area(Mode.WRITE, chance.choice("abcd")).to_dict(),) if chance.random() < 0.5 else ()
        world.delegate(turn, 4)
        while running := world.running():
            run = chance.choice(running)
            match chance.randrange(5):
                case 0:
                    world.end(run)
                case 1:
                    world.end(run, "raised")
                case 2:
                    world.cancel(run)
                    world.unwind(run)
                case 3:
                    world.cancel(chance.choice([name for name in world.live() if name != turn]))
                case _:
                    world.host_gone(world.node(run).host_id)
            world.advance(6.0)
    world.check_now()
    assert world.state.live_runs == 0
    assert set(world.state.used.values()) == {0}
    assert world.state.locks.is_idle


@agent
async def take(ctx: RunContext, path: str) -> int:
    async with ctx.claim(write(path)) as lease:
        return lease.token


@pytest.mark.field_report("G1")
@pytest.mark.parametrize("gated", [False, True])
def test_grant_that_nobody_was_there_to_hear_of_is_heard_of_later(system: InProcess, gated: bool) -> None:
    async def forget_everybody() -> None:
        clients = system.life.service._clients
        for client_id in list(clients._clients):
            clients.drop(client_id)

    async def on_coordinator(coroutine: Awaitable[None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run(coroutine), system.loop))

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            holder = await turn.delegate(keep, path="x")
            await until_claims(coordinator, ClaimState.GRANTED, 1)
            waiter = await other.delegate(take, path="x")
            await until_claims(coordinator, ClaimState.QUEUED, 1)
            inside = asyncio.create_task(token_of(other))
            await until_claims(coordinator, ClaimState.QUEUED, 2)
            if gated:  # a host or driver that is slow to come back: the grant is over by then
                await asyncio.to_thread(system.shut, "open_client")
            await on_coordinator(forget_everybody())
            await holder.cancel()
            if gated:
                await until_claims(coordinator, ClaimState.QUEUED, 1)
                await asyncio.to_thread(system.let_through, "open_client")
            assert await waiter.result() > 0
            assert await inside > 0
        assert await coordinator.locks() == ()

    async def token_of(turn: Turn) -> int:
        async with turn.claim(write("x")) as lease:
            return lease.token

    in_loop(system, story)


async def _run(coroutine: Awaitable[None]) -> None:
    await coroutine
