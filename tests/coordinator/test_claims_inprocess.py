"""Claims through the whole system in one process: driver, coordinator and hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest

from remit.agents import CommandAgent, RunContext, RunOptions, SyncRunContext, agent, leases
from remit.coordinator import Coordinator
from remit.coordinator.transaction import Settings
from remit.core import InvalidArgument, Outcome, RunCancelled, RunFailed, RunTimedOut
from remit.locks import (
    ClaimState,
    ClaimTimeout,
    ClaimView,
    InvalidClaim,
    LeaseNotHeld,
    OutsideWorkspace,
    PathNotClaimed,
    exclusive,
    read,
    write,
)
from remit.testing.inprocess import InProcess, open_inprocess
from remit.testing.wait import await_until

HISTORY: list[tuple[str, str, int]] = []
"""What bodies did: word, path, fencing token."""


@pytest.fixture
def system(tmp_path: Path) -> Generator[InProcess]:
    HISTORY.clear()
    with open_inprocess(tmp_path, settings=Settings(max_shared=3)) as found:
        yield found


def in_loop(system: InProcess, story: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        async with system.coordinator() as coordinator:
            await story(coordinator)

    asyncio.run(main())


async def claims_of(coordinator: Coordinator, state: ClaimState) -> list[ClaimView]:
    return [view for view in await coordinator.locks() if view.state is state]


async def until_waiting(coordinator: Coordinator, count: int) -> list[ClaimView]:
    for _ in range(2_000):
        waiting = await claims_of(coordinator, ClaimState.QUEUED)
        if len(waiting) == count:
            return waiting
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} claims in line: {await coordinator.locks()}")


async def until_held(coordinator: Coordinator, count: int) -> list[ClaimView]:
    for _ in range(2_000):
        held = await claims_of(coordinator, ClaimState.GRANTED)
        if len(held) == count:
            return held
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} leases: {await coordinator.locks()}")


@agent
async def edit(ctx: RunContext, path: str) -> int:
    async with ctx.claim(write(path)) as lease:
        HISTORY.append(("in", path, lease.token))
        await lease.check()
        await ctx.write_text(path, f"by {ctx.run_id}")
        HISTORY.append(("out", path, lease.token))
    return lease.token


@agent
async def keep(ctx: RunContext, path: str) -> None:
    async with ctx.claim(write(path)):
        await ctx.sleep(1_000)


@agent
async def lend(ctx: RunContext) -> list[int]:
    async with ctx.claim(write("src")):
        runs = await ctx.delegate_many(edit, [{"path": "src/a"}, {"path": "src/b"}, {"path": "src/a"}])
        found: list[int] = await ctx.gather(*runs)
        return found


@agent
async def cross(ctx: RunContext, first: str, second: str, other: str) -> str:
    async with ctx.claim(write(first)):
        (ctx.workspace / f"has-{first}").touch()
        await await_until((ctx.workspace / f"has-{other}").exists)
        async with ctx.claim(write(second)):
            return "both"


@agent
async def impatient(ctx: RunContext, path: str) -> None:
    async with ctx.claim(write(path), timeout_s=0.05):
        raise AssertionError("granted")


@agent
def plain(ctx: SyncRunContext, path: str) -> str:
    with ctx.claim(write(path)) as lease:
        lease.check()
        ctx.write_text(path, "one")
        with ctx.open(path, "w") as file:
            file.write("two")
    return (ctx.workspace / path).read_text()


@agent(claims=write("{path}"))
async def whole(ctx: RunContext, path: str) -> None:
    await ctx.write_text(path, "whole")


@agent
async def nothing(ctx: RunContext) -> str:
    return "done"


def test_children_share_what_their_parent_holds_and_take_turns_on_one_path(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            tokens = await (await turn.delegate(lend)).result()
        assert len(set(tokens)) == 3
        assert await coordinator.locks() == ()
        on_a = [word for word, path, _ in HISTORY if path == "src/a"]
        assert on_a == ["in", "out", "in", "out"]
        tokens_on_a = [token for _, path, token in HISTORY if path == "src/a"]
        assert tokens_on_a == sorted(tokens_on_a)

    in_loop(system, story)


@pytest.mark.requirement("A23")
@pytest.mark.requirement("B14")
@pytest.mark.field_report("G1")
@pytest.mark.field_report("G7")
@pytest.mark.field_report("G10")
def test_cancelling_a_waiter_leaves_the_next_in_line_undisturbed(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            holder = await turn.delegate(keep, path="x")
            await until_held(coordinator, 1)
            first = await turn.delegate(keep, path="x")
            await until_waiting(coordinator, 1)
            second = await turn.delegate(edit, path="x")
            waiting = await until_waiting(coordinator, 2)
            assert [(view.owner, view.held_by) for view in waiting] == [
                (first.id, (holder.id,)),
                (second.id, (holder.id,)),
            ]
            assert f"write x (held by {holder.id})" in (await coordinator.run(first.id)).waiting_for
            await first.cancel("enough")
            with pytest.raises(RunCancelled):
                await first.result()
            (left,) = await claims_of(coordinator, ClaimState.QUEUED)
            assert (left.owner, left.held_by) == (second.id, (holder.id,))
            # The cancel of a holder needs no claim either.
            await holder.cancel("you too")
            assert await second.result() > 0
        assert await coordinator.locks() == ()

    in_loop(system, story)


@pytest.mark.requirement("F12")
def test_the_next_in_line_is_granted_when_a_holder_dies_with_its_host(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            holder = await turn.delegate(keep, path="x")
            await until_held(coordinator, 1)
            async with turn.claim(read("elsewhere")):
                waiting = asyncio.create_task(claim_in(turn.claim(write("x"))))
                await until_waiting(coordinator, 1)
                system.engine.hosts[(await coordinator.run(holder.id)).host_id].kill()
                assert await waiting > 0
            assert await holder.wait() is Outcome.LOST
        assert await coordinator.locks() == ()

    async def claim_in(claim: object) -> int:
        async with claim as lease:  # type: ignore[attr-defined]
            return int(lease.token)

    in_loop(system, story)


def test_a_circle_of_claims_is_refused_and_spelled_out(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            one = await turn.delegate(cross, first="a", second="b", other="b")
            two = await turn.delegate(cross, first="b", second="a", other="a")
            outcomes = await turn.gather(one, two, return_outcomes=True)
            assert sorted(outcomes) == [Outcome.FAILED, Outcome.SUCCEEDED]
            refused = one if one.outcome is Outcome.FAILED else two
            with pytest.raises(RunFailed, match=r"wait for ever.*wants write") as caught:
                refused.value()
            assert caught.value.error_code == "deadlock_detected"
        assert await coordinator.locks() == ()

    in_loop(system, story)


def test_a_claim_gives_up_after_its_own_timeout_and_the_run_fails_with_it(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            async with turn.claim(exclusive()):
                pass
            other = await turn.delegate(keep, path="x")
            await until_held(coordinator, 1)
            with pytest.raises(ClaimTimeout, match=other.id) as caught:
                async with turn.claim(read("x"), timeout_s=0.05):
                    raise AssertionError("granted")
            assert caught.value.held_by == (other.id,)
            assert await claims_of(coordinator, ClaimState.QUEUED) == []
            run = await turn.delegate(impatient, path="x")
            with pytest.raises(RunFailed, match="not granted within"):
                await run.result()
            await other.cancel()

    in_loop(system, story)


@pytest.mark.field_report("G6")
def test_waiting_for_a_claim_counts_against_the_deadline(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            holder = await turn.delegate(keep, path="x")
            await until_held(coordinator, 1)
            run = await turn.delegate(edit, path="x", options=RunOptions(deadline_s=0.3))
            (waiting,) = await until_waiting(coordinator, 1)
            assert waiting.held_by == (holder.id,)
            with pytest.raises(RunTimedOut):
                await run.result()
            assert await claims_of(coordinator, ClaimState.QUEUED) == []
            await holder.cancel()

    in_loop(system, story)


@pytest.mark.requirement("B39")
def test_waiting_costs_no_slot_before_or_inside_a_body(tmp_path: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            holder = await turn.delegate(keep, path="x")
            await until_held(coordinator, 1)
            # Two slots, one taken by the holder; the waiters take none.
            inside = await turn.delegate(edit, path="x/inside")
            await until_waiting(coordinator, 1)
            before = await turn.delegate(whole, path="x/before")
            await until_waiting(coordinator, 2)
            assert (await coordinator.run(before.id)).state == "claiming"
            assert (await coordinator.run(before.id)).host_id == ""
            assert await (await turn.delegate(nothing)).result() == "done"
            assert await (await turn.delegate(whole, path="elsewhere")).result() is None
            await holder.cancel()
            await turn.gather(inside, before)
        assert await coordinator.locks() == ()

    with open_inprocess(tmp_path, settings=Settings(max_shared=2)) as system:
        in_loop(system, story)
    assert (tmp_path / "x" / "before").read_text() == "whole"


def test_claims_of_a_run_come_from_its_agent_and_its_options(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            async with turn.claim(write("a"), write("b")):
                touch = CommandAgent(["true", "{path}"], claims=[read("{path}")])
                # What the turn holds is lent to its runs.
                await (await turn.delegate(touch, path="a", options=RunOptions(claims=(write("b"),)))).result()
            with pytest.raises(InvalidArgument, match="needs the argument 'path'"):
                await turn.delegate(agent(name="bare", claims=write("{path}"))(nothing.fn))
            with pytest.raises(OutsideWorkspace):
                await turn.delegate(nothing, options=RunOptions(claims=(write("../x"),)))
        assert await coordinator.locks() == ()

    in_loop(system, story)


@pytest.mark.requirement("B13")
def test_a_cancelled_run_never_asks_for_a_claim(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(late_claim)
            await await_until((system_path(system) / "began").exists)
            await run.cancel()
            with pytest.raises(RunCancelled):
                await run.result()
        assert "claim" not in system.calls

    in_loop(system, story)


@agent
async def late_claim(ctx: RunContext) -> None:
    (ctx.workspace / "began").touch()
    try:
        await ctx.sleep(1_000)
    finally:
        async with ctx.claim(write("x")):
            raise AssertionError("granted")


def system_path(system: InProcess) -> Path:
    return Path(system.workspace)


@pytest.mark.requirement("B15")
@pytest.mark.requirement("D26")
@pytest.mark.field_report("G1")
@pytest.mark.parametrize("gate", ["claim", "give_up_claim"])
def test_a_grant_that_crosses_a_cancel_is_given_back(
    system: InProcess, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bound of a wait for an answer that does not come here.
    monkeypatch.setattr(leases, "_RELEASE_S", 0.1)

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            await asyncio.to_thread(system.shut, gate)
            run = await turn.delegate(edit if gate == "claim" else keep, path="x")
            await await_until(lambda: "claim" in system.calls)
            if gate != "claim":
                await until_held(coordinator, 1)
            await run.cancel("now")
            with pytest.raises(RunCancelled):
                await run.result()
            assert await coordinator.locks() == ()
            await asyncio.to_thread(system.let_through, gate)
            assert await (await turn.delegate(edit, path="x")).result() > 0
        assert await coordinator.locks() == ()

    in_loop(system, story)


def test_a_plain_body_claims_and_writes(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            assert await (await turn.delegate(plain, path="deep/er/file")).result() == "two"
        assert await coordinator.locks() == ()

    in_loop(system, story)


@pytest.mark.field_report("G9")
def test_nothing_is_written_without_a_lease_that_covers_the_path(system: InProcess, tmp_path: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            with pytest.raises(PathNotClaimed):
                await turn.write_text("a", "x")
            async with turn.claim(write("a"), read("b")) as lease:
                await turn.write_text("a", "old")
                with pytest.raises(PathNotClaimed):
                    await turn.write_text("b", "x")
                with pytest.raises(OutsideWorkspace):
                    await turn.write_text("../b", "x")
                with pytest.raises(InvalidArgument):
                    async with turn.open("a", "r"):
                        pass
                with pytest.raises(FileExistsError):
                    async with turn.open("a", "x"):
                        pass
                with pytest.raises(ZeroDivisionError):
                    async with turn.open("a") as file:
                        file.write("half")
                        raise ZeroDivisionError
                assert (tmp_path / "a").read_text() == "old"
                child = await turn.delegate(keep, path="a")
                await until_held(coordinator, 2)
                with pytest.raises(PathNotClaimed, match="lent"):
                    await turn.write_text("a", "mine")
                await child.cancel()
                await child.wait()
                async with turn.open("a", "wb") as file:
                    file.write(b"new")
            with pytest.raises(LeaseNotHeld):
                await lease.check()

    in_loop(system, story)
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_what_cannot_be_claimed_is_a_typed_error_and_nothing_is_held(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            for wrong in ([], [write("a"), write("/etc/passwd")], [write("a\0b")], [write(glob="[z-a]*")]):
                with pytest.raises(InvalidClaim):
                    async with turn.claim(*wrong):
                        raise AssertionError("granted")
            with pytest.raises(InvalidArgument):
                async with turn.claim(write("a"), timeout_s=-1):
                    raise AssertionError("granted")
        assert await coordinator.locks() == ()

    in_loop(system, story)
