"""A keeper that dies, at any step, leaves a tree that can still be found, and no half result."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from remit.processes.containment import Cgroup, remove_unused_groups
from remit.processes.jobs import RESULT_NAME, STATE_NAME, JobOutcome, JobResult, JobState, read_record
from remit.processes.keeping import FAILPOINTS
from remit.processes.sweep import sweep
from remit.testing import wait_until
from tests.processes.world import LIMIT_S, Job, World, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the observer reads /proc")

AT_THE_GATE = ("forked", "gate_opened")
BEFORE_THE_END = FAILPOINTS[: FAILPOINTS.index("stop_begun")]


def clean_up(job: Job) -> None:
    """Do what a supervisor does that lost a keeper: by the record that it left."""
    state = read_record(job.dir / STATE_NAME, JobState)
    if state is None:  # killed before it had anything to record
        sweep(0, 0.0, token=job.tag, grace_s=0.0)
        remove_unused_groups()
        return
    leader = state.root or state.keeper
    sweep(leader.pid, leader.started, token=state.token, grace_s=0.0)
    if state.cgroup:
        wait_until(Cgroup(Path(state.cgroup)).remove, timeout_s=LIMIT_S)


def start(world: World, place: str, *, is_watched: bool) -> Job:
    """Start a tree that hides in another session, with a keeper that dies at a place."""
    return world.creature("both", failpoint=place, grace_s=0.0, is_watched=is_watched)


@pytest.mark.faults
@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("place", "is_watched"),
    [*((place, False) for place in FAILPOINTS), *((place, True) for place in FAILPOINTS if place not in AT_THE_GATE)],
)
def test_a_keeper_that_is_killed_at_any_step_leaves_what_can_be_swept(
    place: str, is_watched: bool, world: World
) -> None:
    job = start(world, place, is_watched=is_watched)
    if place not in BEFORE_THE_END:
        job.wait_ready()
        world.tell("say", job=job.tag, op="stop", id=1, grace_s=0.0, cause=None)
    wait_until(lambda: "end" in job.words(), timeout_s=LIMIT_S, message="the keeper lives on")
    job.wait_gone()
    clean_up(job)
    assert marked(job) == []
    result = read_record(job.dir / RESULT_NAME, JobResult)
    if place in ("result_written", "told"):
        assert result is not None
        assert (result.outcome, result.survivors) == (JobOutcome.CANCELLED, ())
    else:
        assert result is None
    assert ("ended" in job.words()) == (place == "told")


@pytest.mark.faults
@pytest.mark.requirement("P7")
def test_a_program_waits_until_its_keeper_has_recorded_it(world: World, tmp_path: Path) -> None:
    job = world.sh(f"touch {tmp_path}/ran; exec sleep 600", failpoint="forked", how="hold")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    wait_until(lambda: children.read_text() and stat_of(job.pid)[0] == "T", timeout_s=LIMIT_S)
    child = int(children.read_text())
    # In a session of its own and asleep: it waits at its gate, or would be past it.
    wait_until(lambda: stat_of(child)[0] == "S" and stat_of(child)[3] == str(child), timeout_s=LIMIT_S)
    assert b"sleep 600" not in Path(f"/proc/{child}/cmdline").read_bytes()
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: marked(job) == [], timeout_s=LIMIT_S)
    assert not (tmp_path / "ran").exists()
    assert job.state.root is None
    clean_up(job)


def stat_of(pid: int) -> list[str]:
    """Return state, parent, group, session and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("is_watched", [False, True])
def test_nothing_is_started_for_a_supervisor_that_has_gone(is_watched: bool, world: World, tmp_path: Path) -> None:
    job = world.sh(f"touch {tmp_path}/ran", early={"op": "go"}, is_watched=is_watched)
    job.wait_gone()
    assert not (tmp_path / "ran").exists()
    assert not job.dir.exists()


@pytest.mark.faults
@pytest.mark.requirement("P7")
def test_one_key_never_runs_twice_although_its_first_keeper_comes_late(world: World, tmp_path: Path) -> None:
    """The first keeper is held before its record; the second has made that record meanwhile."""
    job = world.sh(f"echo one >> {tmp_path}/ran; exec sleep 600", is_watched=True).wait_running()
    again = world.start(list(job.spec.argv), job=job.tag, is_watched=True, again=True)
    wait_until(lambda: [word for word in job.words() if word == "ended"], timeout_s=LIMIT_S)
    again.wait_gone()
    assert (tmp_path / "ran").read_text() == "one\n"
    assert job.stop().signal == signal.SIGKILL


@pytest.mark.faults
@pytest.mark.requirement("P7", "P9")
def test_the_program_dies_with_its_keeper(world: World) -> None:
    job = world.sh("echo ready; exec sleep 600").wait_ready()
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: marked(job) == [], timeout_s=LIMIT_S)
    clean_up(job)


@pytest.mark.faults
@pytest.mark.requirement("P7")
def test_a_keeper_that_fails_says_so_in_its_directory(world: World) -> None:
    job = world.sh("echo ready; exec sleep 600", failpoint="executed", how="raise")
    job.wait_gone()
    assert "RuntimeError: failpoint executed" in job.log()
    wait_until(lambda: marked(job) == [], timeout_s=LIMIT_S)
    clean_up(job)


@pytest.mark.faults
@pytest.mark.requirement("P7", "P9")
def test_a_supervisor_and_a_keeper_killed_together_leave_what_can_be_swept() -> None:
    world = World()
    try:
        job = world.creature("a thousand children", size=30).wait_ready()
        world.process.kill()
        os.kill(job.pid, signal.SIGKILL)
        world.process.wait()
        job.wait_gone()
        clean_up(job)
        assert marked(job) == []
    finally:
        world.close()


@pytest.mark.faults
@pytest.mark.requirement("P7")
def test_a_keeper_that_was_held_up_goes_on_where_it_was(world: World) -> None:
    """SIGSTOP is the pause of a machine: nothing may be decided by it."""
    job = world.sh("echo ready; exec sleep 600", reattach_grace_s=0.0).wait_ready()
    os.kill(job.pid, signal.SIGSTOP)
    answers: list[JobResult] = []
    asking = threading.Thread(target=lambda: answers.append(job.stop()))
    asking.start()
    world.tell("drop", job=job.tag)
    os.kill(job.pid, signal.SIGCONT)
    asking.join(LIMIT_S)
    assert answers == [job.result()]
    assert marked(job) == []
