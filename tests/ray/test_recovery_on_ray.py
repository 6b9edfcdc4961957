"""Deaths with real processes: of the coordinator, of hosts, of a node; and what goes on after them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.cli.records import opened
from remit.coordinator import Coordinator
from remit.coordinator.service import ServiceOptions
from remit.core import CauseKind, Outcome, RunLost, TurnCancelled
from remit.core.events import CancelRequested, decode_event
from remit.testing import await_until, wait_until
from tests.ray.conftest import OpenCoordinator


@agent
async def until_open(ctx: RunContext, gate: str, value: int) -> tuple[int, int]:
    """Wait for a file; return the value and the process that it was made in."""
    while not Path(gate).exists():
        await ctx.sleep(0.05)
    return value, os.getpid()


@agent
async def parent(ctx: RunContext, gate: str, marker: str) -> list[int]:
    """Delegate before and after the gate is open, and wait for all of it."""
    first = await ctx.delegate_many(until_open, [{"gate": gate, "value": n} for n in range(3)])
    Path(marker).write_text(str(os.getpid()))
    found = await ctx.gather(*first)
    later = await ctx.delegate(until_open, gate=gate, value=3)
    return [value for value, _ in [*found, await later.result()]]


@agent
async def tell_end(ctx: RunContext, marker: str, end: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    try:
        await ctx.sleep(600)
    except BaseException:
        cause = ctx.signal.cause
        Path(end).write_text(cause.kind.value if cause is not None else "none")
        raise


@agent
async def where(ctx: RunContext, gate: str, marker: str) -> int:
    """Note on which attempt this is and in which process, then wait for the gate."""
    _note(Path(marker), f"{ctx.attempt} {os.getpid()}\n")
    while not Path(gate).exists():
        await ctx.sleep(0.05)
    return ctx.attempt


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def _pid(marker: Path) -> int:
    text = marker.read_text() if marker.exists() else ""
    return int(text) if text else 0


async def _until_live(coordinator: Coordinator, turn_id: str, count: int) -> None:
    async def live() -> int:
        view = await coordinator.tree(turn_id)
        return sum(node.kind == "run" and node.state in ("running", "waiting") for node in view.nodes)

    while await live() < count:
        await asyncio.sleep(0.05)


async def _kill_coordinator(coordinator: Coordinator) -> dict[str, Any]:
    before = await coordinator.statistics()
    os.kill(before["pid"], signal.SIGKILL)
    return before


@pytest.mark.requirement("F14")
@pytest.mark.field_report("I4")
def test_runs_go_on_under_the_next_coordinator_and_finish(open_coordinator: OpenCoordinator, tmp_path: Path) -> None:
    gate, marker = tmp_path / "gate", tmp_path / "marker"

    async def main() -> None:
        async with open_coordinator() as coordinator:
            async with coordinator.turn("before") as turn:
                run = await turn.delegate(parent, gate=str(gate), marker=str(marker))
                own = await turn.delegate(until_open, gate=str(gate), value=7)
                await _until_live(coordinator, turn.id, 5)
                before = await _kill_coordinator(coordinator)
                # A request that nobody is there to hear waits for the next life.
                late = await turn.delegate(until_open, gate=str(gate), value=8)
                gate.touch()
                assert await run.result() == [0, 1, 2, 3]
                value, pid = await own.result()
                assert value == 7
                assert (await late.result())[0] == 8
            assert turn.outcome is Outcome.SUCCEEDED
            after = await coordinator.statistics()
            assert after["epoch"] == before["epoch"] + 1
            assert after["pid"] != before["pid"]
            # The same processes, and no attempt was begun twice.
            assert pid in {host["pid"] for host in before["hosts"]}
            assert {host["id"] for host in before["hosts"] if host["ready"]} <= {host["id"] for host in after["hosts"]}
            assert {node.attempt for node in await coordinator.runs()} == {1}

    asyncio.run(main())


def _dying_shell(flag: Path, kind: str) -> Any:
    """Return a coordinator actor's class that is killed, once, when events of a kind are durable."""
    from remit.coordinator.ray_engine import CoordinatorShell

    class DyingShell(CoordinatorShell):
        def options(self) -> ServiceOptions:
            def failpoint(kinds: Sequence[str]) -> bool:
                if kind in kinds and not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return False

            return replace(super().options(), failpoint=failpoint)

    return DyingShell


@pytest.mark.requirement("F7")
@pytest.mark.field_report("I6")
@pytest.mark.field_report("I7")
@pytest.mark.field_report("D8")
def test_a_cancel_that_was_accepted_lands_although_its_coordinator_was_killed_before_it_told_anybody(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine

    flag = tmp_path / "died"
    ray_engine.find_coordinator(str(tmp_path.resolve()), shell=_dying_shell(flag, "cancel_requested"))

    async def main() -> None:
        async with open_coordinator() as coordinator, Coordinator.open(tmp_path) as other:
            ends = [tmp_path / f"end{n}" for n in range(3)]
            with pytest.raises(TurnCancelled) as caught:
                async with coordinator.turn("tree") as turn:
                    for n, end in enumerate(ends):
                        await turn.delegate(tell_end, marker=str(tmp_path / f"m{n}"), end=str(end))
                    await _until_live(coordinator, turn.id, 3)
                    await await_until(lambda: all(_pid(tmp_path / f"m{n}") for n in range(3)), timeout_s=30.0)
                    receipt = await other.cancel(turn.id, "enough", actor="ada")
                    await turn.sleep(600)
            assert flag.exists()
            assert receipt.accepted
            receipt = await receipt.quiet(30.0)
            assert (receipt.is_quiet, dict(receipt.runs)) == (True, {"cancelled": 3})
            assert {end.read_text() for end in ends} == {"user_interrupt"}
            view = await coordinator.tree(turn.id)
            assert {node.cause for node in view.nodes} == {caught.value.cause}
            assert {node.outcome for node in view.nodes} == {Outcome.CANCELLED}
            assert {node.attempt for node in view.nodes if node.kind == "run"} == {1}
            with opened(tmp_path) as records:
                assert records.reader is not None
                rows = list(records.reader.read(turn_id=turn.id))
            asked = [decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in rows if r.kind == "cancel_requested"]
            assert len({event.request_id for event in asked if isinstance(event, CancelRequested)}) == 1
            assert sum(row.terminal for row in rows) == 4

    asyncio.run(main())


def test_what_had_not_begun_begins_under_the_next_coordinator(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine

    # It dies when the start is decided and no host has heard of it.
    flag = tmp_path / "died"
    ray_engine.find_coordinator(str(tmp_path.resolve()), shell=_dying_shell(flag, "run_started"))
    gate, marker = tmp_path / "gate", tmp_path / "marker"

    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("early") as turn:
            run = await turn.delegate(where, gate=str(gate), marker=str(marker))
            gate.touch()
            assert await run.result() == 1
            assert flag.exists()
            assert len(marker.read_text().splitlines()) == 1

    asyncio.run(main())


def test_a_host_and_its_coordinator_die_at_once(open_coordinator: OpenCoordinator, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("both") as turn:
            once = await turn.delegate(where, gate=str(gate), marker=str(tmp_path / "once"))
            twice = await turn.delegate(
                where, options=RunOptions(retries=1), gate=str(gate), marker=str(tmp_path / "twice")
            )
            await await_until(lambda: (tmp_path / "twice").exists() and (tmp_path / "once").exists(), timeout_s=60.0)
            hosts = {int((tmp_path / name).read_text().split()[1]) for name in ("once", "twice")}
            await _kill_coordinator(coordinator)
            for pid in hosts:
                os.kill(pid, signal.SIGKILL)
            gate.touch()
            with pytest.raises(RunLost):
                await once.result()
            assert await twice.result() == 2

    asyncio.run(main())


@pytest.mark.requirement("F6")
def test_hosts_whose_coordinator_is_gone_for_good_end_themselves_and_their_work(
    ray_connection: None, tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine

    marker, end = tmp_path / "marker", tmp_path / "end"

    async def main() -> list[int]:
        async with Coordinator.open(tmp_path) as coordinator:
            turn = coordinator.turn("left alone")
            await turn.begin()
            await turn.delegate(tell_end, marker=str(marker), end=str(end))
            await await_until(lambda: _pid(marker), timeout_s=60.0)
            pids = [host["pid"] for host in (await coordinator.statistics())["hosts"] if host["ready"]]
            name = ray_engine.coordinator_name(str(tmp_path.resolve()))
            ray_engine.ray.kill(ray_engine.ray.get_actor(name, namespace=ray_engine.NAMESPACE), no_restart=True)
            return pids

    pids = asyncio.run(main())
    assert _pid(marker) in pids
    deadline = time.monotonic() + 90.0
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, "hosts live on without a coordinator"
        time.sleep(0.2)
    assert end.read_text() == CauseKind.PARENT_LOST.value
    # The head of the cluster hears of the deaths a moment later; a host that was still coming up has its own lease.
    wait_until(lambda: not _hosts_of(tmp_path), timeout_s=60.0, message="the hosts' names are free")


def _hosts_of(workspace: Path) -> list[str]:
    from remit.coordinator import ray_engine

    named = ray_engine.ray.util.list_named_actors(all_namespaces=True)
    prefix = ray_engine.host_name(str(workspace.resolve()), "")
    return [entry["name"] for entry in named if prefix in entry["name"]]


_SECOND_NODE = """
import sys, time
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams

ask = services.get_node

def get_node(*arguments):
    # Longer than the 30 seconds after which Ray gives up: a loaded machine takes longer.
    until = time.monotonic() + 150
    while True:
        try:
            return ask(*arguments)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(0.5)

services.get_node = get_node

# As in ray.cluster_utils: `ray start` refuses to join a cluster that is on loopback alone.
Node(
    RayParams(
        gcs_address=sys.argv[1],
        node_ip_address="127.0.0.1",
        num_cpus=int(sys.argv[3]),
        object_store_memory=100_000_000,
        min_worker_port=0,
        max_worker_port=0,
        temp_dir=sys.argv[2],
    ),
    head=False,
    spawn_reaper=False,
)
time.sleep(600)
"""


@contextmanager
def second_node(
    environment: dict[str, str], address: str, log: Path, *, num_cpus: int = 2
) -> Iterator[Callable[[], None]]:
    """Start another node of the cluster on this machine; yields what kills it like a power cut.

    Before and after there is one node: a dead one counts as alive until the cluster has missed it for long enough.
    """
    _until_one_node()
    temp_dir = str(Path(environment["REMIT_STATE_DIR"]) / "ray")
    with log.open("wb") as output:
        node = subprocess.Popen(
            [sys.executable, "-c", _SECOND_NODE, address, temp_dir, str(num_cpus)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def cut() -> None:
        found = psutil.Process(node.pid).children(recursive=True) if psutil.pid_exists(node.pid) else []
        for pid in [*(process.pid for process in found), node.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait()

    try:
        yield cut
    finally:
        if node.poll() is None:
            # Asked to, the node manager says goodbye to the cluster.
            for process in psutil.Process(node.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # workers come and go meanwhile
                    if process.name().startswith("raylet"):
                        process.terminate()
                        psutil.wait_procs([process], timeout=10.0)
            cut()
        _until_one_node()


def _until_one_node() -> None:
    from remit.coordinator import ray_engine

    wait_until(lambda: sum(n["Alive"] for n in ray_engine.ray.nodes()) == 1, timeout_s=120.0, message="one node")


@pytest.mark.timeout(300)
@pytest.mark.field_report("I1")
def test_work_moves_off_a_drained_node_and_survives_a_lost_one(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine
    from remit.coordinator.node import LocalNode

    record = LocalNode(Path(ray_node["REMIT_STATE_DIR"])).status()
    assert record is not None
    gate, marker = tmp_path / "gate", tmp_path / "marker"

    def attempts() -> list[list[int]]:
        lines = marker.read_text().splitlines() if marker.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    async def main(cut: Callable[[], None]) -> None:
        async with open_coordinator() as coordinator, coordinator.turn("moving") as turn:
            head = next(n["NodeID"] for n in ray_engine.ray.nodes() if n["Alive"])
            await await_until(lambda: sum(n["Alive"] for n in ray_engine.ray.nodes()) == 2, timeout_s=120.0)
            other = next(n["NodeID"] for n in ray_engine.ray.nodes() if n["Alive"] and n["NodeID"] != head)
            await coordinator.drain(other)
            run = await turn.delegate(where, options=RunOptions(retries=1), gate=str(gate), marker=str(marker))
            await await_until(lambda: len(attempts()) == 1, timeout_s=60.0)
            await coordinator.drain(other, undo=True)
            moved = await coordinator.drain(head, "repairs")
            assert moved.runs == 1
            await await_until(lambda: len(attempts()) == 2, timeout_s=120.0)
            once = await turn.delegate(where, gate=str(gate), marker=str(tmp_path / "once"))
            await await_until((tmp_path / "once").exists, timeout_s=60.0)
            await coordinator.drain(head, undo=True)
            cut()
            with pytest.raises(RunLost):
                await once.result()
            await await_until(lambda: len(attempts()) == 3, timeout_s=120.0)
            gate.touch()
            # One attempt was moved and one was lost: only the second has used up the retry.
            assert await run.result() == 3

    with second_node(ray_node, record.address, tmp_path / "node.log") as cut:
        asyncio.run(main(cut))
    assert len({pid for _, pid in attempts()}) == 3
