"""The stop itself, on trees made by hand; what it may never do, and when it gives up."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from remit.processes import peel
from remit.processes.jobs import ExitStatus
from remit.processes.peel import Peel, Track, TreeStop
from remit.processes.table import Delivery, ProcessIdentity, SystemTable
from remit.processes.tree import identify


class FakeReach:
    """A tree of numbers; signals are recorded, and who is deaf or immortal lives on."""

    def __init__(self, *pids: int, deaf: frozenset[int] = frozenset(), immortal: frozenset[int] = frozenset()) -> None:
        self.living = set(pids)
        self.deaf = deaf | immortal
        self.immortal = immortal
        self.denied: set[int] = set()
        self.status: ExitStatus | None = None
        self.is_empty = False
        self.sent: list[tuple[int, ...]] = []
        self.rounds: list[int] = []
        self.on_kill: Callable[[], None] = lambda: None

    def has_root_exited(self) -> bool:
        return not self.living

    def look(self) -> frozenset[int]:
        self.is_empty = not self.living
        return frozenset(self.living)

    def everybody(self) -> frozenset[int]:
        return frozenset(self.living)

    def send(self, *signums: int) -> None:
        self.sent.append(signums)
        self.living &= self.deaf

    def kill(self, round_number: int) -> None:
        self.rounds.append(round_number)
        self.living &= self.immortal
        self.on_kill()

    @property
    def remembered(self) -> tuple[ProcessIdentity, ...]:
        return ()

    def close(self) -> None:
        """Hold nothing."""


def run(stop: TreeStop, *, now: float = 0.0, steps: int = 10_000) -> float:
    """Step until the stop is over, with a clock that goes on by each pause; return the time at its end."""
    for _ in range(steps):
        pause = stop.step(now)
        if stop.is_over:
            return now
        assert pause > 0
        now += pause
    raise AssertionError("the stop has no end")


@pytest.mark.requirement("E4", "E22")
def test_term_and_cont_once_then_kill_for_the_deaf() -> None:
    reach = FakeReach(5, 6, deaf=frozenset({6}))
    stop = TreeStop(reach, now=0.0, grace_s=2.0)
    assert 2.0 <= run(stop) < 2.1
    assert reach.sent == [(signal.SIGTERM, signal.SIGCONT)]
    outcome = stop.outcome()
    assert (outcome.signalled, outcome.escalated, outcome.survivors) == ((5, 6), (6,), ())


@pytest.mark.requirement("E4")
def test_those_that_obey_are_not_waited_for() -> None:
    reach = FakeReach(5, 6)
    stop = TreeStop(reach, now=0.0, grace_s=3600.0)
    assert run(stop) < 1.0
    assert (stop.outcome().escalated, reach.rounds) == ((), [])


def test_without_grace_kill_is_first() -> None:
    reach = FakeReach(5)
    assert run(TreeStop(reach, now=0.0, grace_s=0.0)) < 0.1
    assert (reach.sent, reach.rounds) == ([], [0])


@pytest.mark.requirement("P6")
def test_a_shorter_grace_counts_and_a_longer_one_does_not() -> None:
    reach = FakeReach(5, deaf=frozenset({5}))
    stop = TreeStop(reach, now=0.0, grace_s=60.0)
    stop.step(0.0)
    stop.hurry(now=1.0, grace_s=3.0)
    stop.hurry(now=1.0, grace_s=600.0)
    assert 4.0 <= run(stop, now=1.0) < 4.1


@pytest.mark.requirement("P10")
def test_what_cannot_be_killed_is_reported_after_the_limit() -> None:
    reach = FakeReach(5, 6, immortal=frozenset({6}))
    stop = TreeStop(reach, now=0.0, grace_s=1.0, hard_limit_s=5.0)
    assert 6.0 <= run(stop) < 6.1
    assert stop.outcome().survivors == (6,)
    assert not reach.is_empty


@pytest.mark.requirement("P10", "E12")
def test_what_may_not_be_signalled_is_reported_without_waiting() -> None:
    reach = FakeReach(5, 6, immortal=frozenset({6}))
    reach.on_kill = lambda: reach.denied.add(6)
    stop = TreeStop(reach, now=0.0, grace_s=0.0)
    assert run(stop) < 1.0
    assert (stop.outcome().survivors, stop.outcome().denied) == ((6,), (6,))


@pytest.mark.requirement("E10")
def test_who_appears_during_the_stop_is_killed_too() -> None:
    reach = FakeReach(5)
    newcomers = [{7}, {8}, {9}]
    reach.on_kill = lambda: reach.living.update(newcomers.pop() if newcomers else set())
    stop = TreeStop(reach, now=0.0, grace_s=0.0)
    run(stop)
    assert stop.outcome().escalated == (5, 7, 8, 9)


class Sent:
    """What would have been signalled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        monkeypatch.setattr(os, "kill", lambda *args: self.calls.append(("kill", *args)))
        monkeypatch.setattr(os, "killpg", lambda *args: self.calls.append(("killpg", *args)))
        monkeypatch.setattr(peel, "pidfd_send_signal", lambda *args: self.calls.append(("pidfd", *args)))


NOBODY = ProcessIdentity(2**22 + 5, 1.0)
"""Above the largest number that Linux gives: nobody has it."""


@pytest.mark.requirement("P5", "E11")
@pytest.mark.parametrize("kind", ["peel", "track"])
def test_nothing_is_signalled_after_the_tree_is_empty(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    reach = Peel(NOBODY) if kind == "peel" else Track(NOBODY, token="t")
    reach.is_empty = True
    if isinstance(reach, Track):
        reach.is_empty = False
        for _ in range(3):  # a `Peel` would wait for the children of this process
            reach.look()
        assert reach.is_empty
    reach.everybody()
    reach.send(signal.SIGTERM)
    reach.kill(0)
    reach.kill(99)
    assert sent.calls == []


@pytest.mark.requirement("P2")
@pytest.mark.field_report("F7")
def test_the_group_of_a_root_that_was_waited_for_is_not_signalled_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    reach = Peel(NOBODY, use_pidfd=False)
    reach.status = ExitStatus(exit_code=0)
    reach._direct = []
    reach.send(signal.SIGTERM)
    reach.kill(0)
    assert sent.calls == []


@pytest.mark.requirement("P2", "E9")
@pytest.mark.field_report("F7", "F14")
@pytest.mark.parametrize("use_pidfd", [True, False])
def test_a_number_is_signalled_with_its_start_time_only(use_pidfd: bool) -> None:
    table = SystemTable(use_pidfd=use_pidfd)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        identity = identify(other.pid)
        assert identity is not None
        older = ProcessIdentity(other.pid, identity.started - 1)
        assert table.send(older, signal.SIGKILL) is Delivery.GONE
        assert other.poll() is None
        assert table.send(identity, signal.SIGTERM) is Delivery.SENT
        assert other.wait(40) == -signal.SIGTERM
    assert table.send(ProcessIdentity(1, 0.0), signal.SIGKILL) is Delivery.REFUSED
    own = identify(os.getpid())
    assert own is not None
    assert table.send(own, signal.SIGKILL) is Delivery.REFUSED
    for group in (0, 1, -1, os.getpgrp()):
        assert table.send_group(group, signal.SIGKILL) is Delivery.REFUSED


@pytest.mark.requirement("P1")
def test_an_empty_list_of_children_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may come between the list and the wait; only the kernel's refusal to wait is the proof."""
    answers = iter([False, True])
    monkeypatch.setattr(peel, "own_children", list[int])
    monkeypatch.setattr(peel, "_wait", lambda pid: ExitStatus(exit_code=0))
    monkeypatch.setattr(peel, "_has_no_child", lambda: next(answers))
    reach = Peel(NOBODY)
    reach.look()
    assert not reach.is_empty
    reach.look()
    assert reach.is_empty
