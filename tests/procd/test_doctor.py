"""What is left over on a node: shown with the run it came from, taken over, ended or ignored."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from remit.core.errors import NotFound
from remit.processes.client import ProcessClient
from remit.processes.doctor import Leftover, LeftoverKind, ignore_leftover, kill_leftover
from remit.processes.jobs import RESULT_NAME, STATE_NAME, JobOutcome, JobResult, write_record
from remit.processes.place import Place
from tests.procd.live import Node, wait_for, wait_gone


def leftovers(node: Node, *jobs: str) -> dict[str, Leftover]:
    return {leftover.job: leftover for leftover in node.client.doctor() if not jobs or leftover.job in jobs}


def test_nothing_is_left_over_while_a_daemon_answers_for_it(node: Node) -> None:
    answer = node.run("sleep", "1000")
    assert leftovers(node, answer.job) == {}
    node.client.stop(scope=node.scope, job=answer.job)
    assert leftovers(node, answer.job) == {}


def test_an_orphan_is_shown_with_its_run_and_taken_over(node: Node) -> None:
    answer = node.run("sleep", "1000", background=True)
    node.kill_daemon()
    left = leftovers(node)[answer.job]
    assert (left.kind, left.run, left.session, left.scope, left.argv, left.background, left.pids) == (
        LeftoverKind.ORPHAN,
        node.run_id,
        "s",
        node.scope,
        ("sleep", "1000"),
        True,
        (answer.pid,),
    )
    assert node.client.adopt() >= 1
    assert leftovers(node, answer.job) == {}
    assert node.client.stop(scope=node.scope, job=answer.job).is_proven_gone


def test_an_orphan_whose_record_does_not_name_its_program_yet_is_shown_with_it(node: Node) -> None:
    answer = node.run("sleep", "1000", background=True)
    state = node.place.job(answer.job) / STATE_NAME
    wait_for(lambda: node.state(answer.job).root is not None, "the record of a running program is written")
    node.kill_daemon()
    write_record(state, replace(node.state(answer.job), root=None))
    assert leftovers(node)[answer.job].pids == (answer.pid,)
    assert node.client.adopt() >= 1
    assert node.client.stop(scope=node.scope, job=answer.job).is_proven_gone


@pytest.mark.requirement("C19")
def test_an_orphan_is_ended_without_a_daemon(node: Node) -> None:
    answer = node.tree(background=True)
    node.kill_daemon()
    assert kill_leftover(node.place, answer.job) == ()
    assert node.processes() == []
    assert leftovers(node, answer.job) == {}


def test_what_a_lost_keeper_left_is_shown_and_ended(node: Node) -> None:
    answer = node.tree()
    keeper, warden = node.state(answer.job).keeper.pid, psutil.Process(node.daemon_pid()).ppid()
    os.kill(keeper, signal.SIGSTOP)
    # First, as it would end the tree itself.
    os.kill(warden, signal.SIGKILL)
    wait_gone(warden)
    node.kill_daemon()
    os.kill(keeper, signal.SIGKILL)
    wait_gone(keeper)
    left = leftovers(node)[answer.job]
    assert left.kind is LeftoverKind.LOST
    assert set(left.pids) <= {process.pid for process in node.processes()} | {answer.pid}
    assert kill_leftover(node.place, answer.job) == ()
    wait_for(lambda: not node.processes(), "the tree stays")
    assert leftovers(node, answer.job) == {}


def test_a_survivor_is_shown_as_long_as_it_lives(node: Node) -> None:
    ended, alive = node.run("true"), node.run("sleep", "1000")
    node.client.wait(ended.job)
    result = JobResult(job=ended.job, outcome=JobOutcome.CANCELLED, survivors=(alive.pid, 2**22 + 7))
    write_record(node.place.job(ended.job) / RESULT_NAME, result)
    left = leftovers(node)[ended.job]
    assert (left.kind, left.pids) == (LeftoverKind.SURVIVOR, (alive.pid,))
    node.client.stop(scope=node.scope, job=alive.job)
    assert leftovers(node, ended.job) == {}


@pytest.mark.parametrize("text", [None, "{", "[]", '{"v": 99}'])
def test_a_directory_that_cannot_be_read_is_shown_and_removed(node: Node, text: str | None) -> None:
    directory = node.place.jobs / "proc_broken"
    directory.mkdir()
    if text is not None:
        (directory / "spec.json").write_text(text)
    assert leftovers(node)["proc_broken"].kind is LeftoverKind.BROKEN
    assert kill_leftover(node.place, "proc_broken") == ()
    assert not directory.exists()


def test_an_ignored_one_is_not_shown_again(node: Node) -> None:
    (node.place.jobs / "proc_odd").mkdir()
    ignore_leftover(node.place, "proc_odd")
    assert leftovers(node, "proc_odd") == {}
    kill_leftover(node.place, "proc_odd")


@pytest.mark.parametrize("job", ["", ".", "..", "../j", "proc_none", "/tmp"])
def test_only_what_is_there_can_be_ended(node: Node, job: str) -> None:
    with pytest.raises(NotFound, match="remit doctor"):
        kill_leftover(node.place, job)
    with pytest.raises(NotFound):
        ignore_leftover(node.place, job)


def test_a_node_without_a_directory_has_nothing_left_over(tmp_path: Path) -> None:
    assert ProcessClient(state_dir=tmp_path / "none").doctor() == []
    assert not Place(tmp_path / "none").root.exists()
