"""What turns and run contexts share besides delegating and claiming: approvals, spending, partial results, effects.

**Rules**

1. An approval is an answer, and only `approved` lets a body go on: everything else
   raises. The signal is looked at before the question and after the answer.
2. Whoever does not wait for an answer any more takes the question back.
3. Spending is told as a total, so that no lost or repeated message changes it.
4. An effect is on the coordinator's disk before it begins; what is not confirmed
   stays open and is journalled as uncertain with the end of its body.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from remit.agents.client import ClientSession
from remit.agents.payload import encode_result, short_preview
from remit.agents.tooling import ToolHolder
from remit.core.delivery import LoopDelivery
from remit.core.errors import ApprovalDenied, ApprovalExpired, InvalidArgument, RemitError
from remit.core.limits import is_amount
from remit.core.messages import ApprovalNotice, AskApproval, NoteEffect, Notice, WithdrawApproval
from remit.core.records import ApprovalRecord, TurnRecord
from remit.core.scope import shielded
from remit.core.wellformed import check_number
from remit.journal.redact import mask_text
from remit.telemetry.names import ObservedAt
from remit.telemetry.watching import waiting_at

__all__ = ["Approval", "Effect", "Participant"]

_PREVIEW_BYTES = 2048
_CONFIRM_S = 5.0


@dataclass(frozen=True, slots=True)
class Approval:
    """A yes: the action may be taken now, by this attempt."""

    id: str
    """`approval_...`."""
    action: str
    """What was asked for."""
    by: str
    """Who said yes: a person, or `policy`."""
    surface: str
    """Through what: `cli`, `python`, `policy`."""
    reason: str
    """Free text of whoever said yes; may be empty."""


class Effect:
    """Something outside that a body does and that cannot be taken back."""

    __slots__ = ("id", "is_settled", "what")

    def __init__(self, effect_id: str, what: str) -> None:
        self.id = effect_id
        """`effect_...`."""
        self.what = what
        """What it is, for people."""
        self.is_settled = False
        """Whether its end is known."""

    def settle(self) -> None:
        """Say that its end is known, although the block around it will raise: it was refused, or never sent."""
        self.is_settled = True


class _Answer:
    """Waits for the notice about one approval."""

    def __init__(self, owner: Participant, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._delivery = LoopDelivery.of_loop(loop)
        self.record: asyncio.Future[ApprovalRecord] = loop.create_future()

    def notice(self, notice: Notice) -> None:
        """Take the coordinator's word (poll thread)."""
        if isinstance(notice, ApprovalNotice):
            record = notice.record
            if record.cause is not None:
                # The order to stop is on another channel and may be behind: it is the same cause.
                self._owner.signal.set(record.cause)
            self._delivery.post(lambda: None if self.record.done() else self.record.set_result(record))

    def lost_contact(self, error: RemitError) -> None:
        """Take note that no word will come (poll thread)."""
        self._delivery.post(lambda: self._fail(error))

    def _fail(self, error: RemitError) -> None:
        if not self.record.done():
            self.record.set_exception(error)
            self.record.exception()  # seen: whoever waited may have been cancelled


class Participant(ToolHolder):
    """Something that asks, spends and hands over: a turn or a run context."""

    _spent_lock = threading.Lock()
    _tokens = 0
    _cost = 0.0

    # -- approvals -----------------------------------------------------------------

    async def approve(self, action: str, details: Any = None, *, timeout_s: float | None = None) -> Approval:
        """Ask a person, or a policy, whether an action may be taken; return once it may.

        It is shown by `remit approvals` with the path of whoever asks. While it waits, a
        run gives up its slot; the wait counts against its deadline. The answer is for
        this attempt alone.

        Args:
            action: what is to be done, in the form that rules match: `deploy prod`. What
                looks like a secret in it is masked before it leaves this process.
            details: more for people; shown bounded and redacted.
            timeout_s: seconds until it expires; None for no limit but the deadline's.

        Raises:
            ApprovalDenied: somebody or a rule said no.
            ApprovalExpired: nobody answered in time.
            TurnCancelled: this turn or run was cancelled, before, while or right after it
                waited; a later answer is refused.
            InvalidArgument: an empty action, or a time that is not more than 0.

        Cancellation:
            Always a checkpoint. Cancelled midway, the question is closed as cancelled.

        Durability:
            Question and answer are on the disk; an open question outlives the coordinator.
        """
        _check_question(action, timeout_s)
        self._signal.raise_if_set()
        session = self.session
        approval_id = session.ids.approval()
        waiter = _Answer(self, asyncio.get_running_loop())
        request = AskApproval(approval_id, self._node_id, self._attempt, _shown(action), _shown(details), timeout_s)
        session.track(approval_id, waiter)
        answered = False
        try:
            with waiting_at(ObservedAt.APPROVAL_WAIT, self._watch):
                record: ApprovalRecord = await self._watched(session.request("ask_approval", request))
            if record.is_open:
                record = await self._wait_for_answer(waiter)
            answered = True
            self._signal.raise_if_set()
        finally:
            session.untrack(approval_id)
            if not answered:
                _take_back(session, WithdrawApproval(approval_id, self._node_id))
        return self._approval_of(record)

    async def _wait_for_answer(self, waiter: _Answer) -> ApprovalRecord:
        """Wait without a slot, and take a slot again."""
        with self._while_waiting((), what="approval") as ticket:
            record: ApprovalRecord = await self._watched(_result_of(waiter.record), ticket)
        self._signal.raise_if_set()
        await self._go_on()
        return record

    def _approval_of(self, record: ApprovalRecord) -> Approval:
        if record.decision == "approved":
            return Approval(record.id, record.action, record.by, record.surface, record.reason)
        because = f": {record.reason}" if record.reason else ""
        if record.decision == "expired":
            raise ApprovalExpired(
                f"approval of {record.action!r} for {self._node_id} has expired{because}; ask again if you must",
                approval_id=record.id,
                action=record.action,
            )
        word = "denied" if record.decision == "denied" else "closed"
        raise ApprovalDenied(
            f"approval of {record.action!r} for {self._node_id} was {word} by {record.by or 'nobody'}{because}",
            approval_id=record.id,
            action=record.action,
            by=record.by,
            reason=record.reason,
        )

    # -- spending ------------------------------------------------------------------

    def spend(self, *, tokens: int = 0, cost: float = 0.0) -> None:
        """Tell what was just spent; it counts for this turn or run, all above it, and the session.

        A budget (`Limits(tokens=, cost=)`) that is used up cancels its own node with the
        cause `budget`: the next wait below it raises `TurnCancelled`. Spending during the
        clean-up after a cancel counts as well. Any thread may call it.

        Args:
            tokens: a whole number from 0.
            cost: money in one currency for the whole workspace, from 0.

        Raises:
            InvalidArgument: a negative amount, or no number.

        Durability:
            On its way when this returns, not on the disk; told before the end of the body.
        """
        if not is_amount(tokens) or tokens != int(tokens) or not is_amount(cost):
            raise InvalidArgument(f"tokens must be a whole number from 0, cost a number, not {tokens!r} and {cost!r}")
        with self._spent_lock:
            self._tokens += int(tokens)
            self._cost += cost
            self._send_spent(self._tokens, self._cost)

    @abstractmethod
    def _send_spent(self, tokens: int, cost: float) -> None:
        """Send what was spent in all."""

    # -- handing over --------------------------------------------------------------

    def partial(self, value: Any) -> None:
        """Hand over what there is so far; kept if this turn or run does not succeed.

        The latest one counts. It is on its way when this returns, not on the disk.

        Raises:
            ResultNotPicklable, ResultTooLarge: it cannot travel.
            CoordinatorUnavailable: a turn whose connection was closed or is lost for good.
        """
        blob = encode_result(value, self._largest_result())
        self._send_partial(short_preview(value, _PREVIEW_BYTES), blob)

    def _largest_result(self) -> int:
        return self.session.opened.max_result_bytes

    @abstractmethod
    def _send_partial(self, preview: str, blob: bytes) -> None:
        """Send a partial result."""

    # -- effects -------------------------------------------------------------------

    @asynccontextmanager
    async def effect(self, what: str) -> AsyncGenerator[Effect]:
        """Do something outside that cannot be taken back: `async with ctx.effect("POST /deploy"):`.

        It is journalled before the block begins. A block that ends normally confirms it.
        One that raises, by a cancel above all, leaves it unconfirmed unless
        `effect.settle()` was called: then the end of the body is journalled with an
        `effect_uncertain` that names it, and receipts count it.

        Args:
            what: what it is, for people; not empty.

        Yields:
            The effect.

        Raises:
            TurnCancelled: this turn or run was cancelled; the block was not entered.

        Cancellation:
            A checkpoint before the block.

        Durability:
            Its begin is on the disk when the block begins, its confirmation when it ends.
        """
        if not what:
            raise InvalidArgument("an effect needs a text that says what it is")
        self._signal.raise_if_set()
        effect = Effect(self.session.ids.new("effect"), _shown(what))
        await self._watched(self.session.request("note_effect", self._effect_note(effect, ended=False)))
        self._signal.raise_if_set()
        try:
            yield effect
            effect.settle()
        finally:
            if effect.is_settled:
                await self._confirm(effect)

    def _effect_note(self, effect: Effect, *, ended: bool) -> NoteEffect:
        return NoteEffect(self._node_id, self._attempt, effect.id, effect.what, ended)

    async def _confirm(self, effect: Effect) -> None:
        """Say that an effect has ended. No place to be cancelled at; lost, it stays uncertain, which is true."""
        with suppress(RemitError):
            async with shielded(_CONFIRM_S):
                await self.session.request("note_effect", self._effect_note(effect, ended=True))

    # -- looking back --------------------------------------------------------------

    @property
    @abstractmethod
    def session_id(self) -> str:
        """The session of this turn or run."""

    async def history(self) -> tuple[TurnRecord, ...]:
        """Return the turns of this session before the one that this belongs to, oldest first.

        A cancelled one tells at which step that was (`describe()`), what it had so far
        (`progress`) and which of its runs did not succeed (`unfinished`).

        Raises:
            TurnCancelled: this turn or run was cancelled.
        """
        self._signal.raise_if_set()
        records: tuple[TurnRecord, ...] = await self._watched(self.session.request("history", self.session_id))
        names = [record.id for record in records]
        return records[: names.index(self._turn_id)] if self._turn_id in names else records


def short_text(text: str, max_bytes: int) -> str:
    """Return a text of so many bytes at most, valid wherever it was cut."""
    blob = text.encode("utf-8", "replace")
    return text if len(blob) <= max_bytes else blob[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _shown(details: Any) -> str:
    """Return what people are shown: bounded, redacted, a text as it is."""
    text = mask_text(details) if isinstance(details, str) else short_preview(details, _PREVIEW_BYTES)
    return short_text(text, _PREVIEW_BYTES)


def _check_question(action: object, timeout_s: float | None) -> None:
    if not isinstance(action, str) or not action:
        raise InvalidArgument(f"action must be a text that says what is to be done, not {action!r}")
    check_number("timeout_s", timeout_s, above_zero=True)


async def _result_of(future: asyncio.Future[ApprovalRecord]) -> ApprovalRecord:
    await asyncio.wait([future])
    return future.result()


def _take_back(session: ClientSession, request: WithdrawApproval) -> None:
    """Send word that nobody waits any more; if it is lost, the question ends with its body."""
    with suppress(RemitError):
        session.submit("withdraw_approval", request)
