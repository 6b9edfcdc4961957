"""A turn, as its parent agent holds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from remit.agents.client import ClientSession
from remit.agents.participant import Participant
from remit.agents.runs import Run
from remit.agents.tooldesk import ToolDesk
from remit.agents.tools import settle_all
from remit.core.cause import Cause, CauseKind
from remit.core.errors import (
    CoordinatorUnavailable,
    InternalError,
    Refused,
    RemitError,
    TurnCancelled,
    UsageError,
    WaitCycle,
)
from remit.core.messages import (
    BodyTiming,
    CancelRequest,
    EndedNotice,
    FinishTurn,
    NotePartial,
    NoteSpend,
    NoteWait,
    Notice,
    OpenTurn,
    TurnCancelledNotice,
    TurnStartedNotice,
)
from remit.core.outcome import Outcome
from remit.core.scope import TaskScope
from remit.core.signal import CancelSignal
from remit.core.texts import clean_text, error_text
from remit.telemetry.carrier import current_carrier
from remit.telemetry.spans import start_turn_span
from remit.telemetry.watching import BodyWatch

__all__ = ["Turn", "TurnHolder"]

_RETRY_S = 0.2


class TurnHolder(Participant):
    """A turn without a task around it: what the asynchronous and the blocking form share."""

    def __init__(self, session: ClientSession, request: OpenTurn) -> None:
        super().__init__(
            session=session,
            node_id=request.turn_id,
            turn_id=request.turn_id,
            attempt=0,
            signal=CancelSignal(name=request.turn_id),
            carrier=current_carrier(),
        )
        self._span = start_turn_span(request.turn_id, name=request.name, session_id=request.session_id)
        self._request = replace(request, trace=self._span.carrier or self._carrier or request.trace)
        self._watch = watch = BodyWatch(self._signal)
        self._take_timing = watch.timing
        self._told_at: float | None = None
        # Not with the notice: the answer to its own cancel, or the end of a run, may come before that.
        self._signal.add_callback(lambda _: self._note_told())
        self._ended: EndedNotice | None = None
        self._started = False
        self._lost: RemitError | None = None
        self._wakers: list[Callable[[], None]] = []
        self._waits: dict[int, tuple[str, ...]] = {}
        self._wait_count = 0
        self._borrowed: set[str] = set()
        self._scope: TaskScope | None = None
        self._was_entered = False

    def _connect(self) -> ClientSession:
        raise InternalError("a turn always has a connection")

    @property
    def id(self) -> str:
        """`turn_...`."""
        return self._node_id

    @property
    def name(self) -> str:
        """Name that the caller gave; may be empty."""
        return self._request.name

    @property
    def session_id(self) -> str:
        """The session that this turn belongs to."""
        return self._request.session_id

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, or None while it has not."""
        return None if self._ended is None else self._ended.outcome

    @property
    def cause(self) -> Cause | None:
        """Why it was cancelled, or None."""
        return self._signal.cause

    # -- handing over --------------------------------------------------------------

    def _send_spent(self, tokens: int, cost: float) -> None:
        # If this copy is lost, the next one or the word of the body's end holds the total.
        with suppress(RemitError):
            self.session.submit("note_spend", NoteSpend(self._node_id, tokens, cost))

    def _send_partial(self, preview: str, blob: bytes) -> None:
        self.session.submit("note_partial", NotePartial(self._node_id, preview, blob))

    # -- waiting -------------------------------------------------------------------

    def run(self, run_id: str, *, name: str = "") -> Run:
        """Return a handle on any run of this workspace; waiting on it watches this turn's signal."""
        self._borrowed.add(run_id)
        return super().run(run_id, name=name)

    @contextmanager
    def _while_waiting(self, runs: Sequence[Run], *, what: str = "children") -> Generator[asyncio.Future[None] | None]:
        """Tell the coordinator of a wait for runs that are not this turn's own; it refuses one that could never end.

        That it waits for its own is known, and costs no message.
        """
        foreign = tuple(run.id for run in runs if not run.belongs_to(self) or run.id in self._borrowed)
        if not foreign:
            with super()._while_waiting(runs, what=what):
                yield None
            return
        refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun = self._note_waits(foreign)
        asking = asyncio.ensure_future(self.session.request("note_wait", begun))
        asking.add_done_callback(lambda asked: _refuse(refusal, asked))
        try:
            with super()._while_waiting(runs, what=what):
                yield refusal
        finally:
            asking.cancel()
            if refusal.done():
                refusal.exception()  # seen, or its waiter was cancelled first
            del self._waits[begun.number]
            with suppress(RemitError):  # out of reach: the end of this turn ends its waits
                self.session.submit("note_wait", self._note_waits(()))

    def _note_waits(self, more: tuple[str, ...]) -> NoteWait:
        self._wait_count += 1
        if more:
            self._waits[self._wait_count] = more
        on = tuple(dict.fromkeys(name for names in self._waits.values() for name in names))
        return NoteWait(self._node_id, self._wait_count, on)

    # -- processes -----------------------------------------------------------------

    def tool_desk(self) -> ToolDesk:
        """Return the desk of this client."""
        return self.session.desk

    def tool_folder(self) -> Path:
        """Return the directory for the output of this turn's own programs."""
        folder = Path(self.session.opened.workspace) / ".remit" / "output" / self.id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def tool_owner(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the session; no run, and nothing above."""
        return self.session_id, "", ()

    async def end_tools(self) -> None:
        """Stop what this turn has started itself and not let go, when its body is over; bounded."""
        if self._tool_count:
            await settle_all(self.session.desk.of_node(self.id))

    # -- notices (poll thread) -----------------------------------------------------

    def notice(self, notice: Notice) -> None:
        """Take a notice about this turn (called by the session)."""
        if isinstance(notice, TurnCancelledNotice):
            self._span.event("remit.cancel.requested", notice.cause)
            self._note_told()
            self._signal.set(notice.cause)
        elif isinstance(notice, TurnStartedNotice):
            self._started = True
            self._wake()
        elif isinstance(notice, EndedNotice):
            if notice.cause is not None and notice.outcome is not Outcome.SUCCEEDED:
                self._signal.set(notice.cause)
            self._ended = notice
            self._span.end(notice.outcome, cause=notice.cause, error_type=notice.error_type)
            self._wake()

    def _note_told(self) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()

    def lost_contact(self, error: RemitError) -> None:
        """Take note that nothing more will be heard (called by the session)."""
        self._lost = error
        self._signal.set(Cause(CauseKind.PARENT_LOST, self._node_id, surface="client", reason=str(error)))
        self._wake()

    def _wake(self) -> None:
        for waker in list(self._wakers):
            waker()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a notice brings."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._wakers.append(wake)
        try:
            while not condition():
                if self._lost is not None:
                    raise self._lost
                await changed.wait()
                changed.clear()
        finally:
            self._wakers.remove(wake)

    # -- life ----------------------------------------------------------------------

    async def begin(self) -> None:
        """Open the turn and wait until it is the active one of its session.

        Raises:
            SessionBusy, CoordinatorClosing, InvalidArgument: it was refused.
            TurnCancelled: it was cancelled while it waited for its session.

        Cancellation:
            A checkpoint. If it is cancelled midway the turn is taken back.
        """
        try:
            with self.session.asking_for((self._node_id,)):
                self.session.track(self._node_id, self)
                await self.session.request("open_turn", self._request)
            await self._watched(self._until(lambda: self._started or self._ended is not None))
            self._signal.raise_if_set()
        except (Refused, UsageError):
            self.session.untrack(self._node_id)
            raise
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """End a turn whose block will not be entered: it must not keep its session busy."""
        if self._ended is not None:
            return
        reason = "its holder went away before it began"
        request = CancelRequest(self.session.ids.request(), self._node_id, reason=reason, surface=self._request.surface)
        try:
            if not self._signal.is_set:
                self.session.submit("cancel", request)
            self.session.submit("finish_turn", FinishTurn(self._node_id, "cancelled"))
        except RemitError:
            # Out of reach: the coordinator hears of it by our silence.
            return

    async def finish(self, report: str, error: BaseException | None = None) -> None:
        """Say how the body ended and wait until everything below has ended too.

        Watches no signal: this is how a turn sees its own cancel through. A coordinator
        that is being restarted is asked again, until the session gives it up.

        Raises:
            CoordinatorUnavailable: contact was lost for good, or the session was closed.
        """
        await self.end_tools()
        request = FinishTurn(
            self._node_id,
            report,
            error_type=clean_text(type(error).__name__) if error is not None else "",
            error=error_text(error) if error is not None else "",
            tokens=self._tokens,
            cost=self._cost,
            timing=self._timing(),
        )
        while True:
            try:
                await self.session.request("finish_turn", request)
                break
            except CoordinatorUnavailable:
                if self.session.closed:
                    raise
            await asyncio.sleep(_RETRY_S)
        await self._until(lambda: self._ended is not None)

    def _timing(self) -> BodyTiming:
        """Return how the body took its cancel, for the spans of it."""
        if self._signal.is_set:
            # It is marked before anybody is called: a body that looks may be out before its call.
            self._note_told()
        struck = self._scope.struck_at if self._scope is not None else None
        return self._take_timing(self._told_at, struck)


class Turn(TurnHolder):
    """One piece of foreground work of a parent agent: `async with coordinator.turn(...)`.

    Leaving the block waits for everything that was delegated in it. When the turn
    is cancelled, from wherever, every wait in the block raises, the block's task is
    cancelled at its awaits, and the block ends with `TurnCancelled`. An exception in
    the block cancels what still runs below (`parent_failed`).
    """

    async def __aenter__(self) -> Turn:
        """Open the turn, once; see `TurnHolder.begin`.

        Raises:
            Refused: this turn was entered before.
        """
        if self._was_entered:
            raise Refused(f"{self._node_id} was entered before; make another turn with coordinator.turn(...)")
        self._was_entered = True
        await self.begin()
        self._scope = TaskScope(self._signal)
        self._scope.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Report the body's end, wait for what is below, and raise if it was cancelled."""
        assert self._scope is not None
        verdict = self._scope.exit(error)
        was_set = self._signal.is_set
        foreign = verdict.is_foreign
        if foreign and not was_set:
            closing = asyncio.ensure_future(self._stop_and_finish(error))
        else:
            closing = asyncio.ensure_future(self.finish(_report(error, was_set=was_set), error))
        interrupted = await self._see_through(closing)
        problem = closing.exception()
        if foreign:
            return False
        if interrupted is not None:
            raise interrupted
        if self._signal.is_set and _is_cancel(error, was_set, self.outcome):
            raise TurnCancelled(self._signal.cause, node_id=self._node_id) from None
        if problem is not None and error is None:
            raise problem
        return False

    async def _stop_and_finish(self, error: BaseException | None) -> None:
        """Cancel what is below a holder that was cancelled itself, and see it end."""
        await self._stop_below()
        await self.finish("cancelled", error)

    async def _stop_below(self) -> None:
        try:
            await self.cancel("its holder was cancelled")
        except RemitError:
            # Out of reach: what follows, the report of the body's end, says so.
            return

    async def _see_through(self, closing: asyncio.Future[None]) -> asyncio.CancelledError | None:
        """Wait for the end of all that is below; a foreign cancel meanwhile stops it first."""
        interrupted: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                interrupted = error
                if not self._signal.is_set:
                    stopping = asyncio.ensure_future(self._stop_below())
                    await asyncio.wait([stopping], timeout=5.0)
        return interrupted


def _refuse(refusal: asyncio.Future[None], asked: asyncio.Future[None]) -> None:
    """Let a wait fail that was refused; whatever else went wrong with the question, the wait itself hears of."""
    error = None if asked.cancelled() else asked.exception()
    if isinstance(error, WaitCycle) and not refusal.done():
        refusal.set_exception(error)


def _report(error: BaseException | None, *, was_set: bool) -> str:
    """Return the word for how a turn's body ended."""
    if error is None:
        return "returned"
    if was_set:
        return "cancelled"
    return "raised"


def _is_cancel(error: BaseException | None, was_set: bool, outcome: Outcome | None) -> bool:
    """Tell whether the block must end with `TurnCancelled`.

    An ordinary exception from before the cancel stays what it is.
    """
    if outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
        return error is None or was_set or isinstance(error, (asyncio.CancelledError, TurnCancelled))
    return was_set and isinstance(error, (asyncio.CancelledError, TurnCancelled))
