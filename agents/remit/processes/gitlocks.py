"""Locks that git leaves behind when it is killed: which of them may be taken away. Pure.

Git makes `X.lock` beside what it changes and removes it when it is done, also on
SIGTERM, but not on SIGKILL; from then on every git command there fails. Nothing
in such a file says whose it is, so that its owner is gone has to be proven from
outside. A lock may be taken away only if all of this holds:

1. we hold the claim on the place, so that no run of ours may be at work there;
2. the tree that we killed is proven empty;
3. the lock was made after the program of that tree was started;
4. it belongs to the user that we are: only processes of that user can have made it;
5. no living process has it open, and no git that lives works in its repository.

Whatever cannot be looked at speaks against it. A lock that stays is named with why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["TICK_S", "Aftermath", "GitLock", "GitUser", "KilledTree", "why_it_stays"]

TICK_S: Final = 0.02
"""Seconds by which the time of a file may lie behind the clock: file systems stamp by the kernel's last tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GitLock:
    """One lock file, as it was found."""

    path: str
    """Its real path."""
    git_dir: str
    """Data folder that it locks: `.git`, or that of a worktree or submodule."""
    made_at: float
    """No later than this it was made, in seconds since 1970: the earliest of its times."""
    uid: int
    """User that it belongs to."""
    identity: tuple[int, int, int, int]
    """Device, inode, size, and time of its last change: another file in its place is another lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledTree:
    """The program that was killed, with all that it had started."""

    started_at: float
    """When it was started, in seconds since 1970."""
    is_empty: bool
    """Whether its keeper has proven that nothing of it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GitUser:
    """A living process that may have made a lock."""

    pid: int
    """Its number."""
    name: str
    """Its name, for people."""
    locks: tuple[str, ...] = ()
    """Locks that it has open."""
    git_dirs: tuple[str, ...] | None = ()
    """Data folders in which it works, if it is a git, with what is below them; None if that cannot be seen."""
    shared: tuple[str, ...] = ()
    """Common folders of the worktrees in which it works; other worktrees below them are no matter of it."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What became of the git locks where a killed program had worked."""

    removed: tuple[str, ...] = ()
    """Paths of locks that were taken away: their owner was killed, with proof."""
    left: tuple[str, ...] = ()
    """Those that stay, each with why: `/repo/.git/index.lock: it is older than the program`."""

    def __bool__(self) -> bool:
        """Tell whether there were any."""
        return bool(self.removed or self.left)


def why_it_stays(
    lock: GitLock, tree: KilledTree | None, users: Sequence[GitUser], *, is_claimed: bool, uid: int
) -> str:
    """Return why a lock must not be taken away; the empty text if it may be.

    Args:
        lock: what was found.
        tree: the program that was killed there; None if none is known to have been.
        users: all living processes that may have made it.
        is_claimed: whether whoever started the program may write at the lock's place, and has not lent it.
        uid: the user that we are.
    """
    user = _user_of(lock, users)
    if user:
        return user
    if tree is None or tree.started_at <= 0:
        return "nobody knows whose it is"
    if not tree.is_empty:
        return "processes of the program that was killed may be left"
    if lock.made_at < tree.started_at - TICK_S:
        return "it is older than the program that was killed"
    if lock.uid != uid:
        return f"it belongs to user {lock.uid}"
    if not is_claimed:
        return "the program was started without a claim on it"
    return ""


def _user_of(lock: GitLock, users: Iterable[GitUser]) -> str:
    for user in users:
        if lock.path in user.locks:
            return f"{user.name} ({user.pid}) has it open"
        if user.git_dirs is None:
            return f"{user.name} ({user.pid}) may be at work there"
        if lock.git_dir in user.shared or any(f"{lock.path}/".startswith(f"{folder}/") for folder in user.git_dirs):
            return f"{user.name} ({user.pid}) is at work there"
    return ""
