"""Kill -9 of daemon, keeper and client, alone and together: nothing is lost, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from remit.processes.answers import StartKind, StopKind
from remit.processes.jobs import STATE_NAME, JobOutcome, JobResult, write_record
from remit.processes.starting import READY, ensure_daemon
from remit.processes.table import ProcessIdentity
from remit.processes.tree import identify
from tests.procd.live import LIMIT_S, Node, is_running, wait_for, wait_gone

pytestmark = pytest.mark.faults


@pytest.fixture
def hasty() -> Iterator[Node]:
    """Return a daemon whose keepers wait only a moment for the next one."""
    node = Node("--reattach-grace-s", "0.2")
    yield node
    node.close()


# --- the daemon ------------------------------------------------------------------------------------


@pytest.mark.field_report("I5")
def test_after_a_daemons_death_the_next_call_starts_another_which_adopts(node: Node) -> None:
    answer = node.run("sh", "-c", "read line; exit 6", key="k", stdin="pipe")
    tree = node.tree(key="tree")
    old = node.kill_daemon()
    views = {view.job: view for view in node.client.list(scope=node.scope)}
    assert node.daemon_pid() != old
    assert (views[answer.job].state, views[answer.job].pid, views[answer.job].key) == ("running", answer.pid, "k")
    attached = node.run("sh", "-c", "read line; exit 6", key="k", stdin="pipe")
    assert (attached.kind, attached.job) == (StartKind.ATTACHED, answer.job)
    stopped = node.client.stop(scope=node.scope, key="tree")
    assert (stopped.kind, stopped.job, stopped.is_proven_gone) == (StopKind.STOPPED, tree.job, True)
    node.client.close_stdin(answer.job)
    result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert (result.outcome, result.exit_code) == (JobOutcome.EXITED, 6)


def test_waits_and_watches_outlive_the_daemon(node: Node) -> None:
    answer = node.run("sh", "-c", "read line; exit 6", stdin="pipe")
    told = threading.Event()
    heard: list[JobResult] = []

    def hear(result: JobResult) -> None:
        heard.append(result)
        told.set()

    node.client.watch(answer.job, hear)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(node.client.wait, answer.job, timeout_s=LIMIT_S)
        wait_for(lambda: _peers(node) >= 2, "neither wait nor watch reached the daemon")
        node.kill_daemon()
        node.client.close_stdin(answer.job)
        result = wait.result()
    assert told.wait(LIMIT_S)
    assert [one and one.exit_code for one in (result, *heard)] == [6, 6]


def _peers(node: Node) -> int:
    """Count the daemon's connections, its listening socket aside; it is bound by its short name."""
    found = psutil.Process(node.daemon_pid()).net_connections(kind="unix")
    return sum(str(one.laddr) == node.place.socket.name for one in found) - 1


def test_a_watch_that_may_not_start_a_daemon_reads_the_files(node: Node) -> None:
    answer = node.run("sh", "-c", "read line; exit 2", stdin="pipe")
    told = threading.Event()
    node.connect(start=False).watch(answer.job, lambda _: told.set())
    node.kill_daemon()
    node.client.close_stdin(answer.job)
    assert told.wait(LIMIT_S)


@pytest.mark.field_report("I5")
def test_what_ended_while_no_daemon_lived_has_its_status(node: Node) -> None:
    answer = node.run("sh", "-c", "read line; exit 9", key="k", stdin="pipe")
    node.kill_daemon()
    node.client.close_stdin(answer.job)
    wait_for(lambda: (node.place.job(answer.job) / "result.json").exists(), "no result was written")
    finished = node.run("sh", "-c", "read line; exit 9", key="k", stdin="pipe")
    assert finished.kind is StartKind.FINISHED
    assert finished.result is not None
    assert finished.result.exit_code == 9


@pytest.mark.requirement("F6")
def test_without_any_daemon_foreground_trees_end_by_themselves_and_background_ones_stay(hasty: Node) -> None:
    hasty.tree()
    background = hasty.run("sleep", "1000", background=True)
    hasty.kill_daemon()
    wait_for(lambda: [one.pid for one in hasty.processes()] == [background.pid], "the foreground tree stays")
    views = {view.job: view for view in hasty.client.list()}
    assert views[background.job].state == "running"
    (ended,) = [view for view in views.values() if view.job != background.job]
    assert ended.result is not None
    assert ended.result.outcome is JobOutcome.CANCELLED
    assert ended.result.cause is not None
    assert ended.result.cause["kind"] == "parent_lost"


def test_a_daemon_killed_between_request_and_answer_starts_once(node: Node) -> None:
    log = node.directory / f"runs-{node.scope}"
    for number in range(4):
        armed = [True]

        def strike(name: str, armed: list[bool] = armed) -> None:
            if name == "start_sent" and armed:
                armed.clear()
                os.kill(node.daemon_pid(), signal.SIGKILL)

        spec = node.spec("sh", "-c", f"echo {number} >> {log}", key=f"k{number}")
        answer = node.connect(failpoint=strike).start(spec, env=node.env)
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        lines = log.read_text().split() if log.exists() else []
        # Run once and known as such. Or its keeper was too slow to be taken over: then it is said to be
        # lost, which leaves open whether it ran, and it is never run again.
        assert result.outcome in (JobOutcome.EXITED, JobOutcome.KEEPER_LOST), result
        assert lines.count(str(number)) <= 1, result
        assert lines.count(str(number)) == 1 or result.outcome is JobOutcome.KEEPER_LOST, result
    node.wait_empty()


def test_a_second_daemon_yields_to_the_first(node: Node) -> None:
    pid = node.daemon_pid()
    command = [sys.executable, "-m", "remit.processes.procd", "--state-dir", str(node.directory)]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == 0
    assert node.daemon_pid() == pid
    assert is_running(pid)


def test_ten_threads_start_one_daemon(node: Node) -> None:
    node.kill_daemon()
    node.place.log.unlink()
    barrier = threading.Barrier(10)

    def start(_: int) -> None:
        barrier.wait()
        ensure_daemon(node.place, limit_s=LIMIT_S)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(start, range(10)))
    assert node.place.log.read_text().count("serving, pid") == 1


@pytest.mark.slow
def test_ten_processes_start_one_daemon(node: Node) -> None:
    node.kill_daemon()
    node.place.log.unlink()
    code = (
        "import sys; from pathlib import Path; from remit.processes.client import ProcessClient;"
        "sys.stdin.read(1); ProcessClient(state_dir=Path(sys.argv[1])).list()"
    )
    starters = [
        subprocess.Popen([sys.executable, "-c", code, str(node.directory)], stdin=subprocess.PIPE) for _ in range(10)
    ]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.close()
    assert [starter.wait(LIMIT_S) for starter in starters] == [0] * 10
    assert node.place.log.read_text().count("serving, pid") == 1


def test_a_stale_socket_and_a_stale_word_are_no_daemon(node: Node) -> None:
    node.kill_daemon()
    assert node.place.socket.exists()
    assert node.client.list(scope=node.scope) == []
    assert READY == b"ready"


# --- keepers ---------------------------------------------------------------------------------------


@pytest.mark.requirement("C19")
def test_a_killed_keeper_has_its_tree_swept(node: Node) -> None:
    answer = node.tree()
    keeper = node.state(answer.job).keeper
    os.kill(keeper.pid, signal.SIGKILL)
    result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert (result.outcome, result.survivors, result.exit_code) == (JobOutcome.KEEPER_LOST, (), None)
    assert result.stdout_bytes == len("ready\n")
    assert node.processes() == []
    node.wait_reaped()


@pytest.mark.parametrize("switches", ["", "-cgroup", "-subreaper", "-pidfd"])
def test_a_killed_keeper_leaves_nothing_that_hides(switches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMIT_CONTAINMENT", switches)
    node = Node()
    try:
        # Neither mark nor group nor session nor parent says whose it is; its argument tells the test.
        argument = str(2_000_000 + os.getpid() * 10 + len(switches))
        answer = node.run("sh", "-c", f"(env -i setsid sleep {argument} &); echo ready; sleep 1000")
        node.wait_output(answer.job, b"ready")
        wait_for(lambda: _sleeping(argument), "the hidden one did not come up")
        os.kill(node.state(answer.job).keeper.pid, signal.SIGKILL)
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert (result.outcome, result.survivors) == (JobOutcome.KEEPER_LOST, ())
        assert not _sleeping(argument)
        assert node.processes() == []
    finally:
        for pid in _sleeping(argument):
            os.kill(pid, signal.SIGKILL)
        node.close()


@pytest.mark.parametrize("switches", ["-subreaper,-cgroup", "-subreaper,-pidfd,-cgroup"])
def test_what_was_seen_once_does_not_hide_from_the_sweep_either(switches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the kernel nor a mark knows whose it is by then; its keeper has written it down."""
    monkeypatch.setenv("REMIT_CONTAINMENT", switches)
    node = Node()
    argument = str(3_000_000 + os.getpid() * 10 + len(switches))
    go = node.directory / "go"
    try:
        hide = f"while [ ! -e {go} ]; do sleep 0.01; done; exec setsid sleep {argument}"
        answer = node.run("sh", "-c", f"(env -i PATH=$PATH sh -c '{hide}' & echo $!); sleep 1000")
        node.wait_output(answer.job, b"\n")
        hidden = int((node.directory / "out" / answer.job / "stdout").read_text())
        wait_for(lambda: hidden in [one.pid for one in node.state(answer.job).seen], "it was not written down")
        go.touch()
        wait_for(lambda: _sleeping(argument), "the hidden one did not come up")
        os.kill(node.state(answer.job).keeper.pid, signal.SIGKILL)
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert (result.outcome, result.survivors) == (JobOutcome.KEEPER_LOST, ())
        assert hidden in result.signalled
        assert not _sleeping(argument)
    finally:
        go.touch()
        for pid in _sleeping(argument):
            os.kill(pid, signal.SIGKILL)
        node.close()


def _sleeping(argument: str) -> list[int]:
    """Return the living processes that sleep for so long."""
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if one.info["cmdline"] == ["sleep", argument] and is_running(one.pid)]


def test_keeper_and_daemon_killed_together_are_swept_by_the_next_daemon(node: Node) -> None:
    answer = node.tree(key="k")
    os.kill(node.state(answer.job).keeper.pid, signal.SIGKILL)
    node.kill_daemon()
    again = node.connect()
    result = again.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert result.outcome is JobOutcome.KEEPER_LOST
    assert node.processes() == []


@pytest.mark.requirement("E9")
def test_a_number_that_was_used_again_is_never_signalled(node: Node) -> None:
    answer = node.run("sleep", "1000")
    state = node.state(answer.job)
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        own = identify(stranger.pid)
        assert own is not None
        os.kill(state.keeper.pid, signal.SIGSTOP)
        node.kill_daemon()
        os.kill(state.keeper.pid, signal.SIGKILL)
        wait_gone(state.keeper.pid)
        forged = ProcessIdentity(own.pid, own.started - 1)
        fields = {**state.to_dict(), "keeper": [forged.pid, forged.started], "root": [forged.pid, forged.started]}
        write_record(node.place.job(answer.job) / STATE_NAME, type(state).from_dict(fields))
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert result.outcome is JobOutcome.KEEPER_LOST
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.slow
def test_a_keeper_that_answers_no_stop_is_killed_and_its_tree_swept(node: Node) -> None:
    answer = node.tree()
    os.kill(node.state(answer.job).keeper.pid, signal.SIGSTOP)
    stopped = node.client.stop(scope=node.scope, job=answer.job, grace_s=0)
    assert stopped.kind is StopKind.STOPPED
    assert stopped.result is not None
    assert stopped.result.outcome is JobOutcome.KEEPER_LOST
    assert node.processes() == []


# --- clients and coordinators ----------------------------------------------------------------------


@pytest.mark.requirement("C2")
def test_a_killed_client_leaves_its_program_and_the_next_attempt_attaches(node: Node) -> None:
    log = node.directory / f"runs-{node.scope}"
    argv = ("sh", "-c", f"echo start >> {log}; read line; exit 5")
    code = (
        "import os, signal, json, sys; from pathlib import Path\n"
        "from remit.processes.client import ProcessClient\n"
        "from remit.processes.jobs import JobSpec\n"
        "spec = JobSpec.from_dict(json.loads(sys.argv[2]))\n"
        "ProcessClient(state_dir=Path(sys.argv[1])).start(spec, env=json.loads(sys.argv[3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    spec = node.spec(*argv, key="k", stdin="pipe")
    command = [sys.executable, "-c", code, str(node.directory), json.dumps(spec.to_dict()), json.dumps(node.env)]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == -signal.SIGKILL
    second = node.run(*argv, key="k", stdin="pipe", attempt=2)
    assert (second.kind, second.job) == (StartKind.ATTACHED, spec.job)
    node.client.close_stdin(second.job)
    result = node.client.wait(second.job, timeout_s=LIMIT_S)
    assert result is not None
    assert result.exit_code == 5
    assert log.read_text() == "start\n"


@pytest.mark.requirement("F6")
def test_foreground_trees_end_when_nobody_renews_and_background_ones_do_not() -> None:
    node = Node("--lease-s", "0.3")
    try:
        background = node.run("sleep", "1000", background=True)
        answer = node.run("sh", "-c", "setsid sleep 1000 & sleep 1000 & wait")
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert result.outcome is JobOutcome.CANCELLED
        assert result.cause is not None
        assert (result.cause["kind"], result.cause["actor"]) == ("parent_lost", "procd")
        assert [one.pid for one in node.processes()] == [background.pid]
    finally:
        node.close()
