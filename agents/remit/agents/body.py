"""Running one attempt's body and saying truthfully how it ended.

**Rules** (the decider has the last word; this is the host's evidence)

1. `returned`: a value came back. `raised`: an exception came out; whether the
   signal was set at that instant is reported with it. `cancelled`: it unwound
   with its signal set. `timed_out`: the same, when only this attempt was stopped.
2. A `CancelledError` or `TurnCancelled` while the signal is not set is the body's
   own doing: `raised`.
3. Tasks that a body leaves behind are cancelled and awaited before its end is
   reported: nothing of a run acts after its end.
4. `SystemExit` and `KeyboardInterrupt` end the body, also from a task that it made:
   asyncio would let them out of the loop, and end all other bodies with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from remit.agents.definition import AgentDefinition
from remit.agents.payload import decode, encode_result, short_preview
from remit.agents.printing import current_log
from remit.core.cause import CauseKind
from remit.core.errors import CommandTimedOut, RemitError, TurnCancelled
from remit.core.messages import ReportEnded, StartItem
from remit.core.scope import TaskScope
from remit.core.signal import CancelSignal
from remit.core.texts import clean_text, error_text, error_trace
from remit.telemetry.watching import BodyWatch, current_watch

__all__ = [
    "BodyTasks",
    "ended_before_start",
    "failed_before_start",
    "run_body",
    "stale_host",
    "task_factory",
]

_MAX_TRACEBACK = 16 * 1024
_PREVIEW_BYTES = 2048

current_tasks: contextvars.ContextVar[BodyTasks | None] = contextvars.ContextVar("remit_body_tasks", default=None)


class BodyTasks:
    """Tasks that a body has made and that have not ended."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Remember a task until it ends."""
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def end_all(self) -> None:
        """Cancel what is left and wait for it; bounded by the run's escalation."""
        while self.open:
            for task in self.open:
                task.cancel()
            await asyncio.wait(list(self.open), timeout=0.1)


class BodyLeft(RemitError):
    """A task of a body called `sys.exit`, or raised `KeyboardInterrupt`."""

    code = "body_left"


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose `SystemExit` is an ordinary exception.

    No `async def` around it: a task that is cancelled before its first step would
    leave the inner one un-awaited, with a warning.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any, /) -> Any:
        try:
            return self._inner.send(value)
        except (KeyboardInterrupt, SystemExit) as error:
            raise _left(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except (KeyboardInterrupt, SystemExit) as raised:
            raise _left(raised) from raised

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def _left(error: BaseException) -> BodyLeft:
    return BodyLeft(f"a task of the body raised {error!r}; return, or raise an ordinary exception")


def task_factory(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:
    """Make tasks of a host's loop; those made inside a body are remembered with it."""
    tasks = current_tasks.get()
    if tasks is None:
        return asyncio.Task(coro, loop=loop, **kwargs)
    task: asyncio.Task[Any] = asyncio.Task(_Contained(coro), loop=loop, **kwargs)
    tasks.add(task)
    return task


async def run_body(
    agent: Any,
    item: StartItem,
    context: Any,
    *,
    signal: CancelSignal,
    max_result_bytes: int,
    watch: BodyWatch | None = None,
) -> ReportEnded:
    """Run an attempt to its end and return what to report of it.

    With a `watch` the report says when the body began, heard of a cancel, noticed and ended.

    Never raises, except what asyncio uses to end the process.
    """
    try:
        arguments = decode(item.arguments)
    except Exception as error:  # unpickling runs user code: anything may come out
        return failed_before_start(item, error)
    tasks = BodyTasks()
    current_tasks.set(tasks)
    current_log.set(context.write_log)
    current_watch.set(watch)
    scope = TaskScope(signal)
    scope.enter()
    raised: BaseException | None = None
    value: Any = None
    was_set = False
    try:
        if isinstance(agent, AgentDefinition) and agent.is_async:
            # Here and not in `_call`: that would be one more frame for a cancel of thousands to unwind.
            value = await agent.fn(context, **arguments)
        else:
            value = await _call(agent, context, arguments)
    except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        # An agent's sys.exit ends the agent, not the host and its other runs.
        raised, was_set = error, signal.is_set
    except BaseException as error:
        raised, was_set = error, signal.is_set
    finally:
        scope.leave()
        # Not by tokens: a body that is thrown away with its loop is closed in another context.
        current_tasks.set(None)
        current_log.set(None)
        current_watch.set(None)
    if raised is not None and was_set:
        # All bodies of one cancel hear it before the first of them is cleaned up after and
        # reported: that takes longer than waking the next body.
        await _let_others_run()
    await tasks.end_all()
    await context.end_tools()
    if raised is not None:
        report = _report_raised(item, raised, signal, was_set=was_set)
        # Its traceback holds this very frame: left here, all that the body held would wait for the cycle collector.
        raised = None
    else:
        report = _report_returned(item, value, signal, max_result_bytes)
    if watch is None:
        return report
    # A plain body's thread is not struck by anything: it notices when it looks.
    struck = scope.struck_at if getattr(agent, "is_async", True) else None
    return report._replace(timing=watch.timing(scope.told_at, struck))


@types.coroutine
def _let_others_run() -> Generator[None]:
    """Give way once: `asyncio.sleep(0)` without its coroutine."""
    yield


async def _call(agent: Any, context: Any, arguments: dict[str, Any]) -> Any:
    """Run a program, or a plain function in a thread."""
    if not isinstance(agent, AgentDefinition):
        return await agent.run_command_agent(context, **arguments)
    from remit.agents.sync_context import SyncRunContext

    facade = SyncRunContext(context, asyncio.get_running_loop())
    return await _in_thread(lambda: agent.fn(facade, **arguments), item_name=context.run_id)


async def _in_thread(call: Callable[[], Any], *, item_name: str) -> Any:
    """Run a plain body in a daemon thread and wait until it has really ended.

    A cancel of this wait does not end the thread, so it waits on: the body has to
    look at its signal, and the coordinator kills the host if it does not.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    variables = contextvars.copy_context()

    def tell(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def body() -> None:
        value: Any = None
        problem: BaseException | None = None
        try:
            value = variables.run(call)
        except BaseException as error:  # the thread's outer edge: carried over as data
            problem = error
        try:
            loop.call_soon_threadsafe(tell, value, problem)
        except RuntimeError:
            # The host is shutting down and nobody listens any more.
            return

    threading.Thread(target=body, name=f"remit-{item_name[-8:]}", daemon=True).start()
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            # Ours, or the host's end; either way the thread is still at work.
            continue
    value, problem = done.result()
    if problem is not None:
        raise problem
    return value


_ATTEMPT_WORDS = {CauseKind.ATTEMPT_TIMEOUT: "timed_out", CauseKind.WORKER_MOVED: "moved"}


def _ends_attempt(signal: CancelSignal) -> str:
    """Return the word for an attempt that was told to end while its run goes on, or the empty text."""
    cause = signal.cause
    return _ATTEMPT_WORDS.get(cause.kind, "") if cause is not None else ""


def _report_returned(item: StartItem, value: Any, signal: CancelSignal, max_result_bytes: int) -> ReportEnded:
    try:
        payload = encode_result(value, max_result_bytes)
    except RemitError as error:
        return _failure(item, error, signal, was_set=signal.is_set)
    # A value that comes after its attempt was told to end is not the run's.
    report = _ends_attempt(signal) or "returned"
    return ReportEnded(
        item.run_id,
        item.attempt,
        report,
        before_cancel=not signal.is_set,
        payload=payload,
        preview=short_preview(value, _PREVIEW_BYTES),
    )


def _report_raised(item: StartItem, error: BaseException, signal: CancelSignal, *, was_set: bool) -> ReportEnded:
    unwound = isinstance(error, (TurnCancelled, asyncio.CancelledError))
    if unwound and was_set:
        return ReportEnded(item.run_id, item.attempt, _ends_attempt(signal) or "cancelled", before_cancel=False)
    return _failure(item, error, signal, was_set=was_set)


def _failure(item: StartItem, error: BaseException, signal: CancelSignal, *, was_set: bool) -> ReportEnded:
    word = _ends_attempt(signal) if was_set else ""
    if not was_set and isinstance(error, CommandTimedOut):
        word = "timed_out"
    message = error_text(error)
    if isinstance(error, asyncio.CancelledError) and not message:
        message = "the body raised CancelledError although nobody had cancelled this run"
    return ReportEnded(
        item.run_id,
        item.attempt,
        word or "raised",
        before_cancel=not was_set,
        error_type=clean_text(type(error).__name__),
        error=message,
        error_code=_code(error),
        traceback=error_trace(error, _MAX_TRACEBACK),
    )


def _code(error: BaseException) -> str:
    """Return the stable code of an error of ours; a user's subclass may have put anything there."""
    code: Any = type(error).code if isinstance(error, RemitError) else ""
    return code if isinstance(code, str) else ""


def failed_before_start(item: StartItem, error: BaseException) -> ReportEnded:
    """Return the report of an attempt whose body could not be begun."""
    return ReportEnded(
        item.run_id,
        item.attempt,
        "raised",
        error_type=clean_text(type(error).__name__),
        error=error_text(error),
        error_code=_code(error),
        traceback=error_trace(error, _MAX_TRACEBACK),
    )


def ended_before_start(item: StartItem, signal: CancelSignal) -> ReportEnded:
    """Return the report of an attempt that was cancelled before its body began."""
    return ReportEnded(item.run_id, item.attempt, _ends_attempt(signal) or "cancelled", before_cancel=False)


def stale_host(item: StartItem, modules: list[str]) -> ReportEnded:
    """Return the report of an attempt that must begin on a host with newer code."""
    return ReportEnded(
        item.run_id,
        item.attempt,
        "stale_host",
        error_type="StaleHost",
        error=f"edited since this host had loaded them: {', '.join(sorted(modules)[:5])}",
    )
