"""What is looked at when a program was killed: the git locks where it had worked.

Two steps, since whether the place is claimed is known elsewhere: `locks_after`
finds what there is, `treat` takes away what may be. Both block; a program that
ended by itself, or that has no repository around it, costs a few looks at the disk.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Sequence

from remit.processes.gitlocks import Aftermath, GitLock, KilledTree, why_it_stays
from remit.processes.gitplaces import find_git_dirs, find_locks, git_users, may_have_git, take_away
from remit.processes.jobs import JobOutcome, JobResult

__all__ = ["locks_after", "locks_in", "treat", "was_killed"]

_KILLED = 128 + signal.SIGKILL
"""What a shell exits with when the program that it ran was killed."""
_CLEANED_UP = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM})
"""Signals on which git takes its locks away itself (`sigchain_push_common` in its sources)."""


def was_killed(result: JobResult) -> bool:
    """Tell whether something of a program may have had no time to clean up.

    Not so if all of it ended on SIGTERM, as most do: a cancel of many programs looks at nothing then.
    """
    if result.outcome is JobOutcome.KEEPER_LOST or result.signal not in (None, *_CLEANED_UP):
        return True
    return bool(result.escalated or result.survivors) or result.exit_code == _KILLED


def locks_after(cwd: str, argv: Sequence[str], places: Iterable[str] = ()) -> tuple[GitLock, ...]:
    """Return the git locks in the repositories that a program may have worked in.

    Args:
        cwd: where it was started.
        argv: its arguments: what exists of them is a place too.
        places: more places, such as those it had claimed.
    """
    named = [path for path in (os.path.join(cwd, word) for word in argv[1:]) if os.path.exists(path)]
    git_dirs = find_git_dirs(place for place in dict.fromkeys((cwd, *named, *places)) if may_have_git(place))
    return find_locks(git_dirs)


def treat(locks: Sequence[GitLock], result: JobResult | None, claimed: Collection[str]) -> Aftermath:
    """Take away the locks of a program that is proven gone, and say why the others stay.

    Args:
        locks: what was found after its end.
        result: how it ended; None if no program is known to have.
        claimed: paths of those that whoever started it holds a claim on.
    """
    tree = None if result is None else KilledTree(started_at=result.started_at, is_empty=result.is_proven_gone)
    # After the locks were found: whoever has made one of them is among those who live now, or is gone.
    users = git_users(locks) if locks else ()
    removed: list[str] = []
    left: list[str] = []
    for lock in locks:
        doubt = why_it_stays(lock, tree, users, is_claimed=lock.path in claimed, uid=os.geteuid())
        if doubt:
            left.append(f"{lock.path}: {doubt}")
        elif take_away(lock):
            removed.append(lock.path)
    return Aftermath(tuple(removed), tuple(left))


def locks_in(workspace: str) -> tuple[str, ...]:
    """Return the git locks of the repository that a workspace is, each with what is known of it; changes nothing."""
    return treat(find_locks(find_git_dirs([workspace])), None, ()).left
