"""The journal without Ray: writing, looking, and recovery with a long past.

Writing stands beside the same rows put into the same tables by SQLite alone, which
is its limit: whatever keeps them must do that. Looking is the whole command in a
process of its own, `import` included. Recovery is what a restarted coordinator
does before it can answer: fold the latest snapshot and the records behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from table import Check, Result, parse_options, show

from remit.coordinator.evolve import evolve
from remit.coordinator.snapshot import encode, freeze
from remit.coordinator.state import WorkspaceState
from remit.core.events import (
    CoordinatorStarted,
    Event,
    HostBecameReady,
    HostRequested,
    RunAccepted,
    RunEnded,
    RunStarted,
    TurnAccepted,
    TurnEnded,
    TurnStarted,
    encode_event,
)
from remit.core.ids import IdFactory
from remit.journal import JournalRecord, SqliteJournal

IDS = IdFactory()
PAYLOAD = b"\x80\x05K\x05."
HOST = IDS.host()


def records(events: list[Event]) -> list[JournalRecord]:
    return [
        JournalRecord(
            event.kind,
            event.node_id,
            event.turn_id,
            int(event.at * 1000),
            encode_event(event),
            event.terminal,
            PAYLOAD if event.terminal else None,
        )
        for event in events
    ]


def begin(now: float) -> list[Event]:
    return [
        CoordinatorStarted(node_id="", turn_id="", at=now, epoch=1, pid=1),
        HostRequested(node_id=HOST, turn_id="", at=now),
        HostBecameReady(node_id=HOST, turn_id="", at=now, pid=1, machine="here"),
    ]


def turn_of(runs: int, now: float, *, ends: bool) -> Iterator[list[Event]]:
    """Yield the events of one turn in the batches in which a coordinator writes them."""
    turn = IDS.turn()
    yield [
        TurnAccepted(node_id=turn, turn_id=turn, at=now, session_id=turn, client_id="client_1", surface="python"),
        TurnStarted(node_id=turn, turn_id=turn, at=now),
    ]
    names = [IDS.run() for _ in range(runs)]
    shared = {"turn_id": turn, "at": now}
    yield [
        RunAccepted(
            node_id=name,
            parent_id=turn,
            agent="empty",
            client_id="client_1",
            env_key="e" * 32,
            arguments='{"i": 5}',
            **shared,  # type: ignore[arg-type]
        )
        for name in names
    ]
    yield [RunStarted(node_id=name, host_id=HOST, **shared) for name in names]  # type: ignore[arg-type]
    if ends:
        yield [RunEnded(node_id=name, attempt=1, preview="5", **shared) for name in names]  # type: ignore[arg-type]
        yield [TurnEnded(node_id=turn, turn_id=turn, at=now)]


def write(path: Path, count: int, batch: int) -> tuple[float, float]:
    """Return CPU seconds and wall seconds for the events of so many runs, in batches."""
    with closing(SqliteJournal.open(path)) as journal:
        journal.append(records(begin(time.time()))).result()
        batches = [events for _ in range(count // batch) for events in turn_of(batch, time.time(), ends=True)]
        cpu, wall = time.process_time(), time.perf_counter()
        futures = [journal.append(records(events)) for events in batches]
        futures[-1].result()
        return time.process_time() - cpu, time.perf_counter() - wall


def write_bare(source: Path, path: Path) -> tuple[float, float]:
    """Put the rows of a journal into another file of the same tables, in one transaction each thousand."""
    SqliteJournal.open(path).close()
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(path, isolation_level=None)) as new:
        rows = old.execute("SELECT * FROM events ORDER BY seq").fetchall()
        new.execute("PRAGMA synchronous = FULL")
        cpu, wall = time.process_time(), time.perf_counter()
        for at in range(0, len(rows), 1000):
            new.execute("BEGIN IMMEDIATE")
            new.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows[at : at + 1000])
            new.execute("COMMIT")
        return time.process_time() - cpu, time.perf_counter() - wall


def command(workspace: Path, *words: str) -> tuple[float, float]:
    """Return the CPU seconds and the wall seconds that one call of the command takes, its output read."""
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "remit", *words, "-w", str(workspace)], stdout=subprocess.PIPE, check=True
    )
    wall, after = time.perf_counter() - began, os.times()
    assert done.stdout
    own = after.children_user + after.children_system - before.children_user - before.children_system
    return own, wall


def commands(repeat: int, workspace: Path, *words: str) -> tuple[float, float]:
    """Return the medians of some calls."""
    found = [command(workspace, *words) for _ in range(repeat)]
    return statistics.median(each[0] for each in found), statistics.median(each[1] for each in found)


def fill_past(path: Path, runs: int, live: int) -> None:
    """Write a journal of so many ended runs and of live ones, as a coordinator that works leaves it."""
    now = time.time() - 30 * 86_400
    with closing(SqliteJournal.open(path)) as journal:
        journal.append(records(begin(now))).result()
        for _ in range(min(runs, 10_000) // 1_000):
            for events in turn_of(1_000, now, ends=True):
                journal.append(records(events))
        journal.append(()).result()
    multiply(path, runs // 10_000)
    with closing(SqliteJournal.open(path)) as journal:
        # What is in memory when the past has left it, and so in a snapshot: hosts and live runs.
        state = WorkspaceState()
        for event in begin(now):
            evolve(state, event)
        for events in turn_of(live, now, ends=False):
            journal.append(records(events))
            for event in events:
                evolve(state, event)
        seq = journal.append(()).result()
        journal.save_snapshot(seq, encode(freeze(state))).result()
        # A tail as long as a coordinator lets it become.
        for _ in range(3):
            for events in turn_of(1_000, time.time(), ends=True):
                journal.append(records(events))
        journal.append(()).result()


def multiply(path: Path, times: int) -> None:
    """Copy all turns of a journal under other names; writing a million one by one would take minutes."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (last,) = connection.execute("SELECT max(seq) FROM events").fetchone()
        for number in range(1, times):
            connection.execute(
                "INSERT INTO events SELECT seq + ?, epoch, at_unix_ms, kind, node_id || ?, turn_id || ?, terminal,"
                " replace(data, turn_id, turn_id || ?), payload FROM events WHERE seq <= ? AND turn_id <> ''",
                (number * last, *[f"x{number}"] * 3, last),
            )


RECOVER = """
import json, resource, sys, time
from remit.coordinator.folding import fold_journal
from remit.journal import SqliteJournal
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1024
before = resident()
began = time.perf_counter()
journal = SqliteJournal.open(sys.argv[1])
reader = journal.reader()
folded = fold_journal(reader)
took = time.perf_counter() - began
reader.close(); journal.close()
grown = resident() - before
print(json.dumps([took, grown, len(folded.state.nodes), folded.state.live_runs, folded.tail]))
"""


def recover(path: Path) -> tuple[float, float, int, int, int]:
    """Return seconds, MB that memory grew by, nodes, live runs and records folded, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", RECOVER, str(path)], stdout=subprocess.PIPE, check=True)
    took, grown, nodes, live, tail = json.loads(done.stdout)
    return took, grown / 1024, nodes, live, tail


def measure(folder: Path, *, past: int, repeat: int) -> Result:
    runs = 20_000
    ours = [write(folder / f"write_{n}.db", runs, 1_000) for n in range(repeat)]
    bare = [write_bare(folder / "write_0.db", folder / f"bare_{n}.db") for n in range(repeat)]
    cpu, plain = (statistics.median(each[0] for each in found) / runs * 1e6 for found in (ours, bare))

    looking, empty = folder / "looking", folder / "empty"
    empty.mkdir()
    with closing(SqliteJournal.open(looking / ".remit" / "journal.db")) as journal:
        journal.append(records(begin(time.time()))).result()
        for events in turn_of(10_000, time.time(), ends=True):
            journal.append(records(events)).result()
    verbs = {f"remit {verb} of 10,000 runs": commands(repeat, looking, verb) for verb in ("ps", "tree")}
    nothing = commands(repeat, empty, "ps")

    short, long = folder / "short.db", folder / "long" / ".remit" / "journal.db"
    fill_past(short, 0, 1_000)
    fill_past(long, past, 1_000)
    few = recover(short)
    many = [recover(long) for _ in range(repeat)]
    recovered = statistics.median(each[0] for each in many)
    grown = statistics.median(each[1] for each in many)
    long_ps = commands(repeat, folder / "long", "ps")
    rows: list[tuple[str | float | None, ...]] = [
        ("write 3 records a run: CPU us a run", cpu, cpu / plain),
        ("the same rows by SQLite alone: CPU us a run", plain, 1.0),
        *((f"{name}: CPU s", took[0], took[0] / nothing[0]) for name, took in verbs.items()),
        *((f"{name}: s", took[1], None) for name, took in verbs.items()),
        ("remit ps of a workspace without a journal: CPU s", nothing[0], 1.0),
        (f"remit ps, {past:,} past runs: CPU s", long_ps[0], long_ps[0] / nothing[0]),
        (f"recovery, {past:,} past runs, 1,000 live: s", recovered, recovered / few[0]),
        ("recovery, no past, 1,000 live: s", few[0], 1.0),
        ("memory grown by recovery with the past: MB", grown, grown / few[1]),
        ("memory grown by recovery without: MB", few[1], 1.0),
        ("journal with the past: MB", os.path.getsize(long) / 1e6, None),
    ]
    checks = [
        Check("writing by SQLite alone", cpu / plain, 2.5),
        # CPU time: on a machine that is busy with other things the clock tells of those.
        *(Check(f"{name}, CPU s", took[0], 1.0) for name, took in verbs.items()),
        Check("recovery with a past, s", recovered, 5.0),
        Check("memory with a past by without", grown / few[1], 1.5),
    ]
    notes = (f"recovered {many[0][3]:,} live runs, {many[0][2]:,} nodes; folded {many[0][4]:,} records",)
    return Result("journal; medians", ("what", "measured", "ratio"), rows, checks, notes)


def main() -> None:
    options = parse_options(__doc__)
    folder = Path(tempfile.mkdtemp(prefix="remit-bench-", dir="/tmp"))
    try:
        repeat = options.repeat or (2 if options.quick else 5)
        show(measure(folder, past=20_000 if options.quick else 1_000_000, repeat=repeat), options.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
