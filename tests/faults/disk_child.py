"""The process in which the disk fails: the nth write or fsync, for every n until a scenario gets through.

Run with `disk_faults.c` preloaded. Prints one line of JSON: how many faults there
were, how many of them somebody was told of, and the sentences that were said.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from remit.core.errors import JournalError
from remit.journal import JournalRecord, SqliteJournal, SqliteJournalReader

BATCHES = 4
OPERATIONS = {"write": 1, "fsync": 2}


def batch(number: int) -> list[JournalRecord]:
    """Return three records of which the last ends a run."""
    node = f"run_{number}"
    return [JournalRecord(f"part_{n}", node, "turn_1", 1, {"batch": number}, n == 2, b"x" * 3000) for n in range(3)]


def scenario(path: Path) -> tuple[list[int], list[str]]:
    """Write batches, a snapshot between them; return what was promised and what was said."""
    promised: list[int] = []
    said: list[str] = []
    try:
        journal = SqliteJournal.open(path)
    except JournalError as error:
        return promised, [str(error)]
    try:
        for number in range(BATCHES):
            try:
                seq = journal.append(batch(number)).result(30)
                promised.append(number)
                if number == 1:
                    journal.save_snapshot(seq, b"state " * 500).result(30)
            except JournalError as error:
                said.append(str(error))
    finally:
        journal.close()
    return promised, said


def check(path: Path, promised: list[int], said: list[str]) -> None:
    """See that what is there is whole, holds all that was promised, and can be gone on with."""
    with closing(SqliteJournal.open(path)) as journal:
        assert journal._connection.query("PRAGMA integrity_check") == [("ok",)]
        with closing(journal.reader()) as reader:
            stored = list(reader.read())
            snapshot = reader.snapshot()
        assert [one.seq for one in stored] == list(range(1, len(stored) + 1))
        found = [one.data["batch"] for one in stored]
        numbers = sorted(set(found))
        assert found == sorted(numbers * 3), found
        assert set(promised) <= set(numbers), (promised, numbers)
        # After the first error nothing more was written.
        assert len(numbers) <= len(promised) + 1
        ends = [one.node_id for one in stored if one.terminal]
        assert ends == [f"run_{number}" for number in numbers]
        if len(promised) > 2:
            assert snapshot is not None
        assert snapshot is None or (snapshot.seq, snapshot.data) == (6, b"state " * 500)
        for number in set(range(BATCHES)) - set(numbers):
            journal.append(batch(number)).result(30)
    with closing(SqliteJournalReader.open(path)) as reader:
        assert len(reader.find_ended("run_", limit=99)) == BATCHES


def main(folder: Path, operation: str, forever: bool, existing: bool) -> dict[str, Any]:
    """Let each operation fail in turn; return the counts."""
    library = ctypes.CDLL(None)
    library.fault_disarm.restype = ctypes.c_long
    told = 0
    sentences: set[str] = set()
    for nth in range(1, 2_000):
        path = folder / f"{nth}" / "journal.db"
        if existing:
            # As left by a writer that was killed: with a write-ahead log that has to be read.
            path.parent.mkdir()
            SqliteJournal.open(path).close()
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("UPDATE meta SET value = value WHERE name = 'epoch'")
        number = errno.EIO if nth % 2 else errno.ENOSPC
        library.fault_arm(str(path).encode(), OPERATIONS[operation], ctypes.c_long(nth), int(forever), number)
        promised, said = scenario(path)
        seen = library.fault_disarm()
        check(path, promised, said)
        if seen < nth:
            assert promised == list(range(BATCHES)), promised
            assert not said
            return {"faults": nth - 1, "told": told, "sentences": sorted(sentences)}
        told += bool(said)
        # What nobody was told of must have kept every promise.
        assert said or promised == list(range(BATCHES))
        sentences.update(sentence.replace(str(path), "PATH").replace(str(path.parent), "FOLDER") for sentence in said)
    raise AssertionError("the scenario never got through")


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(main(Path(words[0]), words[1], words[2] == "forever", words[3] == "existing")))  # noqa: T201
