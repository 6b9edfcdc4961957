"""Programs end with the Ray node that they were started for: the rule, and a stand-in for the node."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from remit.processes.answers import StartKind
from remit.processes.jobs import JobOutcome
from remit.processes.nodes import LOOK_S, NODE_GRACE_S, Nodes, own_node
from remit.processes.table import ProcessIdentity
from remit.processes.tree import identify
from tests.procd.fakes import World
from tests.procd.live import LIMIT_S, Node

RAYLET, NEXT = ProcessIdentity(10, 1.0), ProcessIdentity(11, 2.0)


class Machine:
    """Which raylets live."""

    def __init__(self, *living: ProcessIdentity) -> None:
        self.living = set(living)
        self.nodes = Nodes(self.living.__contains__)


def test_a_job_ends_when_its_node_has_been_gone_for_the_grace() -> None:
    machine = Machine(RAYLET, NEXT)
    nodes = machine.nodes
    nodes.serve("proc_1", RAYLET)
    nodes.serve("proc_2", NEXT)
    nodes.serve("proc_3", None)
    assert nodes.expire(100.0) == ()
    machine.living.remove(RAYLET)
    assert nodes.expire(101.0) == ()
    assert nodes.expire(101.0 + NODE_GRACE_S - LOOK_S) == ()
    assert nodes.expire(101.0 + NODE_GRACE_S) == ("proc_1",)
    assert nodes.expire(101.0 + 2 * NODE_GRACE_S) == ()


def test_a_job_that_is_attached_to_by_another_node_is_spared() -> None:
    machine = Machine(NEXT)
    machine.nodes.serve("proc_1", RAYLET)
    assert machine.nodes.expire(0.0) == ()
    machine.nodes.serve("proc_1", NEXT)
    assert machine.nodes.expire(NODE_GRACE_S) == ()
    machine.nodes.serve("proc_1", None)
    assert machine.nodes.expire(3 * NODE_GRACE_S) == ()


def test_a_node_that_is_seen_again_was_never_gone() -> None:
    """A look that fails once, as under memory pressure, begins no grace that goes on."""
    machine = Machine()
    machine.nodes.serve("proc_1", RAYLET)
    machine.nodes.expire(0.0)
    machine.living.add(RAYLET)
    machine.nodes.expire(5.0)
    machine.living.remove(RAYLET)
    assert machine.nodes.expire(NODE_GRACE_S) == ()


def test_nodes_are_looked_at_only_while_jobs_have_some() -> None:
    nodes = Machine().nodes
    assert nodes.next_look() == math.inf
    nodes.serve("proc_1", RAYLET)
    assert nodes.next_look() <= 0.0
    nodes.expire(7.0)
    assert nodes.next_look() == 7.0 + LOOK_S
    nodes.forget("proc_1")
    assert nodes.next_look() == math.inf
    nodes.forget("proc_1")


@pytest.mark.parametrize("text", ["", "x", "-1"])
def test_a_process_that_is_no_worker_has_no_node(text: str) -> None:
    assert own_node({"RAY_RAYLET_PID": text}) is None
    assert own_node({}) is None
    assert own_node({"RAY_RAYLET_PID": str(os.getpid())}) == identify(os.getpid())


@pytest.mark.requirement("F6")
def test_foreground_jobs_of_a_node_that_has_gone_end_long_before_the_lease(world: World) -> None:
    world.raylets.add(RAYLET)
    peer = world.peer()
    foreground, background, other = world.spec(), world.spec(background=True), world.spec()
    for spec, node in ((foreground, [10, 1.0]), (background, [10, 1.0]), (other, None)):
        peer.ask("start", spec=spec.to_dict(), env={}, stdin=None, node=node)
        world.forks[spec.job].started()
    world.settle()
    world.advance(LOOK_S)
    world.raylets.clear()
    world.advance(LOOK_S)
    world.advance(NODE_GRACE_S - LOOK_S)
    assert not any(message["op"] == "stop" for message in world.forks[foreground.job].heard())
    world.advance(LOOK_S)
    (stop,) = world.forks[foreground.job].heard()
    assert (stop["op"], stop["cause"]["kind"], stop["cause"]["actor"]) == ("stop", "parent_lost", "procd")
    assert "Ray node" in stop["cause"]["reason"]
    assert world.forks[background.job].heard() == world.forks[other.job].heard() == []


# --- a real daemon ---------------------------------------------------------------------------------


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that stands for the raylet."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.requirement("F6")
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is told by its start time")
def test_a_program_ends_after_its_ray_node(
    node: Node, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    background = node.run("sleep", "1000", background=True)
    answer = node.run("sh", "-c", "setsid sleep 1000 & sleep 1000 & wait", key="k")
    spared = node.run("sleep", "1000", key="spared")
    raylet.kill()
    raylet.wait()
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    assert node.run("sleep", "1000", key="spared").kind is StartKind.ATTACHED
    result = node.client.wait(answer.job, timeout_s=LIMIT_S)
    assert result is not None
    assert (result.outcome, result.survivors) == (JobOutcome.CANCELLED, ())
    assert result.cause is not None
    assert (result.cause["kind"], "Ray node" in result.cause["reason"]) == ("parent_lost", True)
    # Less than a lease.
    assert result.duration_s < 25.0
    assert {one.pid for one in node.processes()} == {background.pid, spared.pid}
