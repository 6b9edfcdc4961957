"""The seam between the journal and a database: one connection, and the words that all databases share.

Writer, reader and retention are written once, against `Connection`. SQL is the
part of the language that SQLite and PostgreSQL share, with `?` for values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from remit.core.errors import JournalError, JournalTooNew
from remit.core.events import EVENTS_VERSION

__all__ = ["EVENT_COLUMNS", "FORMAT_VERSION", "Connection", "EventRow", "check_format", "check_versions"]

FORMAT_VERSION = 2
"""Format of the tables that this version writes, and the newest that it reads.

1: `meta` (texts by name: `format_version`, `epoch`) and `events` (one row a record).
2: `epochs` (who wrote in which version of the events), `snapshots`, and `base` in
`meta`: the place up to which retention may have taken rows away.
"""

EVENT_COLUMNS = ("seq", "epoch", "at_unix_ms", "kind", "node_id", "turn_id", "terminal", "data", "payload")
"""Columns of `events`, in the order in which rows are handed over."""

EventRow: TypeAlias = "tuple[int, int, int, str, str, str, int, str, bytes | None]"
"""One row of `events`, by `EVENT_COLUMNS`."""


class Connection(Protocol):
    """One connection to one journal's database. Used by one thread at a time."""

    @property
    def where(self) -> str:
        """The journal's place, for people; holds no password."""
        ...

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Errors that mean: this row cannot be kept, the others can."""
        ...

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Carry out one statement and return its rows, if it has any."""
        ...

    def begin(self) -> None:
        """Begin a transaction that will write; outside of one, each statement is its own."""
        ...

    def insert(self, rows: Iterable[EventRow]) -> None:
        """Add rows to `events`."""
        ...

    def commit(self) -> None:
        """End the transaction; on return it is on the disk (fsync)."""
        ...

    def rollback(self) -> None:
        """Take the transaction back."""
        ...

    def check_place(self) -> None:
        """Raise an error if what is written can be found by nobody any more."""
        ...

    def tidy(self) -> None:
        """Leave things in order before `close`, after an orderly end only; nothing depends on it."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent; takes an open transaction back."""
        ...

    def explain(self, error: Exception, *, doing: str) -> JournalError:
        """Return an error of the database as one that says what to do.

        Args:
            error: what the database, or the file system, said; ours are returned as they are.
            doing: what was tried, as a verb.
        """
        ...


def check_format(found: str, where: str) -> int:
    """Return the number of a table format that this version can read.

    Args:
        found: text in `meta`.
        where: place of the journal, for people.

    Raises:
        JournalError: it is no format of ours.
        JournalTooNew: it is newer than this version.
    """
    if not found.isdecimal():
        raise JournalError(f"{where} is a database but not a journal; move it aside to begin a new one")
    if int(found) > FORMAT_VERSION:
        raise JournalTooNew(
            f"the journal {where} has format {found}, this version knows formats up to {FORMAT_VERSION}; "
            "install the newer remit that wrote it"
        )
    return int(found)


def check_versions(versions: Iterable[int], where: str) -> None:
    """Refuse a journal in which a newer version has written.

    Raises:
        JournalTooNew: there is a version above `EVENTS_VERSION`.
    """
    newest = max(versions, default=EVENTS_VERSION)
    if newest > EVENTS_VERSION:
        raise JournalTooNew(
            f"the journal {where} holds events of version {newest}, this version knows them up to {EVENTS_VERSION}; "
            "install the newer remit that wrote it"
        )
