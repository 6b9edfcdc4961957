"""Journals that earlier versions wrote are read for ever, and none is written otherwise without a step."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remit.coordinator.folding import fold_journal, past_node
from remit.coordinator.snapshot import decode
from remit.coordinator.views import tree_view
from remit.core.errors import JournalTooNew
from remit.core.events import EVENTS_VERSION, encode_event
from remit.core.migrations import STEPS, read_event
from remit.journal import SqliteJournal, SqliteJournalReader
from tests.golden.samples import FOLDER, golden_file, samples

OLD_FORMATS = (1,)


def lines(version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in golden_file(version).read_text().splitlines()]


@pytest.mark.parametrize("version", range(1, EVENTS_VERSION + 1))
def test_every_event_that_a_version_ever_wrote_is_read(version: int) -> None:
    for line in lines(version):
        event = read_event(line["kind"], line["node_id"], line["turn_id"], line["data"], version)
        assert event is not None
        assert event.terminal is line["terminal"]
        if version == EVENTS_VERSION:
            assert json.loads(json.dumps(encode_event(event))) == line["data"]


def test_no_event_is_written_otherwise_than_its_version_says() -> None:
    golden = {line.pop("label"): line for line in lines(EVENTS_VERSION)}
    now = samples()
    advice = "python -m tests.golden.samples adds what is new, and says where the version must be raised"
    assert now == golden, advice


def test_there_is_a_step_from_each_version_to_the_next() -> None:
    assert sorted(STEPS) == list(range(1, EVENTS_VERSION))


def rename(kind: str, data: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    if kind == "gone":
        return None
    data["name"] = data.pop("title")
    return "turn_accepted" if kind == "turn_begun" else kind, data


def test_an_older_event_is_lifted_step_by_step_and_what_was_read_is_left_alone() -> None:
    data = {"title": "lint", "at": 1.0}
    steps = {1: lambda kind, data: ("turn_begun", data), 2: rename}
    event = read_event("turn_new", "turn_1", "turn_1", data, 1, steps=steps, current=3)
    assert event is not None
    assert (event.kind, event.name) == ("turn_accepted", "lint")  # type: ignore[attr-defined]
    assert data == {"title": "lint", "at": 1.0}
    assert read_event("gone", "", "", {}, 2, steps=steps, current=3) is None


@pytest.mark.parametrize(
    ("kind", "more", "version", "text"),
    [
        ("turn_accepted", {}, EVENTS_VERSION + 1, "install the newer remit"),
        ("turn_dreamt", {}, EVENTS_VERSION, "'turn_dreamt', which this version does not know"),
        ("turn_accepted", {"colour": "red"}, EVENTS_VERSION, r"does not know \(colour\)"),
    ],
)
def test_what_is_newer_is_refused_by_its_own_error(kind: str, more: dict[str, Any], version: int, text: str) -> None:
    with pytest.raises(JournalTooNew, match=text):
        read_event(kind, "turn_1", "turn_1", {"at": 1.0, **more}, version)


def write_newer(path: Path) -> None:
    SqliteJournal.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE epochs SET events_version = ?", (EVENTS_VERSION + 1,))
        connection.commit()


def test_a_journal_in_which_a_newer_version_wrote_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write_newer(path)
    before = path.read_bytes()
    for opener in (SqliteJournal.open, SqliteJournalReader.open):
        with pytest.raises(JournalTooNew, match="install the newer remit that wrote it"):
            opener(path)
    assert path.read_bytes() == before


def restore(name: str, path: Path) -> dict[str, list[dict[str, Any]]]:
    """Make a journal from its dump; return the trees that it holds."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"{name}.sql").read_text())
    expected: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / f"{name}.json").read_text())
    return expected


def trees(reader: SqliteJournalReader) -> dict[str, list[dict[str, Any]]]:
    state = fold_journal(reader).state
    found = {turn.id: tree_view(state, turn, 0.0) for turn in state.turns.values()}
    return {name: [json.loads(json.dumps(node.to_dict())) for node in tree.nodes] for name, tree in found.items()}


def check(found: dict[str, list[dict[str, Any]]], expected: dict[str, list[dict[str, Any]]]) -> None:
    """Compare what was there when the journal was written; views may have got more fields since."""
    assert found.keys() == expected.keys()
    for name, nodes in expected.items():
        assert [{key: node[key] for key in old} for node, old in zip(found[name], nodes, strict=True)] == nodes


@pytest.mark.requirement("F14")
@pytest.mark.parametrize("number", OLD_FORMATS)
def test_an_older_file_is_read_as_it_is_and_then_brought_up_to_date(number: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    expected = restore(f"journal_format_{number}", path)
    before = path.read_bytes()
    with closing(SqliteJournalReader.open(path)) as old:
        check(trees(old), expected)
        assert old.snapshot() is None
        assert path.read_bytes() == before
        with closing(SqliteJournal.open(path)) as journal:
            assert journal.epoch == 3
            # The reader was there before and goes on.
            check(trees(old), expected)
            assert old.snapshot() is None
    with closing(SqliteJournalReader.open(path)) as new:
        check(trees(new), expected)
        assert new.ended_turns() == ["turn_13", "turn_1"]
        assert past_node(new, "turn_13") is not None


def test_the_snapshot_of_the_first_version_is_read(tmp_path: Path) -> None:
    expected = json.loads((FOLDER / "journal_format_1.json").read_text())
    state = decode((FOLDER / "snapshot_1.bin").read_bytes())
    found = {turn.id: tree_view(state, turn, 0.0) for turn in state.turns.values()}
    check({name: [json.loads(json.dumps(n.to_dict())) for n in tree.nodes] for name, tree in found.items()}, expected)
