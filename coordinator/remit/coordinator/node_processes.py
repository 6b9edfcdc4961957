"""Find and end the processes of a local node, by identity and never by number alone.

**Invariants**

1. A process is named by its number and its start time; a number that the
   kernel has given to somebody else is never signalled.
2. A process is ours if both its arguments and its environment name our
   directory, or if it descends from one that is. Arguments alone are not
   enough: somebody may be reading the node's log.
3. A process that has ended but was not collected (a zombie) is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = [
    "NODE_MARK",
    "NodeProcess",
    "ProcessIdentity",
    "find_processes",
    "identify",
    "is_alive",
    "listening_addresses",
    "send_signal",
    "stop_processes",
]

NODE_MARK = "REMIT_LOCAL_NODE"
"""Environment variable that every process of a local node is born with; holds the state directory."""

_POLL_S = 0.03
_KILL_WAIT_S = 5.0
"""How long a process may take to vanish after SIGKILL; more means that the kernel holds it."""


class ProcessIdentity(NamedTuple):
    """One process, for ever.

    `start_time` is in seconds, since boot on Linux (exact, and no change of the
    wall clock moves it), since 1970 elsewhere.
    """

    pid: int
    start_time: float


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process of the node: `name` is for people, `essential` if the node ends with it."""

    identity: ProcessIdentity
    name: str
    essential: bool = False


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the living process with this number, or None."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name in parentheses may itself hold spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        # Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
        if len(fields) < 20 or fields[0] in (b"Z", b"X"):
            return None
        return ProcessIdentity(pid, int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    else:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return ProcessIdentity(pid, process.create_time())
        except psutil.Error:
            return None


def is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether exactly this process is still running."""
    return identify(identity.pid) == identity


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """Signal exactly this process.

    Returns:
        Whether the process was there to be signalled.

    Raises:
        PermissionError: the process belongs to somebody else.
    """
    if identity.pid <= 1:
        return False
    try:
        if sys.platform == "linux":
            # The descriptor pins the process, so the number cannot change hands
            # between the comparison and the signal.
            handle = os.pidfd_open(identity.pid)
            try:
                if not is_alive(identity):
                    return False
                signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
        else:
            if not is_alive(identity):
                return False
            os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    return True


def find_processes(state_dir: Path, temp_dir: Path, is_essential: Callable[[Sequence[str]], bool]) -> list[NodeProcess]:
    """Return the living processes of the node of this state directory, oldest first.

    The caller itself is never among them, even if it runs inside an agent.

    Args:
        state_dir: what `NODE_MARK` says in the environment of the node.
        temp_dir: the directory that Ray was given; it stands in the arguments.
        is_essential: tells by its arguments whether the node ends with a process.
    """
    table = {process.pid: process for process in psutil.process_iter(["ppid", "uids", "cmdline"])}
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.info["ppid"] or 0, []).append(pid)
    pending = [pid for pid, process in table.items() if _is_marked(process, state_dir, temp_dir)]
    ours: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in ours and pid > 1:
            ours.add(pid)
            pending.extend(children.get(pid, ()))
    found: list[NodeProcess] = []
    for pid in ours - {os.getpid()}:
        identity = identify(pid)
        if identity is not None:
            command: list[str] = table[pid].info["cmdline"] or []
            found.append(NodeProcess(identity, _name(command), is_essential(command)))
    return sorted(found, key=lambda process: (process.identity.start_time, process.identity.pid))


def stop_processes(
    find: Callable[[], Iterable[NodeProcess]], grace_s: float
) -> tuple[list[NodeProcess], list[NodeProcess]]:
    """Ask all processes that `find` returns to end, then kill what is left.

    The essential one that started last (Ray's node manager) is asked first and
    alone, because it ends its workers in good order; the other essential ones
    (Ray's control service) last, because the rest calls them while ending and
    would hang (measured: Ray's monitor, for over ten seconds).
    `find` is asked again and again: what is forked meanwhile is stopped too.

    Args:
        find: returns the processes that are to end; may return fewer as their
            parents end, those seen once stay in view.
        grace_s: seconds between SIGTERM and SIGKILL.

    Returns:
        All processes seen, and those still there at the end.
    """
    seen: dict[ProcessIdentity, NodeProcess] = {}
    told: set[tuple[ProcessIdentity, int]] = set()
    began = time.monotonic()
    while True:
        seen.update({process.identity: process for process in find()})
        live = [process for process in seen.values() if is_alive(process.identity)]
        elapsed = time.monotonic() - began
        if not live or elapsed > grace_s + _KILL_WAIT_S:
            return list(seen.values()), live
        number, targets = signal.SIGTERM, _next_to_end(list(seen.values()), live, elapsed / grace_s if grace_s else 1.0)
        if elapsed >= grace_s:
            number = signal.SIGKILL
        for process in targets:
            if (process.identity, number) not in told:
                told.add((process.identity, number))
                _signal_if_allowed(process.identity, number)
        time.sleep(_POLL_S)


def _next_to_end(seen: list[NodeProcess], live: list[NodeProcess], spent: float) -> list[NodeProcess]:
    """Return whose turn it is to be asked, when this share of the grace is spent."""
    essential = [process for process in seen if process.essential]
    if spent < 0.5 and essential and essential[-1] in live:
        return [essential[-1]]
    others = [process for process in live if not process.essential]
    return others if spent < 0.75 and others else live


def listening_addresses(processes: Iterable[NodeProcess]) -> list[tuple[str, int, str]]:
    """Return the TCP addresses on which these processes listen.

    Returns:
        Pairs of host and port with the process name, sorted.
    """
    found: set[tuple[str, int, str]] = set()
    for process in processes:
        try:
            connections = psutil.Process(process.identity.pid).net_connections(kind="tcp")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port, process.name))
    return sorted(found)


def _signal_if_allowed(identity: ProcessIdentity, number: int) -> None:
    try:
        send_signal(identity, number)
    except PermissionError:
        # A program that changed its user; it stays in view and is reported as left.
        pass


def _is_marked(process: psutil.Process, state_dir: Path, temp_dir: Path) -> bool:
    """Tell whether arguments and environment of a process both name our directories.

    Not any argument that names the state directory: other daemons of this user
    keep their sockets there and inherit the mark.
    """
    uids = process.info["uids"]
    command: list[str] = process.info["cmdline"] or []
    if uids is None or uids.effective != os.geteuid() or not command:
        return False
    if command[0].startswith("ray::"):
        # Workers overwrite their arguments and environment with a title; what
        # remains is the log that they write to.
        return _writes_below(process.pid, temp_dir)
    is_watch = str(state_dir) in command and any(argument.endswith("node_watch.py") for argument in command)
    if not is_watch and not any(_names(argument, temp_dir) for argument in command):
        return False
    try:
        return process.environ().get(NODE_MARK) == str(state_dir)
    except (psutil.Error, OSError):
        return False


def _names(argument: str, directory: Path) -> bool:
    return argument.endswith(str(directory)) or f"{directory}/" in argument


def _writes_below(pid: int, directory: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1").startswith(f"{directory}/")
    except OSError:
        return False


def _name(command: Sequence[str]) -> str:
    """Return a short name for people: `gcs_server`, `log_monitor.py`, `ray::IDLE`."""
    if not command:
        return "process"
    for argument in command[1:3]:
        if argument.endswith(".py"):
            return Path(argument).name
    return Path(command[0]).name if command[0].startswith("/") else command[0]
