"""What every journal promises, checked on each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from remit.core.errors import DuplicateTerminalEvent, InvalidArgument, JournalBusy, JournalError
from remit.journal import Journal, JournalReader, JournalRecord, MemoryJournal, SqliteJournal, open_journal


class Lives:
    """Opens one life of a journal after the other, and closes what a test left open."""

    def __init__(self, open_next: Callable[[], Journal]) -> None:
        self._open_next = open_next
        self._journals: list[Journal] = []
        self._readers: list[JournalReader] = []

    def open(self) -> Journal:
        journal = self._open_next()
        self._journals.append(journal)
        return journal

    def read(self, journal: Journal) -> JournalReader:
        reader = journal.reader()
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        for journal in self._journals:
            journal.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def lives(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lives]:
    last: list[MemoryJournal] = []
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").url()
        yield from _closed(Lives(lambda: open_journal(url)))
        return

    def open_memory() -> Journal:
        last[:] = [MemoryJournal(previous=last[0] if last else None)]
        return last[0]

    def open_sqlite() -> Journal:
        return SqliteJournal.open(tmp_path / "state" / "journal.db")

    yield from _closed(Lives(open_memory if request.param == "memory" else open_sqlite))


def _closed(lives: Lives) -> Iterator[Lives]:
    yield lives
    lives.close()


def record(kind: str = "run_started", node: str = "run_1", turn: str = "turn_1", **more: Any) -> JournalRecord:
    return JournalRecord(kind, node, turn, more.pop("at", 1), more.pop("data", {}), **more)


def end(node: str) -> JournalRecord:
    return record("run_ended", node, terminal=True)


def kinds(reader: JournalReader, **query: Any) -> list[str]:
    return [stored.kind for stored in reader.read(**query)]


def test_resolved_batches_stand_in_the_order_of_the_appends(lives: Lives) -> None:
    journal = lives.open()
    futures = [journal.append([record(f"a{n}"), record(f"b{n}")]) for n in range(20)]
    assert [future.result(10) for future in futures] == [2 * n + 2 for n in range(20)]
    reader = lives.read(journal)
    assert [stored.seq for stored in reader.read()] == list(range(1, 41))
    assert kinds(reader) == [f"{letter}{n}" for n in range(20) for letter in "ab"]
    assert reader.last_seq() == 40


def test_a_record_is_read_back_as_it_was_written(lives: Lives) -> None:
    journal = lives.open()
    data = {"text": "caf\u00e9 \ud800", "list": [1, 2.5, None, True], "nested": {"a": {}}}
    written = JournalRecord("run_ended", "run_9", "turn_9", 1_700_000_000_123, data, terminal=True)
    journal.append([written]).result(10)
    (stored,) = lives.read(journal).read()
    assert (stored.seq, stored.epoch, stored.terminal) == (1, 1, True)
    assert stored.record == written


def test_data_changed_after_the_append_changes_nothing(lives: Lives) -> None:
    journal = lives.open()
    data = {"n": 1}
    future = journal.append([record(data=data)])
    data["n"] = 2
    future.result(10)
    (stored,) = lives.read(journal).read()
    assert stored.data == {"n": 1}


def test_an_empty_batch_waits_for_everything_before_it(lives: Lives) -> None:
    journal = lives.open()
    assert journal.append([]).result(10) == 0
    first = journal.append([record(), record()])
    assert journal.append([]).result(10) == 2
    assert first.done()


@pytest.mark.requirement("B22")
def test_a_second_end_refuses_its_own_batch_and_no_other(lives: Lives) -> None:
    journal = lives.open()
    first = journal.append([end("run_1")])
    second = journal.append([record("late"), end("run_1"), record("later")])
    third = journal.append([end("run_2")])
    assert first.result(10) == 1
    with pytest.raises(DuplicateTerminalEvent, match="'run_1'") as refused:
        second.result(10)
    assert cast(Any, refused.value).node_id == "run_1"
    assert third.result(10) == 2
    assert kinds(lives.read(journal)) == ["run_ended", "run_ended"]


@pytest.mark.requirement("B22")
def test_two_ends_of_one_node_in_one_batch_are_refused(lives: Lives) -> None:
    journal = lives.open()
    with pytest.raises(DuplicateTerminalEvent, match="'run_2'"):
        journal.append([end("run_1"), end("run_2"), end("run_2")]).result(10)
    assert journal.append([end("run_1")]).result(10) == 1


@pytest.mark.requirement("B22")
def test_a_storm_of_ends_from_many_threads_leaves_one_for_each_node(lives: Lives) -> None:
    journal = lives.open()
    start = threading.Barrier(4)
    won: list[str] = []

    def storm() -> None:
        start.wait(10)
        futures = [(f"run_{n}", journal.append([record("before", f"run_{n}"), end(f"run_{n}")])) for n in range(50)]
        won.extend(node for node, future in futures if future.exception(10) is None)

    threads = [threading.Thread(target=storm) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(f"run_{n}" for n in range(50))
    stored = list(lives.read(journal).read())
    assert [one.seq for one in stored] == list(range(1, 101))
    assert sorted(one.node_id for one in stored if one.terminal) == sorted(won)


@pytest.mark.requirement("B22")
def test_an_end_in_an_earlier_life_still_counts(lives: Lives) -> None:
    first = lives.open()
    first.append([end("run_1")]).result(10)
    first.close()
    second = lives.open()
    with pytest.raises(DuplicateTerminalEvent):
        second.append([end("run_1")]).result(10)


@pytest.mark.requirement("D24")
def test_each_life_has_a_larger_epoch_and_goes_on_counting(lives: Lives) -> None:
    for life in (1, 2, 3):
        journal = lives.open()
        assert journal.epoch == life
        assert journal.append([record()]).result(10) == life
        reader = lives.read(journal)
        assert reader.epoch() == life
        assert [stored.epoch for stored in reader.read()] == list(range(1, life + 1))
        journal.close()


@pytest.mark.requirement("D24")
def test_there_is_one_writer_at_a_time(lives: Lives) -> None:
    journal = lives.open()
    reader = lives.read(journal)
    assert reader.writer_alive()
    with pytest.raises(JournalBusy):
        lives.open()
    journal.append([record()]).result(10)
    journal.close()
    assert not reader.writer_alive()
    assert lives.open().epoch == 2
    assert reader.writer_alive()


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (record(data={"n": float("nan")}), "is not JSON"),
        (record(data={"n": object()}), "is not JSON"),
        (record(data=cast(Any, None)), "is not JSON"),
        (record(kind=cast(Any, None)), "ASCII"),
        (record(node="caf\u00e9"), "ASCII"),
        (record(at=cast(Any, 1.5)), "at_unix_ms"),
        (record(at=2**63), "at_unix_ms"),
        (record(payload=cast(Any, "text")), "payload"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_queued(lives: Lives, bad: JournalRecord, text: str) -> None:
    journal = lives.open()
    with pytest.raises(InvalidArgument, match=text):
        journal.append([record(), bad])
    assert journal.append([]).result(10) == 0


def test_reading_selects_by_place_node_turn_kind_and_number(lives: Lives) -> None:
    journal = lives.open()
    batch = [record(f"k{n % 3}", f"run_{n % 2}", f"turn_{n % 5}") for n in range(1200)]
    journal.append(batch).result(10)
    reader = lives.read(journal)

    def places(**query: Any) -> list[int]:
        return [stored.seq for stored in reader.read(**query)]

    every = range(1, 1201)
    assert places() == list(every)
    assert places(after_seq=1190) == list(range(1191, 1201))
    assert places(after_seq=5000) == []
    assert places(limit=0) == []
    assert places(limit=750) == list(range(1, 751))
    assert places(node_id="run_1") == [seq for seq in every if (seq - 1) % 2 == 1]
    assert places(turn_id="turn_3", after_seq=100, limit=3) == [104, 109, 114]
    assert places(kinds=["k0", "k2"]) == [seq for seq in every if (seq - 1) % 3 != 1]
    assert places(kinds=[]) == []
    assert places(node_id="run_0", turn_id="turn_1", kinds={"k0"}, limit=1) == [7]
    for bad in ({"after_seq": -1}, {"limit": -1}):
        with pytest.raises(InvalidArgument):
            reader.read(**cast(Any, bad))


def test_the_latest_payload_is_read_apart_from_its_record(lives: Lives) -> None:
    journal = lives.open()
    journal.append([record("result", payload=b"old"), record("other", payload=b"other")])
    journal.append([record("result", payload=b""), record("result"), record("result", "run_2", payload=b"two")])
    journal.append([]).result(10)
    reader = lives.read(journal)
    assert reader.payload("run_1", "result") == b""
    assert reader.payload("run_2", "result") == b"two"
    assert reader.payload("run_3", "result") is None
    assert all(stored.record.payload is None for stored in reader.read())


def test_a_closed_journal_has_written_everything_and_takes_nothing_more(lives: Lives) -> None:
    journal = lives.open()
    reader = lives.read(journal)
    futures = [journal.append([record()]) for _ in range(100)]
    journal.close()
    journal.close()
    assert [future.result(0) for future in futures] == list(range(1, 101))
    with pytest.raises(JournalError, match="is closed"):
        journal.append([record()]).result(0)
    assert reader.last_seq() == 100


def test_a_closed_reader_says_so(lives: Lives) -> None:
    journal = lives.open()
    journal.append([record()]).result(10)
    reader = lives.read(journal)
    reader.close()
    reader.close()
    uses: list[Callable[[], object]] = [
        reader.read,
        reader.last_seq,
        reader.epoch,
        reader.writer_alive,
        lambda: reader.payload("run_1", "result"),
    ]
    for use in uses:
        with pytest.raises(JournalError, match="closed"):
            use()


def test_a_waiter_that_is_cancelled_takes_nothing_back(lives: Lives) -> None:
    journal = lives.open()

    async def append_and_stop_waiting() -> None:
        future = journal.append([record("kept")])
        assert not future.cancel()
        waiter = asyncio.wrap_future(future)
        waiter.cancel()
        await asyncio.wait([waiter])

    asyncio.run(append_and_stop_waiting())
    journal.append([]).result(10)
    assert kinds(lives.read(journal)) == ["kept"]


def test_a_callback_may_append_and_close(lives: Lives) -> None:
    journal = lives.open()
    done = threading.Event()
    second: list[int] = []

    def then_note(future: Future[int]) -> None:
        second.append(future.result())
        done.set()

    def then_close(_: object) -> None:
        journal.append([record("second")]).add_done_callback(then_note)
        journal.close()

    journal.append([record("first")]).add_done_callback(then_close)
    assert done.wait(10)
    assert second == [2]


def test_the_latest_snapshot_is_kept_with_its_place_also_for_the_next_life(lives: Lives) -> None:
    journal = lives.open()
    reader = lives.read(journal)
    assert reader.snapshot() is None
    first = journal.append([record(), record()]).result(10)
    journal.save_snapshot(first, b"one")
    journal.append([record()])
    second = journal.append([record()]).result(10)
    assert journal.save_snapshot(second, b"two\0").result(10) == 4
    journal.close()
    for source in (reader, lives.read(lives.open())):
        snapshot = source.snapshot()
        assert snapshot is not None
        assert (snapshot.seq, snapshot.data) == (4, b"two\0")
        assert source.base() == 0


def test_a_snapshot_goes_with_the_batches_of_its_group_and_not_with_a_refused_one(lives: Lives) -> None:
    journal = lives.open()
    journal.append([end("run_1")]).result(10)
    futures = [journal.append([end("run_1")]), journal.save_snapshot(1, b"kept"), journal.append([record()])]
    assert isinstance(futures[0].exception(10), DuplicateTerminalEvent)
    assert futures[2].result(10) == 2
    snapshot = lives.read(journal).snapshot()
    assert snapshot is not None
    assert snapshot.data == b"kept"


def test_ended_turns_come_latest_first_and_ended_nodes_are_found_by_a_part_of_their_id(lives: Lives) -> None:
    journal = lives.open()
    journal.append([record("turn_ended", f"turn_{n}", f"turn_{n}", terminal=True) for n in (1, 2)])
    journal.append([record("run_ended", "run_a%b", "turn_1", terminal=True), record("run_started", "run_live")])
    journal.append([record("turn_ended", "turn_3", "turn_3", terminal=True)]).result(10)
    reader = lives.read(journal)
    assert reader.ended_turns() == ["turn_3", "turn_2", "turn_1"]
    assert reader.ended_turns(limit=1) == ["turn_3"]
    assert reader.find_ended("run_a%b", limit=5) == reader.find_ended("a%b", limit=5) == [("run_a%b", "turn_1")]
    assert sorted(reader.find_ended("turn_", limit=5)) == [(f"turn_{n}", f"turn_{n}") for n in (1, 2, 3)]
    assert len(reader.find_ended("turn_", limit=2)) == 2
    assert reader.find_ended("run_live", limit=5) == reader.find_ended("r%", limit=5) == []


def test_a_payload_of_what_has_not_ended_is_found_too(lives: Lives) -> None:
    journal = lives.open()
    journal.append([record("run_progressed", payload=b"one"), record("run_progressed", payload=b"two")]).result(10)
    reader = lives.read(journal)
    assert reader.payload("run_1", "run_progressed") == b"two"
    journal.append([record("run_ended", terminal=True, payload=b"end")]).result(10)
    assert reader.payload("run_1", "run_progressed") == b"two"
    assert reader.payload("run_1", "run_ended") == b"end"
    assert reader.payload("run_1", "run_started") is None
    assert [one.kind for one in reader.read(node_id="run_1")] == ["run_progressed"] * 2 + ["run_ended"]
