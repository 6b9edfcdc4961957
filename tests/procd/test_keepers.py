"""Keepers that take one job after another, and what ends a program whose keeper is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from remit.processes.forks import SPARES
from remit.processes.jobs import SOCKET_NAME, JobOutcome
from remit.processes.place import Place
from tests.procd.live import LIMIT_S, Node, wait_for, wait_gone

LIBRARYS_OWN = 1 << 31 | 1 << 32
"""Signals 32 and 33, which the C library keeps for itself: whoever ignores them for us, we cannot change it."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="without subreapers each keeper has one job")


@pytest.fixture
def alone() -> Iterator[Node]:
    """Return a daemon of this test alone, which nobody starts again."""
    node = Node()
    yield node
    node.close()


def keeper_of(node: Node, job: str) -> int:
    return node.state(job).keeper.pid


def run_to_end(node: Node, *argv: str) -> int:
    """Run a program to its end; return its keeper when that is ready for another one."""
    answer = node.run(*argv)
    result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert (result.outcome, result.exit_code, result.survivors) == (JobOutcome.EXITED, 0, ())
    keeper = keeper_of(node, answer.job)
    # In the place of its job as long as it keeps it.
    wait_for(lambda: not (node.place.job(answer.job) / SOCKET_NAME).exists(), "the keeper does not let its job go")
    return keeper


@pytest.mark.requirement("P9", "P12")
def test_a_keeper_with_nothing_left_takes_another_job_and_keeps_nothing_of_the_first(node: Node) -> None:
    node.wait_reaped()
    show = 'echo "$REMIT_PROCESS $(ls /proc/self/fd | wc -l)"; grep -E "Sig(Ign|Blk)" /proc/self/status'
    keepers: list[int] = []
    outputs: list[str] = []
    for _ in range(12):
        answer = node.run("sh", "-c", f"{show}; (setsid sleep 1000 &)", stdin="pipe")
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert (result.exit_code, result.survivors, len(result.signalled)) == (0, (), 1)
        keepers.append(keeper_of(node, answer.job))
        outputs.append((Path(node.directory) / "out" / answer.job / "stdout").read_text())
        assert outputs[-1].startswith(f"{node.run_id}/{answer.job} 4\nSig")
        masks = [int(line.split()[1], 16) for line in outputs[-1].splitlines()[1:]]
        assert [mask & ~LIBRARYS_OWN for mask in masks] == [0, 0]
        wait_for(lambda job=answer.job: not (node.place.job(job) / SOCKET_NAME).exists(), "it keeps its job")  # type: ignore[misc]
    assert len(set(keepers)) < len(keepers)
    # Equal, whether it had one job or many: a descriptor a job that stays open would tell them apart.
    counts = {keepers.count(keeper) for keeper in keepers}
    assert len(counts) > 1 or counts != {1}
    wait_for(lambda: len({psutil.Process(keeper).num_fds() for keeper in keepers}) == 1, "descriptors stay")


@pytest.mark.requirement("P12")
@pytest.mark.faults
def test_a_keeper_that_was_used_before_is_swept_for_its_own_job_alone(node: Node) -> None:
    node.wait_reaped()
    known = {run_to_end(node, "true") for _ in range(6)}
    answer = node.tree()
    keeper = keeper_of(node, answer.job)
    assert keeper in known
    os.kill(keeper, signal.SIGKILL)
    result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert (result.outcome, result.survivors) == (JobOutcome.KEEPER_LOST, ())
    assert node.processes() == []
    ended = [view.result for view in node.client.list(scope=node.scope) if view.job != answer.job]
    assert {one.outcome for one in ended if one is not None} == {JobOutcome.EXITED}


def test_a_stop_with_its_control_group_does_not_end_the_keeper_itself(node: Node) -> None:
    """The keeper is in the group of its tree until it kills that."""
    for _ in range(2):
        answer = node.tree()
        stopped = node.client.stop(scope=node.scope, job=answer.job, kill=True)
        assert stopped.result is not None
        assert (stopped.result.outcome, stopped.result.survivors) == (JobOutcome.CANCELLED, ())


def test_a_keeper_that_was_forked_ahead_and_killed_is_replaced(alone: Node) -> None:
    alone.wait_reaped()
    daemon = psutil.Process(alone.daemon_pid())
    wait_for(lambda: len(daemon.children()) == SPARES, "no keeper is forked ahead")
    for spare in daemon.children():
        spare.kill()
        wait_gone(spare.pid)
    answer = alone.run("sh", "-c", "exit 4")
    result = alone.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert result.exit_code == 4
    alone.wait_reaped()


def test_a_keeper_that_was_forked_ahead_ends_with_its_daemon(alone: Node) -> None:
    alone.wait_reaped()
    daemon = psutil.Process(alone.daemon_pid())
    wait_for(lambda: len(daemon.children(recursive=True)) == SPARES, "no keeper is forked ahead")
    ahead = daemon.children(recursive=True)
    alone.kill_daemon()
    for spare in ahead:
        wait_gone(spare.pid)


# --- the warden ------------------------------------------------------------------------------------


def warden_of(place: Place) -> psutil.Process:
    parent = psutil.Process(int(place.life_lock.read_text())).parent()
    assert parent is not None
    assert parent.cmdline() == psutil.Process(int(place.life_lock.read_text())).cmdline()
    return parent


@pytest.mark.faults
@pytest.mark.requirement("P7")
@pytest.mark.parametrize("order", ["keeper first", "daemon first"])
def test_a_tree_ends_when_its_keeper_and_the_daemon_are_killed_and_no_other_comes(order: str, alone: Node) -> None:
    warden = warden_of(alone.place)
    tree = alone.tree()
    other = alone.run("sh", "-c", "echo ready; exec sleep 1000", background=True)
    alone.wait_output(other.job, b"ready")
    keeper, daemon = keeper_of(alone, tree.job), alone.daemon_pid()
    # Both are held before either is killed, so that neither can do anything about the other's death.
    for pid in (daemon, keeper):
        os.kill(pid, signal.SIGSTOP)
    for pid in (keeper, daemon) if order == "keeper first" else (daemon, keeper):
        os.kill(pid, signal.SIGKILL)
    wait_gone(daemon)
    wait_for(lambda: [one.pid for one in alone.processes()] == [other.pid], "what the keeper left goes on")
    os.kill(keeper_of(alone, other.job), signal.SIGKILL)
    wait_for(lambda: not alone.processes(), "what the other keeper left goes on")
    wait_gone(warden.pid)


@pytest.mark.faults
@pytest.mark.requirement("P7")
def test_without_its_warden_a_daemon_lets_programs_die_with_their_keepers(alone: Node) -> None:
    alone.wait_reaped()
    warden = warden_of(alone.place)
    warden.kill()
    wait_gone(warden.pid)
    answer = alone.run("sh", "-c", "echo ready; exec sleep 1000")
    alone.wait_output(answer.job, b"ready")
    keeper, daemon = keeper_of(alone, answer.job), alone.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    wait_gone(daemon)
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not alone.processes(), "the program goes on without its keeper")


def test_a_warden_ends_with_its_daemon(alone: Node) -> None:
    warden = warden_of(alone.place)
    assert warden.num_fds() == 3
    alone.kill_daemon()
    wait_gone(warden.pid)
