"""Links from a signal to what follows it, small again as soon as that is gone.

**Invariants**

1. `SIGNALS_LOCK` guards every link of every signal in the process: additions,
   and the walk that marks a subtree, happen under it. It is taken last: no
   code of a caller runs while it is held.
2. The lock is re-entrant, because the interpreter may run a signal handler or
   a finalizer at any point, also while this thread holds it, and that code may
   set a signal. So at every step a container holds all its living members.
3. Weak reference callbacks run at points nobody chose. They never wait for the
   lock: removing one key of a dictionary needs none.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["SIGNALS_LOCK", "Links", "WeakLinks"]

SIGNALS_LOCK = threading.RLock()
"""One lock for all signals: a combined signal joins trees, so trees cannot have their own."""

# Held across a fork, so that a child process neither inherits a lock that
# nobody will release nor a subtree that is marked by half.
os.register_at_fork(
    before=SIGNALS_LOCK.acquire,
    after_in_parent=SIGNALS_LOCK.release,
    after_in_child=SIGNALS_LOCK.release,
)

_MemberT = TypeVar("_MemberT", bound=Hashable)
_TargetT = TypeVar("_TargetT")

_SMALL_BYTES = 1024
# A dictionary that has just grown takes up to about 110 bytes a key; well above
# that it is mostly holes.
_SPARSE_BYTES = 256


class Links(Generic[_MemberT]):
    """Members in the order they came; memory follows their number down as well as up.

    A plain dictionary never shrinks when keys are removed, so one burst of
    members would stay in memory for as long as the signal lives.

    Args:
        is_dead: tells whether a member needs no place any more; must be true
            before `discard` is called for it, and for ever after.
    """

    __slots__ = ("__weakref__", "_is_dead", "_members")

    def __init__(self, is_dead: Callable[[_MemberT], bool]) -> None:
        self._is_dead = is_dead
        self._members: dict[_MemberT, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: _MemberT) -> None:
        """Add a member; the caller holds `SIGNALS_LOCK`."""
        self._members[member] = None

    def discard(self, member: _MemberT) -> None:
        """Remove a member if it is there; needs no lock and never waits."""
        members = self._members
        members.pop(member, None)
        size = sys.getsizeof(members)
        is_sparse = size > _SMALL_BYTES and size > _SPARSE_BYTES * len(members)
        # Not now, if another thread is at work: a later removal will do it.
        if is_sparse and SIGNALS_LOCK.acquire(blocking=False):
            try:
                self._compact()
            finally:
                SIGNALS_LOCK.release()

    def members(self) -> list[_MemberT]:
        """Return the members at this moment, oldest first."""
        return list(self._members)

    def _compact(self) -> None:
        old = self._members
        self._members = new = dict(old)
        # Between the copy and its store a handler may have added to `old` (taken
        # over here) or removed from it (dropped again as dead).
        for member in list(old):
            new[member] = None
        for member in list(new):
            if self._is_dead(member):
                new.pop(member, None)


class WeakLinks(Links[weakref.ref[_TargetT]]):
    """Targets that are followed without being kept alive, in the order they came."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_is_cleared)

    def follow(self, target: _TargetT) -> None:
        """Follow a target for as long as it lives; the caller holds `SIGNALS_LOCK`."""
        self._members[weakref.ref(target, self.discard)] = None

    def living(self) -> list[_TargetT]:
        """Return the targets that are still alive, oldest first."""
        return [target for ref in list(self._members) if (target := ref()) is not None]


def _is_cleared(ref: weakref.ref[_TargetT]) -> bool:
    return ref() is None
