"""Starting tool processes from a turn or a run: what both share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from remit.agents.leases import ClaimHolder
from remit.agents.tooldesk import ToolDesk
from remit.agents.tools import ToolProcess
from remit.core.errors import InvalidArgument, NotFound
from remit.core.ids import IdFactory
from remit.core.signal import CancelSignal
from remit.core.wellformed import check_number, shown
from remit.processes import CommandResult, JobResult, JobSpec, JobView, StopAnswer, fingerprint
from remit.processes.aftermath import locks_after, treat
from remit.processes.gitlocks import Aftermath
from remit.telemetry.names import ObservedAt
from remit.telemetry.watching import waiting_at

__all__ = ["ToolHolder"]

_IDS = IdFactory()
_MOST_LOCKS = 32
"""Git locks that the coordinator is asked about after a kill; more than git takes at once."""


class ToolHolder(ClaimHolder):
    """Something that may start programs: a turn or a run context."""

    _tool_count = 0
    _auto_keys: dict[str, int] | None = None

    # -- what differs between a turn and a run -------------------------------------

    def tool_desk(self) -> ToolDesk:
        """Return the desk of this process."""
        raise NotImplementedError

    def tool_folder(self) -> Path:
        """Return the directory under which the output of programs is kept."""
        raise NotImplementedError

    def tool_owner(self) -> tuple[str, str, tuple[str, ...]]:
        """Return session, run (empty for a turn's own) and the ids of everything above."""
        raise NotImplementedError

    def tool_lineage(self) -> int:
        """Return the first attempt of which this one is the continuation."""
        return 1

    def tool_kill(self) -> CancelSignal | None:
        """Return the signal that skips the grace of programs, if there is one."""
        return None

    def tool_report(self, tool: ToolProcess, ended: bool, result: JobResult | None) -> None:
        """Tell the coordinator of a program that was started or is over."""

    # -- for bodies ----------------------------------------------------------------

    async def process(
        self,
        argv: Sequence[str],
        *,
        key: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        on_timeout: Literal["stop", "background"] = "stop",
        background: bool = False,
        grace_s: float = 2.0,
    ) -> CommandResult:
        """Run a program and wait for its end; its whole tree dies if this turn or run is cancelled.

        It belongs to no worker: when this attempt times out or its host dies or is
        moved, the program goes on, and the next attempt that asks for the same gets
        the same one, with its exit status.

        Args:
            argv: program and arguments; no shell.
            key: idempotency key within the workspace. The same key with the same command
                starts once, ever, and gives the same result; with another command it is
                refused. By default each call of a run has a key of its own, which the
                attempt that continues it shares.
            env: environment variables added to this process's.
            cwd: working directory; this process's by default.
            stdin: what it reads; nothing by default.
            timeout_s: seconds until `on_timeout`; None for no limit.
            on_timeout: `stop` it, or let it go on in the `background`; the result has
                `timed_out` either way.
            background: it belongs to the session: no turn's cancel stops it, `remit kill` does.
            grace_s: seconds between SIGTERM and SIGKILL.

        Returns:
            How it ended. A status other than zero raises nothing.

        Raises:
            TurnCancelled: this turn or run was cancelled; the program and what it has started
                are gone (or left to the next attempt, where the cause says so).
            CommandNotStarted: it could not be executed.
            ProcessKeyConflict: the key stands for another command.
            ProcdUnavailable: there is no daemon for it; nothing was started.
            InvalidArgument: an empty command or a value that cannot be passed on.
        """
        tool = await self.start_process(
            argv,
            key=key,
            env=env,
            cwd=cwd,
            # As bytes: the text "pipe" is an input like any other here.
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            background=background,
            grace_s=grace_s,
        )
        try:
            result = await tool.wait()
        except BaseException:
            await tool.settle()
            self._tool_cut_short(tool)
            raise
        if self._signal.is_set and result is not None and result.cancelled:
            self._tool_cut_short(tool)
        if not background:
            # It may be over by the very cancel before its waiter has heard of that.
            with waiting_at(ObservedAt.TOOL_WAIT, self._watch):
                self._signal.raise_if_set()
        assert result is not None
        return result

    def _tool_cut_short(self, tool: ToolProcess) -> None:
        """Take note of a program whose wait a cancel ended."""

    async def start_process(
        self,
        argv: Sequence[str],
        *,
        key: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Literal["pipe"] | bytes | str | None = None,
        timeout_s: float | None = None,
        on_timeout: Literal["stop", "background"] = "stop",
        background: bool = False,
        grace_s: float = 2.0,
    ) -> ToolProcess:
        """Start a program and return its handle: read its lines, write to it, wait, stop, detach.

        Arguments and errors as for `process`; `stdin="pipe"` keeps its input open for
        `handle.write`. When the body ends, what it has not detached is stopped.
        """
        self._signal.raise_if_set()
        check_number("timeout_s", timeout_s)
        check_number("grace_s", grace_s)
        given = _input(stdin)
        environment = {**os.environ, **_checked_env(env)}
        self._tool_count += 1
        session, run, path = self.tool_owner()
        desk = self.tool_desk()
        spec = JobSpec(
            job=_IDS.new("proc"),
            scope=desk.scope,
            session=session,
            turn=self._turn_id,
            run=run,
            path=path,
            attempt=max(1, self._attempt),
            generation=self._attempt,
            argv=_checked_argv(argv),
            cwd=_directory(cwd),
            stdin="pipe" if stdin == "pipe" else "null" if given is None else "data",
            umask=_umask(),
            output_dir=str(self.tool_folder() / f"process_{self._tool_name()}"),
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            background=background,
            grace_s=grace_s,
        )
        if key is None:
            key = self._auto_key(fingerprint(spec, env=env or {}, stdin=given))
        spec = replace(spec, key=key)
        spec.check()
        environment["REMIT_RUN"] = self._node_id
        tool = ToolProcess(
            spec,
            desk=desk,
            node_id=self._node_id,
            signal=self._signal,
            kill=self.tool_kill(),
            report=self.tool_report,
            watched=self._watched_tool,
            clean_up=self._after_kill,
        )
        try:
            with waiting_at(ObservedAt.TOOL_WAIT, self._watch), self._own_cancel():
                await tool.start(environment, given)
        except BaseException:
            if tool.job:  # it ran for a moment: what it has written is kept
                self._tool_cut_short(tool)
            raise
        return tool

    async def _after_kill(self, tool: ToolProcess, result: JobResult) -> Aftermath:
        """Take away the git locks that a killed program has left, where this turn or run holds the claim."""
        spec, root = tool.spec, self.workspace_root()
        places = [os.path.join(root, place) for place in self._leased_places()]
        locks = await asyncio.to_thread(locks_after, spec.cwd or root, spec.argv, places)
        if not locks:
            return Aftermath()
        claimed = [lock.path for lock in locks[:_MOST_LOCKS] if await self._may_still_write(lock.path)]
        return await asyncio.to_thread(treat, locks, result, claimed)

    async def _watched_tool(self, awaitable: Awaitable[Any]) -> Any:
        """Await what a program does, under the signal; a cancel is told as observed there."""
        with waiting_at(ObservedAt.TOOL_WAIT, self._watch):
            return await self._watched(awaitable)

    def _tool_name(self) -> str:
        """Return a name for the output of this start that no other attempt uses."""
        return f"{self._tool_count}" if self._attempt <= 1 else f"{self._tool_count}.{self._attempt}"

    def _auto_key(self, digest: str) -> str:
        """Return the key of a start that was given none: run, attempt it continues, command, how many before it."""
        if self._auto_keys is None:
            self._auto_keys = {}
        count = self._auto_keys[digest] = self._auto_keys.get(digest, 0) + 1
        return f"auto:{self._node_id}:{self.tool_lineage()}:{digest[:24]}:{count}"

    async def processes(self) -> list[JobView]:
        """Return the programs that this turn or run, or what is below it, has started on this machine."""
        desk = self.tool_desk()
        views = await asyncio.to_thread(desk.client.list, scope=desk.scope)
        return [view for view in views if self._is_mine(view)]

    def _is_mine(self, view: JobView) -> bool:
        return self._node_id in (view.run or view.turn, *view.path)

    async def stop_process(self, handle: str, *, kill: bool = False, grace_s: float = 2.0) -> StopAnswer:
        """Stop a program that this turn or run, or what is below it, has started; also a `background` one.

        Raises:
            NotFound: there is none with this handle among them.
        """
        desk = self.tool_desk()
        if all(view.job != handle for view in await self.processes()):
            raise NotFound(f"{self._node_id} has started no process {handle!r}; processes() lists those it may stop")
        return await asyncio.to_thread(
            desk.client.stop, scope=desk.scope, job=handle, cause=None, grace_s=grace_s, kill=kill
        )


def _checked_argv(argv: Any) -> tuple[str, ...]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Iterable) or not argv:
        raise InvalidArgument("argv must be a list of program and arguments, and not empty")
    items: Iterable[Any] = argv  # pyright: ignore[reportUnknownVariableType]
    return tuple(str(item) for item in items)


def _checked_env(env: Any) -> Mapping[str, str]:
    """Return environment variables to add; a number would fail deep inside, where nobody knows its name."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidArgument(f"env must be a mapping of names to texts, not {shown(env)}")
    variables: Mapping[Any, Any] = env  # pyright: ignore[reportUnknownVariableType]
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"env must hold texts; {shown(name)} is {shown(value)}")
    return variables


def _directory(cwd: object) -> str:
    if cwd is not None and not isinstance(cwd, str | os.PathLike):
        raise InvalidArgument(f"cwd must be a path, not {shown(cwd)}")
    return os.getcwd() if cwd is None else str(Path(cast("str", cwd)).absolute())


def _umask() -> int:
    """Return this process's umask, without the moment in which every thread would have another one."""
    with suppress(OSError, ValueError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    # Not Linux: it can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _input(stdin: object) -> bytes | None:
    if stdin is None or stdin == "pipe":
        return None
    if isinstance(stdin, str):
        return stdin.encode()
    if isinstance(stdin, bytes | bytearray | memoryview):
        return bytes(stdin)  # pyright: ignore[reportUnknownArgumentType]
    raise InvalidArgument(f'stdin must be a text, bytes, "pipe" or None, not {shown(stdin)}')
