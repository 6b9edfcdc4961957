"""One command's process tree: find all of it, signal only it, prove that it is gone.

**Invariants**

1. Group and session number of the leader count as ours only while the leader,
   alive or as a zombie that nobody has waited for, still has its start time:
   as long as it is there the kernel gives its number to nobody else.
2. Any other process is signalled by number and start time together.
3. After `forget` nothing is signalled; `forget` comes before the leader is
   waited for, and excludes a signal that is under way.
4. Process 0, 1, this process and its own group are never signalled.

Found are: the leader's group, its session, descendants by parent link, all of
those seen once, and whatever carries the token in its environment. A process
that left group and session, lost its parents before the first look and cleared
its environment cannot be found this way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGTERM

from remit.processes.table import Delivery, ProcessEntry, ProcessIdentity, ProcessTable, SystemTable

__all__ = ["ProcessTree", "StopReport", "descendants", "identify", "stop_tree"]

_CLEAN_PASSES = 2
"""A scan is not atomic: what forks and exits between two reads is seen by the next one."""
_POLL_MAX_S = 0.05
"""Longest pause between two looks during the grace."""


def identify(pid: int) -> ProcessIdentity | None:
    """Return number and start time of a process, or None when there is none of that number."""
    entry = SystemTable().entry(pid)
    return None if entry is None else entry.identity


def descendants(pid: int, *, table: ProcessTable | None = None) -> tuple[ProcessIdentity, ...]:
    """Return the living processes below one, by parent link, whatever group they are in.

    Args:
        pid: number of the process to start from; itself not among the result.
        table: the process table, or None for the system's.
    """
    entries = (table or SystemTable()).entries()
    start = entries.get(pid)
    below = _below([] if start is None else [start], entries)
    return tuple(sorted(entry.identity for entry in below.values() if not entry.is_dead))


class ProcessTree:
    """All processes that come from one leader. Thread-safe.

    Args:
        leader: identity of a child of this process that is its group's and
            session's leader and is waited for by nobody before `forget`.
        token: text that the tree carries in its environment (`MARK_VARIABLE`).
        table: the process table, or None for the system's.
        known: processes that were seen to belong to it.
    """

    __slots__ = ("_known", "_lock", "_table", "_token", "denied", "is_forgotten", "leader", "refused")

    leader: ProcessIdentity
    """The process that was started."""
    is_forgotten: bool
    """Whether `forget` was called."""
    denied: set[int]
    """Numbers of processes that we were not allowed to signal."""
    refused: int
    """Group signals not sent since the number was no longer proven ours."""

    def __init__(
        self,
        leader: ProcessIdentity,
        *,
        token: str,
        table: ProcessTable | None = None,
        known: Iterable[ProcessIdentity] = (),
    ) -> None:
        self.leader = leader
        self.is_forgotten = False
        self.denied = set()
        self.refused = 0
        self._token = token
        self._table = table or SystemTable()
        self._known: set[ProcessIdentity] = set(known)
        self._lock = threading.Lock()  # makes "check that it is ours, then signal" one step with `forget`

    def members(self) -> tuple[ProcessEntry, ...]:
        """Return the living processes of the tree, the leader among them, and remember them."""
        entries = self._table.entries()
        own = _below([entry for entry in entries.values() if self._is_own(entry, entries)], entries)
        # Marks cost a read each, so they are asked only of what is young enough and not yet found.
        strangers = [entry for pid, entry in entries.items() if pid not in own and self._could_be_own(entry)]
        marked = [entry for entry in strangers if self._table.has_mark(entry.pid, self._token)]
        own.update(_below(marked, entries))
        living = tuple(entry for entry in own.values() if not entry.is_dead and entry.pid not in (1, os.getpid()))
        self._known.update(entry.identity for entry in living)
        return living

    def has_living_leader(self) -> bool:
        """Tell whether the leader itself still runs. Cheap: one read."""
        entry = self._table.entry(self.leader.pid)
        return entry is not None and entry.identity == self.leader and not entry.is_dead

    def signal(self, members: Iterable[ProcessEntry], *signums: int, each: bool = False) -> None:
        """Send signals to the group, and to those members that are outside it.

        The group goes first and in one call, which no fork inside it can
        escape. What is denied or refused is recorded in `denied` and `refused`.

        Args:
            members: what `members` returned.
            signums: the signals, in order.
            each: signal members of the group one by one as well, which finds
                those that the call for the group skips for want of permission.
        """
        is_held = self._is_leader_held()
        alone = [entry for entry in members if each or not is_held or entry.group != self.leader.pid]
        for signum in signums:
            self._send_group(signum)
            for entry in alone:
                self._send(entry.identity, signum)

    def forget(self) -> None:
        """Let no signal go out any more. Call before the leader is waited for."""
        with self._lock:
            self.is_forgotten = True

    def _is_leader_held(self) -> bool:
        entry = self._table.entry(self.leader.pid)
        return entry is not None and entry.identity == self.leader

    def _is_own(self, entry: ProcessEntry, entries: dict[int, ProcessEntry]) -> bool:
        if entry.identity == self.leader or entry.identity in self._known:
            return True
        holder = entries.get(self.leader.pid)
        is_held = holder is not None and holder.identity == self.leader
        return is_held and self.leader.pid in (entry.group, entry.session)

    def _could_be_own(self, entry: ProcessEntry) -> bool:
        return not entry.is_dead and entry.identity.started >= self.leader.started

    def _send_group(self, signum: int) -> None:
        with self._lock:
            if self.is_forgotten:
                return
            if not self._is_leader_held():
                self.refused += 1
                return
            delivery = self._table.send_group(self.leader.pid, signum)
            if delivery is Delivery.REFUSED:
                self.refused += 1

    def _send(self, identity: ProcessIdentity, signum: int) -> None:
        with self._lock:
            if not self.is_forgotten and self._table.send(identity, signum) is Delivery.DENIED:
                self.denied.add(identity.pid)


def _below(roots: list[ProcessEntry], entries: dict[int, ProcessEntry]) -> dict[int, ProcessEntry]:
    """Return the roots and everything below them by parent link."""
    children: dict[int, list[ProcessEntry]] = defaultdict(list)
    for entry in entries.values():
        children[entry.parent].append(entry)
    found: dict[int, ProcessEntry] = {}
    todo = list(roots)
    while todo:
        entry = todo.pop()
        if entry.pid in found:
            continue
        found[entry.pid] = entry
        # A child is never older than its parent; if it looks so, the number was used again.
        todo += [child for child in children[entry.pid] if child.identity.started >= entry.identity.started]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """What a stop found and did."""

    stopped: tuple[int, ...]
    """Numbers of processes that were alive when the stop began, or appeared later, and are gone."""
    survivors: tuple[int, ...]
    """Numbers of processes that are still there; empty is the proof that nothing is left."""
    denied: tuple[int, ...]
    """Numbers of processes that belong to somebody else and could not be signalled."""
    escalated: bool
    """Whether SIGKILL was needed."""


def stop_tree(
    tree: ProcessTree,
    *,
    grace_s: float,
    hurry: threading.Event,
    hard_limit_s: float = 5.0,
    monotonic: Callable[[], float] = time.monotonic,
) -> StopReport:
    """Stop everything of a tree, and return only when nothing is left or the limit is over.

    SIGTERM then SIGCONT (a stopped process handles no SIGTERM), once; the
    grace; then SIGKILL, again and again, until two looks in a row find nothing.
    The leader's end is not the end: what it leaves behind is stopped as well.

    Args:
        tree: whose leader is not yet waited for.
        grace_s: seconds between SIGTERM and SIGKILL; 0 sends SIGKILL at once.
        hurry: when set, what is left of the grace is skipped.
        hard_limit_s: seconds after the first SIGKILL until survivors are reported.
        monotonic: returns seconds.
    """
    stop = _Stop(tree, monotonic)
    stop.look()
    if grace_s > 0 and not hurry.is_set():
        stop.ask(grace_s, hurry)
    stop.force(hard_limit_s)
    left = {entry.pid for entry in stop.members}
    return StopReport(
        stopped=tuple(sorted(stop.seen - left)),
        survivors=tuple(sorted(left)),
        denied=tuple(sorted(tree.denied)),
        escalated=stop.escalated,
    )


class _Stop:
    """One stop under way: what the last look found, and what all looks found."""

    __slots__ = ("_clean", "_monotonic", "_tree", "escalated", "members", "seen")

    def __init__(self, tree: ProcessTree, monotonic: Callable[[], float]) -> None:
        self._tree = tree
        self._monotonic = monotonic
        self._clean = 0
        self.escalated = False
        self.members: tuple[ProcessEntry, ...] = ()
        self.seen: set[int] = set()

    def look(self) -> None:
        """Look at all processes; count how many looks in a row found nothing."""
        self.members = self._tree.members()
        self.seen.update(entry.pid for entry in self.members)
        self._clean = 0 if self.members else self._clean + 1

    def ask(self, grace_s: float, hurry: threading.Event) -> None:
        """Send SIGTERM once, then wait for the end, the grace or the hurry."""
        if not self.members:
            return
        self._tree.signal(self.members, SIGTERM, SIGCONT)
        until = self._monotonic() + grace_s
        pause = 0.001
        while self.members and (remaining := until - self._monotonic()) > 0:
            if hurry.wait(min(pause, remaining)):
                return
            pause = min(pause * 2, _POLL_MAX_S)
            # While the leader lives there is no need for the dear look at all processes.
            if not self._tree.has_living_leader():
                self.look()

    def force(self, hard_limit_s: float) -> None:
        """Send SIGKILL until nothing is found, or the limit is over."""
        until = self._monotonic() + hard_limit_s
        rounds = 0
        while self._clean < _CLEAN_PASSES and self._monotonic() < until:
            if self.members:
                self.escalated = True
                self._tree.signal(self.members, SIGKILL, each=rounds > 0)
                time.sleep(0.0005 if rounds < 20 else 0.005)
                rounds += 1
            self.look()
            # Waiting for processes that we may not signal would only delay the report.
            if self.members and all(entry.pid in self._tree.denied for entry in self.members):
                return
