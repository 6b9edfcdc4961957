"""The disk and the process fail at every point of a commit; what was promised stays true.

The loop is that of SQLite's own tests: fail the first operation, then the second,
and so on until a run gets through (https://www.sqlite.org/testing.html, section 3).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path

import pytest

from remit.core.errors import JournalBusy, JournalError
from remit.journal import JournalRecord, SqliteJournal, SqliteJournalReader
from remit.journal.sqlite import FAILPOINTS

BATCH = 3


def batch(number: int) -> list[JournalRecord]:
    """Return three records of which the last ends a node of its own."""
    node = f"run_{number}"
    return [JournalRecord(f"part_{n}", node, "turn_1", 1, {"batch": number}, n == BATCH - 1) for n in range(BATCH)]


def whole_batches(path: Path) -> list[int]:
    """Return the batches in a journal, in order, having checked that each is whole."""
    with closing(SqliteJournalReader.open(path)) as reader:
        stored = list(reader.read())
    assert [one.seq for one in stored] == list(range(1, len(stored) + 1))
    numbers = [stored[at].data["batch"] for at in range(0, len(stored), BATCH)]
    expected = [(f"part_{n}", number) for number in numbers for n in range(BATCH)]
    assert [(one.kind, one.data["batch"]) for one in stored] == expected
    return numbers


def fail_at(nth: int) -> tuple[Callable[[str], None], list[str]]:
    """Return a failpoint that raises at its nth call, and the list of the points reached."""
    reached: list[str] = []

    def failpoint(point: str) -> None:
        reached.append(point)
        if len(reached) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")

    return failpoint, reached


@pytest.mark.requirement("F14")
def test_an_error_of_the_disk_at_any_point_breaks_no_promise(tmp_path: Path) -> None:
    last = len(FAILPOINTS) * 3 + 1
    reached: list[str] = []
    for nth in range(1, last + 1):
        path = tmp_path / f"{nth}.db"
        failpoint, reached = fail_at(nth)
        with closing(SqliteJournal.open(path, failpoint=failpoint)) as journal:
            futures = [journal.append(batch(0))]
            futures[0].exception(10)
            futures += [journal.append(batch(number)) for number in (1, 2)]
            kept = [number for number, future in enumerate(futures) if future.exception(10) is None]
            if len(reached) < nth:
                assert kept == [0, 1, 2]
                continue
            first = next(future.exception() for future in futures if future.exception())
            assert isinstance(first, JournalError)
            assert "has failed and takes nothing more: [Errno 28]" in str(first)
            again = journal.append(batch(9)).exception(0)
            assert again is not first
            assert str(again) == str(first)
            found = whole_batches(path)
            assert found[: len(kept)] == kept
            with pytest.raises(JournalBusy):
                SqliteJournal.open(path)
        with closing(SqliteJournal.open(path)) as journal:
            assert whole_batches(path) == found
            for number in {0, 1, 2} - set(found):
                journal.append(batch(number)).result(10)
        assert sorted(whole_batches(path)) == [0, 1, 2]
    assert len(reached) < last


def test_whatever_ends_the_writer_thread_everyone_who_waits_hears_of_it(tmp_path: Path) -> None:
    def give_up(point: str) -> None:
        raise SystemExit(point)

    with closing(SqliteJournal.open(tmp_path / "journal.db", failpoint=give_up)) as journal:
        futures = [journal.append(batch(number)) for number in range(5)]
        for future in futures:
            with pytest.raises(JournalError, match="has failed"):
                future.result(10)


def test_a_disk_that_does_not_answer_bounds_the_closing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    reached, answer = threading.Event(), threading.Event()

    def hang(point: str) -> None:
        if point == "before_commit":
            reached.set()
            assert answer.wait(20)

    journal = SqliteJournal.open(path, failpoint=hang)
    under_way = journal.append(batch(0))
    assert reached.wait(10)
    queued = journal.append(batch(1))
    with pytest.raises(JournalError, match=r"did not answer within 0.01 s .*; 1 queued batches were not written"):
        journal.close(timeout_s=0.01)
    with pytest.raises(JournalError, match="this batch was not written"):
        queued.result(0)
    with pytest.raises(JournalBusy):
        SqliteJournal.open(path)
    answer.set()
    assert under_way.result(10) == BATCH
    journal.close()
    assert whole_batches(path) == [0]
    SqliteJournal.open(path).close()


CHILD = """
import os, resource, signal, sys
from remit.journal import JournalRecord, SqliteJournal
path, point, nth, file_limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
left = nth
def failpoint(name):
    global left
    if name == point:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
journal = SqliteJournal.open(path, failpoint=failpoint)
def tell(number):
    def resolved(future):
        word = "no" if future.exception() else "yes"
        os.write(1, f"{word} {number}\\n".encode())
    return resolved
window = []
for number in range(100_000):
    node = f"run_{number}"
    records = [JournalRecord(f"part_{n}", node, "turn_1", 1, {"batch": number}, n == 2, b"x" * 400) for n in range(3)]
    future = journal.append(records)
    future.add_done_callback(tell(number))
    window.append(future)
    if len(window) == 8:
        if window.pop(0).exception():
            break
os._exit(0)
"""


def start_child(path: Path, *, point: str = "never", nth: int = 0, file_limit: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(path), point, str(nth), str(file_limit)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def promised(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("yes ")]


def check_after_death(path: Path, acknowledged: list[int]) -> None:
    """Check the file as a reader finds it, then as the next writer does."""
    found = whole_batches(path)
    assert found == list(range(len(found)))
    assert acknowledged == found[: len(acknowledged)]
    with closing(SqliteJournalReader.open(path)) as reader:
        assert not reader.writer_alive()
    with closing(SqliteJournal.open(path)) as journal:
        assert journal.epoch == 2
        assert whole_batches(path) == found
        assert journal._connection.query("PRAGMA integrity_check") == [("ok",)]
        journal.append(batch(len(found))).result(10)


@pytest.mark.requirement("D24")
@pytest.mark.requirement("F14")
@pytest.mark.parametrize("point", FAILPOINTS)
def test_a_writer_killed_at_a_point_of_a_commit_loses_nothing_that_was_promised(tmp_path: Path, point: str) -> None:
    path = tmp_path / "journal.db"
    child = start_child(path, point=point, nth=5)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert promised(output)
    check_after_death(path, promised(output))


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("batches", [40, 2000])
def test_a_writer_killed_from_outside_loses_nothing_that_was_promised(tmp_path: Path, batches: int) -> None:
    """With 2,000 batches the write-ahead log has been folded into the file at least once."""
    path = tmp_path / "journal.db"
    child = start_child(path)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(batches)]
    child.kill()
    # The rest comes from the same reader: it has read ahead, and what it holds is promised too.
    lines += child.stdout.readlines()
    child.communicate(timeout=30)
    check_after_death(path, promised("".join(lines)))


def test_a_full_disk_refuses_what_it_cannot_keep_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    child = start_child(path, file_limit=300_000)
    output, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "no " in output
    assert promised(output)
    check_after_death(path, promised(output))


@pytest.mark.requirement("F14")
def test_a_torn_end_of_the_log_takes_only_whole_batches_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        for number in range(6):
            journal.append(batch(number)).result(10)
        snapshot = (path.read_bytes(), path.with_name("journal.db-wal").read_bytes())
    database, log = snapshot
    seen: set[int] = set()
    for cut in range(0, len(log), 3001):
        torn = tmp_path / f"torn{cut}" / "journal.db"
        torn.parent.mkdir()
        torn.write_bytes(database)
        torn.with_name("journal.db-wal").write_bytes(log[: len(log) - cut])
        found: list[int] = []
        # Where so much is gone that not even the tables are there, the reader says so.
        with suppress(JournalError):
            found = whole_batches(torn)
        assert found == list(range(len(found)))
        seen.add(len(found))
        SqliteJournal.open(torn).close()
        assert whole_batches(torn) == found
        shutil.rmtree(torn.parent)
    assert {0, 5, 6} <= seen


def test_a_foreign_row_in_the_way_stops_the_writer(tmp_path: Path) -> None:
    """Somebody who writes past the lock has taken our next place: we are not alone, so nothing may go on."""
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        program = (
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]);"
            "c.execute(\"INSERT INTO events VALUES (1, 1, 1, 'x', 'n', 't', 0, '{}', NULL)\"); c.commit(); c.close()"
        )
        subprocess.run([sys.executable, "-c", program, str(path)], check=True)
        failed: Future[int] = journal.append(batch(0))
        with pytest.raises(JournalError, match="has failed"):
            failed.result(10)
        with pytest.raises(JournalError, match="has failed"):
            journal.append([]).result(10)


def test_a_failed_opening_lets_go_of_everything(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"not a database at all, but long enough to be taken for one" * 20)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with pytest.raises(JournalError):
            SqliteJournal.open(path)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before
    path.unlink()
    SqliteJournal.open(path).close()
