"""Every creature of the zoo is stopped while it is at its hardest, on every path, and nothing of it is left."""

import os
import sys

import pytest

from remit.processes.containment import make_cgroup
from remit.processes.jobs import JobOutcome, JobResult
from remit.testing import wait_until
from remit.testing.zoo import ZOO, Creature, alive, cull, living
from tests.processes.world import FALLBACKS, LIMIT_S, Job, World, marked_many

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the observer reads /proc")

SMALL = 40
"""Children of those that have many, in the fast tests."""
ROUNDS = 200
QUICK = ("-cgroup", FALLBACKS[-1])
"""Children of one's own and nothing else; and nothing of all. With a control group both would be easier."""


def is_held(creature: Creature, containment: str) -> bool:
    """Tell whether a way without subreaper and control group promises to find a creature."""
    return not creature.hides or "-subreaper" not in containment or "-cgroup" not in containment


def check(*ended: tuple[Job, JobResult]) -> None:
    for job, result in ended:
        assert (result.outcome, result.survivors, result.denied) == (JobOutcome.CANCELLED, (), ()), job.spec.argv[-2:]
    left = {tag: pids for tag, pids in marked_many([job for job, _ in ended]).items() if pids}
    assert left == {}


@pytest.mark.requirement("E2", "P1", "P12")
@pytest.mark.field_report("F1", "F2", "F5", "F8")
@pytest.mark.parametrize(
    "containment", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in FALLBACKS]
)
def test_nothing_of_any_creature_is_left(containment: str, world: World) -> None:
    """All at once, so that they also have to be told apart."""
    chosen = [creature for creature in ZOO.values() if is_held(creature, containment)]
    jobs = [
        world.creature(creature.name, containment=containment, size=SMALL if "thousand" in creature.name else 0)
        for creature in chosen
    ]
    for job in jobs:
        job.wait_ready()
    check(*[(job, job.stop(grace_s=0.0)) for job in jobs])


@pytest.mark.requirement("E4", "E10", "E22")
@pytest.mark.field_report("F2", "F11")
@pytest.mark.parametrize("containment", ["", "-subreaper,-pidfd,-cgroup"])
def test_sigterm_suffices_for_those_that_obey_and_only_for_them(containment: str, world: World) -> None:
    """All at once, so that they are also told apart."""
    chosen = [creature for creature in ZOO.values() if not creature.hides and creature.name != "a thousand children"]
    jobs = [world.creature(creature.name, containment=containment) for creature in chosen]
    for job in jobs:
        job.wait_ready()
    results = [job.stop(grace_s=30.0 if creature.obeys else 0.1) for creature, job in zip(chosen, jobs, strict=True)]
    check(*zip(jobs, results, strict=True))
    for creature, result in zip(chosen, results, strict=True):
        assert (creature.name, bool(result.escalated)) == (creature.name, not creature.obeys)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize("containment", ["-cgroup", "-subreaper,-pidfd,-cgroup"])
def test_the_kernel_itself_finds_nobody_left(containment: str, world: World) -> None:
    """The observer is a control group that the code under test does not know."""
    observer = make_cgroup(f"observer_{os.urandom(4).hex()}")
    if observer is None:
        pytest.skip("no control group can be made here")
    enter = ["sh", "-c", f'echo 0 > {observer.path}/cgroup.procs; exec "$@"', "sh"]
    try:
        for name in ("both", "closed descriptors", "respawner", "nested subreaper"):
            job = f"proc_{os.urandom(8).hex()}"
            started = world.start([*enter, *ZOO[name].argv(job)], job=job, containment=containment).wait_ready()
            assert observer.pids(), name
            assert started.stop(grace_s=0.1).survivors == ()
            # Those that were nobody's child are waited for by the system, in its own time.
            assert [pid for pid in observer.pids() if is_running(pid)] == [], name
    finally:
        wait_until(observer.remove, timeout_s=LIMIT_S, message="the observer is not empty")


def is_running(pid: int) -> bool:
    return any(True for _ in living(pid, "stat"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.requirement("P1", "P10")
def test_a_thousand_children_are_stopped(world: World) -> None:
    for containment in FALLBACKS:
        job = world.creature("a thousand children", containment=containment).wait_ready()
        result = job.stop(grace_s=0.0)
        check((job, result))
        assert len(result.signalled) > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.requirement("E2", "P1")
def test_two_hundred_rounds_leave_nothing(world: World) -> None:
    """All creatures on all paths in turn, several at once, so that they also disturb each other."""
    pairs = [(ZOO[name], way) for way in FALLBACKS for name in sorted(ZOO) if is_held(ZOO[name], way)]
    rounds = [pairs[number % len(pairs)] for number in range(ROUNDS)]
    for start in range(0, ROUNDS, 10):
        jobs = [
            world.creature(creature.name, containment=way, size=SMALL) for creature, way in rounds[start : start + 10]
        ]
        for job in jobs:
            job.wait_ready()
        check(*[(job, job.stop(grace_s=0.05 * (number % 2))) for number, job in enumerate(jobs)])
        world.cull()


def test_the_observer_sees_what_is_there_and_culls_it(world: World) -> None:
    job = world.creature("both, environment cleared", containment="").wait_ready()
    assert alive(job.tag)
    os.kill(job.pid, 9)
    cull(job.tag)
    assert alive(job.tag) == []
