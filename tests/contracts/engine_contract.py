"""What holds on every engine: one suite for the in-process one and for Ray.

A subclass says how a workspace is opened. Bodies and tests share a stage on the
disk, so it makes no difference in which process a body runs.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from remit.agents import CommandAgent, RunOptions
from remit.coordinator import Coordinator
from remit.core import Outcome, RunCancelled, RunFailed, TurnCancelled
from remit.core.errors import ArgumentNotPicklable, Refused
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.bodies import Stage


class EngineContract(ABC):
    """Scenarios that must look the same, whatever runs the bodies."""

    storms = 5
    """How often the storm is repeated."""

    @abstractmethod
    def opened(self, workspace: Path) -> AbstractAsyncContextManager[Coordinator]:
        """Open a workspace's coordinator."""

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Stage:
        return Stage(tmp_path)

    def test_every_kind_of_agent_returns_its_result(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                assert await (await turn.delegate(bodies.give, value={"a": {1, 2}})).result() == {"a": {1, 2}}
                assert await (await turn.delegate(bodies.plain_parent)).result() == [[0, 2, 4], [0, 2, 4], 1]
                echo = CommandAgent(["echo", "{word}"])
                assert str((await (await turn.delegate(echo, word="a; b")).result()).stdout) == "a; b\n"

        asyncio.run(main())

    @pytest.mark.requirement("B1")
    @pytest.mark.requirement("B2")
    @pytest.mark.requirement("B10")
    @pytest.mark.requirement("B11")
    @pytest.mark.requirement("F4")
    @pytest.mark.requirement("A21")
    @pytest.mark.field_report("A1")
    @pytest.mark.field_report("D15")
    def test_a_parent_that_makes_text_of_failures_returns_nothing_when_cancelled(
        self, tmp_path: Path, stage: Stage
    ) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator:
                with pytest.raises(TurnCancelled) as raised:
                    async with coordinator.turn("t", session="s") as turn:
                        parent = await turn.delegate(bodies.catch_all)
                        await stage.until_noted("child began")
                        receipt = await coordinator.cancel("s", "enough", actor="ada")
                        assert (receipt.accepted, receipt.live) == (True, 2)
                        await parent.result()
                assert (await receipt.quiet()).runs == {"cancelled": 2}
                tree = await coordinator.tree(turn.id)
                assert {node.outcome for node in tree.nodes} == {Outcome.CANCELLED}
                assert {node.cause for node in tree.nodes} == {raised.value.cause}
                assert stage.notes() == ["child began", "child unwound by TurnCancelled"]

        asyncio.run(main())

    @pytest.mark.requirement("B20")
    @pytest.mark.requirement("B21")
    @pytest.mark.field_report("D3")
    @pytest.mark.field_report("D11")
    def test_swallowed_surfaced_stray_and_earlier_errors_end_as_they_should(self, tmp_path: Path, stage: Stage) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                swallowing = await turn.delegate(bodies.swallow)
                surfacing = await turn.delegate(bodies.other_error)
                await stage.until_noted("swallow began", "other_error began")
                for run in (swallowing, surfacing):
                    await run.cancel("enough")
                with pytest.raises(RunCancelled) as raised:
                    await swallowing.result()
                assert raised.value.partial == "made up"
                assert await surfacing.wait() is Outcome.CANCELLED
                for body, word in ((bodies.stray_cancel, "CancelledError"), (bodies.boom, "ValueError")):
                    with pytest.raises(RunFailed) as failed:
                        await (await turn.delegate(body)).result()
                    assert failed.value.error_type == word

        asyncio.run(main())

    @pytest.mark.requirement("D9")
    @pytest.mark.field_report("E12")
    def test_partial_results_are_kept(self, tmp_path: Path, stage: Stage) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.partial_nap)
                await stage.until_noted("partial given")
                await run.cancel("enough")
                with pytest.raises(RunCancelled) as raised:
                    await run.result()
                assert raised.value.partial == {"found": ["a.py", "b.py"]}

        asyncio.run(main())

    def test_what_leaves_the_interpreter_or_cannot_travel_fails_its_own_run_only(
        self, tmp_path: Path, stage: Stage
    ) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                bystander = await turn.delegate(bodies.wait_at, gate="go", value=1)
                failing = [
                    await turn.delegate(bodies.leave, word="exit"),
                    await turn.delegate(bodies.leave, word="interrupt"),
                    await turn.delegate(bodies.leave_in_task, word="exit"),
                    await turn.delegate(bodies.unpicklable),
                ]
                outcomes = await turn.gather(*failing, return_outcomes=True)
                assert set(outcomes) == {Outcome.FAILED}
                with pytest.raises(ArgumentNotPicklable):
                    await turn.delegate(bodies.give, value=threading.Lock())
                stage.open_gate("go")
                assert await bystander.result() == 1

        asyncio.run(main())

    @pytest.mark.field_report("D13")
    def test_tasks_that_a_body_leaves_are_over_at_its_end(self, tmp_path: Path, stage: Stage) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                assert await (await turn.delegate(bodies.litter)).result() == "done"
                assert stage.notes() == ["task began", "task over"]

        asyncio.run(main())

    @pytest.mark.requirement("F9")
    @pytest.mark.field_report("B8")
    @pytest.mark.field_report("A8")
    def test_a_storm_of_delegations_from_four_threads_is_stopped(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator:
                loop = asyncio.get_running_loop()
                for _ in range(self.storms):
                    with pytest.raises(TurnCancelled):
                        async with coordinator.turn("storm") as turn:

                            def rush() -> None:
                                try:
                                    while True:
                                        delegating = turn.delegate(bodies.quiet_nap)
                                        asyncio.run_coroutine_threadsafe(delegating, loop).result(60)
                                except (TurnCancelled, Refused):
                                    return

                            threads = [threading.Thread(target=rush) for _ in range(4)]
                            for thread in threads:
                                thread.start()
                            for _ in range(3):
                                await turn.delegate(bodies.quiet_nap)
                            await turn.cancel("enough")
                            await turn.sleep(600)
                    for thread in threads:
                        await asyncio.to_thread(thread.join, 30.0)
                        assert not thread.is_alive()
                    tree = await coordinator.tree(turn.id)
                    assert tree.live == 0
                    assert {node.outcome for node in tree.nodes} == {Outcome.CANCELLED}
                statistics = await coordinator.statistics()
                assert set(statistics["slots_used"].values()) == {0}
                assert statistics["live_runs"] == 0

        asyncio.run(main())

    @pytest.mark.field_report("B16")
    @pytest.mark.field_report("C7")
    def test_a_plain_body_that_ignores_its_signal_gives_its_place_back(self, tmp_path: Path, stage: Stage) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as coordinator, coordinator.turn("t") as turn:
                run = await turn.delegate(bodies.stubborn, options=RunOptions(grace_s=0.2))
                await await_until(stage.notes, timeout_s=30.0)
                await run.cancel("enough")
                assert await run.wait(30.0) is Outcome.CANCELLED
                assert not run.unconfirmed
                stage.open_gate("give up")
                assert await (await turn.delegate(bodies.plain_parent)).result() == [[0, 2, 4], [0, 2, 4], 1]
                assert (await coordinator.statistics())["slots_used"]["actor"] == 0

        asyncio.run(main())
