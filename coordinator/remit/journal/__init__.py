"""The append-only record of everything that happened, and the only truth after a crash."""

from remit.journal.memory import MemoryJournal
from remit.journal.reader import SqliteJournalReader
from remit.journal.record import JournalRecord, StoredRecord
from remit.journal.sqlite import JournalStatistics, SqliteJournal
from remit.journal.store import Journal, JournalReader

__all__ = [
    "Journal",
    "JournalReader",
    "JournalRecord",
    "JournalStatistics",
    "MemoryJournal",
    "SqliteJournal",
    "SqliteJournalReader",
    "StoredRecord",
]
