"""Ending a program whose host died before it could stop it."""

from __future__ import annotations

import threading

from remit.processes.table import ProcessIdentity
from remit.processes.tree import ProcessTree, StopReport, stop_tree

__all__ = ["sweep"]


def sweep(pid: int, started: float, *, token: str, grace_s: float = 2.0) -> StopReport:
    """Stop a process, by identity, and everything that comes from it; blocks until done.

    Only what is proven to be the same process (number and start time), below it,
    or marked with the token is touched.

    Args:
        pid: process number of the program.
        started: its start time, as it was reported.
        token: the mark that it and its descendants carry in their environment.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    tree = ProcessTree(ProcessIdentity(pid, started), token=token)
    return stop_tree(tree, grace_s=grace_s, hurry=threading.Event())
