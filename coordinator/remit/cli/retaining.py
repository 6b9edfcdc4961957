"""`remit gc` and `remit journal`: what is kept, where, and for how long."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path

from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.coordinator.retention import Collected, collect
from remit.coordinator.workspace import resolve_workspace
from remit.core.errors import InvalidArgument
from remit.journal import choose_journal, journal_exists, journal_location, open_reader

__all__ = ["collect_old", "seconds_of", "show_journal", "use_database"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def seconds_of(text: str) -> float:
    """Return an age such as `7d`, `12h`, `30m` or `90s` in seconds.

    Raises:
        InvalidArgument: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise InvalidArgument(f"--older-than must be a number with s, m, h, d or w, such as 7d; got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def collect_old(workspace: Path, older_than: str, *, dry_run: bool, as_json: bool) -> None:
    """Remove what ended long ago, and say what went.

    Raises:
        InvalidArgument: no such age, or no such workspace.
        JournalError: the journal cannot be read or written.
    """
    age_s = seconds_of(older_than)
    found = collect(resolve_workspace(workspace), older_than_s=age_s, now=time.time(), dry_run=dry_run)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "turns": found.turns,
                "runs": found.runs,
                "records": found.records,
                "output_bytes": found.output_bytes,
                "held": found.held,
            }
        )
        return
    print_lines(_lines(found, older_than, dry_run=dry_run))


def _lines(found: Collected, older_than: str, *, dry_run: bool) -> list[Line]:
    verb = "would remove" if dry_run else "removed"
    lines = [
        Line(
            f"{verb} {_count(len(found.turns), 'turn')} with {_count(found.runs, 'run')}: "
            f"{_count(found.records, 'record')}, {found.output_bytes / 1e6:.1f} MB of output"
        )
    ]
    if not found.turns:
        lines = [Line(f"nothing in this workspace ended more than {older_than} ago and may go")]
    if found.held:
        lines.append(
            Line(
                f"{_count(found.held, 'turn')} of that age held back: a coordinator is at work here and lets go "
                "of ended turns an hour after their end",
                "yellow",
            )
        )
    return lines


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def use_database(workspace: Path, url: str) -> None:
    """Keep the journal of a workspace in a database from now on.

    Raises:
        InvalidArgument: it is no such URL, or there is a journal already.
    """
    choose_journal(resolve_workspace(workspace), url)


def show_journal(workspace: Path, *, as_json: bool) -> None:
    """Say where the journal is and what is in it.

    Raises:
        JournalError: it cannot be read.
    """
    location = journal_location(resolve_workspace(workspace))
    told: dict[str, object] = {"path": str(location), "last_record": 0, "live": False}
    if isinstance(location, str):
        # The URL may hold a password.
        told["path"] = re.sub(r"(?<=://)([^/\s@:]*):[^/\s@]*@", r"\1:...@", location)
    if isinstance(location, Path) and journal_exists(location):
        told["bytes"] = sum(path.stat().st_size for path in location.parent.glob("journal.db*"))
    if isinstance(location, str) or journal_exists(location):
        with closing(open_reader(location)) as reader:
            snapshot = reader.snapshot()
            told |= {
                "last_record": max(reader.last_seq(), 0 if snapshot is None else snapshot.seq),
                "removed_up_to": reader.base(),
                "ended_turns": len(reader.ended_turns()),
                "snapshot_at": None if snapshot is None else snapshot.seq,
                "epoch": reader.epoch(),
                "live": reader.writer_alive(),
            }
    if as_json:
        print_json(told)
        return
    print_lines([Line(f"{name.replace('_', ' ')}: {value}") for name, value in told.items() if value is not None])
