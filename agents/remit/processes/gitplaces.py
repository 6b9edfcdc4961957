"""Where git locks are, who lives that may hold them, and taking one away: the disk and the process table.

Looking changes nothing, starts no git, and follows a repository from its work tree
to where its data is: worktrees (a `.git` file), their common folder, submodules.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from remit.processes.gitlocks import GitLock, GitUser

__all__ = ["find_git_dirs", "find_locks", "git_users", "may_have_git", "take_away"]

MAX_FOLDERS: Final = 5_000
"""Folders of a repository that are looked at; more than people have, and bounded in time."""
_WITHOUT_LOCKS: Final = frozenset({"hooks", "lfs", "logs", "svn", "rr-cache"})
_INITIALIZING: Final = "initializing"
_HEAD_BYTES: Final = 4_096
_GIT_VARIABLES: Final = (b"GIT_DIR", b"GIT_WORK_TREE", b"GIT_COMMON_DIR", b"GIT_INDEX_FILE")


def may_have_git(place: str) -> bool:
    """Tell whether a folder, or one above it, is a work tree or a repository; a few looks at the disk."""
    folder = os.path.abspath(place)
    while True:
        if os.path.lexists(os.path.join(folder, ".git")) or _is_git_dir(folder):
            return True
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above


def find_git_dirs(places: Iterable[str]) -> tuple[str, ...]:
    """Return the data folders of the repositories that these places lie in, or are the top of.

    Of a linked worktree both are returned, its own and the common one.

    Args:
        places: paths that need not exist.
    """
    own, common = _git_dirs(places)
    return tuple(dict.fromkeys((*own, *common)))


def _git_dirs(places: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the own data folders of these places' work trees, and the common ones of those that are linked."""
    own: dict[str, None] = {}
    common: dict[str, None] = {}
    for place in places:
        git_dir = _git_dir_of(os.path.realpath(place))
        if git_dir:
            own[git_dir] = None
            line = _first_line(os.path.join(git_dir, "commondir"))
            if line:
                common[os.path.realpath(os.path.join(git_dir, line))] = None
    return tuple(own), tuple(common)


def _git_dir_of(place: str) -> str:
    folder = place
    while True:
        found = _follow(os.path.join(folder, ".git")) or (folder if _is_git_dir(folder) else "")
        above = os.path.dirname(folder)
        if found or above == folder:
            return found
        folder = above


def _follow(dot_git: str) -> str:
    """Return the folder that a `.git` is or names; the empty text if there is none."""
    if os.path.isdir(dot_git):
        return os.path.realpath(dot_git)
    line = _first_line(dot_git)
    if not line.startswith("gitdir:"):
        return ""
    return os.path.realpath(os.path.join(os.path.dirname(dot_git), line.removeprefix("gitdir:").strip()))


def _is_git_dir(folder: str) -> bool:
    # `HEAD` alone is no sign: there is one in `refs/remotes/origin` as well.
    data = os.path.join(folder, "objects"), os.path.join(folder, "commondir")
    return os.path.isfile(os.path.join(folder, "HEAD")) and any(map(os.path.exists, data))


def _first_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            lines = file.read(_HEAD_BYTES).splitlines()
    except OSError:
        return ""
    return os.fsdecode(lines[0]) if lines else ""


def find_locks(git_dirs: Iterable[str]) -> tuple[GitLock, ...]:
    """Return the git locks in these repositories and in the worktrees and submodules that they hold."""
    found: dict[str, GitLock] = {}
    for top in git_dirs:
        for lock in _locks_below(top):
            found.setdefault(lock.path, lock)
    return tuple(found[path] for path in sorted(found))


def _locks_below(top: str) -> Iterator[GitLock]:
    todo = [(top, top)]
    seen = 0
    while todo and seen < MAX_FOLDERS:
        folder, git_dir = todo.pop()
        seen += 1
        if folder != git_dir and _is_git_dir(folder):
            git_dir = folder  # a worktree, or a submodule
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # gone meanwhile, or not ours to see: then it is not ours to change either
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not _is_without_locks(entry.name, folder, git_dir):
                    todo.append((entry.path, git_dir))
            elif _is_lock(entry):
                # Whoever makes a worktree marks it as locked from where he is, in another one.
                lock = _lock_at(entry.path, os.path.dirname(os.path.dirname(folder)) if _is_mark(entry) else git_dir)
                if lock is not None:
                    yield lock


def _is_without_locks(name: str, folder: str, git_dir: str) -> bool:
    if folder == git_dir:
        return name in _WITHOUT_LOCKS
    # Of the objects only the lists and the graph are locked, the thousands of others never.
    return folder == os.path.join(git_dir, "objects") and name not in ("info", "pack")


def _is_mark(entry: os.DirEntry[str]) -> bool:
    return entry.name == "locked"


def _is_lock(entry: os.DirEntry[str]) -> bool:
    # A worktree that is being made is marked so; one that a person has locked says why, or nothing.
    return entry.name.endswith(".lock") or (_is_mark(entry) and _first_line(entry.path) == _INITIALIZING)


def _lock_at(path: str, git_dir: str) -> GitLock | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return GitLock(
        path=path,
        git_dir=git_dir,
        made_at=min(found.st_mtime, found.st_ctime),
        uid=found.st_uid,
        identity=(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns),
    )


def take_away(lock: GitLock) -> bool:
    """Remove a lock if it is still the one that was found; return whether it was."""
    now = _lock_at(lock.path, lock.git_dir)
    if now is None or now.identity != lock.identity:
        return False
    try:
        os.unlink(lock.path)
    except OSError:
        return False
    return True


def git_users(locks: Iterable[GitLock]) -> tuple[GitUser, ...]:
    """Return the living processes of this user that have one of these locks open, or are a git at work.

    On Linux as `/proc` tells. Where it does not, nobody can be excluded, so one is returned
    that may be at work everywhere.
    """
    paths = frozenset(lock.path for lock in locks)
    if not os.path.isdir("/proc/self/fd"):
        return (GitUser(pid=0, name="a git that this system does not show", git_dirs=None),)
    found = (_user_at(f"/proc/{number}", paths) for number in os.listdir("/proc") if number.isdigit())
    return tuple(user for user in found if user is not None)


def _user_at(process: str, locks: frozenset[str]) -> GitUser | None:
    try:
        status = _status_of(process)
        if status.get(b"Uid", b"").split()[-1:] != [b"%d" % os.geteuid()]:
            return None  # what it makes belongs to its user, and is not ours to remove
        name = status.get(b"Name", b"").decode(errors="replace")
        own: tuple[str, ...] | None = ()
        common: tuple[str, ...] = ()
        if name.startswith("git") and not status.get(b"State", b"").startswith(b"Z"):
            try:
                own, common = _git_dirs(_places_of(process))
            except PermissionError:
                own = None
        opened = tuple(path for path in _open_files(process) if path in locks)
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended
    if not opened and own == ():
        return None
    return GitUser(pid=int(os.path.basename(process)), name=name, locks=opened, git_dirs=own, shared=common)


def _status_of(process: str) -> dict[bytes, bytes]:
    lines = _read(f"{process}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}


def _open_files(process: str) -> Iterator[str]:
    # Some processes show nothing to their own user (the first of a container, say). They would keep
    # every lock for ever; a git among them is a doubt all the same, see above.
    with suppress(PermissionError):
        for number in os.listdir(f"{process}/fd"):
            with suppress(FileNotFoundError):
                yield os.readlink(f"{process}/fd/{number}")


def _places_of(process: str) -> list[str]:
    """Return where a git may be at work: its directory, and what its arguments and variables name."""
    cwd = os.readlink(f"{process}/cwd")
    words = [word.partition(b"=")[2] or word for word in _read(f"{process}/cmdline").split(b"\0")]
    for item in _read(f"{process}/environ").split(b"\0"):
        name, _, value = item.partition(b"=")
        if name in _GIT_VARIABLES:
            words.append(value)
    texts = map(os.fsdecode, words)
    return [cwd, *(os.path.join(cwd, text) for text in texts if "/" in text or text == ".git")]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
