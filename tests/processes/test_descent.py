"""Who is below a process, from the kernel's lists."""

import subprocess
import sys

from remit.processes.descent import children
from remit.processes.table import SystemTable

MANY = 1_000
"""More than the kernel tells in one read: about 680 numbers of five digits fill a page."""

# A small process has them: a fork copies the tables of all the memory that its parent has.
_PARENT = """
import os, signal, sys
started = []
try:
    for _ in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        started.append(pid)
    print(*started, flush=True)
    sys.stdin.read()
finally:
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


def test_all_children_are_found_however_many() -> None:
    command = [sys.executable, "-S", "-c", _PARENT, str(MANY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            started = {int(pid) for pid in parent.stdout.readline().split()}
            found = {entry.pid for entry in children(parent.pid, table=SystemTable())}
        finally:
            parent.stdin.close()
        assert parent.wait(30) == 0
    assert len(started) == MANY
    assert started == found
