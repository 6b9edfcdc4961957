"""Programs as bodies start them, without a coordinator: a holder, its desk, the daemon of this test process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from remit.agents.client import ClientSession
from remit.agents.tooldesk import ToolDesk
from remit.agents.tooling import ToolHolder
from remit.agents.tools import ToolProcess
from remit.core import CancelSignal, Cause, CauseKind, TurnCancelled
from remit.core.ids import IdFactory
from remit.core.scope import TaskScope
from remit.processes import CommandResult, JobResult, ProcessClient

CAUSE = Cause(CauseKind.USER_INTERRUPT, origin="turn_1", reason="enough")

_ids = IdFactory()


class Holder(ToolHolder):
    """One attempt of one run, as far as programs are concerned."""

    def __init__(
        self,
        folder: Path,
        *,
        desk: ToolDesk,
        run_id: str = "",
        attempt: int = 1,
        lineage: int = 1,
        path: tuple[str, ...] = ("turn_1",),
    ) -> None:
        run_id = run_id or _ids.run()
        super().__init__(
            session=None,
            node_id=run_id,
            turn_id="turn_1",
            attempt=attempt,
            signal=CancelSignal(name=run_id),
        )
        self.folder = folder
        self.desk = desk
        self.lineage = lineage
        self.path = path
        self.kill = CancelSignal(name=run_id)
        self.may_write = False
        """What the coordinator would say of claims."""
        self.started: list[ToolProcess] = []
        self.ended: list[tuple[ToolProcess, JobResult | None]] = []
        self.on_started: Callable[[ToolProcess], None] = lambda _: None

    @property
    def run_id(self) -> str:
        """The run."""
        return self._node_id

    def workspace_root(self) -> str:
        """Return the folder above that of the output."""
        return str(self.folder.parent)

    async def _may_still_write(self, path: str) -> bool:
        return self.may_write

    def _connect(self) -> ClientSession:
        raise AssertionError("programs need no coordinator")

    def tool_desk(self) -> ToolDesk:
        """Return the desk."""
        return self.desk

    def tool_folder(self) -> Path:
        """Return where output goes."""
        return self.folder

    def tool_owner(self) -> tuple[str, str, tuple[str, ...]]:
        """Return session, run, path."""
        return "session_1", self._node_id, self.path

    def tool_lineage(self) -> int:
        """Return the attempt that this one continues."""
        return self.lineage

    def tool_kill(self) -> CancelSignal:
        """Return the signal that skips graces."""
        return self.kill

    def tool_report(self, tool: ToolProcess, ended: bool, result: JobResult | None) -> None:
        """Note what the coordinator would be told."""
        if ended:
            self.ended.append((tool, result))
        else:
            self.started.append(tool)
            self.on_started(tool)

    async def cut_short(self, argv: list[str], **options: Any) -> CommandResult:
        """Run a program as a body under a scope; it must be cancelled. Return how the program ended."""
        scope = TaskScope(self.signal)
        scope.enter()
        raised: BaseException | None = None
        try:
            await self.process(argv, **options)
        except (TurnCancelled, asyncio.CancelledError) as error:
            raised = error
        finally:
            scope.exit(raised)
        assert isinstance(raised, TurnCancelled), f"it ended with {raised!r}"
        return self.ended[-1][0].result()


@asynccontextmanager
async def holding(folder: Path, **options: Any) -> AsyncGenerator[Holder]:
    """Give a holder of its own desk for the time of a block."""
    client: ProcessClient | None = options.pop("client", None)
    desk = ToolDesk(folder, holder="host_test", client=client)
    holder = Holder(folder / "out", desk=desk, **options)
    try:
        yield holder
    finally:
        for tool in holder.started:
            if tool.is_running and not tool.background:
                await tool.stop(kill=True)
        await asyncio.to_thread(desk.close)


def run_tool(argv: list[str], folder: Path, **options: Any) -> CommandResult:
    """Run a program to its end in a loop of its own."""

    async def scenario() -> CommandResult:
        async with holding(folder) as holder:
            return await holder.process(argv, **options)

    return asyncio.run(scenario())


def sh(script: str) -> list[str]:
    """Return the command that runs a script."""
    return ["/bin/sh", "-c", script]


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone or a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def says(path: Path, text: str = "") -> Callable[[], bool]:
    """Return a predicate: the file has (this) text."""
    return lambda: path.exists() and path.stat().st_size > 0 and text in path.read_text(errors="replace")
