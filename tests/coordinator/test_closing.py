"""Closing a coordinator and a connection: in order, once, bounded, whoever asks and whenever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from remit.coordinator import Coordinator
from remit.coordinator.closing import Closing, Steps
from remit.core import CauseKind, Outcome, TurnCancelled
from remit.core.clock import SystemClock
from remit.core.errors import CoordinatorClosing, CoordinatorUnavailable
from remit.testing import ManualClock, await_until, open_inprocess
from tests.agents import bodies
from tests.agents.world import in_loop, world

ORDER = ["stop", "wait", "end hosts", "release", "close journal", "close telemetry", "leave"]


class House:
    """Something to close, step by step."""

    def __init__(self, *, clock: ManualClock | None = None) -> None:
        self.done: list[str] = []
        self.idle = True
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.close_journal: Callable[[], None] = lambda: self.done.append("close journal")
        steps = Steps(
            stop=self._stop,
            is_idle=lambda: self.idle,
            end_hosts=self._end_hosts,
            release=lambda: self.done.append("release"),
            resources=(
                ("journal", lambda: self.close_journal()),
                ("telemetry", lambda: self.done.append("close telemetry")),
            ),
            leave=lambda: self.done.append("leave"),
        )
        self.closing = Closing(steps, clock or SystemClock())

    async def _stop(self, reason: str) -> None:
        self.stopping.set()
        await self.may_stop.wait()
        self.done.append(f"stop for {reason}")

    async def _end_hosts(self) -> None:
        self.done.append("end hosts")


@pytest.mark.requirement("D2")
@in_loop
async def test_the_steps_are_taken_once_and_in_order_however_often_it_is_asked() -> None:
    house = House()
    house.may_stop.clear()
    asked = [asyncio.ensure_future(house.closing.close(f"reason {number}", 10)) for number in range(3)]
    await house.stopping.wait()
    asked[0].cancel()
    house.may_stop.set()
    assert await asyncio.gather(*asked[1:]) == [True, True]
    assert asked[0].cancelled(), "whoever gives up waiting stops nothing"
    assert await house.closing.close("late", 10)
    assert house.closing.taken == ORDER
    assert house.done == ["stop for reason 0", *ORDER[2:]]


@pytest.mark.requirement("B36")
@in_loop
async def test_the_shortest_patience_of_all_counts() -> None:
    clock = ManualClock()
    house = House(clock=clock)
    house.idle = False
    patient = asyncio.ensure_future(house.closing.close("tonight", 1_000))
    await await_until(lambda: "wait" in house.closing.taken)
    hasty = asyncio.ensure_future(house.closing.close("now", 0))
    assert not await hasty
    assert not await patient, "something still ran"
    assert house.closing.taken == ORDER


@pytest.mark.requirement("D6")
@pytest.mark.parametrize("how", ["raises", "hangs"])
@in_loop
async def test_what_cannot_be_closed_is_left_behind_and_the_rest_is_closed(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("remit.coordinator.closing._RESOURCE_S", 0.05)
    house = House()
    release = threading.Event()

    def close_journal() -> None:
        if how == "raises":
            raise OSError("no space")
        release.wait(30)

    house.close_journal = close_journal
    assert await house.closing.close("now", 1)
    release.set()
    await await_until(lambda: len(asyncio.all_tasks()) == 1)
    assert house.closing.taken == ORDER
    assert "journal" in caplog.text
    assert house.done[-2:] == ["close telemetry", "leave"]


@pytest.mark.requirement("D2")
@pytest.mark.requirement("D3")
@in_loop
async def test_a_closing_coordinator_writes_everything_down_before_its_journal_closes(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        service = w.system.life.service
        async with w.held() as turn:
            run = await turn.delegate(bodies.nap)
            await w.stage.until_noted("nap began")
            w.system.shut("finish_turn")
            closing = asyncio.ensure_future(w.coordinator.shutdown("for tonight", timeout_s=30))
            await await_until(lambda: turn.signal.is_set)
            with pytest.raises(CoordinatorClosing):
                async with w.coordinator.turn("late"):
                    pass
            w.system.let_through("finish_turn")
        assert await closing
        closed = ["close programs", "close spool", "close journal"]
        assert service.closing.taken == ["stop", "wait", "end hosts", "release", *closed, "leave"]
        assert run.outcome is Outcome.CANCELLED
        assert run.cause is not None
        assert (run.cause.kind, run.cause.reason) == (CauseKind.SHUTDOWN, "for tonight")
        with pytest.raises(CoordinatorClosing, match="has closed"):
            await w.coordinator.turns()
        assert await w.coordinator.shutdown("again")


@pytest.mark.requirement("D4")
@in_loop
async def test_a_turn_that_is_accepted_just_before_the_close_is_stopped_by_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.shut("delegate")
        async with w.held() as turn:
            with pytest.raises(TurnCancelled):
                delegating = asyncio.ensure_future(turn.delegate(bodies.nap))
                await w.until_asked("delegate")
                closing = asyncio.ensure_future(w.coordinator.shutdown("now", timeout_s=30))
                await await_until(lambda: turn.signal.is_set)
                w.system.let_through("delegate")
                await delegating
        assert await closing
        assert not w.stage.notes(), "what was on its way never began"


@in_loop
async def test_a_close_from_a_signal_handler_or_another_thread_ends_in_the_same_way(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        service = w.system.life.service
        async with w.held() as turn:
            for _ in range(2):
                service.close_soon("SIGTERM")
        assert turn.cause is not None
        assert (turn.cause.kind, turn.cause.reason) == (CauseKind.SHUTDOWN, "SIGTERM")
        await await_until(lambda: "leave" in service.closing.taken)
        assert service.closing.taken.count("stop") == 1


@in_loop
async def test_a_bound_that_is_over_ends_what_would_not_stop(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.system.shut("finish_turn")
        async with w.held(grace_s=600):
            assert not await w.coordinator.shutdown("now", timeout_s=0.05)
            w.system.let_through("finish_turn")


# -- connections -----------------------------------------------------------------------


def test_closing_a_connection_while_it_connects_is_heard_in_the_end(tmp_path: Path) -> None:
    """As from a signal handler: in the very thread that connects."""
    with open_inprocess(tmp_path) as system:
        let_go: list[str] = []

        def connect() -> object:
            coordinator.close()
            coordinator.close()
            return system.link()

        coordinator = Coordinator(str(tmp_path), connect, on_close=lambda: let_go.append("x"))  # type: ignore[arg-type]
        with pytest.raises(CoordinatorClosing, match="while it was connecting"):
            coordinator.connect()
        assert let_go == ["x"]
        with pytest.raises(CoordinatorUnavailable):
            coordinator.turn("t")
        coordinator._connect = system.link
        coordinator.connect()
        coordinator.close()
        coordinator.close()
        assert let_go == ["x", "x"]


def test_many_threads_close_a_connection_once(tmp_path: Path) -> None:
    with open_inprocess(tmp_path) as system:
        let_go: list[str] = []
        coordinator = Coordinator(str(tmp_path), system.link, on_close=lambda: let_go.append("x"))
        coordinator.connect()
        threads = [threading.Thread(target=coordinator.close) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert let_go == ["x"]
        assert system.calls.count("close_client") == 1
