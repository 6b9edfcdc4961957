"""The system's process table: who is there, and signals that reach nobody else.

Linux is read through `/proc` and signalled through pidfds; elsewhere psutil
reads, and a signal follows a check of the start time.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

__all__ = [
    "MARK_VARIABLE",
    "Delivery",
    "ProcessEntry",
    "ProcessIdentity",
    "ProcessTable",
    "SystemTable",
    "read_or_empty",
]

MARK_VARIABLE = "REMIT_PROCESS"
"""Environment variable that marks a tree: run id and token of each command, outermost first, joined by `/`."""

_MARK_PREFIX = MARK_VARIABLE.encode() + b"="
_READ_BYTES = 65_536
_IS_LINUX = sys.platform == "linux"


class Delivery(StrEnum):
    """What became of a signal."""

    SENT = "sent"
    """The kernel took it."""
    GONE = "gone"
    """There is no such process any more: the expected end of a race."""
    DENIED = "denied"
    """The process belongs to somebody else; it lives on."""
    REFUSED = "refused"
    """Not sent: the target is not proven to be ours."""


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    """One process for all time: a number may be used again, the pair is not."""

    pid: int
    """Process number."""
    started: float
    """When it started; compares only with values of the same machine and boot."""


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One row of the process table."""

    identity: ProcessIdentity
    """Number and start time."""
    parent: int
    """Process number of the parent."""
    group: int
    """Number of the process group."""
    session: int
    """Number of the session."""
    is_dead: bool
    """A zombie without living threads: only its parent's wait is missing."""
    threads: int = 0
    """How many threads it has; 0 where that was not asked."""

    @property
    def pid(self) -> int:
        """Return the process number."""
        return self.identity.pid


class ProcessTable(Protocol):
    """What the tree needs to know and do."""

    def entries(self) -> dict[int, ProcessEntry]:
        """Return all visible processes by number. Not atomic: look twice."""
        ...

    def entry(self, pid: int) -> ProcessEntry | None:
        """Return one process, or None when there is none of that number."""
        ...

    def has_mark(self, pid: int, token: str) -> bool:
        """Tell whether a process carries the token in its environment."""
        ...

    def send(self, identity: ProcessIdentity, signum: int) -> Delivery:
        """Signal exactly this process, never a later one of the same number."""
        ...

    def send_group(self, group: int, signum: int) -> Delivery:
        """Signal a process group. The caller proves that the number is its own."""
        ...


class SystemTable:
    """The real table of this machine. Thread-safe.

    Args:
        use_pidfd: signal through handles where the system has them.
    """

    __slots__ = ("_use_pidfd",)

    def __init__(self, *, use_pidfd: bool = True) -> None:
        self._use_pidfd = use_pidfd

    def entries(self) -> dict[int, ProcessEntry]:
        """Return all visible processes by number."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if _IS_LINUX else _psutil_pids()
        found = (self.entry(pid) for pid in pids)
        return {entry.pid: entry for entry in found if entry is not None}

    def entry(self, pid: int) -> ProcessEntry | None:
        """Return one process, or None when there is none of that number."""
        return _proc_entry(pid) if _IS_LINUX else _psutil_entry(pid)

    def has_mark(self, pid: int, token: str) -> bool:
        """Tell whether a process carries the token; False where it cannot be read."""
        wanted = token.encode()
        return any(
            wanted in data and _names(data, wanted)
            for data in (_proc_environs(pid) if _IS_LINUX else _psutil_environ(pid))
        )

    def send(self, identity: ProcessIdentity, signum: int) -> Delivery:
        """Signal exactly this process, never a later one of the same number."""
        if identity.pid <= 1 or identity.pid == os.getpid():
            return Delivery.REFUSED
        try:
            return self._send_checked(identity, signum)
        except ProcessLookupError:
            return Delivery.GONE
        except PermissionError:
            return Delivery.DENIED

    def _send_checked(self, identity: ProcessIdentity, signum: int) -> Delivery:
        handle = _open_pidfd(identity.pid) if self._use_pidfd else None
        try:
            # Checked after opening: from here on the handle cannot mean another process.
            current = self.entry(identity.pid)
            if current is None or current.identity != identity:
                return Delivery.GONE
            if handle is None:
                os.kill(identity.pid, signum)
            else:
                signal.pidfd_send_signal(handle, signum)
            return Delivery.SENT
        finally:
            if handle is not None:
                os.close(handle)

    def send_group(self, group: int, signum: int) -> Delivery:
        """Signal a process group, except number 0 and 1, negative ones and our own."""
        # kill(2) reads 0, -1 and -group as "many": one guard, in one place.
        if group <= 1 or group == os.getpgrp():
            return Delivery.REFUSED
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            return Delivery.GONE
        except PermissionError:
            return Delivery.DENIED
        return Delivery.SENT


def _open_pidfd(pid: int) -> int | None:
    """Return a handle of a process, or None where the system has no such thing.

    Raises:
        ProcessLookupError: there is no process of that number.
    """
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, a sandbox, or no descriptor left: checked kill instead
        return None


def _proc_entry(pid: int) -> ProcessEntry | None:
    """Read one `/proc/PID/stat`.

    Source: proc_pid_stat(5); the name in parentheses may hold anything.
    """
    data = read_or_empty(f"/proc/{pid}/stat")
    if not data:  # gone between listing and reading
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    # A main thread may end before the others: state Z, but the program runs on.
    is_dead = fields[0] in (b"Z", b"X", b"x") and int(fields[17]) <= 1
    return ProcessEntry(
        identity=ProcessIdentity(pid, float(fields[19])),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        is_dead=is_dead,
        threads=int(fields[17]),
    )


def _proc_environs(pid: int) -> list[bytes]:
    """Return the environment blocks by which a process may be known."""
    data = read_or_empty(f"/proc/{pid}/environ")
    if data:
        return [data]
    # Empty when the main thread has ended; the other threads still show it.
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [read_or_empty(f"/proc/{pid}/task/{thread}/environ") for thread in threads]


def read_or_empty(path: str, *, is_list: bool = False) -> bytes:
    """Return what a file of `/proc` holds; nothing when it is gone or not ours to read.

    Args:
        path: of the file.
        is_list: the kernel gives it in parts of a page, so that a short part is not the last.
    """
    # By descriptor: a file object costs twice as much, and a scan reads hundreds.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to read
        return b""
    try:
        parts: list[bytes] = []
        while part := os.read(descriptor, _READ_BYTES):
            parts.append(part)
            if len(part) < _READ_BYTES and not is_list:
                break
        return b"".join(parts)
    except OSError:  # gone meanwhile
        return b""
    finally:
        os.close(descriptor)


def _names(environ: bytes, token: bytes) -> bool:
    """Tell whether the mark of an environment block holds the token."""
    return any(
        item.startswith(_MARK_PREFIX) and token in item[len(_MARK_PREFIX) :].split(b"/")
        for item in environ.split(b"\0")
    )


def _psutil_pids() -> list[int]:
    # Imported where it is used: on Linux nothing here is, and every keeper is a fork of what is imported.
    import psutil

    return psutil.pids()


def _psutil_entry(pid: int) -> ProcessEntry | None:
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return ProcessEntry(
                identity=ProcessIdentity(pid, process.create_time()),
                parent=process.ppid(),
                group=os.getpgid(pid),
                session=os.getsid(pid),
                is_dead=process.status() == psutil.STATUS_ZOMBIE,
            )
    except (psutil.Error, OSError):  # gone, or not ours to look at
        return None


def _psutil_environ(pid: int) -> list[bytes]:
    import psutil

    try:
        environ = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # gone, not ours, or hidden by the system
        return []
    return [b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items())]
