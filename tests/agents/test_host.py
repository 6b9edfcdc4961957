"""A host by itself: orders that come before, beside and instead of the runs they mean."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from pathlib import Path

import pytest

from remit.agents.context import RunContext
from remit.agents.definition import AgentDefinition
from remit.agents.environment import capture
from remit.agents.host import AgentHost
from remit.agents.lifeline import Lifeline
from remit.agents.payload import encode_arguments
from remit.agents.transport import bundle
from remit.core.cause import Cause, CauseKind
from remit.core.errors import CoordinatorUnavailable, Refused
from remit.core.messages import CancelOrder, OrderBatch, ReportBatch, ReportEnded, StartBatch, StartItem, dumps, loads
from remit.testing import ManualClock, await_until
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
        self,
        run_id: str,
        *,
        attempt: int = 1,
        path: tuple[str, ...] = ("turn_1",),
        label: str = "nap",
        epoch: int = 1,
        body: AgentDefinition = bodies.bare_nap,
    ) -> None:
        packed = bundle(body)
        environment = capture()
        item = StartItem(
            run_id=run_id,
            attempt=attempt,
            lineage=attempt,
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


@in_loop
async def test_all_bodies_of_a_cancel_hear_it_before_the_first_is_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    heard: list[int] = []
    end_tools = RunContext.end_tools

    async def ending(context: RunContext) -> None:
        heard.append(sum(note.endswith("over") for note in bench.stage.notes()))
        await end_tools(context)

    monkeypatch.setattr(RunContext, "end_tools", ending)
    for number in range(20):
        bench.start(f"run_{number}", label=f"{number}")
    await bench.stage.until_noted(*(f"{number} began" for number in range(20)))
    bench.order("turn_1")
    await bench.reported(20)
    assert heard == [20] * 20


@in_loop
async def test_what_an_ended_body_held_is_freed_without_the_cycle_collector(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    gc.collect()
    gc.disable()
    try:
        for label in ("stopped", "broken"):
            bench.start(f"run_{label}", label=label, body=bodies.bare_nap_with_luggage)
        await bench.stage.until_noted("stopped began", "broken began")
        assert bodies.Luggage.left
        bench.order("turn_1")
        await bench.reported(2)
        await asyncio.sleep(0)
        assert not bodies.Luggage.left
    finally:
        gc.enable()


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
    bench.host.close_tools()
    await asyncio.sleep(0)


@in_loop
async def test_an_inventory_names_what_runs_and_what_is_reported_and_not_acknowledged(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.listener.is_deaf = True
    bench.start("run_1")
    bench.start("run_2", attempt=3, label="second")
    await bench.stage.until_noted("nap began", "second began")
    bench.order("run_1")
    await await_until(lambda: bench.host.statistics()["attempts"] == 1)
    found = bench.host.inventory(2)
    assert {(each.run_id, each.attempt, each.reported) for each in found.attempts} == {
        ("run_1", 1, True),
        ("run_2", 3, False),
    }
    assert (found.pid, found.machine) == (bench.host.pid, bench.host.machine)
    bench.listener.is_deaf = False
    await bench.reported(1)
    await await_until(lambda: len(bench.host.inventory(2).attempts) == 1)
    bench.order("run_2", epoch=2)
    await bench.reported(2)
    await await_until(lambda: bench.host.inventory(2).attempts == ())


@pytest.mark.requirement("F7")
@pytest.mark.field_report("I11")
@in_loop
async def test_what_an_earlier_life_has_sent_is_refused_from_the_inventory_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("run_1")
    await bench.stage.until_noted("nap began")
    assert [each.run_id for each in bench.host.inventory(2).attempts] == ["run_1"]
    bench.order("run_1")
    bench.start("run_2", label="late")
    assert bench.host.refused == 2
    assert [each.run_id for each in bench.host.inventory(2).attempts] == ["run_1"]
    with pytest.raises(Refused, match="serves life 2"):
        bench.host.inventory(1)
    bench.start("run_2", label="second", epoch=2)
    await bench.stage.until_noted("second began")
    for name in ("run_1", "run_2"):
        bench.order(name, epoch=2)
    await bench.reported(2)
    assert "late began" not in bench.stage.notes()


@in_loop
async def test_a_host_that_ends_cancels_its_bodies_and_takes_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("run_1")
    await bench.stage.until_noted("nap began")
    assert await asyncio.to_thread(bench.host.end, "left alone", 10.0)
    assert bench.stage.notes() == ["nap began", "nap over"]
    bench.start("run_2")
    assert (bench.host.statistics()["attempts"], bench.host.refused) == (0, 1)


class Coordinators:
    """Answers, or the lack of one, to a host that says that it is there."""

    def __init__(self) -> None:
        self.answer: bool | None = True

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        raise CoordinatorUnavailable("not used")

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        if self.answer is None:
            raise CoordinatorUnavailable("nobody is there")
        return dumps(("ok", self.answer))


@pytest.mark.requirement("F6")
def test_a_lease_is_renewed_by_answers_and_runs_out_without_them() -> None:
    clock, coordinators, lost = ManualClock(), Coordinators(), list[str]()
    lifeline = Lifeline("host_1", coordinators, lost.append, clock=clock)
    clock.advance(100.0)
    assert lifeline.look()
    coordinators.answer = None
    clock.advance(29.0)
    assert lifeline.look()
    lifeline.renew()
    clock.advance(29.0)
    assert lifeline.look()
    assert lost == []
    clock.advance(2.0)
    assert not lifeline.look()
    assert lost == ["no coordinator has answered for 31 s: nobody is there"]


def test_a_coordinator_that_does_not_know_a_host_ends_it_at_once() -> None:
    coordinators, lost = Coordinators(), list[str]()
    coordinators.answer = False
    assert not Lifeline("host_1", coordinators, lost.append, clock=ManualClock()).look()
    assert lost == ["its coordinator does not know it any more"]
