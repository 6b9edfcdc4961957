"""The way of a cancel, hop by hop, in the trace of the turn that it stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from remit.coordinator import RunOptions, Turn
from remit.core import Outcome, TurnCancelled
from remit.core.events import CancelRequested, ProcessEnded, RunEnded, TurnEnded
from remit.telemetry.names import SpanKind
from remit.telemetry.record import SpanRecord
from remit.testing import await_until
from tests.agents.bodies import Stage, wait_at
from tests.agents.world import in_loop
from tests.telemetry.bodies import bad_tidy, computes, give, in_line, looks_on, middle, plain, waits_for_one
from tests.telemetry.world import Traced, traced


async def stopped(world: Traced, turn_ready: asyncio.Future[Turn], holding: asyncio.Task[None], **how: Any) -> Turn:
    """Cancel the turn from outside and see it through."""
    either: set[asyncio.Future[Any]] = {turn_ready, holding}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not turn_ready.done():
        await holding  # tells why it did not come so far
    turn = await turn_ready
    receipt = await (await world.coordinator.cancel(turn.id, "enough", **how)).quiet()
    assert receipt.is_quiet
    with pytest.raises(TurnCancelled):
        await holding
    return turn


async def swarm(world: Traced, workspace: Path) -> Turn:
    """Run the tree in which everything waits for something else, and cancel it from outside."""
    ready: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
    stage = Stage(workspace)

    async def hold() -> None:
        # Under load a body may take longer than the usual grace, and an escalation would be one more error.
        async with world.coordinator.turn("swarm", grace_s=60.0) as turn:
            runs = [await turn.delegate(middle)]
            await stage.until_noted("held", "computes", "streams")
            while not await world.coordinator.approvals():
                await asyncio.sleep(0.01)
            await await_until((workspace / "stage" / "deaf").exists, timeout_s=60.0)
            # The last of what is below is at work; whoever delegated it may not wait yet.
            while not any(e.kind == "run_waiting" and e.node_id == runs[0].id for e in world.events()):
                await asyncio.sleep(0.01)
            runs.append(await turn.delegate(in_line))
            while not any(c.held_by for c in await world.coordinator.locks()):
                await asyncio.sleep(0.01)
            ready.set_result(turn)
            await turn.gather(*runs)

    return await stopped(world, ready, asyncio.ensure_future(hold()))


def one(spans: list[SpanRecord], name: str, **attributes: Any) -> SpanRecord:
    found = [
        s
        for s in spans
        if s.name == name and all(s.attributes.get(k.replace("__", ".")) == v for k, v in attributes.items())
    ]
    assert len(found) == 1, (name, attributes, found)
    return found[0]


@pytest.mark.requirement("A14")
@pytest.mark.requirement("G1")
@pytest.mark.requirement("G2")
@pytest.mark.requirement("G3")
@pytest.mark.requirement("G6")
@pytest.mark.field_report("K1")
@in_loop
async def test_every_hop_is_there_once_with_what_it_was_at(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        turn = await swarm(world, tmp_path)
        spans = await world.spans()
        events = world.events()
        assert world.system.recorder is not None
        assert world.system.recorder.statistics()["open"] == 0

    assert {s.trace_id for s in spans} == {spans[0].trace_id}
    assert len({s.span_id for s in spans}) == len(spans)
    ids = {s.span_id for s in spans}
    assert [s.name for s in spans if s.parent_id not in ids] == ["invoke_workflow swarm"]
    accepted = [e for e in events if e.kind in ("run_accepted", "turn_accepted")]
    for event in accepted:
        own = [s for s in spans if s.run_id == event.node_id and s.name.startswith("invoke_")]
        assert len(own) == (1 if event.kind == "turn_accepted" else 2)

    seen = {
        str(s.attributes.get("gen_ai.agent.name", "turn")): s.attributes["remit.cancel.observed_at"]
        for s in spans
        if s.name == "cancel.observe"
    }
    assert seen == {
        "turn": "child_wait",
        "middle": "child_wait",
        "holder": "checkpoint",
        "deaf_program": "tool_wait",
        "asks": "approval_wait",
        "streams": "provider_stream",
        "computes": "checkpoint",
        "in_line": "lock_wait",
    }
    assert len([s for s in spans if s.name == "cancel.observe"]) == len(seen)
    assert len([s for s in spans if s.name == "cancel.deliver"]) == len(seen) + 1  # and the program

    request = one(spans, "cancel.request")
    assert request.parent_id == one(spans, "invoke_workflow swarm").span_id
    assert request.attributes["remit.cancel.targets"] == 7
    assert request.attributes["remit.cancel.source"] == "user"
    assert request.attributes["remit.cancel.reason"] == "enough"
    assert request.attributes["remit.cancel.orphans"] == 0
    assert_hops(spans, request)

    errors = [s for s in spans if s.error]
    assert [(s.name, s.error) for s in errors] == [("cancel.deliver", "term_grace_exceeded")]
    assert errors[0].attributes["remit.cancel.target.kind"] == "process"
    killed = next(e for e in events if isinstance(e, ProcessEnded))
    assert killed.escalated
    assert errors[0].attributes["process.pid"] == killed.pid
    program = next(s for s in spans if "remit.process.result" in s.attributes)
    assert program.attributes["remit.process.signals"] == ("SIGTERM", "SIGKILL")
    assert program.attributes["remit.process.confirmed"] is True
    assert program.kind is SpanKind.CLIENT
    assert errors[0].links[0].span_id == program.span_id

    approval = one(spans, "approval.wait")
    assert approval.attributes["remit.approval.decision"] == "cancelled"
    assert "not to be told" not in " ".join(str(s.attributes) + str(s.events) for s in spans)

    noted = [e.name for e in one(spans, "invoke_workflow swarm").events]
    assert "remit.cancel.requested" in noted
    observed = [e.name for s in spans if "remit.attempt" in s.attributes for e in s.events]
    assert observed == ["remit.cancel.observed"] * 7
    assert turn.id == request.attributes["remit.cancel.origin"]


def assert_hops(spans: list[SpanRecord], request: SpanRecord) -> None:
    """Check that the way of the signal is told as it went: by hosts, and inside one down the tree."""
    by_id = {s.span_id: s for s in spans}
    for delivery in (s for s in spans if s.name == "cancel.deliver"):
        sender = by_id[delivery.parent_id]
        hop = delivery.attributes["remit.cancel.hop"]
        if sender is request:
            assert hop == 1
        else:
            assert sender.name == "cancel.observe"
            assert hop == int(str(sender.attributes["remit.cancel.hop"])) + 1
        assert [link.attributes["remit.link"] for link in delivery.links] == ["cancels"]
        assert delivery.links[0].span_id in by_id
    linked = {link.span_id for link in request.links}
    assert linked <= set(by_id)
    assert len(linked) == 8


@pytest.mark.requirement("A14")
@in_loop
async def test_the_steps_of_a_stop_come_in_their_order(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        turn = await swarm(world, tmp_path)
        spans = await world.spans()
        kinds = [type(e) for e in world.events()]
        run_id = one(spans, "cancel.observe", **{"gen_ai.agent.name": "deaf_program"}).run_id
    # The journal: requested, the program stopped, its run ended, the turn ended.
    assert kinds.index(CancelRequested) < kinds.index(ProcessEnded) < kinds.index(TurnEnded)
    assert kinds.index(CancelRequested) < kinds.index(RunEnded)
    # The spans: requested, told, noticed, program stopped, body over, turn over.
    request = one(spans, "cancel.request")
    observed = one(spans, "cancel.observe", **{"remit.run.id": run_id})
    steps = [event.name for event in observed.events]
    assert steps == ["observed", "cleanup.start", "quiesced"]
    program = one(spans, "cancel.deliver", **{"remit.cancel.target.kind": "process"})
    own = next(s for s in spans if s.name == "invoke_workflow swarm")
    moments = [request.start, observed.start, observed.events[0].at, observed.events[-1].at]
    assert moments == sorted(moments)
    assert observed.start <= program.start <= program.end <= own.end
    assert request.end >= own.end - 1e-6
    assert turn.outcome is not None


@pytest.mark.requirement("G9")
@in_loop
async def test_a_cancel_is_measured_without_ids(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        await swarm(world, tmp_path)
        await world.spans()
        kept = world.kept
        by_name: dict[str, list[float]] = {}
        for measurement in kept.measurements:
            by_name.setdefault(measurement.name, []).append(measurement.value)
        texts = " ".join(str(dict(m.attributes)) for m in kept.measurements)
    assert "run_" not in texts
    assert "turn_" not in texts
    assert "shared.txt" not in texts
    assert len(by_name["remit.cancel.quiesce.duration"]) == 1
    assert len(by_name["remit.cancel.observation.duration"]) == 8
    assert by_name["remit.cancel.requests"] == [1]
    assert by_name["remit.cancel.escalations"] == [1]
    assert by_name["remit.process.kills"] == [1]
    for level in ("remit.runs.active", "remit.runs.queued", "remit.lock.waiters", "remit.approvals.pending"):
        assert by_name[level]
        assert sum(by_name[level]) == 0, level
    assert "remit.lock.wait.duration" in by_name


@pytest.mark.requirement("G5")
@in_loop
async def test_a_wait_for_a_claim_tells_paths_holder_and_result(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        await swarm(world, tmp_path)
        spans = await world.spans()
    wait = one(spans, "lock.wait")
    assert wait.attributes["remit.lock.name"] == "shared.txt"
    assert wait.attributes["remit.lock.mode"] == "write"
    assert wait.attributes["remit.lock.result"] == "cancelled"
    assert wait.error == ""
    holding = one(spans, "lock.hold")
    assert wait.attributes["remit.lock.holder.run_id"] == holding.run_id
    assert float(str(wait.attributes["remit.lock.waited_s"])) >= 0
    assert holding.attributes["remit.lock.release"] == "on_cancel"


@in_loop
async def test_each_step_is_a_log_record_with_the_ids_of_its_span(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        await swarm(world, tmp_path)
        spans = {s.span_id: s for s in await world.spans()}
        logs = world.kept.logs
    counts = {name: sum(record.name == name for record in logs) for name in {record.name for record in logs}}
    assert counts == {
        "remit.cancel.requested": 1,
        "remit.cancel.delivered": 9,
        "remit.cancel.observed": 8,
        "remit.cancel.quiet": 1,
    }
    for record in logs:
        assert spans[record.span_id].trace_id == record.trace_id
    assert [r.name for r in logs if r.is_warning] == ["remit.cancel.delivered"]


@in_loop
async def test_a_plain_body_observes_when_it_looks(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        ready: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(plain)
                await Stage(tmp_path).until_noted("plain")
                ready.set_result(turn)
                await run.result()

        await stopped(world, ready, asyncio.ensure_future(hold()))
        observed = one(await world.spans(), "cancel.observe", **{"gen_ai.agent.name": "plain"})
    assert observed.attributes["remit.cancel.observed_at"] == "checkpoint"
    assert observed.events[0].at <= observed.end


@in_loop
async def test_a_cleanup_that_fails_is_the_error_and_the_run_is_not(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        ready: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(bad_tidy)
                await Stage(tmp_path).until_noted("bad tidy")
                ready.set_result(turn)
                await run.result()

        await stopped(world, ready, asyncio.ensure_future(hold()))
        spans = await world.spans()
    assert [(s.name, s.error) for s in spans if s.error] == [("cancel.observe", "cleanup_failed")]
    texts = " ".join(str(s.attributes) + str(s.events) for s in spans)
    assert "no space" not in texts


@in_loop
async def test_a_second_cancel_joins_the_first_and_has_no_hops_of_its_own(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        world.system.shut("report")
        ready: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(computes)
                await Stage(tmp_path).until_noted("computes")
                ready.set_result(turn)
                await run.result()

        holding = asyncio.ensure_future(hold())
        turn = await ready
        first = await world.coordinator.cancel(turn.id, "first")
        second = await world.coordinator.cancel(turn.id, "second")
        world.system.let_through("report")
        await first.quiet()
        await second.quiet()
        with pytest.raises(TurnCancelled):
            await holding
        spans = await world.spans()
    requests = {s.attributes["remit.cancel.id"]: s for s in spans if s.name == "cancel.request"}
    assert set(requests) == {first.request_id, second.request_id}
    assert requests[second.request_id].attributes["remit.cancel.joined"] == first.request_id
    assert {s.attributes["remit.cancel.id"] for s in spans if s.name == "cancel.observe"} == {first.request_id}


@pytest.mark.requirement("G2")
@in_loop
async def test_a_parent_whose_child_ends_before_its_own_order_comes_is_cancelled_all_the_same(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            run = await turn.delegate(waits_for_one)
            await Stage(tmp_path).until_noted("plain")
            view = await world.coordinator.run(run.id)
            host = world.system.engine.hosts[view.host_id]
            host.hold_orders()  # the child has a host of its own, whose order is not held up
            receipt = await world.coordinator.cancel(run.id, "enough")
            await run.wait()
            host.pass_orders()
            await receipt.quiet()
        assert run.outcome is Outcome.CANCELLED
        observed = {s.attributes["gen_ai.agent.name"]: s for s in await world.spans() if s.name == "cancel.observe"}
    assert set(observed) == {"waits_for_one", "plain"}
    assert Stage(tmp_path).notes().count("made up") == 0


@in_loop
async def test_whoever_watches_the_run_of_a_stopped_parent_is_not_stopped(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            run = await turn.delegate(waits_for_one)
            await Stage(tmp_path).until_noted("plain")
            (below,) = [each for each in await world.coordinator.runs() if each.parent_id == run.id]
            watching = await turn.delegate(looks_on, run_id=below.id)
            await Stage(tmp_path).until_noted("looks on")
            await await_until(lambda: "subscribe" in world.system.calls)
            await (await world.coordinator.cancel(run.id, "enough")).quiet()
            assert await watching.result() == "cancelled"


@pytest.mark.requirement("G2")
@in_loop
async def test_a_holder_that_stops_its_own_turn_has_heard_it_before_the_notice_comes(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        calls = world.system.calls

        async def let_notices_through() -> None:
            await await_until(lambda: "finish_turn" in calls, timeout_s=60.0)
            world.system.let_through("poll")

        with pytest.raises(TurnCancelled):
            async with world.coordinator.turn("t") as turn:
                world.system.shut("poll")
                parked = calls.count("poll")
                await await_until(lambda: calls.count("poll") > parked, timeout_s=60.0)
                later = asyncio.ensure_future(let_notices_through())
                await turn.cancel("enough")
                await turn.sleep(600)
        await later
        spans = await world.spans()
    assert one(spans, "cancel.deliver").attributes["remit.cancel.delivery"] == "acknowledged"
    assert one(spans, "cancel.observe").run_id == turn.id


@in_loop
async def test_what_had_not_begun_is_counted_and_has_no_hop(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        stage = Stage(tmp_path)
        async with world.coordinator.turn("t") as turn:
            first = await turn.delegate(wait_at, gate="on", options=RunOptions(name="first"))
            run = await turn.delegate(give, options=RunOptions(after=(first,)))
            await (await run.cancel("not needed")).quiet()
            stage.open_gate("on")
        spans = await world.spans()
    request = one(spans, "cancel.request")
    assert request.attributes["remit.cancel.unbegun"] == 1
    assert not [s for s in spans if s.name in ("cancel.deliver", "cancel.observe")]
    assert "remit.cancel.requested" in [e.name for e in one(spans, "invoke_workflow t").events]
