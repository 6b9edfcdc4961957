"""A driver process and its turns, as models. Keeps the rules of `remit.coordinator.turn`."""

from __future__ import annotations

from typing import Any

from remit.core.cause import Cause, CauseKind
from remit.core.limits import Limits
from remit.core.messages import (
    AnswerApproval,
    CancelAnswer,
    CancelRequest,
    EndedNotice,
    FinishTurn,
    NoteSpend,
    Notice,
    OpenTurn,
    TurnCancelledNotice,
    TurnStartedNotice,
)
from remit.core.records import ApprovalRecord
from remit.testing.simulation.body import Body
from remit.testing.simulation.keepers import Keepers, ToolProcess
from remit.testing.simulation.kernel import Kernel
from remit.testing.simulation.plan import Step, TurnPlan
from remit.testing.simulation.script import Script
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
        self._keepers = client.keepers
        self._programs = 0
        self._process: ToolProcess | None = None
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
            limits=Limits(max_concurrent=plan.max_concurrent, tokens=plan.tokens),
            session_limits=Limits(tokens=plan.session_tokens) if plan.session_tokens else None,
            approvals=({"action": "*", "answer": plan.policy},) if plan.policy else (),
            on_failure=plan.on_failure,
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

    def spends(self) -> None:
        """Say what this turn's body has spent in all."""
        self._session.request("note_spend", NoteSpend(self.node_id, self.spent, 0.0), _ignore)

    def work(self, step: Step) -> Script:
        """Run a process."""
        if step.verb != "process":
            return
        self._programs += 1
        areas = tuple(area for held in self.holds.values() for area in held)
        self._process = self._keepers.start(self.node_id, str(self._programs), areas)
        yield self.pause(step.seconds)
        self._process_over()

    def clean_up(self) -> Script:
        """Stop the process that runs."""
        yield self.pause(0.0)
        self._process_over()

    def _process_over(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._keepers.end(process.pid)

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
        self._session.request("finish_turn", FinishTurn(self.node_id, word, tokens=self.spent), _ignore, patience_s=1e9)


class ClientModel:
    """One driver process.

    Args:
        kernel: the clock.
        session: its connection.
        keepers: where its tool processes run.
    """

    def __init__(self, kernel: Kernel, session: Session, keepers: Keepers) -> None:
        self.kernel = kernel
        self.keepers = keepers
        self.session = session
        self.turns: list[TurnBody] = []
        self.cancels: dict[str, CancelAnswer] = {}
        """Answers to cancels, by request id."""
        self.approved: dict[str, ApprovalRecord] = {}
        """What came of answers to requests for approval, by request id."""

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

    def answer(self, request: AnswerApproval) -> None:
        """Answer a request for approval, and remember what came of it."""

        def answered(answer: Answer) -> None:
            if answer.error is None:
                self.approved[request.request_id] = answer.value

        self.session.request("answer_approval", request, answered, patience_s=1e9)

    def vanish(self) -> None:
        """Be gone for good, without a word."""
        self.session.close()
        for turn in self.turns:
            turn.vanish()


def _ignore(answer: Any) -> None:
    """Take note of nothing: what counts comes as a notice."""
