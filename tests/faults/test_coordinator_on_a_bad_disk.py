"""A coordinator whose disk fails at each point of each commit: what somebody was told stays true."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.agents.payload import decode
from remit.coordinator.folding import fold_journal
from remit.core.errors import RemitError
from remit.journal import SqliteJournal, SqliteJournalReader
from remit.journal.writer import FAILPOINTS
from remit.testing.inprocess import open_inprocess


@agent
async def double(ctx: RunContext, n: int) -> int:
    return 2 * n


@agent
async def parent(ctx: RunContext, n: int) -> int:
    return sum(await ctx.gather(*await ctx.delegate_many(double, [{"n": n}, {"n": n + 1}])))


def failing(point: str, nth: int, *, forever: bool) -> Callable[[str], None]:
    """Return a failpoint that raises at the nth time of a point, once or from then on."""
    count = 0

    def failpoint(reached: str) -> None:
        nonlocal count
        if reached == point:
            count += 1
            if count == nth or (forever and count > nth):
                raise OSError(errno.EIO, "Input/output error")

    return failpoint


async def work(system: Any, told: dict[str, Any]) -> bool:
    """Do something with two levels; note every result that somebody got. Return whether all went well."""
    try:
        async with system.coordinator() as coordinator, coordinator.turn("bad disk") as turn:
            for n in (1, 5):
                run = await turn.delegate(parent, n=n)
                told[run.id] = await run.result()
        return True
    except RemitError as error:
        assert error.code in ("journal_error", "coordinator_unavailable"), error
        assert "journal" in str(error) or "coordinator" in str(error)
        return False


@pytest.mark.requirement("F14")
@pytest.mark.requirement("D6")
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("point", FAILPOINTS)
def test_no_end_that_somebody_was_told_is_lost(point: str, forever: bool, tmp_path: Path) -> None:
    for nth in range(1, 100):
        path = tmp_path / str(nth) / "journal.db"
        told: dict[str, Any] = {}
        journal = SqliteJournal.open(path, failpoint=failing(point, nth, forever=forever))
        try:
            with open_inprocess(tmp_path, journal=journal, poll_s=0.1) as system:
                went_well = asyncio.run(asyncio.wait_for(work(system, told), 40))
        except RemitError:  # it did not even begin
            journal.close()
            went_well = False
        # The next life settles what was left.
        with open_inprocess(tmp_path, journal=SqliteJournal.open(path), poll_s=0.1):
            pass
        with closing(SqliteJournalReader.open(path)) as reader:
            records = list(reader.read())
            accepted = {one.node_id for one in records if one.kind in ("run_accepted", "turn_accepted")}
            assert Counter(one.node_id for one in records if one.terminal) == Counter(accepted)
            for run_id, value in told.items():
                assert decode(reader.payload(run_id, "run_ended") or b"") == value
            state = fold_journal(reader).state
            assert (state.live_runs, state.live_turns) == (0, 0)
        if went_well:
            assert nth > 5
            assert list(told.values()) == [6, 22]
            return
    pytest.fail("it never got through")
