"""A git that is killed with its host, on real Ray: the next run in that workspace works."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from remit.agents import CommandAgent, RunContext, agent
from remit.coordinator.life import journal_path
from remit.core import RunLost
from remit.journal import SqliteJournalReader
from remit.locks import write
from remit.testing import await_until
from tests.agents.git_world import ENVIRONMENT, Repository
from tests.ray.conftest import OpenCoordinator

LONG_S = 60.0


@agent(claims=write(".git"))
async def commit_and_die(ctx: RunContext, command: list[str], held: str) -> None:
    """Let a git be killed while it holds the index; the program around it lives until it is swept."""
    Path(held).with_name("host").write_text(str(os.getpid()))
    words = " ".join(f"'{word}'" for word in command)
    # What is deaf to SIGTERM has to be killed.
    until_held = f"while [ ! -e {held} ]; do sleep 0.01; done"
    script = f"trap '' TERM; {words} & {until_held}; kill -9 $!; echo > {held}.killed; exec sleep 600"
    await ctx.process(["sh", "-c", script], env=ENVIRONMENT, cwd=ctx.workspace)


@pytest.mark.field_report("G14")
def test_after_a_host_was_killed_the_git_lock_goes_before_its_claim_is_free(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    repository = Repository(tmp_path)
    repository.hold("pre-commit")
    lock = repository.data / "index.lock"

    async def scenario() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("t") as turn:
            run = await turn.delegate(commit_and_die, command=repository.commit(), held=str(repository.ready))
            killed = repository.ready.with_name(f"{repository.ready.name}.killed")
            await await_until(killed.exists, timeout_s=LONG_S)
            assert lock.exists()
            again = CommandAgent(repository.commit(), env=ENVIRONMENT, cwd=tmp_path, claims=write(".git"))
            following = await turn.delegate(again)
            repository.let_go()
            os.kill(int((repository.data / "host").read_text()), signal.SIGKILL)
            with pytest.raises(RunLost):
                await run.result()
            # It had waited for the claim, which is free once the program is proven gone and the lock with it.
            result = await asyncio.wait_for(following.result(), LONG_S)
            assert result.succeeded, result.stderr.text
            reader = SqliteJournalReader.open(journal_path(str(tmp_path)))
            (found,) = reader.read(kinds=["git_locks_found"])
            reader.close()
            assert (found.node_id, found.data["removed"]) == (run.id, [str(lock)])

    asyncio.run(scenario())
    assert repository.commits() == 2
    assert repository.locks() == []
