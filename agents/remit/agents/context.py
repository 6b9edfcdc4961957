"""The run context: what a body holds of its run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from remit.agents.client import ClientSession
from remit.agents.delegation import WAITS
from remit.agents.leases import ClaimHolder
from remit.agents.outbox import Outbox
from remit.agents.payload import encode_result, short_preview
from remit.agents.runs import Run
from remit.core.errors import InvalidArgument, WaitCycle
from remit.core.messages import (
    ReportProcess,
    ReportProgress,
    ReportResume,
    ReportWaiting,
    StartItem,
)
from remit.core.signal import CancelSignal
from remit.processes import CommandOutcome, CommandResult, ProcessIdentity, run_command
from remit.telemetry.names import ObservedAt
from remit.telemetry.watching import BodyWatch, waiting_at

__all__ = ["RunContext"]

# One writer at a time keeps lines whole; one lock for all runs of a host is enough.
_LOG_LOCK = threading.Lock()

_PREVIEW_BYTES = 2048


class RunContext(ClaimHolder):
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
        self._process_count = 0
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

    def run(self, run_id: str, *, name: str = "") -> Run:
        """Return a handle on any run of this workspace; waiting on it watches this run's signal."""
        handle = Run(self, run_id, name=name)
        self.session.watch(run_id, handle)
        return handle

    # -- handing over --------------------------------------------------------------

    def partial(self, value: Any) -> None:
        """Hand over what there is so far; kept if this run does not succeed.

        The latest one counts. It is on its way when this returns, not on the disk.

        Raises:
            ResultNotPicklable, ResultTooLarge: it cannot travel.
        """
        blob = encode_result(value, self._max_result_bytes)
        text = short_preview(value, _PREVIEW_BYTES)
        self._outbox.put(ReportProgress(self.run_id, self.attempt, text, blob))

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

    async def process(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float | None = None,
        grace_s: float = 2.0,
    ) -> CommandResult:
        """Run a program; its whole process group dies if this run is cancelled.

        Args:
            argv: program and arguments; no shell. Standard input is null.
            env: environment variables added to the host's.
            cwd: working directory; the host's by default.
            timeout_s: seconds until it is stopped and `timed_out` is set; None for no limit.
            grace_s: seconds between SIGTERM and SIGKILL.

        Returns:
            A result with `exit_code`, `stdout`, `stderr`, `outcome`, `timed_out` and so on. A
            status other than zero raises nothing.

        Raises:
            TurnCancelled: this run was cancelled; the process and what it started are gone.
            CommandNotStarted: it could not be executed.
            InvalidArgument: an empty command or a value that cannot be passed on.
        """
        if isinstance(argv, str) or not argv:
            raise InvalidArgument("argv must be a list of program and arguments, and not empty")
        self._process_count += 1
        program = Path(str(argv[0])).name
        started: list[ProcessIdentity] = []

        def on_started(identity: ProcessIdentity) -> None:
            started.append(identity)
            self._outbox.put(self._process_report(identity, program))

        def on_finished(result: CommandResult) -> None:
            if result.outcome is CommandOutcome.CANCELLED:
                self._cut_short = result
            for identity in started:
                self._outbox.put(self._process_report(identity, program, result))

        with waiting_at(ObservedAt.TOOL_WAIT, self._watch), self._own_cancel():
            result = await run_command(
                [str(item) for item in argv],
                signal=self._signal,
                output_dir=self.output_dir / f"process_{self._process_count}",
                mark=self.run_id,
                cwd=None if cwd is None else Path(cwd),
                env=None if env is None else {**os.environ, **env},
                timeout_s=timeout_s,
                grace_s=grace_s,
                kill=self._kill_signal(),
                on_started=on_started,
                on_finished=on_finished,
            )
        self._signal.raise_if_set()
        return result

    def _process_report(
        self, identity: ProcessIdentity, program: str, result: CommandResult | None = None
    ) -> ReportProcess:
        report = ReportProcess(
            self.run_id,
            self.attempt,
            identity.pid,
            identity.started,
            self._machine,
            program,
        )
        if result is None:
            return report
        return replace(
            report,
            ended=True,
            exit_code=result.exit_code,
            signal=result.signal,
            stopped=result.outcome is not CommandOutcome.EXITED,
            escalated=result.escalated,
            survivors=tuple(str(pid) for pid in result.survivors),
        )

    # -- giving way while waiting --------------------------------------------------

    @contextmanager
    def _while_waiting(
        self, run_ids: Sequence[str], *, what: str = "children"
    ) -> Generator[asyncio.Future[None] | None]:
        """Give up the slot for the time of a wait; several waits share one yield."""
        self._wait_count += 1
        wait_id = self._wait_count
        refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[wait_id] = (tuple(run_ids), refusal)
        on = tuple(dict.fromkeys(name for ids, _ in self._waits.values() for name in ids))
        self._outbox.put(ReportWaiting(self.run_id, self.attempt, wait_id, on, what))
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
