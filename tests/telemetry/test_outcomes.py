"""What spans say of outcomes is what the journal says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.agents import RunOptions
from remit.coordinator.transaction import Settings
from remit.core import Outcome, RunFailed, TurnCancelled
from remit.core.events import AttemptEnded, Event, RunEnded, TurnEnded
from remit.journal import MemoryJournal
from remit.telemetry.nodes import error_type_of
from remit.telemetry.record import SpanRecord
from remit.testing import await_until, open_inprocess
from tests.agents.bodies import Stage, nap, wait_at
from tests.agents.world import in_loop
from tests.telemetry.bodies import boom, spends
from tests.telemetry.trees import one_turn, seen
from tests.telemetry.world import Kept, traced

SEEDS = 200
AT_ONCE = 20


CORNERS = {
    *(f"run {outcome.value}" for outcome in Outcome),
    *(f"turn {outcome.value}" for outcome in Outcome if outcome is not Outcome.LOST),
    "run never begun",
    "turn never begun",
    "run tried again",
    "stopped while settling",
    "session stopped",
    "approval approved",
    "approval denied",
    "approval cancelled",
}


@pytest.mark.requirement("G4")
@pytest.mark.requirement("G3")
@pytest.mark.field_report("K1")
@pytest.mark.timeout(240)
@pytest.mark.slow
@in_loop
async def test_every_span_has_the_outcome_of_the_journal(tmp_path: Path) -> None:
    async with traced(tmp_path, settings=Settings(max_depth=4, max_dedicated=16)) as world:
        for begin in range(0, SEEDS, AT_ONCE):
            await asyncio.gather(*(one_turn(world, seed) for seed in range(begin, begin + AT_ONCE)))
        spans = await world.spans()
        events = world.events()
        assert world.system.recorder is not None
        assert world.system.recorder.statistics() == {"waiting": 0, "open": 0, "dropped": 0}
    assert CORNERS - seen(events) == set()
    assert wrong_outcomes(spans, events) == []
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    assert [s.name for s in spans if s.parent_id not in ids and not s.name.startswith("invoke_workflow")] == []
    assert_quiet_cancels(spans)
    assert_it_would_be_seen(spans, events)


def wrong_outcomes(spans: list[SpanRecord], events: list[Event]) -> list[str]:
    """Return what spans say of ends that the journal does not say, and ends that have not one span each."""
    ended = {e.node_id: e for e in events if isinstance(e, (RunEnded, TurnEnded))}
    tried = {(e.node_id, e.attempt): e for e in events if isinstance(e, AttemptEnded)}
    wrong: list[str] = []
    own = dict.fromkeys(ended, 0)
    for span in spans:
        attempt = span.attributes.get("remit.attempt")
        about = str(span.attributes.get("remit.cancel.target.run_id") or span.run_id)
        if span.name.startswith("invoke_") and attempt is None:
            own[about] = own.get(about, 0) + 1
        if attempt is not None and (about, attempt) in tried:
            # Another attempt followed: the run has not ended by it, and its word is that of the attempt.
            says, error = _attempt_words(tried[about, int(str(attempt))])
        elif "remit.outcome" in span.attributes or span.name.startswith("invoke_"):
            end = ended[about]
            unconfirmed = isinstance(end, RunEnded) and end.unconfirmed
            says, error = end.outcome.value, error_type_of(end.outcome, end.error_type, unconfirmed=unconfirmed)
        else:
            continue
        if span.attributes.get("remit.outcome") != says:
            wrong.append(f"{span.name} of {about} says {span.attributes.get('remit.outcome')}, the journal {says}")
        if span.name.startswith("invoke_") and span.error != error:
            wrong.append(f"{span.name} of {about} has error {span.error!r}, not {error!r}")
    return wrong + [f"{about} has {count} spans" for about, count in own.items() if count != 1]


def _attempt_words(event: AttemptEnded) -> tuple[str, str]:
    words = {"raised": Outcome.FAILED, "cancelled": Outcome.FAILED, "timed_out": Outcome.TIMED_OUT}
    outcome = words.get(event.report, Outcome.LOST)
    return outcome.value, error_type_of(outcome, event.error_type)


def assert_it_would_be_seen(spans: list[SpanRecord], events: list[Event]) -> None:
    """Check the check: one wrong word in any span that has an outcome, and one span too few, are found."""
    told = [span for span in spans if "remit.outcome" in span.attributes]
    for span in told[:: max(1, len(told) // 100)]:
        right = span.attributes["remit.outcome"]
        span.attributes["remit.outcome"] = "succeeded" if right != "succeeded" else "cancelled"
        assert wrong_outcomes([span], events)[0].startswith(span.name)
        span.attributes["remit.outcome"] = right
    own = next(span for span in spans if span.name == "invoke_workflow behind")
    assert wrong_outcomes([span for span in spans if span is not own], events) == [f"{own.run_id} has 0 spans"]


def assert_quiet_cancels(spans: list[SpanRecord]) -> None:
    """Check that no cancel left anything, and that each hop of it was heard once."""
    hops = [s for s in spans if s.name == "cancel.observe"]
    assert len({(s.attributes["remit.cancel.id"], s.run_id) for s in hops}) == len(hops)
    assert not [s for s in spans if s.error.startswith("cancel_")]


def spans_of(spans: list[SpanRecord], run_id: str) -> dict[str, SpanRecord]:
    """Return the coordinator's and the host's span of a run that had one attempt."""
    found = [s for s in spans if s.run_id == run_id and s.name.startswith("invoke_")]
    return {"attempt" if "remit.attempt" in s.attributes else "run": s for s in found}


@pytest.mark.requirement("G4")
@in_loop
async def test_a_failure_is_an_error_by_its_class_and_says_no_more(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        with pytest.raises(RunFailed):
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(boom)
                await run.result()
        found = spans_of(await world.spans(), run.id)
        whole = str(world.kept.spans)
    assert {s.error for s in found.values()} == {"ValueError"}
    assert found["attempt"].parent_id == found["run"].span_id
    assert "12345" not in whole


@pytest.mark.field_report("K2")
@in_loop
async def test_a_deadline_leaves_a_whole_trace_that_says_so(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        with pytest.raises(TurnCancelled):
            async with world.coordinator.turn("t", deadline_s=3.0) as turn:
                run = await turn.delegate(nap)
                await run.result()
        spans = await world.spans()
    whole = next(s for s in spans if s.name == "invoke_workflow t")
    assert whole.attributes["remit.outcome"] == "timed_out"
    assert whole.error == "timeout"
    found = spans_of(spans, run.id)
    for span in found.values():
        assert span.error == ""
        assert span.attributes["remit.outcome"] == "cancelled"
        assert span.attributes["remit.cancel.kind"] == "deadline"
        assert span.attributes["remit.cancel.origin"] == turn.id
        assert str(span.attributes["remit.cancel.id"]).startswith("req_")
        assert float(str(span.attributes["remit.cancel.seconds"])) >= 0


@in_loop
async def test_an_asyncio_timeout_around_a_turn_leaves_a_whole_trace(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                async with world.coordinator.turn("t") as turn:
                    run = await turn.delegate(nap)
                    await run.result()
        spans = await world.spans()
    assert spans_of(spans, run.id)["run"].attributes["remit.outcome"] == "cancelled"
    assert next(s for s in spans if s.name == "invoke_workflow t").run_id == turn.id


@pytest.mark.requirement("G3")
@in_loop
async def test_a_lost_host_loses_no_span(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            done = await turn.delegate(wait_at, gate="on", options=RunOptions(name="done"))
            Stage(tmp_path).open_gate("on")
            await done.result()
            run = await turn.delegate(wait_at, gate="never", options=RunOptions(name="a"))
            await Stage(tmp_path).until_noted("a waits")
            host = next(h for h in world.system.engine.hosts.values() if h.host.statistics()["attempts"])
            host.kill()
            assert await run.wait() is Outcome.LOST
        spans = await world.spans()
    lost, ended = spans_of(spans, run.id), spans_of(spans, done.id)
    assert {s.error for s in lost.values()} == {"worker_lost"}
    assert set(lost) == set(ended) == {"run", "attempt"}
    assert ended["attempt"].attributes["remit.outcome"] == "succeeded"


@in_loop
async def test_each_attempt_has_a_span_of_its_own(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        with pytest.raises(RunFailed):
            async with world.coordinator.turn("t") as turn:
                run = await turn.delegate(boom, options=RunOptions(retries=2))
                await run.result()
        spans = [s for s in await world.spans() if s.run_id == run.id]
    attempts = [s for s in spans if "remit.attempt" in s.attributes]
    assert [s.attributes["remit.attempt"] for s in attempts] == [1, 2, 3]
    assert all(s.parent_id == spans[-1].span_id for s in attempts)


@pytest.mark.requirement("G3")
@in_loop
async def test_a_restarted_coordinator_ends_the_spans_of_its_earlier_life(tmp_path: Path) -> None:
    journal = MemoryJournal()
    first, second = Kept(), Kept()
    with open_inprocess(tmp_path, journal=journal, sinks=[first]) as system:
        async with system.coordinator() as coordinator:
            turn = coordinator.turn("t", on_disconnect="continue")
            await turn.begin()
            run = await turn.delegate(nap)
            await Stage(tmp_path).until_noted("nap began")
            for host in system.engine.hosts.values():
                host.link.is_cut = True  # nothing of the end of this life is heard
    with open_inprocess(tmp_path, journal=MemoryJournal(previous=journal), sinks=[second]) as system:
        assert system.recorder is not None
        assert await asyncio.to_thread(system.recorder.flush, 30.0)
    found = spans_of(second.spans, run.id)
    assert found["run"].attributes["remit.outcome"] == "lost"
    assert any(s.name == "invoke_workflow t" for s in second.spans)


@pytest.mark.requirement("G3")
@in_loop
async def test_a_run_that_outlives_its_coordinator_has_one_span_over_both_lives(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        stage = Stage(tmp_path)
        async with world.coordinator.turn("t") as turn:
            done = await turn.delegate(wait_at, gate="first", options=RunOptions(name="first"))
            run = await turn.delegate(wait_at, gate="second", options=RunOptions(name="second"))
            await stage.until_noted("first waits", "second waits")
            stage.open_gate("first")
            await done.result()
            await world.spans()
            await asyncio.to_thread(world.system.crash_coordinator)
            before = len(world.kept.measurements)
            await asyncio.to_thread(world.system.restart_coordinator)
            stage.open_gate("second")
            await run.result()
        spans = await world.spans()
    own = spans_of(spans, run.id)
    assert own["run"].attributes["remit.outcome"] == "succeeded"
    assert {s.trace_id for s in spans} == {own["run"].trace_id}
    assert sorted(s.name for s in spans) == ["invoke_agent wait_at"] * 4 + ["invoke_workflow t"]
    # The second life begins with what is at work then, and so comes back to 0.
    active = [m.value for m in world.kept.measurements[before:] if m.name == "remit.runs.active"]
    assert active == [1, -1]


@pytest.mark.field_report("K7")
@in_loop
async def test_what_a_cancelled_run_has_used_is_read_after_its_cleanup(tmp_path: Path) -> None:
    async with traced(tmp_path) as world:
        async with world.coordinator.turn("t") as turn:
            runs = await turn.delegate_many(spends, [{}, {}])
            await await_until(lambda: Stage(tmp_path).notes().count("spent") == 2, timeout_s=60.0)
            for run in runs:
                await run.cancel("enough")
            outcomes = await turn.gather(*runs, return_outcomes=True)
            used = [run.exception().partial for run in runs]
    assert outcomes == [Outcome.CANCELLED] * 2
    assert sum(each["tokens"] for each in used) == 12
