"""A git that is killed midway, through the whole system: the next run in that workspace works."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from remit.agents import CommandAgent, RunContext, RunOptions, agent
from remit.coordinator import Coordinator
from remit.core import RunCancelled
from remit.core.events import GitLocksFound, decode_event
from remit.locks import Claim, read, write
from remit.testing.inprocess import InProcess, open_inprocess
from remit.testing.wait import await_until
from tests.agents.git_world import ENVIRONMENT, Repository

PATIENT = RunOptions(grace_s=60)
"""The programs are killed at once; their host has all the time to say so."""


def committer(repository: Repository, *claims: Claim) -> CommandAgent:
    return CommandAgent(repository.commit(), cwd=repository.folder, env=ENVIRONMENT, claims=claims, grace_s=0)


@agent
async def commit_below(ctx: RunContext, command: list[str]) -> None:
    async with ctx.claim(write("sub/.git")):
        script = f"cd {ctx.workspace}/sub && {shlex.join(command)}"
        await ctx.process(["sh", "-c", script], cwd=ctx.workspace, env=ENVIRONMENT, grace_s=0)


def in_workspace(folder: Path, story: Callable[[InProcess, Coordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        with open_inprocess(folder) as system:
            async with system.coordinator() as coordinator:
                await story(system, coordinator)

    asyncio.run(main())


@pytest.mark.field_report("G14")
def test_after_a_commit_was_killed_midway_the_next_run_in_that_workspace_works(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.hold("pre-commit")

    async def story(system: InProcess, coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(committer(repository, write(".git")), options=PATIENT)
            await await_until(repository.ready.exists)
            assert repository.locks() == ["index.lock"]
            receipt = await (await run.cancel()).quiet()
            assert receipt.summary is not None
            lock = str(repository.data / "index.lock")
            assert (receipt.summary.git_locks_removed, receipt.summary.git_locks_left) == ((lock,), ())
            with pytest.raises(RunCancelled):
                await run.result()
            assert f"git lock {lock}: removed" in (tmp_path / ".remit/output" / run.id / "log").read_text()
            repository.let_go()
            again = await (await turn.delegate(committer(repository, write(".git")))).result()
            assert again.succeeded
            assert again.git_locks_removed == ()

    in_workspace(tmp_path, story)
    assert repository.commits() == 2


@pytest.mark.field_report("G14")
@pytest.mark.parametrize("claims", [(), (read(".git"),), (write("src"),)])
def test_without_the_claim_the_receipt_names_the_lock_that_stays(tmp_path: Path, claims: tuple[Claim, ...]) -> None:
    repository = Repository(tmp_path)
    repository.hold("pre-commit")

    async def story(system: InProcess, coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(committer(repository, *claims), options=PATIENT)
            await await_until(repository.ready.exists)
            receipt = await (await run.cancel()).quiet()
            assert receipt.summary is not None
            assert receipt.summary.git_locks_removed == ()
            (left,) = receipt.summary.git_locks_left
            assert left.startswith(f"{repository.data}/index.lock: the program was started without a claim")
        reader = system.journal.reader()
        (found,) = reader.read(kinds=["git_locks_found"])
        reader.close()
        assert decode_event(found.kind, found.node_id, found.turn_id, found.data) == GitLocksFound(
            node_id=run.id, turn_id=turn.id, at=found.data["at"], left=(left,)
        )

    in_workspace(tmp_path, story)
    assert repository.locks() == ["index.lock"]


@pytest.mark.field_report("G14")
def test_a_repository_below_is_found_by_what_the_run_had_claimed(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "sub")
    repository.hold("pre-commit")

    async def story(system: InProcess, coordinator: Coordinator) -> None:
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(commit_below, command=repository.commit(), options=PATIENT)
            await await_until(repository.ready.exists)
            receipt = await (await run.cancel()).quiet()
            assert receipt.summary is not None
            assert receipt.summary.git_locks_removed == (str(repository.data / "index.lock"),)

    in_workspace(tmp_path, story)
    assert repository.locks() == []
