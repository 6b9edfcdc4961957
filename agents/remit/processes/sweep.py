"""Ending a program whose host died before it could stop it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from remit.processes.table import ProcessIdentity
from remit.processes.tree import ProcessTree, StopReport, stop_tree

__all__ = ["sweep"]


def sweep(
    pid: int, started: float, *, token: str, grace_s: float = 2.0, known: Iterable[ProcessIdentity] = ()
) -> StopReport:
    """Stop a process, by identity, and everything that comes from it; blocks until done.

    Only what is proven to be the same process (number and start time) or a known one,
    below one of these, or marked with the token is touched.

    Args:
        pid: process number of the program.
        started: its start time, as it was reported.
        token: the mark that it and its descendants carry in their environment.
        grace_s: seconds between SIGTERM and SIGKILL.
        known: processes that its keeper had seen to belong to it.
    """
    tree = ProcessTree(ProcessIdentity(pid, started), token=token, known=known)
    return stop_tree(tree, grace_s=grace_s, hurry=threading.Event())
