"""Spans, metrics and log records at a real OTLP receiver, and what a bad one changes: nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remit.coordinator import RunOptions
from remit.core import Outcome, TurnCancelled
from remit.telemetry import TelemetrySettings
from remit.telemetry.collectors import CollectorSink, load_exporters
from remit.telemetry.record import Batch
from remit.telemetry.setup import open_recorder
from remit.testing import open_inprocess, wait_until
from tests.agents.bodies import Stage, add, nap
from tests.agents.world import in_loop
from tests.telemetry.receiver import Receiver, attributes_of, receiving
from tests.telemetry.test_files import record
from tests.telemetry.world import traced


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receive what processes of ours send, by the standard variables."""
    with receiving() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        yield found


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Accept connections and never answer."""
    with receiving(answers=False) as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


def settings() -> TelemetrySettings:
    return TelemetrySettings.from_env(os.environ)


async def cancelled_turn(coordinator: Any, workspace: Path) -> float:
    """Cancel a turn with one run in it; return the seconds from the request to quiet."""
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with coordinator.turn("t") as turn:
            run = await turn.delegate(nap)
            await Stage(workspace).until_noted("nap began")
            ready.set_result(turn)
            await run.result()

    holding = asyncio.ensure_future(hold())
    turn = await ready
    began = time.monotonic()
    receipt = await (await coordinator.cancel(turn.id, "enough")).quiet()
    took = time.monotonic() - began
    assert receipt.is_quiet
    with pytest.raises(TurnCancelled):
        await holding
    assert turn.outcome is Outcome.CANCELLED
    return took


@pytest.mark.requirement("G1")
@pytest.mark.requirement("G9")
def test_a_receiver_gets_spans_metrics_and_records(receiver: Receiver, tmp_path: Path) -> None:
    with open_inprocess(tmp_path, poll_s=0.1, telemetry=settings()) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator:
                await cancelled_turn(coordinator, tmp_path)

        asyncio.run(story())
        assert system.recorder is not None
        system.recorder.close()
    spans = {span.name: span for span in receiver.spans()}
    assert set(spans) == {
        "invoke_workflow t",
        "invoke_agent nap",
        "cancel.request",
        "cancel.deliver",
        "cancel.observe",
    }
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["cancel.request"].parent_span_id == spans["invoke_workflow t"].span_id
    assert {attributes_of(link)["remit.link"] for link in spans["cancel.deliver"].links} == {"cancels"}
    assert spans["cancel.observe"].kind == 2  # SERVER
    assert spans["cancel.deliver"].kind == 3  # CLIENT
    assert all(span.status.code == 0 for span in spans.values())
    assert attributes_of(spans["invoke_workflow t"])["remit.outcome"] == "cancelled"
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in receiver.spans())

    metrics = receiver.metrics()
    quiet = metrics["remit.cancel.quiesce.duration"]
    assert quiet.unit == "s"
    assert attributes_of(quiet.histogram.data_points[0]) == {"result": "quiet"}
    assert metrics["remit.runs.active"].sum.data_points[0].as_double == 0
    for metric in metrics.values():
        points = (metric.histogram.data_points or metric.sum.data_points) or ()
        assert "_0" not in "".join(str(attributes_of(point)) for point in points), metric.name

    requested = [log for log in receiver.logs() if log.event_name == "remit.cancel.requested"]
    assert [log.trace_id for log in requested] == [spans["cancel.request"].trace_id]
    assert [log.span_id for log in requested] == [spans["cancel.request"].span_id]


def test_a_text_that_utf_8_cannot_hold_costs_no_span(receiver: Receiver, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")  # a file's name, as Python reads it where it is no UTF-8
    with open_inprocess(tmp_path, poll_s=0.1, telemetry=settings()) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator:
                async with coordinator.turn(odd, session=odd) as turn:
                    await (await turn.delegate(add, a=1, b=2, options=RunOptions(name=odd))).result()
                with pytest.raises(OSError, match="cannot read"):
                    async with coordinator.turn("failing"):
                        raise OSError(f"cannot read {odd}")

        asyncio.run(story())
        assert system.recorder is not None
        system.recorder.close()
    names = {span.name for span in receiver.spans()}
    assert names == {"invoke_workflow caf\\udce9", "invoke_agent add", "invoke_workflow failing"}


@pytest.mark.requirement("G9")
def test_what_is_counted_seldom_begins_with_nothing(receiver: Receiver, tmp_path: Path) -> None:
    # The increase of a series whose first value is 1 is none: the first leftover of all would raise no alert.
    recorder = open_recorder(settings(), tmp_path)
    assert recorder is not None
    recorder.close()
    found = {
        (name, *attributes_of(point).values()): point.as_int
        for name, metric in receiver.metrics().items()
        for point in metric.sum.data_points
    }
    assert found == {
        ("remit.cancel.leftovers",): 0,
        ("remit.effects.uncertain",): 0,
        ("remit.reports.refused",): 0,
        ("remit.telemetry.dropped",): 0,
        ("remit.cancel.escalations", "process"): 0,
        ("remit.cancel.escalations", "drain_host"): 0,
        ("remit.cancel.escalations", "kill_host"): 0,
    }


@pytest.mark.requirement("G8")
@pytest.mark.requirement("B41")
def test_a_collector_that_never_answers_changes_nothing_but_a_counter(deaf: Receiver, tmp_path: Path) -> None:
    with open_inprocess(tmp_path, poll_s=0.1, telemetry=settings()) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator:
                await cancelled_turn(coordinator, tmp_path)
                async with coordinator.turn("after") as turn:
                    runs = await turn.delegate_many(add, [{"a": n, "b": 1} for n in range(50)])
                    assert await turn.gather(*runs) == [n + 1 for n in range(50)]

        asyncio.run(story())
        recorder = system.recorder
        assert recorder is not None
        assert deaf.asked.wait(30)
        wait_until(lambda: recorder.statistics()["dropped"] > 0, timeout_s=30.0)
        began = time.monotonic()
        recorder.close(1.0)
        assert time.monotonic() - began < 30
        deaf.release.set()


@pytest.mark.requirement("G8")
def test_a_collector_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with open_inprocess(tmp_path, poll_s=0.1, telemetry=settings()) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator:
                await cancelled_turn(coordinator, tmp_path)

        asyncio.run(story())
        assert system.recorder is not None
        system.recorder.close(1.0)


@pytest.mark.requirement("G8")
def test_an_exporter_that_is_missing_or_broken_is_told_of_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_exporters("traces", ["no-such-exporter"]) == []
    assert "no-such-exporter" in caplog.text
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "nonsense")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    recorder = open_recorder(TelemetrySettings(traces=("otlp",)), tmp_path)
    assert recorder is not None
    recorder.close()


class Broken:
    """A sink, or an observer, that raises at everything."""

    dropped = 0
    is_measured = True

    def export(self, batch: Batch) -> None:
        raise RuntimeError("no")

    def is_sampled(self, trace: int) -> bool:
        return True

    def flush(self, timeout_s: float) -> None:
        raise RuntimeError("no")

    def close(self, timeout_s: float) -> None:
        raise RuntimeError("no")


@pytest.mark.requirement("G8")
@pytest.mark.requirement("B41")
@in_loop
async def test_a_sink_that_raises_costs_its_batch_and_nothing_else(tmp_path: Path) -> None:
    async with traced(tmp_path, sinks=[Broken()]) as world:  # type: ignore[list-item]
        await cancelled_turn(world.coordinator, tmp_path)
        await world.spans()
        assert world.system.recorder is not None
        assert world.system.recorder.statistics()["dropped"] >= 1
        assert world.kept.named("cancel.request")


@pytest.mark.requirement("G3")
def test_flush_hands_on_what_has_ended_and_close_ends_the_rest(tmp_path: Path) -> None:
    async def story() -> None:
        async with traced(tmp_path) as world:
            await cancelled_turn(world.coordinator, tmp_path)
            statistics = await world.coordinator.statistics()
            assert set(statistics["telemetry"]) == {"waiting", "open", "dropped"}
            await world.coordinator.shutdown()
            assert world.kept.calls[-1] == "close"
            assert world.kept.named("invoke_workflow t")

    asyncio.run(story())


def test_the_sampler_of_the_variables_is_heeded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    sink = CollectorSink(settings(), resource={})
    assert not sink.is_sampled(1)
    sink.export(Batch(spans=[record(is_sampled=False)]))
    sink.close(5.0)
    assert receiver.spans() == []


def test_standard_variables_say_what_is_made() -> None:
    assert TelemetrySettings.from_env({}) == TelemetrySettings(files=True)
    assert not TelemetrySettings.from_env({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}).is_on
    assert TelemetrySettings.from_env({"REMIT_TRACES": "off"}) == TelemetrySettings(files=False)
    one = TelemetrySettings.from_env({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})
    assert (one.traces, one.metrics, one.logs) == (("otlp",), (), ())
    named = TelemetrySettings.from_env({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})
    assert (named.traces, named.metrics) == ((), ("otlp",))
    assert TelemetrySettings.from_env({"REMIT_TRACES_MAX_MB": "1.5"}).max_bytes == 1536 * 1024
    assert TelemetrySettings.from_env({"REMIT_TRACES_MAX_MB": "-1"}).max_bytes == 64 * 1024 * 1024
    assert TelemetrySettings.from_env({"REMIT_TRACE_ARGUMENTS": "1"}).arguments


@in_loop
async def test_arguments_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        async with traced(tmp_path, telemetry=TelemetrySettings(files=False, arguments=asked)) as world:
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(add, a=4711, b=1)
                await run.result()
            await world.spans()
            attributes = world.kept.of_run(run.id).attributes
            assert ("4711" in str(attributes)) is asked
