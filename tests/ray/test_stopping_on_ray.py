"""What Ray can break: actors, processes and their deaths, with real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.agents import CommandAgent, RunContext, RunOptions, SyncRunContext, agent
from remit.cli.records import opened
from remit.coordinator import Coordinator
from remit.core import CauseKind, Outcome, RunFailed, RunLost, TurnCancelled
from remit.testing import await_until, wait_until
from tests.ray.conftest import OpenCoordinator


@agent
async def add(ctx: RunContext, a: int, b: int) -> int:
    return a + b


@agent
async def nap(ctx: RunContext, seconds: float = 600.0) -> None:
    await ctx.sleep(seconds)


@agent
async def tree(ctx: RunContext, levels: int, width: int) -> None:
    if levels == 0:
        await ctx.process(["sleep", "600"])
        return
    await ctx.gather(*await ctx.delegate_many(tree, [{"levels": levels - 1, "width": width}] * width))


@agent
async def answers_anything(ctx: RunContext) -> str:
    run = await ctx.delegate(nap)
    try:
        await run.result()
    except Exception:
        return "[error]"
    return "[done]"


@agent
def twice(ctx: SyncRunContext, a: int) -> int:
    doubled: int = 2 * ctx.delegate(add, a=a, b=0).result()
    return doubled


@agent
def deaf(ctx: SyncRunContext, marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)


@agent
async def blocks_the_loop(ctx: RunContext, marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)


@agent
async def where(ctx: RunContext) -> dict[str, Any]:
    return {"cwd": os.getcwd(), "value": os.environ.get("REMIT_TEST_VALUE"), "pid": os.getpid()}


@agent
async def dies_once(ctx: RunContext, marker: str) -> int:
    path = Path(marker)
    if not path.exists():
        path.write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return ctx.attempt


def _alive(marker: Path) -> bool:
    return psutil.pid_exists(int(marker.read_text()))


async def _until_running(coordinator: Coordinator, turn_id: str, count: int) -> None:
    while True:
        view = await coordinator.tree(turn_id)
        if sum(node.kind == "run" and node.state in ("running", "waiting") for node in view.nodes) >= count:
            return
        await asyncio.sleep(0.05)


async def _pids_of(coordinator: Coordinator, turn_id: str, count: int) -> list[int]:
    """Return the process ids of a turn's programs, once there are so many."""
    while True:
        shown = [process for node in (await coordinator.tree(turn_id)).nodes for process in node.processes]
        if len(shown) >= count:
            return [int(process.rpartition("(")[2].rstrip(")")) for process in shown]
        await asyncio.sleep(0.05)


def test_results_come_back_from_async_plain_nested_and_command_agents(open_coordinator: OpenCoordinator) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("results") as turn:
            assert await (await turn.delegate(add, a=1, b=2)).result() == 3
            assert await (await turn.delegate(twice, a=21)).result() == 42
            echo = CommandAgent(["echo", "{word}"])
            assert (await (await turn.delegate(echo, word="a b; rm -rf x")).result()).stdout == "a b; rm -rf x\n"
            runs = await turn.delegate_many(add, [{"a": i, "b": 1} for i in range(300)])
            assert await turn.gather(*runs) == [i + 1 for i in range(300)]

    asyncio.run(main())


@pytest.mark.requirement("F2")
@pytest.mark.requirement("F3")
@pytest.mark.requirement("B5")
@pytest.mark.field_report("A5")
def test_one_cancel_from_another_client_stops_three_levels_and_their_programs(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, Coordinator.open(tmp_path) as other:
            with pytest.raises(TurnCancelled) as caught:
                async with coordinator.turn("tree") as turn:
                    run = await turn.delegate(tree, levels=2, width=3)
                    await _until_running(coordinator, turn.id, 13)
                    pids = await _pids_of(coordinator, turn.id, 9)
                    asked = asyncio.create_task(other.cancel(turn.id, "enough", actor="ada"))
                    await run.result()
            receipt = await asked
            assert receipt.accepted
            assert receipt.live == 13
            receipt = await receipt.quiet(20.0)
            assert receipt.is_quiet
            assert dict(receipt.runs) == {"cancelled": 13}
            assert receipt.summary is not None
            assert receipt.summary.processes_stopped == 9
            assert not receipt.summary.processes_left
            assert not any(psutil.pid_exists(pid) and psutil.Process(pid).name() == "sleep" for pid in pids)
            view = await coordinator.tree(turn.id)
            assert {node.cause for node in view.nodes} == {caught.value.cause}
            assert caught.value.cause is not None
            assert (caught.value.cause.actor, caught.value.cause.reason) == ("ada", "enough")

    asyncio.run(main())


@pytest.mark.requirement("B11")
@pytest.mark.requirement("F4")
def test_a_catch_all_in_a_cancelled_parent_never_makes_a_result(open_coordinator: OpenCoordinator) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("parent") as turn:
            run = await turn.delegate(answers_anything)
            await _until_running(coordinator, turn.id, 2)
            await run.cancel("stop the parent")
            assert await run.wait(20.0) is Outcome.CANCELLED
            view = await coordinator.tree(run.id)
            assert [node.outcome for node in view.nodes] == [Outcome.CANCELLED] * 2
            assert {node.cause.origin for node in view.nodes if node.cause} == {run.id}

    asyncio.run(main())


@pytest.mark.field_report("B16")
def test_a_plain_body_that_ignores_its_signal_is_gone_and_the_pool_is_whole(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("deaf", grace_s=1.0) as turn:
            marker = tmp_path / "pid"
            run = await turn.delegate(deaf, marker=str(marker))
            await await_until(lambda: marker.exists() and marker.read_text(), timeout_s=60.0)
            began = time.monotonic()
            await run.cancel("too slow")
            assert await run.wait(30.0) is Outcome.CANCELLED
            assert time.monotonic() - began < 1.0 + 2.0
            await await_until(lambda: not _alive(marker), message="its process is gone")
            assert not run.unconfirmed
            assert await (await turn.delegate(twice, a=1)).result() == 2
            statistics = await coordinator.statistics()
            assert statistics["slots_used"] == {"shared": 0, "actor": 0}

    asyncio.run(main())


@pytest.mark.requirement("F2")
def test_a_body_that_blocks_its_loop_does_not_keep_a_cancel_out(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("blocked", grace_s=1.0) as turn:
            marker = tmp_path / "pid"
            run = await turn.delegate(blocks_the_loop, marker=str(marker))
            await await_until(lambda: marker.exists() and marker.read_text(), timeout_s=60.0)
            await run.cancel("stuck")
            assert await run.wait(30.0) is Outcome.CANCELLED
            await await_until(lambda: not _alive(marker), message="its process is gone")
            assert await (await turn.delegate(add, a=1, b=1)).result() == 2

    asyncio.run(main())


@pytest.mark.field_report("B3")
def test_a_cancel_right_behind_the_start_is_never_lost(open_coordinator: OpenCoordinator) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("races") as turn:
            await (await turn.delegate(add, a=1, b=1)).result()
            for _ in range(50):
                run = await turn.delegate(nap)
                await run.cancel("at once")
                assert await run.wait(20.0) is Outcome.CANCELLED
            assert (await coordinator.statistics())["slots_used"] == {"shared": 0, "actor": 0}

    asyncio.run(main())


@pytest.mark.requirement("F5")
def test_a_host_that_dies_loses_its_run_and_a_retry_begins_elsewhere(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("death") as turn:
            run = await turn.delegate(dies_once, marker=str(tmp_path / "one"))
            with pytest.raises(RunLost):
                await run.result()
            assert run.cause is None
            again = await turn.delegate(dies_once, options=RunOptions(retries=1), marker=str(tmp_path / "two"))
            assert await again.result() == 2

    asyncio.run(main())


_DRIVER = """
import asyncio, sys
from remit.agents import agent
from remit.coordinator import Coordinator

@agent
async def from_script(ctx, seconds):
    await ctx.sleep(seconds)
    return "slept"

async def main():
    async with Coordinator.open(sys.argv[1], grace_s=2.0) as coordinator:
        async with coordinator.turn("driver") as turn:
            run = await turn.delegate(from_script, seconds=float(sys.argv[2]))
            print(turn.id, flush=True)
            print(await run.result(), flush=True)

asyncio.run(main())
"""


def test_an_agent_of_a_script_runs_although_nobody_can_import_it(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator():
            (tmp_path / "script.py").write_text(_DRIVER)
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, str(tmp_path / "script.py"), str(tmp_path), "0"],
                env=ray_node,
                capture_output=True,
                text=True,
                timeout=90,
            )
            assert done.stdout.split()[-1:] == ["slept"], done.stderr

    asyncio.run(main())


@pytest.mark.field_report("E10")
def test_a_killed_driver_loses_its_turn_within_the_grace(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator:
            (tmp_path / "script.py").write_text(_DRIVER)
            driver = subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py"), str(tmp_path), "600"],
                env=ray_node,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert driver.stdout is not None
                turn_id = (await asyncio.to_thread(driver.stdout.readline)).strip()
                await _until_running(coordinator, turn_id, 1)
                driver.kill()
                killed = time.monotonic()
                while (view := await coordinator.tree(turn_id)).root.outcome is None:
                    assert time.monotonic() - killed < 2.0 + 3.0
                    await asyncio.sleep(0.05)
            finally:
                driver.kill()
                driver.communicate()
            assert {node.outcome for node in view.nodes} == {Outcome.CANCELLED}
            assert {node.cause.kind for node in view.nodes if node.cause} == {CauseKind.PARENT_LOST}

    asyncio.run(main())


def test_an_edited_module_is_never_served_in_its_old_version(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "driver.py").write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            import versioned
            from remit.coordinator import Coordinator

            async def main():
                async with Coordinator.open(sys.argv[1]) as coordinator:
                    async with coordinator.turn("versions") as turn:
                        print(await (await turn.delegate(versioned.tell)).result())

            asyncio.run(main())
            """
        )
    )

    def told(version: str) -> str:
        (code / "versioned.py").write_text(
            f"from remit.agents import agent\n\n@agent\nasync def tell(ctx):\n    return {version!r}\n"
        )
        done = subprocess.run(
            [sys.executable, str(code / "driver.py"), str(tmp_path)],
            env=ray_node,
            capture_output=True,
            text=True,
            timeout=90,
        )
        return done.stdout.strip() or done.stderr

    async def main() -> None:
        async with open_coordinator():
            assert await asyncio.to_thread(told, "first") == "first"
            assert await asyncio.to_thread(told, "second, longer") == "second, longer"

    asyncio.run(main())


def test_a_body_sees_its_callers_folder_and_environment(
    open_coordinator: OpenCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMIT_TEST_VALUE", "from the caller")

    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("where") as turn:
            seen = await (await turn.delegate(where)).result()
            assert seen["value"] == "from the caller"
            assert seen["cwd"] == os.getcwd()
            assert seen["pid"] != os.getpid()

    asyncio.run(main())


def test_what_no_machine_has_fails_in_one_sentence(open_coordinator: OpenCoordinator) -> None:
    @agent(num_gpus=64)
    async def hungry(ctx: RunContext) -> None:
        return

    async def main() -> None:
        async with open_coordinator() as coordinator, coordinator.turn("hungry") as turn:
            with pytest.raises(RunFailed, match="num_gpus=64"):
                await (await turn.delegate(hungry)).result()

    asyncio.run(main())


def test_the_journal_tells_the_same_as_the_coordinator(open_coordinator: OpenCoordinator, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_coordinator() as coordinator:
            async with coordinator.turn("kept") as turn:
                await turn.gather(*await turn.delegate_many(add, [{"a": 1, "b": n} for n in range(5)]))
            live = await coordinator.tree(turn.id)
            with opened(tmp_path) as records:
                kept = records.state.nodes
                assert {node.id: node.outcome for node in live.nodes} == {
                    name: kept[name].outcome for name in (node.id for node in live.nodes)
                }
        wait_until(lambda: not _is_live(tmp_path), message="the coordinator let go of the journal")

    asyncio.run(main())


def _is_live(workspace: Path) -> bool:
    with opened(workspace) as records:
        return records.is_live
