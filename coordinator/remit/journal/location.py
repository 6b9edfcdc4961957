"""Where a workspace's journal is: a file in its folder, or a database that a line in its folder names.

The choice belongs to the workspace and not to whoever opens it: two coordinators
with two opinions would each find a journal of which nobody else knows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from remit.core.errors import InvalidArgument, JournalError
from remit.journal.ownership import open_private
from remit.journal.reader import DatabaseReader, SqliteJournalReader
from remit.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from remit.journal.postgres import PostgresJournal, PostgresReader

__all__ = ["choose_journal", "is_url", "journal_exists", "journal_location", "open_journal", "open_reader"]

_URL_FILE = "journal.url"
_SCHEMES = ("postgresql://", "postgres://")


def journal_location(workspace: str | Path) -> Path | str:
    """Return the path of a workspace's journal file, or the URL that `choose_journal` has noted.

    Args:
        workspace: the workspace's folder.

    Raises:
        JournalError: there is a note and it cannot be read.
    """
    folder = Path(workspace) / ".remit"
    try:
        url = (folder / _URL_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return folder / "journal.db"
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(
            f"cannot read {str(folder / _URL_FILE)!r}, which says where the journal is: {error}"
        ) from error
    if not url.startswith(_SCHEMES):
        raise JournalError(f"{str(folder / _URL_FILE)!r} must hold one postgresql:// URL; remove it to use a file")
    return url


def choose_journal(workspace: str | Path, url: str) -> str:
    """Let a workspace keep its journal in a database from now on, and note so in its folder.

    What a journal file holds already is not carried over, so there must be none.

    Args:
        workspace: the workspace's folder.
        url: `postgresql://user@host/database`, with or without a password and `#schema`.
            Without a schema it gets one that is named after the workspace.

    Returns:
        The URL with its schema.

    Raises:
        InvalidArgument: it is no such URL, or the workspace has a journal already.
        JournalError: the note cannot be written.

    Durability: the note is on the disk; it is readable by its owner alone, for it may hold a password.
    """
    if not url.startswith(_SCHEMES):
        raise InvalidArgument("a journal's URL begins with postgresql://; without one the journal is a file")
    folder = Path(workspace).absolute() / ".remit"
    if (folder / "journal.db").exists():
        raise InvalidArgument(
            f"{str(workspace)!r} has a journal already, {str(folder / 'journal.db')!r}; "
            "move it aside to begin a new one"
        )
    if "#" not in url:
        url = f"{url}#{_schema_of(folder.parent)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = open_private(folder / _URL_FILE)
        with os.fdopen(fd, "r+") as file:
            file.truncate()
            file.write(f"{url}\n")
            file.flush()
            os.fsync(fd)
    except OSError as error:
        raise JournalError(f"cannot note the journal in {str(folder)!r}: {error}") from error
    return url


def _schema_of(workspace: Path) -> str:
    """Return a schema that no other workspace of this or another machine's path has by chance."""
    word = re.sub(r"[^a-z0-9]+", "_", workspace.name.lower()).strip("_")[:24]
    return f"remit_{word}_{hashlib.sha256(str(workspace).encode()).hexdigest()[:8]}"


def journal_exists(location: Path | str) -> bool:
    """Tell whether there may be something to read; of a database only reading itself can tell."""
    return isinstance(location, str) or location.exists()


def open_journal(
    location: Path | str, *, failpoint: Callable[[str], None] | None = None, with_room: bool = False
) -> SqliteJournal | PostgresJournal:
    """Own the journal at a path or URL, and make it if there is none.

    Args:
        location: path of a SQLite file, or a `postgresql://` URL.
        failpoint: see `SqliteJournal.open`.
        with_room: see `SqliteJournal.open`; a database server has its own ways.

    Raises:
        JournalBusy: another coordinator writes it.
        JournalTooNew: a newer version has written in it.
        JournalError: it cannot be written.
        InvalidArgument: the URL does not hold.

    Durability: the new epoch is on the disk.
    """
    if is_url(location):
        return _postgres()[0].open(str(location), failpoint=failpoint)
    return SqliteJournal.open(location, failpoint=failpoint, with_room=with_room)


def open_reader(location: Path | str) -> DatabaseReader:
    """Open the journal at a path or URL for reading.

    Raises:
        JournalTooNew: a newer version has written in it.
        JournalError: there is none, or it cannot be read; nothing was made.
        InvalidArgument: the URL does not hold.
    """
    return _postgres()[1].open(str(location)) if is_url(location) else SqliteJournalReader.open(location)


def is_url(location: Path | str) -> bool:
    """Tell whether a journal's place is a database and not a file."""
    return isinstance(location, str) and location.startswith(_SCHEMES)


def _postgres() -> tuple[type[PostgresJournal], type[PostgresReader]]:
    """Import what needs the extra.

    Raises:
        JournalError: it is not installed.
    """
    try:
        from remit.journal.postgres import PostgresJournal, PostgresReader
    except ImportError as error:
        raise JournalError(
            f"the journal is in PostgreSQL, and its client cannot be loaded ({error}); pip install 'remit[postgres]'"
        ) from error
    return PostgresJournal, PostgresReader
