"""Keepers and sweepers as real processes, forked from the daemon, which has one thread.

The daemon takes in orphans where the system lets it: whatever a killed keeper
leaves becomes the daemon's own child, whatever its environment, group and
session, and is ended as such. Its children are thus keepers and sweepers that
it forked, or what such a keeper left, and nothing else.

Some keepers are forked ahead of their jobs and wait for them, so that a start
does not wait for a fork, and one that has nothing left of its job waits for the next.
They have none of the daemon's descriptors from their first
moment: else the lifelines of other keepers would seem alive when the daemon is killed.
"""

from __future__ import annotations

import base64
import contextlib
import errno
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
from remit.processes.containment import become_subreaper, detect, remove_unused_groups
from remit.processes.descent import children
from remit.processes.frames import receive, send
from remit.processes.jobs import JobSpec, boot_id
from remit.processes.keeper import EXIT_BROKEN, ReadyKeeper, get_ready, keep, log_failure
from remit.processes.rehearsal import rehearse
from remit.processes.table import ProcessIdentity, SystemTable
from remit.processes.tree import identify

__all__ = ["MAX_SPARES", "SPARES", "SystemForks"]

_ORPHANS_LIMIT_S = 1.0
"""Longest time that the daemon stands still for what a killed keeper left; the sweeper has longer."""
_ORPHANS_POLL_S = 0.001
_MAX_JOBS = 200
"""After how many jobs a keeper ends all the same: whatever grows in it, grows no further."""
SPARES = 3
"""How many keepers wait for jobs: enough for an agent's usual burst; each takes a few megabytes."""
MAX_SPARES = 8
"""How many wait for the moment when a burst of jobs has ended, since it may come again."""
_HAND_OVER_S = 2.0
"""How long a keeper may take to read its order."""
_REHEARSALS = 20
"""Python 3.11 fits its code to what it is used for after eight calls; PEP 659."""


class SystemForks:
    """Forks for real.

    Args:
        jobs: directory of the jobs' directories.
        reattach_grace_s: how long keepers wait for the next daemon when this one is gone, in seconds.
        warden: number of the process that ends what keepers leave when this one is gone (see
            `remit.processes.warden`); None without.
    """

    def __init__(self, *, jobs: Path, reattach_grace_s: float, warden: int | None = None) -> None:
        self._jobs = jobs
        self._warden = warden
        self._reattach_grace_s = reattach_grace_s
        self._spares: deque[tuple[ProcessIdentity, socket.socket]] = deque()
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
                self._spares.append(self._fork_keeper())
            except OSError:  # the next start forks for itself, and reports what is wrong
                return False
        return len(self._spares) < SPARES

    def keeper(
        self, spec: JobSpec, *, digest: str, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
    ) -> tuple[ProcessIdentity, socket.socket]:
        """Have a keeper start the program: the one that waits since the shortest time, else a new one."""
        self._is_watched()
        while self._spares:
            keeper, connection = self._spares.pop()
            try:
                _hand_over(connection, spec, digest=digest, env=env, jobdir=jobdir, stdin=stdin)
            except (OSError, ProcessProtocolError):  # it was killed, or the job is too large to hand over
                connection.close()  # and it ends
            else:
                return keeper, connection
        keeper, connection = self._fork_keeper()
        try:
            _hand_over(connection, spec, digest=digest, env=env, jobdir=jobdir, stdin=stdin)
        except ProcessProtocolError as error:
            connection.close()
            raise OSError(errno.E2BIG, str(error)) from error
        return keeper, connection

    def take_back(self, keeper: ProcessIdentity, connection: socket.socket) -> None:
        """Keep a keeper for the next job, unless many wait."""
        if len(self._spares) < MAX_SPARES:
            self._spares.append((keeper, connection))
        else:
            connection.close()

    def sweeper(self, spec: JobSpec, *, digest: str, jobdir: Path, keeper: int) -> tuple[int, socket.socket]:
        """Fork a process that ends what a lost keeper left, writes the result and sends it."""
        orphans = self._end_orphans(keeper)

        def run(connection: socket.socket) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            send(connection, "ended", result=sweep_job(spec, jobdir, digest=digest, ended=orphans).to_dict())

        return self._fork(run)

    def trim(self) -> None:
        """Let go of keepers that came back and were not needed again; they end."""
        while len(self._spares) > SPARES:
            self._spares.popleft()[1].close()

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

    def _fork_keeper(self) -> tuple[ProcessIdentity, socket.socket]:
        is_watched = self._is_watched()
        pid, connection = self._fork(lambda connection: self._be_keeper(connection, is_watched=is_watched))
        return identify(pid) or ProcessIdentity(pid, 0), connection

    def _is_watched(self) -> bool:
        """Tell whether what a killed keeper leaves is ended, also when this process is killed with it."""
        if self._warden is not None and os.getppid() != self._warden:
            self._warden = None
            self.close()  # they count on it; the next ones do not
        return self._takes_in_orphans and self._warden is not None

    def _be_keeper(self, connection: socket.socket, *, is_watched: bool) -> None:
        ready = get_ready(connection, is_watched=is_watched)
        rehearse()
        for _ in range(_MAX_JOBS):
            ready.plan(self._jobs)
            message = _next_job(connection)
            if message is None or not self._keep(ready, message):
                break
            ready.renew()
            connection.setblocking(True)
            try:
                send(connection, "idle")
            except OSError:  # the daemon has gone
                break
        ready.dismiss()

    def _keep(self, ready: ReadyKeeper, message: dict[str, Any]) -> bool:
        jobdir, stdin = Path(message["jobdir"]), message["stdin"]
        try:
            return keep(
                ready,
                JobSpec.from_dict(message["spec"]),
                env=message["env"],
                jobdir=jobdir,
                stdin=None if stdin is None else base64.b64decode(stdin),
                reattach_grace_s=self._reattach_grace_s,
                digest=message["digest"],
            )
        except BaseException:  # the outermost edge of this process: nobody is left to raise to
            log_failure(jobdir)
            os._exit(EXIT_BROKEN)


def _next_job(connection: socket.socket) -> dict[str, Any] | None:
    """Wait for an order; None when the daemon has gone, or needs nobody any more."""
    while (message := receive(connection)) is not None:
        if message["op"] == "keep":
            return message
        # Said of the last job before its end was heard: nobody waits for an answer.
    return None


def _hand_over(
    connection: socket.socket,
    spec: JobSpec,
    *,
    digest: str,
    env: Mapping[str, str],
    jobdir: Path,
    stdin: bytes | None,
) -> None:
    """Give a job to a keeper that waits for one; in memory, as it came.

    Raises:
        OSError: it is gone.
        ProcessProtocolError: the job is longer than a message may be.
    """
    fields: dict[str, Any] = {
        "spec": spec.to_dict(),
        "digest": digest,
        "env": dict(env),
        "jobdir": str(jobdir),
        "stdin": None if stdin is None else base64.b64encode(stdin).decode("ascii"),
    }
    # Somebody may have stopped it; the daemon must not stand still with it.
    connection.settimeout(_HAND_OVER_S)
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
