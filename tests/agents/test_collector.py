"""The pause of the garbage collector while very many bodies unwind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator

import pytest

from remit.agents.collector import CollectorPause


class Alarm:
    """A timer that goes off by hand."""

    set_for: list[float]

    def __init__(self) -> None:
        self.set_for = []
        self._due: list[Callable[[], None]] = []

    def __call__(self, delay_s: float, fn: Callable[[], None]) -> None:
        self.set_for.append(delay_s)
        self._due.append(fn)

    def go_off(self) -> None:
        due, self._due = self._due, []
        for fn in due:
            fn()


@pytest.fixture
def collecting() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    if was_enabled:
        gc.enable()
    else:
        gc.disable()


@pytest.mark.usefixtures("collecting")
def test_a_pause_ends_by_itself_and_a_second_one_within_it_adds_nothing() -> None:
    alarm = Alarm()
    pause = CollectorPause(0.5, call_later=alarm)
    pause.begin()
    pause.begin()
    assert not gc.isenabled()
    assert alarm.set_for == [0.5]
    alarm.go_off()
    assert gc.isenabled()
    pause.begin()
    assert alarm.set_for == [0.5, 0.5]
    alarm.go_off()


@pytest.mark.usefixtures("collecting")
def test_whoever_has_switched_the_collector_off_keeps_it_off() -> None:
    alarm = Alarm()
    gc.disable()
    CollectorPause(0.5, call_later=alarm).begin()
    alarm.go_off()
    assert alarm.set_for == []
    assert not gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_the_real_timer_brings_the_collector_back() -> None:
    import threading

    CollectorPause(0.01).begin()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
    assert gc.isenabled()
