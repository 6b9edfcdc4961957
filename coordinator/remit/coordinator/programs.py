"""The programs of a workspace on one machine, as its coordinator sees them: they belong to the daemon there.

Hosts start and stop them. The coordinator says that it is still there, asks what
became of them after a restart, and ends those whose host is gone. Where no program
was ever started there is no daemon, and none is started for a question.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from remit.agents.tooldesk import scope_of
from remit.coordinator.engine import Swept
from remit.core.cause import Cause, CauseKind
from remit.core.errors import RemitError
from remit.locks import Area, AreaKind, Workspace, write
from remit.processes import JobView, ProcessClient
from remit.processes.aftermath import locks_after, treat, was_killed
from remit.processes.gitlocks import Aftermath
from remit.processes.leases import LEASE_S
from remit.processes.place import Place

__all__ = ["Programs"]

logger = logging.getLogger("remit.coordinator")

_EVERY_S = LEASE_S / 3


class Programs:
    """Thread-safe. Calls that block say so; the others return at once and work in a thread.

    Args:
        workspace: the workspace's folder.
        holder: who vouches, for people.
        state_dir: of the node; None for the default.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        holder: str = "coordinator",
        state_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workspace = str(workspace)
        self._scope = scope_of(workspace)
        self._holder = holder
        self._place = Place(state_dir)
        self._clock = clock
        self._vouched_at = -_EVERY_S
        self._lock = threading.Lock()

    def _is_used(self) -> bool:
        """Tell whether any program was ever started on this machine."""
        return self._place.jobs.is_dir()

    def _client(self, *, start: bool = True) -> closing[ProcessClient]:
        return closing(ProcessClient(state_dir=self._place.state_dir, start=start))

    def vouch(self) -> None:
        """Say that the coordinator is there, every some seconds at most."""
        now = self._clock()
        with self._lock:
            if now - self._vouched_at < _EVERY_S:
                return
            self._vouched_at = now
        threading.Thread(target=self._renew, name="remit-vouch", daemon=True).start()

    def _renew(self) -> None:
        if not self._is_used():
            return
        try:
            with self._client(start=False) as client:
                client.renew(self._scope, holder=self._holder, ttl_s=LEASE_S)
        except RemitError as error:
            # No daemon: its keepers wait for the next one, which the next program starts.
            logger.debug("nobody to vouch to: %s", error)

    def end(self, owner: str, claimed: Sequence[Area] = ()) -> Swept:
        """End what a run, or a turn itself, has left in the foreground; blocks, bounded.

        Args:
            owner: the run or turn.
            claimed: areas that it may write and that nobody else uses: there its git locks are taken away.

        Returns:
            Whether nothing of it is left, with proof; and what became of its git locks.
        """
        if not self._is_used():
            return Swept(gone=True)
        cause = Cause(
            CauseKind.PARENT_LOST,
            origin=owner,
            actor="coordinator",
            surface="coordinator",
            at_unix_ms=int(time.time() * 1000),
            reason="nobody looks after it any more",
        )
        try:
            with self._client() as client:
                summary = client.stop_many(scope=self._scope, runs=[owner], cause=cause)
                views = client.list(scope=self._scope, runs=[owner]) if summary.is_proven_gone and claimed else ()
        except RemitError as error:
            logger.warning("programs of %s could not be ended: %s", owner, error)
            return Swept(gone=False)
        if not summary.is_proven_gone:
            logger.error("programs of %s could not be stopped: %s", owner, summary.survivors or summary.unconfirmed)
        return Swept(summary.is_proven_gone, self._clean_up(views, claimed))

    def _clean_up(self, views: Iterable[JobView], claimed: Sequence[Area]) -> Aftermath:
        """Look where programs were killed, and take away the git locks that are proven to be theirs."""
        workspace = Workspace(self._workspace)
        places = [os.path.join(workspace.root, a.label or a.key) for a in claimed if a.kind is AreaKind.PATH]
        removed: dict[str, None] = {}
        left: dict[str, None] = {}
        for view in views:
            if view.result is None or not was_killed(view.result):
                continue
            locks = locks_after(str(workspace.root), view.argv, places)
            ours = [lock.path for lock in locks if _is_covered(lock.path, workspace, claimed)]
            found = treat(locks, view.result, ours)
            removed |= dict.fromkeys(found.removed)
            left |= dict.fromkeys(found.left)
        # What one program is not proven to have made, another one may be.
        gone = tuple(f"{path}: " for path in removed)
        return Aftermath(tuple(removed), tuple(text for text in left if not text.startswith(gone)))

    def gone(self, runs: Collection[str]) -> Mapping[str, frozenset[int]]:
        """Return which programs of these runs have ended with nothing left: run -> process ids; blocks."""
        if not self._is_used():
            return {}
        found: dict[str, set[int]] = {}
        try:
            with self._client() as client:
                for view in client.list(scope=self._scope, runs=runs):
                    if view.result is not None and view.result.is_proven_gone:
                        found.setdefault(view.run, set()).add(view.pid)
        except RemitError as error:
            logger.warning("nobody says what became of programs: %s", error)
        return {run: frozenset(pids) for run, pids in found.items()}

    def owners(self) -> frozenset[str]:
        """Return the runs, and the turns themselves, of which foreground programs run here; blocks.

        Raises:
            RemitError: there is no daemon, or it does not answer.
        """
        if not self._is_used():
            return frozenset()
        with self._client() as client:
            views = client.list(scope=self._scope)
        here = (view.run or view.turn for view in views if view.result is None and not view.background)
        return frozenset(owner for owner in here if owner)

    def release(self) -> None:
        """End the lease in good order: what foreground programs there are stop; blocks, bounded."""
        if not self._is_used():
            return
        try:
            with self._client(start=False) as client:
                client.release(self._scope)
        except RemitError as error:
            logger.debug("no programs to release: %s", error)


def _is_covered(path: str, workspace: Workspace, claimed: Sequence[Area]) -> bool:
    try:
        return workspace.still_holds([write(path)], tuple(claimed))
    except RemitError:
        return False
