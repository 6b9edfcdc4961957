"""SIGTERM to a coordinator, as `ray stop` and whoever stops a machine send it: an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from remit.agents import RunContext, agent
from remit.cli.records import opened
from remit.coordinator import Coordinator
from remit.core import CauseKind, Outcome, TurnCancelled
from remit.telemetry.files import read_traces, traces_folder
from remit.testing import await_until
from tests.ray.conftest import OpenCoordinator


@agent
async def holds_on(ctx: RunContext) -> None:
    (ctx.workspace / "holds").touch()
    await ctx.sleep(600)


@agent
async def give(ctx: RunContext, value: int) -> int:
    return value


@pytest.mark.timeout(120)
@pytest.mark.requirement("B36")
def test_a_coordinator_that_is_sent_sigterm_ends_everything_in_order(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Coordinator.open(tmp_path) as coordinator:
            pid = int((await coordinator.statistics())["pid"])
            with pytest.raises(TurnCancelled) as told:
                async with coordinator.turn("stopped") as turn:
                    run = await turn.delegate(holds_on)
                    await await_until((tmp_path / "holds").exists, timeout_s=60.0)
                    os.kill(pid, signal.SIGTERM)
                    await run.result()
            assert told.value.cause is not None
            assert (told.value.cause.kind, told.value.cause.reason) == (CauseKind.SHUTDOWN, "SIGTERM")
            await await_until(lambda: not psutil.pid_exists(pid), timeout_s=30.0, message="the coordinator stays")
        _check_left(tmp_path, turn.id, run.id)
        # It has ended for good: whoever needs it next has a new one.
        async with open_coordinator() as coordinator, coordinator.turn("next") as turn:
            assert await (await turn.delegate(give, value=3)).result() == 3

    asyncio.run(main())


def _check_left(workspace: Path, turn_id: str, run_id: str) -> None:
    """Look at what is on the disk: everything has ended, nobody writes, and the last spans are there."""
    with opened(workspace) as records:
        assert not records.is_live
        assert {records.find(name).outcome for name in (turn_id, run_id)} == {Outcome.CANCELLED}
        assert not [node for node in records.state.nodes.values() if not node.is_ended]
    spans = list(read_traces(traces_folder(workspace), turn_id))
    assert run_id in {span.run_id for span in spans}
    assert "turn" in {str(span.attributes.get("gen_ai.agent.name", "turn")) for span in spans}
