import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from signal import SIGCONT, SIGKILL, SIGTERM

import pytest

from remit.processes.table import Delivery, ProcessEntry, ProcessIdentity, SystemTable
from remit.processes.tree import ProcessTree, StopReport, descendants, identify, stop_tree
from remit.testing import wait_until

LEADER = ProcessIdentity(500, 10.0)


def _entry(
    pid: int, *, started: float = 20.0, parent: int = 1, group: int = 0, session: int = 0, dead: bool = False
) -> ProcessEntry:
    return ProcessEntry(ProcessIdentity(pid, started), parent, group or pid, session or pid, dead)


class FakeTable:
    """A process table made by hand; signals are recorded, and kill unless told otherwise."""

    def __init__(self, *entries: ProcessEntry, marks: dict[int, str] | None = None) -> None:
        self.rows = {entry.pid: entry for entry in entries}
        self.marks = marks or {}
        self.sent: list[tuple[int, int]] = []
        self.sent_to_groups: list[tuple[int, int]] = []
        self.denied: set[int] = set()
        self.immortal: set[int] = set()
        self.on_kill: Callable[[int], None] = lambda pid: None

    def entries(self) -> dict[int, ProcessEntry]:
        return dict(self.rows)

    def entry(self, pid: int) -> ProcessEntry | None:
        return self.rows.get(pid)

    def has_mark(self, pid: int, token: str) -> bool:
        return self.marks.get(pid) == token

    def send(self, identity: ProcessIdentity, signum: int) -> Delivery:
        row = self.rows.get(identity.pid)
        if row is None or row.identity != identity:
            return Delivery.GONE
        if identity.pid in self.denied:
            return Delivery.DENIED
        self.sent.append((identity.pid, signum))
        self._die(row, signum)
        return Delivery.SENT

    def send_group(self, group: int, signum: int) -> Delivery:
        self.sent_to_groups.append((group, signum))
        for row in list(self.rows.values()):
            if row.group == group and row.pid not in self.denied:
                self._die(row, signum)
        return Delivery.SENT

    def _die(self, row: ProcessEntry, signum: int) -> None:
        if signum != SIGKILL or row.pid in self.immortal:
            return
        del self.rows[row.pid]
        if row.identity == LEADER:  # held by us: stays as a zombie
            self.rows[row.pid] = _entry(row.pid, started=10.0, group=row.group, session=row.session, dead=True)
        self.on_kill(row.pid)


def _tree(table: FakeTable) -> ProcessTree:
    return ProcessTree(LEADER, token="t0", table=table)


def _pids(tree: ProcessTree) -> set[int]:
    return {entry.pid for entry in tree.members()}


def _stop(tree: ProcessTree, *, grace_s: float = 0, limit_s: float = 1000) -> StopReport:
    """Stop with a clock that goes on by one second at each look."""
    clock = itertools.count()
    return stop_tree(
        tree,
        grace_s=grace_s,
        hurry=threading.Event(),
        hard_limit_s=limit_s,
        monotonic=lambda: float(next(clock)),
    )


def test_members_are_found_by_group_session_parent_and_mark() -> None:
    table = FakeTable(
        _entry(500, started=10.0),
        _entry(501, group=500, session=500),
        _entry(502, session=500),  # a group of its own
        _entry(503, parent=501),  # a session of its own
        _entry(504),  # a daemon
        _entry(505, parent=504),
        _entry(600),
        _entry(601, group=500, session=500, dead=True),
        marks={504: "t0", 600: "t1"},
    )
    assert _pids(_tree(table)) == {500, 501, 502, 503, 504, 505}


@pytest.mark.field_report("F5")
def test_a_member_seen_once_is_known_after_it_lost_every_tie() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, parent=500))
    tree = _tree(table)
    assert _pids(tree) == {500, 501}
    table.rows = {501: _entry(501, parent=1)}
    assert _pids(tree) == {501}


def test_a_process_older_than_the_leader_is_never_a_member_by_mark_or_parent() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(400, started=5.0, parent=500), marks={400: "t0"})
    assert _pids(_tree(table)) == {500}


@pytest.mark.requirement("E8", "E9")
@pytest.mark.field_report("F7")
def test_a_group_whose_number_belongs_to_another_start_time_is_refused_and_recorded() -> None:
    table = FakeTable(_entry(500, started=99.0), _entry(501, group=500, session=500))
    tree = _tree(table)
    assert _pids(tree) == set()
    tree.signal([_entry(501, group=500)], SIGKILL)
    assert table.sent_to_groups == []
    assert tree.refused == 1


@pytest.mark.requirement("E8", "E9")
def test_a_number_used_again_is_not_signalled() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, started=20.0, parent=500))
    tree = _tree(table)
    members = tree.members()
    table.rows[501] = _entry(501, started=30.0)
    tree.signal(members, SIGKILL)
    assert (501, SIGKILL) not in table.sent
    assert 501 not in _pids(tree)


@pytest.mark.requirement("E15")
@pytest.mark.requirement("E11")
def test_nothing_is_signalled_after_forget() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, parent=500))
    tree = _tree(table)
    members = tree.members()
    tree.forget()
    tree.signal(members, SIGTERM, SIGKILL)
    assert table.sent == []
    assert table.sent_to_groups == []


@pytest.mark.requirement("E4", "E22")
def test_stop_sends_term_once_then_cont_then_kill() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, parent=500))
    report = _stop(_tree(table), grace_s=0.001)
    assert table.sent_to_groups == [(500, SIGTERM), (500, SIGCONT), (500, SIGKILL)]
    assert table.sent == [(501, SIGTERM), (501, SIGCONT), (501, SIGKILL)]
    assert (report.stopped, report.survivors, report.escalated) == ((500, 501), (), True)


@pytest.mark.requirement("E4")
def test_without_grace_kill_is_the_first_signal() -> None:
    table = FakeTable(_entry(500, started=10.0))
    assert _stop(_tree(table)).stopped == (500,)
    assert table.sent_to_groups == [(500, SIGKILL)]


def test_an_ended_leader_with_nothing_left_gets_no_signal() -> None:
    table = FakeTable(_entry(500, started=10.0, dead=True))
    report = _stop(_tree(table))
    assert (report.stopped, report.survivors, report.escalated) == ((), (), False)
    assert table.sent_to_groups == []


def test_what_appears_while_killing_is_killed_as_well() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, parent=500))
    born = iter(range(502, 540))

    def respawn(pid: int) -> None:
        new = next(born, None)
        if new is not None:
            table.rows[new] = _entry(new)
            table.marks[new] = "t0"

    table.on_kill = respawn
    report = _stop(_tree(table))
    assert report.survivors == ()
    assert set(report.stopped) == set(range(500, 540))


@pytest.mark.requirement("E12")
def test_a_process_of_somebody_else_is_reported_without_waiting_for_the_limit() -> None:
    table = FakeTable(
        _entry(500, started=10.0), _entry(501, parent=500), _entry(502, parent=500, group=500, session=500)
    )
    table.denied = {501, 502}
    report = _stop(_tree(table), limit_s=1e9)
    assert (report.stopped, report.survivors, report.denied) == ((500,), (501, 502), (501, 502))


@pytest.mark.requirement("A15")
def test_an_unkillable_process_is_reported_at_the_limit() -> None:
    table = FakeTable(_entry(500, started=10.0), _entry(501, parent=500))
    table.immortal = {501}
    report = _stop(_tree(table), limit_s=8)
    assert (report.stopped, report.survivors) == ((500,), (501,))


@pytest.mark.field_report("F14")
@pytest.mark.parametrize("group", [0, 1, -1, -500, os.getpgrp()])
def test_no_signal_goes_to_many_or_to_ourselves(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, signum: calls.append(number))
    monkeypatch.setattr(os, "kill", lambda number, signum: calls.append(number))
    assert SystemTable().send_group(group, SIGKILL) is Delivery.REFUSED
    assert calls == []


@pytest.mark.field_report("F14")
@pytest.mark.parametrize("pid", [-1, 0, 1, pytest.param(os.getpid(), id="own")])
def test_no_signal_goes_to_init_or_this_process(pid: int) -> None:
    assert SystemTable().send(ProcessIdentity(pid, 0.0), SIGKILL) is Delivery.REFUSED


@pytest.mark.requirement("E12")
def test_a_process_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen(["true"])
    identity = identify(process.pid)
    assert identity is not None
    process.wait()
    assert SystemTable().send(identity, SIGTERM) is Delivery.GONE
    assert SystemTable().send_group(process.pid, SIGTERM) is Delivery.GONE
    assert identify(process.pid) is None


def test_the_system_table_signals_a_process_only_under_its_own_start_time() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = identify(process.pid)
        assert identity is not None
        other = ProcessIdentity(identity.pid, identity.started + 1)
        assert SystemTable().send(other, SIGKILL) is Delivery.GONE
        assert process.poll() is None
        assert SystemTable().send(identity, SIGKILL) is Delivery.SENT
        assert process.wait() == -SIGKILL


@pytest.mark.parametrize("portable", [False, True])
def test_the_system_table_knows_parents_sessions_zombies_and_marks(
    monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    if portable:
        monkeypatch.setattr("remit.processes.table._IS_LINUX", False)
    table = SystemTable()
    environ = {**os.environ, "REMIT_PROCESS": "outer/t0"}
    with subprocess.Popen(["sleep", "60"], env=environ, start_new_session=True) as process:
        wait_until(lambda: table.has_mark(process.pid, "t0"), message="the program has not started")
        entry = table.entries()[process.pid]
        assert (entry.parent, entry.group, entry.session) == (os.getpid(), process.pid, process.pid)
        assert not entry.is_dead
        assert table.has_mark(process.pid, "outer")
        assert not table.has_mark(process.pid, "t")
        process.kill()
        wait_until(lambda: (row := table.entry(process.pid)) is not None and row.is_dead, message="no zombie")
    assert table.entry(process.pid) is None
    assert not table.has_mark(process.pid, "t0")


def test_descendants_include_those_in_sessions_of_their_own() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1, message="the child is not there")
        (child,) = descendants(process.pid)
        assert SystemTable().send(child, SIGKILL) is Delivery.SENT
    assert descendants(process.pid) == ()
