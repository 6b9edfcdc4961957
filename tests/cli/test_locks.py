"""`remit locks` and `remit tree` show claims, read from the journal."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.coordinator.life import journal_path
from remit.journal import SqliteJournal
from remit.locks import read, write
from remit.testing.inprocess import open_inprocess
from tests.cli.runner import invoke


@agent
async def keep(ctx: RunContext) -> None:
    async with ctx.claim(write("src/a.py"), read("docs")):
        await ctx.sleep(1_000)


def remit(*words: str) -> str:
    result = invoke(words)
    assert result.exit_code == 0, result.output
    return result.stdout


async def until_claimed(workspace: Path, count: int) -> None:
    """Wait until so many claims are on the disk: there the command looks, and the coordinator knows of them earlier."""
    for _ in range(2_000):
        shown = json.loads(await asyncio.to_thread(remit, "locks", "--json", "-w", str(workspace)))
        if len(shown["claims"]) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} claims")


def test_names_that_no_terminal_should_see_are_shown_escaped(tmp_path: Path) -> None:
    async def story() -> None:
        with open_inprocess(tmp_path, journal=SqliteJournal.open(journal_path(str(tmp_path)))) as system:
            async with system.coordinator() as coordinator, coordinator.turn("t") as turn:
                async with turn.claim(
                    write(os.fsdecode(b"\xff")), write("a\x1b[31mred"), read("\u202edocs"), write("e\u0301")
                ):
                    await asyncio.to_thread(look)

    def look() -> None:
        (line,) = remit("locks", "-w", str(tmp_path)).splitlines()
        assert line.startswith(r"write \udcff and write a\x1b[31mred and read \u202edocs and write ")
        assert line.isprintable()

    asyncio.run(story())


@pytest.mark.field_report("G10")
def test_holders_and_waiters_are_shown_in_order(tmp_path: Path) -> None:
    async def story() -> None:
        with open_inprocess(tmp_path, journal=SqliteJournal.open(journal_path(str(tmp_path)))) as system:
            async with system.coordinator() as coordinator, coordinator.turn("t") as turn:
                runs = []
                for count in (1, 2):
                    runs.append(await turn.delegate(keep))
                    await until_claimed(tmp_path, count)
                holder, waiter = runs
                lines = (await asyncio.to_thread(remit, "locks", "-w", str(tmp_path))).splitlines()
                assert lines[0].startswith(f"write src/a.py and read docs  granted  {holder.id} (keep)")
                assert lines[1].startswith(f"write src/a.py and read docs  queued  {waiter.id} (keep)")
                assert lines[1].endswith(f"held by {holder.id}")
                told = json.loads(await asyncio.to_thread(remit, "locks", "--json", "-w", str(tmp_path)))
                assert [(c["owner"], c["held_by"]) for c in told["claims"]] == [
                    (holder.id, []),
                    (waiter.id, [holder.id]),
                ]
                tree = await asyncio.to_thread(remit, "tree", "-w", str(tmp_path))
                assert f"waiting for write src/a.py and read docs (held by {holder.id})" in tree
                for run in reversed(runs):
                    await run.cancel()

    asyncio.run(story())
    assert remit("locks", "-w", str(tmp_path)) == f"nothing is claimed in {tmp_path}\n"
