"""Spans of users, agents and libraries: their own SDK is used, nothing is forced on them, our ids are on all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from remit.agents import RunContext, agent
from remit.core import Cause, CauseKind, RunCancelled, TurnCancelled
from remit.telemetry import span
from remit.telemetry.carrier import format_carrier
from remit.telemetry.files import read_traces, traces_folder
from remit.telemetry.hosting import HostTelemetry, attempt_carrier
from remit.telemetry.recorder import Recorder
from remit.testing import await_until
from tests.agents.bodies import Stage, give, nap
from tests.agents.world import in_loop
from tests.telemetry.bodies import tidy
from tests.telemetry.world import traced


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Set up the SDK as a user does, for the time of a test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {s.name: s for s in exporter.get_finished_spans()}


@agent
async def library(ctx: RunContext) -> None:
    """Use a library that makes spans of its own, and delegate inside one of them."""
    tracer = trace.get_tracer("some.library")
    with tracer.start_as_current_span("chat model"):
        await ctx.delegate(give)


@pytest.mark.requirement("G1")
@in_loop
async def test_one_trace_from_the_users_span_to_the_last_run(user: InMemorySpanExporter, tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        with trace.get_tracer("app").start_as_current_span("my request") as mine:
            async with world.coordinator.turn("t") as turn:
                await (await turn.delegate(library)).result()
        spans = await world.spans()
    theirs = by_name(user)
    holding, chat = theirs["invoke_workflow t"], theirs["chat model"]
    assert holding.parent.span_id == mine.get_span_context().span_id
    assert holding.kind is trace.SpanKind.CLIENT
    assert holding.attributes["remit.outcome"] == "succeeded"
    whole = world.kept.named("invoke_workflow t")[0]
    assert whole.parent_id == holding.context.span_id
    assert {s.trace_id for s in spans} == {mine.get_span_context().trace_id}
    attempt = next(s for s in spans if s.name == "invoke_agent library" and "remit.attempt" in s.attributes)
    assert chat.parent.span_id == attempt.span_id
    assert chat.attributes["remit.run.id"] == attempt.run_id
    below = world.kept.named("invoke_agent give")
    assert [s.parent_id for s in below if "remit.attempt" not in s.attributes] == [chat.context.span_id]


@pytest.mark.requirement("G1")
@pytest.mark.field_report("K4")
@in_loop
async def test_who_asks_for_a_cancel_has_a_span_that_is_linked_both_ways(
    user: InMemorySpanExporter, tmp_path: Path
) -> None:
    async with traced(tmp_path) as world:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(nap)
                await Stage(tmp_path).until_noted("nap began")
                ready.set_result(turn)
                await run.result()

        holding = asyncio.ensure_future(hold())
        turn = await ready
        with trace.get_tracer("app").start_as_current_span("another request") as other:
            await (await world.coordinator.cancel(turn.id, "enough")).quiet()
        with pytest.raises(TurnCancelled):
            await holding
        spans = await world.spans()
    asked = by_name(user)["cancel.ask"]
    assert asked.context.trace_id == other.get_span_context().trace_id
    request = next(s for s in spans if s.name == "cancel.request")
    assert request.trace_id != asked.context.trace_id
    assert request.links[0][:2] == (asked.context.trace_id, asked.context.span_id)
    assert request.links[0].attributes["remit.link"] == "requested_by"
    assert request.attributes["remit.cancel.requester.trace_id"] == f"{asked.context.trace_id:032x}"
    whole = next(s for s in spans if s.name == "invoke_workflow t")
    assert [(each.context.trace_id, each.context.span_id) for each in asked.links] == [(whole.trace_id, whole.span_id)]
    hit = {link.span_id for link in request.links if link.attributes["remit.link"] == "cancels"}
    assert len(hit) == 2  # the run and the holder


@pytest.mark.requirement("G1")
@in_loop
async def test_a_cancel_is_linked_to_whoever_started_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            run = await turn.delegate(nap)
            await Stage(tmp_path).until_noted("nap began")
            monkeypatch.setenv("TRACEPARENT", format_carrier(10, 11))
            await (await world.coordinator.cancel(run.id, "enough")).quiet()
        request = next(s for s in await world.spans() if s.name == "cancel.request")
    assert request.links[0] == (10, 11, {"remit.link": "requested_by"})
    assert request.attributes["remit.cancel.requester.trace_id"] == f"{10:032x}"
    assert request.trace_id != 10


@pytest.mark.requirement("G1")
@in_loop
async def test_a_turn_is_below_whoever_started_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", format_carrier(10, 11))
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t"):
            pass
        (whole,) = await world.spans()
    assert (whole.trace_id, whole.parent_id) == (10, 11)


@pytest.mark.requirement("G7")
@in_loop
async def test_cleanup_that_is_shielded_stays_in_the_trace(user: InMemorySpanExporter, tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            run = await turn.delegate(tidy)
            await Stage(tmp_path).until_noted("tidy")
            await (await run.cancel("enough")).quiet()
        spans = await world.spans()
    clean = by_name(user)["clean up"]
    attempt = next(s for s in spans if s.run_id == run.id and "remit.attempt" in s.attributes)
    assert clean.parent.span_id == attempt.span_id
    assert clean.context.trace_id == attempt.trace_id
    assert clean.attributes["remit.outcome"] == "succeeded"
    assert clean.attributes["remit.run.id"] == run.id


CAUSE = Cause(CauseKind.USER_INTERRUPT, "turn_1", request_id="req_1", reason="enough")


@pytest.mark.requirement("G3")
@pytest.mark.requirement("G4")
@pytest.mark.field_report("K1")
@pytest.mark.parametrize(
    ("error", "outcome", "error_type"),
    [
        (None, "succeeded", None),
        (TurnCancelled(CAUSE), "cancelled", None),
        (RunCancelled("x", run_id="run_1", cause=CAUSE), "cancelled", None),
        (asyncio.CancelledError(), "cancelled", None),
        (KeyboardInterrupt(), "cancelled", None),
        (GeneratorExit(), "cancelled", None),
        (TimeoutError(), "timed_out", "timeout"),
        (ValueError("a secret"), "failed", "ValueError"),
    ],
)
def test_the_one_helper_ends_its_span_by_the_rule(
    user: InMemorySpanExporter, error: BaseException | None, outcome: str, error_type: str | None
) -> None:
    def block() -> None:
        with span("step", {"x": 1}):
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(type(error)):
            block()
    step = by_name(user)["step"]
    assert step.attributes["remit.outcome"] == outcome
    assert step.attributes.get("error.type") == error_type
    assert step.status.status_code.name == ("ERROR" if error_type else "UNSET")
    assert step.events == ()
    assert "a secret" not in str(step.attributes)
    if getattr(error, "cause", None) is not None:
        assert step.attributes["remit.cancel.id"] == "req_1"
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_processor_that_raises_does_not_come_through(user: InMemorySpanExporter, monkeypatch: Any) -> None:
    from opentelemetry.sdk.trace import Span

    def broken(self: Any, key: str, value: Any) -> None:
        raise RuntimeError("no")

    with span("step"):
        monkeypatch.setattr(Span, "set_attribute", broken)
    assert "step" in by_name(user)


def run_python(code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_set_up_in_a_users_process() -> None:
    found = run_python(
        """
        import asyncio, json, sys, tempfile
        from remit.agents import agent
        from remit.telemetry import TelemetrySettings, span
        from remit.testing import open_inprocess

        @agent
        async def give(ctx):
            with span("step"):
                return 1

        async def main(system):
            async with system.coordinator() as coordinator:
                async with coordinator.turn("t") as turn:
                    return await (await turn.delegate(give)).result()

        with tempfile.TemporaryDirectory() as folder:
            with open_inprocess(folder, telemetry=TelemetrySettings()) as system:
                value = asyncio.run(main(system))
        print(json.dumps([value, "opentelemetry.sdk" in sys.modules, "opentelemetry.trace" in sys.modules]))
        """
    )
    assert found == [1, False, False]


def test_a_host_sets_up_what_agents_spans_need_and_only_if_nobody_has(tmp_path: Path) -> None:
    found = run_python(
        f"""
        import json, sys
        from pathlib import Path
        from remit.telemetry.carrier import format_carrier
        from remit.telemetry.hosting import HostTelemetry

        host = HostTelemetry(Path({str(tmp_path)!r}), "host_1", own_process=True)
        host.prepare()
        before = "opentelemetry.sdk.trace" in sys.modules
        from opentelemetry import trace  # as the module of an agent does
        tracer = trace.get_tracer("some.library")
        host.prepare()
        host.prepare()
        with host.inside(format_carrier(10, 11), "run_1", "turn_1", 1):
            with tracer.start_as_current_span("chat model"):
                pass
        host.flush(5.0)
        print(json.dumps([before, type(trace.get_tracer_provider()).__name__]))
        """
    )
    assert found == [False, "TracerProvider"]
    spans = list(read_traces(traces_folder(tmp_path), "turn_1"))
    assert [(s.name, s.trace_id, s.attributes["remit.run.id"]) for s in spans] == [("chat model", 10, "run_1")]
    parent = attempt_carrier("00-" + f"{10:032x}-{11:016x}-01", "run_1", 1)
    assert f"{spans[0].parent_id:016x}" in parent
    assert spans[0].attributes["otel.scope.name"] == "some.library"


def test_an_sdk_of_the_agents_code_is_used_as_it_is(user: InMemorySpanExporter, tmp_path: Path) -> None:
    host = HostTelemetry(tmp_path, "host_1", own_process=True)
    host.prepare()
    with host.inside("", "run_1", "turn_1", 1), trace.get_tracer("x").start_as_current_span("chat"):
        pass
    assert by_name(user)["chat"].attributes["remit.run.id"] == "run_1"
    assert not traces_folder(tmp_path).exists()


@pytest.mark.requirement("G3")
@in_loop
async def test_hosts_hand_on_before_they_are_ended(
    user: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[float] = []
    monkeypatch.setattr(HostTelemetry, "flush", lambda self, timeout_s: flushed.append(timeout_s))
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            await (await turn.delegate(give)).result()
        await world.coordinator.shutdown()
        assert flushed
        assert all(0 < seconds <= 2 for seconds in flushed)


@in_loop
async def test_a_cancel_order_makes_a_host_hand_on_in_a_thread(
    user: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[float] = []
    monkeypatch.setattr(HostTelemetry, "flush", lambda self, timeout_s: flushed.append(timeout_s))
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            run = await turn.delegate(nap)
            await Stage(tmp_path).until_noted("nap began")
            await (await run.cancel("enough")).quiet()
        await await_until(lambda: bool(flushed), timeout_s=60.0)


def test_a_recorder_takes_nothing_more_when_it_is_closed() -> None:
    recorder = Recorder([])
    recorder.close()
    recorder.close()
    recorder.refused(1)
    assert recorder.statistics()["dropped"] == 1
    assert not recorder.flush(0.1)
