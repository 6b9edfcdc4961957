"""One tool process as a body holds it: started, read, written to, waited for, stopped.

**Rules**

1. The stop is armed before the start is sent: a cancel that lands in between goes by
   key, waits out the pending start, or keeps it from ever happening.
2. The cause decides. Kinds that stop the foreground stop it; for the others the wait
   ends, the process goes on, and the next attempt finds it by its key.
3. A wait that was cut short by a stop ends when the tree is proven gone, or with
   what is left named, within the grace and a bound.
4. A process of the session (`background`) is stopped by its handle and by nothing else.
5. Where one was killed, the place where it worked is looked at before its end is told.
"""

from __future__ import annotations

import asyncio
import codecs
import contextvars
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from remit.agents.tooldesk import ToolDesk
from remit.core.cause import Cause
from remit.core.clock import Clock, SystemClock
from remit.core.delivery import LoopDelivery
from remit.core.errors import InvalidArgument, ProcessError, RemitError, TurnCancelled
from remit.core.signal import CancelSignal, Registration
from remit.core.wellformed import check_number
from remit.processes import (
    CommandResult,
    JobOutcome,
    JobResult,
    JobSpec,
    StartAnswer,
    StartKind,
    backgrounded_result,
    command_result,
)
from remit.processes.aftermath import was_killed
from remit.processes.gitlocks import Aftermath
from remit.processes.output import STDERR_NAME, STDOUT_NAME

__all__ = ["ToolProcess", "settle_all"]

logger = logging.getLogger("remit.processes")

PROOF_S = 12.0
"""How long after the grace a stop may take to be proven: the keeper's own limit (5 s) and room for a busy machine."""
AFTERMATH_S = 4.0
"""How long the place of a killed program may be looked at before its end is told without."""
_READ_BYTES = 65_536
_POLL_S = (0.01, 0.2)


class ToolProcess:
    """A program that a turn or run has started; made by `start_process`.

    It ends with its turn or run, with everything it has started, unless it is a
    `background` one or was let go by `detach`.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        desk: ToolDesk,
        node_id: str,
        signal: CancelSignal,
        kill: CancelSignal | None,
        report: Callable[[ToolProcess, bool, JobResult | None], None],
        watched: Callable[[Awaitable[Any]], Awaitable[Any]],
        clean_up: Callable[[ToolProcess, JobResult], Awaitable[Aftermath]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        """What was asked for."""
        self.node_id = node_id
        self.job = ""
        self.key = spec.key
        self.generation = spec.generation
        self.grace_s = spec.grace_s
        self.pid = 0
        """Process number of the program."""
        self.attached = False
        """Whether it was running already under its key, started by an earlier attempt."""
        self.background = spec.background
        """Whether it belongs to the session."""
        self.aftermath = Aftermath()
        """Git locks that were found where it worked, if it was killed."""
        self._clean_up = clean_up
        self._cleaning: asyncio.Task[None] | None = None
        self._desk = desk
        self._signal = signal
        self._kill = kill
        self._report = report
        # Awaits something under the signal of the turn or run.
        self._watched = watched
        self._clock = clock or SystemClock()
        self._started_at = self._clock.monotonic()
        self._output_dir = Path(spec.output_dir)
        self._registrations: list[Registration] = []
        self._lock = threading.Lock()
        self._is_stopping = False
        self._stop_cause: Cause | None = None
        loop = asyncio.get_running_loop()
        self._delivery = LoopDelivery.of_loop(loop)
        # None: it goes on, as a process of the session, and nobody here waits for it any more.
        self._done: asyncio.Future[JobResult | None] = loop.create_future()
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "running" if not self._done.done() else "ended"
        return f"<ToolProcess {self.handle} {self.spec.argv[0]!r} {state}>"

    @property
    def handle(self) -> str:
        """Its id, `proc_...`, for `remit processes` and `remit kill`."""
        return self.job or self.spec.job

    @property
    def is_running(self) -> bool:
        """Whether its end is not known here."""
        return not self._done.done()

    # -- starting ------------------------------------------------------------------

    async def start(self, env: Mapping[str, str], stdin: bytes | None) -> None:
        """Start it, or attach to what its key stands for (called by `start_process`).

        Raises:
            TurnCancelled: its turn or run was cancelled; nothing runs, or it is being stopped.
            ProcessKeyConflict, CommandNotStarted, ProcdUnavailable: nothing was started.
        """
        if not self.background:
            self._desk.add(self)
        self._arm()
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, self._start_blocking, dict(env), stdin)
        try:
            interrupted = await _patiently(starting)
            answer = starting.result()
        except RemitError as error:
            self._over()
            if self._signal.is_set:
                # Whatever failed: what its caller has to hear of is the cancel, with its cause.
                raise TurnCancelled(self._signal.cause, node_id=self.node_id) from error
            raise
        except BaseException:
            self._over()
            raise
        await self._take_answer(answer)
        if interrupted is not None:
            # Somebody's cancel came during the start: whoever asked for it holds no process.
            await self.settle()
            raise interrupted

    def _start_blocking(self, env: dict[str, str], stdin: bytes | None) -> StartAnswer:
        if not self.background:
            self._desk.vouch()
        return self._desk.client.start(self.spec, env=env, stdin=stdin)

    async def _take_answer(self, answer: StartAnswer) -> None:
        if answer.kind is StartKind.TOMBSTONED:
            self._over()
            self._signal.raise_if_set()
            raise TurnCancelled(None, node_id=self.node_id)
        self.pid = answer.pid
        self.attached = answer.kind is not StartKind.STARTED
        with self._lock:
            self.job = answer.job
        if self.attached and answer.job != self.spec.job:
            await self._find_output(answer.job)
        self._report(self, False, None)
        if answer.result is not None:
            self._take_result(answer.result)
            return
        self._desk.client.watch(answer.job, self._heard)
        if self.spec.on_timeout == "background" and self.spec.timeout_s is not None:
            loop = asyncio.get_running_loop()
            # Of one that was attached to, some of its time has passed: a further attempt does not give it more.
            left_s = max(0.0, self.spec.timeout_s - self._age()) if self.attached else self.spec.timeout_s
            self._deadline = loop.call_later(left_s, self._go_behind)

    async def _find_output(self, job: str) -> None:
        """Read where the one that is attached to writes: the directory of the attempt that started it."""
        views = await asyncio.to_thread(self._desk.client.list, scope=self.spec.scope)
        for view in views:
            if view.job == job:
                self._output_dir = Path(view.output_dir)
                self._started_at = self._clock.monotonic() - view.age_s
                if view.background:
                    self.background = True
                    self._desk.remove(self)

    # -- the end -------------------------------------------------------------------

    def _heard(self, result: JobResult) -> None:
        """Take the keeper's word (in the thread of all watches)."""
        self._delivery.post(lambda: self._take_result(result))

    def _take_result(self, result: JobResult | None) -> None:
        if self._done.done() or self._cleaning is not None:
            return
        # One of the session is under nobody's claim any more.
        if result is None or self._clean_up is None or self.background or not was_killed(result):
            self._settle_with(result)
            return
        # In a context of its own: it is no task of the body, which a cancel would end.
        loop = asyncio.get_running_loop()
        self._cleaning = contextvars.Context().run(loop.create_task, self._clean_and_settle(self._clean_up, result))

    async def _clean_and_settle(
        self, clean_up: Callable[[ToolProcess, JobResult], Awaitable[Aftermath]], result: JobResult
    ) -> None:
        """Look at what a killed program has left in its place, bounded; then let its end be known."""
        try:
            looking = asyncio.ensure_future(clean_up(self, result))
            done, _ = await asyncio.wait([looking], timeout=AFTERMATH_S)
            if done:
                self.aftermath = looking.result()
            else:
                looking.cancel()
        except Exception:  # whatever is wrong with the place, the end of the program has to be told
            logger.exception("the place where %s was killed could not be looked at", self.handle)
        finally:
            self._settle_with(result)

    def _settle_with(self, result: JobResult | None) -> None:
        if self._done.done():
            return
        self._done.set_result(result)
        self._over()
        self._report(self, True, result)

    def _over(self) -> None:
        """Disarm the stop: from here on nobody must be signalled for this process."""
        while self._registrations:
            self._registrations.pop().close()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._desk.remove(self)

    def stop_failed(self, error: RemitError) -> None:
        """Take note that nobody could be asked to stop it (any thread): its end is not proven."""
        result = JobResult(
            job=self.handle,
            outcome=JobOutcome.KEEPER_LOST,
            survivors=(self.pid,) if self.pid else (),
            error=f"it could not be stopped: {error}",
        )
        # Its place is not looked at: it may be at work there still, and its holder has waited long enough.
        self._delivery.post(lambda: self._settle_with(result))

    async def wait(self, timeout_s: float | None = None) -> CommandResult | None:
        """Wait for its end and return how it ended; its expiry, or a cancel of this task, stops nothing.

        Args:
            timeout_s: seconds to wait, from 0; None for no limit.

        Returns:
            The result, or None when the limit is over first.

        Raises:
            TurnCancelled: its turn or run was cancelled. Use `process`, or `stop`, to be sure that it is gone.
            CommandNotStarted: it could not be executed.
        """
        check_number("timeout_s", timeout_s, negative=True)
        await self._watched(asyncio.wait([self._done], timeout=timeout_s))
        return self.result() if self._done.done() else None

    def result(self) -> CommandResult:
        """Return how it ended.

        Raises:
            ProcessError: it has not ended.
            CommandNotStarted: it could not be executed.
        """
        if not self._done.done():
            raise ProcessError(f"{self.handle} has not ended; await wait() first")
        result = self._done.result()
        if result is None:
            return self.so_far()
        found = command_result(self.spec, result, pid=self.pid, output_dir=self._output_dir)
        return replace(found, git_locks_removed=self.aftermath.removed, git_locks_left=self.aftermath.left)

    def so_far(self) -> CommandResult:
        """Return its output so far, for one that goes on behind its caller."""
        return backgrounded_result(
            self.spec, self.handle, pid=self.pid, output_dir=self._output_dir, duration_s=self._age()
        )

    def _age(self) -> float:
        return max(0.0, self._clock.monotonic() - self._started_at)

    # -- stopping ------------------------------------------------------------------

    def _arm(self) -> None:
        if self.background:
            return
        if self._kill is not None:
            self._registrations.append(self._kill.add_callback(lambda cause: self._stop(cause, kill=True)))
        self._registrations.append(self._signal.add_callback(self._on_set))

    def _on_set(self, cause: Cause) -> None:
        if cause.stops_foreground:
            self._stop(cause)

    def _stop(self, cause: Cause | None, *, kill: bool = False, grace_s: float | None = None) -> None:
        with self._lock:
            if self._done.done() or (self._is_stopping and not kill):
                return
            if not self._is_stopping:
                self._is_stopping, self._stop_cause = True, cause
            # A second stop says why the first one was: on its way it may overtake that.
            cause = self._stop_cause
        self._desk.stop_later(self, cause, kill=kill, grace_s=grace_s)

    async def stop(self, *, kill: bool = False, grace_s: float | None = None) -> CommandResult:
        """Stop it with everything it has started, and wait until that is proven; idempotent.

        Args:
            kill: skip the grace.
            grace_s: seconds between SIGTERM and SIGKILL; what it was started with by default.

        Raises:
            TurnCancelled: its turn or run was cancelled; it has been stopped all the same.
        """
        self._stop(self._signal.cause, kill=kill, grace_s=grace_s)
        limit_s = (self.grace_s if grace_s is None else grace_s) + PROOF_S
        interrupted = await _patiently(self._done, limit_s=limit_s)
        if interrupted is not None:
            self._signal.raise_if_set()
            raise interrupted
        if not self._done.done():
            self.stop_failed(ProcessError("its end was not proven in time"))
            await asyncio.wait([self._done])
        return self.result()

    def begin_settling(self) -> bool:
        """Ask for its stop unless it is to go on; return whether there is an end to wait for."""
        cause = self._signal.cause
        goes_on = self.background or self._desk.abandoned or (cause is not None and not cause.stops_foreground)
        if goes_on or self._done.done():
            return False
        self._stop(cause)
        return True

    async def settle(self) -> None:
        """Be done with it because a cancel cut its wait short: stopped and proven gone, or left to the next attempt."""
        if not self.begin_settling():
            return
        await _patiently(self._done, limit_s=self.grace_s + PROOF_S)
        if not self._done.done():
            self.stop_failed(ProcessError("its end was not proven in time"))

    async def detach(self) -> None:
        """Let it go on as a process of the session: no cancel of a turn stops it from here on."""
        await asyncio.to_thread(self._desk.client.detach, self.handle)
        self.background = True
        while self._registrations:
            self._registrations.pop().close()
        self._desk.remove(self)

    def _go_behind(self) -> None:
        """Its time in the foreground is over (in the loop): it belongs to the session."""
        if self._done.done():
            return
        self.background = True
        loop = asyncio.get_running_loop()
        # The keeper does the same by itself at its own clock; asking twice changes nothing.
        detaching = loop.run_in_executor(None, self._desk.client.detach, self.handle)
        detaching.add_done_callback(lambda _: self._take_result(None))

    # -- its streams ---------------------------------------------------------------

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input, for one that was started with `stdin="pipe"`.

        Raises:
            ProcessError: its input is closed, or it has ended.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        await asyncio.to_thread(self._desk.client.write_stdin, self.handle, raw)

    async def close_stdin(self) -> None:
        """Close its standard input: it reads an end of file."""
        await asyncio.to_thread(self._desk.client.close_stdin, self.handle)

    async def lines(self, stream: Literal["stdout", "stderr"] = "stdout") -> AsyncGenerator[str]:
        """Yield the lines that it writes as they come, without their ends, until it has ended.

        Bytes that are no UTF-8 become U+FFFD.

        Args:
            stream: `stdout` or `stderr`.

        Raises:
            TurnCancelled: its turn or run was cancelled.
        """
        if stream not in (STDOUT_NAME, STDERR_NAME):
            raise InvalidArgument(f"stream must be 'stdout' or 'stderr', not {stream!r}")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        path, position, rest, pause_s = self._output_dir / stream, 0, "", _POLL_S[0]
        while True:
            # Looked at before the read: what was written before the end is read after it.
            is_over = self._done.done()
            data = await self._watched(asyncio.to_thread(_read_from, path, position))
            position += len(data)
            rest += decoder.decode(data, final=is_over and not data)
            *whole, rest = rest.split("\n")
            for line in whole:
                yield line
            if data:
                pause_s = _POLL_S[0]
                continue
            if is_over:
                break
            await self._watched(asyncio.wait([self._done], timeout=pause_s))
            pause_s = min(2 * pause_s, _POLL_S[1])
        if rest:
            yield rest


def _read_from(path: Path, position: int) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(position, os.SEEK_SET)
        return file.read(_READ_BYTES)
    return b""


async def _patiently(future: asyncio.Future[Any], *, limit_s: float | None = None) -> asyncio.CancelledError | None:
    """Wait for a future through any cancel of this task; return the first one, for the caller to raise.

    Args:
        future: waited for, never cancelled.
        limit_s: seconds to wait; None for no limit.
    """
    loop = asyncio.get_running_loop()
    until = None if limit_s is None else loop.time() + limit_s
    interrupted: asyncio.CancelledError | None = None
    while not future.done():
        left = None if until is None else until - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError as error:
            # Leaving now would leave a process that nobody looks after.
            interrupted = interrupted or error
    return interrupted


async def settle_all(tools: Iterable[object]) -> None:
    """Be done with all of these programs, at the same time; see `ToolProcess.settle`."""
    mine = [tool for tool in tools if isinstance(tool, ToolProcess)]
    for tool in mine:
        tool.begin_settling()
    for tool in mine:
        await tool.settle()
