"""What holds a process tree together on this machine: subreaper, pidfd, control group; and what is used without them.

| strengthening | where | what it adds |
|---|---|---|
| `subreaper` | Linux 3.4 | orphans come to the keeper: "no child left" proves that the tree is gone |
| `pidfd` | Linux 5.3 | a signal cannot hit a later process of the same number |
| `cgroup` | where this process may make one | holds the tree together without its keeper |
| `holes` | Linux 2.6.38, most file systems | output above its cap is given back, the program goes on |

Without them the process table is sampled and marks in environments are read,
start times are checked right before a signal, and groups, sessions and marks
find what a dead keeper left; a program that writes above its cap is stopped.

`REMIT_CONTAINMENT="-subreaper,-pidfd,-cgroup,-holes"` switches them off, each alone or together.

No way reaches processes that others start for us (a container daemon,
`systemd-run`, cron, ssh, a build server that runs already), those in an
uninterruptible sleep, and those of other users.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remit.core.errors import InvalidArgument

__all__ = [
    "SWITCH_VARIABLE",
    "Cgroup",
    "Containment",
    "become_subreaper",
    "detect",
    "die_with_parent",
    "make_cgroup",
    "name_ahead",
    "remove_unused_groups",
    "switched",
]

SWITCH_VARIABLE = "REMIT_CONTAINMENT"
"""Environment variable that switches strengthenings off."""

_REACH = ("subreaper", "pidfd", "cgroup")
_NAMES = (*_REACH, "holes")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_PREFIX = "remit_"
_AHEAD_PREFIX = "keeper_"
_V1_HIERARCHIES = ("freezer", "pids")
"""Hierarchies of the first version that only group: no limit changes by being in one of our groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """Which strengthenings are used."""

    subreaper: bool = True
    """Orphans of the tree become children of the keeper."""
    pidfd: bool = True
    """Processes are signalled through handles."""
    cgroup: bool = True
    """The tree has a control group of its own."""
    holes: bool = True
    """The middle of an output above its cap is given back to the file system."""

    @property
    def level(self) -> str:
        """Return what holds the tree together, joined by `+`; `portable` when nothing does."""
        return "+".join(name for name in _REACH if getattr(self, name)) or "portable"


def switched(text: str) -> Containment:
    """Return what a list of switches leaves.

    Args:
        text: such as `-subreaper,-cgroup`; empty switches nothing off.

    Raises:
        InvalidArgument: an item is no switch.
    """
    off: dict[str, bool] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        if item[0] != "-" or item[1:] not in _NAMES:
            raise InvalidArgument(
                f"{SWITCH_VARIABLE} holds {item!r}; give any of {', '.join('-' + name for name in _NAMES)}"
            )
        off[item[1:]] = False
    return Containment(**off)


def detect(switches: str | None = None) -> Containment:
    """Return what this machine has and nobody switched off.

    Args:
        switches: as `switched` takes them; None reads the environment.

    Raises:
        InvalidArgument: an item is no switch.
    """
    wanted = switched(os.environ.get(SWITCH_VARIABLE, "") if switches is None else switches)
    is_linux = sys.platform == "linux"
    if is_linux:
        _libc()  # loaded once, before any fork
    return Containment(
        subreaper=wanted.subreaper and is_linux,
        pidfd=wanted.pidfd and is_linux and _has_pidfd(),
        cgroup=wanted.cgroup and is_linux and _cgroup_parent() is not None,
        holes=wanted.holes and is_linux,
    )


def become_subreaper() -> bool:
    """Let orphaned descendants become children of this process; tell whether that worked.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent dies; end it now if that has happened already.

    For the time between fork and exec. The signal comes when the parent's
    *thread* ends, so the parent must have one thread only; it survives exec, and
    is not inherited.

    Args:
        parent: number of the parent, as it was before the fork.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A control group that holds one tree."""

    path: Path
    """Its directory."""

    def enter(self) -> None:
        """Move this process, and what it will start, into the group.

        Raises:
            OSError: not allowed here.
        """
        (self.path / "cgroup.procs").write_text("0")

    def leave(self) -> None:
        """Move this process out, to the group above.

        Raises:
            OSError: not allowed here.
        """
        (self.path.parent / "cgroup.procs").write_text("0")

    def pids(self) -> tuple[int, ...]:
        """Return the processes in the group, dead ones that nobody waited for left out."""
        try:
            return tuple(int(line) for line in (self.path / "cgroup.procs").read_text().split())
        except OSError:  # removed: then it was empty
            return ()

    def kill(self) -> None:
        """Send SIGKILL to everything in the group, in one call where the kernel has it.

        The call misses a process whose main thread has ended (seen with Linux
        6.18), so whoever calls this still kills one by one, until `pids` is empty.
        """
        try:
            (self.path / "cgroup.kill").write_text("1")
        except OSError:  # the first version has no such file
            pass

    def remove(self) -> bool:
        """Remove the group; tell whether it is gone. False while anything is in it."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def make_cgroup(name: str) -> Cgroup | None:
    """Make a control group below that of this process; None where that is not possible.

    Args:
        name: no other job has it.
    """
    parent = _cgroup_parent()
    if parent is None:
        return None
    path = parent / f"{_CGROUP_PREFIX}{name}"
    try:
        path.mkdir()
    except OSError:  # read-only, no right, too many, or one of that name
        return None
    return Cgroup(path)


def remove_unused_groups() -> None:
    """Remove the empty control groups that keepers made ahead of a job and left when they were killed."""
    parent = _cgroup_parent()
    for path in () if parent is None else parent.glob(f"{_CGROUP_PREFIX}{_AHEAD_PREFIX}*"):
        keeper = path.name.removeprefix(f"{_CGROUP_PREFIX}{_AHEAD_PREFIX}")
        if not os.path.exists(f"/proc/{keeper}"):
            Cgroup(path).remove()


def name_ahead(keeper: int) -> str:
    """Return the name of the group that a keeper makes before it has a job.

    Args:
        keeper: its number.
    """
    return f"{_AHEAD_PREFIX}{keeper}"


@functools.cache
def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an older kernel or Python, or a sandbox
        return False
    return True


@functools.cache
def _cgroup_parent() -> Path | None:
    """Return the directory of a control group of this process in which it may make others."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    places: list[Path] = []
    if "" in own:
        places += [root / own[""].lstrip("/") for root in (_CGROUP_ROOT, _CGROUP_ROOT / "unified")]
    for name in _V1_HIERARCHIES:
        if name in own:
            places.append(_CGROUP_ROOT / name / own[name].lstrip("/"))
    return next((place for place in places if _is_usable(place)), None)


def _is_usable(place: Path) -> bool:
    # A file system mounted at the root without `cgroup.procs` is a plain directory, not a group.
    return os.access(place / "cgroup.procs", os.W_OK) and os.access(place, os.W_OK)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    return bool(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
