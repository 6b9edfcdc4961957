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
from remit.agents.client import ClientSession
from remit.agents.payload import decode
from remit.coordinator.folding import fold_journal
from remit.core.errors import RemitError, TurnCancelled
from remit.journal import SqliteJournal, SqliteJournalReader
from remit.journal.writer import FAILPOINTS
from remit.testing import InProcess, open_inprocess


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


async def work(system: Any, told: dict[str, Any]) -> BaseException | None:
    """Do something with two levels; note every result that somebody got. Return what went wrong."""
    try:
        async with system.coordinator() as coordinator, coordinator.turn("bad disk") as turn:
            for n in (1, 5):
                run = await turn.delegate(parent, n=n)
                told[run.id] = await run.result()
    except (RemitError, TurnCancelled) as error:
        return error
    return None


async def until_nothing_lives(system: InProcess) -> None:
    """Wait until everything of the life before is settled: nobody comes back for its turns."""
    async with system.coordinator() as coordinator:
        while (found := await coordinator.statistics())["live_turns"] or found["live_runs"]:
            await asyncio.sleep(0.01)


@pytest.mark.requirement("F14")
@pytest.mark.parametrize(
    ("point", "forever"),
    [
        pytest.param(point, forever, marks=() if (point, forever) == ("before_commit", False) else pytest.mark.slow)
        for point in FAILPOINTS
        for forever in (False, True)
    ],
)
def test_no_end_that_somebody_was_told_is_lost(
    point: str, forever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = ClientSession.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "give_up_s", 0.2)
    for nth in range(1, 100):
        path = tmp_path / str(nth) / "journal.db"
        told: dict[str, Any] = {}
        journal = SqliteJournal.open(path, failpoint=failing(point, nth, forever=forever))
        try:
            with open_inprocess(tmp_path, journal=journal, poll_s=0.1) as system:
                error = asyncio.run(asyncio.wait_for(work(system, told), 40))
        except RemitError as refused:  # it did not even begin
            journal.close()
            error = refused
        assert error is None or "journal" in str(error), error
        # The next life settles what was left.
        with open_inprocess(tmp_path, journal=SqliteJournal.open(path), poll_s=0.1, come_back_s=0.0) as system:
            asyncio.run(until_nothing_lives(system))
        with closing(SqliteJournalReader.open(path)) as reader:
            records = list(reader.read())
            accepted = {one.node_id for one in records if one.kind in ("run_accepted", "turn_accepted")}
            assert Counter(one.node_id for one in records if one.terminal) == Counter(accepted)
            for run_id, value in told.items():
                assert decode(reader.payload(run_id, "run_ended") or b"") == value
            state = fold_journal(reader).state
            assert (state.live_runs, state.live_turns) == (0, 0)
        if error is None:
            assert nth > 5
            assert list(told.values()) == [6, 22]
            return
    pytest.fail("it never got through")
