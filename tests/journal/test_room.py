"""The room that a journal takes for its log at once: faster, and never in the way."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from remit.journal import JournalRecord, SqliteJournal, SqliteJournalReader, open_journal

ROOM = 32 + 4000 * (4096 + 24)


def records(count: int, begin: int = 0) -> list[JournalRecord]:
    return [
        JournalRecord("run_started", f"run_{begin + n}", "turn_1", 1, {"text": "x" * 500}, False) for n in range(count)
    ]


def stored(path: Path) -> list[str]:
    with closing(SqliteJournalReader.open(path)) as reader:
        return [record.node_id for record in reader.read()]


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def test_the_log_has_its_length_from_the_start_and_keeps_it_round_after_round(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(open_journal(path, with_room=True)) as journal:
        assert log_of(path).stat().st_size == ROOM
        for begin in range(0, 40_000, 10_000):  # 28 MB, in so many commits at least
            journal.append(records(10_000, begin)).result(60)
        # More than one round: what was full was folded into the file, and begun again from the front.
        assert path.stat().st_size > 2_000_000
        for number in range(50):
            journal.append(records(1, 40_000 + number)).result(10)
        assert stored(path) == [f"run_{n}" for n in range(40_050)]
    assert stored(path) == [f"run_{n}" for n in range(40_050)]
    assert not log_of(path).exists() or log_of(path).stat().st_size == 0


def test_what_is_in_a_log_with_room_outlives_a_crash(tmp_path: Path) -> None:
    path, copy = tmp_path / "journal.db", tmp_path / "copy" / "journal.db"
    copy.parent.mkdir(mode=0o700)
    with closing(SqliteJournal.open(path, with_room=True)) as journal:
        journal.append(records(30)).result(10)
        for name in ("", "-wal"):  # as the disk has it when the power fails
            shutil.copyfile(path.with_name(path.name + name), copy.with_name(copy.name + name))
    assert stored(copy) == [f"run_{n}" for n in range(30)]
    with closing(SqliteJournal.open(copy, with_room=True)) as journal:
        assert journal.epoch == 2
        journal.append(records(1, 30)).result(10)
    assert stored(copy) == [f"run_{n}" for n in range(31)]
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_disk_without_room_keeps_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if len(data) < 1_000:  # the writer signs its lock in this way
            return real(descriptor, data, at)
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(at)
        return real(descriptor, data, at)

    real = os.pwrite
    path = tmp_path / "journal.db"
    monkeypatch.setattr(os, "pwrite", pwrite)
    with closing(SqliteJournal.open(path, with_room=True)) as journal:
        assert 0 < log_of(path).stat().st_size == written[0]
        journal.append(records(10)).result(10)
        assert stored(path) == [f"run_{n}" for n in range(10)]


def test_a_reader_that_was_there_before_sees_everything(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SqliteJournal.open(path)) as journal:
        journal.append(records(3)).result(10)
    with closing(SqliteJournalReader.open(path)) as reader:
        assert len(list(reader.read())) == 3
        with closing(SqliteJournal.open(path, with_room=True)) as journal:
            journal.append(records(3, 3)).result(10)
            assert [record.node_id for record in reader.read()] == [f"run_{n}" for n in range(6)]


def test_nobody_takes_room_who_did_not_ask_for_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(open_journal(path)):
        assert log_of(path).stat().st_size < 1_000_000
