"""The daemon's rules, with keepers played by the test: every answer told apart, in every order."""

from __future__ import annotations

import base64
import errno
import os
import socket

import pytest

from remit.core.cause import Cause, CauseKind
from remit.processes.frames import encode
from remit.processes.jobs import JobOutcome, JobPhase, JobResult, JobState, boot_id
from remit.processes.leases import LEASE_S
from remit.processes.records import RETENTION_S, TOMBSTONE_S
from remit.processes.server import IDLE_S, TICK_S
from tests.procd.fakes import NOBODY, Peer, World, wish

CAUSE = Cause(kind=CauseKind.USER_INTERRUPT, origin="turn_1", actor="ann").to_dict()


def stop(peer: Peer, **fields: object) -> int:
    return peer.ask("stop", **{"scope": "w", "job": None, "key": None, "wish": wish(), **fields})


def stop_many(peer: Peer, runs: list[str], **fields: object) -> int:
    given = {"scope": "w", "runs": runs, "wish": wish(), "foreground_only": True}
    return peer.ask("stop_many", **{**given, **fields})


# --- start -----------------------------------------------------------------------------------------


@pytest.mark.requirement("C16")
def test_a_start_is_answered_when_the_program_runs(world: World) -> None:
    peer = world.peer()
    spec = world.spec(key="k")
    number = peer.ask("start", spec=spec.to_dict(), env={"A": "b"}, stdin=base64.b64encode(b"in").decode())
    keeper = world.forks[spec.job]
    assert (keeper.env, keeper.stdin) == ({"A": "b"}, b"in")
    assert peer.answer(number) is None
    keeper.started()
    answer = peer.answer(number)
    assert answer is not None
    assert (answer["kind"], answer["job"], answer["pid"]) == ("started", spec.job, 4321)


@pytest.mark.requirement("C16")
def test_a_second_start_attaches_and_another_command_is_refused_at_once(world: World) -> None:
    first = world.run(key="k")
    peer = world.peer()
    attached = peer.answer(world.begin(peer, world.spec(key="k", generation=2)))
    assert attached is not None
    assert (attached["kind"], attached["job"], attached["generation"]) == ("attached", first.spec.job, 2)
    other = peer.answer(world.begin(peer, world.spec(key="k", argv=("make", "clean"))))
    assert other is not None
    assert (other["op"], other["code"]) == ("error", "input_mismatch")
    assert len(world.forks.keepers) == 1


@pytest.mark.requirement("C9")
def test_a_start_that_is_under_way_is_attached_to_with_its_outcome(world: World) -> None:
    first, second = world.peer(), world.peer()
    spec = world.spec(key="k")
    one, two = world.begin(first, spec), world.begin(second, world.spec(key="k"))
    conflict = first.answer(world.begin(first, world.spec(key="k", argv=("other",))))
    assert conflict is not None
    assert conflict["code"] == "input_mismatch"
    assert second.answer(two) is None
    world.forks[spec.job].started()
    answers = [first.answer(one), second.answer(two)]
    assert [answer and answer["kind"] for answer in answers] == ["started", "attached"]
    assert len(world.forks.keepers) == 1


@pytest.mark.requirement("C18")
@pytest.mark.requirement("C26")
def test_a_failed_start_is_told_and_the_next_in_line_takes_the_key_over(world: World) -> None:
    peers = [world.peer() for _ in range(3)]
    specs = [world.spec(key="k") for _ in peers]
    numbers = [world.begin(peer, spec) for peer, spec in zip(peers, specs, strict=True)]
    world.forks[specs[0].job].ended(JobOutcome.NOT_STARTED, error="cannot start 'make': no such program", errno=2)
    answer = peers[0].answer(numbers[0])
    assert answer is not None
    assert (answer["code"], answer["data"]["errno"]) == ("command_not_started", errno.ENOENT)
    assert "no such program" in answer["message"]
    assert not world.place.job(specs[0].job).exists()
    assert [keeper.spec.job for keeper in world.forks.keepers] == [specs[0].job, specs[1].job]
    world.forks[specs[1].job].started()
    answers = [peer.answer(number) for peer, number in zip(peers, numbers, strict=True)]
    assert [answer and answer.get("kind") for answer in answers] == [None, "started", "attached"]


@pytest.mark.requirement("C18")
def test_whoever_has_gone_starts_nothing_when_its_turn_comes(world: World) -> None:
    owner, gone, last = world.peer(), world.peer(), world.peer()
    spec = world.spec(key="k")
    world.begin(owner, spec)
    world.begin(gone, world.spec(key="k"))
    heir = world.spec(key="k")
    number = world.begin(last, heir)
    gone.socket.close()
    world.settle()
    world.forks[spec.job].ended(JobOutcome.NOT_STARTED, error="no", errno=2)
    world.settle()
    world.forks[heir.job].started()
    answer = last.answer(number)
    assert answer is not None
    assert answer["kind"] == "started"
    assert len(world.forks.keepers) == 2


@pytest.mark.requirement("C26")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EAGAIN, errno.EMFILE])
def test_no_room_for_a_keeper_is_a_typed_error_and_frees_the_key(world: World, code: int) -> None:
    world.forks.error = OSError(code, os.strerror(code))
    peer = world.peer()
    answer = peer.answer(world.begin(peer, world.spec(key="k")))
    assert answer is not None
    assert (answer["code"], answer["data"]["errno"]) == ("command_not_started", code)
    world.forks.error = None
    spec = world.spec(key="k")
    number = world.begin(peer, spec)
    world.forks[spec.job].started()
    answer = peer.answer(number)
    assert answer is not None
    assert answer["kind"] == "started"


def test_a_start_after_the_end_gives_the_result(world: World) -> None:
    keeper = world.run(key="k")
    keeper.ended(exit_code=7)
    peer = world.peer()
    answer = peer.answer(world.begin(peer, world.spec(key="k")))
    assert answer is not None
    assert (answer["kind"], answer["result"]["exit_code"]) == ("finished", 7)


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C17")
@pytest.mark.parametrize("key", ["a/b", "100%", "a b", "?", "#", "..", "ключ", "%2F", "\ud800", "x" * 5_000])
def test_any_text_is_a_key(world: World, key: str) -> None:
    keeper = world.run(key=key)
    peer = world.peer()
    number = stop(peer, key=key)
    keeper.ended(JobOutcome.CANCELLED)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["kind"] == "stopped"


# --- stop ------------------------------------------------------------------------------------------


@pytest.mark.requirement("C6")
@pytest.mark.parametrize("by", ["job", "key"])
def test_a_stop_goes_by_id_else_by_key_and_answers_with_the_result(world: World, by: str) -> None:
    keeper = world.run(key="k")
    peer = world.peer()
    number = stop(peer, **{by: keeper.spec.job if by == "job" else "k"}, wish=wish(cause=CAUSE, grace_s=1.5))
    (heard,) = keeper.heard()
    assert (heard["op"], heard["cause"], heard["grace_s"], heard["kill"]) == ("stop", CAUSE, 1.5, False)
    assert peer.answer(number) is None
    keeper.ended(JobOutcome.CANCELLED, cause=CAUSE)
    answer = peer.answer(number)
    assert answer is not None
    assert (answer["kind"], answer["result"]["cause"]) == ("stopped", CAUSE)


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C13")
def test_what_has_ended_is_not_running_and_that_is_no_error(world: World) -> None:
    keeper = world.run(key="k")
    keeper.ended(exit_code=3)
    peer = world.peer()
    answer = peer.answer(stop(peer, key="k"))
    assert answer is not None
    assert (answer["op"], answer["kind"], answer["result"]["exit_code"]) == ("answer", "not_running", 3)


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C6")
@pytest.mark.requirement("C8")
def test_unknown_and_foreign_ones_are_not_found_and_nothing_is_signalled(world: World) -> None:
    keeper = world.run(key="k")
    peer = world.peer()
    answers = [
        peer.answer(stop(peer, key="other")),
        peer.answer(stop(peer, key="k", scope="foreign")),
        peer.answer(stop(peer, job=keeper.spec.job, scope="foreign")),
        peer.answer(stop(peer)),
    ]
    assert [answer and {**answer, "id": 0} for answer in answers] == [
        {"v": 1, "op": "answer", "id": 0, "kind": "process_key_not_found", "job": "", "result": None}
    ] * 4
    assert keeper.heard() == []


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C10")
def test_a_stop_by_key_waits_for_a_start_that_is_under_way(world: World) -> None:
    starter, stopper = world.peer(), world.peer()
    spec = world.spec(key="k")
    started, stopped = world.begin(starter, spec), stop(stopper, key="k")
    keeper = world.forks[spec.job]
    # Told at once: the keeper honours it as soon as it can, not only after its report.
    assert [message["op"] for message in keeper.heard()] == ["stop"]
    assert stopper.answer(stopped) is None
    keeper.started()
    keeper.ended(JobOutcome.CANCELLED)
    answers = starter.answer(started), stopper.answer(stopped)
    assert [answer and answer["kind"] for answer in answers] == ["started", "stopped"]


@pytest.mark.requirement("C10")
def test_a_start_that_fails_while_a_stop_waits_is_not_found(world: World) -> None:
    peer = world.peer()
    spec = world.spec(key="k")
    world.begin(peer, spec)
    number = stop(peer, key="k")
    world.forks[spec.job].ended(JobOutcome.NOT_STARTED, error="no", errno=2)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["kind"] == "process_key_not_found"


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C10")
@pytest.mark.requirement("C11")
def test_a_start_that_is_still_under_way_at_the_limit_is_pending_and_stops_later(world: World) -> None:
    peer = world.peer()
    spec = world.spec(key="k")
    started = world.begin(peer, spec)
    number = stop(peer, key="k", limit_s=3.0)
    world.advance(2.9)
    assert peer.answer(number) is None
    world.advance(0.2)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["kind"] == "start_pending"
    (view,) = peer.call("list")["jobs"]
    assert (view["state"], view["stopping"]) == ("pending", True)
    world.forks[spec.job].ended(JobOutcome.CANCELLED)
    answer = peer.answer(started)
    assert answer is not None
    assert (answer["kind"], answer["result"]["outcome"]) == ("finished", "cancelled")


@pytest.mark.requirement("C19")
def test_an_end_that_is_not_proven_in_time_is_unconfirmed(world: World) -> None:
    keeper = world.run(key="k")
    peer = world.peer()
    number = stop(peer, key="k", limit_s=1.0)
    world.advance(1.0)
    answer = peer.answer(number)
    assert answer is not None
    assert (answer["kind"], answer["job"], answer["result"]) == ("unconfirmed", keeper.spec.job, None)


@pytest.mark.requirement("A12", "C29")
@pytest.mark.requirement("C5")
@pytest.mark.requirement("C25")
def test_a_stop_that_comes_before_its_start_refuses_it(world: World) -> None:
    peer = world.peer()
    spec = world.spec(key="k")
    stopped = peer.answer(stop(peer, key="k", tombstone=True))
    assert stopped is not None
    assert stopped["kind"] == "process_key_not_found"
    started = peer.answer(world.begin(peer, spec))
    assert started is not None
    assert started["kind"] == "tombstoned"
    assert world.forks.keepers == []
    world.advance(TOMBSTONE_S + 20)
    world.begin(peer, spec)
    assert len(world.forks.keepers) == 1


@pytest.mark.requirement("A12")
@pytest.mark.requirement("C25")
def test_a_stop_without_a_tombstone_refuses_nothing(world: World) -> None:
    peer = world.peer()
    peer.answer(stop(peer, key="k"))
    world.begin(peer, world.spec(key="k"))
    assert len(world.forks.keepers) == 1


@pytest.mark.requirement("C27")
def test_a_stop_goes_on_when_the_one_who_asked_has_gone(world: World) -> None:
    keeper = world.run(key="k")
    peer = world.peer()
    stop(peer, key="k")
    peer.socket.close()
    world.settle()
    assert [message["op"] for message in keeper.heard()] == ["stop"]
    keeper.ended(JobOutcome.CANCELLED)
    other = world.peer()
    answer = other.answer(stop(other, key="k"))
    assert answer is not None
    assert (answer["kind"], answer["result"]["outcome"]) == ("not_running", "cancelled")


@pytest.mark.requirement("A16")
def test_stopping_runs_spares_background_jobs_and_other_runs_in_one_message(world: World) -> None:
    mine = [world.run(run="run_1"), world.run(run="run_1"), world.run(run="", turn="turn_9")]
    background, other = world.run(run="run_1", background=True), world.run(run="run_2")
    peer = world.peer()
    number = stop_many(peer, ["run_1", "turn_9"])
    assert [[message["op"] for message in keeper.heard()] for keeper in (*mine, background, other)] == [
        ["stop"],
        ["stop"],
        ["stop"],
        [],
        [],
    ]
    for keeper in mine:
        assert peer.answer(number) is None
        keeper.ended(JobOutcome.CANCELLED)
    answer = peer.answer(number)
    assert answer is not None
    assert {result["job"] for result in answer["stopped"]} == {keeper.spec.job for keeper in mine}
    assert (answer["spared"], answer["unconfirmed"]) == ([background.spec.job], [])


@pytest.mark.requirement("E6")
def test_runs_that_were_stopped_start_nothing_more(world: World) -> None:
    peer = world.peer()
    assert peer.call("stop_many", scope="w", runs=["run_1"], wish=wish(), foreground_only=True)["stopped"] == []
    for background in (False, True):
        answer = peer.answer(world.begin(peer, world.spec(run="run_1", background=background)))
        assert answer is not None
        assert answer["kind"] == "tombstoned"
    assert world.forks.keepers == []


@pytest.mark.requirement("A17")
def test_a_background_job_is_stopped_by_its_own_handle(world: World) -> None:
    keeper = world.run(background=True)
    peer = world.peer()
    number = stop(peer, job=keeper.spec.job)
    assert [message["op"] for message in keeper.heard()] == ["stop"]
    keeper.ended(JobOutcome.CANCELLED)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["kind"] == "stopped"


def test_some_of_many_may_stay_unconfirmed(world: World) -> None:
    one, two = world.run(), world.run()
    peer = world.peer()
    number = stop_many(peer, ["run_1"], limit_s=1.0)
    one.ended(JobOutcome.CANCELLED)
    world.advance(1.5)
    answer = peer.answer(number)
    assert answer is not None
    assert [result["job"] for result in answer["stopped"]] == [one.spec.job]
    assert answer["unconfirmed"] == [two.spec.job]


# --- wait, watch, detach, list ---------------------------------------------------------------------


def test_everybody_who_waits_has_the_exit_status_also_after_the_end(world: World) -> None:
    keeper = world.run()
    job = keeper.spec.job
    first, second, watcher = world.peer(), world.peer(), world.peer()
    numbers = first.ask("wait", job=job, timeout_s=None), second.ask("wait", job=job, timeout_s=100.0)
    watcher.ask("watch", job=job)
    assert first.answer(numbers[0]) is None
    keeper.ended(exit_code=5)
    answers = [first.answer(numbers[0]), second.answer(numbers[1]), first.call("wait", job=job, timeout_s=None)]
    assert [answer and answer["result"]["exit_code"] for answer in answers] == [5, 5, 5]
    watcher.read()
    assert [(message["op"], message["result"]["exit_code"]) for message in watcher.got] == [("ended", 5)]
    later = world.peer()
    later.ask("watch", job=job)
    later.read()
    assert later.got[0]["result"]["exit_code"] == 5


def test_a_wait_expires_and_stops_nothing(world: World) -> None:
    keeper = world.run()
    peer = world.peer()
    number = peer.ask("wait", job=keeper.spec.job, timeout_s=5.0)
    world.advance(5.0)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["result"] is None
    assert keeper.heard() == []


def test_an_unknown_job_is_not_found(world: World) -> None:
    peer = world.peer()
    assert peer.call("wait", job="proc_x", timeout_s=None)["code"] == "not_found"
    assert peer.call("detach", job="proc_x", scope="w")["code"] == "not_found"
    peer.ask("watch", job="proc_x")
    peer.read()
    assert peer.got[-1] == {"v": 1, "op": "ended", "job": "proc_x", "result": None}


def test_an_unwatched_job_is_told_to_nobody(world: World) -> None:
    keeper = world.run()
    peer = world.peer()
    peer.ask("watch", job=keeper.spec.job)
    peer.ask("unwatch", job=keeper.spec.job)
    keeper.ended(exit_code=0)
    world.settle()
    peer.read()
    assert peer.got == []


@pytest.mark.requirement("A16")
def test_a_detached_job_is_spared_once_its_keeper_knows(world: World) -> None:
    keeper = world.run()
    peer = world.peer()
    number = peer.ask("detach", job=keeper.spec.job, scope="w")
    assert peer.answer(number) is None
    assert [message["op"] for message in keeper.heard()] == ["detach"]
    keeper.say("answer", kind="detached")
    assert peer.answer(number) is not None
    answer = peer.call("stop_many", scope="w", runs=["run_1"], wish=wish(), foreground_only=True)
    assert answer["spared"] == [keeper.spec.job]


def test_a_job_that_went_into_the_background_at_its_time_limit_is_spared(world: World) -> None:
    keeper = world.run(on_timeout="background", timeout_s=5.0)
    keeper.say("backgrounded", state=keeper.state(background=True).to_dict())
    world.settle()
    peer = world.peer()
    answer = peer.call("stop_many", scope="w", runs=["run_1"], wish=wish(), foreground_only=True)
    assert answer["spared"] == [keeper.spec.job]


def test_a_list_shows_what_was_asked_for_and_no_environment(world: World) -> None:
    one = world.run(run="run_1", session="s1", note="tests")
    world.run(run="run_2", session="s2")
    world.run(scope="other")
    peer = world.peer()
    world.advance(7.0)
    (view,) = peer.call("list", scope="w", session="s1")["jobs"]
    assert (view["job"], view["run"], view["state"], view["pid"], view["note"]) == (
        one.spec.job,
        "run_1",
        "running",
        4321,
        "tests",
    )
    assert view["age_s"] == pytest.approx(7.0)
    assert "env" not in view
    assert len(peer.call("list", scope="w")["jobs"]) == 2
    assert len(peer.call("list", runs=["run_1", "run_2"])["jobs"]) == 3
    assert len(peer.call("list")["jobs"]) == 3


# --- leases ----------------------------------------------------------------------------------------


@pytest.mark.requirement("A18")
@pytest.mark.requirement("F6")
def test_foreground_jobs_end_with_the_lease_and_background_ones_do_not(world: World) -> None:
    keeper, background = world.run(), world.run(background=True)
    peer = world.peer()
    peer.call("renew", scope="w", holder="coordinator", ttl_s=LEASE_S)
    world.advance(LEASE_S - 1)
    peer.call("renew", scope="w", holder="coordinator", ttl_s=LEASE_S)
    world.advance(LEASE_S - 1)
    assert keeper.heard() == []
    world.advance(2)
    (heard,) = keeper.heard()
    assert (heard["op"], heard["cause"]["kind"], heard["cause"]["actor"]) == ("stop", "parent_lost", "procd")
    assert background.heard() == []
    world.advance(10 * LEASE_S)
    assert background.heard() == []


@pytest.mark.requirement("F6")
def test_a_start_vouches_for_its_scope_as_long_as_a_lease(world: World) -> None:
    keeper = world.run()
    world.advance(LEASE_S - 1)
    assert keeper.heard() == []
    other = world.run(key="k")
    world.advance(LEASE_S - 1)
    assert (keeper.heard(), other.heard()) == ([], [])
    world.advance(2)
    assert [message["op"] for message in (*keeper.heard(), *other.heard())] == ["stop", "stop"]


def test_a_released_scope_stops_its_foreground_jobs_alone(world: World) -> None:
    keeper, background, foreign = world.run(), world.run(background=True), world.run(scope="other")
    peer = world.peer()
    number = peer.ask("release", scope="w", wish=wish())
    assert [len(one.heard()) for one in (keeper, background, foreign)] == [1, 0, 0]
    keeper.ended(JobOutcome.CANCELLED)
    answer = peer.answer(number)
    assert answer is not None
    assert [result["job"] for result in answer["stopped"]] == [keeper.spec.job]


def test_a_lease_is_not_made_longer_by_the_daemons_death(world: World) -> None:
    peer = world.peer()
    peer.call("renew", scope="w", holder="coordinator", ttl_s=LEASE_S)
    world.advance(LEASE_S - 5)
    world.restart()
    lease = world.server.supervisor.leases.get("w")
    assert lease is not None
    assert lease.until == pytest.approx(world.clock.monotonic() + 5)
    assert lease.holder == "coordinator"


@pytest.mark.parametrize("ttl_s", [0, -1, 1e9, float("nan")])
def test_a_lease_out_of_range_is_refused(world: World, ttl_s: float) -> None:
    assert world.peer().call("renew", scope="w", holder="c", ttl_s=ttl_s)["code"] == "invalid_argument"


# --- keepers that die ------------------------------------------------------------------------------


@pytest.mark.requirement("C19")
def test_a_lost_keeper_is_swept_and_its_job_ends_keeper_lost(world: World) -> None:
    keeper = world.run(key="k")
    peer = world.peer()
    number = peer.ask("wait", job=keeper.spec.job, timeout_s=None)
    keeper.die()
    world.settle()
    sweeper = world.forks[keeper.spec.job]
    assert sweeper.is_sweeper
    assert peer.answer(number) is None
    sweeper.ended(JobOutcome.KEEPER_LOST)
    answer = peer.answer(number)
    assert answer is not None
    assert answer["result"]["outcome"] == "keeper_lost"
    again = peer.answer(world.begin(peer, world.spec(key="k")))
    assert again is not None
    assert again["kind"] == "finished"


def test_a_result_that_was_written_and_not_said_counts(world: World) -> None:
    keeper = world.run()
    keeper.ended(exit_code=9)
    keeper.heard()
    peer = world.peer()
    keeper.die()
    assert peer.call("wait", job=keeper.spec.job, timeout_s=None)["result"]["exit_code"] == 9
    assert len(world.forks.keepers) == 1


@pytest.mark.parametrize("how", ["dies", "cannot be forked"])
def test_a_sweep_that_fails_still_ends_the_job(world: World, how: str) -> None:
    keeper = world.run()
    peer = world.peer()
    number = peer.ask("wait", job=keeper.spec.job, timeout_s=None)
    if how == "dies":
        keeper.die()
        world.settle()
        world.forks[keeper.spec.job].die()
    else:
        world.forks.error = OSError(errno.EAGAIN, "no processes left")
        keeper.die()
    answer = peer.answer(number)
    assert answer is not None
    assert answer["result"]["outcome"] == "keeper_lost"
    assert answer["result"]["error"]


def test_a_keeper_that_says_nonsense_is_passed_over_and_its_end_still_seen(world: World) -> None:
    keeper = world.run()
    keeper.say("ended", result={"v": 99})
    keeper.say("started")
    keeper.say("what")
    world.settle()
    assert any("cannot be understood" in line for line in world.lines)
    keeper.ended(exit_code=1)
    assert world.peer().call("wait", job=keeper.spec.job, timeout_s=None)["result"]["exit_code"] == 1


# --- peers -----------------------------------------------------------------------------------------


def test_a_stranger_is_refused() -> None:
    world = World(uid_of=lambda _: os.geteuid() + 1)
    try:
        peer = world.peer()
        peer.ask("list")
        assert peer.read() is False
        assert peer.got == []
        assert any("refused" in line for line in world.lines)
    finally:
        world.close()


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C12")
def test_an_unknown_call_or_version_is_unsupported_and_never_gone(world: World) -> None:
    peer = world.peer()
    assert peer.call("stop_everything")["kind"] == "unsupported"
    assert peer.call("stop", v=2)["kind"] == "unsupported"


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("start", {}),
        ("start", {"spec": 7, "env": {}}),
        ("start", {"spec": {"v": 1, "job": "proc_1"}, "env": {}}),
        ("stop", {}),
        ("stop", {"scope": "w", "wish": wish(grace_s=-1)}),
        ("stop", {"scope": "w", "wish": wish(grace_s="soon")}),
        ("stop_many", {"scope": "w", "wish": wish(), "runs": 3, "foreground_only": True}),
        ("wait", {}),
        ("renew", {"scope": "w"}),
    ],
)
def test_a_bad_request_is_answered_and_changes_nothing(world: World, op: str, fields: dict[str, object]) -> None:
    peer = world.peer()
    answer = peer.call(op, **fields)
    assert answer["op"] == "error"
    assert answer["code"] in ("invalid_argument", "process_protocol_error")
    assert peer.call("list")["jobs"] == []


@pytest.mark.parametrize("job", ["", "../x", "proc_../..", "proc_a/b", "run_1", "proc_" + "x" * 100])
def test_an_id_that_is_no_directory_name_is_refused(world: World, job: str) -> None:
    peer = world.peer()
    answer = peer.answer(world.begin(peer, world.spec(job=job)))
    assert answer is not None
    assert answer["code"] == "invalid_argument"
    assert world.forks.keepers == []


def test_garbage_on_the_socket_ends_that_connection_alone(world: World) -> None:
    bad, good = world.peer(), world.peer()
    bad.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    world.settle()
    assert bad.read() is False
    assert good.call("ping")["live"] == 0


# --- age -------------------------------------------------------------------------------------------


@pytest.mark.requirement("C24")
def test_old_records_go_with_their_directories_and_living_ones_stay(world: World) -> None:
    old, living = world.run(background=True), world.run(background=True)
    old.ended(exit_code=0)
    world.settle()
    world.advance(RETENTION_S / 2)
    assert old.jobdir.exists()
    world.advance(RETENTION_S)
    assert not old.jobdir.exists()
    assert living.jobdir.exists()
    assert world.peer().call("wait", job=old.spec.job, timeout_s=None)["code"] == "not_found"


def test_a_daemon_with_nothing_to_do_ends_after_a_while_and_not_before(world: World) -> None:
    keeper = world.run(background=True)
    for peer in world.peers:
        peer.socket.close()
    world.settle()
    world.advance(10 * IDLE_S)
    assert not world.server.is_idle()
    keeper.ended(exit_code=0)
    world.advance(1)
    assert not world.server.is_idle()
    world.advance(IDLE_S + 1)
    assert world.server.is_idle()


# --- the next daemon -------------------------------------------------------------------------------


def test_the_next_daemon_knows_results_and_leaves_garbage_alone(world: World) -> None:
    keeper = world.run(key="k")
    keeper.ended(exit_code=4)
    world.settle()
    for name, text in (("proc_bad", "{"), ("proc_empty", None), ("what", "[]"), ("proc_list", "[]")):
        directory = world.place.jobs / name
        directory.mkdir()
        if text is not None:
            (directory / "spec.json").write_text(text)
    (world.place.jobs / "file").write_text("")
    world.restart()
    peer = world.peer()
    assert [view["job"] for view in peer.call("list")["jobs"]] == [keeper.spec.job]
    answer = peer.answer(world.begin(peer, world.spec(key="k")))
    assert answer is not None
    assert (answer["kind"], answer["result"]["exit_code"]) == ("finished", 4)
    other = peer.answer(world.begin(peer, world.spec(key="k", argv=("other",))))
    assert other is not None
    assert other["code"] == "input_mismatch"
    assert sum("remit doctor" in line for line in world.lines) == 5


@pytest.mark.requirement("C28")
def test_the_next_daemon_never_runs_a_job_again_whose_end_it_cannot_know(world: World) -> None:
    keeper = world.run(key="k")
    keeper.die()
    os.utime(keeper.jobdir, (1, 1))
    world.restart()
    sweeper = world.forks[keeper.spec.job]
    assert sweeper.is_sweeper
    sweeper.ended(JobOutcome.KEEPER_LOST)
    peer = world.peer()
    answer = peer.answer(world.begin(peer, world.spec(key="k")))
    assert answer is not None
    assert (answer["kind"], answer["result"]["outcome"]) == ("finished", "keeper_lost")


def test_results_of_an_earlier_daemon_age_from_their_end(world: World) -> None:
    keeper = world.run(key="k")
    keeper.ended(exit_code=4, ended_at=1.0)
    world.settle()
    world.restart()
    world.advance(20.0)
    assert not keeper.jobdir.exists()


# --- keepers that come back ------------------------------------------------------------------------


def test_a_keeper_that_has_nothing_left_comes_back_and_one_with_a_job_does_not(world: World) -> None:
    keeper = world.run()
    keeper.say("idle")
    world.settle()
    assert world.forks.taken_back == []
    keeper.ended()
    keeper.say("idle")
    world.settle()
    ((_, connection),) = world.forks.taken_back
    connection.send(b"x")
    assert keeper.socket.recv(1) == b"x"
    connection.close()
    assert world.peer().call("list", scope="w")["jobs"][0]["state"] == "ended"


def test_a_job_that_was_taken_over_before_its_start_may_still_fail_to_start(world: World) -> None:
    spec = world.spec(key="k")
    connection, keeper = socket.socketpair()
    state = JobState(job=spec.job, phase=JobPhase.STARTING, boot=boot_id(), token=spec.job, keeper=NOBODY)
    world.server.supervisor.adopt(spec, "of this command", state, connection)
    result = JobResult(job=spec.job, outcome=JobOutcome.NOT_STARTED, error="no such program", errno=2)
    keeper.sendall(encode("ended", result=result.to_dict()))
    assert world.peer().call("list", scope="w")["jobs"] == []
    keeper.close()


# --- early stops -----------------------------------------------------------------------------------


@pytest.mark.requirement("E7")
@pytest.mark.parametrize("how", ["job", "key", "run"])
def test_a_stop_that_came_before_its_start_refuses_it_after_the_daemons_death_too(how: str, world: World) -> None:
    spec = world.spec(key="k")
    if how == "run":
        stop_many(world.peer(), ["run_1", "run_2"])
    else:
        stop(world.peer(), **{how: spec.job if how == "job" else "k"}, tombstone=True)
    for _ in range(2):
        world.restart()
        peer = world.peer()
        answer = peer.answer(world.begin(peer, spec))
        assert answer is not None
        assert answer["kind"] == "tombstoned"
    assert world.forks.keepers == []
    # As long as without a death, and no longer.
    world.advance(TOMBSTONE_S)
    world.restart()
    peer = world.peer()
    world.begin(peer, spec)
    assert [keeper.spec.job for keeper in world.forks.keepers] == [spec.job]


@pytest.mark.requirement("E7")
def test_what_a_daemon_left_half_written_or_another_boot_hides_no_early_stop(world: World) -> None:
    stop_many(world.peer(), ["run_1"], generation=3)
    with world.place.stops.open("ab") as file:
        file.write(b'{"boot":"another","scope":"w","kind":"run","names":["run_3"],"generation":null,"at":1000.0}\n')
        file.write(b'{"scope":"w"}\n[]\n\xff\n{"boot":"')
    world.restart()
    stop_many(world.peer(), ["run_2"])
    world.restart()
    peer = world.peer()
    kinds: list[object] = []
    for run, generation in (("run_1", 3), ("run_1", 4), ("run_2", 9), ("run_3", 0)):
        spec = world.spec(run=run, generation=generation)
        number = world.begin(peer, spec)
        if world.forks.keepers and world.forks.keepers[-1].spec.job == spec.job:
            world.forks[spec.job].started()
        answer = peer.answer(number)
        kinds.append(answer and answer["kind"])
    assert kinds == ["tombstoned", "started", "tombstoned", "started"]


def test_a_stop_that_cannot_be_written_is_held_in_memory_and_said_to_be(world: World) -> None:
    world.place.stops.mkdir()
    peer = world.peer()
    stop_many(peer, ["run_1"])
    answer = peer.answer(world.begin(peer, world.spec()))
    assert answer is not None
    assert answer["kind"] == "tombstoned"
    assert any("memory alone" in line for line in world.lines)


def test_the_file_of_early_stops_is_written_anew_when_it_has_grown(world: World) -> None:
    peer = world.peer()
    for _ in range(40):
        stop_many(peer, [f"run_{number:04}" for number in range(3_000)])
    grown = world.place.stops.stat().st_size
    world.advance(TICK_S)
    assert world.place.stops.stat().st_size < grown
    world.restart()
    peer = world.peer()
    answer = peer.answer(world.begin(peer, world.spec(run="run_2999")))
    assert answer is not None
    assert answer["kind"] == "tombstoned"
