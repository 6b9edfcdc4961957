"""What turns and run contexts share: delegating, waiting, stopping.

A parent turn and a sub-agent delegate in exactly the same way, so there is one
implementation. Every wait goes through `wait_runs`, which watches the signal of
whoever waits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Literal, cast, overload

from remit.agents.client import ClientSession
from remit.agents.definition import as_agent
from remit.agents.environment import capture
from remit.agents.payload import encode_arguments, short_preview
from remit.agents.runs import CancelReceipt, Run, RunOptions, request_cancel
from remit.agents.transport import AgentBundle, bundle
from remit.agents.wishes import RunWishes, checked_claims, wishes_of_run
from remit.core.approvals import policy_rules
from remit.core.cause import CauseKind
from remit.core.delivery import LoopDelivery
from remit.core.errors import DependencyError, InvalidArgument, TurnCancelled
from remit.core.messages import DelegateRequest, RunRequest, dumps
from remit.core.outcome import Outcome
from remit.core.scope import current_scope, shielded
from remit.core.signal import CancelSignal
from remit.core.wellformed import check_message, check_number, shown
from remit.telemetry.carrier import current_carrier, read_carrier
from remit.telemetry.names import ObservedAt
from remit.telemetry.watching import BodyWatch, waiting_at

__all__ = ["Delegator"]

_PREVIEW_BYTES = 512
WAITS = {
    "children": ObservedAt.CHILD_WAIT,
    "claims": ObservedAt.LOCK_WAIT,
    "approval": ObservedAt.APPROVAL_WAIT,
}
"""What a wait is called where it is told what a body was at when it heard a cancel."""


class Delegator(ABC):
    """Something that may delegate runs and wait for them: a turn or a run context.

    Args:
        session: the connection to the coordinator.
        node_id: the turn or run that delegates.
        turn_id: the turn whose tree that is in.
        attempt: which attempt of a run this is; 0 for a turn.
        signal: set when the turn or run is cancelled.
        watch: notes of how its body takes a cancel, if they are wanted.
        carrier: the trace context that it runs in, as whoever delegates here finds it.
    """

    def __init__(
        self,
        *,
        session: ClientSession | None,
        node_id: str,
        turn_id: str,
        attempt: int,
        signal: CancelSignal,
        watch: BodyWatch | None = None,
        carrier: str = "",
    ) -> None:
        self._session = session
        self._node_id = node_id
        self._turn_id = turn_id
        self._attempt = attempt
        self._signal = signal
        self._watch = watch
        self._carrier = carrier

    # -- who this is ---------------------------------------------------------------

    @property
    def signal(self) -> CancelSignal:
        """The signal of this turn or run: its own and what it inherits."""
        return self._signal

    def workspace_root(self) -> str:
        """Return the folder that claims are relative to."""
        return self.session.opened.workspace

    @property
    def session(self) -> ClientSession:
        """The connection to the coordinator."""
        if self._session is None:
            self._session = self._connect()
        return self._session

    @property
    def requester(self) -> str:
        """Id of the run that asks for a cancel; the empty text for a turn."""
        return self._node_id if self._attempt else ""

    def live_runs(self) -> tuple[Run, ...]:
        """Return the runs that were delegated here and whose end is not known yet."""
        if self._session is None:
            return ()
        return tuple(run for run in self._session.tracked() if isinstance(run, Run) and run.belongs_to(self))

    @abstractmethod
    def _connect(self) -> ClientSession:
        """Return a connection, made when it is first needed."""

    # -- delegating ----------------------------------------------------------------

    async def delegate(
        self,
        agent: Any,
        /,
        *,
        options: RunOptions | None = None,
        **arguments: Any,
    ) -> Run:
        """Delegate one run; return once its acceptance is durable, not when it ends.

        Args:
            agent: what `@agent` or `CommandAgent` made, or `module:function`.
            options: name, deadline, retries and so on.
            arguments: for the agent's body, by name.

        Raises:
            TurnCancelled: this turn or run is being cancelled; nothing was started.
            UsageError: bad agent, arguments or options; nothing was started.
            Refused: too deep, too many, or closing; nothing was started.

        Cancellation:
            Always a checkpoint. If it is cancelled midway the run may have been
            accepted; it is cancelled with its parent then.

        Durability:
            The acceptance is on the disk when this returns.
        """
        runs = await self._delegate(agent, [arguments], [options or RunOptions()])
        return runs[0]

    async def delegate_many(
        self,
        agent: Any,
        arguments: Iterable[Mapping[str, Any]],
        *,
        options: RunOptions | Sequence[RunOptions] | None = None,
    ) -> list[Run]:
        """Delegate several runs of one agent, all of them or none.

        Args:
            agent: what `@agent` or `CommandAgent` made, or `module:function`.
            arguments: one mapping of arguments a run.
            options: for all of them, or one for each.

        Returns:
            The runs, in the order of the arguments.

        Raises:
            As `delegate`; then none of them was started.
        """
        argument_list = [_mapping(item) for item in _each(arguments, "arguments must be mappings, one for each run")]
        if options is None or isinstance(options, RunOptions):
            option_list = [options or RunOptions()] * len(argument_list)
        else:
            option_list = list(_each(options, "options must be RunOptions, one for all runs or one for each"))
        return await self._delegate(agent, argument_list, option_list)

    async def _delegate(self, agent: Any, arguments: list[dict[str, Any]], options: list[RunOptions]) -> list[Run]:
        self._signal.raise_if_set()
        request, runs = self.prepare([agent] * len(arguments), arguments, options)
        await self.send(request, runs)
        return runs

    def prepare(
        self,
        agents: Sequence[Any],
        arguments: Sequence[Mapping[str, Any]],
        options: Sequence[RunOptions],
    ) -> tuple[DelegateRequest, list[Run]]:
        """Check and pack a delegation of possibly different agents, without sending it.

        Raises:
            UsageError: see `delegate`.
        """
        if not len(agents) == len(arguments) == len(options):
            raise InvalidArgument(f"{len(arguments)} sets of arguments and {len(options)} sets of options")
        for option in {id(option): option for option in options}.values():
            _check_options(option)
        bundles: dict[int, AgentBundle] = {}
        runs: list[Run] = []
        for candidate, option in zip(agents, options, strict=True):
            if id(candidate) not in bundles:
                bundles[id(candidate)] = bundle(as_agent(candidate))
            runs.append(
                Run(
                    self,
                    self.session.ids.run(),
                    name=option.name,
                    agent=bundles[id(candidate)].name,
                )
            )
        names = _names(runs) if any(option.after for option in options) else {}
        requests = tuple(
            _run_request(run, bundles[id(candidate)], given, option, names, self.workspace_root())
            for run, candidate, given, option in zip(runs, agents, arguments, options, strict=True)
        )
        environment = capture()
        request = DelegateRequest(
            parent_id=self._node_id,
            parent_attempt=self._attempt,
            client_id=self.session.client_id,
            env_key=environment.key,
            env=dumps(environment),
            agents={packed.key: packed.blob for packed in bundles.values()},
            runs=requests,
            trace=self._inner_trace(),
        )
        return request, runs

    def _inner_trace(self) -> str:
        """Return the carrier of a span that the caller has opened inside; the empty text if there is none.

        Without one, what is delegated comes below the span of this turn or run itself.
        """
        current = current_carrier()
        if not current or read_carrier(current) == read_carrier(self._carrier):
            return ""
        return current

    async def send(self, request: DelegateRequest, runs: Sequence[Run]) -> None:
        """Send a packed delegation; see `delegate` for what it raises."""
        accepted = False
        try:
            with self.session.asking_for([run.id for run in runs]):
                for run in runs:
                    self.session.track(run.id, run)
                await self._watched(self.session.request("delegate", request))
            accepted = True
        finally:
            if not accepted:
                # If it was taken on all the same, it ends with its parent.
                for run in runs:
                    self.session.untrack(run.id)

    # -- waiting -------------------------------------------------------------------

    def run(self, run_id: str, *, name: str = "") -> Run:
        """Return a handle on any run of this workspace; waiting on it watches the signal of this turn or run."""
        handle = Run(self, run_id, name=name)
        self.session.watch(run_id, handle)
        return handle

    @overload
    async def gather(self, *runs: Run, return_outcomes: Literal[False] = False) -> list[Any]: ...

    @overload
    async def gather(self, *runs: Run, return_outcomes: Literal[True]) -> list[Outcome]: ...

    async def gather(self, *runs: Run, return_outcomes: bool = False) -> list[Any]:
        """Wait for several runs and return their results in order.

        The first that does not succeed cancels the others, waits until they have
        ended, and raises.

        Args:
            runs: what to wait for.
            return_outcomes: wait for all and return their outcomes instead; one
                that fails stops no other.

        Raises:
            RunFailed, RunCancelled, RunTimedOut, RunLost: the first that did not succeed.
            TurnCancelled: this turn or run was cancelled.
        """
        if return_outcomes:
            await self.wait_runs(runs, enough=_all_settled(runs), timeout_s=None)
            return [_outcome(run) for run in runs]
        await self.wait_runs(runs, enough=_failed_or_all(runs), timeout_s=None)
        failed = next((run for run in runs if _has_failed(run)), None)
        if failed is not None:
            await self._cancel_siblings(runs, failed)
            return [failed.value()]
        return [run.value() for run in runs]

    async def _cancel_siblings(self, runs: Sequence[Run], failed: Run) -> None:
        """Stop what waits beside a run that did not succeed, and see it stop."""
        others = [run for run in runs if not run.is_settled]
        if not others:
            return
        label = failed.name or failed.agent or failed.id
        # One request: thousands one after the other would let the last go on for seconds.
        await request_cancel(
            self.session,
            others[0].id,
            also=[run.id for run in others[1:]],
            reason=f"{label} did not succeed",
            kind=CauseKind.PARENT_FAILED,
            actor=self.requester,
            requester=self.requester,
        )
        await self.wait_runs(others, enough=_all_settled(others), timeout_s=None)

    async def as_completed(self, runs: Iterable[Run]) -> AsyncIterator[Run]:
        """Yield runs as they end, whatever their outcome; call `run.value()` for results.

        Raises:
            TurnCancelled: this turn or run was cancelled.
        """
        waiting = list(dict.fromkeys(runs))
        while waiting:
            current = waiting
            await self.wait_runs(current, enough=_any_settled(current), timeout_s=None)
            ended = [run for run in current if run.is_settled]
            waiting = [run for run in current if not run.is_settled]
            for run in ended:
                self._signal.raise_if_set()
                yield run

    async def wait_runs(self, runs: Iterable[Run], *, enough: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until enough has ended; the primitive behind all waits for runs.

        Args:
            runs: whose ends are looked at.
            enough: tells whether the wait is over; called after each end.
            timeout_s: seconds, or None; its expiry stops nothing.

        Returns:
            Whether enough had ended in time.

        Raises:
            TurnCancelled: one's own signal is set, even if enough has ended.
        """
        self._signal.raise_if_set()
        runs = tuple(runs)
        _check_runs(runs)
        check_number("timeout_s", timeout_s, negative=True)
        open_runs = [run for run in runs if not run.is_settled]
        if enough():
            await self._watched(asyncio.sleep(0))
            return True
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        waker = _Waker(LoopDelivery.of_loop(loop), over, enough)
        with self._while_waiting(open_runs) as ticket:
            try:
                for run in open_runs:
                    if not run.add_waiter(waker):
                        waker()
                done = await self._watched(_bounded(over, timeout_s), ticket)
            finally:
                for run in open_runs:
                    run.remove_waiter(waker)
        await self._go_on()
        self._signal.raise_if_set()
        return done or enough()

    @contextmanager
    def _while_waiting(self, runs: Sequence[Run], *, what: str = "children") -> Generator[asyncio.Future[None] | None]:
        """Give way to others during a wait; yields a future that fails if the wait is refused."""
        with waiting_at(WAITS[what], self._watch):
            yield None

    async def _go_on(self) -> None:
        """Take one's place again after a wait; a turn has none to take."""
        return

    async def _watched(self, awaitable: Any, refusal: asyncio.Future[None] | None = None) -> Any:
        """Await something under this turn's or run's signal.

        Where a scope of the same signal holds the current task, the scope cancels
        it. Elsewhere (tasks that a body made, the sync API) a callback does.
        """
        if refusal is not None or not self._is_held():
            return await self._race(awaitable, refusal)
        try:
            return await awaitable
        except asyncio.CancelledError:
            self._raise_own_cancel()
            raise

    def _is_held(self) -> bool:
        """Tell whether a scope of this turn's or run's signal holds the current task."""
        scope = current_scope()
        return scope is not None and scope.signal is self._signal and scope.task is asyncio.current_task()

    @contextmanager
    def _own_cancel(self) -> Generator[None]:
        """Turn the `CancelledError` that our own scope delivered into `TurnCancelled`."""
        try:
            yield
        except asyncio.CancelledError:
            self._raise_own_cancel()
            raise

    def _raise_own_cancel(self) -> None:
        """Raise `TurnCancelled` if what the current task has pending is our own scope's cancel."""
        scope = current_scope()
        here = scope is not None and scope.task is asyncio.current_task()
        if here and scope is not None and scope.owns_cancellation():
            raise TurnCancelled(self._signal.cause, node_id=self._node_id) from None

    async def _race(self, awaitable: Any, refusal: asyncio.Future[None] | None) -> Any:
        loop = asyncio.get_running_loop()
        delivery = LoopDelivery.of_loop(loop)
        stop: asyncio.Future[None] = loop.create_future()

        def wake(_: object) -> None:
            delivery.post(lambda: None if stop.done() else stop.set_result(None))

        work = asyncio.ensure_future(awaitable)
        waiters: set[asyncio.Future[Any]] = {work, stop}
        if refusal is not None:
            waiters.add(refusal)
        with self._signal.add_callback(wake), self._own_cancel():
            try:
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not work.done():
                    work.cancel()
                # Its error is nobody's business if the signal came first.
                work.add_done_callback(_take_note)
        self._signal.raise_if_set()
        if refusal is not None and refusal.done():
            refusal.result()
        return work.result()

    # -- time and stopping ---------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Sleep; ends at once when this turn or run is cancelled.

        Args:
            seconds: from 0.

        Raises:
            TurnCancelled: this turn or run was cancelled.
            InvalidArgument: no finite number.
        """
        check_number("seconds", seconds, negative=True)
        self._signal.raise_if_set()
        if not self._is_held():
            await self._race(asyncio.sleep(seconds), None)
            return
        # Not by `_watched`: it would be one more frame for a cancel of thousands to unwind.
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._raise_own_cancel()
            raise

    async def cancel(self, reason: str = "", *, kill: bool = False) -> CancelReceipt:
        """Cancel this turn or run itself, and everything below it.

        Returns:
            A receipt: the cancel is durable and everything live has been told. The
            next wait of this turn or run raises `TurnCancelled`.
        """
        receipt = await request_cancel(
            self.session, self._node_id, reason=reason, kill=kill, actor=self._node_id, requester=self.requester
        )
        if receipt.accepted and receipt.cause is not None:
            self._signal.set(receipt.cause)
        return receipt

    def shielded(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """Protect clean-up from this turn's or run's cancellation, for a bounded time.

        Args:
            timeout_s: seconds; a shield without a deadline is not possible.
        """
        return shielded(timeout_s)


class _Waker:
    """Completes a future, in its loop, once enough has ended."""

    __slots__ = ("_delivery", "_enough", "_over", "_posted")

    def __init__(self, delivery: LoopDelivery, over: asyncio.Future[None], enough: Callable[[], bool]) -> None:
        self._delivery = delivery
        self._over = over
        self._enough = enough
        self._posted = False

    def __call__(self) -> None:
        """Note an end; any thread. Many ends in one batch are looked at once."""
        if not self._posted:
            self._posted = True
            self._delivery.post(self._look)

    def _look(self) -> None:
        self._posted = False
        if not self._over.done() and self._enough():
            self._over.set_result(None)


def _take_note(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def _bounded(over: asyncio.Future[None], timeout_s: float | None) -> bool:
    """Wait for a future at most that long. `asyncio.wait` swallows no cancel, unlike `wait_for`."""
    if timeout_s is None:
        await over
        return True
    done, _ = await asyncio.wait([over], timeout=max(0.0, timeout_s))
    return bool(done)


def _names(runs: Sequence[Run]) -> dict[str, str]:
    """Return the ids of a batch by name, for `after`.

    Raises:
        DependencyError: a name that others may mean is there twice.
    """
    found: dict[str, str] = {}
    for run in runs:
        if run.name and run.name in found:
            raise DependencyError(f"two runs of one delegation are named {run.name!r}")
        if run.name:
            found[run.name] = run.id
    return found


def _run_request(
    run: Run,
    packed: AgentBundle,
    arguments: Mapping[str, Any],
    options: RunOptions,
    names: Mapping[str, str],
    workspace: str,
) -> RunRequest:
    packed.check_arguments(arguments)
    wishes = _wishes(packed, options, arguments, workspace)
    request = RunRequest(
        run_id=run.id,
        agent_key=packed.key,
        agent_name=packed.name,
        name=options.name,
        arguments=encode_arguments(arguments, packed.name),
        preview=short_preview(dict(arguments), _PREVIEW_BYTES) if arguments else "",
        pool=packed.isolation,
        resources_key=packed.resources_key,
        after=tuple(_dependency(item, names) for item in _each(options.after, "after must hold runs, ids or names")),
        deadline_s=options.deadline_s,
        retries=options.retries,
        retry_delay_s=options.retry_delay_s,
        attempt_timeout_s=options.attempt_timeout_s,
        detached=options.detached,
        grace_s=options.grace_s,
        limits=options.limits or packed.limits,
        claims=wishes.areas,
        wishes=wishes.spelled,
        approvals=policy_rules(options.approvals) if options.approvals else (),
    )
    check_message(request)
    return request


def _each(items: Any, wanted: str) -> Iterable[Any]:
    """Return what can be gone through; a text is one thing and not its letters."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidArgument(f"{wanted}, not {shown(items)}")
    found: Iterable[Any] = items  # pyright: ignore[reportUnknownVariableType]
    return found


def _mapping(arguments: Any) -> dict[str, Any]:
    if not isinstance(arguments, Mapping):
        raise InvalidArgument(f"arguments must be mappings from names to values, not {shown(arguments)}")
    return dict(cast("Mapping[str, Any]", arguments))


def _check_runs(runs: Iterable[Any]) -> None:
    for run in runs:
        if not isinstance(run, Run):
            raise InvalidArgument(f"runs must be what `delegate` returned, not {shown(run)}")


def _wishes(packed: AgentBundle, options: RunOptions, arguments: Mapping[str, Any], workspace: str) -> RunWishes:
    if not (packed.claims or options.claims):
        return RunWishes()
    return wishes_of_run(packed.claims, checked_claims(options.claims), arguments, workspace)


def _dependency(item: object, names: Mapping[str, str]) -> str:
    if isinstance(item, Run):
        return item.id
    if isinstance(item, str):
        return names.get(item, item)
    raise InvalidArgument(f"after must hold runs, ids or names, not {item!r}")


def _check_options(options: Any) -> None:
    """Refuse numbers that can never work.

    Raises:
        InvalidArgument: the message names the option.
    """
    if not isinstance(options, RunOptions):
        raise InvalidArgument(f"options must be RunOptions, not {shown(options)}")
    for name in ("deadline_s", "attempt_timeout_s"):
        check_number(name, getattr(options, name), above_zero=True)
    check_number("retries", options.retries, whole=True)
    for name in ("retry_delay_s", "grace_s"):
        check_number(name, getattr(options, name))


def _has_failed(run: Run) -> bool:
    return run.is_settled and run.outcome is not Outcome.SUCCEEDED


def _outcome(run: Run) -> Outcome:
    if run.outcome is None:
        run.value()  # raises why the end is not known
    assert run.outcome is not None
    return run.outcome


def _all_settled(runs: Sequence[Run]) -> Callable[[], bool]:
    waiting = list(runs)

    def enough() -> bool:
        # Settled runs leave from the end, so that all ends together cost O(runs).
        while waiting and waiting[-1].is_settled:
            waiting.pop()
        return not waiting

    return enough


def _any_settled(runs: Sequence[Run]) -> Callable[[], bool]:
    return lambda: any(run.is_settled for run in runs)


def _failed_or_all(runs: Sequence[Run]) -> Callable[[], bool]:
    waiting = list(runs)

    def enough() -> bool:
        nonlocal waiting
        still: list[Run] = []
        for run in waiting:
            if not run.is_settled:
                still.append(run)
            elif run.outcome is not Outcome.SUCCEEDED:
                return True
        waiting = still
        return not waiting

    return enough
