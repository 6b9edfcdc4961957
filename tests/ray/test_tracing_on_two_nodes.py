"""The way of a cancel over two nodes, asked for by a command of its own, at a receiver on loopback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from remit.agents import RunContext, agent
from remit.agents.sync_context import SyncRunContext
from remit.cli.records import opened
from remit.coordinator import Coordinator, Turn
from remit.core import TurnCancelled
from remit.core.events import Event, HostBecameReady, ProcessEnded, RunEnded, TurnEnded, decode_event
from remit.locks import write
from remit.telemetry.carrier import format_carrier
from remit.testing import await_until
from tests.ray.conftest import OpenCoordinator
from tests.ray.test_recovery_on_ray import second_node
from tests.telemetry.receiver import Receiver, attributes_of, receiving

# More than the first node has: only the second one can take what asks for so many.
MANY_CPUS = (os.cpu_count() or 1) + 1
DEAF = "trap '' TERM; touch %s; sleep 600 & wait; while :; do sleep 600; done"
ASKER = 0xA5CE12
"""Trace and span of whoever starts the command that cancels."""


def _note(ctx: RunContext | SyncRunContext, word: str) -> None:
    (Path(ctx.workspace) / f"note-{word}").touch()


async def _noted(workspace: Path, *words: str) -> None:
    for word in words:
        await await_until((workspace / f"note-{word}").exists, timeout_s=120.0, message=word)


@agent
async def holds(ctx: RunContext) -> None:
    async with ctx.claim(write("shared")):
        _note(ctx, "holds")
        await ctx.sleep(600)


@agent
async def in_line(ctx: RunContext) -> None:
    await _noted(ctx.workspace, "holds")
    async with ctx.claim(write("shared")):
        raise AssertionError("granted")


@agent
async def asks(ctx: RunContext) -> None:
    with trace.get_tracer("some.library").start_as_current_span("chat model"):
        await asyncio.sleep(0)
    await ctx.approve("deploy prod")


@agent(num_cpus=MANY_CPUS)
async def program(ctx: RunContext) -> None:
    await ctx.process(["sh", "-c", DEAF % (ctx.workspace / "note-program")], grace_s=0.2)


@agent(num_cpus=MANY_CPUS)
def computes(ctx: SyncRunContext) -> None:
    _note(ctx, "computes")
    while True:
        sum(range(10_000))
        ctx.signal.wait_blocking(0.02)  # two CPUs have to be enough for the whole test
        ctx.signal.raise_if_set()


@agent
async def middle(ctx: RunContext) -> None:
    """Wait for children of which some are here and some are on the other node."""
    near = [await ctx.delegate(each) for each in (holds, in_line, asks)]
    _note(ctx, "near")
    await _noted(ctx.workspace, "other-node-is-free")
    far = [await ctx.delegate(each) for each in (program, computes)]
    await ctx.gather(*near, *far)


def _cancel(workspace: Path, environment: dict[str, str], turn_id: str) -> None:
    asker = {"TRACEPARENT": format_carrier(ASKER, ASKER)}
    done = subprocess.run(
        [sys.executable, "-m", "remit", "cancel", turn_id, "--reason", "enough"],
        cwd=workspace,
        env={**environment, **asker},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90.0,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def _at_work(coordinator: Coordinator, turn: Turn, workspace: Path, other: str) -> None:
    """Start the tree, some of it on the other node, and wait until each of its runs is at what it is there for."""
    await coordinator.drain(other)
    whole = await turn.delegate(middle)
    await _noted(workspace, "near", "holds")
    while not await coordinator.approvals():
        await asyncio.sleep(0.05)
    while not any(claim.held_by for claim in await coordinator.locks()):
        await asyncio.sleep(0.05)
    await coordinator.drain(other, undo=True)
    (workspace / "note-other-node-is-free").touch()
    await _noted(workspace, "program", "computes")
    while not (await coordinator.run(whole.id)).waiting_for:
        await asyncio.sleep(0.05)


async def _story(open_coordinator: OpenCoordinator, workspace: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run the tree and cancel it; return the ids of the turn and of the other node."""
    from remit.coordinator import ray_engine

    head = next(n["NodeID"] for n in ray_engine.ray.nodes() if "node:__internal_head__" in n["Resources"])
    await await_until(lambda: sum(n["Alive"] for n in ray_engine.ray.nodes()) == 2, timeout_s=120.0)
    other = next(n["NodeID"] for n in ray_engine.ray.nodes() if n["Alive"] and n["NodeID"] != head)
    async with open_coordinator() as coordinator:
        with pytest.raises(TurnCancelled):
            async with coordinator.turn("swarm", grace_s=60.0) as turn:
                await _at_work(coordinator, turn, workspace, other)
                stopping = asyncio.ensure_future(asyncio.to_thread(_cancel, workspace, environment, turn.id))
                await turn.gather(*turn.live_runs())
        await stopping
    return {"turn": turn.id, "head": head, "other": other}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receive what the coordinator and hosts of this test send."""
    with receiving() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        yield found


def _journal(workspace: Path) -> list[Event]:
    with opened(workspace) as records:
        assert records.reader is not None
        return [decode_event(r.kind, r.node_id, r.turn_id, r.data) for r in records.reader.read()]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.requirement("A14")
@pytest.mark.requirement("G1")
@pytest.mark.requirement("G2")
@pytest.mark.requirement("G4")
def test_a_tree_on_two_nodes_is_cancelled_by_a_command_in_one_trace(
    open_coordinator: OpenCoordinator, ray_node: dict[str, str], receiver: Receiver, tmp_path: Path
) -> None:
    from remit.coordinator.node import LocalNode

    node = LocalNode(Path(ray_node["REMIT_STATE_DIR"])).status()
    assert node is not None
    with second_node(ray_node, node.address, tmp_path / "node.log", num_cpus=2 * MANY_CPUS):
        ids = asyncio.run(_story(open_coordinator, tmp_path, ray_node))
    events = _journal(tmp_path)
    spans = [Seen(span) for span in receiver.spans()]
    check_whole(spans, events)
    check_hops(spans, ids["turn"])
    check_errors(spans, events)
    nodes = {e.node_id: e.node for e in events if isinstance(e, HostBecameReady)}
    where = {s.agent: nodes[s.attributes["remit.placement.host_id"]] for s in spans if "remit.attempt" in s.attributes}
    near, far = ids["head"], ids["other"]
    assert where == {"middle": near, "holds": near, "in_line": near, "asks": near, "program": far, "computes": far}


class Seen:
    """A span as the receiver has it."""

    def __init__(self, span: Any) -> None:
        self.name: str = span.name
        self.trace = span.trace_id.hex()
        self.id = span.span_id.hex()
        self.parent = span.parent_span_id.hex()
        self.attributes = attributes_of(span)
        self.links = [(link.trace_id.hex(), link.span_id.hex(), attributes_of(link)) for link in span.links]
        self.is_error = span.status.code == 2
        self.is_ended = span.end_time_unix_nano >= span.start_time_unix_nano > 0
        self.agent = str(self.attributes.get("gen_ai.agent.name", "turn"))
        self.number = int(self.attributes.get("remit.cancel.hop", 0))
        self.node_id = str(self.attributes.get("remit.run.id") or self.attributes.get("remit.turn.id"))


def check_whole(spans: list[Seen], events: list[Event]) -> None:
    """Check that it is one trace in which everything of the journal is, once, ended, with its outcome."""
    assert {s.trace for s in spans} == {spans[0].trace}
    ids = {s.id for s in spans}
    assert len(ids) == len(spans)
    assert [s.name for s in spans if s.parent not in ids] == ["invoke_workflow swarm"]
    assert all(s.is_ended for s in spans)
    outcomes = {e.node_id: e.outcome.value for e in events if isinstance(e, (RunEnded, TurnEnded))}
    own = [s for s in spans if s.name.startswith("invoke_")]
    assert sorted(s.node_id for s in own if "remit.attempt" not in s.attributes) == sorted(outcomes)
    assert {s.node_id: s.attributes["remit.outcome"] for s in own} == outcomes
    assert set(outcomes.values()) == {"cancelled"}
    assert [s.attributes["remit.lock.result"] for s in spans if s.name == "lock.wait"] == ["cancelled"]
    assert [s.attributes["remit.approval.decision"] for s in spans if s.name == "approval.wait"] == ["cancelled"]
    (library,) = [s for s in spans if s.name == "chat model"]
    (asking,) = [s for s in own if s.agent == "asks" and "remit.attempt" in s.attributes]
    assert (library.parent, library.attributes["remit.run.id"]) == (asking.id, asking.node_id)


def check_hops(spans: list[Seen], turn_id: str) -> None:
    """Check that every hop is there once, numbered and linked, with what each body was at."""
    by_id = {s.id: s for s in spans}
    (request,) = [s for s in spans if s.name == "cancel.request"]
    assert by_id[request.parent].name == "invoke_workflow swarm"
    assert request.attributes["remit.cancel.surface"] == "cli"
    assert request.attributes["remit.cancel.reason"] == "enough"
    assert request.attributes["remit.cancel.orphans"] == 0
    assert request.attributes["remit.cancel.target.run_id"] == turn_id
    heard = [s for s in spans if s.name == "cancel.observe"]
    assert sorted((s.agent, s.attributes["remit.cancel.observed_at"]) for s in heard) == [
        ("asks", "approval_wait"),
        ("computes", "checkpoint"),
        ("holds", "checkpoint"),
        ("in_line", "lock_wait"),
        ("middle", "child_wait"),
        ("program", "tool_wait"),
        ("turn", "child_wait"),
    ]
    sent = [s for s in spans if s.name == "cancel.deliver"]
    places = {s.agent: s.attributes["remit.placement.host_id"] for s in spans if "remit.attempt" in s.attributes}
    top = places["middle"]
    # One order a host, and one to the holder; inside a host the signal goes down the tree.
    expected = {(agent, "run"): 2 if agent != "middle" and place == top else 1 for agent, place in places.items()}
    expected |= {("turn", "turn"): 1, ("program", "process"): 2}
    assert {(s.agent, s.attributes["remit.cancel.target.kind"]): s.number for s in sent} == expected
    assert len(sent) == len(expected)
    for hop in sent:
        sender = by_id[hop.parent]
        assert sender is request or sender.name == "cancel.observe"
        assert sender.number + 1 == hop.number
        ((_, target, about),) = hop.links
        assert about == {"remit.link": "cancels"}
        assert by_id[target].node_id == hop.attributes["remit.cancel.target.run_id"]
    asked, *hit = request.links
    assert asked == (f"{ASKER:032x}", f"{ASKER:016x}", {"remit.link": "requested_by"})
    to_bodies = [s for s in sent if s.attributes["remit.cancel.target.kind"] != "process"]
    assert {target for _, target, _ in hit} == {s.links[0][1] for s in to_bodies}
    assert sorted(s.parent for s in heard) == sorted(s.id for s in to_bodies)


def check_errors(spans: list[Seen], events: list[Event]) -> None:
    """Check that the one program which needed SIGKILL is the only error."""
    (killed,) = [e for e in events if isinstance(e, ProcessEnded)]
    assert killed.escalated
    (wrong,) = [s for s in spans if s.is_error]
    assert (wrong.name, wrong.attributes["error.type"]) == ("cancel.deliver", "term_grace_exceeded")
    assert wrong.attributes["process.pid"] == killed.pid
    (ran,) = [s for s in spans if "remit.process.result" in s.attributes]
    assert wrong.links[0][1] == ran.id
    assert ran.attributes["remit.process.signals"] == ("SIGTERM", "SIGKILL")
    assert ran.attributes["remit.process.confirmed"] is True
