"""What has left memory is seen all the same; snapshots are kept as the coordinator works, and used by the next life."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import remit.coordinator.snapshotting as snapshotting
from remit.agents import RunContext, agent
from remit.coordinator.folding import fold_journal, past_node
from remit.coordinator.life import journal_path
from remit.coordinator.snapshot import decode, encode, freeze
from remit.coordinator.state import NodeState, ProcessState
from remit.coordinator.transaction import Settings
from remit.coordinator.views import node_view, tree_view
from remit.core.errors import InternalError, JournalError, JournalTooNew, NotFound, RunCancelled
from remit.core.events import encode_event
from remit.core.messages import ReportEnded
from remit.core.outcome import Outcome
from remit.journal import JournalRecord, MemoryJournal, SqliteJournal, SqliteJournalReader
from remit.testing.inprocess import open_inprocess
from tests.cli.runner import invoke
from tests.coordinator.decider_world import World, same
from tests.coordinator.test_decider_events import some_history

FORGETFUL = Settings(keep_ended_turns=0)


@agent
async def add(ctx: RunContext, a: int) -> int:
    return a + 1


@agent
async def parent(ctx: RunContext, a: int) -> int:
    value: int = await (await ctx.delegate(add, a=a)).result()
    return value


@agent
async def wait(ctx: RunContext) -> None:
    await ctx.sleep(600)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.requirement("F14")
@pytest.mark.field_report("J8")
def test_views_of_what_has_left_memory_are_those_of_before(tmp_path: Path) -> None:
    async def main(system: Any) -> None:
        async with system.coordinator() as coordinator:
            async with coordinator.turn("old") as turn:
                good = await turn.delegate(parent, a=1)
                assert await good.result() == 2
                bad = await turn.delegate(wait)
                await bad.cancel("enough")
                with pytest.raises(RunCancelled):
                    await bad.result()
                before = await coordinator.tree(turn.id)
            state = system.life.service._decider.state
            await until(lambda: not state.nodes)
            after = await coordinator.tree(turn.id)
            assert [(n.id, n.outcome, n.cause, n.preview, n.arguments) for n in after.nodes[1:]] == [
                (n.id, n.outcome, n.cause, n.preview, n.arguments) for n in before.nodes[1:]
            ]
            assert after.root.outcome is Outcome.SUCCEEDED
            assert (await coordinator.run(good.id)).preview == "2"
            # Another process that comes now still gets the result.
            again = await system.coordinator().__aenter__()
            try:
                found = await again.run(bad.id)
                assert found.outcome is Outcome.CANCELLED
            finally:
                await again.__aexit__(None, None, None)
            with pytest.raises(NotFound):
                await coordinator.tree("turn_nobody")

    with open_inprocess(tmp_path, settings=FORGETFUL, journal=SqliteJournal.open(tmp_path / "j.db")) as system:
        asyncio.run(main(system))


@pytest.mark.requirement("F14")
def test_a_coordinator_keeps_snapshots_and_the_next_life_folds_only_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotting, "_RECORDS_AT_REST", 1)
    monkeypatch.setattr(snapshotting, "_RECORDS", 1)
    path = tmp_path / "j.db"

    async def main(system: Any) -> None:
        async with system.coordinator() as coordinator, coordinator.turn("work") as turn:
            assert await turn.gather(*await turn.delegate_many(parent, [{"a": n} for n in range(5)])) == [1, 2, 3, 4, 5]
        reader = system.journal.reader()
        with closing(reader):
            await until(lambda: reader.snapshot() is not None)

    with open_inprocess(tmp_path, journal=SqliteJournal.open(path)) as system:
        asyncio.run(main(system))
    with closing(SqliteJournalReader.open(path)) as reader:
        snapshot = reader.snapshot()
        assert snapshot is not None
        folded = fold_journal(reader)
        assert folded.tail == reader.last_seq() - snapshot.seq
        whole = World()
        fresh = whole.folded.__class__()
        from remit.coordinator.folding import _apply

        _apply(fresh, reader.read())
        assert same(fresh, folded.state) == ""


def test_a_disk_that_fails_during_a_snapshot_is_logged_and_the_work_is_not_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        journal = MemoryJournal(hold=True)
        snapshots = snapshotting.Snapshots(journal, World().state)
        snapshots.count(5)
        task = asyncio.ensure_future(snapshots.take())
        await until(lambda: journal.held == 1)
        journal.crash("the disk is gone")
        await task
        assert snapshots._tail == 5

    asyncio.run(main())
    assert "no snapshot was kept: the disk is gone" in caplog.text


def write(path: Path, world: World) -> None:
    with closing(SqliteJournal.open(path)) as journal:
        journal.append(
            [
                JournalRecord(e.kind, e.node_id, e.turn_id, int(e.at * 1000), encode_event(e), e.terminal)
                for e in world.events
            ]
        ).result(10)


@pytest.mark.field_report("J8")
def test_a_turn_alone_folded_from_its_events_looks_as_in_the_whole(tmp_path: Path) -> None:
    world = some_history()
    path = tmp_path / "j.db"
    write(path, world)
    with closing(SqliteJournalReader.open(path)) as reader:
        for node in world.state.nodes.values():
            assert node.is_ended
            found = past_node(reader, node.id)
            assert found is not None
            assert node_view(found[0], found[1]) == node_view(world.state, node)
            assert tree_view(found[0], found[1], 0.0) == tree_view(world.state, node, 0.0)
        assert past_node(reader, "run_nobody") is None
        # A part of an id is for people, not for programs.
        assert past_node(reader, "run_") is None


def test_the_command_shows_what_is_neither_live_nor_recent(tmp_path: Path) -> None:
    world = World()
    turns = [world.open_turn(f"s{n}", name=f"turn number {n}") for n in range(14)]
    runs = [world.run(turn) for turn in turns]
    for turn, run in zip(turns, runs, strict=True):
        world.end(run)
        world.finish(turn)
        world.advance(1.0)
    live = world.open_turn("live")
    world.run(live)
    path = journal_path(tmp_path)
    write(path, world)
    world.decider.settings = Settings(keep_ended_turns=1)
    world.decider.prune()
    assert len(world.state.turns) == 2
    with closing(SqliteJournal.open(path)) as journal:
        journal.save_snapshot(len(world.events), encode(freeze(world.state))).result(10)

    def run_command(*words: str) -> str:
        result = invoke([words[0], "-w", str(tmp_path), *words[1:]])
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = run_command("ps")
    assert "... 4 older ones; --all shows them" in shown
    names = [n for n in range(14) if f"turn number {n} " in shown]
    assert names == list(range(4, 14))
    assert shown.count("[1 succeeded]") == 10
    listed = json.loads(run_command("ps", "--all", "--json"))["turns"]
    assert [turn["id"] for turn in listed] == [*turns, live]
    assert {turn["runs"] for turn in listed} == {1}
    assert runs[0] in run_command("tree", turns[0])
    assert json.loads(run_command("tree", runs[0], "--json"))["nodes"][0]["outcome"] == "succeeded"
    assert json.loads(run_command("result", runs[0], "--json"))["outcome"] == "succeeded"
    folder = tmp_path / ".remit" / "output" / runs[0]
    folder.mkdir(parents=True)
    (folder / "log").write_text("from long ago\n")
    assert run_command("logs", turns[0]) == "from long ago\n"
    missing = invoke(["tree", "-w", str(tmp_path), "run_nobody"])
    assert missing.exit_code == 2


def test_what_a_snapshot_cannot_hold_is_said_by_name() -> None:
    world = World()
    world.state.spawn_failures["x"] = (1, object())  # type: ignore[assignment]
    with pytest.raises(InternalError, match="a snapshot cannot hold a object; define it in"):
        freeze(world.state)


def test_a_frozen_state_is_not_changed_by_what_happens_later() -> None:
    world = World(check=False)
    turn = world.open_turn()
    run = world.run(turn)
    world.node(run).processes = {7: ProcessState(7, 1.0, "here", "cc")}
    frozen = freeze(world.state)
    before = encode(frozen)
    processes = world.node(run).processes
    assert processes is not None
    processes.clear()
    world.run(turn)
    world.end(run)
    world.finish(turn)
    assert encode(frozen) == before
    thawed = decode(before)
    assert thawed.nodes[run].state is NodeState.RUNNING
    assert thawed.nodes[run].processes == {7: ProcessState(7, 1.0, "here", "cc")}


def damaged(change: Callable[[dict[str, Any]], None]) -> bytes:
    import zlib

    document = json.loads(zlib.decompress(encode(freeze(some_history().state))))
    change(document)
    return zlib.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(version=99), "has version 99"),
        (lambda d: d["nodes"][0].update(colour="red"), "has 'colour', which this version does not know"),
        (lambda d: d["rest"].update(weather={"$k": []}), "has 'weather'"),
        (lambda d: d["nodes"][0].update(cause={"$o": ["Curse", {}]}), "holds a 'Curse'"),
        (lambda d: d["nodes"][0].update(limits={"$o": ["Limits", {"max_moons": 1}]}), "holds a newer 'Limits'"),
    ],
)
def test_a_newer_snapshot_is_refused(change: Callable[[dict[str, Any]], None], text: str) -> None:
    with pytest.raises(JournalTooNew, match=text):
        decode(damaged(change))


def test_a_damaged_snapshot_is_no_silent_loss() -> None:
    with pytest.raises(JournalError, match="damaged"):
        decode(b"no snapshot")


@pytest.mark.field_report("J2")
def test_what_arrives_after_the_end_is_refused_and_counted_also_when_it_has_left_memory() -> None:
    world = World(keep_ended_turns=0)
    turn = world.open_turn()
    run = world.run(turn)
    host = world.node(run).host_id
    world.end(run)
    late = ReportEnded(run, 1, "returned")
    for count in (1, 2):
        before = len(world.events)
        world.report(host, late)
        assert world.state.refused == count
        assert len(world.events) == before
        world.finish(turn)
        world.decider.prune()
        assert (run in world.state.nodes) is False


@pytest.mark.field_report("J1")
def test_one_end_is_written_and_the_record_and_the_fold_say_the_same_whatever_races(tmp_path: Path) -> None:
    for order in itertools.permutations(("succeed", "cancel", "shutdown")):
        world = World()
        turn = world.open_turn()
        run = world.run(turn)
        for step in order:
            if step == "succeed" and not world.node(run).report:
                world.end(run)
            elif step == "cancel":
                world.cancel(run)
            elif step == "shutdown":
                world.shutdown()
        world.drain()
        assert world.terminal_counts()[run] == 1
        path = tmp_path / f"{'_'.join(order)}.db"
        write(path, world)
        with closing(SqliteJournalReader.open(path)) as reader:
            (end,) = reader.read(node_id=run, kinds=["run_ended"])
            folded = fold_journal(reader).state.nodes[run]
        live = world.node(run)
        expected = Outcome.SUCCEEDED if order[0] == "succeed" else Outcome.CANCELLED
        assert Outcome(end.data.get("outcome", "succeeded")) is folded.outcome is live.outcome is expected
        assert folded.cause == live.cause
