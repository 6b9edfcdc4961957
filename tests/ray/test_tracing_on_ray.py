"""Traces across real processes: one trace, hosts that die, variables that travel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.cli.records import opened
from remit.coordinator import Turn
from remit.core import TurnCancelled
from remit.locks import write
from remit.telemetry import ObservedAt, waiting_at
from remit.telemetry.files import read_traces, traces_folder
from remit.telemetry.record import SpanRecord
from remit.testing import await_until
from tests.ray.conftest import OpenCoordinator

DEAF = "trap '' TERM; touch %s; sleep 600 & wait; while :; do sleep 600; done"


def _note(ctx: RunContext, word: str) -> None:
    (ctx.workspace / f"note-{word}").touch()


@agent
async def holds(ctx: RunContext) -> None:
    async with ctx.claim(write("shared")):
        _note(ctx, "holds")
        await ctx.sleep(600)


@agent
async def in_line(ctx: RunContext) -> None:
    _note(ctx, "in_line")
    async with ctx.claim(write("shared")):
        raise AssertionError("granted")


@agent(isolation="actor")
async def program(ctx: RunContext) -> None:
    await ctx.process(["sh", "-c", DEAF % (ctx.workspace / "note-program")], grace_s=0.2)


@agent
async def asks(ctx: RunContext) -> None:
    with waiting_at(ObservedAt.APPROVAL_WAIT):
        _note(ctx, "asks")
        await ctx.sleep(600)


@agent(isolation="actor")
async def computes(ctx: RunContext) -> None:
    _note(ctx, "computes")
    while True:
        await asyncio.sleep(0.01)


@agent
async def middle(ctx: RunContext) -> None:
    runs = [await ctx.delegate(each) for each in (holds, in_line, program, asks, computes)]
    await ctx.gather(*runs)


@agent
async def uses_library(ctx: RunContext) -> int:
    from opentelemetry import trace

    with trace.get_tracer("some.library").start_as_current_span("chat model"):
        return os.getpid()


async def _spans(workspace: Path, turn_id: str, enough: str) -> list[SpanRecord]:
    found: list[SpanRecord] = []

    def there() -> bool:
        found[:] = read_traces(traces_folder(workspace), turn_id)
        return any(span.name == enough for span in found)

    await await_until(there, timeout_s=30.0, message=f"span {enough}")
    return found


async def _story(open_coordinator: OpenCoordinator, tmp_path: Path) -> tuple[list[SpanRecord], str]:
    ready: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
    async with open_coordinator() as coordinator:

        async def hold() -> None:
            async with coordinator.turn("swarm") as turn:
                run = await turn.delegate(middle)
                for word in ("holds", "in_line", "program", "asks", "computes"):
                    there = (tmp_path / f"note-{word}").exists
                    await await_until(lambda there=there: there() or run.is_settled, timeout_s=120.0, message=word)  # type: ignore[misc]
                assert not run.is_settled, run.exception()
                while not any(claim.held_by for claim in await coordinator.locks()):
                    await asyncio.sleep(0.05)
                ready.set_result(turn)
                await run.result()

        holding = asyncio.ensure_future(hold())
        waiting: set[asyncio.Future[Any]] = {holding, ready}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            holding.result()
        turn = await ready
        assert (await (await coordinator.cancel(turn.id, "enough")).quiet()).is_quiet
        with pytest.raises(TurnCancelled):
            await holding
        return await _spans(tmp_path, turn.id, "cancel.request"), turn.id


@pytest.mark.requirement("G1")
@pytest.mark.requirement("G2")
@pytest.mark.field_report("K4")
def test_one_trace_over_several_hosts_with_every_hop_once(open_coordinator: OpenCoordinator, tmp_path: Path) -> None:
    spans, turn_id = asyncio.run(_story(open_coordinator, tmp_path))
    assert len({s.trace_id for s in spans}) == 1
    ids = {s.span_id for s in spans}
    assert [s.name for s in spans if s.parent_id not in ids] == ["invoke_workflow swarm"]
    seen = {
        str(s.attributes.get("gen_ai.agent.name", "turn")): s.attributes["remit.cancel.observed_at"]
        for s in spans
        if s.name == "cancel.observe"
    }
    assert seen == {
        "turn": "child_wait",
        "middle": "child_wait",
        "holds": "checkpoint",
        "in_line": "lock_wait",
        "program": "tool_wait",
        "asks": "approval_wait",
        "computes": "checkpoint",
    }
    assert len([s for s in spans if s.name == "cancel.deliver"]) == len(seen) + 1
    errors = [(s.name, s.error, s.attributes["remit.cancel.target.kind"]) for s in spans if s.error]
    assert errors == [("cancel.deliver", "term_grace_exceeded", "process")]
    hosts = {s.attributes["remit.placement.host_id"] for s in spans if "remit.attempt" in s.attributes}
    assert len(hosts) >= 3
    by_id = {s.span_id: s for s in spans}
    for span in (s for s in spans if s.name == "cancel.deliver"):
        sender = by_id[span.parent_id]
        above = sender.attributes["remit.cancel.hop"] if sender.name == "cancel.observe" else 0
        assert span.attributes["remit.cancel.hop"] == int(str(above)) + 1
    with opened(tmp_path) as records:
        outcomes = {node.id: node.outcome for node in records.state.nodes.values()}
    for span in spans:
        if span.name.startswith("invoke_"):
            assert span.attributes["remit.outcome"] == outcomes[span.run_id]
    assert turn_id in outcomes


@pytest.mark.requirement("G3")
def test_a_host_that_is_killed_right_after_a_runs_end_loses_no_span(
    open_coordinator: OpenCoordinator, tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine

    async def story() -> tuple[list[SpanRecord], str]:
        async with open_coordinator() as coordinator:
            async with coordinator.turn("t") as turn:
                run = await turn.delegate(uses_library)
                await run.result()
                view = await coordinator.run(run.id)
                name = ray_engine.host_name(str(tmp_path), view.host_id)
                ray_engine.ray.kill(ray_engine.ray.get_actor(name, namespace=ray_engine.NAMESPACE))
            return await _spans(tmp_path, turn.id, "invoke_workflow t"), run.id

    spans, run_id = asyncio.run(story())
    own = [s for s in spans if s.run_id == run_id and s.name == "invoke_agent uses_library"]
    assert {s.attributes["remit.outcome"] for s in own} == {"succeeded"}
    assert len(own) == 2


_TRACED_DRIVER = """
import asyncio, sys
from opentelemetry import trace
from remit.agents import agent
from remit.coordinator import Coordinator
from remit.core import TurnCancelled

@agent
async def child(ctx):
    with trace.get_tracer("some.library").start_as_current_span("chat model"):
        pass
    await ctx.sleep(600)

@agent(isolation="actor")
async def parent(ctx):
    run = await ctx.delegate(child)
    (ctx.workspace / "delegated").touch()
    await run.result()

async def main(workspace):
    async with Coordinator.open(workspace) as coordinator:
        try:
            async with coordinator.turn("traced") as turn:
                run = await turn.delegate(parent)
                while not any(each.agent == "child" and each.state == "running" for each in await coordinator.runs()):
                    await asyncio.sleep(0.05)
                await (await coordinator.cancel(turn.id, "enough")).quiet()
                await run.result()
        except TurnCancelled:
            print(turn.id, trace.get_tracer_provider().__class__.__module__)
        await coordinator.shutdown("test", timeout_s=10.0)

asyncio.run(main(sys.argv[1]))
"""


RAYS_HOOK = "ray.util.tracing.setup_local_tmp_tracing:setup_tracing"
RAYS_FOLDER = Path("/tmp/spans")


@contextmanager
def rays_tracing() -> Iterator[None]:
    """Switch on Ray's own tracing for processes that begin in the block, as `ray start` does if told to."""
    from remit.coordinator import ray_engine

    store: Any = ray_engine.ray._private.worker.global_worker.gcs_client
    place = ray_engine.ray._private.ray_constants.KV_NAMESPACE_TRACING
    before = set(RAYS_FOLDER.glob("*")) if RAYS_FOLDER.exists() else None
    store.internal_kv_put(b"tracing_startup_hook", RAYS_HOOK.encode(), True, place)
    try:
        yield
    finally:
        store.internal_kv_del(b"tracing_startup_hook", False, place)
        for path in set(RAYS_FOLDER.glob("*")) - (before or set()):
            path.unlink(missing_ok=True)
        if before is None and RAYS_FOLDER.exists():
            RAYS_FOLDER.rmdir()


@pytest.mark.requirement("G1")
def test_rays_own_tracing_may_be_on(ray_connection: None, ray_node: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TRACED_DRIVER)
    with rays_tracing():
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
            env=ray_node,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    turn_id, module = done.stdout.split()
    assert module.startswith("opentelemetry.sdk"), "Ray did not call its hook"
    spans = list(read_traces(traces_folder(tmp_path), turn_id))
    assert {s.attributes["remit.outcome"] for s in spans if s.name.startswith("invoke_")} == {"cancelled"}
    assert len([s for s in spans if s.name == "cancel.observe"]) == 3
    assert [s.error for s in spans if s.error] == []
    assert len({s.trace_id for s in spans}) == 1
