"""Events survive their encoding and both journals, and what is folded from them is the live state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remit.core.events as module
from remit.coordinator.evolve import evolve
from remit.coordinator.state import WorkspaceState
from remit.core.cause import Cause, CauseKind
from remit.core.events import Event, RunAccepted, decode_event, encode_event
from remit.core.outcome import Outcome
from remit.journal import Journal, JournalRecord, MemoryJournal, SqliteJournal
from tests.coordinator.decider_world import World, same, through_json

KINDS = [
    found
    for name in module.__all__
    if isinstance(found := getattr(module, name), type) and issubclass(found, Event) and found is not Event
]
TEXT = st.text(max_size=8)
NUMBER = st.floats(min_value=0, max_value=4e9, allow_nan=False)
COUNT = st.integers(min_value=0, max_value=2**40)
PLAIN = st.dictionaries(TEXT, TEXT | COUNT, max_size=3)
CAUSE = st.builds(Cause, st.sampled_from(CauseKind), TEXT, TEXT, TEXT, TEXT, COUNT, TEXT)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    float: NUMBER,
    int: COUNT,
    bool: st.booleans(),
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
    dict[str, Any]: PLAIN,
    tuple[Mapping[str, Any], ...]: st.lists(PLAIN, max_size=2).map(tuple),
    float | None: st.none() | NUMBER,
    int | None: st.none() | COUNT,
    Cause | None: st.none() | CAUSE,
    Outcome: st.sampled_from(Outcome),
}


def events() -> st.SearchStrategy[Event]:
    return st.one_of([_events_of(kind) for kind in KINDS])


def _events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: BY_TYPE[hints[field.name]] for field in dataclasses.fields(kind)})


@given(events())
def test_what_is_encoded_is_decoded_to_the_same(event: Event) -> None:
    restored = through_json(event)
    assert (type(restored), restored) == (type(event), event)


def test_every_kind_has_its_own_word() -> None:
    assert len({kind.kind for kind in KINDS}) == len(KINDS) > 20
    assert [kind.kind for kind in KINDS if kind.terminal] == ["run_ended", "turn_ended"]


def some_history() -> World:
    world = World(max_shared=3)
    turn = world.open_turn(deadline_s=50.0)
    first, second, third = world.delegate(turn, 3, retries=1, retry_delay_s=1.0)
    after = world.run(turn, after=(third,))
    world.end(first, "raised")
    world.wait(second, first)
    world.advance(2.0)
    world.resume(second)
    world.host_gone(world.node(second).host_id)
    world.advance(2.0)
    world.end(third)
    assert world.node(after).attempt == 1
    world.cancel(turn, reason="enough")
    world.advance(60.0)
    return world


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_state_folded_from_a_journal_is_the_live_one(kind: str, tmp_path: Path) -> None:
    world = some_history()
    journal: Journal = MemoryJournal() if kind == "memory" else SqliteJournal.open(tmp_path / "journal.db")
    journal.append(
        [
            JournalRecord(
                event.kind, event.node_id, event.turn_id, int(event.at * 1000), encode_event(event), event.terminal
            )
            for event in world.events
        ]
    ).result(10)
    reader = journal.reader()
    folded = WorkspaceState()
    restored = [decode_event(s.kind, s.node_id, s.turn_id, s.data) for s in reader.read()]
    for event in restored:
        evolve(folded, event)
    reader.close()
    journal.close()
    assert restored == world.events
    assert same(world.state, folded) == ""


def test_fields_with_their_default_are_not_written() -> None:
    event = RunAccepted("run_1", "turn_1", 1.5, parent_id="turn_1")
    assert encode_event(event) == {"parent_id": "turn_1", "at": 1.5}
