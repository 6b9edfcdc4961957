"""What a restarted coordinator decides, rule by rule: the survey is made by hand."""

from __future__ import annotations

import pytest

from remit.coordinator.evolve import evolve
from remit.coordinator.recovering import Survey
from remit.coordinator.state import NodeState
from remit.core.cause import CauseKind
from remit.core.events import ProcessEnded, RunEnded
from remit.core.messages import LiveAttempt, ReportBatch, ReportEnded, ReportProcess, ReportWaiting
from remit.core.outcome import Outcome
from remit.locks import ClaimState
from tests.coordinator.claims_world import ClaimWorld
from tests.coordinator.decider_world import World


def process(run: str, attempt: int, pid: int, *, ended: bool = False) -> ReportProcess:
    return ReportProcess(run, attempt, pid, 1.0, "here", "sleep", ended=ended, stopped=ended)


@pytest.mark.requirement("F14")
@pytest.mark.field_report("I4")
def test_a_run_whose_host_has_it_goes_on_as_if_nothing_had_happened() -> None:
    world = World()
    parent = world.run(world.open_turn())
    child = world.run(parent)
    world.wait(parent, child)
    before = len(world.events)
    world.restart(world.survey())
    assert [event.kind for event in world.events[before:]] == ["coordinator_started"]
    assert world.starts == []
    world.end(child)
    world.resume(parent)
    assert parent in world.resumed
    world.end(parent)
    assert [world.outcome(run) for run in (child, parent)] == [Outcome.SUCCEEDED] * 2


def test_a_start_that_never_arrived_is_sent_again_as_the_same_attempt() -> None:
    world = World()
    here, missing = world.delegate(world.open_turn(), 2)
    world.restart(world.survey(missing=[missing]))
    assert [name for _, name in world.starts] == [missing]
    assert world.kinds(missing).count("run_started") == 1
    assert (world.node(missing).attempt, world.node(here).attempt) == (1, 1)
    world.end(missing)
    assert world.outcome(missing) is Outcome.SUCCEEDED


def test_a_start_that_never_arrived_and_cannot_be_sent_is_lost() -> None:
    world = World()
    run = world.run(world.open_turn(), retries=3)
    world.restart(world.survey(missing=[run], arguments=False))
    assert world.outcome(run) is Outcome.LOST
    assert "arguments" in world.node(run).error
    assert world.starts == []


@pytest.mark.requirement("F7")
@pytest.mark.parametrize(
    ("retries", "arguments", "outcome", "attempt"),
    [(0, True, Outcome.LOST, 1), (1, True, None, 2), (1, False, Outcome.LOST, 1)],
)
def test_a_run_whose_host_is_gone_has_another_attempt_only_if_it_was_promised_one(
    retries: int, arguments: bool, outcome: Outcome | None, attempt: int
) -> None:
    world = World()
    run = world.run(world.open_turn(), retries=retries)
    world.restart(world.survey(gone=[world.node(run).host_id], arguments=arguments))
    assert (world.outcome(run), world.node(run).attempt) == (outcome, attempt)
    # A late word of the lost attempt is nothing to the new one.
    world.report("host_old", ReportEnded(run, 1, "returned"))
    assert world.outcome(run) is outcome
    assert world.state.refused == 1


@pytest.mark.requirement("B34")
@pytest.mark.field_report("I6")
@pytest.mark.field_report("I7")
@pytest.mark.parametrize("host", ["there", "gone", "silent", "unheard"])
def test_an_accepted_cancel_lands_whatever_became_of_the_host(host: str) -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent, retries=5)
    asked = world.cancel(turn, reason="enough", request_id="req_1")
    hosts = {world.node(run).host_id for run in (parent, child)}
    found = {
        "there": world.survey(),
        "gone": world.survey(gone=hosts),
        "silent": world.survey(silent=hosts),
        "unheard": world.survey(missing=[parent, child]),
    }[host]
    world.restart(found)
    if host == "there":
        assert {order.target for _, order in world.orders} == {turn}
        assert {order.cause for _, order in world.orders} == {asked.cause}
        world.unwind(child)
        world.unwind(parent)
    world.finish(turn, "cancelled")
    assert {world.outcome(name) for name in (turn, parent, child)} == {Outcome.CANCELLED}
    assert {world.cause(name) for name in (turn, parent, child)} == {asked.cause}
    assert world.kinds(child).count("run_started") == 1
    assert world.quiet == ["req_1"]
    assert world.cancel(turn, request_id="req_1").accepted


def test_a_cancel_that_was_ordered_again_has_its_whole_grace_and_then_harder_means() -> None:
    world = World(auto_hosts=True)
    turn = world.open_turn(grace_s=5.0)
    run = world.run(turn)
    world.cancel(run)
    world.advance(4.0)
    world.restart(world.survey())
    world.advance(4.0)
    assert world.outcome(run) is None
    world.advance(1.5)
    assert world.outcome(run) is Outcome.CANCELLED
    assert "run_escalated" in world.kinds(run)


@pytest.mark.requirement("F14")
def test_what_waits_keeps_its_place_and_starts_in_its_order() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    first, second, third = world.delegate(turn, 3)
    after = world.run(turn, after=(third,))
    world.restart(world.survey())
    for run in (first, second, third, after):
        assert world.running() == [run]
        world.end(run)
    assert world.live() == [turn]


def test_what_waits_and_has_no_arguments_left_is_lost_and_says_so() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    running, queued = world.delegate(turn, 2)
    after = world.run(turn, after=(queued,))
    world.restart(world.survey(arguments=False))
    assert (world.outcome(running), world.outcome(queued)) == (None, Outcome.LOST)
    assert world.outcome(after) is not None
    world.end(running)
    world.finish(turn, "follow")
    assert world.outcome(turn) is Outcome.FAILED


def test_a_retry_that_was_due_later_is_begun_when_it_is_due() -> None:
    world = World()
    run = world.run(world.open_turn(), retries=1, retry_delay_s=30.0)
    world.end(run, "raised")
    world.restart(world.survey())
    world.advance(29.0)
    assert world.node(run).state is NodeState.RETRYING
    world.advance(2.0)
    assert (world.node(run).state, world.node(run).attempt) == (NodeState.RUNNING, 2)


@pytest.mark.field_report("D7")
def test_deadlines_and_attempt_timeouts_hold_over_a_restart() -> None:
    world = World()
    turn = world.open_turn()
    late = world.run(turn, deadline_s=10.0)
    slow = world.run(turn, attempt_timeout_s=20.0, retries=1)
    world.advance(5.0)
    world.restart(world.survey())
    world.advance(6.0)
    assert world.cause(late).kind is CauseKind.DEADLINE
    world.unwind(late)
    assert world.outcome(late) is Outcome.TIMED_OUT
    world.advance(10.0)
    assert [order.attempt for _, order in world.orders if order.target == slow] == [1]
    world.orders.clear()
    world.restart(world.survey())
    assert [order.attempt for _, order in world.orders if order.target == slow] == [1]
    world.end(slow, "timed_out", before_cancel=False)
    assert world.node(slow).attempt == 2


def test_a_body_that_had_asked_for_its_slot_gets_it_from_the_next_life() -> None:
    world = World(max_shared=1)
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    world.wait(parent, child)
    other = world.run(turn)
    world.end(child)
    world.resume(parent)
    assert world.node(parent).state is NodeState.RESUMING
    world.restart(world.survey(attempts=[LiveAttempt(parent, 1, resuming=True)]))
    assert world.running() == [other]
    world.end(other)
    assert (world.running(), world.resumed) == ([parent], [parent])


def test_a_resume_that_was_decided_and_not_sent_is_sent() -> None:
    world = World()
    parent = world.run(world.open_turn())
    child = world.run(parent)
    world.wait(parent, child)
    world.end(child)
    world.resume(parent)
    world.resumed.clear()
    world.restart(world.survey(attempts=[LiveAttempt(parent, 1, resuming=True)]))
    assert world.resumed == [parent]


def test_a_wait_that_was_refused_and_not_told_is_refused_again() -> None:
    world = World()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    world.wait(one, two)
    world.wait(two, one)
    assert len(world.refused_waits) == 1
    wait = ReportWaiting(two, 1, 7, (one,))
    world.restart(world.survey(attempts=[LiveAttempt(two, 1, waiting=wait)]))
    assert len(world.refused_waits) == 2


def test_a_host_that_does_not_answer_is_killed_and_its_runs_wait_for_the_proof() -> None:
    world = ClaimWorld(auto_hosts=False)
    turn = world.open_turn()
    for host in list(world.to_spawn):
        world.host_ready(host)
    run = world.run(turn, retries=1)
    host = world.node(run).host_id
    world.claim(run, "w:a")
    world.restart(world.survey(silent=[host]))
    assert world.to_kill == [host]
    assert (world.outcome(run), world.holders) == (None, [run])
    for other in world.state.hosts.keys() - {host}:
        world.host_ready(other)
    world.host_gone(host, "killed")
    assert (world.node(run).attempt, world.node(run).state) == (2, NodeState.RUNNING)
    assert world.holders == []


def test_a_host_that_was_to_be_killed_is_killed_by_the_next_life() -> None:
    world = World(auto_hosts=False)
    turn = world.open_turn()
    for host in list(world.to_spawn):
        world.host_ready(host)
    run = world.run(turn)
    world.cancel(run, grace_s=1.0)
    world.advance(1.5)
    assert world.to_kill == [world.node(run).host_id]
    world.restart(world.survey())
    assert world.to_kill == [world.node(run).host_id]
    assert world.outcome(run) is None
    world.settle_hosts()
    assert world.outcome(run) is Outcome.CANCELLED


def test_a_host_that_came_up_while_nobody_listened_is_used() -> None:
    world = World(auto_hosts=False)
    run = world.run(world.open_turn())
    hosts = list(world.to_spawn)
    world.restart(world.survey())
    assert (world.to_spawn, world.to_kill, list(world.state.hosts)) == ([], [], hosts)
    assert world.node(run).state is NodeState.QUEUED
    world.host_ready(hosts[-1])
    assert world.node(run).state is NodeState.RUNNING


def test_a_host_that_comes_up_on_a_node_that_was_drained_meanwhile_gets_no_work() -> None:
    world = World(auto_hosts=False)
    run = world.run(world.open_turn())
    hosts = list(world.to_spawn)
    world.drain_node("n1")
    world.restart(world.survey())
    for host in hosts:
        world.host_ready(host, "n1")
    assert world.node(run).state is NodeState.QUEUED


def test_hosts_that_were_asked_for_and_are_not_there_count_as_no_failure() -> None:
    world = World(auto_hosts=False)
    run = world.run(world.open_turn())
    for _ in range(4):
        world.restart(world.survey(gone=list(world.state.hosts)))
        assert world.to_spawn
    assert world.outcome(run) is None
    world.settle_hosts()
    assert world.node(run).state is NodeState.RUNNING


@pytest.mark.field_report("I11")
def test_an_attempt_that_was_given_up_on_is_stopped_where_it_still_runs() -> None:
    world = World()
    run = world.run(world.open_turn(), retries=1)
    old_host = world.node(run).host_id
    world.host_gone(old_host, "partition")
    assert world.node(run).attempt == 2
    world.restart(world.survey(attempts=[LiveAttempt(run, 1)]))
    assert [(order.target, order.attempt) for _, order in world.orders] == [(run, 1)]
    # The host of attempt 2 did not name it: its start is sent again.
    assert [name for _, name in world.starts] == [run]


def test_a_value_that_was_reported_before_the_crash_is_the_result_after_it() -> None:
    world = World()
    turn = world.open_turn()
    parent = world.run(turn)
    child = world.run(parent)
    world.end(parent, payload=b"value", preview="a value")
    assert world.node(parent).state is NodeState.SETTLING
    # As the shell does it: what the row of the journal holds is handed to the next decider.
    world.restart(world.survey())
    world.decider._payloads[parent] = b"value"
    world.end(child)
    (ended,) = [(event, blob) for event, blob in world.last.events if event.node_id == parent]
    assert isinstance(ended[0], RunEnded)
    assert (ended[0].outcome, ended[0].preview, ended[1]) == (Outcome.SUCCEEDED, "a value", b"value")


def test_claims_stay_with_a_run_that_goes_on_and_end_with_one_that_is_gone() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    one, two = world.delegate(turn, 2)
    other = world.run(turn, pool="actor")
    world.claim(one, "w:a")
    world.claim(other, "w:b")
    world.claim(two, "w:a", timeout_s=50.0)
    world.restart(world.survey(gone=[world.node(other).host_id]))
    assert (world.holders, world.waiters) == ([one], [two])
    world.advance(51.0)
    assert world.waiters == []


@pytest.mark.requirement("F6")
@pytest.mark.parametrize("restart", [False, True])
def test_a_program_that_the_next_attempt_has_found_again_and_seen_end_holds_no_claims(restart: bool) -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    run = world.run(turn, retries=1)
    world.claim(run, "w:a")
    world.report(world.node(run).host_id, process(run, 1, 77))
    world.host_gone(world.node(run).host_id)
    assert (world.node(run).attempt, world.owners(ClaimState.QUARANTINED)) == (2, [run])
    world.report(world.node(run).host_id, process(run, 2, 77))
    assert world.owners(ClaimState.QUARANTINED) == [run], "it is at work"
    if restart:
        world.restart(world.survey())
    world.report(world.node(run).host_id, process(run, 2, 77, ended=True))
    assert world.state.locks.claims() == ()
    world.end(run)
    assert world.swept == []


def test_what_an_earlier_version_left_in_quarantine_without_a_program_is_free_after_a_restart() -> None:
    world = ClaimWorld()
    run = world.run(world.open_turn(), retries=1)
    world.claim(run, "w:a")
    world.report(world.node(run).host_id, process(run, 1, 77))
    world.host_gone(world.node(run).host_id)
    # As it was journalled before the end of a program was looked at.
    ended = ProcessEnded(node_id=run, turn_id=world.node(run).turn_id, at=world.now, pid=77)
    world.events.append(ended)
    for state in (world.state, world.folded):
        evolve(state, ended)
    world.restart(world.survey())
    assert world.state.locks.claims() == ()


def test_a_witness_that_saw_the_program_of_an_earlier_attempt_end_frees_its_claims() -> None:
    world = ClaimWorld()
    run = world.run(world.open_turn(), retries=1, retry_delay_s=60.0)
    world.claim(run, "w:a")
    world.report(world.node(run).host_id, process(run, 1, 77))
    world.host_gone(world.node(run).host_id)
    assert world.owners(ClaimState.QUARANTINED) == [run]
    found = world.survey()
    world.restart(Survey(found.hosts, startable=found.startable, programs_gone={run: frozenset({77})}))
    assert world.state.locks.claims() == ()


@pytest.mark.requirement("F6")
def test_programs_that_could_not_be_ended_are_ended_again_until_they_are_gone() -> None:
    world = ClaimWorld()
    run = world.run(world.open_turn())
    world.claim(run, "w:a")
    world.report(world.node(run).host_id, process(run, 1, 77))
    world.host_gone(world.node(run).host_id)
    assert world.swept == [(run, 77)]
    for times, wait_s in enumerate((1.0, 2.0, 4.0), 2):
        world.process_swept(run, 77, gone=False)
        world.advance(wait_s - 0.1)
        assert len(world.swept) == times - 1
        world.advance(0.2)
        assert world.swept == [(run, 77)] * times
    assert world.owners(ClaimState.QUARANTINED) == [run]
    world.process_swept(run, 77)
    assert world.state.locks.claims() == ()
    world.advance(1000.0)
    assert len(world.swept) == 4


@pytest.mark.requirement("F6")
def test_claims_of_a_run_with_programs_wait_for_the_proof_that_these_are_gone() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    run = world.run(turn)
    world.claim(run, "w:a")
    host = world.node(run).host_id
    world.report(host, process(run, 1, 77))
    world.restart(world.survey(gone=[host]))
    assert world.owners(ClaimState.QUARANTINED) == [run]
    assert world.swept == [(run, 77)]
    assert "effect_uncertain" in world.kinds(run)
    world.process_swept(run, 77)
    assert world.state.locks.claims() == ()


def test_programs_that_a_witness_saw_end_hold_no_claims() -> None:
    world = ClaimWorld()
    run = world.run(world.open_turn())
    world.claim(run, "w:a")
    host = world.node(run).host_id
    world.report(host, process(run, 1, 77))
    found = Survey(programs_gone={run: frozenset({77, 78})})
    world.restart(found)
    assert any(isinstance(event, ProcessEnded) for event in world.events)
    assert (world.swept, world.state.locks.claims()) == ([], ())


def test_what_an_ended_attempt_left_is_swept_by_the_next_life() -> None:
    world = ClaimWorld()
    run = world.run(world.open_turn(), retries=2)
    world.claim(run, "w:a")
    host = world.node(run).host_id
    world.report(host, process(run, 1, 77))
    world.host_gone(host)
    assert world.node(run).attempt == 2
    assert world.owners(ClaimState.QUARANTINED) == [run]
    world.report(world.node(run).host_id, process(run, 2, 88))
    world.swept.clear()
    world.restart(world.survey())
    # The program of the attempt that goes on is left alone.
    assert world.swept == [(run, 77)]
    world.process_swept(run, 77)
    assert world.state.locks.claims() == ()


def test_a_body_that_would_not_stop_keeps_its_quarantine_while_its_host_lives() -> None:
    world = ClaimWorld()
    turn = world.open_turn()
    stuck, bystander = world.delegate(turn, 2)
    world.claim(stuck, "w:a")
    world.report(world.node(stuck).host_id, process(stuck, 1, 77))
    world.cancel(stuck, grace_s=1.0)
    world.advance(1.5)
    assert world.node(stuck).unconfirmed
    host = world.node(bystander).host_id
    assert world.swept == [(stuck, 77)]
    world.restart(world.survey())
    world.process_swept(stuck, 77)
    assert (world.swept[1:], world.owners(ClaimState.QUARANTINED)) == ([], [stuck])
    world.host_gone(host)
    assert world.swept[1:] == [(stuck, 77)]


def test_a_report_of_programs_that_comes_again_is_not_counted_twice() -> None:
    world = World()
    run = world.run(world.open_turn())
    host = world.node(run).host_id
    world.report(host, process(run, 1, 77))
    world.report(host, process(run, 1, 77, ended=True))
    last = world.state.hosts[host].reported
    assert world.node(run).processes_stopped == 1
    world.restart(world.survey())
    copy = ReportBatch(host, last, (process(run, 1, 77), process(run, 1, 77, ended=True)))
    assert world.decider.report(copy, world.now).events == []
    assert world.node(run).processes_stopped == 1


@pytest.mark.requirement("B22")
@pytest.mark.field_report("J1")
@pytest.mark.field_report("J2")
def test_restart_after_restart_changes_nothing_more() -> None:
    world = World()
    turn = world.open_turn()
    one = world.run(turn)
    two = world.run(one, retries=1)
    world.cancel(two)
    for _ in range(3):
        world.restart(world.survey())
    world.unwind(two)
    world.end(one)
    world.finish(turn)
    assert set(world.terminal_counts().values()) == {1}
    assert [world.outcome(name) for name in (two, one, turn)] == [
        Outcome.CANCELLED,
        Outcome.SUCCEEDED,
        Outcome.SUCCEEDED,
    ]
    world.restart(world.survey())
    assert set(world.terminal_counts().values()) == {1}
