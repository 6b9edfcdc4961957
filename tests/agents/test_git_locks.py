"""What a killed git leaves behind: its locks go where that is safe, and are named where it is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from remit.agents import tools
from remit.processes import CommandResult, JobResult
from remit.processes.gitlocks import Aftermath
from remit.testing import await_until
from remit.testing.wait import wait_until
from tests.agents.git_world import ENVIRONMENT, Repository
from tests.agents.tool_world import CAUSE, Holder, holding, sh


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repo")


async def killed_midway(holder: Holder, repository: Repository, argv: list[str]) -> CommandResult:
    """Start a command, kill it with all below it once it is held, and return how it ended."""
    tool = await holder.start_process(argv, cwd=repository.folder, env=ENVIRONMENT)
    await await_until(repository.ready.exists)
    return await tool.stop(kill=True)


def kill_one(repository: Repository, argv: list[str], *, may_write: bool) -> CommandResult:
    async def scenario() -> CommandResult:
        async with holding(repository.folder.parent) as holder:
            holder.may_write = may_write
            return await killed_midway(holder, repository, argv)

    return asyncio.run(scenario())


@pytest.mark.field_report("G14")
@pytest.mark.parametrize(
    ("hook", "argv", "locks"),
    [
        ("pre-commit", None, ["index.lock"]),
        ("pre-commit", sh("git -c user.name=a -c user.email=a@b commit -qam x; exit 0"), ["index.lock"]),
        ("reference-transaction", None, ["HEAD.lock", "refs/heads/main.lock"]),
        ("reference-transaction", ["git", "branch", "other"], ["refs/heads/other.lock"]),
        ("reference-transaction", ["git", "pack-refs", "--all"], ["packed-refs.lock"]),
    ],
)
def test_locks_of_a_git_that_was_killed_midway_are_taken_away_and_the_next_one_works(
    repository: Repository, hook: str, argv: list[str] | None, locks: list[str]
) -> None:
    repository.hold(hook)
    result = kill_one(repository, argv or repository.commit(), may_write=True)
    assert result.escalated
    assert set(locks) <= {os.path.relpath(path, repository.data) for path in result.git_locks_removed}
    assert (repository.locks(), result.git_locks_left) == ([], ())
    repository.let_go()
    repository.git("commit", "-qam", "next")
    assert repository.commits() == 2


@pytest.mark.field_report("G14")
def test_a_worktree_that_was_being_made_is_no_longer_locked(repository: Repository) -> None:
    (repository.folder / ".gitattributes").write_text("a filter=slow\n")
    held = f"echo > '{repository.ready}'; while :; do sleep 60; done"
    repository.git("config", "filter.slow.smudge", held)
    repository.git("config", "filter.slow.clean", "cat")
    repository.git("add", ".gitattributes")
    repository.git("commit", "-qm", "two")
    result = kill_one(repository, ["git", "worktree", "add", "-q", "tree"], may_write=True)
    assert "worktrees/tree/locked" in {os.path.relpath(path, repository.data) for path in result.git_locks_removed}
    assert repository.locks() == []
    repository.git("worktree", "remove", "--force", "tree")


@pytest.mark.field_report("G14")
def test_in_a_linked_worktree_the_lock_of_its_own_index_is_found(repository: Repository) -> None:
    repository.git("worktree", "add", "-q", "tree")
    tree = repository.folder / "tree"
    (tree / "a").write_text("3")
    repository.hold("pre-commit")
    result = kill_one(repository, repository.commit(tree), may_write=True)
    assert [os.path.relpath(path, repository.data) for path in result.git_locks_removed] == [
        "worktrees/tree/index.lock"
    ]


@pytest.mark.field_report("G14")
def test_a_lock_that_nobody_had_claimed_stays_and_is_named(repository: Repository) -> None:
    repository.hold("pre-commit")
    result = kill_one(repository, repository.commit(), may_write=False)
    assert repository.locks() == ["index.lock"]
    (left,) = result.git_locks_left
    assert left == f"{repository.data}/index.lock: the program was started without a claim on it"


@pytest.mark.field_report("G14")
def test_a_living_git_of_somebody_else_is_left_alone(repository: Repository) -> None:
    """It holds the index; ours dies beside it, and what it holds is not ours to judge."""
    repository.hold("pre-commit")
    with subprocess.Popen(
        repository.commit(), cwd=repository.folder, env={**os.environ, **ENVIRONMENT}, process_group=0
    ) as foreign:
        try:
            wait_until(repository.ready.exists)
            result = kill_one(repository, sh("while :; do sleep 60; done"), may_write=True)
            assert repository.locks() == ["index.lock"]
            assert result.git_locks_removed == ()
            assert result.git_locks_left == (f"{repository.data}/index.lock: git ({foreign.pid}) is at work there",)
            assert foreign.poll() is None
        finally:
            os.killpg(foreign.pid, signal.SIGKILL)


@pytest.mark.field_report("G14")
def test_a_lock_that_was_there_before_stays_for_its_owner_is_not_known(repository: Repository) -> None:
    lock = repository.data / "index.lock"
    lock.touch()
    os.utime(lock, (1, 1))
    repository.ready.touch()
    result = kill_one(repository, sh("while :; do sleep 60; done"), may_write=True)
    assert result.git_locks_left == (f"{lock}: it is older than the program that was killed",)
    assert lock.exists()


def test_a_program_that_ends_by_itself_is_not_looked_after(repository: Repository) -> None:
    lock = repository.data / "index.lock"

    async def scenario() -> CommandResult:
        async with holding(repository.folder.parent) as holder:
            holder.may_write = True
            return await holder.process(["touch", str(lock)], cwd=repository.folder)

    result = asyncio.run(scenario())
    assert (result.git_locks_removed, result.git_locks_left) == ((), ())
    assert lock.exists()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_the_end_of_a_program_is_told_though_its_place_cannot_be_looked_at(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "AFTERMATH_S", 0.01)

    class Troubled(Holder):
        async def _after_kill(self, tool: tools.ToolProcess, result: JobResult) -> Aftermath:
            if fault == "fails":
                raise OSError("no such disk")
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            holder.__class__ = Troubled
            tool = await holder.start_process(sh("while :; do sleep 60; done"))
            holder.signal.set(CAUSE)
            await tool.settle()
            assert tool.result().cancelled

    asyncio.run(scenario())
