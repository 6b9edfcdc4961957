"""The run context: what a body holds of its run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from remit.agents.client import ClientSession
from remit.agents.delegation import WAITS
from remit.agents.outbox import Outbox
from remit.agents.participant import Participant
from remit.agents.runs import Run
from remit.agents.tooldesk import ToolDesk
from remit.agents.tools import ToolProcess, settle_all
from remit.core.errors import ProcessError, RemitError, WaitCycle
from remit.core.messages import (
    LiveAttempt,
    ReportProcess,
    ReportProgress,
    ReportResume,
    ReportSpend,
    ReportWaiting,
    StartItem,
)
from remit.core.signal import CancelSignal
from remit.locks import Area
from remit.processes import CommandResult, JobOutcome, JobResult
from remit.telemetry.watching import BodyWatch, waiting_at

__all__ = ["RunContext"]

# One writer at a time keeps lines whole; one lock for all runs of a host is enough.
_LOG_LOCK = threading.Lock()


class RunContext(Participant):
    """What a sub-agent's body is given first: its signal, and everything a turn can do.

    Made by the host, one for each attempt. `async def` bodies await its methods;
    plain bodies get a `SyncRunContext` with the same names.
    """

    def __init__(
        self,
        item: StartItem,
        *,
        signal: CancelSignal,
        kill_signal: Callable[[], CancelSignal],
        outbox: Outbox,
        connect: Callable[[], ClientSession],
        workspace: Path,
        machine: str,
        max_result_bytes: int,
        desk: ToolDesk,
        watch: BodyWatch | None = None,
        carrier: str = "",
    ) -> None:
        super().__init__(
            session=None,
            node_id=item.run_id,
            turn_id=item.turn_id,
            attempt=item.attempt,
            signal=signal,
            watch=watch,
            carrier=carrier,
        )
        self._item = item
        self._kill_signal = kill_signal
        self._outbox = outbox
        self._connect_session = connect
        self._workspace = workspace
        self._machine = machine
        self._max_result_bytes = max_result_bytes
        self._waits: dict[int, tuple[tuple[str, ...], asyncio.Future[None]]] = {}
        self._wait_count = 0
        self._go: asyncio.Future[None] | None = None
        self._last_wait: ReportWaiting | None = None
        self._desk = desk
        self._cut_short: CommandResult | None = None

    def _connect(self) -> ClientSession:
        return self._connect_session()

    # -- who and where -------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """This run, `run_...`."""
        return self._item.run_id

    @property
    def turn_id(self) -> str:
        """The turn that this run belongs to, `turn_...`."""
        return self._item.turn_id

    @property
    def session_id(self) -> str:
        """The session of that turn."""
        return self._item.session_id

    @property
    def parent_id(self) -> str:
        """The turn or run that delegated this run; its own id if it was let go (`detached`)."""
        return self._item.path[-1] if self._item.path else self._item.run_id

    @property
    def name(self) -> str:
        """Name that the caller gave; may be empty."""
        return self._item.name

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._item.attempt

    @property
    def depth(self) -> int:
        """Levels below the turn, from 1."""
        return self._item.depth

    @property
    def workspace(self) -> Path:
        """The workspace's folder."""
        return self._workspace

    def workspace_root(self) -> str:
        """Return the folder that claims are relative to."""
        # The host knows it; its connection has yet to be answered when a body makes its first claim.
        return str(self._workspace)

    @property
    def output_dir(self) -> Path:
        """Where this run's output files are; made when first asked for, for the owner only."""
        folder = self._workspace / ".remit" / "output" / self.run_id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @property
    def after(self) -> Mapping[str, Run]:
        """Runs that this one came after, by name (or id), all of them succeeded.

        `await ctx.after["lint"].result()` gives the result of one.
        """
        found: dict[str, Run] = {}
        for run_id, name in zip(self._item.after, self._item.after_names, strict=True):
            found[name or run_id] = self.run(run_id, name=name)
        return found

    def _leased_areas(self) -> list[Area]:
        """Return the areas that are held here, those of the whole run among them."""
        return [*(Area.from_dict(dict(area)) for area in self._item.claims), *super()._leased_areas()]

    # -- handing over --------------------------------------------------------------

    def _largest_result(self) -> int:
        return self._max_result_bytes

    def _send_partial(self, preview: str, blob: bytes) -> None:
        self._outbox.put(ReportProgress(self.run_id, self.attempt, preview, blob))

    def _send_spent(self, tokens: int, cost: float) -> None:
        # In the order of all other reports, so that it is told before the end of the body.
        self._outbox.put(ReportSpend(self.run_id, self.attempt, tokens, cost))

    def log(self, text: str) -> None:
        """Append a line with the time of day to this run's log (`remit logs`).

        What the body prints goes there too, as it is.
        """
        stamp = time.strftime("%H:%M:%S", time.localtime())
        self.write_log(f"{stamp} {text}\n")

    def write_log(self, text: str) -> None:
        """Append a text to this run's log as it is; readable by its owner alone."""
        path = self.output_dir / "log"
        with _LOG_LOCK:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, text.encode("utf-8", "replace"))
            finally:
                os.close(descriptor)

    def keep_cut_short(self) -> None:
        """Hand over what a program had written when this run's cancel stopped it, if one was."""
        if self._cut_short is not None:
            self.partial(self._cut_short)

    # -- processes -----------------------------------------------------------------

    def tool_desk(self) -> ToolDesk:
        """Return the desk of this host."""
        return self._desk

    def tool_folder(self) -> Path:
        """Return the directory for the output of programs: that of this run."""
        return self.output_dir

    def tool_owner(self) -> tuple[str, str, tuple[str, ...]]:
        """Return session, run and the ids of everything above."""
        return self._item.session_id, self._item.run_id, tuple(self._item.path)

    def tool_lineage(self) -> int:
        """Return the first attempt of which this one is the continuation."""
        return self._item.lineage

    def tool_kill(self) -> CancelSignal:
        """Return the signal that skips the grace of programs."""
        return self._kill_signal()

    def tool_report(self, tool: ToolProcess, ended: bool, result: JobResult | None) -> None:
        """Tell the coordinator of a program that was started, or is over, or goes on in the session."""
        report = ReportProcess(
            self.run_id,
            self.attempt,
            tool.pid,
            0.0,
            self._machine,
            Path(tool.spec.argv[0]).name,
            handle=tool.handle,
            background=tool.background,
        )
        if ended:
            report = replace(report, ended=True, goes_on=result is None)
        if result is not None:
            report = replace(
                report,
                exit_code=result.exit_code,
                signal=result.signal,
                stopped=result.outcome is not JobOutcome.EXITED,
                escalated=bool(result.escalated),
                survivors=tuple(str(pid) for pid in result.survivors),
                git_locks_removed=tool.aftermath.removed,
                git_locks_left=tool.aftermath.left,
            )
        for text in (*(f"{path}: removed" for path in tool.aftermath.removed), *tool.aftermath.left):
            self.log(f"git lock {text}")
        self._outbox.put(report)

    def _tool_cut_short(self, tool: ToolProcess) -> None:
        with suppress(ProcessError, OSError):
            self._cut_short = tool.so_far() if tool.is_running else tool.result()

    async def end_tools(self) -> None:
        """Be done with what this attempt has started, when its body is over (called by the host); bounded.

        Left alone where the cause leaves processes to the next attempt.
        """
        cause = self._signal.cause
        if cause is not None and not cause.stops_foreground:
            return
        await settle_all(self._desk.of_node(self.run_id))
        if self.attempt > self._item.lineage:
            # What an earlier attempt had left running and this one did not ask for again.
            with suppress(RemitError):
                await asyncio.to_thread(self._desk.stop_rest, self.run_id, cause, generation=self.attempt)

    # -- giving way while waiting --------------------------------------------------

    @contextmanager
    def _while_waiting(self, runs: Sequence[Run], *, what: str = "children") -> Generator[asyncio.Future[None] | None]:
        """Give up the slot for the time of a wait; several waits share one yield."""
        self._wait_count += 1
        wait_id = self._wait_count
        refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[wait_id] = (tuple(run.id for run in runs), refusal)
        on = tuple(dict.fromkeys(name for ids, _ in self._waits.values() for name in ids))
        self._last_wait = ReportWaiting(self.run_id, self.attempt, wait_id, on, what)
        self._outbox.put(self._last_wait)
        try:
            with waiting_at(WAITS[what], self._watch):
                yield refusal
        finally:
            del self._waits[wait_id]
            if refusal.done() and not refusal.cancelled():
                refusal.exception()
            if not self._waits and not self._signal.is_set:
                self._go = asyncio.get_running_loop().create_future()
                self._outbox.put(ReportResume(self.run_id, self.attempt))

    async def _go_on(self) -> None:
        """Wait for a slot again; cancellable."""
        while self._go is not None and not self._go.done():
            await self._watched(_shared(self._go))

    def inventory(self) -> LiveAttempt:
        """Return what this body is at, for a coordinator that was begun again; any thread."""
        go = self._go
        return LiveAttempt(
            self.run_id,
            self.attempt,
            waiting=self._last_wait if self._waits else None,
            resuming=go is not None and not go.done(),
        )

    def resumed(self) -> None:
        """Take note that this run holds a slot again (called in the body's loop)."""
        if self._go is not None and not self._go.done():
            self._go.set_result(None)

    def wait_refused(self, wait_id: int, cycle: str) -> None:
        """Fail a wait that could never end (called in the body's loop)."""
        wait = self._waits.get(wait_id)
        if wait is not None and not wait[1].done():
            wait[1].set_exception(WaitCycle(f"{self.run_id} would wait for itself: {cycle}", cycle=cycle.split(" -> ")))


async def _shared(future: asyncio.Future[None]) -> None:
    """Wait for a future that others wait for too: a cancel of this wait leaves it alone."""
    await asyncio.wait([future])
