import json
import os
from pathlib import Path

import pytest

from remit.core import Cause, CauseKind
from remit.core.errors import InvalidArgument, ProcessProtocolError
from remit.processes.jobs import (
    JobOutcome,
    JobPhase,
    JobResult,
    JobSpec,
    JobState,
    StopCause,
    boot_id,
    fingerprint,
    make_durable,
    read_record,
    write_record,
)
from remit.processes.table import ProcessIdentity

SPEC = JobSpec(
    job="proc_1", scope="ws", argv=("sh", "-c", "true"), output_dir="/tmp/out", key="k/1 %é", timeout_s=1.5, cwd="/"
)
STATE = JobState(
    job="proc_1",
    phase=JobPhase.RUNNING,
    boot="b",
    token="t",
    keeper=ProcessIdentity(10, 100.0),
    root=ProcessIdentity(11, 101.0),
    left=(4, 5),
)
RESULT = JobResult(
    job="proc_1",
    outcome=JobOutcome.CANCELLED,
    signal=9,
    cause=Cause(CauseKind.USER_INTERRUPT, origin="turn_1").to_dict(),
    signalled=(11, 12),
    escalated=(12,),
)


@pytest.mark.parametrize("record", [SPEC, STATE, RESULT], ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_as_it_was_written(record: JobSpec | JobState | JobResult, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, record)
    write_record(path, record, durable=True)
    make_durable(path)
    assert read_record(path, type(record)) == record
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_record_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "state.json", JobState) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"v":99}', '{"v":1}', '{"v":1,"job":"p","outcome":"abducted"}', "\0" * 50]
)
def test_a_record_that_does_not_hold_is_refused_and_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ProcessProtocolError, match=r"result\.json"):
        read_record(path, JobResult)


def test_fields_that_a_later_build_added_are_passed_over() -> None:
    assert JobResult.from_dict({**RESULT.to_dict(), "mood": "good"}) == RESULT


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"state\.json"):
        write_record(path, STATE)
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.requirement("C16")
def test_a_fingerprint_holds_over_attempts_and_tells_other_work_apart() -> None:
    env = {"PATH": "/bin", "REMIT_RUN": "run_1", "TRACEPARENT": "00-1"}
    same = fingerprint(SPEC, env=env)
    assert fingerprint(SPEC, env={"PATH": "/bin", "REMIT_RUN": "run_2", "_": "x"}) == same
    assert fingerprint(SPEC, env={**env, "PATH": "/sbin"}) != same
    assert fingerprint(SPEC, env=env, stdin=b"x") != same
    other = {**SPEC.to_dict(), "argv": ["sh", "-ctrue"]}
    assert fingerprint(JobSpec.from_dict(other), env=env) != same


def test_neither_environment_nor_input_is_in_a_spec() -> None:
    assert not {"env", "environ", "environment", "stdin_data"} & set(json.loads(json.dumps(SPEC.to_dict())))


@pytest.mark.parametrize(
    "change",
    [
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"cwd": "here"},
        {"output_dir": "here"},
        {"stdin": "tty"},
        {"on_timeout": "shrug"},
        {"timeout_s": -1.0},
        {"grace_s": float("nan")},
        {"output_cap": 1},
        {"umask": 0o1000},
    ],
    ids=str,
)
def test_what_can_never_run_is_refused(change: dict[str, object]) -> None:
    SPEC.check()
    with pytest.raises(InvalidArgument):
        JobSpec.from_dict({**SPEC.to_dict(), **change}).check()


def test_every_cause_of_a_stop_has_an_outcome() -> None:
    assert {cause: cause.outcome for cause in StopCause} == {
        StopCause.CANCELLED: JobOutcome.CANCELLED,
        StopCause.TIMED_OUT: JobOutcome.TIMED_OUT,
        StopCause.SUPERVISOR_LOST: JobOutcome.CANCELLED,
        StopCause.OUTPUT_LIMIT: JobOutcome.OUTPUT_LIMIT,
    }


def test_a_boot_has_one_name() -> None:
    assert boot_id() == boot_id() != ""
