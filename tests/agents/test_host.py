"""A host by itself: orders that come before, beside and instead of the runs they mean."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from remit.agents.environment import capture
from remit.agents.host import AgentHost
from remit.agents.payload import encode_arguments
from remit.agents.transport import bundle
from remit.core.cause import Cause, CauseKind
from remit.core.errors import CoordinatorUnavailable
from remit.core.messages import CancelOrder, OrderBatch, ReportBatch, ReportEnded, StartBatch, StartItem, dumps, loads
from remit.testing import await_until
from tests.agents import bodies
from tests.agents.world import in_loop

STOPPED = Cause(CauseKind.USER_INTERRUPT, "turn_1", reason="enough")


class Listener:
    """A coordinator that only listens."""

    def __init__(self) -> None:
        self.reports: list[ReportEnded] = []
        self.is_deaf = False

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        if self.is_deaf:
            answer.set_exception(CoordinatorUnavailable("deaf"))
            return answer
        batch = loads(blob)
        assert isinstance(batch, ReportBatch)
        self.reports += [item for item in batch.items if isinstance(item, ReportEnded)]
        answer.set_result(dumps(("ok", None)))
        return answer

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        raise CoordinatorUnavailable("only listens")


class Bench:
    """A host under test."""

    def __init__(self, workspace: Path) -> None:
        self.listener = Listener()
        self.stage = bodies.Stage(workspace)
        self.host = AgentHost("host_1", self.listener, workspace=workspace, max_result_bytes=10_000, own_process=False)

    def start(
        self, run_id: str, *, attempt: int = 1, path: tuple[str, ...] = ("turn_1",), label: str = "nap", epoch: int = 1
    ) -> None:
        packed = bundle(bodies.bare_nap)
        environment = capture()
        item = StartItem(
            run_id=run_id,
            attempt=attempt,
            turn_id="turn_1",
            session_id="s",
            path=path,
            agent_key=packed.key,
            agent_name=packed.name,
            name="",
            depth=len(path),
            arguments=encode_arguments({"label": label}, packed.name),
        )
        batch = StartBatch(environment.key, dumps(environment), {packed.key: packed.blob}, (item,), epoch)
        self.host.start(dumps(batch))

    def order(self, target: str, *, attempt: int = 0, epoch: int = 1) -> None:
        self.host.control(dumps(OrderBatch(epoch, (CancelOrder(target, STOPPED, attempt=attempt),))))

    async def reported(self, count: int) -> list[tuple[str, str]]:
        await await_until(lambda: len(self.listener.reports) >= count)
        return [(report.run_id, report.report) for report in self.listener.reports]


@pytest.mark.requirement("B3")
@pytest.mark.requirement("A4")
@pytest.mark.requirement("F1")
@pytest.mark.field_report("B2")
@pytest.mark.field_report("B3")
@pytest.mark.parametrize("target", ["run_1", "run_0", "turn_1"])
@in_loop
async def test_a_cancel_that_comes_before_the_run_keeps_its_body_from_being_entered(
    target: str, tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    bench.order(target)
    bench.start("run_1", path=("turn_1", "run_0"))
    assert await bench.reported(1) == [("run_1", "cancelled")]
    assert bench.stage.notes() == []
    assert bench.host.statistics()["attempts"] == 0


@pytest.mark.requirement("F8")
@pytest.mark.requirement("B12")
@pytest.mark.field_report("C10")
@in_loop
async def test_one_order_for_an_ancestor_reaches_all_below_and_no_sibling(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("run_1", path=("turn_1", "run_a"))
    bench.start("run_2", path=("turn_1", "run_a", "run_b"))
    bench.start("run_3", path=("turn_1", "run_c"), label="sibling")
    bench.start("run_4", path=("turn_2",), label="stranger")
    await bench.stage.until_noted("sibling began", "stranger began")
    bench.order("run_a")
    assert sorted(await bench.reported(2)) == [("run_1", "cancelled"), ("run_2", "cancelled")]
    assert bench.host.statistics()["attempts"] == 2
    bench.order("turn_1")
    bench.order("turn_2")
    await bench.reported(4)
    assert bench.host.statistics()["attempts"] == 0


@pytest.mark.requirement("B33")
@pytest.mark.field_report("B12")
@in_loop
async def test_a_late_order_for_one_attempt_does_not_hit_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("run_1")
    await bench.stage.until_noted("nap began")
    bench.order("run_1", attempt=1)
    await bench.reported(1)
    bench.start("run_1", attempt=2, label="second")
    await bench.stage.until_noted("second began")
    bench.order("run_1", attempt=1)
    assert bench.host.statistics()["attempts"] == 1
    bench.order("run_1")
    assert await bench.reported(2) == [("run_1", "cancelled")] * 2


@in_loop
async def test_a_start_that_comes_twice_begins_one_body(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("run_1")
    bench.start("run_1")
    await bench.stage.until_noted("nap began")
    assert bench.host.statistics()["attempts"] == 1
    bench.order("run_1")
    await bench.reported(1)
    assert bench.stage.notes() == ["nap began", "nap over"]


@in_loop
async def test_reports_wait_for_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.listener.is_deaf = True
    bench.start("run_1")
    await bench.stage.until_noted("nap began")
    bench.order("run_1")
    await await_until(lambda: bench.host.statistics()["attempts"] == 0)
    assert bench.listener.reports == []
    bench.listener.is_deaf = False
    assert await bench.reported(1) == [("run_1", "cancelled")]
    bench.host.close()
    await asyncio.sleep(0)
