"""The torture zoo: programs that do not want to stop, as real children, to try a stop on.

Each creature says `ready` on its standard output once it is hard to stop, and
runs until it is killed. Give it a tag of your own; whatever comes from it,
however it hides, is then found by `alive(tag)`, an observer that shares nothing
with the code under test:

    tag = "my-test-1"
    result = await ctx.process(ZOO["both"].argv(tag), timeout_s=1)
    assert alive(tag) == []

Linux only: the observer reads `/proc`.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["READY", "ZOO", "Creature", "alive", "cull", "living"]

READY = b"ready"
"""What a creature writes once it is at its hardest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Creature:
    """One program that is hard to stop."""

    name: str
    """What it does, in a few words."""
    source: str
    """Its Python source; needs nothing but the standard library."""
    obeys: bool = True
    """Whether SIGTERM to all of it suffices."""
    hides: bool = False
    """Whether no look at the process table can be sure of it: it leaves group, session, parents and marks, or
    forks faster than a look takes. A subreaper or a control group still holds it."""

    def argv(self, tag: str, *, size: int = 0) -> list[str]:
        """Return the command line.

        Args:
            tag: found again in every process that comes from it.
            size: for creatures with many children, how many; 0 for their own choice.
        """
        return [sys.executable, "-I", "-S", "-c", _PRELUDE + self.source, str(size), tag]


_PRELUDE = """
import os, signal, sys, time
size = int(sys.argv[1])
def ready():
    os.write(1, b"ready\\n")
def forever():
    while True:
        signal.pause()
def child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
def close_all():
    os.closerange(0, 256)
def wait_for_state(pid, states):
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in states:
        time.sleep(0.001)
"""

_DEAD_MAIN_THREAD = f"""
import ctypes, threading
def run():
    wait_for_state("self", "Z")
    ready()
    while True:
        time.sleep(60)
threading.Thread(target=run).start()
ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)
"""

_CREATURES = (
    Creature(name="simple", source="ready(); forever()"),
    Creature(name="grandchildren", source="[child(forever) for _ in range(size or 4)]; ready(); forever()"),
    Creature(
        name="double fork",
        source="""
def daemon():
    child(lambda: (ready(), forever()))
os.waitpid(child(daemon), 0)
forever()
""",
    ),
    Creature(name="setsid", source="child(lambda: (os.setsid(), ready(), forever())); forever()"),
    Creature(
        name="both",
        source="""
def daemon():
    os.setsid()
    child(lambda: (ready(), forever()))
os.waitpid(child(daemon), 0)
forever()
""",
    ),
    Creature(
        name="both, environment cleared",
        hides=True,
        source="""
def body():
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c",
        "import os, signal; os.write(1, b'ready'); signal.pause()", sys.argv[-1]], {})
def daemon():
    os.setsid()
    child(body)
os.waitpid(child(daemon), 0)
forever()
""",
    ),
    Creature(name="SIGTERM ignored", obeys=False, source="deaf(); ready(); forever()"),
    Creature(
        name="stopped",
        source="""
pid = child(lambda: (os.kill(os.getpid(), signal.SIGSTOP), forever()))
wait_for_state(pid, "T")
ready()
os.kill(os.getpid(), signal.SIGSTOP)
forever()
""",
    ),
    Creature(
        name="fork chain",
        hides=True,
        source="""
def chain():
    for step in range(10 ** 9):
        if step == 20:
            ready()
        if os.fork():
            os._exit(0)
child(chain)
forever()
""",
    ),
    Creature(
        name="fork chain, setsid at each step",
        hides=True,
        source="""
def chain():
    for step in range(10 ** 9):
        if step == 20:
            ready()
        if os.fork():
            os._exit(0)
        os.setsid()
child(chain)
forever()
""",
    ),
    Creature(
        name="holder of a pipe",
        obeys=False,
        source="""
reader, writer = os.pipe()
child(lambda: (deaf(), os.close(reader), ready(), forever()))
os.close(writer)
os.read(reader, 1)
""",
    ),
    Creature(
        name="closed descriptors",
        source="""
def hidden():
    os.setsid()
    ready()
    close_all()
    forever()
child(hidden)
close_all()
forever()
""",
    ),
    Creature(
        name="zombie parent",
        source="""
pids = [child(lambda: None) for _ in range(size or 10)]
for pid in pids:
    wait_for_state(pid, "Z")
ready()
forever()
""",
    ),
    Creature(
        name="a thousand children",
        source="[child(forever) for _ in range(size or 1000)]; ready(); forever()",
    ),
    Creature(
        name="own process groups",
        source="""
[child(lambda: (os.setpgid(0, 0), forever())) for _ in range(size or 3)]
ready()
forever()
""",
    ),
    Creature(name="dead main thread", source=_DEAD_MAIN_THREAD),
    Creature(
        name="respawner",
        obeys=False,
        source="""
def again(*_):
    child(lambda: (deaf(), os.setsid(), forever()))
signal.signal(signal.SIGTERM, again)
ready()
while True:
    signal.pause()
""",
    ),
    Creature(
        name="leader ends, grandchild stays",
        obeys=False,
        source="""
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
child(lambda: (deaf(), ready(), forever()))
forever()
""",
    ),
    Creature(
        name="nested subreaper",
        source="""
import ctypes
def nested():
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    os.waitpid(child(lambda: child(lambda: (ready(), forever()))), 0)
    forever()
child(nested)
forever()
""",
    ),
    Creature(
        name="chain of sessions",
        source="""
def deeper(left):
    os.setsid()
    if not left:
        ready()
    else:
        child(lambda: deeper(left - 1))
    forever()
child(lambda: deeper(size or 20))
forever()
""",
    ),
)

ZOO: Mapping[str, Creature] = MappingProxyType({creature.name: creature for creature in _CREATURES})
"""All creatures by name."""


def alive(tag: str) -> list[int]:
    """Return the numbers of the processes that carry a tag in their command line and have a living thread.

    Args:
        tag: as it was given to `Creature.argv`; this process itself is never among the result.
    """
    needle = os.fsencode(tag)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and any(needle in line for line in living(pid, "cmdline"))]


def living(pid: int, name: str) -> Iterator[bytes]:
    """Yield what a file of `/proc` says of a process, by its main thread or, if that has ended, by the others.

    Nothing for a process of which no thread lives.
    """
    process = Path("/proc", str(pid))
    try:
        if _state(process) not in (b"Z", b"X"):
            yield (process / name).read_bytes()
            return
        threads = list((process / "task").iterdir())
    except (OSError, IndexError):  # gone, or not ours to read
        return
    for thread in threads:
        try:
            if _state(thread) not in (b"Z", b"X"):
                yield (thread / name).read_bytes()
        except (OSError, IndexError):  # gone meanwhile
            continue


def cull(tag: str) -> None:
    """Kill whatever carries a tag, so that a test that failed leaves nothing behind."""
    for _ in range(100):
        pids = alive(tag)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not pids:
            return


def _state(place: Path) -> bytes:
    return (place / "stat").read_bytes().rpartition(b")")[2].split()[0]
