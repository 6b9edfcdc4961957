"""Programs that bodies start: how they end, and what every kind of cancel does to them."""

import asyncio
import os
import pickle
import stat
import sys
import threading
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from remit.agents.tooldesk import ToolDesk
from remit.core import Cause, CauseKind, TurnCancelled
from remit.core.errors import CommandNotStarted, InvalidArgument, NotFound, ProcessKeyConflict
from remit.processes import CommandOutcome, CommandResult, ProcessClient
from remit.testing import await_until, wait_until
from tests.agents.tool_world import CAUSE, Holder, has_ended, holding, run_tool, says, sh

FOREVER = "while :; do sleep 60; done"
MOVES = [CauseKind.WORKER_MOVED, CauseKind.ATTEMPT_TIMEOUT]


def _cancelled_when(folder: Path, argv: list[str], text: str, **options: Any) -> CommandResult:
    """Run a program, set its run's signal once it has printed a text, and return how the program ended."""

    async def scenario() -> CommandResult:
        async with holding(folder) as holder:
            task = asyncio.create_task(holder.cut_short(argv, **options))
            await await_until(says(holder.folder / "process_1" / "stdout", text), message="it never got ready")
            holder.signal.set(CAUSE)
            return await task

    return asyncio.run(scenario())


# -- ending by itself -------------------------------------------------------------------


def test_a_program_ends_with_its_status_and_both_outputs(tmp_path: Path) -> None:
    argv = sh("echo out; echo err >&2; exit 3")
    result = run_tool(argv, tmp_path)
    assert (result.outcome, result.exit_code, result.signal, result.timed_out) == ("exited", 3, None, False)
    assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")
    assert result.argv == tuple(argv)
    assert (result.leftovers_stopped, result.survivors, result.denied) == ((), (), ())
    assert (result.escalated, result.succeeded, result.truncated) == (False, False, False)
    assert result.duration_s > 0
    assert result.handle.startswith("proc_")


def test_status_zero_is_success(tmp_path: Path) -> None:
    assert run_tool(["true"], tmp_path).succeeded


def test_a_program_ended_by_a_signal_of_its_own_has_no_exit_code(tmp_path: Path) -> None:
    result = run_tool(sh("kill -KILL $$"), tmp_path)
    assert (result.outcome, result.exit_code, result.signal) == ("exited", None, SIGKILL)


@pytest.mark.requirement("E20")
def test_stdin_is_null_unless_given(tmp_path: Path) -> None:
    assert run_tool(["cat"], tmp_path).stdout.text == ""
    given = b"x" * 300_000 + b"\nlast\n"
    assert run_tool(["tail", "-n", "1"], tmp_path / "given", stdin=given).stdout.text == "last\n"
    assert run_tool(["cat"], tmp_path / "text", stdin="pipe").stdout.text == "pipe"


def test_input_that_nobody_reads_changes_nothing(tmp_path: Path) -> None:
    result = run_tool(sh("exec <&-; echo done"), tmp_path, stdin=b"x" * 300_000)
    assert (result.outcome, result.exit_code, result.stdout.text) == ("exited", 0, "done\n")


def test_output_files_are_private_and_kept(tmp_path: Path) -> None:
    result = run_tool(["echo", "hi"], tmp_path)
    assert result.stdout.path == tmp_path / "out" / "process_1" / "stdout"
    assert result.stdout.path.read_text() == "hi\n"
    assert stat.S_IMODE(result.stdout.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(result.stdout.path.parent.stat().st_mode) == 0o700


def test_working_directory_and_environment_are_what_was_asked_for(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, str]:
        async with holding(tmp_path) as holder:
            result = await holder.process(sh("pwd; echo $A-$REMIT_RUN"), cwd=tmp_path, env={"A": "1"})
            return result.stdout.text, holder.run_id

    text, run_id = asyncio.run(scenario())
    assert text == f"{tmp_path.resolve()}\n1-{run_id}\n"


def test_files_of_a_program_get_the_rights_that_its_caller_would_give_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run_tool(["touch", "made"], tmp_path, cwd=tmp_path)
        assert run_tool(sh("umask"), tmp_path / "other").stdout.text.strip() == "0027"
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.requirement("E3")
def test_a_program_leads_its_own_session_and_inherits_no_descriptors(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        code = "import os; print(os.getpid() == os.getpgrp() == os.getsid(0), sorted(os.listdir('/proc/self/fd')))"
        result = run_tool([sys.executable, "-c", code], tmp_path)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert result.stdout.text == "True ['0', '1', '2', '3']\n"  # 3 is the listing itself


@pytest.mark.field_report("F13")
def test_what_an_ended_program_leaves_running_is_stopped_and_reported(tmp_path: Path) -> None:
    result = run_tool(sh("sleep 60 & setsid sleep 60 & exit 3"), tmp_path)
    assert (result.outcome, result.exit_code) == ("exited", 3)
    assert len(result.leftovers_stopped) >= 1
    assert result.survivors == ()
    assert all(has_ended(pid) for pid in result.leftovers_stopped)


@pytest.mark.requirement("C35", "E20")
def test_much_output_is_shown_in_part(tmp_path: Path) -> None:
    result = run_tool(sh("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"), tmp_path)
    assert result.truncated
    assert result.stdout.total_bytes == result.stdout.path.stat().st_size > 200_000
    assert result.stdout.text.startswith("line 0\n")
    assert result.stdout.text.endswith("line 19999\n")


def test_output_that_is_no_text_is_shown_with_replacements(tmp_path: Path) -> None:
    assert run_tool(sh(r"printf 'a\377b\303\251'"), tmp_path).stdout.text == "a\N{REPLACEMENT CHARACTER}bé"


# -- what cannot be started ------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, 0o644, 0o755], ids=["missing", "not executable", "no program"])
def test_a_program_that_cannot_be_executed_is_named(tmp_path: Path, mode: int | None) -> None:
    program = tmp_path / "tool"
    if mode is not None:
        program.write_text("x")
        program.chmod(mode)
    with pytest.raises(CommandNotStarted, match=str(program)) as error:
        run_tool([str(program)], tmp_path)
    assert pickle.loads(pickle.dumps(error.value)).program == str(program)


def test_a_missing_working_directory_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(CommandNotStarted, match="directory") as error:
        run_tool(["true"], tmp_path, cwd=tmp_path / "none")
    assert str(tmp_path / "none") in str(error.value)


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["touch", "witness"], {"timeout_s": -1}),
        (["touch", "witness"], {"timeout_s": float("inf")}),
        (["touch", "witness"], {"grace_s": -1}),
        (["touch", "witness"], {"grace_s": float("nan")}),
        (["touch", "witness"], {"on_timeout": "explode"}),
        ([], {}),
        ([""], {}),
        ("touch witness", {}),
        (["touch", "a\0b"], {}),
    ],
)
def test_arguments_out_of_range_are_refused_before_the_start(
    tmp_path: Path, argv: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        run_tool(argv, tmp_path, cwd=tmp_path, **options)
    assert not (tmp_path / "witness").exists()


def test_an_environment_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandNotStarted):
        run_tool(["true"], tmp_path, env={"BIG": "x" * 5_000_000})


# -- cancel ----------------------------------------------------------------------------


@pytest.mark.requirement("E6")
def test_nothing_starts_under_a_set_signal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            holder.signal.set(CAUSE)
            with pytest.raises(TurnCancelled) as error:
                await holder.process(["touch", str(tmp_path / "witness")])
            assert error.value.cause is CAUSE
            assert holder.started == []

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("A13", "B16", "E14")
def test_a_cancelled_program_ends_with_cause_and_true_status(tmp_path: Path) -> None:
    result = _cancelled_when(tmp_path, sh("echo ready; exec sleep 60"), "ready")
    assert (result.outcome, result.cancelled, result.timed_out) == ("cancelled", True, False)
    assert result.cause == CAUSE
    assert (result.exit_code, result.signal) == (None, SIGTERM)
    assert has_ended(result.pid)


@pytest.mark.requirement("E14")
def test_a_cancelled_program_that_exits_by_itself_is_still_cancelled(tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    result = _cancelled_when(tmp_path, sh(script), "ready", grace_s=30)
    assert (result.outcome, result.exit_code, result.succeeded) == ("cancelled", 0, False)


@pytest.mark.requirement("B16")
def test_a_program_at_its_deadline_is_timed_out_and_not_cancelled(tmp_path: Path) -> None:
    result = run_tool(["sleep", "60"], tmp_path, timeout_s=0.01)
    assert (result.outcome, result.timed_out, result.cancelled, result.cause) == ("timed_out", True, False, None)
    assert has_ended(result.pid)


@pytest.mark.requirement("C29")
@pytest.mark.requirement("A10")
def test_a_cancel_that_finds_the_program_ended_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(sh("exit 7"))
            await await_until(lambda: has_ended(tool.pid))
            holder.signal.set(CAUSE)
            await tool.settle()
            return tool.result()

    result = asyncio.run(scenario())
    assert (result.outcome, result.exit_code, result.cause) == ("exited", 7, None)


@pytest.mark.requirement("A12")
@pytest.mark.requirement("C5", "E7")
@pytest.mark.parametrize("point", ["start_sending", "start_sent", "start_answered"])
def test_a_cancel_at_any_point_of_a_start_leaves_nothing_running(tmp_path: Path, point: str) -> None:
    """Armed before the start is sent: by key while its answer is not there, by id afterwards."""

    async def scenario() -> None:
        holders: list[Holder] = []

        def cancel(name: str) -> None:
            if name == point:
                holders[0].signal.set(CAUSE)

        async with holding(tmp_path, client=ProcessClient(failpoint=cancel)) as holder:
            holders.append(holder)
            with pytest.raises(TurnCancelled):
                await holder.process(sh("echo $$ >> pids; exec sleep 60"), cwd=tmp_path)
            views = await asyncio.to_thread(holder.desk.client.list, scope=holder.desk.scope)
            assert [view for view in views if view.state != "ended"] == []

    asyncio.run(scenario())
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert all(has_ended(int(pid)) for pid in pids)


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C5", "C6")
def test_a_start_whose_answer_is_lost_is_stopped_by_its_key(tmp_path: Path) -> None:
    """The program runs, this side never hears of it, and the cancel still ends it."""

    class LostAnswer(Exception):
        pass

    async def scenario() -> None:
        holders: list[Holder] = []

        def lose(name: str) -> None:
            if name == "start_answered":
                wait_until(says(tmp_path / "pid"))
                holders[0].signal.set(CAUSE)
                raise LostAnswer

        async with holding(tmp_path, client=ProcessClient(failpoint=lose)) as holder:
            holders.append(holder)
            with pytest.raises((LostAnswer, TurnCancelled)):
                await holder.process(sh("echo $$ > pid; exec sleep 60"), cwd=tmp_path)
            await await_until(lambda: has_ended(int((tmp_path / "pid").read_text())), message="it was never stopped")

    asyncio.run(scenario())


@pytest.mark.requirement("E15")
@pytest.mark.requirement("E5")
def test_a_cancel_returns_while_the_program_still_has_its_grace(tmp_path: Path) -> None:
    async def scenario() -> tuple[bool, CommandResult]:
        async with holding(tmp_path) as holder:
            script = f"trap '' TERM; echo ready; {FOREVER}"
            task = asyncio.create_task(holder.cut_short(sh(script), grace_s=60))
            await await_until(says(holder.folder / "process_1" / "stdout"))
            await await_until(lambda: bool(holder.started))
            holder.signal.set(CAUSE)
            was_alive = not has_ended(holder.started[0].pid)
            holder.kill.set(Cause(CauseKind.SHUTDOWN, origin="turn_1"))
            return was_alive, await task

    was_alive, result = asyncio.run(scenario())
    assert was_alive
    # The second, stronger stop ends the minute of grace; the first cause stands.
    assert (result.outcome, result.cause, result.escalated, result.signal) == ("cancelled", CAUSE, True, SIGKILL)


@pytest.mark.requirement("E5")
def test_a_stop_goes_on_while_the_event_loop_is_blocked(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(["sleep", "60"])
            setter = threading.Thread(target=holder.signal.set, args=(CAUSE,))
            setter.start()
            wait_until(lambda: has_ended(tool.pid), message="the stop waited for the loop")
            setter.join()
            await tool.settle()
            return tool.result()

    assert asyncio.run(scenario()).cancelled


@pytest.mark.field_report("F12")
def test_a_cancelled_task_stops_the_tree_and_reports_before_it_unwinds(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            task = asyncio.create_task(holder.process(sh("setsid sleep 60 & echo partial; wait")))
            await await_until(says(holder.folder / "process_1" / "stdout"))
            task.cancel("not ours")
            with pytest.raises(asyncio.CancelledError, match="not ours"):
                await task
            (ended,) = holder.ended
            return ended[0].result()

    result = asyncio.run(scenario())
    assert (result.outcome, result.cause, result.stdout.text) == ("cancelled", None, "partial\n")
    assert result.survivors == ()
    assert all(has_ended(pid) for pid in (result.pid, *result.leftovers_stopped))


def test_a_task_cancelled_again_and_again_leaves_only_when_nothing_is_left(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            task = asyncio.create_task(holder.process(sh(f"trap '' TERM; echo ready; {FOREVER}"), grace_s=0.1))
            await await_until(says(holder.folder / "process_1" / "stdout"))
            while not task.done():
                task.cancel()
                await asyncio.sleep(0.001)  # a scope that delivers again and again does so at about this pace
            assert task.cancelled()
            return holder.ended[0][0].result()

    result = asyncio.run(scenario())
    assert result.escalated
    assert has_ended(result.pid)


def test_many_programs_of_one_run_are_stopped_together(tmp_path: Path) -> None:
    async def scenario() -> list[CommandResult]:
        async with holding(tmp_path) as holder:
            tools = [await holder.start_process(sh("sleep 60 & wait")) for _ in range(10)]
            holder.signal.set(CAUSE)
            await asyncio.gather(*(tool.settle() for tool in tools))
            return [tool.result() for tool in tools]

    results = asyncio.run(scenario())
    assert [result.outcome for result in results] == ["cancelled"] * 10
    assert all(has_ended(result.pid) and not result.survivors for result in results)


# -- who goes on ------------------------------------------------------------------------


@pytest.mark.requirement("C22")
@pytest.mark.requirement("C2", "C3")
@pytest.mark.parametrize("kind", MOVES)
def test_a_moved_attempt_leaves_its_program_to_the_next_one(tmp_path: Path, kind: CauseKind) -> None:
    """One line in the program's own log: it was started once, and the second attempt has its exit code."""
    script = sh("echo started >> log; while [ ! -e go ]; do sleep 0.01; done; exit 5")

    async def scenario() -> CommandResult:
        async with holding(tmp_path) as first:
            task = asyncio.create_task(_until_cancelled(first, script, tmp_path))
            await await_until(says(tmp_path / "log"))
            first.signal.set(Cause(kind, origin=first.run_id))
            await task
            assert not has_ended(first.started[0].pid)
            second = Holder(tmp_path / "out", desk=first.desk, run_id=first.run_id, attempt=2, lineage=1)
            (tmp_path / "go").touch()
            result = await second.process(script, cwd=tmp_path)
            assert second.started[0].attached
            return result

    result = asyncio.run(scenario())
    assert (result.outcome, result.exit_code) == ("exited", 5)
    assert (tmp_path / "log").read_text() == "started\n"


async def _until_cancelled(holder: Holder, argv: list[str], cwd: Path) -> None:
    with pytest.raises(TurnCancelled):
        await holder.process(argv, cwd=cwd)


def test_an_attempt_after_a_failure_starts_its_program_anew(tmp_path: Path) -> None:
    script = sh("echo started >> log; exit 1")

    async def scenario() -> None:
        async with holding(tmp_path) as first:
            await first.process(script, cwd=tmp_path)
            second = Holder(tmp_path / "out", desk=first.desk, run_id=first.run_id, attempt=2, lineage=2)
            await second.process(script, cwd=tmp_path)

    asyncio.run(scenario())
    assert (tmp_path / "log").read_text() == "started\nstarted\n"


@pytest.mark.requirement("C16")
def test_a_key_starts_once_and_refuses_another_command(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            key = "deploy/%2e .. ?#é"
            first = await holder.process(sh("echo x >> log; exit 3"), cwd=tmp_path, key=key)
            again = await holder.process(sh("echo x >> log; exit 3"), cwd=tmp_path, key=key)
            assert (first.exit_code, again.exit_code, again.handle) == (3, 3, first.handle)
            with pytest.raises(ProcessKeyConflict):
                await holder.process(sh("echo y >> log"), cwd=tmp_path, key=key)

    asyncio.run(scenario())
    assert (tmp_path / "log").read_text() == "x\n"


@pytest.mark.requirement("B29", "C22")
@pytest.mark.requirement("C3")
def test_a_background_program_is_spared_and_stopped_by_its_handle_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(["sleep", "600"], background=True)
            holder.signal.set(CAUSE)
            await tool.settle()
            assert not has_ended(tool.pid)
            assert [view.job for view in await holder.processes()] == [tool.handle]
            stranger = Holder(tmp_path / "out", desk=holder.desk)
            assert await stranger.processes() == []
            with pytest.raises(NotFound, match="has started no process"):
                await stranger.stop_process(tool.handle)
            parent = Holder(tmp_path / "out", desk=holder.desk, run_id="turn_1")
            answer = await parent.stop_process(tool.handle)
            assert answer.is_proven_gone
            assert has_ended(tool.pid)

    asyncio.run(scenario())


@pytest.mark.requirement("C30")
def test_a_program_past_its_time_may_go_on_in_the_background(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            result = await holder.process(
                sh("echo begun; exec sleep 600"), timeout_s=0.3, on_timeout="background", cwd=tmp_path
            )
            holder.signal.set(CAUSE)
            assert not has_ended(result.pid)
            await asyncio.to_thread(holder.desk.client.stop, scope=holder.desk.scope, job=result.handle)
            assert has_ended(result.pid)
            return result

    result = asyncio.run(scenario())
    assert (result.outcome, result.timed_out, result.exit_code) == (CommandOutcome.BACKGROUNDED, True, None)
    assert result.stdout.text == "begun\n"


def test_a_detached_program_survives_the_cancel_of_its_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(["sleep", "600"])
            await tool.detach()
            holder.signal.set(CAUSE)
            await tool.settle()
            assert not has_ended(tool.pid)
            assert (await tool.stop(kill=True)).signal == SIGKILL

    asyncio.run(scenario())


# -- handles ----------------------------------------------------------------------------


def test_lines_come_as_they_are_written_and_input_can_be_given(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[str], CommandResult | None]:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(sh("echo one; read x; echo got $x; printf rest"), stdin="pipe")
            seen: list[str] = []
            async for line in tool.lines():
                seen.append(line)
                if line == "one":
                    await tool.write("it\n")
            return seen, await tool.wait()

    seen, result = asyncio.run(scenario())
    assert seen == ["one", "got it", "rest"]
    assert result is not None
    assert result.exit_code == 0


def test_a_wait_that_expires_stops_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            tool = await holder.start_process(["sleep", "60"])
            assert await tool.wait(timeout_s=0.01) is None
            assert not has_ended(tool.pid)
            result = await tool.stop()
            assert (result.outcome, result.signal) == ("cancelled", SIGTERM)
            assert await tool.stop() == result

    asyncio.run(scenario())


@pytest.mark.field_report("F17")
def test_a_hundred_programs_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            await holder.process(["true"])
            descriptors = len(os.listdir("/proc/self/fd"))
            for _ in range(10):
                await asyncio.gather(*(holder.process(["true"]) for _ in range(10)))
            assert len(holder.started) == 101
            assert holder.desk.of_node(holder.run_id) == frozenset()
            await await_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)

    asyncio.run(scenario())


def test_a_desk_that_was_not_used_has_no_client(tmp_path: Path) -> None:
    desk = ToolDesk(tmp_path, holder="h")
    assert not desk.was_used
    desk.close()
