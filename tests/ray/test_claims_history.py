"""A recorded history of claims on real Ray: twelve agents, four paths, cancels and a killed host.

Not a search for a linear order: a lock has more to show than that and less to
search. Each writer looks, inside its lease, at a counter file that it alone may
change, and notes what it saw; afterwards the notes and the journal are read
together, in one pass over each path (the check of a mutual exclusion history is
O(n log n) where that of a general one is NP-complete).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.cli.records import opened
from remit.coordinator import Coordinator, Run, Turn
from remit.core import Outcome
from remit.locks import ClaimState, write
from remit.testing import await_until
from tests.ray.conftest import OpenCoordinator

PATHS = ("north", "south", "east", "west")
ROUNDS = 6
CANCELS = 4


def note(folder: Path, **told: Any) -> None:
    """Add a line to the history; one write of a short line to a file opened for appending is never torn."""
    line = json.dumps({**told, "at": time.monotonic()}) + "\n"
    descriptor = os.open(folder / "history", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def history(folder: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (folder / "history").read_text().splitlines()]
    except FileNotFoundError:
        return []


class Counter:
    """The file that each writer of a path checks and changes, without any lock of its own."""

    def __init__(self, workspace: Path, path: str) -> None:
        self.file = workspace / path / "counter"

    def read(self) -> dict[str, Any]:
        if not self.file.exists():
            return {"inside": "", "token": 0, "count": 0}
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found

    def write(self, **values: Any) -> None:
        self.file.parent.mkdir(exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(values))
        new.rename(self.file)


async def use(ctx: RunContext, path: str, token: int, pause_s: float) -> None:
    """Be the one writer of a path for a while, and say so before and after."""
    counter = Counter(ctx.workspace, path)
    found = counter.read()
    note(ctx.workspace, what="in", path=path, run=ctx.run_id, token=token, found=found)
    count = found["count"] + 1
    counter.write(inside=ctx.run_id, token=token, count=count)
    try:
        await ctx.sleep(pause_s)
    finally:
        # A cancelled writer is still inside here: its lease ends with the block around this one.
        left = counter.read()
        counter.write(inside="", token=token, count=count)
        note(ctx.workspace, what="out", path=path, run=ctx.run_id, token=token, left=left["inside"])


@agent
async def take_turns(ctx: RunContext, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        paths = chance.sample(PATHS, chance.choice((1, 1, 2)))
        async with ctx.claim(*(write(path) for path in paths)) as lease:
            for path in paths:
                await use(ctx, path, lease.token, chance.uniform(0.0, 0.02))


take_turns_alone = agent(name="take_turns_alone", isolation="actor")(take_turns.fn)


@agent(isolation="actor")
async def never_come_out(ctx: RunContext, path: str) -> None:
    async with ctx.claim(write(path)) as lease:
        (ctx.workspace / "victim").write_text(str(os.getpid()))
        await use(ctx, path, lease.token, 1_000.0)


async def cancel_some(turn: Turn, runs: list[Run], chance: random.Random, folder: Path) -> set[str]:
    """Cancel runs at random, each after some more of the history has been made."""
    chosen: set[str] = set()
    for run in chance.sample(runs, CANCELS):
        enough = len(history(folder)) + chance.randrange(1, 8)
        await await_until(
            lambda enough=enough: len(history(folder)) >= enough or all(r.is_settled for r in runs),  # type: ignore[misc]
            timeout_s=60.0,
        )
        await run.cancel("at random")
        chosen.add(run.id)
    return chosen


@pytest.mark.requirement("F12")
@pytest.mark.requirement("F13")
@pytest.mark.field_report("G1")
@pytest.mark.field_report("G4")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [11, 12])
def test_no_two_writers_are_inside_and_no_lease_outlives_its_run(
    open_coordinator: OpenCoordinator, tmp_path: Path, seed: int
) -> None:
    outcomes: dict[str, Outcome | None] = {}

    async def main() -> None:
        chance = random.Random(seed)
        async with open_coordinator() as coordinator, coordinator.turn("history") as turn:
            victim = await turn.delegate(never_come_out, path=chance.choice(PATHS))
            await await_until(lambda: victim.is_settled or (tmp_path / "victim").exists(), timeout_s=60.0)
            assert not victim.is_settled, victim.exception()
            pid = int((tmp_path / "victim").read_text())
            runs = await turn.delegate_many(take_turns, [{"seed": seed * 100 + n} for n in range(9)])
            runs += await turn.delegate_many(take_turns_alone, [{"seed": seed * 100 + n} for n in (9, 10)])
            await until_somebody_waits_for(coordinator, victim.id)
            killing = asyncio.create_task(cancel_some(turn, runs, chance, tmp_path))
            await await_until(lambda: len(history(tmp_path)) >= 5, timeout_s=60.0)
            os.kill(pid, signal.SIGKILL)
            cancelled = await killing
            for run in (victim, *runs):
                outcomes[run.id] = await run.wait(90.0)
                assert run.outcome is not Outcome.FAILED, run.exception()
            assert outcomes[victim.id] is Outcome.LOST
            assert {name for name, outcome in outcomes.items() if outcome is Outcome.CANCELLED} <= cancelled
            assert set(outcomes.values()) <= {Outcome.SUCCEEDED, Outcome.CANCELLED, Outcome.LOST}
            assert await coordinator.locks() == ()
            check_exclusion(history(tmp_path), victim.id)

    asyncio.run(main())
    check_journal(tmp_path)


async def until_somebody_waits_for(coordinator: Coordinator, owner: str) -> None:
    for _ in range(2_000):
        if any(view.state is ClaimState.QUEUED and owner in view.held_by for view in await coordinator.locks()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nobody ever waits for it")


def check_exclusion(lines: list[dict[str, Any]], victim: str) -> None:
    """Each writer found the file as the one before it had left it, and nobody came in between."""
    last: dict[str, dict[str, Any]] = {}
    inside: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = defaultdict(int)
    for line in sorted(lines, key=lambda line: line["at"]):
        path, run = line["path"], line["run"]
        if line["what"] == "in":
            before = inside.pop(path, None)
            assert before is None or before["run"] == victim, f"{run} came in while {before} was inside"
            assert line["found"]["inside"] == ("" if before is None else victim)
            if path in last:
                assert line["token"] > last[path]["token"], "tokens of one path grow"
                assert line["found"]["token"] == last[path]["token"], "nobody wrote in between"
            assert line["found"]["count"] == counts[path], "no write was lost"
            counts[path] += 1
            inside[path] = last[path] = line
        else:
            assert inside.pop(path)["token"] == line["token"]
            assert line["left"] == run, "somebody else wrote while it was inside"
    assert {line["run"] for line in inside.values()} <= {victim}
    assert sum(counts.values()) > ROUNDS


def check_journal(workspace: Path) -> None:
    """In the order of the journal: tokens grow, and a run has nothing after its terminal event."""
    held: dict[str, set[str]] = defaultdict(set)
    ended: set[str] = set()
    newest = 0
    with opened(workspace) as records:
        assert records.reader is not None
        assert records.state.locks.is_idle
        for record in records.reader.read(kinds=("claim_changed", "run_ended")):
            owner = record.node_id
            if record.kind == "run_ended":
                assert not held[owner], "a lease outlives its run"
                ended.add(owner)
                continue
            change = record.data["change"]
            if change["event"] == "granted":
                assert change["seq"] > newest, "fencing tokens grow"
                assert owner not in ended, "granted to a run that has ended"
                newest = change["seq"]
                held[owner].add(change["claim_id"])
            elif change["event"] in ("released", "withdrawn"):
                held[owner].discard(change["claim_id"])
    assert newest > 0
    assert not any(held.values())
