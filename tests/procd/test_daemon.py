"""The real daemon with real programs: start, attach, wait, watch, stop, input, and bad ones."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from remit.core.cause import Cause, CauseKind
from remit.core.errors import (
    CommandNotStarted,
    InvalidArgument,
    NotFound,
    ProcdUnavailable,
    ProcessError,
    ProcessKeyConflict,
)
from remit.processes.answers import StartKind, StopKind
from remit.processes.client import ProcessClient
from remit.processes.draft import is_draft
from remit.processes.jobs import JobOutcome, JobResult
from tests.procd.live import LIMIT_S, Node, is_running, wait_for, wait_gone

CAUSE = Cause(kind=CauseKind.USER_INTERRUPT, origin="turn_1", actor="ann")


class Lost(Exception):
    """What a failpoint raises: the answer never arrived."""


def test_a_program_runs_to_its_end_and_its_status_is_kept(node: Node) -> None:
    answer = node.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert answer.kind is StartKind.STARTED
    assert answer.pid > 1
    for client in (node.client, node.connect()):  # also for one that comes after the end
        result = client.wait(answer.job, timeout_s=LIMIT_S)
        assert result is not None
        assert (result.outcome, result.exit_code, result.survivors) == (JobOutcome.EXITED, 7, ())
    node.wait_output(answer.job, b"out\n")


def test_two_waiters_and_a_watch_have_the_same_result(node: Node) -> None:
    answer = node.run("sh", "-c", "read line; exit 3", stdin="pipe")
    heard: list[JobResult] = []
    told = threading.Event()

    def hear(result: JobResult) -> None:
        heard.append(result)
        told.set()

    node.client.watch(answer.job, hear)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.wait, answer.job, timeout_s=LIMIT_S) for client in (node.client, node.connect())]
        node.client.write_stdin(answer.job, b"go\n")
        results = [wait.result() for wait in waits]
    assert told.wait(LIMIT_S)
    assert [result and result.exit_code for result in (*results, *heard)] == [3, 3, 3]
    # A watch of what has ended hears of it as well.
    told.clear()
    node.client.watch(answer.job, hear)
    assert told.wait(LIMIT_S)


def test_a_closed_watch_hears_nothing_and_no_thread_stays(node: Node) -> None:
    answer = node.run("sh", "-c", "read line", stdin="pipe")
    heard: list[JobResult] = []
    watch = node.client.watch(answer.job, heard.append)
    watch.close()
    watch.close()
    node.client.close_stdin(answer.job)
    assert node.client.wait(answer.job, timeout_s=LIMIT_S) is not None
    assert heard == []


def test_a_watch_that_fails_keeps_no_other_from_hearing(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    answer = node.run("sh", "-c", "read line", stdin="pipe")
    told = threading.Event()

    def fail(result: JobResult) -> None:
        raise ValueError("mine")

    node.client.watch(answer.job, fail)
    node.client.watch(answer.job, lambda _: told.set())
    node.client.close_stdin(answer.job)
    assert told.wait(LIMIT_S)
    assert "a watch of" in caplog.text


@pytest.mark.requirement("C16")
def test_a_second_attempt_attaches_by_key_and_the_program_ran_once(node: Node) -> None:
    log = node.directory / f"runs-{node.scope}"
    argv = ("sh", "-c", f"echo start >> {log}; read line; exit 4")
    first = node.run(*argv, key="k", stdin="pipe")
    second = node.connect().start(node.spec(*argv, key="k", stdin="pipe", attempt=2, generation=2), env=node.env)
    assert (second.kind, second.job, second.pid) == (StartKind.ATTACHED, first.job, first.pid)
    with pytest.raises(ProcessKeyConflict, match="another command") as caught:
        node.run("sh", "-c", "other", key="k")
    assert caught.value.code == "input_mismatch"
    node.client.close_stdin(first.job)
    result = node.client.wait(first.job, timeout_s=LIMIT_S)
    assert result is not None
    assert result.exit_code == 4
    third = node.run(*argv, key="k", stdin="pipe", attempt=3)
    assert third.kind is StartKind.FINISHED
    assert third.result == result
    assert log.read_text() == "start\n"


@pytest.mark.requirement("E2")
@pytest.mark.parametrize("by", ["job", "key"])
def test_a_stop_ends_the_whole_tree_and_keeps_its_cause(node: Node, by: str) -> None:
    answer = node.tree(key="k")
    stopped = node.client.stop(
        scope=node.scope,
        job=answer.job if by == "job" else None,
        key="k" if by == "key" else None,
        cause=CAUSE,
        grace_s=2.0,
    )
    assert stopped.kind is StopKind.STOPPED
    assert stopped.is_proven_gone
    assert stopped.result is not None
    assert (stopped.result.outcome, stopped.result.cause) == (JobOutcome.CANCELLED, CAUSE.to_dict())
    assert node.processes() == []
    assert node.client.stop(scope=node.scope, key="k").kind is StopKind.NOT_RUNNING
    assert node.client.stop(scope="other-" + node.scope, key="k").kind is StopKind.PROCESS_KEY_NOT_FOUND


@pytest.mark.requirement("C5")
def test_a_start_whose_answer_was_lost_is_stopped_by_its_key(node: Node) -> None:
    def lose(name: str) -> None:
        if name == "start_answered":
            raise Lost

    client = node.connect(failpoint=lose)
    with pytest.raises(Lost):
        client.start(node.spec("sleep", "1000", key="k"), env=node.env)
    assert len(node.sleeping()) == 1
    stopped = client.stop(scope=node.scope, key="k", cause=CAUSE, grace_s=0, tombstone=True)
    assert stopped.kind is StopKind.STOPPED
    assert node.processes() == []


@pytest.mark.requirement("C5")
@pytest.mark.requirement("C25")
def test_a_stop_that_overtakes_its_start_leaves_nothing_running(node: Node) -> None:
    def overtake(name: str) -> None:
        if name == "start_sending":
            assert node.client.stop(scope=node.scope, key="k", tombstone=True).kind is StopKind.PROCESS_KEY_NOT_FOUND

    answer = node.connect(failpoint=overtake).start(node.spec("sleep", "1000", key="k"), env=node.env)
    assert answer.kind is StartKind.TOMBSTONED
    assert node.processes() == []


@pytest.mark.requirement("C10")
def test_a_stop_between_a_start_and_its_answer_leaves_nothing_running(node: Node) -> None:
    stops: list[StopKind] = []

    def stop(name: str) -> None:
        if name == "start_sent":
            stops.append(node.client.stop(scope=node.scope, key="k", grace_s=0, tombstone=True).kind)

    node.connect(failpoint=stop).start(node.spec("sleep", "1000", key="k"), env=node.env)
    # Either it was there to be stopped, or the start came second and was refused.
    assert stops[0] in (StopKind.STOPPED, StopKind.PROCESS_KEY_NOT_FOUND)
    assert node.processes() == []


@pytest.mark.requirement("A16")
def test_stopping_a_run_spares_its_background_process(node: Node) -> None:
    node.tree()
    background = node.run("sleep", "1000", background=True)
    summary = node.client.stop_many(scope=node.scope, runs=[node.run_id], cause=CAUSE, grace_s=2.0)
    assert len(summary.stopped) == 1
    assert summary.is_proven_gone
    assert summary.spared == (background.job,)
    assert [process.pid for process in node.processes()] == [background.pid]
    assert node.run("true").kind is StartKind.TOMBSTONED
    assert node.client.stop(scope=node.scope, job=background.job).is_proven_gone


@pytest.mark.requirement("A16")
def test_a_detached_process_is_spared_as_well(node: Node) -> None:
    answer = node.run("sleep", "1000")
    node.client.detach(answer.job)
    assert node.client.stop_many(scope=node.scope, runs=[node.run_id]).spared == (answer.job,)
    assert [view.background for view in node.client.list(scope=node.scope)] == [True]
    assert is_running(answer.pid)


def test_input_is_written_through_and_closed_input_is_a_typed_error(node: Node) -> None:
    answer = node.run("cat", stdin="pipe")
    data = bytes(range(256)) * 4_000
    node.client.write_stdin(answer.job, data)
    node.client.close_stdin(answer.job)
    assert node.client.wait(answer.job, timeout_s=LIMIT_S) is not None
    assert (node.directory / "out" / answer.job / "stdout").read_bytes() == data
    # Its keeper may still be on its way out.
    with pytest.raises((NotFound, ProcessError)):
        node.client.write_stdin(answer.job, b"x")
    with pytest.raises(NotFound, match="lives"):
        node.client.write_stdin("proc_unknown", b"x")
    deaf = node.run("sh", "-c", "exec <&-; echo closed; sleep 1000", stdin="pipe")
    node.wait_output(deaf.job, b"closed")
    with pytest.raises(ProcessError, match="closed"):
        node.client.write_stdin(deaf.job, b"x" * 100_000)


def test_data_for_input_travels_in_memory_alone(node: Node) -> None:
    secret = "s3cr3t-" + node.tag
    spec = node.spec("sh", "-c", "wc -c; echo done; sleep 1000", stdin="data")
    node.client.start(spec, env={**node.env, "TOKEN": secret}, stdin=secret.encode() * 3)
    node.wait_output(spec.job, b"done")
    assert f"{len(secret) * 3}\n" in (node.directory / "out" / spec.job / "stdout").read_text().replace(" ", "")
    for path in node.directory.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (("/no/such/program",), "no such program"),
        (("/etc/passwd",), "executed"),
        (("true", "x" * 3_000_000), "too long|pass long"),
    ],
)
def test_what_cannot_be_executed_is_a_typed_error_and_leaves_nothing(
    node: Node, argv: tuple[str, ...], match: str
) -> None:
    before = {path for path in node.place.jobs.iterdir() if not is_draft(path)}
    with pytest.raises(CommandNotStarted, match=match):
        node.run(*argv, key="k")
    assert node.client.list(scope=node.scope) == []
    assert {path for path in node.place.jobs.iterdir() if not is_draft(path)} == before
    assert node.run("true", key="k").kind is StartKind.STARTED


def test_bad_specs_are_refused_before_anything_is_started(node: Node) -> None:
    with pytest.raises(CommandNotStarted, match="make it, or give another one"):
        node.run("true", cwd="/no/such/place")
    for argv in ((), ("",), ("a\0b",)):
        with pytest.raises(InvalidArgument):
            node.run(*argv)
    with pytest.raises(CommandNotStarted, match="pass large values in files"):
        node.client.start(node.spec("true"), env={"BIG": "x" * 5_000_000})
    with pytest.raises(InvalidArgument, match="grace_s"):
        node.client.stop(scope=node.scope, key="k", grace_s=-1)
    assert node.client.list(scope=node.scope) == []


def test_many_at_once_all_start_and_all_end(node: Node) -> None:
    def one(number: int) -> int | None:
        answer = node.run("sh", "-c", f"exit {number}")
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
        return result.exit_code if result else None

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == list(range(40))
    # None of them is left as a zombie of the daemon.
    node.wait_reaped()


def test_concurrent_starts_of_one_key_start_one_program(node: Node) -> None:
    log = node.directory / f"runs-{node.scope}"
    barrier = threading.Barrier(8)

    def one(_: int) -> tuple[StartKind, str]:
        barrier.wait()
        answer = node.run("sh", "-c", f"echo x >> {log}; sleep 1000", key="k")
        return answer.kind, answer.job

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    kinds = [kind for kind, _ in answers]
    assert (kinds.count(StartKind.STARTED), kinds.count(StartKind.ATTACHED)) == (1, 7)
    assert len({job for _, job in answers}) == 1
    wait_for(log.exists, message="it never ran")
    assert log.read_text() == "x\n"


def test_a_client_that_may_not_start_the_daemon_says_so(node: Node) -> None:
    pid = node.kill_daemon()
    client = node.connect(start=False)
    with pytest.raises(ProcdUnavailable, match="starts with the first process"):
        client.list()
    assert not is_running(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_another_user_is_refused_even_where_the_directory_lets_it_in(node: Node) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        f"s.connect({str(node.place.socket)!r});"
        's.sendall(b\'\\0\\0\\0\\x13\' + b\'{"v":1,"op":"ping"}\');'
        "sys.exit(5 if s.recv(100) else 0)"
    )
    directories = (node.directory, node.place.root)
    try:
        for path in directories:
            path.chmod(0o755)
        node.place.socket.chmod(0o666)
        answer = node.run("python3", "-c", code)
        result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    finally:
        node.place.socket.chmod(0o600)
        for path in directories:
            path.chmod(0o700)
    assert result is not None
    # Closed without a word, or reset because what it said was never read.
    assert result.exit_code in (0, 1), (node.directory / "out" / answer.job / "stderr").read_text()
    assert "refused a connection of user 65534" in node.place.log.read_text()


def test_the_daemon_leaves_its_starter_and_carries_no_mark(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.kill_daemon()
    monkeypatch.setenv("REMIT_PROCESS", "run_1/proc_1")
    monkeypatch.setenv("SECRET", "x")
    node.client.list()
    daemon = psutil.Process(node.daemon_pid())
    assert os.getpid() not in {parent.pid for parent in daemon.parents()}
    assert os.getsid(daemon.pid) != os.getsid(0)
    environ = daemon.environ()
    assert "REMIT_PROCESS" not in environ
    assert "SECRET" not in environ
    assert daemon.cwd() == "/"
    for path in (node.place.socket, node.place.log, node.place.life_lock):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.requirement("F6")
def test_foreground_processes_end_with_the_lease_and_background_ones_go_on(node: Node) -> None:
    node.tree()
    background = node.run("sleep", "1000", background=True)
    other = node.run("sleep", "1000", scope="other-" + node.scope)
    node.client.renew("other-" + node.scope, holder="c", ttl_s=3_000)
    summary = node.client.release(node.scope)
    assert summary.is_proven_gone
    assert {process.pid for process in node.processes()} == {background.pid, other.pid}
    short = node.run("sleep", "1000", scope="short-" + node.scope)
    node.client.renew("short-" + node.scope, holder="c", ttl_s=0.001)
    assert is_running(short.pid)  # a shorter renewal takes nothing away


def test_pids_in_answers_are_the_programs(node: Node) -> None:
    answer = node.run("sleep", "1000")
    assert psutil.Process(answer.pid).cmdline() == ["sleep", "1000"]
    assert [view.pid for view in node.client.list(runs=[node.run_id])] == [answer.pid]
    node.client.stop(scope=node.scope, job=answer.job, kill=True)
    wait_gone(answer.pid)


def test_a_client_has_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMIT_STATE_DIR", "/tmp/somewhere")
    assert str(ProcessClient().state_dir) == "/tmp/somewhere"
