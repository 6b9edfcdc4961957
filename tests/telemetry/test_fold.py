"""Corners of the fold that need no system around them: a few events in, spans out."""

from __future__ import annotations

from typing import Any

import pytest

from remit.core import Cause, CauseKind, Outcome
from remit.core.events import (
    ApprovalAnswered,
    ApprovalRequested,
    CancelQuiet,
    CancelRequested,
    EffectUncertain,
    Event,
    KillRequested,
    ProcessEnded,
    ProcessStarted,
    RunAccepted,
    RunEnded,
    RunEscalated,
    RunStarted,
    TurnAccepted,
    TurnEnded,
    TurnSettling,
    TurnStarted,
)
from remit.core.messages import BodyTiming, ReportEnded
from remit.telemetry.carrier import format_carrier, read_carrier
from remit.telemetry.fold import Folder
from remit.telemetry.nodes import source_of
from remit.telemetry.record import Batch, SpanRecord, span_id, trace_id

CAUSE = Cause(CauseKind.USER_INTERRUPT, "turn_1", surface="cli", request_id="req_1", reason="enough")


def event(kind: type[Event], node_id: str, at: float, **values: Any) -> Event:
    return kind(node_id=node_id, turn_id="turn_1", at=at, **values)


def begun(*, trace: str = "") -> list[Event]:
    return [
        event(TurnAccepted, "turn_1", 1.0, session_id="s", name="t", trace=trace),
        event(TurnStarted, "turn_1", 1.0),
        event(RunAccepted, "run_1", 2.0, parent_id="turn_1", agent="a"),
        event(RunStarted, "run_1", 3.0, host_id="host_1"),
    ]


def cancelled(at: float = 10.0) -> Event:
    return event(CancelRequested, "turn_1", at, cause=CAUSE, request_id="req_1", live=1)


def ended(at: float, **values: Any) -> list[Event]:
    return [
        event(RunEnded, "run_1", at, outcome=Outcome.CANCELLED, cause=CAUSE, attempt=1, **values),
        event(TurnSettling, "turn_1", at, report="cancelled"),
        event(TurnEnded, "turn_1", at, outcome=Outcome.CANCELLED, cause=CAUSE),
        event(CancelQuiet, "turn_1", at, request_id="req_1", seconds=at - 10.0),
    ]


def fold(*events: Event, reports: dict[int, ReportEnded] | None = None) -> tuple[Folder, Batch]:
    folder = Folder()
    for number, each in enumerate(events):
        if reports and number in reports:
            folder.report(reports[number], each.at)
        folder.event(each)
    return folder, folder.take()


def delivery(batch: Batch, run_id: str = "run_1") -> SpanRecord:
    found = [s for s in batch.spans if s.name == "cancel.deliver" and s.run_id == run_id]
    assert len(found) == 1
    return found[0]


def named(batch: Batch, name: str) -> SpanRecord:
    return next(s for s in batch.spans if s.name == name)


@pytest.mark.requirement("G4")
def test_a_body_that_does_not_stop_is_the_error_and_makes_the_cancel_incomplete() -> None:
    stuck = event(RunEscalated, "run_1", 15.0, host_id="host_1", step="drain_host")
    _, batch = fold(*begun(), cancelled(), stuck, *ended(15.0, unconfirmed=True))
    assert delivery(batch).attributes["remit.cancel.delivery"] == "no_ack"
    assert delivery(batch).error == "cancel_timeout"
    request = named(batch, "cancel.request")
    assert request.error == "cancel_incomplete"
    assert request.attributes["remit.cancel.orphans"] == 1
    assert {s.error for s in batch.spans if s.name == "invoke_agent a"} == {"cancel_timeout"}
    assert [m.value for m in batch.measurements if m.name == "remit.cancel.leftovers"] == [1]


@pytest.mark.requirement("G4")
def test_a_host_that_had_to_be_killed_is_an_escalation_and_the_run_no_error() -> None:
    killed = event(RunEscalated, "run_1", 15.0, host_id="host_1", step="kill_host")
    _, batch = fold(*begun(), cancelled(), killed, *ended(15.5, error_type="HostLost"))
    assert (delivery(batch).attributes["remit.cancel.delivery"], delivery(batch).error) == (
        "escalated",
        "term_grace_exceeded",
    )
    assert not [s for s in batch.spans if s.name == "cancel.observe" and s.run_id == "run_1"]
    assert {s.error for s in batch.spans if s.name.startswith("invoke_")} == {""}
    assert [m.value for m in batch.measurements if m.name == "remit.cancel.escalations"] == [1]


def test_a_host_that_died_by_itself_meanwhile_is_gone() -> None:
    _, batch = fold(*begun(), cancelled(), *ended(12.0, error_type="HostLost"))
    assert (delivery(batch).attributes["remit.cancel.delivery"], delivery(batch).error) == ("target_gone", "")


def test_a_body_that_was_over_when_the_order_came_is_done_already() -> None:
    report = ReportEnded("run_1", 1, "returned", timing=BodyTiming(3.0, 6.9))
    _, batch = fold(*begun(), cancelled(), *ended(10.1), reports={5: report})
    assert delivery(batch).attributes["remit.cancel.delivery"] == "already_done"
    assert not [s for s in batch.spans if s.name == "cancel.observe" and s.run_id == "run_1"]


def test_the_hosts_clock_times_the_attempt_and_the_observation() -> None:
    timing = BodyTiming(3.5, 9.0, told_s=7.0, observed_s=7.25, where="lock_wait")
    report = ReportEnded("run_1", 1, "cancelled", before_cancel=False, timing=timing)
    _, batch = fold(*begun(), cancelled(), *ended(12.6), reports={5: report})
    attempt = next(s for s in batch.spans if "remit.attempt" in s.attributes)
    assert (attempt.start, attempt.end) == (3.5, 12.5)
    observed = next(s for s in batch.spans if s.name == "cancel.observe" and s.run_id == "run_1")
    assert (observed.start, observed.end) == (10.5, 12.5)
    assert observed.attributes["remit.cancel.observation_s"] == 0.25
    assert observed.attributes["remit.cancel.cleanup_s"] == 1.75
    assert (delivery(batch).start, delivery(batch).end) == (10.0, 12.6)


def test_close_ends_what_no_quiet_came_for() -> None:
    folder, batch = fold(*begun(), cancelled())
    assert not [s for s in batch.spans if s.name == "cancel.request"]
    folder.close(20.0)
    request = named(folder.take(), "cancel.request")
    assert request.attributes["remit.cancel.result"] == "open"
    assert request.end == 20.0


def test_events_of_unknown_nodes_are_left_out() -> None:
    _, batch = fold(*[each for each in [*begun(), cancelled(), *ended(11.0)] if each.kind != "turn_accepted"][1:])
    assert {s.run_id for s in batch.spans if s.name.startswith("invoke_")} <= {"run_1"}
    assert not [s for s in batch.spans if s.name == "invoke_workflow t"]


def test_a_kill_and_an_uncertain_effect_are_events() -> None:
    kill = event(KillRequested, "turn_1", 11.0, request_id="req_2")
    uncertain = event(EffectUncertain, "run_1", 11.5, reason="host lost", in_flight=("body", "process"))
    _, batch = fold(*begun(), cancelled(), kill, uncertain, *ended(12.0))
    assert "remit.cancel.kill" in [e.name for e in named(batch, "invoke_workflow t").events]
    run = next(s for s in batch.spans if s.name == "invoke_agent a" and "remit.attempt" not in s.attributes)
    assert [e.name for e in run.events] == ["remit.effect.uncertain"]
    assert [m.value for m in batch.measurements if m.name == "remit.effects.uncertain"] == [2]


@pytest.mark.requirement("G6")
@pytest.mark.parametrize(
    ("how", "result", "error", "code"),
    [
        ({"exit_code": 0}, "exited", "", 0),
        ({"exit_code": 3}, "failed", "3", 3),
        ({"signal": 9}, "signalled", "signal:SIGKILL", 137),
        ({"signal": 15, "stopped": True}, "stopped", "", 143),
        ({"signal": 9, "stopped": True, "escalated": True}, "stopped", "", 137),
        ({"signal": 9, "stopped": True, "survivors": ("77",)}, "stopped", "survivors", 137),
        ({}, "unknown", "", None),
    ],
)
def test_how_a_program_ended(how: dict[str, Any], result: str, error: str, code: int | None) -> None:
    started = event(ProcessStarted, "run_1", 4.0, pid=7, program="make")
    _, batch = fold(*begun(), started, event(ProcessEnded, "run_1", 6.0, pid=7, **how))
    program = named(batch, "make")
    attributes = program.attributes
    assert (attributes["remit.process.result"], program.error) == (result, error)
    assert attributes.get("process.exit.code") == code
    assert (attributes["process.pid"], attributes["process.group_leader.pid"]) == (7, 7)
    assert (program.start, program.end) == (4.0, 6.0)
    assert program.parent_id == span_id("attempt", "run_1", 1)
    assert attributes["remit.process.confirmed"] is not bool(how.get("survivors"))
    if how.get("stopped"):
        assert attributes["remit.process.signal.sender"] == "coordinator"


def test_a_program_whose_end_nobody_told_of_ends_with_its_run_and_is_not_confirmed() -> None:
    started = event(ProcessStarted, "run_1", 4.0, pid=7, program="make")
    lost = event(RunEnded, "run_1", 8.0, outcome=Outcome.LOST, attempt=1)
    _, batch = fold(*begun(), started, lost)
    assert named(batch, "make").attributes["remit.process.confirmed"] is False
    assert named(batch, "make").end == 8.0


@pytest.mark.field_report("K4")
def test_a_turn_joins_the_trace_of_its_holder_and_heeds_its_sampling() -> None:
    _, batch = fold(*begun(trace=format_carrier(10, 11, is_sampled=False)), cancelled(), *ended(12.0))
    assert {s.trace_id for s in batch.spans} == {10}
    assert named(batch, "invoke_workflow t").parent_id == 11
    assert not any(s.is_sampled for s in batch.spans)
    _, alone = fold(*begun(), cancelled(), *ended(12.0))
    assert {s.trace_id for s in alone.spans} == {trace_id("turn_1")}
    assert all(s.is_sampled for s in alone.spans)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01"]
)
def test_a_carrier_that_says_nothing_is_none(text: str) -> None:
    assert read_carrier(text) is None


def test_a_carrier_comes_back() -> None:
    assert read_carrier(format_carrier(2**127 + 1, 2**63 + 1) + "\nvendor=x") == (2**127 + 1, 2**63 + 1, True)


@pytest.mark.parametrize("kind", list(CauseKind))
def test_every_cause_has_a_source_of_the_closed_set(kind: CauseKind) -> None:
    sources = {"user", "parent", "deadline", "budget", "failure", "shutdown", "mcp", "a2a"}
    assert source_of(Cause(kind, "turn_1")) in sources
    assert source_of(Cause(CauseKind.USER_INTERRUPT, "turn_1", surface="mcp")) == "mcp"
    assert source_of(Cause(CauseKind.USER_INTERRUPT, "turn_1", actor="run_1")) == "parent"


@pytest.mark.parametrize(
    ("decision", "surface", "who"),
    [
        ("approved", "cli", "human"),
        ("denied", "policy", "policy"),
        ("expired", "coordinator", None),
        ("cancelled", "coordinator", None),
    ],
)
def test_an_approval_is_one_span_with_its_answer_and_is_no_error(decision: str, surface: str, who: str | None) -> None:
    asked = event(
        ApprovalRequested, "run_1", 4.0, approval_id="approval_1", attempt=1, action="deploy prod", details="a secret"
    )
    answered = event(
        ApprovalAnswered, "run_1", 6.5, approval_id="approval_1", decision=decision, surface=surface, by="ann"
    )
    _, batch = fold(*begun(), asked, answered)
    span = named(batch, "approval.wait")
    assert (span.start, span.end, span.error) == (4.0, 6.5, "")
    assert span.parent_id == span_id("attempt", "run_1", 1)
    assert span.attributes["remit.approval.kind"] == "deploy"
    assert span.attributes["remit.approval.decision"] == decision
    assert span.attributes.get("remit.approval.actor.type") == who
    assert not {"prod", "secret", "ann"} & set(" ".join(map(str, span.attributes.values())).split())
    assert [m.value for m in batch.measurements if m.name == "remit.approvals.pending"] == [1, -1]


def test_an_approval_that_nobody_answers_ends_with_its_run() -> None:
    asked = event(ApprovalRequested, "run_1", 4.0, approval_id="approval_1", attempt=1, action="deploy")
    _, batch = fold(*begun(), asked, cancelled(), *ended(11.0))
    span = named(batch, "approval.wait")
    assert (span.end, span.attributes["remit.approval.decision"]) == (11.0, "cancelled")
    assert sum(m.value for m in batch.measurements if m.name == "remit.approvals.pending") == 0


def test_the_whole_action_is_told_only_when_asked_for() -> None:
    folder = Folder(keeps_arguments=True)
    asked = event(ApprovalRequested, "run_1", 4.0, approval_id="approval_1", attempt=1, action="deploy prod")
    for each in (*begun(), asked, cancelled(), *ended(11.0)):
        folder.event(each)
    assert named(folder.take(), "approval.wait").attributes["remit.approval.action"] == "deploy prod"


def started_program(at: float, **values: Any) -> Event:
    return event(ProcessStarted, "run_1", at, pid=77, program="make", handle="proc_1", **values)


def test_a_program_that_a_later_attempt_finds_again_has_one_span_from_its_start() -> None:
    again = event(RunStarted, "run_1", 6.0, host_id="host_2", attempt=2)
    end = event(ProcessEnded, "run_1", 9.0, pid=77, exit_code=0)
    _, batch = fold(*begun(), started_program(4.0), again, started_program(6.5), end)
    found = [s for s in batch.spans if s.name == "make"]
    assert [(s.start, s.end, s.attributes["remit.process.result"]) for s in found] == [(4.0, 9.0, "exited")]


def test_a_number_that_comes_again_is_another_program() -> None:
    other = event(ProcessStarted, "run_1", 8.0, pid=77, program="make", handle="proc_2")
    end = event(ProcessEnded, "run_1", 9.0, pid=77, exit_code=0)
    _, batch = fold(*begun(), started_program(4.0), other, end)
    assert named(batch, "make").start == 8.0


@pytest.mark.parametrize("is_put_there", [True, False])
def test_a_program_that_goes_on_in_its_session_is_not_called_gone(is_put_there: bool) -> None:
    put = [event(ProcessEnded, "run_1", 9.0, pid=77, goes_on=True)] if is_put_there else []
    _, batch = fold(*begun(), started_program(4.0, background=not is_put_there), *put, cancelled(), *ended(11.0))
    span = named(batch, "make")
    assert span.attributes["remit.process.result"] == "background"
    assert span.attributes["remit.process.confirmed"] is False
    assert (span.end, span.error) == (9.0 if is_put_there else 11.0, "")
