"""What one keeper promises for one job: start, input, end, stop, time limit, lifeline."""

import base64
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from remit.core import Cause, CauseKind
from remit.processes.jobs import JobOutcome, JobPhase, JobResult
from remit.processes.output import read_capture
from remit.testing import wait_until
from tests.processes.world import LIMIT_S, World, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the observer reads /proc")

CAUSE = Cause(CauseKind.USER_INTERRUPT, origin="turn_1", actor="ann", reason="enough").to_dict()
OTHER_CAUSE = Cause(CauseKind.BUDGET, origin="turn_2").to_dict()
FOREVER = "echo ready; while :; do sleep 60; done"
DEAF = f"trap '' TERM; {FOREVER}"


def held(pid: int) -> None:
    """Wait until a process is stopped."""
    wait_until(lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], timeout_s=LIMIT_S)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


# -- start and end ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P3", "P8", "C35")
def test_an_exit_is_reported_once_with_its_code_and_all_output(world: World) -> None:
    job = world.sh("printf 'a\\377b'; echo err >&2; exit 5")
    result = job.result()
    assert (result.outcome, result.exit_code, result.signal, result.cause) == (JobOutcome.EXITED, 5, None, None)
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (3, 4, False)
    assert (result.signalled, result.survivors) == ((), ())
    assert read_capture(Path(job.spec.output_dir, "stdout")).text == "a\N{REPLACEMENT CHARACTER}b"
    wait_until(lambda: "end" in job.words(), timeout_s=LIMIT_S)
    assert job.words() == ["started", "ended", "end"]
    job.wait_gone()
    assert sorted(os.listdir(job.dir)) == ["lifeline.log", "output", "result.json", "spec.json", "state.json"]


def test_a_death_by_signal_is_no_exit_code(world: World) -> None:
    result = world.sh("kill -SEGV $$").result()
    assert (result.outcome, result.exit_code, result.signal) == (JobOutcome.EXITED, None, signal.SIGSEGV)


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("argv", "options", "what"),
    [
        (["no-such-program-here"], {}, "no such program"),
        (["/etc/passwd"], {}, "may not be executed"),
        (["true"], {"cwd": "/no/such/place"}, "cannot be entered"),
        (["true", "x" * 200_000], {}, "too long"),
        (["true"], {"env": {"PATH": os.environ["PATH"], "BIG": "x" * 3_000_000}}, "too long"),
        (["true"], {"env": {"PATH": os.environ["PATH"], "NUL": "a\0b"}}, "null"),
        (["true"], {"output_dir": "/proc/nothing/here"}, "cannot be made"),
    ],
    ids=["missing", "not executable", "no cwd", "long argument", "large environment", "NUL", "no output"],
)
def test_what_cannot_be_started_says_why_and_leaves_nothing(
    argv: list[str], options: dict[str, Any], what: str, world: World
) -> None:
    job = world.start(argv, **options)
    result = job.result()
    assert (result.outcome, result.exit_code, result.signal) == (JobOutcome.NOT_STARTED, None, None)
    assert what in result.error
    assert argv[0] in result.error
    assert result.errno is not None
    wait_until(lambda: "end" in job.words(), timeout_s=LIMIT_S)
    assert job.words() == ["ended", "end"]
    assert marked(job) == []


def test_a_script_without_a_first_line_is_told(world: World, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    script.chmod(0o700)
    result = world.start([str(script)]).result()
    assert (result.outcome, "#!" in result.error) == (JobOutcome.NOT_STARTED, True)


@pytest.mark.requirement("P9")
def test_a_program_gets_three_descriptors_default_signals_and_a_session_of_its_own(world: World) -> None:
    job = world.sh("ls /proc/self/fd | wc -l; grep -E 'Sig(Blk|Ign)' /proc/self/status; ps -o sid=,pgid=,pid= -p $$")
    assert job.result().exit_code == 0
    descriptors, blocked, ignored, *ids = job.output().decode().split("\n")
    assert int(descriptors) == 4  # the listing's own is the fourth
    assert int(blocked.split()[1], 16) == int(ignored.split()[1], 16) == 0
    assert len(set(ids[0].split())) == 1


def test_files_of_a_program_get_the_rights_that_were_asked_for(world: World) -> None:
    assert world.sh("umask").result().exit_code == 0
    job = world.sh("umask", umask=0o027)
    job.result()
    assert (world.jobs[0].output(), job.output()) == (b"0022\n", b"0027\n")


def test_a_program_knows_whose_it_is_and_no_secret_reaches_the_directory(world: World) -> None:
    env = {"PATH": os.environ["PATH"], "TOKEN": "s3cr3t-env", "REMIT_PROCESS": "outer"}
    job = world.start(["sh", "-c", 'cat >/dev/null; echo "$REMIT_RUN $REMIT_PROCESS"'], env=env, stdin=b"s3cr3t-stdin")
    job.result()
    assert job.output().decode() == f"run_of_{job.tag} outer/run_of_{job.tag}/{job.tag}\n"
    job.wait_gone()
    files = [path for path in job.dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


@pytest.mark.requirement("P12")
def test_two_jobs_share_nothing_and_end_alone(world: World) -> None:
    one, two = (world.sh(FOREVER).wait_ready() for _ in range(2))
    assert one.state.root is not None
    assert two.state.root is not None
    for look in (os.getsid, os.getpgid):
        assert look(one.state.root.pid) == one.state.root.pid
        assert look(two.state.root.pid) == two.state.root.pid
    assert one.state.token != two.state.token
    assert one.state.cgroup != two.state.cgroup or one.state.cgroup == ""
    one.stop()
    assert marked(two)
    assert not (two.dir / "result.json").exists()
    two.stop()


@pytest.mark.requirement("P13")
def test_it_works_below_a_process_that_ignores_the_end_of_children() -> None:
    world = World("ignore")
    try:
        assert world.sh("sleep 0; (exit 3); exit 7").result().exit_code == 7
        assert world.sh(FOREVER).wait_ready().stop().signal == signal.SIGKILL
    finally:
        world.close()


@pytest.mark.requirement("E16")
@pytest.mark.field_report("F3", "F13")
@pytest.mark.parametrize("containment", ["", "-subreaper,-pidfd,-cgroup"])
def test_what_a_program_leaves_running_is_stopped_and_named(containment: str, world: World, tmp_path: Path) -> None:
    # The leader ends only when the other has its trap, or SIGTERM could come before it.
    left = f"(trap '' TERM HUP; touch {tmp_path}/deaf; while :; do sleep 60; done)"
    ready = f"while [ ! -e {tmp_path}/deaf ]; do sleep 0.01; done"
    job = world.sh(f"{left} & {ready}; exit 4", grace_s=0.1, containment=containment)
    result = job.result()
    assert (result.outcome, result.exit_code, result.cause) == (JobOutcome.EXITED, 4, None)
    assert result.escalated
    assert set(result.escalated) <= set(result.signalled)
    assert ("portable" in result.containment) == bool(containment)
    assert marked(job) == []


@pytest.mark.requirement("P9")
def test_orphans_that_end_while_the_program_runs_leave_no_zombie(world: World) -> None:
    job = world.sh("for i in 1 2 3; do (sh -c 'exec true' &); done; echo ready; exec sleep 600", is_watched=True)
    root = job.wait_ready().state.root
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 1, timeout_s=LIMIT_S, message="a zombie stays")
    assert root is None or children.read_text().split() == [str(root.pid)]


# -- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("E20")
def test_without_input_a_program_reads_its_end_at_once(world: World) -> None:
    job = world.sh("cat; echo over")
    assert job.result().exit_code == 0
    assert job.output() == b"over\n"


def test_input_given_with_the_start_arrives_whole(world: World) -> None:
    data = os.urandom(1_500_000)
    job = world.start(["cat"], stdin=data)
    assert job.result().exit_code == 0
    assert job.output() == data


def test_input_that_nobody_reads_harms_nothing(world: World) -> None:
    job = world.start(["sh", "-c", "exec 0<&-; exit 3"], stdin=b"x" * 1_500_000)
    assert (job.result().exit_code, job.result().outcome) == (3, JobOutcome.EXITED)


def test_input_can_be_written_bit_by_bit(world: World) -> None:
    job = world.start(["sh", "-c", "while read line; do echo got $line; done; echo end"], stdin_kind="pipe")
    job.wait_running()
    with job.talk() as talk:
        assert talk.ask("write", data=base64.b64encode(b"one\n").decode())["kind"] == "written"
        wait_until(lambda: job.output() == b"got one\n", timeout_s=LIMIT_S)
        talk.send("wait")
        talk.send("close_stdin")
        answers = {message["kind"]: message for message in (talk.receive(), talk.receive())}
        assert set(answers) == {"stdin_closed", "ended"}
        assert answers["ended"]["result"]["exit_code"] == 0
    assert job.output() == b"got one\nend\n"


def test_writing_to_a_program_that_closed_its_input_says_so(world: World) -> None:
    job = world.start(["sh", "-c", f"exec 0<&-; {FOREVER}"], stdin_kind="pipe").wait_ready()
    data = base64.b64encode(b"x" * 100_000).decode()
    wait_until(lambda: job.ask("write", data=data)["kind"] == "stdin_closed", timeout_s=LIMIT_S)
    assert job.ask("close_stdin")["kind"] == "stdin_closed"
    other = world.sh(FOREVER).wait_ready()
    assert other.ask("write", data="")["kind"] == "stdin_closed"


def test_more_input_than_a_keeper_holds_is_refused(world: World) -> None:
    job = world.start(["sh", "-c", FOREVER], stdin_kind="pipe").wait_ready()
    with job.talk() as talk:
        numbers = [talk.send("write", data=base64.b64encode(b"x" * 2_500_000).decode()) for _ in range(4)]
        # The first three wait for a program that reads nothing.
        refused = talk.receive()
        assert (refused["id"], refused["kind"]) == (numbers[-1], "stdin_full")
        job.stop()
        assert [talk.receive()["kind"] for _ in numbers[:-1]] == ["stdin_closed"] * 3


# -- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P3", "P6", "A13")
def test_stops_join_the_first_cause_is_kept_and_a_shorter_grace_wins(world: World) -> None:
    job = world.sh(DEAF).wait_ready()
    with job.talk() as one, job.talk() as two, job.talk() as three:
        one.send("stop", cause=CAUSE, grace_s=3600.0)
        # Served in order of arrival: the phase tells that the first was.
        wait_until(lambda: job.ask("status")["state"]["phase"] == JobPhase.STOPPING, timeout_s=LIMIT_S)
        two.send("stop", cause=OTHER_CAUSE, grace_s=3000.0)
        three.send("stop", cause=OTHER_CAUSE, kill=True)
        answers = [talk.receive() for talk in (one, two, three)]
    assert {answer["kind"] for answer in answers} == {"stopped"}
    results = [JobResult.from_dict(answer["result"]) for answer in answers]
    assert results[0] == results[1] == results[2] == job.result()
    assert (results[0].outcome, results[0].cause) == (JobOutcome.CANCELLED, CAUSE)
    assert results[0].signal == signal.SIGKILL
    assert results[0].escalated


@pytest.mark.requirement("P4", "A10", "C13")
def test_a_stop_that_comes_after_the_exit_is_told_so(world: World, tmp_path: Path) -> None:
    """The keeper is held while the program ends, and finds the end and the stop at the same moment."""
    job = world.sh(f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit 5").wait_running()
    root = job.state.root
    assert root is not None
    with job.talk() as talk:
        assert talk.ask("status")["kind"] == "status"
        os.kill(job.pid, signal.SIGSTOP)
        held(job.pid)
        (tmp_path / "go").touch()
        wait_until(lambda: is_zombie(root.pid), timeout_s=LIMIT_S)
        talk.send("stop", cause=CAUSE, grace_s=0.0)
        os.kill(job.pid, signal.SIGCONT)
        answer = talk.receive()
    result = JobResult.from_dict(answer["result"])
    assert (answer["kind"], result.outcome, result.exit_code) == ("not_running", JobOutcome.EXITED, 5)
    assert (result.cause, result.signalled) == (None, ())


@pytest.mark.requirement("P3", "P4", "B17")
def test_cancels_that_race_with_the_exit_end_in_one_consistent_result(world: World) -> None:
    jobs = [world.sh("read line; exit 5", stdin_kind="pipe") for _ in range(12)]
    for number, job in enumerate(jobs):
        job.wait_running()
        with job.talk() as talk, job.talk() as other:
            go = base64.b64encode(b"go\n").decode()
            if number % 2:
                talk.send("stop", grace_s=0.0)
                other.send("write", data=go)
            else:
                other.send("write", data=go)
                talk.send("stop")
            try:
                answer = talk.receive()
            except (ConnectionError, AssertionError):  # the keeper was gone before it was asked: the file tells
                answer = {"kind": "not_running", "result": job.result().to_dict()}
        result = job.result()
        assert JobResult.from_dict(answer["result"]) == result
        if result.outcome is JobOutcome.EXITED:
            assert (answer["kind"], result.exit_code, result.signalled) == ("not_running", 5, ())
        else:
            assert (answer["kind"], result.outcome) == ("stopped", JobOutcome.CANCELLED)
            assert result.exit_code == 5 or result.signal in (signal.SIGKILL, signal.SIGTERM)


@pytest.mark.requirement("P7")
@pytest.mark.field_report("B3")
def test_a_stop_that_is_there_before_the_start_starts_nothing(world: World, tmp_path: Path) -> None:
    job = world.sh(f"touch {tmp_path}/ran", early={"op": "stop", "id": 1, "cause": CAUSE, "grace_s": 0.0})
    result = job.result()
    assert (result.outcome, result.cause, result.signalled) == (JobOutcome.CANCELLED, CAUSE, ())
    job.wait_gone()
    assert not (tmp_path / "ran").exists()
    assert "started" not in job.words()


@pytest.mark.requirement("E7", "P6")
def test_a_stop_between_fork_and_execution_still_gets_the_program(world: World) -> None:
    """Held at each place between the two; the stop is in the keeper's hands before it goes on."""
    for place in ("forked", "recorded", "gate_opened"):
        job = world.sh(FOREVER, failpoint=place, how="hold")
        wait_until(lambda job=job: job.pid > 0, timeout_s=LIMIT_S)  # type: ignore[misc]
        held(job.pid)
        world.tell("say", job=job.tag, op="stop", id=1, grace_s=0.2, cause=CAUSE)
        world.tell("say", job=job.tag, op="stop", id=2, grace_s=0.1, cause=OTHER_CAUSE)
        os.kill(job.pid, signal.SIGCONT)
        result = job.result()
        assert (place, result.outcome, result.survivors) == (place, JobOutcome.CANCELLED, ())
        assert result.cause == CAUSE
        assert marked(job) == []


@pytest.mark.requirement("P8", "E4")
@pytest.mark.field_report("M14")
def test_what_was_written_before_the_end_is_kept(world: World) -> None:
    job = world.sh("trap 'echo bye; echo err >&2; exit 3' TERM; echo ready; while :; do sleep 0.01; done").wait_ready()
    result = job.stop(grace_s=60.0)
    assert (result.outcome, result.exit_code, result.escalated) == (JobOutcome.CANCELLED, 3, ())
    assert job.output() == b"ready\nbye\n"
    assert job.output("stderr").endswith(b"err\n")  # after what the shell says of the end of `sleep`
    assert (result.stdout_bytes, result.stderr_bytes) == (10, len(job.output("stderr")))


@pytest.mark.requirement("P11")
@pytest.mark.field_report("C7", "D13")
def test_no_end_is_told_while_anything_is_left(world: World) -> None:
    """The leader ends at once, its grandchild does not: that is no end."""
    job = world.creature("leader ends, grandchild stays", grace_s=3600.0).wait_ready()
    root = job.state.root
    assert root is not None
    with job.talk() as talk:
        talk.send("stop", grace_s=3600.0)
        wait_until(lambda: is_zombie(root.pid), timeout_s=LIMIT_S)
        assert job.ask("status")["state"]["phase"] == JobPhase.STOPPING
        assert not (job.dir / "result.json").exists()
        assert marked(job)
        job.stop()
        assert talk.receive()["result"]["survivors"] == []
    assert marked(job) == []


# -- time limit and background ----------------------------------------------------------------------------------------


@pytest.mark.requirement("B16")
def test_a_time_limit_stops_and_is_no_cancel(world: World) -> None:
    result = world.sh(FOREVER, timeout_s=0.0, grace_s=5.0).result()
    assert (result.outcome, result.cause, result.survivors) == (JobOutcome.TIMED_OUT, None, ())


def test_a_time_limit_can_give_the_program_to_the_session(world: World) -> None:
    job = world.sh(FOREVER, timeout_s=0.0, on_timeout="background", reattach_grace_s=0.0).wait_ready()
    wait_until(lambda: "backgrounded" in job.words(), timeout_s=LIMIT_S)
    world.tell("drop", job=job.tag)
    assert job.ask("status")["state"]["background"] is True
    assert marked(job)
    result = job.stop()
    assert (result.outcome, result.backgrounded) == (JobOutcome.CANCELLED, True)


def test_a_job_of_the_session_needs_no_lifeline(world: World) -> None:
    job = world.sh(FOREVER, background=True, reattach_grace_s=0.0).wait_ready()
    detached = world.sh(FOREVER, reattach_grace_s=0.0).wait_ready()
    assert detached.ask("detach")["kind"] == "detached"
    for each in (job, detached):
        world.tell("drop", job=each.tag)
        # Two questions: the loss of the lifeline was seen before the second answer.
        assert each.ask("status")["state"]["background"] is True
        assert each.ask("status")["state"]["phase"] == JobPhase.RUNNING
        assert each.stop().backgrounded is True


# -- lifeline ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P9")
def test_without_a_supervisor_a_foreground_job_ends_with_its_tree(world: World) -> None:
    job = world.creature("both", reattach_grace_s=0.1).wait_ready()
    world.tell("drop", job=job.tag)
    result = job.result()
    assert result.outcome is JobOutcome.CANCELLED
    assert result.cause is not None
    assert Cause.from_dict(result.cause).kind is CauseKind.PARENT_LOST
    job.wait_gone()
    assert marked(job) == []


@pytest.mark.requirement("P9")
@pytest.mark.field_report("F8")
def test_a_supervisor_that_is_killed_takes_nothing_along_and_leaves_nothing() -> None:
    world = World()
    try:
        adopted = world.sh("read line; exit 6", stdin_kind="pipe").wait_running()
        left = world.creature("both", reattach_grace_s=0.1).wait_ready()
        world.process.kill()
        world.process.wait()
        with adopted.talk() as talk:
            answer = talk.ask("attach", epoch=1)
            assert (answer["kind"], answer["state"]["phase"]) == ("attached", JobPhase.RUNNING)
            talk.send("write", data=base64.b64encode(b"go\n").decode())
            messages = [talk.receive(), talk.receive()]
        assert {message["op"] for message in messages} == {"answer", "ended"}
        assert adopted.result().exit_code == 6
        assert left.result().outcome is JobOutcome.CANCELLED
        assert marked(left) == []
    finally:
        world.close()


@pytest.mark.requirement("C31")
def test_only_a_newer_supervisor_takes_over_and_the_older_one_is_let_go(world: World) -> None:
    job = world.sh(FOREVER, reattach_grace_s=0.0).wait_ready()
    with job.talk() as talk:
        assert talk.ask("attach", epoch=0)["kind"] == "stale_epoch"
        assert talk.ask("attach", epoch=7)["kind"] == "attached"
        wait_until(lambda: "end" in job.words(), timeout_s=LIMIT_S)
        assert (job.state.epoch, job.state.phase) == (7, JobPhase.RUNNING)
        with job.talk() as late:
            assert late.ask("attach", epoch=6)["kind"] == "stale_epoch"
        assert job.stop().outcome is JobOutcome.CANCELLED
        assert talk.receive()["op"] == "ended"


@pytest.mark.requirement("P9")
@pytest.mark.field_report("F17")
def test_jobs_leave_no_descriptor_and_no_zombie_with_their_supervisor(world: World) -> None:
    before = world.tell("children")
    jobs = [world.sh("exit 0") for _ in range(10)]
    for job in jobs:
        job.result()
        job.wait_gone()  # a zombie would still be there
        wait_until(lambda job=job: "end" in job.words(), timeout_s=LIMIT_S)  # type: ignore[misc]
    assert world.tell("children") == before


@pytest.mark.requirement("P9")
def test_a_keeper_has_no_descriptor_of_another_one(world: World) -> None:
    one, two = (world.sh(FOREVER).wait_running() for _ in range(2))

    def sockets(pid: int) -> set[str]:
        links = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        return {link for link in links if link.startswith(("socket:", "pipe:"))}

    assert not sockets(one.pid) & sockets(two.pid)
    # Lifeline, listener, and the pipe that wakes it; had it kept another lifeline, its loss would never be seen.
    assert len(sockets(two.pid)) == 3


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("C12")
def test_requests_that_do_not_hold_are_told_apart_and_harm_nothing(world: World) -> None:
    job = world.sh(FOREVER).wait_ready()
    with job.talk() as talk:
        assert talk.ask("explode")["kind"] == "unsupported"
        assert talk.ask("attach")["kind"] == "bad_request"
        assert talk.ask("stop", cause={"kind": "mood"})["kind"] == "bad_request"
        assert talk.ask("stop", grace_s="soon")["kind"] == "bad_request"
        assert talk.ask("stop", grace_s=-1)["kind"] == "bad_request"
        assert talk.ask("write", data="%%%")["kind"] == "bad_request"
    with job.talk() as talk:
        talk.connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert talk.connection.recv(1) == b""
    assert job.ask("status")["state"]["phase"] == JobPhase.RUNNING
    assert job.stop().outcome is JobOutcome.CANCELLED


def test_everybody_who_waits_is_told_the_same(world: World) -> None:
    job = world.sh("read line; exit 9", stdin_kind="pipe").wait_running()
    with job.talk() as one, job.talk() as two:
        one.send("wait")
        two.send("wait")
        with job.talk() as gone:
            gone.send("wait")
        job.ask("close_stdin")
        assert one.receive()["result"] == two.receive()["result"] == job.result().to_dict()


def test_a_result_that_cannot_be_written_is_still_told(world: World) -> None:
    job = world.sh("read line; exit 8", stdin_kind="pipe", reattach_grace_s=0.1).wait_running()
    with job.talk() as talk:
        away = job.dir.with_name("away_" + job.tag)
        job.dir.rename(away)
        talk.send("close_stdin")
        assert talk.ask("wait")["result"]["exit_code"] == 8
        job.wait_gone()
        assert "ended" not in job.words()  # its log was in the directory
        away.rename(job.dir)
    assert not (job.dir / "result.json").exists()
