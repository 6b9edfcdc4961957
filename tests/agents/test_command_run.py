import asyncio
import gc
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil
import pytest

from remit.core import CancelSignal, Cause, CauseKind, TurnCancelled
from remit.core.errors import CommandNotStarted, InvalidArgument
from remit.processes import CommandOutcome, CommandResult, ProcessIdentity, run_command, run_command_blocking
from remit.testing import ManualClock, await_until, wait_until

CAUSE = Cause(CauseKind.USER_INTERRUPT, origin="turn_1", reason="enough")


def _run(argv: list[str], output_dir: Path, **options: Any) -> CommandResult:
    """Run a command in a loop of its own."""
    return asyncio.run(_start(argv, output_dir, **options))


async def _start(argv: list[str], output_dir: Path, **options: Any) -> CommandResult:
    options = {"signal": CancelSignal(), "mark": "run_test", **options}
    return await run_command(argv, output_dir=output_dir, **options)


def _sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def _has_ended(pid: int) -> bool:
    """Tell whether a process is gone or a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _says(path: Path) -> Callable[[], bool]:
    """Return a predicate: the file has some text."""
    return lambda: path.exists() and path.stat().st_size > 0


def test_a_command_ends_with_its_status_and_both_outputs(tmp_path: Path) -> None:
    result = _run(_sh("echo out; echo err >&2; exit 3"), tmp_path / "out")
    assert (result.outcome, result.exit_code, result.signal, result.timed_out) == ("exited", 3, None, False)
    assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")
    assert result.argv == tuple(_sh("echo out; echo err >&2; exit 3"))
    assert (result.leftovers_stopped, result.survivors, result.denied) == ((), (), ())
    assert not result.escalated
    assert not result.succeeded
    assert result.duration_s > 0


def test_status_zero_is_success(tmp_path: Path) -> None:
    assert _run(["true"], tmp_path).succeeded


def test_a_program_ended_by_a_signal_of_its_own_has_no_exit_code(tmp_path: Path) -> None:
    result = _run(_sh("kill -KILL $$"), tmp_path)
    assert (result.outcome, result.exit_code, result.signal) == ("exited", None, SIGKILL)


@pytest.mark.requirement("E20")
def test_stdin_is_null_unless_given(tmp_path: Path) -> None:
    assert _run(["cat"], tmp_path / "none").stdout.text == ""
    given = b"x" * 300_000 + b"\nlast\n"
    result = _run(["tail", "-n", "1"], tmp_path / "given", stdin=given)
    assert result.stdout.text == "last\n"
    assert stat.S_IMODE((tmp_path / "given" / "stdin").stat().st_mode) == 0o600


def test_output_files_are_private_and_kept(tmp_path: Path) -> None:
    result = _run(["echo", "hi"], tmp_path / "a" / "b")
    assert result.stdout.path == tmp_path / "a" / "b" / "stdout"
    assert result.stdout.path.read_text() == "hi\n"
    assert stat.S_IMODE(result.stdout.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_second_attempt_appends_to_the_files_and_shows_its_own_output(tmp_path: Path) -> None:
    _run(["echo", "first"], tmp_path)
    assert _run(["echo", "second"], tmp_path).stdout.text == "second\n"
    assert (tmp_path / "stdout").read_text() == "first\nsecond\n"


def test_working_directory_and_environment_are_what_was_asked_for(tmp_path: Path) -> None:
    script = _sh("pwd; echo $A-$REMIT_RUN-$HOME")
    result = _run(script, tmp_path / "out", cwd=tmp_path, env={"A": "1", "PATH": os.defpath}, mark="run_7")
    assert result.stdout.text == f"{tmp_path.resolve()}\n1-run_7-\n"


def test_a_command_inside_a_command_carries_both_marks(tmp_path: Path) -> None:
    result = _run(_sh("echo $REMIT_PROCESS"), tmp_path, env={"REMIT_PROCESS": "outer", "PATH": os.defpath})
    outer, run_id, token = result.stdout.text.strip().split("/")
    assert (outer, run_id) == ("outer", "run_test")
    assert token


@pytest.mark.requirement("E3")
def test_a_program_leads_its_own_session_and_inherits_no_descriptors(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        code = "import os; print(os.getpid() == os.getpgrp() == os.getsid(0), sorted(os.listdir('/proc/self/fd')))"
        result = _run([sys.executable, "-c", code], tmp_path)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert result.stdout.text == "True ['0', '1', '2', '3']\n"  # 3 is the listing itself


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda path: None, "no such program"),
        (lambda path: path.write_text("x"), "may not be executed"),
        (lambda path: (path.write_text("x"), path.chmod(0o755)), "no executable format"),
    ],
)
def test_a_program_that_cannot_be_executed_is_named_with_what_to_do(
    tmp_path: Path, prepare: Callable[[Path], object], what: str
) -> None:
    program = tmp_path / "tool"
    prepare(program)
    with pytest.raises(CommandNotStarted, match=rf"cannot start '{program}'.*{what}") as error:
        _run([str(program)], tmp_path / "out")
    assert pickle.loads(pickle.dumps(error.value)).program == str(program)


def test_a_missing_working_directory_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(CommandNotStarted, match=r"working directory .* does not exist"):
        _run(["true"], tmp_path / "out", cwd=tmp_path / "none")


def test_an_unusable_output_directory_is_an_error_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandNotStarted, match="output directory is not usable"):
        _run(["touch", str(tmp_path / "witness")], tmp_path / "file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stdout").symlink_to(tmp_path / "file")
    with pytest.raises(CommandNotStarted, match="output directory is not usable"):
        _run(["touch", str(tmp_path / "witness")], tmp_path / "out")
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"grace_s": -1},
        {"grace_s": float("nan")},
        {"mark": ""},
        {"mark": "a/b"},
    ],
)
def test_arguments_out_of_range_are_refused_before_the_start(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        _run(["touch", str(tmp_path / "witness")], tmp_path / "out", **options)
    assert not (tmp_path / "witness").exists()


def test_an_argument_with_a_nul_or_an_empty_command_is_refused(tmp_path: Path) -> None:
    for argv in (["echo", "a\0b"], [], [""]):
        with pytest.raises(InvalidArgument):
            _run(argv, tmp_path)


@pytest.mark.requirement("E6")
@pytest.mark.parametrize("which", ["signal", "kill"])
def test_nothing_starts_under_a_set_signal(tmp_path: Path, which: str) -> None:
    stop = CancelSignal(name="run_1")
    stop.set(CAUSE)
    with pytest.raises(TurnCancelled) as error:
        _run(["touch", str(tmp_path / "witness")], tmp_path / "out", **{which: stop})
    assert error.value.cause is CAUSE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("A13", "B16", "E14")
def test_a_cancelled_command_is_returned_with_cause_and_true_status(tmp_path: Path) -> None:
    stop = CancelSignal()
    result = _run(_sh("exec sleep 60"), tmp_path, signal=stop, on_started=lambda _: stop.set(CAUSE))
    assert (result.outcome, result.cancelled, result.timed_out) == ("cancelled", True, False)
    assert result.cause is CAUSE
    assert (result.exit_code, result.signal) == (None, SIGTERM)
    assert _has_ended(result.pid)


@pytest.mark.requirement("E14")
def test_a_cancelled_command_that_exits_by_itself_is_still_cancelled(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        stop = CancelSignal()
        script = _sh("trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done")
        task = asyncio.create_task(_start(script, tmp_path, signal=stop))
        await await_until(_says(tmp_path / "stdout"))
        stop.set(CAUSE)
        return await task

    result = asyncio.run(scenario())
    assert (result.outcome, result.exit_code, result.succeeded) == ("cancelled", 0, False)


@pytest.mark.parametrize("kind", [CauseKind.WORKER_MOVED, CauseKind.ATTEMPT_TIMEOUT])
def test_causes_that_leave_processes_to_a_next_attempt_stop_these_as_well(tmp_path: Path, kind: CauseKind) -> None:
    stop = CancelSignal()
    result = _run(["sleep", "60"], tmp_path, signal=stop, on_started=lambda _: stop.set(Cause(kind, origin="run_1")))
    assert result.cancelled
    assert _has_ended(result.pid)


@pytest.mark.requirement("B16")
def test_a_command_at_its_deadline_is_timed_out_and_not_cancelled(tmp_path: Path) -> None:
    result = _run(["sleep", "60"], tmp_path, timeout_s=0.01)
    assert (result.outcome, result.timed_out, result.cancelled, result.cause) == ("timed_out", True, False, None)
    assert _has_ended(result.pid)


@pytest.mark.requirement("B17")
def test_a_cancel_before_the_deadline_is_the_one_reason(tmp_path: Path) -> None:
    clock, stop = ManualClock(), CancelSignal()

    def race(_: ProcessIdentity) -> None:
        stop.set(CAUSE)
        clock.advance(60)

    result = _run(["sleep", "60"], tmp_path, signal=stop, clock=clock, timeout_s=30, on_started=race)
    assert (result.outcome, result.cause) == ("cancelled", CAUSE)


@pytest.mark.requirement("B17")
def test_a_deadline_before_the_cancel_is_the_one_reason(tmp_path: Path) -> None:
    clock, stop = ManualClock(), CancelSignal()

    def race(_: ProcessIdentity) -> None:
        clock.advance(60)
        stop.set(CAUSE)

    result = _run(["sleep", "60"], tmp_path, signal=stop, clock=clock, timeout_s=30, on_started=race)
    assert (result.outcome, result.cause) == ("timed_out", None)


def test_a_deadline_is_noticed_when_the_clock_jumps(tmp_path: Path) -> None:
    clock = ManualClock()
    result = _run(["sleep", "60"], tmp_path, clock=clock, timeout_s=30, on_started=lambda _: clock.advance(31))
    assert result.timed_out


@pytest.mark.requirement("A10")
def test_a_cancel_that_finds_the_program_ended_changes_nothing(tmp_path: Path) -> None:
    stop = CancelSignal()

    def ended_then_cancelled(name: str) -> None:
        if name == "spawned":
            (child,) = psutil.Process().children()
            wait_until(lambda: _has_ended(child.pid))
            stop.set(CAUSE)

    result = _run(_sh("exit 7"), tmp_path, signal=stop, failpoint=ended_then_cancelled)
    assert (result.outcome, result.exit_code, result.cause) == ("exited", 7, None)


@pytest.mark.requirement("E7")
def test_a_cancel_between_start_and_registration_reaches_the_program(tmp_path: Path) -> None:
    stop = CancelSignal()
    reached: list[str] = []

    def cancel(name: str) -> None:
        reached.append(name)
        if name == "spawned":
            stop.set(CAUSE)

    result = _run(["sleep", "60"], tmp_path, signal=stop, failpoint=cancel)
    assert reached == ["spawned", "stopping"]
    assert result.cancelled
    assert _has_ended(result.pid)


@pytest.mark.requirement("E5")
def test_a_cancel_returns_while_the_program_still_has_its_grace(tmp_path: Path) -> None:
    async def scenario() -> tuple[bool, CommandResult]:
        stop, kill = CancelSignal(), CancelSignal()
        started: list[ProcessIdentity] = []
        task = asyncio.create_task(
            _start(
                _sh("trap '' TERM; echo ready; while :; do sleep 60; done"),
                tmp_path,
                signal=stop,
                kill=kill,
                grace_s=60,
                on_started=started.append,
            )
        )
        await await_until(_says(tmp_path / "stdout"))
        stop.set(CAUSE)
        was_alive = not _has_ended(started[0].pid)
        kill.set(Cause(CauseKind.SHUTDOWN, origin="turn_1"))
        return was_alive, await task

    was_alive, result = asyncio.run(scenario())
    assert was_alive
    # The second, stronger stop ends the minute of grace; the first cause stands.
    assert (result.outcome, result.cause, result.escalated, result.signal) == ("cancelled", CAUSE, True, SIGKILL)


def test_kill_alone_stops_without_grace(tmp_path: Path) -> None:
    kill = CancelSignal()
    result = _run(["sleep", "60"], tmp_path, kill=kill, grace_s=60, on_started=lambda _: kill.set(CAUSE))
    assert (result.outcome, result.cause, result.signal) == ("cancelled", CAUSE, SIGKILL)


@pytest.mark.requirement("E5")
def test_a_stop_goes_on_while_the_event_loop_is_blocked(tmp_path: Path) -> None:
    stop = CancelSignal()

    def block_until_dead(identity: ProcessIdentity) -> None:
        setter = threading.Thread(target=stop.set, args=(CAUSE,))
        setter.start()
        wait_until(lambda: _has_ended(identity.pid), message="the stop waited for the loop")
        setter.join()

    assert _run(["sleep", "60"], tmp_path, signal=stop, on_started=block_until_dead).cancelled


@pytest.mark.field_report("F12")
def test_a_cancelled_task_stops_the_tree_and_reports_before_it_unwinds(tmp_path: Path) -> None:
    reported: list[CommandResult] = []

    async def scenario() -> None:
        script = _sh("setsid sleep 60 & echo partial; wait")
        task = asyncio.create_task(_start(script, tmp_path, on_finished=reported.append))
        await await_until(_says(tmp_path / "stdout"))
        task.cancel("not ours")
        with pytest.raises(asyncio.CancelledError, match="not ours"):
            await task

    asyncio.run(scenario())
    (result,) = reported
    assert (result.outcome, result.cause, result.stdout.text) == ("cancelled", None, "partial\n")
    assert result.survivors == ()
    assert all(_has_ended(pid) for pid in (result.pid, *result.leftovers_stopped))


def test_a_task_cancelled_again_and_again_leaves_only_when_nothing_is_left(tmp_path: Path) -> None:
    reported: list[CommandResult] = []

    async def scenario() -> None:
        script = _sh("trap '' TERM; echo ready; while :; do sleep 60; done")
        task = asyncio.create_task(_start(script, tmp_path, grace_s=0.1, on_finished=reported.append))
        await await_until(_says(tmp_path / "stdout"))
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.001)  # a scope that delivers again and again does so at about this pace
        assert task.cancelled()

    asyncio.run(scenario())
    assert reported[0].escalated
    assert _has_ended(reported[0].pid)


def test_a_callback_that_fails_leaves_no_program_behind(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail(identity: ProcessIdentity) -> None:
        pids.append(identity.pid)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        _run(["sleep", "60"], tmp_path, on_started=fail)
    assert _has_ended(pids[0])


def test_an_error_of_the_report_is_raised_and_leaves_no_program_behind(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail(result: CommandResult) -> None:
        pids.append(result.pid)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        _run(["true"], tmp_path, on_finished=fail)
    assert _has_ended(pids[0])


@pytest.mark.field_report("F13")
def test_what_an_ended_program_leaves_running_is_stopped_and_reported(tmp_path: Path) -> None:
    result = _run(_sh("sleep 60 & setsid sleep 60 & exit 3"), tmp_path)
    assert (result.outcome, result.exit_code) == ("exited", 3)
    assert len(result.leftovers_stopped) >= 1
    assert result.survivors == ()
    assert all(_has_ended(pid) for pid in result.leftovers_stopped)


def test_two_commands_of_one_run_do_not_touch_each_other(tmp_path: Path) -> None:
    async def scenario() -> tuple[bool, CommandResult]:
        stop = CancelSignal()
        started: list[ProcessIdentity] = []
        task = asyncio.create_task(
            _start(_sh("echo ready; exec sleep 60"), tmp_path / "a", signal=stop, on_started=started.append)
        )
        await await_until(_says(tmp_path / "a" / "stdout"))
        await _start(_sh("sleep 60 &"), tmp_path / "b")
        was_alive = not _has_ended(started[0].pid)
        stop.set(CAUSE)
        return was_alive, await task

    was_alive, result = asyncio.run(scenario())
    assert was_alive
    assert result.cancelled


def test_a_child_that_other_code_waited_for_has_an_unknown_status(tmp_path: Path) -> None:
    def steal(name: str) -> None:
        if name == "stopping":
            (child,) = psutil.Process().children()
            os.waitpid(child.pid, 0)

    result = _run(_sh("exit 5"), tmp_path, failpoint=steal)
    assert (result.outcome, result.exit_code, result.signal, result.succeeded) == ("exited", None, None, False)


def test_an_exit_is_noticed_without_process_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert _run(_sh("exit 4"), tmp_path).exit_code == 4
    stop = CancelSignal()
    assert _run(["sleep", "60"], tmp_path, signal=stop, on_started=lambda _: stop.set(CAUSE)).cancelled


def test_a_stop_without_a_thread_to_run_it_is_done_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    stop = CancelSignal()
    assert _run(["sleep", "60"], tmp_path, signal=stop, on_started=lambda _: stop.set(CAUSE)).cancelled


def test_a_plain_thread_runs_commands_and_is_stopped_from_outside(tmp_path: Path) -> None:
    stop = CancelSignal()
    results: list[CommandResult] = []

    def work() -> None:
        results.append(
            run_command_blocking(_sh("echo ready; exec sleep 60"), signal=stop, output_dir=tmp_path, mark="run_1")
        )

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(_says(tmp_path / "stdout"))
    stop.set(CAUSE)
    thread.join()
    assert results[0].outcome is CommandOutcome.CANCELLED


@pytest.mark.field_report("F17")
def test_two_hundred_commands_leave_no_thread_descriptor_or_callback(tmp_path: Path) -> None:
    async def scenario() -> None:
        stop = CancelSignal()
        started: list[ProcessIdentity] = []
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(25):
            await asyncio.gather(
                *(_start(["true"], tmp_path, signal=stop, on_started=started.append) for _ in range(8))
            )
        assert len(started) == 200
        # A thread that has handed over its result may need a moment to end.
        await await_until(lambda: threading.active_count() <= threads)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item).__name__ in ("_Run", "Child")]
        assert all(_has_ended(identity.pid) for identity in started)

    asyncio.run(scenario())
