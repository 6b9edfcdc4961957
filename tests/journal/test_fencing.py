"""Two coordinators never both write: whoever takes a journal over shuts the other one out."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remit.core.errors import JournalBusy, JournalError, JournalFenced
from remit.journal import JournalRecord, SqliteJournal, open_journal, open_reader
from remit.journal.ownership import lock_path
from remit.journal.writer import DatabaseJournal
from tests.journal.postgres_server import Server


def record(node: str, *, terminal: bool = False) -> JournalRecord:
    return JournalRecord("run_ended" if terminal else "run_started", node, "turn_1", 1, {}, terminal)


class Place:
    """Where a journal is, and how its ownership is lost without its writer's knowledge."""

    def __init__(self, location: Path | str) -> None:
        self.location = location

    def open(self, **options: Any) -> DatabaseJournal:
        return open_journal(self.location, **options)

    def lose_ownership(self, journal: DatabaseJournal) -> None:
        if isinstance(self.location, Path):
            # A network file system that forgets locks, or somebody who tidies up.
            lock_path(self.location).unlink()
            return
        # A proxy that keeps the connection and lost the server's session state.
        raw = journal._connection.raw  # type: ignore[attr-defined]
        raw.execute("SELECT pg_advisory_unlock_all()")


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        yield Place(server.url())
    else:
        yield Place(tmp_path / "journal.db")


@pytest.mark.requirement("D24")
def test_a_writer_that_was_taken_over_can_add_nothing_and_says_by_whom(place: Place) -> None:
    with closing(place.open()) as old:
        old.append([record("run_1")]).result(10)
        place.lose_ownership(old)
        with closing(place.open()) as new:
            assert new.epoch == 2
            late = old.append([record("run_late", terminal=True)])
            with pytest.raises(
                JournalFenced, match=r"taken over by another coordinator \(life 2, this one is 1\)"
            ) as told:
                late.result(10)
            assert (told.value.__dict__["epoch"], told.value.__dict__["current_epoch"]) == (1, 2)
            assert pickle.loads(pickle.dumps(told.value)).__dict__ == told.value.__dict__
            assert told.value.code == "journal_fenced"
            # For good, whatever it tries.
            for attempt in (old.append([record("run_2")]), old.save_snapshot(1, b"old")):
                assert isinstance(attempt.exception(10), JournalFenced)
            assert new.append([record("run_3")]).result(10) == 2
            with closing(new.reader()) as reader:
                assert [(one.node_id, one.epoch) for one in reader.read()] == [("run_1", 1), ("run_3", 2)]
                assert reader.snapshot() is None


@pytest.mark.requirement("D24")
def test_who_opens_it_second_is_refused_and_the_first_goes_on(place: Place) -> None:
    with closing(place.open()) as first:
        with pytest.raises(JournalBusy, match="use the coordinator that runs there, or stop it first"):
            place.open()
        assert first.append([record("run_1")]).result(10) == 1
        with closing(open_reader(place.location)) as reader:
            assert reader.writer_alive()
            assert reader.epoch() == 1
    with closing(open_reader(place.location)) as reader:
        assert not reader.writer_alive()


@pytest.mark.requirement("D24")
def test_a_transaction_that_has_begun_is_over_before_the_journal_is_taken_over(place: Place) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "before_commit":
            inside.set()
            assert go_on.wait(20)

    with closing(place.open(failpoint=hold)) as old:
        under_way = old.append([record("run_1", terminal=True)])
        assert inside.wait(10)
        place_lost = isinstance(place.location, Path)
        if place_lost:
            place.lose_ownership(old)
        taken: list[DatabaseJournal | BaseException] = []

        def take_over() -> None:
            try:
                taken.append(place.open())
            except JournalError as error:
                taken.append(error)

        thread = threading.Thread(target=take_over)
        thread.start()
        go_on.set()
        assert under_way.result(10) == 1
        thread.join(20)
        (found,) = taken
        if place_lost:
            assert isinstance(found, DatabaseJournal)
            with closing(found):
                # It begins behind what the other had promised, and not in the midst of it.
                assert found.append([record("run_2")]).result(10) == 2
                assert isinstance(old.append([record("run_3")]).exception(10), JournalFenced)
        else:
            assert isinstance(found, JournalBusy)


def test_a_full_restart_of_lives_counts_epochs_and_keeps_places(place: Place) -> None:
    for life in range(1, 4):
        with closing(place.open()) as journal:
            assert journal.epoch == life
            assert journal.append([record(f"run_{life}", terminal=True)]).result(10) == life


@pytest.mark.parametrize("make", [lambda p: SqliteJournal.open(p), lambda p: open_journal(p)])
def test_a_journal_has_its_place_in_words(make: Callable[[Path], DatabaseJournal], tmp_path: Path) -> None:
    with closing(make(tmp_path / "journal.db")) as journal:
        assert str(tmp_path) in journal.where
