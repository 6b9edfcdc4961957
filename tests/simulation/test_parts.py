"""The parts that a simulation is made of: time, network and disk do what their invariants say."""

from __future__ import annotations

import pytest

from remit.core.errors import JournalError
from remit.core.events import Event, TurnAccepted, encode_event
from remit.journal import JournalRecord
from remit.testing.simulation.disk import Disk
from remit.testing.simulation.history import History
from remit.testing.simulation.kernel import START_S, Dice, Kernel, Network, Weather
from remit.testing.simulation.violation import Violation


def test_events_happen_in_the_order_of_their_times() -> None:
    kernel, seen = Kernel(), list[int]()
    for number, delay in enumerate([2.0, 1.0, 1.0, 0.0]):
        kernel.after(delay, lambda n=number: seen.append(n))  # type: ignore[misc]
    kernel.after(1.5, lambda: seen.append(99)).cancel()
    kernel.run(START_S + 10)
    assert seen == [3, 1, 2, 0]
    assert kernel.now == START_S + 10


def test_chance_depends_on_the_seed_and_the_name_alone() -> None:
    one, two = Dice(1), Dice(1)
    two.unit("something else")
    assert one.unit("a", 1) == two.unit("a", 1)
    assert one.unit("a", 1) != Dice(2).unit("a", 1)
    assert one.unit("a", 1) != one.unit("a", 2)


def deliveries(weather: Weather, *, calm_at: float, exact: bool = False, count: int = 200) -> list[int]:
    """Return the numbers of the messages that arrive, in order."""
    kernel, seen = Kernel(), list[int]()
    network = Network(kernel, Dice(3), weather, calm_at)
    for number in range(count):
        network.send("a", "b", "request", lambda n=number: seen.append(n), exact=exact)  # type: ignore[misc]
    kernel.run(START_S + 100)
    return seen


def test_a_bad_network_loses_doubles_and_reorders() -> None:
    seen = deliveries(Weather(loss=0.2, duplicate=0.2, slow=0.2), calm_at=START_S + 50)
    assert len(set(seen)) < 200
    assert len(seen) > len(set(seen))
    assert seen != sorted(seen)


def test_a_calm_network_delivers_everything_once() -> None:
    assert sorted(deliveries(Weather(loss=0.9, duplicate=0.9), calm_at=START_S)) == list(range(200))


def test_exact_messages_arrive_once_and_in_order_whatever_the_weather() -> None:
    seen = deliveries(Weather(loss=0.9, duplicate=0.9, slow=0.5), calm_at=START_S + 50, exact=True)
    assert seen == list(range(200))


def test_an_endpoint_that_is_cut_off_hears_nothing_until_the_cut_ends() -> None:
    kernel, seen = Kernel(), list[str]()
    network = Network(kernel, Dice(3), Weather(), START_S)
    network.cut("b", 1.0)
    network.send("a", "b", "request", lambda: seen.append("cut"))
    kernel.run(START_S + 2.0)
    network.send("a", "b", "request", lambda: seen.append("whole"))
    kernel.run(START_S + 3.0)
    assert seen == ["whole"]


def record(name: str) -> JournalRecord:
    event: Event = TurnAccepted(name, name, 1.0)
    return JournalRecord(event.kind, name, name, 1000, encode_event(event), event.terminal, None)


def test_a_crash_leaves_whole_batches_and_a_prefix_of_them() -> None:
    left: set[int] = set()
    for seed in range(60):
        disk = Disk(Kernel(), Dice(seed))
        disk.open()
        for number in range(4):
            disk.append([record(f"turn_{number}a"), record(f"turn_{number}b")], lambda _: pytest.fail("was told"))
        disk.crash()
        disk.open()
        names = [event.node_id for event in disk.events()]
        assert names == [f"turn_{number}{half}" for number in range(4) for half in "ab"][: len(names)]
        assert len(names) % 2 == 0
        left.add(len(names) // 2)
    assert left == {0, 1, 2, 3, 4}


def test_a_disk_that_fails_fails_all_that_waits_and_stays_broken_for_its_time() -> None:
    kernel = Kernel()
    disk = Disk(kernel, Dice(1))
    disk.open()
    told: list[BaseException | None] = []
    disk.fail(5.0)
    disk.append([record("turn_1")], told.append)
    disk.append([record("turn_2")], told.append)
    kernel.run(START_S + 2.0)
    assert [type(error) for error in told] == [JournalError, JournalError]
    with pytest.raises(JournalError):
        disk.open()
    kernel.run(START_S + 6.0)
    disk.open()
    assert disk.epoch == 2


def test_the_judge_of_histories_believes_events_alone() -> None:
    history = History([TurnAccepted("turn_1", "turn_1", 1.0)])
    with pytest.raises(Violation, match="accepted twice"):
        history.add(TurnAccepted("turn_1", "turn_1", 2.0))
