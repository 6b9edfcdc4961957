"""Keepers and sweepers as real processes, forked from the daemon, which has one thread."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from remit.processes.adoption import sweep_job
from remit.processes.frames import send
from remit.processes.jobs import JobSpec
from remit.processes.keeper import fork_keeper

__all__ = ["SystemForks"]


class SystemForks:
    """Forks for real.

    Args:
        reattach_grace_s: how long keepers wait for the next daemon when this one is gone, in seconds.
    """

    def __init__(self, *, reattach_grace_s: float) -> None:
        self._reattach_grace_s = reattach_grace_s

    def keeper(
        self, spec: JobSpec, *, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
    ) -> tuple[int, socket.socket]:
        """Fork a keeper that starts the program."""
        forked = fork_keeper(spec, env=env, jobdir=jobdir, stdin=stdin, reattach_grace_s=self._reattach_grace_s)
        return forked.pid, forked.lifeline

    def sweeper(self, spec: JobSpec, *, jobdir: Path) -> tuple[int, socket.socket]:
        """Fork a process that ends what a lost keeper left, writes the result and sends it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                _run_sweeper(spec, jobdir, theirs)
        return pid, ours

    def reap(self) -> None:
        """Take the exit status of those that have ended, so that no zombie stays."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_sweeper(spec: JobSpec, jobdir: Path, connection: socket.socket) -> NoReturn:
    """Sweep in the forked child and end it, whatever happens."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The daemon's socket and lifelines must not live on in here when it dies.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        send(connection, "ended", result=sweep_job(spec, jobdir).to_dict())
    except BaseException:  # a forked child must never return into the daemon's loop
        traceback.print_exc()
    finally:
        os._exit(0)
