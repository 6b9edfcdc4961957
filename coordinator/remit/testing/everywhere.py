"""Cancel an agent at each of its awaits in turn, and look whether it stops as it should.

The agent runs in the in-process engine, under a real coordinator: once to its end, then
once for each await, where it is cancelled just as it begins to wait there.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

from remit.agents import AgentDefinition, RunContext
from remit.agents.body import current_tasks
from remit.coordinator.api import Coordinator
from remit.core.errors import InvalidArgument, TurnCancelled
from remit.core.messages import CancelRequest, dumps
from remit.core.outcome import Outcome
from remit.core.scope import current_scope
from remit.testing.inprocess import InProcess, open_inprocess

__all__ = ["AwaitPoint", "CancelIgnored", "EverywhereOptions", "cancel_everywhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EverywhereOptions:
    """How an agent is tried."""

    max_points: int = 200
    """Awaits at most; an agent that has more is cancelled at the first of them only."""
    grace_s: float = 5.0
    """Seconds that its clean-up may take."""
    limit_s: float = 30.0
    """Seconds that one run may take when nobody cancels it."""
    workspace: Path | None = None
    """Folder that it works in; a temporary one by default."""


@dataclass(frozen=True, slots=True)
class AwaitPoint:
    """One await, and what became of a cancel there."""

    number: int
    """From 1, in the order in which the body comes to them."""
    where: str
    """File and line in the agent's own code."""
    problems: tuple[str, ...] = ()
    """What is wrong, a sentence each; empty if the agent stops as it should."""

    def __str__(self) -> str:
        """Return the point and its problems in one line."""
        return f"await {self.number} at {self.where}: {'; '.join(self.problems) or 'stops'}"


class CancelIgnored(AssertionError):
    """An agent does not stop as it should.

    Args:
        name: of the agent.
        points: where, each with what is wrong.
    """

    def __init__(self, name: str, points: tuple[AwaitPoint, ...]) -> None:
        super().__init__(name, points)
        self.name = name
        self.points = points

    def __str__(self) -> str:
        """Return one line for each await with a problem."""
        lines = [f"agent {self.name!r} does not stop as it should when it is cancelled", *map(str, self.points)]
        return "\n  ".join(lines)


def cancel_everywhere(
    agent: AgentDefinition, options: EverywhereOptions | None = None, /, **arguments: Any
) -> tuple[AwaitPoint, ...]:
    """Cancel an agent at each await in turn and check that it stops, leaving nothing behind.

    At each await: it ends `cancelled`, by the cancellation and within its grace; it returns nothing,
    raises nothing else and leaves no task, process, run or claim behind. Awaits of tasks that
    the body makes are not counted, but they are cancelled with the await that waits for them.

    Its body runs once more than it has awaits, so use short waits and small inputs.
    Blocks the caller; may be called where an event loop runs.

    Args:
        agent: made by `@agent` of an `async def`.
        options: bounds.
        arguments: for its body; pickled, as for every run.

    Returns:
        All awaits, in order.

    Raises:
        CancelIgnored: something is wrong at one of them or at several.
        InvalidArgument: not an agent made of an `async def`.
        RunFailed, RunTimedOut: it does not succeed when nobody cancels it.

    Cancellation:
        None reaches it: it runs to its end.
    """
    # A caller may pass anything at all, command agents too.
    if not getattr(agent, "is_async", False):
        raise InvalidArgument(f"cancel_everywhere takes an agent made by @agent of an async def, not {agent!r}")
    chosen = options or EverywhereOptions()
    points = _in_thread(lambda: _try_all(agent, chosen, arguments))
    wrong = tuple(point for point in points if point.problems)
    if wrong:
        raise CancelIgnored(agent.name, wrong)
    return points


def _in_thread(make: Callable[[], Coroutine[Any, Any, tuple[AwaitPoint, ...]]]) -> tuple[AwaitPoint, ...]:
    """Run a coroutine in a loop and a thread of its own: the caller's loop may be running."""
    found: list[tuple[AwaitPoint, ...]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(make()))
        except BaseException as error:  # carried over to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="remit-everywhere")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


async def _try_all(
    agent: AgentDefinition, options: EverywhereOptions, arguments: dict[str, Any]
) -> tuple[AwaitPoint, ...]:
    points: list[AwaitPoint] = []
    with tempfile.TemporaryDirectory(prefix="remit-everywhere-") as temporary:
        with open_inprocess(options.workspace or temporary, poll_s=0.1) as system:
            async with system.coordinator(surface="test") as coordinator:
                trial = _Trial(system, coordinator, agent, options, arguments)
                await trial.run_undisturbed()
                for number in range(1, options.max_points + 1):
                    point = await trial.cancel_at(number)
                    if point is None:
                        break
                    points.append(point)
    return tuple(points)


@dataclass(slots=True)
class _Probe:
    """One run of the agent under observation."""

    agent: AgentDefinition
    cancel_at: int
    """Number of the await; 0 for none."""
    cancel: Callable[[str], None]
    """Has a run cancelled, and returns when its host has been told."""
    awaits: int = 0
    where: str = ""
    is_cancelled: bool = False
    was_shielded: bool = False
    """The cancel fell into a shielded clean-up, which it has to wait for."""
    was_told: bool = False
    """The body has been thrown the cancellation."""
    problems: list[str] = field(default_factory=list[str])

    def begins_to_wait(self, run_id: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Count an await, and cancel if this is the one."""
        self.awaits += 1
        if self.awaits == self.cancel_at:
            self.where = _place(coroutine, self.agent)
            scope = current_scope()
            self.was_shielded = scope is not None and scope.is_shielded
            self.is_cancelled = True
            self.cancel(run_id)

    def ended(self, error: BaseException | None) -> None:
        """Look at how the body ended."""
        if not self.is_cancelled:
            return
        if error is None:
            if self.was_shielded and not self.was_told:
                return  # its clean-up was the last that it had to do
            self.problems.append("it returned a value although it was cancelled: let the cancellation out")
        elif not _is_cancellation(error):
            self.problems.append(f"it raised {error!r} instead of letting the cancellation out")
        tasks = current_tasks.get()
        left = [task for task in (tasks.open if tasks else ()) if not task.cancelling() and not task.done()]
        if left:
            self.problems.append(f"it left {len(left)} tasks running: await them, or use a TaskGroup")


_probes: dict[str, _Probe] = {}
"""Those of this process; a body finds its own by the name that it is given."""

_names = itertools.count(1)


async def _probed(ctx: RunContext, *, remit_probe: str, **arguments: Any) -> Any:
    """Run the body of the agent that a probe is about."""
    probe = _probes[remit_probe]
    return await _Watched(probe.agent.fn(ctx, **arguments), probe, ctx.run_id)


class _Watched:
    """Awaits a body step by step, telling its probe of each wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], probe: _Probe, run_id: str) -> None:
        self._coroutine = coroutine
        self._probe = probe
        self._run_id = run_id

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                wanted = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
            except StopIteration as done:
                self._probe.ended(None)
                return done.value
            except BaseException as error:
                self._probe.ended(error)
                raise
            self._probe.begins_to_wait(self._run_id, self._coroutine)
            thrown = None
            try:
                yield wanted
            except BaseException as error:  # the body's, not ours: it is handed on
                thrown = error
                self._probe.was_told |= self._probe.is_cancelled


def _is_cancellation(error: BaseException) -> bool:
    """Tell whether nothing but cancellations came out; a task group gathers those of its tasks."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(_is_cancellation(inner) for inner in group.exceptions)
    return isinstance(error, (asyncio.CancelledError, TurnCancelled))


def _place(coroutine: Any, agent: AgentDefinition) -> str:
    """Return where a coroutine waits: the innermost line in the file of the agent."""
    own_file = inspect.getsourcefile(agent.fn) or ""
    place = agent.name
    current = coroutine
    while current is not None:
        frame: FrameType | None = getattr(current, "cr_frame", None) or getattr(current, "ag_frame", None)
        if frame is not None and frame.f_code.co_filename == own_file:
            place = f"{Path(own_file).name}:{frame.f_lineno}"
        current = getattr(current, "cr_await", None) or getattr(current, "ag_await", None)
    return place


@dataclass(slots=True)
class _Trial:
    """Runs one agent again and again."""

    system: InProcess
    coordinator: Coordinator
    agent: AgentDefinition
    options: EverywhereOptions
    arguments: dict[str, Any]

    async def run_undisturbed(self) -> None:
        """Let it run to its end, which must be a success."""
        with self._probe(0) as name:
            limit_s = self.options.limit_s
            async with self.coordinator.turn("undisturbed", deadline_s=limit_s, grace_s=self.options.grace_s) as turn:
                run = await turn.delegate(self._agent(), remit_probe=name, **self.arguments)
                await run.result()

    async def cancel_at(self, number: int) -> AwaitPoint | None:
        """Cancel it at one await; return None if it ends before it comes to that."""
        with self._probe(number) as name:
            probe = _probes[name]
            run_id = await self._one(number, name)
            if not probe.is_cancelled:
                return None
            problems = [*probe.problems, *await self._left_behind(run_id)]
            return AwaitPoint(number, probe.where, tuple(dict.fromkeys(problems)))

    async def _one(self, number: int, name: str) -> str:
        run_id = ""
        async with self.coordinator.turn(f"await {number}", grace_s=self.options.grace_s) as turn:
            run = await turn.delegate(self._agent(), remit_probe=name, **self.arguments)
            run_id = run.id
            # By then a host that would not stop has been dealt with by force.
            await run.wait(self.options.limit_s + 2 * self.options.grace_s)
        return run_id

    async def _left_behind(self, run_id: str) -> list[str]:
        problems: list[str] = []
        tree = await self.coordinator.tree(run_id)
        forced = self._forced()
        for node in tree.nodes:
            label = "it" if node.id == run_id else f"its run {node.name or node.agent or node.id}"
            if node.outcome is None:
                problems.append(f"{label} still runs")
            elif node.unconfirmed or node.id in forced:
                problems.append(f"{label} did not stop within {self.options.grace_s:g} s")
            elif node.id == run_id and node.outcome is not Outcome.CANCELLED:
                problems.append(f"it ended {node.outcome.value}, not cancelled")
            if node.processes:
                problems.append(f"{label} left processes running: {', '.join(node.processes)}")
        names = {node.id for node in tree.nodes}
        kept = [view for view in await self.coordinator.locks() if view.owner in names]
        problems.extend(f"it left the claim {' and '.join(view.wants)} behind" for view in kept)
        return problems

    def _forced(self) -> set[str]:
        """Return the runs that had to be ended by force."""
        reader = self.system.journal.reader()
        try:
            return {record.node_id for record in reader.read(kinds=("run_escalated",))}
        finally:
            reader.close()

    def _agent(self) -> AgentDefinition:
        return replace(self.agent, fn=_probed)

    def _probe(self, number: int) -> _Registered:
        return _Registered(_Probe(self.agent, number, self._cancel))

    def _cancel(self, run_id: str) -> None:
        """Have a run cancelled; called by its own body, whose host is told from another thread."""
        request = CancelRequest(f"req_everywhere_{next(_names)}", run_id, reason="cancel_everywhere", surface="test")
        self.system.link().call_blocking("cancel", dumps(request), self.options.limit_s)


class _Registered:
    """Keeps a probe findable for the time of a block."""

    def __init__(self, probe: _Probe) -> None:
        self._name = f"probe {next(_names)}"
        self._probe = probe

    def __enter__(self) -> str:
        _probes[self._name] = self._probe
        return self._name

    def __exit__(self, *_: object) -> None:
        del _probes[self._name]
