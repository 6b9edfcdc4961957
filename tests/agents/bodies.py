"""Agents for scenarios, and the stage that they share with a test.

The stage is a folder in the workspace, so that the same bodies work in a thread of
the test, in a Ray actor, and under another process: a note is a line in a file, a
gate is a file that is there or not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

from remit.agents import RunContext, agent
from remit.agents.sync_context import SyncRunContext
from remit.core.errors import Refused, RemitError, TurnCancelled
from remit.testing import await_until, wait_until


class Stage:
    """Notes and gates of one workspace."""

    def __init__(self, workspace: str | Path) -> None:
        self._folder = Path(workspace) / "stage"
        self._folder.mkdir(exist_ok=True)

    def note(self, text: str) -> None:
        """Write down that something happened; whole lines, whoever writes."""
        descriptor = os.open(self._folder / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)

    def notes(self) -> list[str]:
        """Return all notes in their order."""
        path = self._folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def open_gate(self, name: str) -> None:
        """Let through whoever waits at this gate, now and later."""
        (self._folder / f"gate-{name}").touch()

    def is_open(self, name: str) -> bool:
        """Tell whether a gate is open."""
        return (self._folder / f"gate-{name}").exists()

    async def pass_gate(self, name: str) -> None:
        """Wait at a gate with plain asyncio means."""
        await await_until(lambda: self.is_open(name), timeout_s=60.0, message=f"gate {name}")

    async def until_noted(self, *texts: str) -> None:
        """Wait until all of these were noted."""
        await await_until(
            lambda: set(texts) <= set(self.notes()), timeout_s=30.0, message=f"{texts} among {self.notes()}"
        )


@agent
async def add(ctx: RunContext, a: int, b: int) -> int:
    return a + b


@agent
async def give(ctx: RunContext, value: Any = None) -> Any:
    return value


@agent
async def boom(ctx: RunContext, gate: str = "") -> None:
    if gate:
        await Stage(ctx.workspace).pass_gate(gate)
    raise ValueError("no")


class Mute(Exception):
    """Raises when it is asked what it says."""

    def __str__(self) -> str:
        raise RuntimeError("broken")


class Odd(RemitError):
    """An error of ours by name, with a code that is none."""

    code = 7  # type: ignore[assignment]


@agent
async def raise_strange(ctx: RunContext, how: str) -> None:
    if how == "mute":
        raise Mute
    if how == "odd code":
        raise Odd("odd")
    if how == "no text for utf-8":
        raise OSError("cannot read 'a\udcff'")
    error = ValueError("noted")
    error.__notes__ = 7  # type: ignore[assignment]
    raise error


@agent
async def wait_at(ctx: RunContext, gate: str, value: Any = None) -> Any:
    stage = Stage(ctx.workspace)
    stage.note(f"{ctx.name} waits")
    await stage.pass_gate(gate)
    return value


@agent
async def nap(ctx: RunContext, label: str = "nap") -> None:
    """Sleep in `ctx`; the way it was woken is noted."""
    stage = Stage(ctx.workspace)
    stage.note(f"{label} began")
    try:
        await ctx.sleep(600)
    except BaseException as error:
        stage.note(f"{label} unwound by {type(error).__name__}")
        raise


@agent
async def bare_nap(ctx: RunContext, label: str = "nap") -> None:
    """Sleep without knowing anything of `remit`."""
    stage = Stage(ctx.workspace)
    stage.note(f"{label} began")
    try:
        await asyncio.sleep(600)
    finally:
        stage.note(f"{label} over")


class Luggage:
    """Something that a body holds; `left` has what is still there."""

    left: ClassVar[weakref.WeakSet[Luggage]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.left.add(self)


@agent
async def bare_nap_with_luggage(ctx: RunContext, label: str = "nap") -> None:
    """Hold something while asleep, and raise where there is nothing to sleep for."""
    luggage = Luggage()
    Stage(ctx.workspace).note(f"{label} began")
    if label == "broken":
        raise ValueError(f"{luggage} is too heavy")
    await ctx.sleep(600)


@agent
async def quiet_nap(ctx: RunContext) -> None:
    await asyncio.sleep(600)


@agent
async def catch_all(ctx: RunContext, label: str = "child") -> str:
    """Wait for a child and make a text of whatever goes wrong."""
    child = await ctx.delegate(nap, label=label)
    try:
        await child.result()
    except Exception:
        Stage(ctx.workspace).note("made a text of it")
        return "[error]"
    return "fine"


@agent
async def swallow(ctx: RunContext) -> str:
    Stage(ctx.workspace).note("swallow began")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        pass
    return "made up"


@agent
async def other_error(ctx: RunContext) -> None:
    """Turn the cancel into an error of one's own while unwinding."""
    Stage(ctx.workspace).note("other_error began")
    try:
        await asyncio.sleep(600)
    finally:
        raise ConnectionError("the connection was closed while unwinding")


@agent
async def chain(ctx: RunContext, depth: int, gated_at: int = -1) -> str:
    """Delegate to oneself down to depth 0, each level waiting for the next; one may wait at the gate `on`."""
    stage = Stage(ctx.workspace)
    stage.note(f"level {depth} began")
    try:
        if depth == 0:
            await ctx.sleep(600)
        if depth == gated_at:
            await stage.pass_gate("on")
        await (await ctx.delegate(chain, depth=depth - 1, gated_at=gated_at)).result()
    except BaseException as error:
        stage.note(f"level {depth} unwound by {type(error).__name__}")
        raise
    return "[text]"


@agent
async def fan(ctx: RunContext, width: int, depth: int) -> None:
    """Grow a tree and wait for all of it."""
    if depth == 0:
        await asyncio.sleep(600)
        return
    runs = await ctx.delegate_many(fan, [{"width": width, "depth": depth - 1}] * width)
    await ctx.gather(*runs)


@agent
async def partial_nap(ctx: RunContext) -> None:
    ctx.partial({"found": ["a.py"]})
    ctx.partial({"found": ["a.py", "b.py"]})
    Stage(ctx.workspace).note("partial given")
    await ctx.sleep(600)


@agent
async def cancel_oneself(ctx: RunContext) -> None:
    await ctx.cancel("enough of this")
    await ctx.sleep(600)


@agent
async def parent_of_one_that_stops(ctx: RunContext) -> list[str]:
    """Tell what it sees of a child that cancels itself."""
    child = await ctx.delegate(cancel_oneself)
    try:
        await child.result()
    except Exception as error:
        return [type(error).__name__, str(vars(error)["run_id"] == child.id), str(ctx.signal.is_set)]
    return []


@agent
async def stray_cancel(ctx: RunContext) -> None:
    raise asyncio.CancelledError


@agent
async def leave(ctx: RunContext, word: str) -> None:
    if word == "exit":
        sys.exit(3)
    if word == "interrupt":
        raise KeyboardInterrupt
    raise GeneratorExit


@agent
async def leave_in_task(ctx: RunContext, word: str) -> None:
    async def inner() -> None:
        if word == "exit":
            sys.exit(3)
        raise KeyboardInterrupt

    await asyncio.create_task(inner())


@agent
async def litter(ctx: RunContext) -> str:
    """Leave a task behind that would go on for ever."""
    stage = Stage(ctx.workspace)

    async def forever() -> None:
        stage.note("task began")
        try:
            await asyncio.sleep(600)
        finally:
            stage.note("task over")

    task = asyncio.create_task(forever())
    await stage.until_noted("task began")
    assert not task.done()
    return "done"


@agent
async def unpicklable(ctx: RunContext) -> Any:
    return threading.Lock()


@agent
async def large(ctx: RunContext, size: int) -> bytes:
    return b"x" * size


@agent
async def blocking(ctx: RunContext, gate: str = "free") -> str:
    """Block the event loop of the host until the signal is set, or the gate opens."""
    stage = Stage(ctx.workspace)
    stage.note("blocking began")
    wait_until(lambda: ctx.signal.is_set or stage.is_open(gate), timeout_s=30.0)
    stage.note(f"blocking saw {ctx.signal.is_set}")
    return "free"


@agent
async def in_own_task(ctx: RunContext) -> None:
    """Wait in a task that was made without any arguments about cancelling."""
    stage = Stage(ctx.workspace)

    async def inner() -> None:
        stage.note("inner began")
        try:
            await ctx.sleep(600)
        except (TurnCancelled, asyncio.CancelledError):
            # Whichever of the two is first: the body that awaits this task is stopped as well.
            stage.note("inner unwound")
            raise

    await asyncio.create_task(inner())


@agent
async def program(ctx: RunContext, script: str) -> str:
    Stage(ctx.workspace).note("program began")
    done = await ctx.process(["/bin/sh", "-c", script])
    return str(done.stdout)


@agent
async def stop_sibling(ctx: RunContext, sibling: str) -> Any:
    """Try to stop a run that this one has not started, and then one that it has."""
    own = await ctx.delegate(nap, label="own")
    await Stage(ctx.workspace).until_noted("own began")
    refusal = ""
    try:
        receipt = await ctx.run(sibling).cancel("out of my way")
        refusal = "" if receipt.accepted else receipt.message
    except Exception as error:
        refusal = type(error).__name__
    receipt = await own.cancel("no longer wanted")
    return [bool(refusal), receipt.accepted, str(await own.wait())]


@agent
async def flaky(ctx: RunContext) -> Any:
    """Fail the first attempt; the second one tells whether its signal is new."""
    stage = Stage(ctx.workspace)
    stage.note(f"attempt {ctx.attempt}")
    if ctx.attempt == 1:
        await ctx.sleep(600)
    return [ctx.attempt, ctx.signal.is_set]


@agent
async def storm_below(ctx: RunContext) -> None:
    """Delegate from four threads in a tight loop, until told off."""
    loop = asyncio.get_running_loop()
    stage = Stage(ctx.workspace)

    def rush() -> None:
        while True:
            future = asyncio.run_coroutine_threadsafe(ctx.delegate(quiet_nap), loop)
            try:
                future.result()
            except (TurnCancelled, Refused):
                return

    threads = [threading.Thread(target=rush) for _ in range(4)]
    for thread in threads:
        thread.start()
    stage.note("storm began")
    try:
        await ctx.sleep(600)
    finally:
        async with ctx.shielded(10.0):
            await await_until(lambda: not any(thread.is_alive() for thread in threads))


@agent
def plain_nap(ctx: SyncRunContext) -> None:
    stage = Stage(ctx.workspace)
    stage.note("plain began")
    try:
        ctx.sleep(600)
    except BaseException as error:
        stage.note(f"plain unwound by {type(error).__name__}")
        raise


@agent
def plain_poll(ctx: SyncRunContext) -> None:
    Stage(ctx.workspace).note("plain began")
    ctx.signal.wait_blocking(60.0)
    ctx.signal.raise_if_set()


@agent
def plain_parent(ctx: SyncRunContext) -> Any:
    runs = ctx.delegate_many(add, [{"a": n, "b": n} for n in range(3)])
    ended = {run.value() for run in ctx.as_completed(runs)}
    return [sorted(ended), ctx.gather(*runs), ctx.delegate(give, value=ctx.depth).result()]


@agent
def stubborn(ctx: SyncRunContext, seconds: float = 60.0) -> None:
    """Ignore the signal, until the gate `give up` is opened."""
    stage = Stage(ctx.workspace)
    stage.note(f"stubborn {os.getpid()}")
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stage.is_open("give up"):
        time.sleep(0.01)
    stage.note("stubborn over")
