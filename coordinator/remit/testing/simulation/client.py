"""A driver process and its turns, as models. Keeps the rules of `remit.coordinator.turn`."""

from __future__ import annotations

from typing import Any

from remit.core.cause import Cause, CauseKind
from remit.core.limits import Limits
from remit.core.messages import (
    CancelAnswer,
    CancelRequest,
    EndedNotice,
    FinishTurn,
    Notice,
    OpenTurn,
    TurnCancelledNotice,
    TurnStartedNotice,
)
from remit.testing.simulation.body import Body
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import TurnPlan
from remit.testing.simulation.session import Answer, Session

__all__ = ["ClientModel", "TurnBody"]


class TurnBody(Body):
    """One turn, from its request to the notice of its end."""

    def __init__(self, client: ClientModel, plan: TurnPlan) -> None:
        super().__init__(
            client.kernel,
            client.session,
            node_id=f"turn_{plan.name}",
            attempt=0,
            steps=plan.steps,
            unwind_s=plan.unwind_s,
            deaf=plan.deaf,
        )
        self._plan = plan
        self.began = False
        self.accepted = False
        self._refused = False
        self.notice: EndedNotice | None = None
        """The end that its holder was told of."""

    def open(self) -> None:
        """Ask for the turn."""
        plan = self._plan
        request = OpenTurn(
            turn_id=self.node_id,
            client_id=self._session.client_id,
            session_id=plan.session,
            name=plan.name,
            on_disconnect=plan.on_disconnect,
            busy=plan.busy,
            deadline_s=plan.deadline_s,
            grace_s=plan.grace_s,
            limits=Limits(max_concurrent=plan.max_concurrent) if plan.max_concurrent else None,
        )
        self._session.track(self.node_id, self._told)
        self._session.request("open_turn", request, self._opened, patience_s=1e9)

    def _opened(self, answer: Answer) -> None:
        self.accepted = answer.error is None
        self._refused = not self.accepted

    def _told(self, notice: Notice | None) -> None:
        if self._refused:
            # Another copy of the request has come to a session that is free by now: it is taken back.
            if isinstance(notice, TurnStartedNotice):
                self._finish("cancelled")
        elif isinstance(notice, TurnStartedNotice):
            if not self.began and not self.is_over and self.notice is None:
                self.began = True
                self.begin()
        elif isinstance(notice, TurnCancelledNotice):
            self._stopped(notice.cause)
        elif isinstance(notice, EndedNotice):
            self.notice = notice
            if notice.cause is not None:
                self._stopped(notice.cause)
        elif not self.accepted:
            # Asked about by a new hello before the request has got through: it still may.
            self._session.track(self.node_id, self._told)
        else:
            self._stopped(Cause(CauseKind.PARENT_LOST, self.node_id, surface="client"))

    def _stopped(self, cause: Cause) -> None:
        if self.began:
            self.stop(cause)
        elif not self.is_over and self.notice is None:
            # It was cancelled while it stood in line: its body is not entered.
            self.is_over = True
            self._finish("cancelled")

    def ending(self) -> str:
        """Return what the plan says."""
        return self._plan.end

    def ended(self, word: str, error: BaseException | None) -> None:
        """Say how the body ended."""
        if word == "returned" or self.cause is None:
            self._finish("raised" if word == "stray" else word)
        else:
            self._finish("cancelled")

    def _finish(self, word: str) -> None:
        self._session.request("finish_turn", FinishTurn(self.node_id, word), _ignore, patience_s=1e9)


class ClientModel:
    """One driver process.

    Args:
        kernel: the clock.
        session: its connection.
    """

    def __init__(self, kernel: Kernel, session: Session) -> None:
        self.kernel = kernel
        self.session = session
        self.turns: list[TurnBody] = []
        self.cancels: dict[str, CancelAnswer] = {}
        """Answers to cancels, by request id."""

    def open_turn(self, plan: TurnPlan) -> None:
        """Begin a turn."""
        if self.session.closed:
            return
        self.session.open()
        turn = TurnBody(self, plan)
        self.turns.append(turn)
        turn.open()

    def cancel(self, request: CancelRequest) -> None:
        """Ask for a cancel and remember the answer."""

        def answered(answer: Answer) -> None:
            if answer.error is None:
                self.cancels[request.request_id] = answer.value

        self.session.request("cancel", request, answered, patience_s=1e9)

    def vanish(self) -> None:
        """Be gone for good, without a word."""
        self.session.close()
        for turn in self.turns:
            turn.vanish()


def _ignore(answer: Any) -> None:
    """Take note of nothing: what counts comes as a notice."""
