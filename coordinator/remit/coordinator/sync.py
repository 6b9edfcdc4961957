"""The blocking API: the same names as `remit.coordinator`, for plain callers.

    from remit.coordinator.sync import Coordinator

    with Coordinator.open(workspace=".") as coordinator:
        with coordinator.turn("fix lint") as turn:
            print(turn.delegate(fix, path="a.py").result())

A turn may be cancelled from another thread or process; the blocked call then raises
`TurnCancelled`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from anyio.from_thread import start_blocking_portal

from remit.agents.client import ClientSession
from remit.agents.runs import RunOptions
from remit.agents.sync_delegation import SyncReceipt, SyncRun, run_in_loop
from remit.agents.sync_tools import SyncToolHolder
from remit.coordinator import api
from remit.coordinator.turn import TurnHolder
from remit.coordinator.views import NodeView, TreeView
from remit.core.approvals import ApprovalRule
from remit.core.cause import Cause, CauseKind
from remit.core.errors import RemitError, TurnCancelled
from remit.core.limits import Limits
from remit.core.messages import DrainAnswer, OpenTurn
from remit.core.outcome import Outcome
from remit.core.records import ApprovalRecord, SessionView, TurnRecord
from remit.locks import ClaimView

__all__ = ["Coordinator", "Limits", "Run", "RunOptions", "Turn"]

Run = SyncRun

_END_S = 2.0
"""Calls in other threads have this long to return when their connection is closed."""


class _Portal:
    """An event loop in another thread, which serves the blocking calls."""

    def __init__(self) -> None:
        self._context = start_blocking_portal("asyncio")
        self._portal = self._context.__enter__()
        self.loop: asyncio.AbstractEventLoop
        self._own_tasks: set[asyncio.Task[Any]]
        self.loop, self._own_tasks = self._portal.call(_loop_and_tasks)

    def close(self) -> None:
        """Let calls that have been told of the end return, bounded, then stop the loop and its thread."""
        self._portal.call(_let_end, self._own_tasks)
        self._context.__exit__(None, None, None)


async def _loop_and_tasks() -> tuple[asyncio.AbstractEventLoop, set[asyncio.Task[Any]]]:
    return asyncio.get_running_loop(), asyncio.all_tasks()


async def _let_end(own: set[asyncio.Task[Any]]) -> None:
    calls = asyncio.all_tasks() - own - {asyncio.current_task()}
    if calls:
        await asyncio.wait(calls, timeout=_END_S)


class Turn(SyncToolHolder):
    """A turn held by a plain caller: `with coordinator.turn(...)`; see `remit.coordinator.Turn`."""

    def __init__(
        self,
        session: ClientSession,
        request: OpenTurn,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._holder = TurnHolder(session, request)
        super().__init__(self._holder, loop)

    @property
    def id(self) -> str:
        """`turn_...`."""
        return self._holder.id

    @property
    def name(self) -> str:
        """Name that the caller gave; may be empty."""
        return self._holder.name

    @property
    def session_id(self) -> str:
        """The session that this turn belongs to."""
        return self._holder.session_id

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, or None while it has not."""
        return self._holder.outcome

    @property
    def cause(self) -> Cause | None:
        """Why it was cancelled, or None."""
        return self._holder.cause

    def __enter__(self) -> Turn:
        """Open the turn and wait until it is the active one of its session."""
        run_in_loop(self._loop, self._holder.begin())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Report the body's end, wait for what is below, and raise if it was cancelled."""
        was_set = self._holder.signal.is_set
        if isinstance(error, KeyboardInterrupt) and not was_set:
            self.cancel("KeyboardInterrupt")
            was_set = True
        report = "returned" if error is None else "cancelled" if was_set else "raised"
        try:
            run_in_loop(self._loop, self._holder.finish(report, error))
        except RemitError:
            # Out of reach for good. What the body raised says more than that.
            if error is None:
                raise
            return False
        stopped = self._holder.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT)
        if stopped and (error is None or (was_set and isinstance(error, Exception))):
            raise TurnCancelled(self._holder.cause, node_id=self.id) from None
        return False


class Coordinator:
    """A blocking connection to one workspace's coordinator; see `remit.coordinator.Coordinator`."""

    def __init__(self, inner: api.Coordinator) -> None:
        self._inner = inner
        self._thread: _Portal | None = None

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
        """Return a coordinator to enter with `with`; see `remit.coordinator.Coordinator.open`."""
        return cls(
            api.Coordinator.open(
                workspace, address=address, surface=surface, grace_s=grace_s, limits=limits, progress=progress
            )
        )

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace."""
        return self._inner.workspace

    def __enter__(self) -> Coordinator:
        """Connect."""
        self._inner.connect()
        self._thread = _Portal()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect; turns that are still held here are cancelled."""
        self.close()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._inner.close()
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None:
            _ = self._inner.session  # says in one sentence that it is not open
            raise RuntimeError("not entered")
        return self._thread.loop

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
        """Return a turn to enter with `with`; see `remit.coordinator.Coordinator.turn`."""
        request = self._inner.turn_request(
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
        )
        return Turn(self._inner.session, request, self._loop)

    def turns(self) -> tuple[NodeView, ...]:
        """Return all turns that the coordinator remembers."""
        return run_in_loop(self._loop, self._inner.turns())

    def runs(self) -> tuple[NodeView, ...]:
        """Return all runs that the coordinator remembers."""
        return run_in_loop(self._loop, self._inner.runs())

    def run(self, run_id: str) -> NodeView:
        """Return one run as it stands."""
        return run_in_loop(self._loop, self._inner.run(run_id))

    def tree(self, node_id: str) -> TreeView:
        """Return a turn or run with everything below it."""
        return run_in_loop(self._loop, self._inner.tree(node_id))

    def locks(self) -> tuple[ClaimView, ...]:
        """Return all claims that are held, waited for or quarantined."""
        return run_in_loop(self._loop, self._inner.locks())

    def clear_claims(self, node_id: str) -> None:
        """Free what is quarantined for an ended turn or run."""
        run_in_loop(self._loop, self._inner.clear_claims(node_id))

    def sessions(self) -> tuple[SessionView, ...]:
        """Return the sessions of this workspace."""
        return run_in_loop(self._loop, self._inner.sessions())

    def history(self, session: str) -> tuple[TurnRecord, ...]:
        """Return the turns of a session; see `remit.coordinator.Coordinator.history`."""
        return run_in_loop(self._loop, self._inner.history(session))

    def approvals(self, *, everything: bool = False) -> tuple[ApprovalRecord, ...]:
        """Return the approvals that wait for an answer; see `remit.coordinator.Coordinator.approvals`."""
        return run_in_loop(self._loop, self._inner.approvals(everything=everything))

    def approve(
        self, approval_id: str, reason: str = "", *, by: str = "", user: str = "", request_id: str = ""
    ) -> ApprovalRecord:
        """Say yes to a request for approval; see `remit.coordinator.Coordinator.approve`."""
        answer = self._inner.approve(approval_id, reason, by=by, user=user, request_id=request_id)
        return run_in_loop(self._loop, answer)

    def deny(
        self, approval_id: str, reason: str = "", *, by: str = "", user: str = "", request_id: str = ""
    ) -> ApprovalRecord:
        """Say no to a request for approval; see `remit.coordinator.Coordinator.deny`."""
        answer = self._inner.deny(approval_id, reason, by=by, user=user, request_id=request_id)
        return run_in_loop(self._loop, answer)

    def statistics(self) -> dict[str, Any]:
        """Return counts of turns, runs, slots, hosts and clients."""
        return run_in_loop(self._loop, self._inner.statistics())

    def cancel(
        self,
        target: str,
        reason: str = "",
        *,
        kind: CauseKind = CauseKind.USER_INTERRUPT,
        kill: bool = False,
        user: str = "",
        actor: str = "",
        grace_s: float | None = None,
        dry_run: bool = False,
    ) -> SyncReceipt:
        """Stop a turn, a run, or the turns of a session; see `remit.coordinator.Coordinator.cancel`."""
        receipt = run_in_loop(
            self._loop,
            self._inner.cancel(
                target,
                reason,
                kind=kind,
                kill=kill,
                user=user,
                actor=actor,
                grace_s=grace_s,
                dry_run=dry_run,
            ),
        )
        return SyncReceipt(receipt, self._loop)

    def drain(self, node: str, reason: str = "", *, undo: bool = False) -> DrainAnswer:
        """Move work away from a node of the cluster; see `remit.coordinator.Coordinator.drain`."""
        return run_in_loop(self._loop, self._inner.drain(node, reason, undo=undo))

    def shutdown(self, reason: str = "shutdown", *, timeout_s: float = 10.0) -> bool:
        """End this workspace's coordinator; see `remit.coordinator.Coordinator.shutdown`."""
        return run_in_loop(self._loop, self._inner.shutdown(reason, timeout_s=timeout_s))
