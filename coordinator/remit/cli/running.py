"""Holding a turn from the command line: delegate, show, stop by Ctrl-C, see it end."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from remit.agents.client import ClientSession
from remit.agents.runs import CancelReceipt, Run, request_cancel
from remit.cli.display import Display
from remit.cli.job import Job
from remit.coordinator.api import Coordinator
from remit.coordinator.turn import TurnHolder
from remit.coordinator.views import TreeView
from remit.core.errors import CoordinatorUnavailable, NotFound, RemitError, TurnCancelled
from remit.core.messages import FinishTurn, OpenTurn
from remit.core.outcome import Outcome

__all__ = ["Finished", "run_turn"]

_REFRESH_S = 0.2
# Fetching a tree of thousands of runs takes a while; it may take a tenth of the time.
_REFRESH_SHARE = 10.0
_QUIET_S = 30.0


@dataclass(slots=True)
class Finished:
    """What became of a turn."""

    turn_id: str
    outcome: Outcome | None
    """None for a turn that was let go (`--detach`); `lost` where contact was lost for good."""
    tree: TreeView | None
    runs: list[Run]
    receipt: CancelReceipt | None
    """Of the cancel that this command asked for, if any."""
    seconds: float


class _Stopper:
    """Turns signals into cancels: the first asks, the second kills."""

    def __init__(self, session: ClientSession, turn_id: str, display: Display) -> None:
        self._session = session
        self._turn_id = turn_id
        self._display = display
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.receipt: CancelReceipt | None = None

    def install(self) -> None:
        """Listen to SIGINT and SIGTERM in the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.strike, "Ctrl-C")
        loop.add_signal_handler(signal.SIGTERM, self.strike, "SIGTERM")

    def remove(self) -> None:
        """Give the signals back."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)

    def strike(self, reason: str) -> None:
        """Take one signal."""
        self._count += 1
        kill = self._count > 1
        self._display.say(
            f"{reason}: killing what is left" if kill else f"{reason}: stopping; once more kills what is left"
        )
        task = asyncio.ensure_future(self._cancel(reason, kill=kill))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, reason: str, *, kill: bool) -> None:
        try:
            receipt = await request_cancel(self._session, self._turn_id, reason=reason, kill=kill, surface="cli")
        except RemitError as error:
            self._display.say(f"the cancel did not arrive: {error}")
            return
        if self.receipt is None or not self.receipt.accepted:
            self.receipt = receipt


async def run_turn(
    coordinator: Coordinator, job: Job, request: OpenTurn, display: Display, *, detach: bool
) -> Finished:
    """Run a job to its end, or hand it over.

    Raises:
        RemitError: it was refused; nothing runs.
    """
    began = time.monotonic()
    session = coordinator.session
    holder = TurnHolder(session, request)
    stopper = _Stopper(session, request.turn_id, display)
    stopper.install()
    runs: list[Run] = []
    try:
        try:
            await holder.begin()
            await _delegate(holder, job, runs)
        except TurnCancelled:
            # Ctrl-C, or somebody else, was faster; the turn ends as cancelled below.
            display.say("cancelled before it had begun")
        if detach and not holder.signal.is_set:
            await session.request("finish_turn", FinishTurn(holder.id, "follow"))
            return Finished(holder.id, None, None, runs, None, time.monotonic() - began)
        try:
            tree = await _see_through(coordinator, holder, display)
            receipt = stopper.receipt
            if receipt is not None:
                receipt = await receipt.quiet(_QUIET_S)
        except CoordinatorUnavailable as error:
            display.say(f"contact was lost: {error}")
            return Finished(holder.id, Outcome.LOST, None, runs, stopper.receipt, time.monotonic() - began)
    finally:
        stopper.remove()
    return Finished(holder.id, holder.outcome, tree, runs, receipt, time.monotonic() - began)


async def _delegate(holder: TurnHolder, job: Job, runs: list[Run]) -> None:
    """Delegate all runs of a job in one batch, or none; their handles go into `runs`."""
    try:
        delegation, handles = holder.prepare(job.agents, job.arguments, job.options)
        runs.extend(handles)
        await holder.send(delegation, handles)
    except RemitError as error:
        await _give_back(holder, error)
        raise


async def _give_back(holder: TurnHolder, error: RemitError) -> None:
    """End a turn whose delegation was refused; nothing of it has started."""
    closing = asyncio.ensure_future(holder.finish("raised", error))
    # Bounded: the refusal is what matters, and the coordinator ends the turn with this client.
    await asyncio.wait([closing], timeout=5.0)
    if not closing.done():
        closing.cancel()
    elif closing.exception() is not None:
        # Retrieved, so that asyncio does not tell of it: the error that led here says enough.
        return


async def _see_through(coordinator: Coordinator, holder: TurnHolder, display: Display) -> TreeView | None:
    """Show the tree until everything has ended; return how it stood then."""
    word = "cancelled" if holder.signal.is_set else "follow"
    closing = asyncio.ensure_future(holder.finish(word))
    tree: TreeView | None = None
    pause = _REFRESH_S
    while not closing.done():
        await asyncio.wait([closing], timeout=pause)
        asked = time.monotonic()
        tree = await _tree(coordinator, holder.id) or tree
        pause = max(_REFRESH_S, _REFRESH_SHARE * (time.monotonic() - asked))
        if tree is not None:
            display.show(tree)
    await closing
    tree = await _tree(coordinator, holder.id) or tree
    if tree is not None:
        display.show(tree)
    return tree


async def _tree(coordinator: Coordinator, turn_id: str) -> TreeView | None:
    try:
        return await coordinator.tree(turn_id)
    except (NotFound, CoordinatorUnavailable):
        # Cancelled before the coordinator had heard of it; or it is being started
        # anew, and then the wait for the turn's end says what becomes of that.
        return None
