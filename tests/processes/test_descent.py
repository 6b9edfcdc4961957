"""Who is below a process, from the kernel's lists."""

import subprocess
import sys

from remit.processes.descent import children
from remit.processes.table import SystemTable

MANY = 1_000
"""More than the kernel tells in one read: about 680 numbers of five digits fill a page."""
# From a small process, since a copy of this one would take long on a loaded machine.
FORK_MANY = f"""
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range({MANY}):
    if os.fork() == 0:
        signal.pause()
print(flush=True)
os.read(0, 1)
os.killpg(0, signal.SIGKILL)
"""


def test_all_children_are_found_however_many() -> None:
    command = [sys.executable, "-I", "-S", "-c", FORK_MANY]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdout.readline()
        found = children(parent.pid, table=SystemTable())
        parent.stdin.close()
        assert len({entry.pid for entry in found}) == MANY
        assert parent.wait() < 0
