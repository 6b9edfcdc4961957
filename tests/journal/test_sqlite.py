from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from remit.core.errors import DuplicateTerminalEvent, JournalBusy, JournalError
from remit.journal import JournalRecord, SqliteJournal, SqliteJournalReader
from remit.journal.ownership import lock_path


def record(kind: str = "run_started", node: str = "run_1", *, terminal: bool = False) -> JournalRecord:
    return JournalRecord(kind, node, "turn_1", 1, {}, terminal)


class Gate:
    """A failpoint that holds the writer thread at its first `before_begin`, until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, point: str) -> None:
        if point == "before_begin":
            self.reached.set()
            assert self.opened.wait(20)


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("bits", [0o000, 0o077, 0o777])
def test_files_and_folders_are_for_this_user_only_whatever_the_umask(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "a" / "b" / "journal.db"
    with umask(bits), closing(SqliteJournal.open(path)) as journal:
        journal.append([record()]).result(10)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(["journal.db", "journal.db-wal", "journal.db-shm", "journal.db.lock"], 0o600)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]


def test_every_commit_waits_for_fsync_of_a_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        settings = {
            name: journal._connection.query(f"PRAGMA {name}")[0][0]
            for name in ("journal_mode", "synchronous", "fullfsync")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1}


def test_what_queues_up_during_one_commit_goes_into_the_next_together(tmp_path: Path) -> None:
    gate = Gate()
    with closing(SqliteJournal.open(tmp_path / "journal.db", failpoint=gate)) as journal:
        first = journal.append([record()])
        assert gate.reached.wait(10)
        others = [journal.append([record(), record()]) for _ in range(50)]
        assert journal.statistics().queued == 50
        gate.opened.set()
        assert first.result(10) == 1
        assert [future.result(10) for future in others] == list(range(3, 103, 2))
        journal.append([]).result(10)
        done = journal.statistics()
    assert (done.commits, done.batches, done.records, done.refused, done.queued) == (2, 51, 101, 0, 0)


@pytest.mark.requirement("B22")
def test_a_second_end_in_a_group_takes_no_other_batch_down(tmp_path: Path) -> None:
    gate = Gate()
    with closing(SqliteJournal.open(tmp_path / "journal.db", failpoint=gate)) as journal:
        journal.append([record("run_ended", "run_0", terminal=True)])
        assert gate.reached.wait(10)
        nodes = ["run_1", "run_2", "run_1", "run_0", "run_3"]
        futures = [journal.append([record(), record("run_ended", node, terminal=True)]) for node in nodes]
        gate.opened.set()
        errors = [future.exception(10) for future in futures]
        journal.append([]).result(10)
        assert journal.statistics().commits == 2
        assert journal.statistics().refused == 2
        assert [isinstance(error, DuplicateTerminalEvent) for error in errors] == [False, False, True, True, False]
        assert [future.result() for future in futures if not future.exception()] == [3, 5, 7]
        with closing(journal.reader()) as reader:
            assert [stored.seq for stored in reader.read()] == list(range(1, 8))


@pytest.mark.requirement("B22")
def test_the_file_itself_refuses_a_second_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        journal.append([record("run_ended", terminal=True)]).result(10)
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("INSERT INTO events VALUES (2, 1, 1, 'run_ended', 'run_1', 'turn_1', 1, '{}', NULL)")


@pytest.mark.requirement("D24")
def test_a_second_writer_is_told_which_process_has_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)), pytest.raises(JournalBusy, match=f"process {os.getpid()};") as busy:
        SqliteJournal.open(path)
    assert (busy.value.__dict__["holder_pid"], busy.value.__dict__["holder_epoch"]) == (os.getpid(), 1)


@pytest.mark.requirement("D24")
def test_a_refused_second_writer_leaves_readers_and_the_writer_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal, closing(journal.reader()) as reader:
        with pytest.raises(JournalBusy):
            SqliteJournal.open(path)
        assert reader.writer_alive()
        assert journal.append([record()]).result(10) == reader.last_seq() == 1
        assert reader.epoch() == 1


def test_a_lock_file_that_says_nothing_still_locks(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)):
        lock_path(path).write_bytes(b"")
        with pytest.raises(JournalBusy, match="another process"):
            SqliteJournal.open(path)


@pytest.mark.parametrize("closed", [False, True])
def test_another_process_reads_with_and_without_a_living_writer(tmp_path: Path, closed: bool) -> None:
    path = tmp_path / "journal.db"
    program = (
        "import sys; from remit.journal import SqliteJournalReader as R; r = R.open(sys.argv[1]);"
        "print(r.last_seq(), r.epoch(), r.writer_alive(), [s.kind for s in r.read()]); r.close()"
    )
    with closing(SqliteJournal.open(path)) as journal:
        journal.append([record("a"), record("b")]).result(10)
        if closed:
            journal.close()
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"2 1 {not closed} ['a', 'b']\n"


def test_a_reader_that_stops_halfway_sees_what_was_added_since(tmp_path: Path) -> None:
    with closing(SqliteJournal.open(tmp_path / "journal.db")) as journal, closing(journal.reader()) as reader:
        journal.append([record()] * 500).result(10)
        records = reader.read()
        assert next(records).seq == 1
        journal.append([record()] * 700).result(10)
        assert [stored.seq for stored in records] == list(range(2, 1201))


def test_closing_folds_the_log_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        journal.append([record()]).result(10)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal.db", "journal.db.lock"]


def test_a_reader_in_the_way_does_not_hold_up_the_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal, closing(sqlite3.connect(path, isolation_level=None)) as other:
        journal.append([record()]).result(10)
        other.execute("BEGIN")
        other.execute("SELECT * FROM events").fetchall()
        journal.append([record()]).result(10)
        journal.close()
        other.execute("COMMIT")
        with closing(SqliteJournalReader.open(path)) as reader:
            assert reader.last_seq() == 2


def no_database(path: Path) -> None:
    path.write_bytes(b"this is a text, not a database, and long enough to be read as one" * 20)


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE meta (name TEXT, value TEXT)")
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.commit()


def newer_format(path: Path) -> None:
    SqliteJournal.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'format_version'")
        connection.commit()


def unversioned(path: Path) -> None:
    SqliteJournal.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = 'x' WHERE name = 'format_version'")
        connection.commit()


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (no_database, r"is damaged or not a journal .*; move it aside"),
        (foreign_database, "is a database but not a journal"),
        (newer_format, "has format 99, this version knows formats up to 2"),
        (unversioned, "is a database but not a journal"),
    ],
)
def test_a_file_that_is_no_journal_of_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "journal.db"
    make(path)
    before = path.read_bytes()
    for opener in (SqliteJournal.open, SqliteJournalReader.open):
        with pytest.raises(JournalError, match=text):
            opener(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "x" / "journal.db", Path("/proc/self/no/journal.db")):
        with pytest.raises(JournalError, match=r"cannot write the journal .*; see that .* is a folder that this user"):
            SqliteJournal.open(path)
    folder(tmp_path / "journal.db")
    with pytest.raises(JournalError, match="cannot write the journal"):
        SqliteJournal.open(tmp_path / "journal.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError, match="cannot write the journal"):
        SqliteJournal.open(tmp_path / "journal.db")


def test_a_reader_makes_nothing_where_there_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with pytest.raises(JournalError, match="there is no journal at"):
        SqliteJournalReader.open(path)
    assert list(tmp_path.iterdir()) == []
    path.touch()
    with pytest.raises(JournalError, match="there is nothing in the journal"):
        SqliteJournalReader.open(path)


def test_a_path_with_signs_of_an_address_is_a_plain_path(tmp_path: Path) -> None:
    path = tmp_path / "50% of #1? yes&no" / "journal.db"
    with closing(SqliteJournal.open(path)) as journal, closing(journal.reader()) as reader:
        journal.append([record()]).result(10)
        assert reader.last_seq() == 1
    assert journal.path == path
    assert path.is_file()


def test_damage_that_shows_while_reading_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal.open(path).close()
    with closing(SqliteJournalReader.open(path)) as reader:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DROP TABLE events")
        with pytest.raises(JournalError, match="cannot read the journal"):
            reader.last_seq()


def test_a_journal_copied_without_its_lock_file_has_no_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal.open(path).close()
    lock_path(path).unlink()
    with closing(SqliteJournalReader.open(path)) as reader:
        assert not reader.writer_alive()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_journal_whose_file_was_taken_away_promises_nothing_more(tmp_path: Path, *, is_replaced: bool) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        journal.append([record()]).result(10)
        path.rename(tmp_path / "elsewhere")
        if is_replaced:
            path.touch()
        for node in ("run_2", "run_3"):
            with pytest.raises(JournalError, match="removed or replaced"):
                journal.append([record(node=node)]).result(10)
