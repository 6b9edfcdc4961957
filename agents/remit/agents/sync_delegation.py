"""The blocking twin of delegating and waiting, for plain functions and plain callers.

Each call runs the asynchronous one in an event loop of another thread and blocks
until it is done. Signals are watched there, so a blocked call raises
`TurnCancelled` as soon as its turn or run is cancelled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import IO, Any, Literal, TypeVar, overload

from remit.agents.leases import Lease
from remit.agents.participant import Approval, Effect, Participant
from remit.agents.runs import CancelReceipt, Run, RunOptions
from remit.core.cause import Cause
from remit.core.errors import CoordinatorUnavailable, InternalError
from remit.core.outcome import Outcome
from remit.core.records import TurnRecord
from remit.core.signal import CancelSignal
from remit.locks import Claim

__all__ = ["SyncDelegator", "SyncLease", "SyncReceipt", "SyncRun", "run_in_loop"]

T = TypeVar("T")


_LOOK_S = 0.5
"""How often a blocked call looks whether the loop that serves it is still there."""


def run_in_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread's event loop and return its result.

    Raises:
        InternalError: called from that very loop, where it could never end.
        CoordinatorUnavailable: the loop was closed, before this call or during it.
    """
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coroutine.close()
        raise InternalError("a blocking call was made inside the event loop that would serve it")
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise CoordinatorUnavailable("this connection to the coordinator was closed") from None
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=_LOOK_S)
            if not future.done() and not loop.is_running():
                # Handed to a loop that was just ending: nobody will ever carry it out.
                future.cancel()
                break
        return future.result()
    except concurrent.futures.CancelledError:
        if not loop.is_running():
            # It may never have begun; nothing else uses it now that its loop is gone.
            coroutine.close()
        raise CoordinatorUnavailable("this connection to the coordinator was closed during the call") from None
    except KeyboardInterrupt:
        future.cancel()
        raise


class SyncReceipt:
    """A cancel's receipt with a blocking `quiet`; attributes as `CancelReceipt`."""

    def __init__(self, receipt: CancelReceipt, loop: asyncio.AbstractEventLoop) -> None:
        self.receipt = receipt
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Return what the receipt says."""
        return getattr(self.receipt, name)

    def quiet(self, timeout_s: float = 30.0) -> SyncReceipt:
        """Wait until nothing below the target runs; see `CancelReceipt.quiet`."""
        return SyncReceipt(run_in_loop(self._loop, self.receipt.quiet(timeout_s)), self._loop)


class SyncRun:
    """A run's handle with blocking waits; see `Run`."""

    __slots__ = ("_loop", "run")

    def __init__(self, run: Run, loop: asyncio.AbstractEventLoop) -> None:
        self.run = run
        """The handle behind it."""
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self.run)

    @property
    def id(self) -> str:
        """`run_...`."""
        return self.run.id

    @property
    def name(self) -> str:
        """Name that the caller gave; may be empty."""
        return self.run.name

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, or None while its end is not known here."""
        return self.run.outcome

    @property
    def cause(self) -> Cause | None:
        """Why it was stopped, or None."""
        return self.run.cause

    def result(self) -> Any:
        """Wait for the end and return the result, or raise; see `Run.result`."""
        return run_in_loop(self._loop, self.run.result())

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the end at most that long; see `Run.wait`."""
        return run_in_loop(self._loop, self.run.wait(timeout_s))

    def value(self) -> Any:
        """Return the result of a run that has succeeded; see `Run.value`."""
        return self.run.value()

    def cancel(self, reason: str = "", *, kill: bool = False) -> SyncReceipt:
        """Stop this run and everything below it; see `Run.cancel`."""
        receipt = run_in_loop(self._loop, self.run.cancel(reason, kill=kill))
        return SyncReceipt(receipt, self._loop)


class SyncLease:
    """A lease with a blocking `check`; see `Lease`."""

    __slots__ = ("_lease", "_loop")

    def __init__(self, lease: Lease, loop: asyncio.AbstractEventLoop) -> None:
        self._lease = lease
        self._loop = loop

    @property
    def token(self) -> int:
        """Fencing token: larger than that of every earlier grant."""
        return self._lease.token

    @property
    def claim_id(self) -> str:
        """`claim_...`."""
        return self._lease.claim_id

    def check(self) -> None:
        """Ask the coordinator whether this lease is held; see `Lease.check`."""
        run_in_loop(self._loop, self._lease.check())


class SyncDelegator:
    """What a plain body or a plain caller may do: the names of `Delegator`, blocking.

    Args:
        delegator: the asynchronous one behind it.
        loop: the loop that serves it, running in another thread.
    """

    def __init__(self, delegator: Participant, loop: asyncio.AbstractEventLoop) -> None:
        self._delegator = delegator
        self._loop = loop

    @property
    def signal(self) -> CancelSignal:
        """Poll it with `is_set` or `raise_if_set()`; a plain body is not interrupted."""
        return self._delegator.signal

    def live_runs(self) -> tuple[SyncRun, ...]:
        """Return the runs that were delegated here and whose end is not known yet."""
        return tuple(SyncRun(run, self._loop) for run in self._delegator.live_runs())

    def delegate(self, agent: Any, /, *, options: RunOptions | None = None, **arguments: Any) -> SyncRun:
        """Delegate one run; see `Delegator.delegate`."""
        run = run_in_loop(self._loop, self._delegator.delegate(agent, options=_plain(options), **arguments))
        return SyncRun(run, self._loop)

    def delegate_many(
        self,
        agent: Any,
        arguments: Iterable[Mapping[str, Any]],
        *,
        options: RunOptions | Sequence[RunOptions] | None = None,
    ) -> list[SyncRun]:
        """Delegate several runs of one agent; see `Delegator.delegate_many`."""
        packed = (
            [_plain(option) or RunOptions() for option in options] if isinstance(options, Sequence) else _plain(options)
        )
        runs = run_in_loop(self._loop, self._delegator.delegate_many(agent, arguments, options=packed))
        return [SyncRun(run, self._loop) for run in runs]

    def run(self, run_id: str, *, name: str = "") -> SyncRun:
        """Return a handle on any run of this workspace; see `Delegator.run`."""
        return SyncRun(self._delegator.run(run_id, name=name), self._loop)

    @overload
    def gather(self, *runs: SyncRun, return_outcomes: Literal[False] = False) -> list[Any]: ...

    @overload
    def gather(self, *runs: SyncRun, return_outcomes: Literal[True]) -> list[Outcome]: ...

    def gather(self, *runs: SyncRun, return_outcomes: bool = False) -> list[Any]:
        """Wait for several runs; see `Delegator.gather`."""
        inner = [run.run for run in runs]
        if return_outcomes:
            return run_in_loop(self._loop, self._delegator.gather(*inner, return_outcomes=True))
        return run_in_loop(self._loop, self._delegator.gather(*inner))

    def as_completed(self, runs: Iterable[SyncRun]) -> Iterator[SyncRun]:
        """Yield runs as they end; see `Delegator.as_completed`."""
        by_handle: dict[Run, SyncRun] = {run.run: run for run in runs}
        waiting: list[Run] = list(by_handle)
        while waiting:
            current = tuple(waiting)
            run_in_loop(
                self._loop,
                self._delegator.wait_runs(
                    current,
                    enough=_any_settled(current),
                    timeout_s=None,
                ),
            )
            ended = [run for run in waiting if run.is_settled]
            waiting = [run for run in waiting if not run.is_settled]
            yield from (by_handle[run] for run in ended)

    @contextmanager
    def claim(self, *claims: Claim, timeout_s: float | None = None) -> Generator[SyncLease]:
        """Hold claims for the time of a block; see `ClaimHolder.claim`."""
        lease = run_in_loop(self._loop, self._delegator.acquire(claims, timeout_s))
        try:
            yield SyncLease(lease, self._loop)
        finally:
            run_in_loop(self._loop, self._delegator.release(lease))

    def write_text(self, path: str | os.PathLike[str], text: str, *, encoding: str = "utf-8") -> None:
        """Write a file as a whole, under a lease that covers it; see `ClaimHolder.write_text`."""
        run_in_loop(self._loop, self._delegator.write_text(path, text, encoding=encoding))

    @contextmanager
    def open(self, path: str | os.PathLike[str], mode: str = "w", *, encoding: str = "utf-8") -> Generator[IO[Any]]:
        """Write a file under a lease that covers it; see `ClaimHolder.open`."""
        writer = self._delegator.open(path, mode, encoding=encoding)
        file = run_in_loop(self._loop, writer.__aenter__())
        try:
            yield file
        except BaseException as error:
            run_in_loop(self._loop, _leave(writer, error))
            raise
        run_in_loop(self._loop, _leave(writer, None))

    def approve(self, action: str, details: Any = None, *, timeout_s: float | None = None) -> Approval:
        """Ask whether an action may be taken; see `Participant.approve`."""
        return run_in_loop(self._loop, self._delegator.approve(action, details, timeout_s=timeout_s))

    def spend(self, *, tokens: int = 0, cost: float = 0.0) -> None:
        """Tell what was just spent; see `Participant.spend`."""
        self._delegator.spend(tokens=tokens, cost=cost)

    def partial(self, value: Any) -> None:
        """Hand over what there is so far; see `Participant.partial`."""
        self._delegator.partial(value)

    @contextmanager
    def effect(self, what: str) -> Generator[Effect]:
        """Do something outside that cannot be taken back; see `Participant.effect`."""
        doing = self._delegator.effect(what)
        effect = run_in_loop(self._loop, doing.__aenter__())
        try:
            yield effect
        except BaseException as error:
            run_in_loop(self._loop, _leave(doing, error))
            raise
        run_in_loop(self._loop, _leave(doing, None))

    def history(self) -> tuple[TurnRecord, ...]:
        """Return the earlier turns of this session; see `Participant.history`."""
        return run_in_loop(self._loop, self._delegator.history())

    def sleep(self, seconds: float) -> None:
        """Sleep, ending at once with `TurnCancelled` when cancelled."""
        run_in_loop(self._loop, self._delegator.sleep(seconds))

    def cancel(self, reason: str = "", *, kill: bool = False) -> SyncReceipt:
        """Cancel this turn or run itself; see `Delegator.cancel`."""
        receipt = run_in_loop(self._loop, self._delegator.cancel(reason, kill=kill))
        return SyncReceipt(receipt, self._loop)


async def _leave(writer: AbstractAsyncContextManager[Any], error: BaseException | None) -> None:
    """Leave a block that was entered in this loop from another thread; its own error is raised there."""
    try:
        await writer.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except BaseException as raised:
        if raised is not error:
            raise


def _any_settled(runs: Sequence[Run]) -> Callable[[], bool]:
    return lambda: any(run.is_settled for run in runs)


def _plain(options: RunOptions | None) -> RunOptions | None:
    """Return options whose `after` holds asynchronous handles."""
    if options is None or not options.after:
        return options
    from dataclasses import replace

    after = tuple(item.run if isinstance(item, SyncRun) else item for item in options.after)
    return replace(options, after=after)
