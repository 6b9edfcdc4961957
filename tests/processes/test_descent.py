"""Who is below a process, from the kernel's lists."""

import os
import signal

from remit.processes.descent import children
from remit.processes.table import SystemTable

MANY = 1_000
"""More than the kernel tells in one read: about 680 numbers of five digits fill a page."""


def test_all_children_are_found_however_many() -> None:
    started: set[int] = set()
    try:
        for _ in range(MANY):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            started.add(pid)
        assert started <= {entry.pid for entry in children(os.getpid(), table=SystemTable())}
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
