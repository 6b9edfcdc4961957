"""What an answer may be taken for, and what it may not: by kind of call, over restarts, and for whom it was meant."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remit
from remit.agents.tooling import ToolHolder
from remit.core.errors import ProcessError, ProcessKeyConflict, ProcessProtocolError
from remit.processes.answers import JobView, StartAnswer, StartKind, StopAnswer, StopKind
from remit.processes.client import ProcessClient
from remit.processes.jobs import JobOutcome, JobResult, JobSpec
from remit.processes.records import Records, RecordState
from remit.processes.wire import decode_error
from tests.procd.fakes import Peer, World, wish


def stop(peer: Peer, **fields: object) -> dict[str, Any] | None:
    return peer.answer(peer.ask("stop", **{"scope": "w", "job": None, "key": None, "wish": wish(), **fields}))


# --- one call, one set of words --------------------------------------------------------------------


@pytest.mark.requirement("C14")
def test_a_stop_by_id_has_its_own_answers_and_takes_no_pending_start_for_gone(world: World) -> None:
    ended, pending = world.run(), world.spec()
    ended.ended(exit_code=3)
    peer = world.peer()
    world.begin(peer, pending)
    answer = stop(peer, job=ended.spec.job)
    assert answer is not None
    assert (answer["kind"], answer["result"]["exit_code"]) == ("not_running", 3)
    unknown = stop(peer, job="proc_none")
    assert unknown is not None
    assert (unknown["kind"], unknown["result"]) == ("process_key_not_found", None)
    number = peer.ask("stop", scope="w", job=pending.job, key=None, wish=wish(), limit_s=1.0)
    world.advance(1.0)
    late = peer.answer(number)
    assert late is not None
    assert late["kind"] == "start_pending"


@pytest.mark.requirement("C14", "C15")
def test_the_words_of_one_call_are_no_answer_to_another() -> None:
    start_only = {kind.value for kind in StartKind}
    stop_only = {kind.value for kind in StopKind}
    assert not start_only & stop_only
    for word in (*start_only, "conflict", "gone", ""):
        with pytest.raises(ProcessProtocolError):
            StopAnswer.from_dict({"kind": word, "job": "proc_1", "result": None})
    for word in (*stop_only, "conflict", "input_mismatch"):
        with pytest.raises(ProcessProtocolError):
            StartAnswer.from_dict({"kind": word, "job": "proc_1", "pid": 1, "generation": 0, "result": None})


@pytest.mark.requirement("C15")
@pytest.mark.parametrize("code", [None, "", "409", "conflict", "process_error", "INPUT_MISMATCH"])
def test_an_error_without_the_code_of_a_conflict_is_no_conflict(code: str | None) -> None:
    error = decode_error({"code": code, "message": "no"})
    assert isinstance(error, ProcessError)
    assert not isinstance(error, ProcessKeyConflict)
    assert isinstance(decode_error({"code": ProcessKeyConflict.code, "message": "no"}), ProcessKeyConflict)


@pytest.mark.requirement("C21")
def test_a_key_is_called_key_from_the_body_to_the_files() -> None:
    calls: list[Callable[..., Any]] = [ToolHolder.process, ToolHolder.start_process, ProcessClient.stop, Records.find]
    assert all("key" in inspect.signature(call).parameters for call in calls)
    for kind in (JobSpec, JobView):
        assert "key" in {field.name for field in dataclasses.fields(kind)}
    sources = [path for folder in remit.__path__ for path in Path(folder).rglob("*.py")]
    assert sources
    assert [path for path in sources if "idempotency_key" in path.read_text()] == []


# --- the daemon's memory ---------------------------------------------------------------------------


@pytest.mark.requirement("C20")
def test_a_key_that_only_a_stop_has_named_is_unknown_to_the_next_daemon_and_its_start_refused(world: World) -> None:
    for _ in range(2):
        answer = stop(world.peer(), key="k", tombstone=True)
        assert answer is not None
        assert answer["kind"] == "process_key_not_found"
        assert list(world.place.jobs.iterdir()) == []
        world.restart()
    peer = world.peer()
    assert peer.call("list", scope="w")["jobs"] == []
    refused = peer.answer(world.begin(peer, world.spec(key="k")))
    assert refused is not None
    assert refused["kind"] == "tombstoned"


@pytest.mark.requirement("C23")
def test_a_daemon_that_ends_says_nothing_to_those_who_wait_and_the_next_one_knows_the_start(world: World) -> None:
    """Whoever waits for a pending start hears the connection end, and asks again: never that there is none."""
    starter, stopper = world.peer(), world.peer()
    spec = world.spec(key="k")
    world.begin(starter, spec)
    number = stopper.ask("stop", scope="w", job=None, key="k", wish=wish())
    world.server.close()
    assert stopper.read() is False
    assert [message for message in stopper.got if message.get("id") == number] == []
    world.server = world.open()
    again = world.peer()
    number = again.ask("stop", scope="w", job=None, key="k", wish=wish(), limit_s=0.5)
    world.advance(1.0)
    answer = again.answer(number)
    assert answer is not None
    assert answer["kind"] in ("start_pending", "unconfirmed")
    assert answer["job"] == spec.job


@pytest.mark.requirement("A11")
def test_who_stops_watching_is_forgotten_first_and_may_say_so_twice(world: World) -> None:
    keeper = world.run()
    job = keeper.spec.job
    watcher, waiter, other = world.peer(), world.peer(), world.peer()
    watcher.ask("watch", job=job)
    for _ in range(2):
        watcher.ask("unwatch", job=job)
    waiter.ask("wait", job=job, timeout_s=None)
    number = other.ask("wait", job=job, timeout_s=None)
    waiter.socket.close()
    world.settle()
    # Only what this peer had asked for is over: nothing was told to the keeper, and others still wait.
    assert keeper.heard() == []
    keeper.ended(exit_code=2)
    answer = other.answer(number)
    assert answer is not None
    assert answer["result"]["exit_code"] == 2
    watcher.ask("unwatch", job=job)
    assert watcher.read()
    assert [message for message in watcher.got if message["op"] == "ended"] == []


@pytest.mark.requirement("C32")
def test_a_wait_that_was_given_up_changes_nothing_of_the_job(world: World) -> None:
    keeper = world.run()
    peer, other = world.peer(), world.peer()
    peer.ask("wait", job=keeper.spec.job, timeout_s=None)
    peer.socket.close()
    world.settle()
    (view,) = other.call("list")["jobs"]
    assert (view["state"], view["stopping"], view["result"]) == ("running", False, None)


@pytest.mark.requirement("C31")
def test_what_is_seen_later_never_takes_the_place_of_an_end() -> None:
    records = Records()
    spec = JobSpec(job="proc_1", scope="w", argv=("true",), output_dir="/o", key="k", generation=1)
    assert records.claim(spec, "a", now=0).record is not None
    states = [record.state for record in records]
    records.publish("proc_1", pid=7)
    states += [record.state for record in records]
    lost = JobResult(job="proc_1", outcome=JobOutcome.KEEPER_LOST)
    records.end("proc_1", lost, now=1)
    states += [record.state for record in records]
    assert states == [RecordState.PENDING, RecordState.RUNNING, RecordState.ENDED]
    late = JobResult(job="proc_1", outcome=JobOutcome.EXITED, exit_code=0)
    assert records.end("proc_1", late, now=2).result == lost
    again = records.claim(dataclasses.replace(spec, job="proc_2", generation=2), "a", now=3)
    assert again.record is not None
    assert (again.kind.value, again.record.result) == ("finished", lost)
