"""The append-only record of everything that happened, and the only truth after a crash."""

from remit.journal.location import choose_journal, journal_exists, journal_location, open_journal, open_reader
from remit.journal.memory import MemoryJournal
from remit.journal.reader import SqliteJournalReader
from remit.journal.record import JournalRecord, StoredRecord, StoredSnapshot
from remit.journal.sqlite import SqliteJournal
from remit.journal.store import Journal, JournalReader
from remit.journal.writer import JournalStatistics

__all__ = [
    "Journal",
    "JournalReader",
    "JournalRecord",
    "JournalStatistics",
    "MemoryJournal",
    "SqliteJournal",
    "SqliteJournalReader",
    "StoredRecord",
    "StoredSnapshot",
    "choose_journal",
    "journal_exists",
    "journal_location",
    "open_journal",
    "open_reader",
]
