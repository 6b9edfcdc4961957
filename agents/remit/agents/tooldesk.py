"""The tool processes of one host or driver: who vouches for them, and who stops them.

**Rules**

1. A stop is asked for in any thread and returns at once; threads of their own carry
   it out, so neither a busy event loop nor a cancelled task holds it up.
2. Stops that are asked for together and alike are one message to the daemon.
3. While foreground processes live here, the daemon is told every few seconds that
   their coordinator still stands behind them. A host that has lost its coordinator
   stops saying so, and the daemon ends them when the lease is over.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from remit.core.cause import Cause
from remit.core.errors import RemitError
from remit.processes import ProcessClient
from remit.processes.leases import LEASE_S
from remit.processes.place import Place

__all__ = ["Stoppable", "ToolDesk", "scope_of"]

logger = logging.getLogger("remit.processes")

_RENEW_EVERY_S = LEASE_S / 3
_KEPT_CONNECTIONS = 1
"""Connections to the daemon that stay open between calls; one is enough for starts in turn."""


def scope_of(workspace: str | Path) -> str:
    """Return the name under which the daemon knows a workspace: no path, and the same in every process."""
    resolved = str(Path(workspace).resolve())
    return "ws_" + hashlib.sha256(resolved.encode("utf-8", "surrogateescape")).hexdigest()[:20]


class Stoppable(Protocol):
    """A process as the desk needs it."""

    node_id: str
    """Run or turn that started it."""
    job: str
    """Its id; empty until its start was answered."""
    key: str
    """Its idempotency key."""
    generation: int
    """Attempt that started it."""
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""

    def stop_failed(self, error: RemitError) -> None:
        """Take note that nobody could be asked to stop it. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Wish:
    """One stop that was asked for."""

    tool: Stoppable
    cause: Cause | None
    grace_s: float
    kill: bool


class ToolDesk:
    """Starts nothing by itself; knows what was started through it and not yet over.

    Args:
        workspace: the workspace's folder.
        holder: id of this host or client, under which it vouches for the workspace.
        lease_left: seconds for which the coordinator can still be vouched for.
        client: the way to the daemon; made when first needed by default.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        holder: str,
        lease_left: Callable[[], float] = lambda: LEASE_S,
        client: ProcessClient | None = None,
    ) -> None:
        self.scope = scope_of(workspace)
        self._holder = holder
        self._lease_left = lease_left
        self._client = client
        self._lock = threading.Lock()
        self._live: dict[str, set[Stoppable]] = {}
        self._wishes: deque[_Wish] = deque()
        self._is_collecting = False
        self._renewed_at = -_RENEW_EVERY_S
        self._renewer: threading.Thread | None = None
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self.abandoned = False
        """Whether this process counts as killed: what it had started is for others to find."""

    @property
    def client(self) -> ProcessClient:
        """The way to the daemon of this machine."""
        with self._lock:
            if self._client is None:
                self._client = ProcessClient(kept=_KEPT_CONNECTIONS)
            return self._client

    @property
    def was_used(self) -> bool:
        """Whether any process was started here."""
        return self._client is not None

    # -- who is there --------------------------------------------------------------

    def add(self, tool: Stoppable) -> None:
        """Remember a foreground process from before its start until it is over, and vouch for it."""
        with self._lock:
            self._live.setdefault(tool.node_id, set()).add(tool)
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._keep_vouching, name="remit-vouch", daemon=True)
                self._renewer.start()

    def remove(self, tool: Stoppable) -> None:
        """Forget a process that is over, or belongs to the session now."""
        with self._changed:
            tools = self._live.get(tool.node_id)
            if tools is not None:
                tools.discard(tool)
                if not tools:
                    del self._live[tool.node_id]
            self._changed.notify_all()

    def of_node(self, node_id: str) -> frozenset[Stoppable]:
        """Return the foreground processes of a run or turn that are not over."""
        with self._lock:
            return frozenset(self._live.get(node_id, ()))

    def vouch(self) -> None:
        """Tell the daemon that the coordinator stands behind this workspace, if that is due. Blocks shortly.

        Raises:
            ProcdUnavailable: there is no daemon.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._renewed_at < _RENEW_EVERY_S:
                return
            self._renewed_at = now
        left_s = self._lease_left()
        if left_s > 0:
            self.client.renew(self.scope, holder=self._holder, ttl_s=min(LEASE_S, left_s))

    def _keep_vouching(self) -> None:
        while True:
            with self._changed:
                if self._live and not self._closed:
                    self._changed.wait(_RENEW_EVERY_S)
                if not self._live or self._closed:
                    self._renewer = None
                    return
            try:
                self.vouch()
            except RemitError as error:
                logger.warning("the daemon of tool processes could not be told that we live: %s", error)

    # -- stopping ------------------------------------------------------------------

    def stop_later(
        self, tool: Stoppable, cause: Cause | None, *, kill: bool = False, grace_s: float | None = None
    ) -> None:
        """Have a process stopped with its whole tree; any thread, returns at once."""
        wish = _Wish(tool, cause, tool.grace_s if grace_s is None else grace_s, kill)
        with self._lock:
            self._wishes.append(wish)
            if self._is_collecting:
                return
            self._is_collecting = True
        _in_thread(self._carry_out, "remit-stop")

    def _carry_out(self) -> None:
        with self._lock:
            wishes, self._wishes = self._wishes, deque()
            # What is asked for from here on gets a thread of its own: this one may wait for a grace.
            self._is_collecting = False
        groups: dict[tuple[Cause | None, float, bool], list[Stoppable]] = {}
        for wish in wishes:
            groups.setdefault((wish.cause, wish.grace_s, wish.kill), []).append(wish.tool)
        for (cause, grace_s, kill), tools in groups.items():
            self._stop_group(tools, cause, grace_s, kill)

    def _stop_group(self, tools: list[Stoppable], cause: Cause | None, grace_s: float, kill: bool) -> None:
        alone = [tool for tool in tools if not tool.job]
        known = [tool for tool in tools if tool.job]
        runs = {tool.node_id for tool in known}
        whole = len(known) > 1 and all(self.of_node(run) <= set(tools) for run in runs)
        if not whole:
            alone, known = tools, []
        for tool in alone:
            _in_thread(lambda tool=tool: self._stop_one(tool, cause, grace_s, kill), "remit-stop-one")  # type: ignore[misc]
        if not known:
            return
        try:
            generation = max(tool.generation for tool in known)
            self.client.stop_many(
                scope=self.scope, runs=runs, cause=cause, grace_s=grace_s, kill=kill, generation=generation
            )
        except RemitError as error:
            for tool in known:
                tool.stop_failed(error)

    def _stop_one(self, tool: Stoppable, cause: Cause | None, grace_s: float, kill: bool) -> None:
        try:
            self.client.stop(
                scope=self.scope,
                job=tool.job or None,
                key=tool.key,
                cause=cause,
                grace_s=grace_s,
                kill=kill,
                tombstone=True,
                generation=tool.generation,
            )
        except RemitError as error:
            tool.stop_failed(error)

    def stop_rest(self, node_id: str, cause: Cause | None, *, generation: int, grace_s: float = 2.0) -> tuple[int, ...]:
        """Stop what a run has left in the foreground, also by earlier attempts; blocks, bounded.

        Returns:
            Processes that could not be stopped.

        Raises:
            RemitError: nobody could be asked.
        """
        if not self.was_used and not Place().jobs.is_dir():
            # No program was ever started on this machine, so no daemon is started to ask for one.
            return ()
        summary = self.client.stop_many(
            scope=self.scope, runs=[node_id], cause=cause, grace_s=grace_s, generation=generation
        )
        return summary.survivors

    def abandon(self) -> None:
        """Be as a process that was killed is: nobody stops or waits for what was started here."""
        self.abandoned = True
        self.close()

    def close(self) -> None:
        """Vouch for nothing any more. Idempotent; stops nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            client = self._client
        if client is not None:
            client.close()


def _in_thread(work: Callable[[], None], name: str) -> None:
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        # No more threads, or the interpreter is closing: here, then; every call is bounded.
        work()
