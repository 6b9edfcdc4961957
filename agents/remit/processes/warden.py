"""The daemon's warden: ends what keepers leave when the daemon, which does that, has been killed as well.

It is the daemon's parent and does nothing as long as the daemon lives. What loses
its parent below it becomes its own child, keepers that go on without a daemon, and
whatever a killed keeper leaves. The former are left alone; the latter is ended. It ends
with its last child.

**Invariants**

1. Only children of this process are signalled, which nobody else can wait for: no
   number can be a stranger's.
2. Keepers, sweepers and the next daemon's are never signalled: they show the
   command line of this process, since they were forked and never executed anything.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import NoReturn

from remit.processes.descent import children
from remit.processes.table import SystemTable, read_or_empty

__all__ = ["keep_watch", "strangers"]

_SETTLE_S = 1.0
"""How long it looks after each end of a child: a program may be between its fork and its exec."""
_LOOK_S = 0.01


def keep_watch() -> NoReturn:
    """Be the warden: return never, end with the last child. For a process that is a subreaper and has one thread."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    own = _command_line(os.getpid())
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
            _end_strangers(own)
    os._exit(0)


def strangers(own: bytes) -> tuple[int, ...]:
    """Return the children of this process that have executed something.

    Args:
        own: the command line of this process.
    """
    return tuple(entry.pid for entry in children(os.getpid(), table=SystemTable()) if _command_line(entry.pid) != own)


def _end_strangers(own: bytes) -> None:
    """End what killed keepers have left, layer by layer, until nothing has come for a while.

    Raises:
        ChildProcessError: there is no child any more.
    """
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        for pid in strangers(own):
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _command_line(pid: int) -> bytes:
    return read_or_empty(f"/proc/{pid}/cmdline")
