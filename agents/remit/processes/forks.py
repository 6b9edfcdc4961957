"""Keepers and sweepers as real processes, forked from the daemon, which has one thread.

The daemon takes in orphans where the system lets it: whatever a killed keeper
leaves becomes the daemon's own child, whatever its environment, group and
session, and is ended as such. Its children are thus keepers and sweepers that
it forked, or what such a keeper left, and nothing else.

Some keepers are forked ahead of their jobs and wait for them, so that a start
does not wait for a fork. They have none of the daemon's descriptors from their first
moment: else the lifelines of other keepers would seem alive when the daemon is killed.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from remit.core.errors import ProcessProtocolError
from remit.processes.adoption import sweep_job
from remit.processes.containment import become_subreaper, detect, name_ahead, remove_unused_groups
from remit.processes.descent import children
from remit.processes.frames import receive, send
from remit.processes.jobs import JobSpec, boot_id
from remit.processes.keeper import fork_keeper, get_ready, keep
from remit.processes.rehearsal import rehearse
from remit.processes.table import SystemTable

__all__ = ["SPARES", "SystemForks"]

_ORPHANS_LIMIT_S = 1.0
"""Longest time that the daemon stands still for what a killed keeper left; the sweeper has longer."""
_ORPHANS_POLL_S = 0.001
SPARES = 3
"""How many keepers wait for jobs: enough for an agent's usual burst; each takes a few megabytes."""
_REHEARSALS = 20
"""Python 3.11 fits its code to what it is used for after eight calls; PEP 659."""


class SystemForks:
    """Forks for real.

    Args:
        reattach_grace_s: how long keepers wait for the next daemon when this one is gone, in seconds.
    """

    def __init__(self, *, reattach_grace_s: float) -> None:
        self._reattach_grace_s = reattach_grace_s
        self._spares: deque[tuple[int, socket.socket]] = deque()
        self._own: set[int] = set()
        self._takes_in_orphans = False

    def take_in_orphans(self) -> None:
        """Let what killed keepers leave become children of this process; call it before the first fork."""
        self._takes_in_orphans = detect().subreaper and become_subreaper()
        remove_unused_groups()
        boot_id()
        # Each keeper is a copy of this process: what has run here once, runs faster there.
        rehearse(rounds=_REHEARSALS)

    def prepare(self) -> bool:
        """Fork a keeper ahead of its job, if too few wait; tell whether more are to be forked."""
        if len(self._spares) < SPARES:
            # What every keeper would find out for itself is found out once, in the parent.
            detect()
            boot_id()
            try:
                self._spares.append(self._fork(self._be_spare))
            except OSError:  # the next start forks for itself, and reports what is wrong
                return False
        return len(self._spares) < SPARES

    def keeper(
        self, spec: JobSpec, *, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
    ) -> tuple[int, socket.socket]:
        """Have a keeper start the program: one that waits, else a new one."""
        while self._spares:
            pid, connection = self._spares.popleft()
            try:
                _hand_over(connection, spec, env=env, jobdir=jobdir, stdin=stdin)
            except (OSError, ProcessProtocolError):  # it was killed, or the job is too large to hand over
                connection.close()  # and it ends
            else:
                return pid, connection
        forked = fork_keeper(spec, env=env, jobdir=jobdir, stdin=stdin, reattach_grace_s=self._reattach_grace_s)
        self._own.add(forked.pid)
        return forked.pid, forked.lifeline

    def sweeper(self, spec: JobSpec, *, jobdir: Path, keeper: int) -> tuple[int, socket.socket]:
        """Fork a process that ends what a lost keeper left, writes the result and sends it."""
        orphans = self._end_orphans(keeper)

        def run(connection: socket.socket) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            send(connection, "ended", result=sweep_job(spec, jobdir, ended=orphans).to_dict())

        return self._fork(run)

    def reap(self) -> None:
        """Take the exit status of those that have ended, so that no zombie stays."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._own.discard(pid)

    def _fork(self, run: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
        pid, connection = _fork(run)
        self._own.add(pid)
        return pid, connection

    def _end_orphans(self, keeper: int) -> tuple[int, ...]:
        """End what a killed keeper left to us, layer by layer; return the numbers.

        Each is our child and not waited for, so its number cannot be anybody
        else's. The orphans come when their keeper's death is complete, which is
        when it can be waited for.
        """
        ended: set[int] = set()
        until = time.monotonic() + _ORPHANS_LIMIT_S
        while self._takes_in_orphans and time.monotonic() < until:
            self.reap()
            orphans = [entry.pid for entry in children(os.getpid(), table=SystemTable()) if entry.pid not in self._own]
            if not orphans and keeper not in self._own:
                break
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            ended.update(orphans)
            time.sleep(_ORPHANS_POLL_S)
        return tuple(sorted(ended))

    def close(self) -> None:
        """Let go of the keepers that wait; they end."""
        while self._spares:
            self._spares.pop()[1].close()

    def _be_spare(self, connection: socket.socket) -> None:
        ready = get_ready(connection, group=name_ahead(os.getpid()))
        rehearse()
        message = receive(connection)
        if message is None:  # the daemon has gone, or needs nobody any more
            ready.dismiss()
            return
        stdin = message["stdin"]
        keep(
            ready,
            JobSpec.from_dict(message["spec"]),
            env=message["env"],
            jobdir=Path(message["jobdir"]),
            stdin=None if stdin is None else base64.b64decode(stdin),
            reattach_grace_s=self._reattach_grace_s,
        )


def _hand_over(
    connection: socket.socket, spec: JobSpec, *, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
) -> None:
    """Give a job to a keeper that waits for one; in memory, as it came.

    Raises:
        OSError: it is gone.
        ProcessProtocolError: the job is longer than a message may be.
    """
    fields: dict[str, Any] = {
        "spec": spec.to_dict(),
        "env": dict(env),
        "jobdir": str(jobdir),
        "stdin": None if stdin is None else base64.b64encode(stdin).decode("ascii"),
    }
    send(connection, "keep", **fields)


def _fork(run: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Run a function in a forked child that ends with it; return its pid and our end of a socket to it.

    Raises:
        OSError: no process or descriptor is left.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        if pid == 0:
            _run_in_child(run, theirs)
    return pid, ours


def _run_in_child(run: Callable[[socket.socket], None], connection: socket.socket) -> NoReturn:
    try:
        # The daemon's socket and lifelines must not live on in here when it dies.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        run(connection)
    except BaseException:  # a forked child must never return into the daemon's loop
        traceback.print_exc()
    finally:
        os._exit(0)
