from __future__ import annotations

import pytest

from remit.core.errors import JournalError
from remit.journal import JournalRecord, MemoryJournal


def record(kind: str) -> JournalRecord:
    return JournalRecord(kind, "run_1", "turn_1", 1, {})


def test_held_batches_become_durable_one_by_one_in_order() -> None:
    journal = MemoryJournal(hold=True)
    reader = journal.reader()
    first, second = journal.append([record("a")]), journal.append([record("b")])
    assert (first.done(), reader.last_seq(), journal.held) == (False, 0, 2)
    assert journal.release(1) == 1
    assert (first.result(0), second.done(), reader.last_seq(), journal.held) == (1, False, 1, 1)
    assert journal.release() == 1
    assert second.result(0) == 2
    assert journal.release() == 0


def test_a_crash_keeps_what_was_released_and_nothing_else() -> None:
    first = MemoryJournal(hold=True)
    kept, gone = first.append([record("kept")]), first.append([record("gone")])
    first.release(1)
    first.crash("the disk is full")
    assert kept.result(0) == 1
    for future in (gone, first.append([record("late")])):
        with pytest.raises(JournalError, match="the disk is full"):
            future.result(0)
    second = MemoryJournal(previous=first)
    assert second.epoch == 2
    second.append([record("next life")]).result(0)
    assert [stored.kind for stored in second.reader().read()] == ["kept", "next life"]
