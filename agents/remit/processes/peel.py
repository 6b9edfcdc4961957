"""Stop one process tree and prove that nothing of it is left, from its keeper.

`Peel` is for a keeper that is a subreaper: kill the group, then again and again
only one's own direct children, until the kernel says there are none (ECHILD).
Whoever loses its parent comes to the keeper, so the tree is taken off layer by
layer however it forks, and the number of a child that nobody has waited for
belongs to no other process. `Track` is for machines without subreapers: the
process table is sampled, whoever was seen is remembered, marks are read.

**Invariants**

1. A signal goes to a child of the keeper that it has not waited for, to a
   process by number and start time, or to the group of a root that it has not
   waited for; never to process 0, 1, the keeper or its group.
2. The root's status is the kernel's, taken once.
3. After `is_empty` nothing is signalled.
4. SIGTERM is sent once; SIGCONT follows it, since a stopped process handles none.

Source: the same algorithm, found independently, is in Bazel's process-wrapper
(github.com/bazelbuild/bazel, src/main/tools/process-tools-linux.cc).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGTERM, pidfd_send_signal
from typing import Protocol

from remit.processes.containment import Cgroup
from remit.processes.descent import below, own_children
from remit.processes.jobs import ExitStatus
from remit.processes.table import Delivery, ProcessEntry, ProcessIdentity, SystemTable
from remit.processes.tree import ProcessTree

__all__ = ["HARD_LIMIT_S", "Peel", "Reach", "StopOutcome", "Track", "TreeStop"]

HARD_LIMIT_S = 5.0
"""Seconds after the first SIGKILL until what is left is reported."""

_DEEP_AFTER = 5
"""Rounds after which deeper descendants are signalled too: long chains then end in few rounds."""
_FAST_ROUNDS = 20
_FAST_PAUSE_S = 0.0005
_SLOW_PAUSE_S = 0.005
_LOOK_PAUSE_S = 0.05
"""Pause between two looks during the grace; the end of a child wakes the keeper earlier."""
_CLEAN_LOOKS = 2
_PIDFD_GROUP = 4
"""PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9: the group of a process, also after it was waited for."""


class Reach(Protocol):
    """Who belongs to a tree, and signals that reach nobody else."""

    status: ExitStatus | None
    """How the root ended; None until it was waited for."""
    is_empty: bool
    """Whether it is proven that nothing is left."""

    @property
    def denied(self) -> set[int]:
        """Processes that we were not allowed to signal."""
        ...

    @property
    def remembered(self) -> tuple[ProcessIdentity, ...]:
        """Who was seen by the last look, where the kernel does not hold the tree together; for the keeper's record."""
        ...

    def has_root_exited(self) -> bool:
        """Tell whether the root has ended, without waiting for it."""
        ...

    def look(self) -> frozenset[int]:
        """Wait for what has ended, and return what is alive; sets `is_empty`."""
        ...

    def everybody(self) -> frozenset[int]:
        """Return all living processes of the tree, however deep; dearer than `look`."""
        ...

    def send(self, *signums: int) -> None:
        """Signal everybody once, in order."""
        ...

    def kill(self, round_number: int) -> None:
        """Send SIGKILL to whoever can be reached in this round, from 0."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Peel:
    """Reach of a keeper that is a subreaper and has exactly one job.

    Args:
        root: the child of this process that was started.
        cgroup: the group that holds the tree, or None.
        is_inside: whether this process is in that group too.
        use_pidfd: signal deeper descendants through handles.
    """

    def __init__(
        self,
        root: ProcessIdentity,
        *,
        cgroup: Cgroup | None = None,
        is_inside: bool = False,
        use_pidfd: bool = True,
    ) -> None:
        self.root = root
        self.status: ExitStatus | None = None
        self.denied: set[int] = set()
        self.is_empty = False
        self._cgroup = cgroup
        self._is_inside = is_inside
        self._is_killing = False
        self._table = SystemTable(use_pidfd=use_pidfd)
        self._direct: list[int] = [root.pid]
        self._known: dict[int, ProcessEntry] = {}
        # Opened while nobody has waited for the root: it means its group for good.
        self._handle = _open_handle(root.pid) if use_pidfd else None

    def has_root_exited(self) -> bool:
        """Tell whether the root has ended, without waiting for it."""
        return self.status is not None or has_exited(self.root.pid)

    def look(self) -> frozenset[int]:
        """Wait for every ended child but the root, and return the living children.

        The root is waited for when it is the last: until then its number, and
        so that of its group, belongs to nobody else.
        """
        if self.is_empty:
            return frozenset()
        # As long as the root lives, who else does is not asked, since that costs more. Not so once they are
        # killed: then whoever comes to us has to be known at once.
        if not self._is_killing and self._is_root_alone_waited_for():
            self._direct = [self.root.pid]
            return frozenset(self._direct)
        self._direct = [pid for pid in own_children() if not self._needs_no_signal(pid)]
        if not self._direct:
            self.status = self.status or _wait(self.root.pid)
            self.is_empty = self.status is not None and _has_no_child()
        return frozenset(self._direct)

    def everybody(self) -> frozenset[int]:
        """Return all living descendants of the keeper, and what else is in the control group."""
        self._known = below(os.getpid(), table=self._table)
        return frozenset(self._known) | frozenset(living_in(self._cgroup, self._table))

    def send(self, *signums: int) -> None:
        """Signal the group, and one by one those of `everybody` that left it."""
        if self.is_empty:
            return
        outside = [entry for entry in self._known.values() if entry.group != self.root.pid]
        for signum in signums:
            self._send_group(signum)
            self._send_each(outside, signum)

    def kill(self, round_number: int) -> None:
        """Send SIGKILL to the group and to one's own children, later to deeper ones too."""
        if self.is_empty:
            return
        self._is_killing = True
        self._kill_cgroup()
        self._send_group(SIGKILL)
        for pid in self._direct:
            self._kill_child(pid)
        if round_number >= _DEEP_AFTER:
            self._send_each(below(os.getpid(), table=self._table).values(), SIGKILL)

    def _is_root_alone_waited_for(self) -> bool:
        """Wait for the children that have ended; tell whether the root lives, and all of those could be waited for."""
        if self.status is not None:
            return False
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return False
            if ended is None:
                return True
            if ended.si_pid == self.root.pid:  # others may have ended behind it
                return False
            _wait(ended.si_pid)

    @property
    def remembered(self) -> tuple[ProcessIdentity, ...]:
        """Nobody: whoever a killed keeper leaves goes to the one who takes in its orphans."""
        return ()

    def close(self) -> None:
        """Give the handle of the root back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _kill_cgroup(self) -> None:
        if self._cgroup is None:
            return
        if self._is_inside:
            try:
                self._cgroup.leave()
            except OSError:  # then it would be the end of this process too; children are killed all the same
                return
            self._is_inside = False
        self._cgroup.kill()

    def _needs_no_signal(self, pid: int) -> bool:
        """Wait for a child if it has ended; tell whether it has. The root is not waited for here."""
        return has_exited(pid) if pid == self.root.pid else _wait(pid) is not None

    def _send_group(self, signum: int) -> None:
        if self.status is None:
            # Before the root leads its own session there is no such group, and nobody else can make one.
            self._checked(lambda: os.killpg(self.root.pid, signum), self.root.pid)
        elif self._handle is not None:
            try:
                pidfd_send_signal(self._handle, signum, None, _PIDFD_GROUP)
            except OSError:  # nobody is left in the group, or the kernel is older
                pass

    def _kill_child(self, pid: int) -> None:
        # Not waited for, so the number is its own, alive or dead.
        self._checked(lambda: os.kill(pid, SIGKILL), pid)

    def _checked(self, send: Callable[[], None], pid: int) -> None:
        try:
            send()
        except ProcessLookupError:  # the race that a stop is expected to lose
            pass
        except PermissionError:
            self.denied.add(pid)

    def _send_each(self, entries: Iterable[ProcessEntry], signum: int) -> None:
        for entry in entries:
            if self._table.send(entry.identity, signum) is Delivery.DENIED:
                self.denied.add(entry.pid)


class Track:
    """Reach of a keeper without subreapers: sample the table, remember, read marks.

    A process that leaves group and session, loses its parents before the first
    look at it and clears its environment is not found; the level in the result
    says `portable`.

    Args:
        root: the child of this process that was started.
        token: the mark of its tree.
        cgroup: the group that holds the tree, or None.
        use_pidfd: signal through handles.
    """

    def __init__(
        self, root: ProcessIdentity, *, token: str, cgroup: Cgroup | None = None, use_pidfd: bool = True
    ) -> None:
        self.root = root
        self.status: ExitStatus | None = None
        self.is_empty = False
        self._cgroup = cgroup
        self._table = SystemTable(use_pidfd=use_pidfd)
        self._tree = ProcessTree(root, token=token, table=self._table)
        self._members: tuple[ProcessEntry, ...] = ()
        self._clean = 0

    @property
    def denied(self) -> set[int]:
        """Processes that we were not allowed to signal."""
        return self._tree.denied

    def has_root_exited(self) -> bool:
        """Tell whether the root has ended, without waiting for it."""
        return self.status is not None or has_exited(self.root.pid)

    def look(self) -> frozenset[int]:
        """Look at the whole table; after two looks in a row that found nobody, wait for the root."""
        if self.is_empty:
            return frozenset()
        found = {entry.pid: entry for entry in self._tree.members()}
        found.update(living_in(self._cgroup, self._table))
        self._members = tuple(found.values())
        self._clean = 0 if found else self._clean + 1
        if self._clean >= _CLEAN_LOOKS and self.has_root_exited():
            # Forgotten first: from the wait on, its number may be somebody else's.
            self._tree.forget()
            self.status = self.status or _wait(self.root.pid)
            self.is_empty = True
        return frozenset(found)

    def everybody(self) -> frozenset[int]:
        """Return what the last look found."""
        return frozenset(entry.pid for entry in self._members)

    def send(self, *signums: int) -> None:
        """Signal the group, and one by one whoever left it."""
        self._tree.signal(self._members, *signums)

    def kill(self, round_number: int) -> None:
        """Send SIGKILL to the group and to everybody known."""
        if self._cgroup is not None and not self.is_empty:
            self._cgroup.kill()
        self._tree.signal(self._members, SIGKILL, each=round_number > 0)

    @property
    def remembered(self) -> tuple[ProcessIdentity, ...]:
        """Who was seen by the last look."""
        return tuple(sorted(entry.identity for entry in self._members))

    def close(self) -> None:
        """Hold nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOutcome:
    """What a stop did."""

    signalled: tuple[int, ...] = ()
    """Processes that were alive when the stop began, or appeared later."""
    escalated: tuple[int, ...] = ()
    """Those of them that were still alive when SIGKILL was sent."""
    survivors: tuple[int, ...] = ()
    """Processes that are still there; empty is the proof that nothing is left."""
    denied: tuple[int, ...] = ()
    """Processes that we were not allowed to signal."""


class TreeStop:
    """One stop under way, a step at a time, so that a keeper goes on listening meanwhile.

    Args:
        reach: the tree.
        now: monotonic seconds.
        grace_s: seconds between SIGTERM and SIGKILL; 0 sends SIGKILL at once.
        hard_limit_s: seconds after the first SIGKILL until `is_over` without proof.
    """

    def __init__(self, reach: Reach, *, now: float, grace_s: float, hard_limit_s: float = HARD_LIMIT_S) -> None:
        self.is_over = False
        self._reach = reach
        self._force_at = now + grace_s
        self._hard_limit_s = hard_limit_s
        self._is_asked = False
        self._rounds = 0
        self._signalled: set[int] = set()
        self._escalated: set[int] = set()
        self._left: frozenset[int] = frozenset()

    def hurry(self, *, now: float, grace_s: float) -> None:
        """Shorten what is left of the grace; a longer one changes nothing."""
        self._force_at = min(self._force_at, now + grace_s)

    def step(self, now: float) -> float:
        """Do what is due; return how many seconds the next step may wait, unless a child ends before.

        Afterwards `is_over` tells whether there is a next step.
        """
        self._left = self._reach.look()
        if self._reach.is_empty:
            self.is_over = True
            return 0.0
        if now < self._force_at:
            return self._ask(now)
        return self._force(now)

    def outcome(self) -> StopOutcome:
        """Return what was done so far."""
        survivors = frozenset[int]() if self._reach.is_empty else self._reach.everybody() | self._left
        return StopOutcome(
            signalled=tuple(sorted(self._signalled)),
            escalated=tuple(sorted(self._escalated)),
            survivors=tuple(sorted(survivors)),
            denied=tuple(sorted(self._reach.denied)),
        )

    def _ask(self, now: float) -> float:
        if not self._is_asked:
            self._is_asked = True
            self._signalled |= self._reach.everybody()
            self._reach.send(SIGTERM, SIGCONT)
        return min(_LOOK_PAUSE_S, self._force_at - now)

    def _force(self, now: float) -> float:
        if self._rounds == 0:
            self._escalated |= self._reach.everybody()
        self._escalated |= self._left
        self._signalled |= self._escalated
        self._reach.kill(self._rounds)
        self._rounds += 1
        if now >= self._force_at + self._hard_limit_s or (self._left and self._left <= self._reach.denied):
            self.is_over = True
        return _FAST_PAUSE_S if self._rounds <= _FAST_ROUNDS else _SLOW_PAUSE_S


def living_in(cgroup: Cgroup | None, table: SystemTable) -> dict[int, ProcessEntry]:
    """Return the living processes of a control group but this one, by number."""
    pids = () if cgroup is None else cgroup.pids()
    entries = (table.entry(pid) for pid in pids if pid != os.getpid())
    return {entry.pid: entry for entry in entries if entry is not None and not entry.is_dead}


def has_exited(pid: int) -> bool:
    """Tell whether a child of this process has ended, without waiting for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # waited for already
        return True


def _has_no_child() -> bool:
    """Tell whether this process has no child, alive or dead: the proof, given by the kernel."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def _wait(pid: int) -> ExitStatus | None:
    """Wait for a child that has ended; None while it runs."""
    try:
        waited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # waited for by somebody else: nobody can know how it ended
        return ExitStatus()
    if not waited:
        return None
    code = os.waitstatus_to_exitcode(status)
    return ExitStatus(exit_code=code) if code >= 0 else ExitStatus(signal=-code)


def _open_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, a sandbox, or no descriptor left
        return None
