"""The Python API: open a workspace's coordinator, hold turns, look, and stop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from remit.agents.client import ClientSession
from remit.agents.link import Link
from remit.agents.runs import CancelReceipt, request_cancel
from remit.coordinator.turn import Turn
from remit.coordinator.views import NodeView, TreeView
from remit.coordinator.workspace import resolve_workspace
from remit.core.approvals import ApprovalRule, policy_rules
from remit.core.cause import CauseKind
from remit.core.errors import CoordinatorClosing, CoordinatorUnavailable, InvalidArgument
from remit.core.limits import Limits
from remit.core.messages import AnswerApproval, DrainAnswer, DrainRequest, OpenTurn
from remit.core.records import ApprovalRecord, SessionView, TurnRecord
from remit.core.wellformed import check_message, check_number
from remit.locks import ClaimView

__all__ = ["Coordinator"]


class Coordinator:
    """A connection to one workspace's coordinator.

        async with Coordinator.open(workspace=".") as coordinator:
            async with coordinator.turn("fix lint") as turn:
                run = await turn.delegate(fix, path="a.py")
                print(await run.result())

    The coordinator itself lives on: it belongs to the workspace, not to this process.
    Closing cancels the turns that are still held here.
    """

    def __init__(
        self,
        workspace: str,
        connect: Callable[[], Link],
        *,
        surface: str = "python",
        grace_s: float = 10.0,
        on_close: Callable[[], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.workspace = workspace
        """Absolute path of the workspace."""
        self._connect = connect
        self._surface = surface
        self._grace_s = grace_s
        self._on_close = on_close
        self._limits = limits
        self._session: ClientSession | None = None
        self._connected = False
        self._is_connecting = False
        self._close_asked = False
        # Re-entrant: a signal handler that closes may come while this thread holds it.
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        workspace: str | Path = ".",
        *,
        address: str | None = None,
        surface: str = "python",
        grace_s: float = 10.0,
        limits: Limits | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Coordinator:
        """Return a coordinator to enter with `async with`; nothing is started before that.

        It uses the Ray that this process is connected to, else `address`, else
        `RAY_ADDRESS`, else the local node, which is started if it is not up.

        Args:
            workspace: an existing folder; its journal is in `.remit/` below it.
            address: `host:port` of a Ray cluster.
            surface: what this caller is, for causes: `python`, `cli`.
            grace_s: seconds without a sign of life from this process before its
                turns are cancelled (`parent_lost`).
            limits: bounds of the workspace, for as long as its coordinator lives; what
                is left out has its default. Entering raises `InvalidArgument` if a
                coordinator already runs there with other numbers.
            progress: called with lines about what is being started.

        Raises:
            InvalidArgument: the workspace is not a readable and writable folder, or
                `limits` sets `max_concurrent`, `tokens` or `cost`, which are not for workspaces.
        """
        path = resolve_workspace(workspace)
        if limits is not None and limits.max_concurrent is not None:
            raise InvalidArgument("max_concurrent is for turns and runs; a workspace has max_shared and max_dedicated")
        if limits is not None and (limits.tokens is not None or limits.cost is not None):
            raise InvalidArgument("tokens and cost are for sessions, turns and runs; a workspace has no budget")
        from remit.coordinator.connecting import RayConnection

        connection = RayConnection(path, address=address, progress=progress, limits=limits)
        return cls(
            path,
            connection.open,
            surface=surface,
            grace_s=grace_s,
            on_close=connection.close,
            limits=limits,
        )

    # -- life ----------------------------------------------------------------------

    async def __aenter__(self) -> Coordinator:
        """Connect; see `connect`."""
        await asyncio.to_thread(self.connect)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; see `close`."""
        await asyncio.to_thread(self.close)

    def connect(self) -> None:
        """Connect in this thread: find or start Ray and the coordinator.

        Raises:
            CoordinatorUnavailable: no Ray at the address, or nobody answers.
            InvalidArgument: it is open already, or the running coordinator has other limits.
            CoordinatorClosing: `close` was called meanwhile.
        """
        with self._lock:
            if self._session is not None or self._is_connecting:
                raise InvalidArgument("this coordinator is open already")
            self._is_connecting, self._close_asked = True, False
        session: ClientSession | None = None
        try:
            session = ClientSession(self._connect(), surface=self._surface, grace_s=self._grace_s)
            self._connected = True
            session.open()
            if self._limits is not None:
                _check_limits(session, self._limits)
        except BaseException:
            self._is_connecting = False
            self._let_go()
            raise
        with self._lock:
            self._is_connecting = False
            if not self._close_asked:
                self._session = session
                return
        session.close()
        self._let_go()
        raise CoordinatorClosing("this coordinator was closed while it was connecting; open it again")

    def close(self) -> None:
        """Disconnect; turns that are still held here are cancelled.

        Idempotent, from any thread and from a signal handler. While it is connecting it
        only takes note: `connect` then raises `CoordinatorClosing` and leaves nothing open.
        """
        # A signal handler may interrupt `connect` in this very thread: no lock may be in its way.
        with self._lock:
            if self._is_connecting:
                self._close_asked = True
                return
            session, self._session = self._session, None
        if session is None:
            return
        session.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._on_close is not None:
            self._on_close()

    @property
    def session(self) -> ClientSession:
        """The connection.

        Raises:
            CoordinatorUnavailable: it is not open.
        """
        if self._session is None:
            raise CoordinatorUnavailable(
                "this coordinator is not open; use it inside `async with Coordinator.open(...)`"
            )
        return self._session

    # -- turns ---------------------------------------------------------------------

    def turn(
        self,
        name: str = "",
        *,
        session: str | None = None,
        user: str = "",
        deadline_s: float | None = None,
        grace_s: float = 5.0,
        on_disconnect: str = "cancel",
        busy: str = "reject",
        limits: Limits | None = None,
        session_limits: Limits | None = None,
        approvals: str | Sequence[ApprovalRule] = (),
        on_failure: str = "continue",
    ) -> Turn:
        """Return a turn to enter with `async with`; nothing happens before that.

        Args:
            name: shown in trees.
            session: the conversation that it belongs to; a new one by default. A
                session has one active turn at a time.
            user: who it is for; a cancel in another user's name does not find it.
            deadline_s: seconds until the whole turn is stopped; None for no limit.
            grace_s: seconds between asking bodies to stop and forcing them.
            on_disconnect: `cancel` (default) or `continue` when this process vanishes.
            busy: if the session is busy: `reject` (default), `queue` behind, or
                `interrupt` what runs and what is queued.
            limits: bounds for the turn and everything below it, its budget included.
            session_limits: `tokens` and `cost` for the whole session, from this turn on;
                None leaves them as they are.
            approvals: what is answered to `approve` below the turn: `ask` people (the
                default), `auto`, `deny`, or rules, of which the first that matches counts.
            on_failure: `continue` (default), or `stop`: the first run delegated by the turn
                itself that does not succeed cancels the others.

        Raises:
            InvalidArgument: a number or word is out of range.
        """
        return Turn(
            self.session,
            self.turn_request(
                name,
                session=session,
                user=user,
                deadline_s=deadline_s,
                grace_s=grace_s,
                on_disconnect=on_disconnect,
                busy=busy,
                limits=limits,
                session_limits=session_limits,
                approvals=approvals,
                on_failure=on_failure,
            ),
        )

    def turn_request(
        self,
        name: str,
        *,
        session: str | None,
        user: str,
        deadline_s: float | None,
        grace_s: float,
        on_disconnect: str,
        busy: str,
        limits: Limits | None,
        session_limits: Limits | None = None,
        approvals: str | Sequence[ApprovalRule] = (),
        on_failure: str = "continue",
    ) -> OpenTurn:
        """Return the checked request behind a turn."""
        if session_limits is not None and session_limits != Limits(
            tokens=session_limits.tokens, cost=session_limits.cost
        ):
            raise InvalidArgument("session_limits may hold tokens and cost; the other limits are for turns and runs")
        check_number("deadline_s", deadline_s, above_zero=True)
        check_number("grace_s", grace_s)
        ids = self.session.ids
        request = OpenTurn(
            turn_id=ids.turn(),
            client_id=self.session.client_id,
            session_id=session or ids.session(),
            name=name,
            user=user,
            surface=self._surface,
            on_disconnect=on_disconnect,
            busy=busy,
            deadline_s=deadline_s,
            grace_s=grace_s,
            limits=limits,
            session_limits=session_limits,
            approvals=policy_rules(approvals),
            on_failure=on_failure,
            # As other commands and libraries do it: the trace of whoever started this process.
            trace=os.environ.get("TRACEPARENT", ""),
        )
        check_message(request)
        return request

    # -- looking -------------------------------------------------------------------

    async def turns(self) -> tuple[NodeView, ...]:
        """Return all turns that the coordinator remembers, oldest first."""
        views: tuple[NodeView, ...] = await self.session.request("turns", None)
        return views

    async def runs(self) -> tuple[NodeView, ...]:
        """Return all runs that the coordinator remembers, oldest first."""
        views: tuple[NodeView, ...] = await self.session.request("runs", None)
        return views

    async def run(self, run_id: str) -> NodeView:
        """Return one run (or turn) as it stands.

        Raises:
            NotFound: no such run.
        """
        view: NodeView = await self.session.request("node", run_id)
        return view

    async def tree(self, node_id: str) -> TreeView:
        """Return a turn or run with everything below it.

        Raises:
            NotFound: no such turn or run.
        """
        view: TreeView = await self.session.request("tree", node_id)
        return view

    async def locks(self) -> tuple[ClaimView, ...]:
        """Return all claims that are held, waited for or quarantined, first come first."""
        views: tuple[ClaimView, ...] = await self.session.request("locks", None)
        return views

    async def clear_claims(self, node_id: str) -> None:
        """Free what is quarantined for an ended turn or run.

        For people who know that nothing of it writes any more where that could not
        be proven.

        Args:
            node_id: the owner, as `locks` shows it.

        Durability:
            On the disk when this returns.
        """
        await self.session.request("clear_claims", node_id)

    async def sessions(self) -> tuple[SessionView, ...]:
        """Return the sessions of this workspace, the one with the latest turn last."""
        views: tuple[SessionView, ...] = await self.session.request("sessions", None)
        return views

    async def history(self, session: str) -> tuple[TurnRecord, ...]:
        """Return the turns of a session, oldest first, the latest hundred of them.

        Raises:
            NotFound: no such session.
        """
        records: tuple[TurnRecord, ...] = await self.session.request("history", session)
        return records

    # -- approvals -----------------------------------------------------------------

    async def approvals(self, *, everything: bool = False) -> tuple[ApprovalRecord, ...]:
        """Return the approvals that wait for an answer, oldest first.

        Args:
            everything: those that are answered, expired or cancelled too, the latest thousand.
        """
        records: tuple[ApprovalRecord, ...] = await self.session.request("approvals", everything)
        return records

    async def approve(
        self, approval_id: str, reason: str = "", *, by: str = "", user: str = "", request_id: str = ""
    ) -> ApprovalRecord:
        """Say yes to a request for approval.

        Args:
            approval_id: `approval_...`.
            reason: free text for people.
            by: who says so.
            user: only what belongs to this user (or to nobody) is found.
            request_id: for sending the same answer again; a new one by default.

        Returns:
            The approval as it stands now.

        Raises:
            ApprovalSettled: it was answered, expired or cancelled before; nothing has changed.
            NotFound: no such approval.

        Durability:
            The answer is on the disk when this returns.
        """
        return await self._answer(approval_id, True, reason, by=by, user=user, request_id=request_id)

    async def deny(
        self, approval_id: str, reason: str = "", *, by: str = "", user: str = "", request_id: str = ""
    ) -> ApprovalRecord:
        """Say no to a request for approval; see `approve`."""
        return await self._answer(approval_id, False, reason, by=by, user=user, request_id=request_id)

    async def _answer(
        self, approval_id: str, yes: bool, reason: str, *, by: str, user: str, request_id: str
    ) -> ApprovalRecord:
        request = AnswerApproval(
            request_id=request_id or self.session.ids.request(),
            approval_id=approval_id,
            approve=yes,
            by=by,
            surface=self._surface,
            reason=reason,
            user=user,
        )
        record: ApprovalRecord = await self.session.request("answer_approval", request)
        return record

    async def statistics(self) -> dict[str, Any]:
        """Return counts of turns, runs, slots, hosts and clients, for people and tests."""
        found: dict[str, Any] = await self.session.request("statistics", None)
        return found

    # -- stopping ------------------------------------------------------------------

    async def cancel(
        self,
        target: str,
        reason: str = "",
        *,
        kind: CauseKind = CauseKind.USER_INTERRUPT,
        scope: str = "subtree",
        kill: bool = False,
        user: str = "",
        actor: str = "",
        grace_s: float | None = None,
        dry_run: bool = False,
    ) -> CancelReceipt:
        """Stop a turn, a run, or the turns of a session, from wherever they were started.

        Args:
            target: id of a turn or run, or a session.
            reason: free text for people.
            kind: why, in the closed set.
            scope: `subtree`: what is stopped is always a node with all below it.
            kill: skip the grace.
            user: only what belongs to this user (or to nobody) is found.
            actor: who asks, for the cause.
            grace_s: seconds between asking and forcing; the target's own by default.
            dry_run: change nothing, and say what would be stopped.

        Returns:
            A receipt. If it is `accepted`, the cancel is durable, nothing below the
            target starts any more, and everything live has been told.

        Durability:
            The cancel is on the disk when this returns.
        """
        if scope != "subtree":
            raise InvalidArgument(f"scope must be 'subtree', not {scope!r}")
        return await request_cancel(
            self.session,
            target,
            reason=reason,
            kind=kind,
            kill=kill,
            user=user,
            actor=actor,
            grace_s=grace_s,
            dry_run=dry_run,
            trace=os.environ.get("TRACEPARENT", ""),
        )

    async def drain(self, node: str, reason: str = "", *, undo: bool = False) -> DrainAnswer:
        """Move this workspace's work away from a node of the cluster, by attempt.

        Nothing starts there any more. Attempts there are told to end with the cause
        `worker_moved`; their runs go on elsewhere as further attempts, which use up none
        of the allowed ones. No run ends by it. The coordinator itself does not move.

        Args:
            node: id of the node or the beginning of it, its name, or its address.
            reason: free text for people.
            undo: let the node have work again; what has moved stays where it is.

        Returns:
            The node and how much moves. The attempts may still be unwinding.

        Raises:
            NotFound: no such node, or several.
            Refused: no other node of the cluster takes work.

        Durability:
            On the disk when this returns; it holds for later lives of the coordinator too.
        """
        answer: DrainAnswer = await self.session.request("drain", DrainRequest(node, reason, undo))
        return answer

    async def shutdown(self, reason: str = "shutdown", *, timeout_s: float = 10.0) -> bool:
        """End this workspace's coordinator: no new turns, cancel all, wait, close.

        Args:
            reason: free text for people.
            timeout_s: seconds to wait for everything to end.

        Returns:
            Whether everything had ended in time.
        """
        quiet: bool = await self.session.request("shutdown", (reason, timeout_s))
        return quiet


def _check_limits(session: ClientSession, limits: Limits) -> None:
    """Refuse a coordinator that was started with other limits than the caller asks for."""
    current: dict[str, int | None] = session.request_blocking("statistics", None)["limits"]
    other = [
        f"{name}={there} (asked for: {wanted})"
        for name, there in current.items()
        if (wanted := getattr(limits, name)) is not None and wanted != there
    ]
    if other:
        session.close()
        raise InvalidArgument(
            f"the coordinator of this workspace runs with {', '.join(other)}; "
            "shut it down first, or leave these limits out"
        )
