"""Claims where the tree changes under them, and claims that can never be: through the whole system."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.agents.wishes import workspace_of
from remit.coordinator import Coordinator
from remit.coordinator.transaction import Settings
from remit.core import InvalidArgument, RunFailed
from remit.core.errors import NotFound, RemitError
from remit.core.messages import ClaimCheck, GiveUpClaim
from remit.locks import Claim, ClaimState, InvalidClaim, LeaseNotHeld, OutsideWorkspace, PathNotClaimed, read, write
from remit.testing.inprocess import InProcess, open_inprocess
from remit.testing.wait import await_until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to("one")
    return folder


@pytest.fixture
def system(root: Path) -> Generator[InProcess]:
    with open_inprocess(root, settings=Settings(max_shared=4)) as found:
        yield found


def in_loop(system: InProcess, story: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        async with system.coordinator() as coordinator:
            await story(coordinator)

    asyncio.run(main())


def turn_the_link(root: Path, target: str, name: str = "link") -> None:
    (root / "new").symlink_to(target)
    (root / "new").replace(root / name)


async def until_waiting(coordinator: Coordinator, count: int = 1) -> None:
    for _ in range(6_000):
        if sum(view.state is ClaimState.QUEUED for view in await coordinator.locks()) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never in line")


@agent
async def write_there(ctx: RunContext, path: str) -> str:
    async with ctx.claim(write(path)) as lease:
        await ctx.write_text(path, "here")
        return " and ".join(area.describe() for area in lease.areas)


@agent(claims=write("{path}"))
async def write_as_claimed(ctx: RunContext, path: str) -> None:
    await ctx.write_text(path, "here")


def test_link_that_changes_while_its_claim_waits_is_followed_anew(system: InProcess, root: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            async with turn.claim(write("one"), write("link")):
                run = await other.delegate(write_there, path="link/file")
                await until_waiting(coordinator)
                turn_the_link(root, "two")
            assert await run.result() == "write two/file and read link"
        assert await coordinator.locks() == ()

    in_loop(system, story)
    assert (root / "two" / "file").read_text() == "here"
    assert list((root / "one").iterdir()) == []


def test_run_whose_claims_lead_elsewhere_by_the_time_it_may_begin_is_not_begun(system: InProcess, root: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            async with turn.claim(write("one"), write("link")):
                run = await other.delegate(write_as_claimed, path="link/file")
                await until_waiting(coordinator)
                turn_the_link(root, "two")
            with pytest.raises(RunFailed, match="leads somewhere else than when it was asked for") as caught:
                await run.result()
            assert caught.value.error_code == "invalid_claim"
            again = await other.delegate(write_as_claimed, path="link/file")
            await again.result()
        assert await coordinator.locks() == ()

    in_loop(system, story)
    assert list((root / "one").iterdir()) == []
    assert (root / "two" / "file").read_text() == "here"


def test_run_whose_file_lost_its_other_name_while_it_waited_begins_all_the_same(system: InProcess, root: Path) -> None:
    (root / "one" / "file").write_text("old")
    os.link(root / "one" / "file", root / "same")

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            async with turn.claim(write("one")):
                run = await other.delegate(write_as_claimed, path="one/file")
                await until_waiting(coordinator)
                await turn.write_text("one/file", "new")  # replaces it: the other name keeps the old one
            await run.result()

    in_loop(system, story)
    assert ((root / "one" / "file").read_text(), (root / "same").read_text()) == ("here", "old")


@pytest.mark.parametrize("mode", ["w", "x"])
@pytest.mark.parametrize("target", ["two", "/tmp"])
def test_link_that_is_put_on_the_way_while_a_file_is_written_moves_nothing(
    system: InProcess, root: Path, mode: str, target: str
) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn, turn.claim(write("one"), write("two")):
            with pytest.raises((PathNotClaimed, OutsideWorkspace)):
                async with turn.open("one/file", mode) as file:
                    file.write("half")
                    (root / "one").rename(root / "aside")
                    (root / "one").symlink_to(target)

    in_loop(system, story)
    assert list((root / "two").iterdir()) == list((root / "aside").iterdir()) == []
    assert not Path("/tmp/file").exists()


def test_folder_that_is_replaced_while_a_file_is_written_in_it_is_noticed(system: InProcess, root: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn, turn.claim(write("one")):
            with pytest.raises(PathNotClaimed, match="moved or replaced"):
                async with turn.open("one/file") as file:
                    file.write("half")
                    (root / "one").rename(root / "aside")
                    (root / "one").mkdir()

    in_loop(system, story)
    assert list((root / "one").iterdir()) == list((root / "aside").iterdir()) == []


@pytest.mark.parametrize(
    ("claims", "error"),
    [
        ([write("a"), write("../b")], OutsideWorkspace),
        ([write("a"), read("/etc/passwd")], OutsideWorkspace),
        ([write("a"), write(glob="../*")], InvalidClaim),
        ([write("a"), write(glob="/etc/*")], OutsideWorkspace),
        ([], InvalidClaim),
        ([write("a"), write("b\0c")], InvalidClaim),
        ([write("a"), write(glob="b\0*")], InvalidClaim),
        ([write("a"), write(glob="{a,b}" * 12)], InvalidClaim),
        ([write("a"), write(glob="**/" * 40 + "x")], InvalidClaim),
        ([write("a"), write(glob="*" * 600)], InvalidClaim),
    ],
)
def test_claim_that_can_never_be_is_a_typed_error_for_a_body_and_for_a_run(
    system: InProcess, claims: list[Claim], error: type[RemitError]
) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            with pytest.raises(error) as caught:
                async with turn.claim(*claims):
                    raise AssertionError("granted")
            assert len(str(caught.value).splitlines()) == 1
            if claims:
                with pytest.raises(error):
                    await turn.delegate(write_there, path="a", options=RunOptions(claims=tuple(claims)))
        assert await coordinator.locks() == ()
        assert await coordinator.runs() == ()

    in_loop(system, story)


def test_lease_of_somebody_else_can_be_neither_released_nor_used(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            async with turn.claim(write("one")) as lease:
                with pytest.raises(LeaseNotHeld, match=turn.id):
                    await coordinator.session.request("give_up_claim", GiveUpClaim(lease.claim_id, other.id))
                with pytest.raises(LeaseNotHeld):
                    await coordinator.session.request("check_claim", ClaimCheck(other.id, lease.claim_id, lease.token))
                with pytest.raises(PathNotClaimed):
                    await other.write_text("one/file", "mine")
                with pytest.raises(NotFound):
                    await coordinator.session.request("give_up_claim", GiveUpClaim(lease.claim_id, "run_nobody"))
                await lease.check()

    in_loop(system, story)


def test_claim_of_a_foreign_workspace_is_outside_and_its_lease_is_nothing_here(
    system: InProcess, root: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            with pytest.raises(OutsideWorkspace, match="foreign"):
                async with turn.claim(write(foreign / "file")):
                    raise AssertionError("granted")
            with open_inprocess(foreign) as elsewhere:
                async with elsewhere.coordinator() as neighbour, neighbour.turn("n") as theirs:
                    async with theirs.claim(write("file")) as lease:
                        with pytest.raises(LeaseNotHeld):
                            check = ClaimCheck(turn.id, lease.claim_id, lease.token)
                            await coordinator.session.request("check_claim", check)
                        with pytest.raises(NotFound):
                            await coordinator.session.request("give_up_claim", GiveUpClaim(lease.claim_id, theirs.id))
                        await lease.check()
        assert await coordinator.locks() == ()

    in_loop(system, story)


def test_glob_that_matches_half_the_disk_is_claimed_without_looking_at_the_disk(
    system: InProcess, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (root / "one" / f"{number}.txt").touch()
    workspace_of(system.workspace)  # looks once at the names in the root, for the case of the volume
    looked: list[object] = []

    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            before = time.process_time()
            async with turn.claim(write(glob="**/*")) as lease:
                assert [area.describe() for area in lease.areas] == ["write glob **/*"]
                run = await other.delegate(write_there, path="two/file")
                await until_waiting(coordinator)
            await run.result()
            # Claims cost by what they say, not by what they match; the bound is for a machine that is busy.
            assert time.process_time() - before < 30

    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir", "walk"):
            patched.setattr(os, name, lambda *path, **options: looked.append(path))
        in_loop(system, story)
    assert looked == []


def test_holder_of_a_wide_glob_is_named_to_whoever_has_to_wait(system: InProcess) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("a") as turn, coordinator.turn("b") as other:
            async with turn.claim(write(glob="**/*")):
                run = await other.delegate(write_there, path="two/file")
                await until_waiting(coordinator)
                assert (await coordinator.run(run.id)).waiting_for == f"write two/file (held by {turn.id})"
            await run.result()
            with pytest.raises(InvalidArgument):
                async with turn.claim(write("a"), timeout_s=float("nan")):
                    raise AssertionError("granted")

    in_loop(system, story)


def test_encoding_that_does_not_exist_leaves_nothing_behind(system: InProcess, root: Path) -> None:
    async def story(coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn, turn.claim(write("one")):
            with pytest.raises(LookupError):
                await turn.write_text("one/file", "x", encoding="utf-9")
            with pytest.raises(LookupError):
                async with turn.open("one/file", encoding="utf-9"):
                    raise AssertionError("opened")
            await await_until(lambda: list((root / "one").iterdir()) == [])

    in_loop(system, story)


def test_first_claim_of_a_host_is_about_the_workspace_and_not_about_where_the_host_happens_to_be(
    system: InProcess, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def story(coordinator: Coordinator) -> None:
        # The host's connection is not answered until the claim is there.
        await asyncio.to_thread(system.shut, "open_client")
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(write_there, path=str(root / "link" / "file"))
            await await_until(lambda: system.calls.count("open_client") == 2, timeout_s=30.0)
            assert "claim" not in system.calls
            await asyncio.to_thread(system.let_through, "open_client")
            assert await run.result() == "write one/file and read link"

    in_loop(system, story)
    assert (root / "one" / "file").read_text() == "here"
