"""The blocking twin of starting programs, for plain functions and plain callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from remit.agents.sync_delegation import SyncDelegator, run_in_loop
from remit.agents.tooling import ToolHolder
from remit.agents.tools import ToolProcess
from remit.processes import CommandResult, JobView, StopAnswer

__all__ = ["SyncToolHolder", "SyncToolProcess"]


class SyncToolProcess:
    """A program's handle with blocking waits; see `ToolProcess`."""

    def __init__(self, tool: ToolProcess, loop: asyncio.AbstractEventLoop) -> None:
        self.tool = tool
        """The handle behind it."""
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self.tool)

    @property
    def handle(self) -> str:
        """Its id, `proc_...`."""
        return self.tool.handle

    @property
    def pid(self) -> int:
        """Process number of the program."""
        return self.tool.pid

    @property
    def is_running(self) -> bool:
        """Whether its end is not known here."""
        return self.tool.is_running

    def wait(self, timeout_s: float | None = None) -> CommandResult | None:
        """Wait for its end; see `ToolProcess.wait`."""
        return run_in_loop(self._loop, self.tool.wait(timeout_s))

    def stop(self, *, kill: bool = False, grace_s: float | None = None) -> CommandResult:
        """Stop it; see `ToolProcess.stop`."""
        return run_in_loop(self._loop, self.tool.stop(kill=kill, grace_s=grace_s))

    def detach(self) -> None:
        """Let it go on as a process of the session."""
        run_in_loop(self._loop, self.tool.detach())

    def write(self, data: bytes | str) -> None:
        """Write to its standard input."""
        run_in_loop(self._loop, self.tool.write(data))

    def close_stdin(self) -> None:
        """Close its standard input."""
        run_in_loop(self._loop, self.tool.close_stdin())

    def lines(self, stream: Literal["stdout", "stderr"] = "stdout") -> Iterator[str]:
        """Yield the lines that it writes as they come; see `ToolProcess.lines`."""
        lines = self.tool.lines(stream)

        async def following() -> str | None:
            return await anext(lines, None)

        try:
            while (line := run_in_loop(self._loop, following())) is not None:
                yield line
        finally:
            run_in_loop(self._loop, lines.aclose())


class SyncToolHolder(SyncDelegator):
    """A turn or run context whose programs are waited for by blocking."""

    def _tools(self) -> ToolHolder:
        holder = self._delegator
        assert isinstance(holder, ToolHolder)
        return holder

    def process(
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
        """Run a program and wait for its end; see `RunContext.process`."""
        return run_in_loop(
            self._loop,
            self._tools().process(
                argv,
                key=key,
                env=env,
                cwd=cwd,
                stdin=stdin,
                timeout_s=timeout_s,
                on_timeout=on_timeout,
                background=background,
                grace_s=grace_s,
            ),
        )

    def start_process(
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
    ) -> SyncToolProcess:
        """Start a program and return its handle; see `RunContext.start_process`."""
        tool = run_in_loop(
            self._loop,
            self._tools().start_process(
                argv,
                key=key,
                env=env,
                cwd=cwd,
                stdin=stdin,
                timeout_s=timeout_s,
                on_timeout=on_timeout,
                background=background,
                grace_s=grace_s,
            ),
        )
        return SyncToolProcess(tool, self._loop)

    def processes(self) -> list[JobView]:
        """Return the programs that this turn or run, or what is below it, has started on this machine."""
        return run_in_loop(self._loop, self._tools().processes())

    def stop_process(self, handle: str, *, kill: bool = False, grace_s: float = 2.0) -> StopAnswer:
        """Stop one of `processes()`, also a `background` one."""
        return run_in_loop(self._loop, self._tools().stop_process(handle, kill=kill, grace_s=grace_s))
