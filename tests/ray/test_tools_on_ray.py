"""Programs and deaths with real processes: of the host, of the daemon, of everything at once, of the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.agents.tooldesk import scope_of
from remit.coordinator import Coordinator
from remit.core import TurnCancelled
from remit.processes import ProcessClient
from remit.testing import await_until
from tests.ray.conftest import OpenCoordinator

LONG_S = 60.0


def _says(path: Path, text: str = "") -> bool:
    return path.exists() and text in path.read_text() and path.stat().st_size > 0


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _daemon_pid() -> int:
    return int(Path(os.environ["REMIT_STATE_DIR"], "procd", "life").read_text())


@agent
async def with_tool(ctx: RunContext, script: str, marker: str) -> tuple[int | None, int]:
    """Run a script; note the host that this attempt is on."""
    Path(f"{marker}.{ctx.attempt}").write_text(str(os.getpid()))
    result = await ctx.process(["sh", "-c", script])
    return result.exit_code, ctx.attempt


@agent
async def with_tree(ctx: RunContext, marker: str) -> None:
    """Run a program that ignores SIGTERM and has a child in a session of its own."""
    await ctx.process(["sh", "-c", f"trap '' TERM; setsid sleep 600 & echo $$ $! > {marker}; wait"], grace_s=0.2)


@pytest.mark.requirement("C2")
@pytest.mark.field_report("I5")
def test_a_program_outlives_its_host_and_the_next_attempt_has_its_status(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    log, gate, marker = tmp_path / "log", tmp_path / "gate", tmp_path / "host"
    script = f"echo started >> {log}; while [ ! -e {gate} ]; do sleep 0.05; done; exit 7"

    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("moved") as turn:
            run = await turn.delegate(
                with_tool, script=script, marker=str(marker), options=RunOptions(retries=1, retry_delay_s=0.0)
            )
            await await_until(lambda: _says(log), timeout_s=LONG_S)
            os.kill(int(Path(f"{marker}.1").read_text()), signal.SIGKILL)
            await await_until(lambda: _says(Path(f"{marker}.2")), timeout_s=LONG_S)
            gate.touch()
            assert await run.result() == (7, 2)

    asyncio.run(main())
    assert log.read_text() == "started\n"


@pytest.mark.requirement("E2")
@pytest.mark.field_report("F1")
def test_what_a_dead_host_has_left_is_ended_when_no_attempt_follows(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    log, marker = tmp_path / "log", tmp_path / "host"

    async def main() -> None:
        async with open_coordinator() as coordinator:
            async with coordinator.turn("lost") as turn:
                run = await turn.delegate(with_tool, script=f"echo $$ > {log}; exec sleep 600", marker=str(marker))
                await await_until(lambda: _says(log), timeout_s=LONG_S)
                os.kill(int(Path(f"{marker}.1").read_text()), signal.SIGKILL)
                assert (await run.wait()) == "lost"
            pid = int(log.read_text())
            await await_until(lambda: _is_gone(pid), timeout_s=LONG_S, message="the program lives on")

    asyncio.run(main())


@pytest.mark.requirement("A8", "E4")
def test_a_cancel_ends_trees_that_do_not_want_to_end(open_coordinator: OpenCoordinator, tmp_path: Path) -> None:
    marker = tmp_path / "pids"

    async def main() -> None:
        async with open_coordinator() as coordinator:
            turn = coordinator.turn("cancel")
            with pytest.raises(TurnCancelled):
                async with turn:
                    await turn.delegate(with_tree, marker=str(marker))
                    await await_until(lambda: _says(marker, "\n"), timeout_s=LONG_S)
                    receipt = await coordinator.cancel(turn.id, "enough")
                    await turn.sleep(60)
            settled = await receipt.quiet(30)
            assert settled.is_quiet
            assert all(_is_gone(int(pid)) for pid in marker.read_text().split())

    asyncio.run(main())


@pytest.mark.field_report("F8")
def test_the_daemon_is_killed_and_programs_neither_end_nor_escape(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    log, gate, marker, tree = tmp_path / "log", tmp_path / "gate", tmp_path / "host", tmp_path / "tree"
    script = f"echo started >> {log}; while [ ! -e {gate} ]; do sleep 0.05; done; exit 9"

    async def main() -> None:
        async with open_coordinator() as coordinator:
            turn = coordinator.turn("daemon")
            with pytest.raises(TurnCancelled):
                async with turn:
                    run = await turn.delegate(with_tool, script=script, marker=str(marker))
                    await turn.delegate(with_tree, marker=str(tree))
                    await await_until(lambda: _says(log) and _says(tree, "\n"), timeout_s=LONG_S)
                    os.kill(_daemon_pid(), signal.SIGKILL)
                    gate.touch()
                    assert await run.result() == (9, 1)
                    os.kill(_daemon_pid(), signal.SIGKILL)
                    receipt = await coordinator.cancel(turn.id, "enough")
                    await turn.sleep(60)
            await receipt.quiet(60)
            assert all(_is_gone(int(pid)) for pid in tree.read_text().split())

    asyncio.run(main())
    assert log.read_text() == "started\n"


DRIVER = """
import asyncio, sys
from pathlib import Path
from remit.coordinator import Coordinator

async def main(workspace, marker):
    async with Coordinator.open(workspace, grace_s=2.0) as coordinator:
        async with coordinator.turn("own") as turn:
            await turn.process(["sh", "-c", f"echo $$ > {marker}; exec sleep 600"])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.field_report("F1")
def test_what_a_turn_has_started_itself_ends_with_its_driver(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    marker = tmp_path / "pid"

    async def main() -> None:
        async with open_coordinator():
            driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), str(marker)], env=ray_node)
            await await_until(lambda: _says(marker, "\n"), timeout_s=LONG_S)
            driver.kill()
            driver.wait()
            pid = int(marker.read_text())
            await await_until(lambda: _is_gone(pid), timeout_s=LONG_S, message="the program lives on")

    asyncio.run(main())


@pytest.mark.requirement("F6")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_in_the_foreground_outlives_its_lease_when_everything_is_killed(
    ray_connection: None, tmp_path: Path
) -> None:
    """Daemon, host and coordinator at once, and no coordinator comes back: its keepers end what they hold."""
    from remit.coordinator import ray_engine

    log, marker = tmp_path / "log", tmp_path / "host"

    async def main() -> int:
        async with Coordinator.open(tmp_path) as coordinator:
            turn = coordinator.turn("all")
            await turn.begin()
            await turn.delegate(with_tool, script=f"echo $$ > {log}; exec sleep 6000", marker=str(marker))
            await await_until(lambda: _says(log, "\n"), timeout_s=LONG_S)
            pid = int(log.read_text())
            view = (await asyncio.to_thread(ProcessClient().list, scope=scope_of(tmp_path)))[0]
            assert (view.pid, view.background) == (pid, False)
            name = ray_engine.coordinator_name(str(tmp_path.resolve()))
            for victim in (_daemon_pid(), int(Path(f"{marker}.1").read_text())):
                os.kill(victim, signal.SIGKILL)
            # Ray does not begin this one again.
            ray_engine.ray.kill(ray_engine.ray.get_actor(name, namespace=ray_engine.NAMESPACE), no_restart=True)
            assert not _is_gone(pid), "it was not the lease that ended it"
            await await_until(lambda: _is_gone(pid), timeout_s=120.0, message="it outlived its lease")
        return pid

    assert _is_gone(asyncio.run(main()))
