"""The stop of a program as its holder sees it: when it is asked for, when not any more, and what is said of it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remit.agents import tools
from remit.core import Cause, CauseKind, TurnCancelled
from remit.core.errors import ProcdUnavailable, ProcessCallUnsupported, ProcessKeyConflict
from remit.processes import CommandResult, JobView, ProcessClient, StartAnswer, StopAnswer, StopKind
from remit.testing import await_until
from tests.agents.tool_world import CAUSE, Holder, has_ended, holding, says, sh

FOREVER = "while :; do sleep 60; done"


class Listening(ProcessClient):
    """The real daemon; notes what it was asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[dict[str, Any]] = []

    def stop(self, **fields: Any) -> StopAnswer:
        """Note the stop, and pass it on."""
        self.stops.append(fields)
        return super().stop(**fields)


class Mute(Listening):
    """A daemon that answers no stop before it is let go, and does not act on it either."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.let_go = threading.Event()
        self.answer: StopAnswer | Exception = StopAnswer(kind=StopKind.UNCONFIRMED)

    def stop(self, **fields: Any) -> StopAnswer:
        """Hang."""
        self.stops.append(fields)
        self.asked.set()
        self.let_go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def kill_all(holder: Holder) -> None:
    """End what a mute daemon was not told to stop."""
    with closing(ProcessClient()) as client:
        for view in client.list(scope=holder.desk.scope):
            if view.state != "ended":
                client.stop(scope=holder.desk.scope, job=view.job, kill=True)


# -- the way of a stop ------------------------------------------------------------------


@pytest.mark.requirement("A6", "C6")
def test_a_signal_becomes_one_stop_that_is_sent_to_the_daemon_with_its_cause(tmp_path: Path) -> None:
    """The program cannot see our memory: the signal has to be carried over to it, by its id."""

    async def scenario() -> None:
        client = Listening()
        async with holding(tmp_path, client=client) as holder:
            tool = await holder.start_process(["sleep", "60"])
            assert client.stops == []
            holder.signal.set(CAUSE)
            holder.signal.set(Cause(CauseKind.BUDGET, origin="turn_1"))
            await tool.settle()
            (sent,) = client.stops
            assert (sent["job"], sent["cause"], sent["kill"]) == (tool.handle, CAUSE, False)
            assert has_ended(tool.pid)

    asyncio.run(scenario())


@pytest.mark.requirement("A6", "E6")
def test_a_second_stop_says_why_the_first_was_because_it_may_overtake_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Listening()
        async with holding(tmp_path, client=client) as holder:
            tool = await holder.start_process(sh(f"trap '' TERM; echo deaf; {FOREVER}"), grace_s=60)
            await await_until(says(holder.folder / "process_1" / "stdout"))
            holder.signal.set(CAUSE)
            holder.kill.set(Cause(CauseKind.SHUTDOWN, origin="turn_1"))
            await tool.settle()
            await await_until(lambda: len(client.stops) == 2)
            assert sorted(sent["kill"] for sent in client.stops) == [False, True]
            assert [sent["cause"] for sent in client.stops] == [CAUSE, CAUSE]
            assert tool.result().cause == CAUSE

    asyncio.run(scenario())


@pytest.mark.requirement("A7")
def test_a_wait_ends_with_the_signal_although_the_daemon_never_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Mute()
        async with holding(tmp_path, client=client) as holder:
            tool = await holder.start_process(["sleep", "60"])
            waiting = asyncio.create_task(tool.wait())
            await asyncio.sleep(0)
            holder.signal.set(CAUSE)
            with pytest.raises(TurnCancelled) as raised:
                await waiting
            assert raised.value.cause == CAUSE
            assert not client.let_go.is_set()
            assert not has_ended(tool.pid)
            client.let_go.set()
            await asyncio.to_thread(kill_all, holder)
            await await_until(lambda: not tool.is_running)

    asyncio.run(scenario())


@pytest.mark.requirement("C4", "C29")
def test_a_stop_that_nobody_answers_holds_its_caller_up_for_a_bounded_time_and_is_said_to_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop goes its own way: its caller's task is cancelled already, and leaves at the bound."""
    monkeypatch.setattr(tools, "PROOF_S", 0.05)

    async def scenario() -> tuple[Mute, CommandResult, bool]:
        client = Mute()
        async with holding(tmp_path, client=client) as holder:
            task = asyncio.create_task(holder.process(["sleep", "60"], grace_s=0))
            await await_until(lambda: bool(holder.started))
            task.cancel("not ours")
            with pytest.raises(asyncio.CancelledError, match="not ours"):
                await task
            assert client.asked.is_set()
            ((tool, _),) = holder.ended
            lived = not has_ended(tool.pid)
            client.let_go.set()
            await asyncio.to_thread(kill_all, holder)
            return client, tool.result(), lived

    client, result, lived = asyncio.run(scenario())
    assert lived
    assert len(client.stops) == 1
    assert (result.outcome, result.succeeded) == ("keeper_lost", False)
    assert result.survivors == (result.pid,)
    assert result.handle.startswith("proc_")


# -- when nobody must be signalled any more ---------------------------------------------


@pytest.mark.requirement("C7")
def test_after_a_normal_result_a_signal_stops_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Listening()
        async with holding(tmp_path, client=client) as holder:
            assert (await holder.process(sh("exit 3"))).exit_code == 3
            holder.signal.set(CAUSE)
            holder.kill.set(CAUSE)
            await holder.started[0].settle()
            assert client.stops == []
            assert holder.desk.of_node(holder.run_id) == frozenset()

    asyncio.run(scenario())


@pytest.mark.requirement("C7")
def test_a_start_that_was_refused_for_its_key_stops_nothing_of_the_one_who_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Listening()
        async with holding(tmp_path, client=client) as owner:
            tool = await owner.start_process(["sleep", "60"], key="k")
            other = Holder(tmp_path / "other", desk=owner.desk)
            with pytest.raises(ProcessKeyConflict):
                await other.start_process(["sleep", "61"], key="k")
            other.signal.set(CAUSE)
            other.kill.set(CAUSE)
            assert owner.desk.of_node(other.run_id) == frozenset()
            assert client.stops == []
            assert await tool.wait(timeout_s=0) is None

    asyncio.run(scenario())


@pytest.mark.requirement("C32")
def test_whoever_stops_waiting_says_nothing_of_the_program(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Listening()
        async with holding(tmp_path, client=client) as holder:
            tool = await holder.start_process(sh("read x; exit 4"), stdin="pipe")
            waiting = asyncio.create_task(tool.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            assert (tool.is_running, client.stops, holder.ended) == (True, [], [])
            await tool.close_stdin()
            result = await tool.wait()
            assert result is not None
            assert (result.outcome, result.exit_code) == ("exited", 4)

    asyncio.run(scenario())


# -- what a failure on the way is called ------------------------------------------------


class Broken(ProcessClient):
    """A daemon whose answer to a start never arrives."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.before: Callable[[], object] = before

    def start(self, spec: Any, *, env: Any, stdin: bytes | None = None) -> StartAnswer:
        """Fail."""
        self.before()
        raise ProcdUnavailable("the daemon ended", path="/nowhere")


@pytest.mark.requirement("A9")
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_broken_connection_is_a_cancel_only_if_there_was_one(tmp_path: Path, is_cancelled: bool) -> None:
    async def scenario() -> None:
        client = Broken()
        async with holding(tmp_path, client=client) as holder:
            if is_cancelled:
                client.before = lambda: holder.signal.set(CAUSE)
            with pytest.raises(TurnCancelled if is_cancelled else ProcdUnavailable) as raised:
                await holder.process(["true"])
            if isinstance(raised.value, TurnCancelled):
                assert raised.value.cause == CAUSE
                assert isinstance(raised.value.__cause__, ProcdUnavailable)
            assert holder.desk.of_node(holder.run_id) == frozenset()

    asyncio.run(scenario())


@pytest.mark.requirement("C29")
def test_a_daemon_that_knows_no_stop_leaves_the_end_open(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        client = Mute()
        client.answer = ProcessCallUnsupported("too old", version=0)
        client.let_go.set()
        async with holding(tmp_path, client=client) as holder:
            tool = await holder.start_process(["sleep", "60"])
            holder.signal.set(CAUSE)
            await tool.settle()
            assert not has_ended(tool.pid)
            await asyncio.to_thread(kill_all, holder)
            return tool.result()

    result = asyncio.run(scenario())
    assert (result.outcome, result.survivors) == ("keeper_lost", (result.pid,))


@pytest.mark.requirement("C29")
def test_what_is_cancelled_while_it_runs_has_its_output_so_far_its_status_and_its_time(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        async with holding(tmp_path) as holder:
            task = asyncio.create_task(
                holder.cut_short(sh("trap 'exit 9' TERM; echo half; while :; do sleep 0.01; done"))
            )
            await await_until(says(holder.folder / "process_1" / "stdout"))
            holder.signal.set(CAUSE)
            return await task

    result = asyncio.run(scenario())
    assert (result.outcome, result.exit_code, result.stdout.text, result.cause) == ("cancelled", 9, "half\n", CAUSE)
    assert result.duration_s > 0


# -- foreground and background ----------------------------------------------------------


@pytest.mark.requirement("B29")
def test_a_cancel_ends_foreground_trees_and_leaves_the_background_to_its_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with holding(tmp_path) as holder:
            front = await holder.start_process(sh("setsid sleep 60 & echo $! > pid; wait"), cwd=tmp_path)
            behind = await holder.start_process(["sleep", "600"], background=True)
            await await_until(says(tmp_path / "pid"))
            holder.signal.set(CAUSE)
            await tools.settle_all([front, behind])
            assert (has_ended(front.pid), has_ended(int((tmp_path / "pid").read_text()))) == (True, True)
            assert front.result().survivors == ()
            assert not has_ended(behind.pid)
            (view,) = [view for view in await holder.processes() if view.state != "ended"]
            assert (view.job, view.background, view.session) == (behind.handle, True, "session_1")
            assert (await holder.stop_process(behind.handle)).is_proven_gone

    asyncio.run(scenario())


# -- time limits over attempts ----------------------------------------------------------


class Aged(ProcessClient):
    """A daemon whose jobs are older by some seconds than they are."""

    older_s = 0.0

    def list(self, **fields: Any) -> list[JobView]:
        """Return the jobs with their ages."""
        return [replace(view, age_s=view.age_s + self.older_s) for view in super().list(**fields)]


@pytest.mark.requirement("C34")
def test_a_further_attempt_goes_on_with_the_same_time_limit(tmp_path: Path) -> None:
    """The keeper counts from the first start: the second attempt's hour never begins."""

    async def scenario() -> CommandResult:
        async with holding(tmp_path) as first:
            tool = await first.start_process(["sleep", "60"], key="k", timeout_s=1.0)
            first.signal.set(Cause(CauseKind.WORKER_MOVED, origin=first.run_id))
            second = Holder(tmp_path / "out", desk=first.desk, run_id=first.run_id, attempt=2)
            result = await second.process(["sleep", "60"], key="k", timeout_s=3_600.0)
            assert result.handle == tool.handle
            return result

    assert asyncio.run(scenario()).timed_out


@pytest.mark.requirement("C34", "C30")
def test_a_further_attempt_waits_no_longer_for_what_goes_to_the_background(tmp_path: Path) -> None:
    async def scenario() -> CommandResult:
        client = Aged()
        options: dict[str, Any] = {"key": "k", "timeout_s": 3_600.0, "on_timeout": "background"}
        async with holding(tmp_path, client=client) as first:
            await first.start_process(["sleep", "600"], **options)
            first.signal.set(Cause(CauseKind.ATTEMPT_TIMEOUT, origin=first.run_id))
            client.older_s = 3_599.9
            second = Holder(tmp_path / "out", desk=first.desk, run_id=first.run_id, attempt=2)
            result = await second.process(["sleep", "600"], **options)
            await asyncio.to_thread(kill_all, first)
            return result

    result = asyncio.run(scenario())
    assert (result.outcome, result.timed_out) == ("backgrounded", True)
