"""What only PostgreSQL can break: servers that go away, passwords, schemas, URLs."""

from __future__ import annotations

import stat
from contextlib import closing
from pathlib import Path

import pytest

from remit.core.errors import InvalidArgument, JournalBusy, JournalError, JournalTooNew
from remit.journal import JournalRecord, choose_journal, journal_location, open_journal, open_reader
from tests.journal.postgres_server import Server


def batch(number: int) -> list[JournalRecord]:
    node = f"run_{number}"
    return [JournalRecord(f"part_{n}", node, "turn_1", 1, {"batch": number}, n == 2) for n in range(3)]


@pytest.mark.faults
@pytest.mark.requirement("F14")
def test_a_server_that_dies_takes_nothing_that_was_promised_and_no_half_batch(postgres_server: Server) -> None:
    url = postgres_server.url()
    with closing(open_journal(url)) as journal:
        promised = [number for number in range(5) if journal.append(batch(number)).result(30)]
        postgres_server.kill()
        try:
            error = journal.append(batch(5)).exception(30)
        finally:
            postgres_server.start()
        assert isinstance(error, JournalError)
        assert "has failed and takes nothing more" in str(error)
        assert isinstance(journal.append(batch(6)).exception(30), JournalError)
    with closing(open_journal(url)) as journal, closing(journal.reader()) as reader:
        assert journal.epoch == 2
        stored = list(reader.read())
        assert [one.seq for one in stored] == list(range(1, len(stored) + 1))
        numbers = [one.data["batch"] for one in stored]
        assert numbers == sorted([*promised] * 3)
        journal.append(batch(7)).result(30)


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(JournalError, match=r"cannot reach the journal 'postgresql://127.0.0.1/db#remit'") as told:
        open_journal("postgresql://ann:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(told.value)


def test_schemas_are_apart_and_one_that_is_not_there_is_not_made_by_looking(postgres_server: Server) -> None:
    one, two = postgres_server.url(), postgres_server.url()
    with (
        closing(open_journal(one)) as first,
        pytest.raises(JournalError, match="nothing has run in this workspace yet"),
    ):
        first.append(batch(1)).result(30)
        open_reader(two)
    with closing(open_journal(two)) as second:
        assert second.append(batch(1)).result(30) == 3


def test_the_holder_is_named_with_its_machine(postgres_server: Server) -> None:
    url = postgres_server.url()
    with closing(open_journal(url)), pytest.raises(JournalBusy, match=r"is written by process \d+ on .+; use") as busy:
        open_journal(url)
    assert busy.value.__dict__["holder_epoch"] == 1


def test_what_a_newer_version_wrote_is_refused(postgres_server: Server) -> None:
    import psycopg

    url = postgres_server.url()
    open_journal(url).close()
    address, _, schema = url.partition("#")
    with psycopg.connect(address) as connection:
        connection.execute(f"UPDATE {schema}.epochs SET events_version = 99".encode())
    for opener in (open_journal, open_reader):
        with pytest.raises(JournalTooNew, match="install the newer remit"):
            opener(url)


def test_a_workspace_notes_its_database_for_its_owner_alone(tmp_path: Path) -> None:
    url = choose_journal(tmp_path / ".", "postgresql://ann:pw@db/work")
    assert url.startswith("postgresql://ann:pw@db/work#remit_test_a_workspace_notes_")
    note = tmp_path / ".remit" / "journal.url"
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert journal_location(tmp_path) == url
    assert choose_journal(tmp_path, "postgresql://db/x#mine") == journal_location(tmp_path) == "postgresql://db/x#mine"


def test_a_workspace_that_has_a_file_keeps_it(tmp_path: Path) -> None:
    open_journal(journal_location(tmp_path)).close()
    with pytest.raises(InvalidArgument, match="has a journal already"):
        choose_journal(tmp_path, "postgresql://db/x")
    with pytest.raises(InvalidArgument, match="begins with postgresql://"):
        choose_journal(tmp_path, "mysql://db/x")


def test_a_note_that_does_not_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / ".remit").mkdir()
    (tmp_path / ".remit" / "journal.url").write_text("mysql://x\n")
    with pytest.raises(JournalError, match="must hold one postgresql:// URL; remove it to use a file"):
        journal_location(tmp_path)


def test_an_url_that_cannot_be_read_is_refused_before_anything(postgres_server: Server) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        open_journal("postgresql://db/x?what=1")
