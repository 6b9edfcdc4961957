"""`remit gc`: what ended long ago goes, whole; what is live, held or recent stays, and every view with it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from remit.cli.retaining import seconds_of
from remit.coordinator.folding import fold_journal, past_node
from remit.coordinator.retention import collect
from remit.coordinator.snapshot import encode, freeze
from remit.core.errors import InvalidArgument, JournalError
from remit.core.events import encode_event
from remit.journal import JournalRecord, choose_journal, journal_location, open_journal, open_reader
from tests.cli.runner import invoke
from tests.coordinator.claims_world import ClaimWorld
from tests.coordinator.decider_world import same
from tests.journal.postgres_server import Server

DAY = 86_400.0


@pytest.fixture(params=["sqlite", "postgres"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        choose_journal(tmp_path, server.url())
    return tmp_path


def write(workspace: Path, world: ClaimWorld, *, after: int = 0) -> None:
    """Write what has happened in a world, and an output file for each run, as a coordinator that has gone leaves it."""
    records = [
        JournalRecord(e.kind, e.node_id, e.turn_id, int(e.at * 1000), encode_event(e), e.terminal, b"x")
        for e in world.events[after:]
    ]
    with closing(open_journal(journal_location(workspace))) as journal:
        journal.append(records).result(10)
    for event in world.events[after:]:
        if event.kind == "run_accepted":
            folder = workspace / ".remit" / "output" / event.node_id
            folder.mkdir(parents=True)
            (folder / "log").write_text("twelve bytes")


def outputs(workspace: Path) -> set[str]:
    return {path.name for path in (workspace / ".remit" / "output").iterdir()}


def an_old_past() -> tuple[ClaimWorld, dict[str, str]]:
    """Return a world with turns of ten days ago of every fate, and one of today."""
    world = ClaimWorld()
    names: dict[str, str] = {}
    names["old"] = world.open_turn("s1")
    names["old_run"] = world.run(names["old"])
    world.claim(names["old_run"], "w:src/a.py")
    world.end(names["old_run"])
    world.finish(names["old"])
    names["cancelled"] = world.open_turn("s2")
    names["cancelled_run"] = world.run(names["cancelled"])
    world.cancel(names["cancelled"])
    world.unwind(names["cancelled_run"])
    world.finish(names["cancelled"], "cancelled")
    names["detaching"] = world.open_turn("s3")
    names["detached"] = world.run(names["detaching"], detached=True)
    world.finish(names["detaching"])
    names["live"] = world.open_turn("s4")
    names["live_run"] = world.run(names["live"])
    names["quarantined"] = world.open_turn("s5")
    names["stuck"] = world.run(names["quarantined"])
    world.claim(names["stuck"], "w:src/b.py")
    world.end(names["stuck"], "stuck")
    world.finish(names["quarantined"])
    world.advance(10 * DAY)
    names["recent"] = world.open_turn("s6")
    names["recent_run"] = world.run(names["recent"])
    world.end(names["recent_run"])
    world.finish(names["recent"])
    assert world.state.locks.owners() == (names["stuck"],)
    return world, names


def test_only_what_ended_long_ago_goes_and_with_all_of_it(workspace: Path) -> None:
    world, names = an_old_past()
    write(workspace, world)
    stays = {names[each] for each in ("detached", "live_run", "stuck", "recent_run")}

    would = collect(str(workspace), older_than_s=7 * DAY, now=world.now, dry_run=True)
    assert would.turns == [names["old"], names["cancelled"]]
    assert (would.runs, would.output_bytes, would.held) == (2, 24, 0)
    assert outputs(workspace) == stays | {names["old_run"], names["cancelled_run"]}

    done = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
    assert (done.turns, done.runs, done.output_bytes) == (would.turns, would.runs, would.output_bytes)
    assert done.records >= would.records > 0
    assert outputs(workspace) == stays
    with closing(open_reader(journal_location(workspace))) as reader:
        state = fold_journal(reader).state
        for gone in ("old", "old_run", "cancelled", "cancelled_run"):
            assert names[gone] not in state.nodes
            assert past_node(reader, names[gone]) is None
            assert reader.payload(names[gone], "run_ended") is None
        kept = [node for node in world.state.nodes.values() if node.id in state.nodes]
        assert {node.id for node in kept} == set(names.values()) - {names["old"], names["old_run"]} - {
            names["cancelled"],
            names["cancelled_run"],
        }
        assert reader.base() > 0
    for name in set(world.state.nodes) - {node.id for node in kept}:
        del world.state.nodes[name]
    world.state.cancels.clear()
    assert same(world.state, state) == ""
    again = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
    assert (again.turns, again.runs, again.output_bytes) == ([], 0, 0)


@pytest.mark.requirement("F14")
def test_what_happens_afterwards_is_folded_onto_what_was_kept_and_no_place_comes_twice(workspace: Path) -> None:
    world, names = an_old_past()
    write(workspace, world)
    with closing(open_reader(journal_location(workspace))) as reader:
        last = reader.last_seq()
    collect(str(workspace), older_than_s=0.0, now=world.now + 1.0)
    before = len(world.events)
    world.end(names["detached"])
    world.finish(names["live"])
    world.end(names["live_run"])
    write(workspace, world, after=before)
    with closing(open_reader(journal_location(workspace))) as reader:
        assert next(reader.read(after_seq=last)).seq == last + 1
        state = fold_journal(reader).state
    assert state.live_runs == state.live_turns == 0
    assert state.locks.to_dict() == world.state.locks.to_dict()


def test_beside_a_coordinator_only_that_goes_which_its_snapshot_has_let_go(workspace: Path) -> None:
    world, names = an_old_past()
    write(workspace, world)
    with closing(open_journal(journal_location(workspace))) as journal:
        alone = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
        assert (alone.turns, alone.held) == ([], 0)
        held = freeze(world.state)
        seq = journal.append(()).result(10)
        journal.save_snapshot(seq, encode(held)).result(10)
        holding = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
        assert holding.turns == []
        assert holding.held == 4
        world.decider.prune(world.now)
        journal.save_snapshot(seq, encode(freeze(world.state))).result(10)
        done = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
        assert done.turns == [names["old"], names["cancelled"]]
        # The writer goes on, and was never in doubt.
        assert journal.append([JournalRecord("x", "run_x", "turn_x", 1, {})]).result(10) == seq + 1


def test_gone_half_way_it_is_finished_by_the_next_call(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, names = an_old_past()
    write(workspace, world)
    import remit.coordinator.retention as module

    removed: list[str] = []
    real = module._remove_output

    def stop_at_the_second(folder: Path, name: str, *, dry_run: bool) -> int:
        removed.append(name)
        if len(removed) == 3:
            raise JournalError("killed")
        return real(folder, name, dry_run=dry_run)

    monkeypatch.setattr(module, "_remove_output", stop_at_the_second)
    with pytest.raises(JournalError, match="killed"):
        collect(str(workspace), older_than_s=7 * DAY, now=world.now)
    monkeypatch.undo()
    with closing(open_reader(journal_location(workspace))) as reader:
        fold_journal(reader)
        assert past_node(reader, names["cancelled_run"]) is not None
    done = collect(str(workspace), older_than_s=7 * DAY, now=world.now)
    assert done.turns == [names["old"], names["cancelled"]]
    assert names["cancelled_run"] not in outputs(workspace)


def test_the_file_gets_smaller_and_output_that_names_another_place_is_left_alone(tmp_path: Path) -> None:
    world, _ = an_old_past()
    write(tmp_path, world)
    path = journal_location(tmp_path)
    assert isinstance(path, Path)
    evil = [
        JournalRecord("run_ended", "../../outside", "turn_evil", 1, {"text": "x" * 200_000}, terminal=True),
        JournalRecord("turn_ended", "turn_evil", "turn_evil", 1, {"text": "x" * 200_000}, terminal=True),
    ]
    outside = tmp_path / "outside"
    outside.mkdir()
    with closing(open_journal(path)) as journal:
        # A turn of which no state knows, as one that has left memory.
        seq = journal.append(evil).result(10)
        journal.save_snapshot(seq, encode(freeze(world.state))).result(10)
    before = path.stat().st_size
    done = collect(str(tmp_path), older_than_s=7 * DAY, now=world.now)
    assert "turn_evil" in done.turns
    assert path.stat().st_size < before - 300_000
    assert outside.is_dir()


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 7 * DAY), ("12h", 43_200.0), ("30 m", 1_800.0), ("1.5w", 10.5 * DAY)]
)
def test_ages_are_written_with_their_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "1e9d"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as 7d"):
        seconds_of(text)


def test_the_command_says_what_it_would_do_and_what_it_did(tmp_path: Path) -> None:
    world, names = an_old_past()
    write(tmp_path, world)

    def run(*words: str) -> str:
        return invoke(["gc", "-w", str(tmp_path), *words]).output

    # By the clock of this machine all of it is older than that.
    would = json.loads(run("--older-than", "7d", "--dry-run", "--json"))
    assert (would["dry_run"], len(would["turns"]), would["runs"]) == (True, 3, 3)
    assert run("--older-than", "7d").startswith("removed 3 turns with 3 runs: ")
    assert run("--older-than", "7d") == "nothing in this workspace ended more than 7d ago and may go\n"
    assert "such as 7d; got '7'" in run("--older-than", "7")
    assert names["detached"] in outputs(tmp_path)
