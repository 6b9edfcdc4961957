"""The blocking API in a thread, stopped by a process that knows nothing but the session's name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from remit.coordinator import sync
from remit.core import Outcome, TurnCancelled
from tests.agents import bodies
from tests.ray.conftest import OpenCoordinator

_STOPPER = """
import sys
from remit.coordinator.sync import Coordinator

with Coordinator.open(sys.argv[1], surface="stopper") as coordinator:
    receipt = coordinator.cancel("s", "from another process").quiet()
    print(receipt.accepted, receipt.live, receipt.is_quiet)
"""


@pytest.mark.field_report("B9")
@pytest.mark.field_report("M16")
@pytest.mark.requirement("B5")
def test_a_turn_in_a_thread_is_stopped_from_another_process(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], tmp_path: Path
) -> None:
    stage = bodies.Stage(tmp_path)

    def hold() -> None:
        with sync.Coordinator.open(tmp_path) as coordinator, coordinator.turn("t", session="s") as turn:
            turn.delegate(bodies.nap).result()

    async def main() -> None:
        async with open_coordinator() as coordinator:
            holding = asyncio.ensure_future(asyncio.to_thread(hold))
            await stage.until_noted("nap began")
            stopper = [sys.executable, "-c", _STOPPER, str(tmp_path)]
            done = await asyncio.to_thread(
                subprocess.run, stopper, env=ray_node, capture_output=True, text=True, timeout=90
            )
            assert done.stdout.split() == ["True", "1", "True"], done.stderr
            with pytest.raises(TurnCancelled) as raised:
                await holding
            assert raised.value.cause is not None
            assert (raised.value.cause.surface, raised.value.cause.reason) == ("stopper", "from another process")
            assert [run.outcome for run in await coordinator.runs()] == [Outcome.CANCELLED]

    asyncio.run(main())
