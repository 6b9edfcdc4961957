"""Programs that do not want to stop, each stopped while it runs; nothing of any of them may be left."""

import asyncio
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.processes import CommandResult
from remit.testing import await_until
from tests.agents.tool_world import CAUSE, holding, run_tool, says

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the observer reads /proc")

FOREVER = "while :; do sleep 60; done"

SETSID_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(60)
"""

OWN_GROUPS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setpgid(0, 0)
        os.write(1, b".")
        time.sleep(60)
while os.fstat(1).st_size < 3:
    time.sleep(0.001)
os.write(1, b"ready")
time.sleep(60)
"""

ZOMBIES = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""

# Ends the main thread alone: the process is then a zombie to a quick look, and runs on.
DEAD_MAIN_THREAD = f"""
import ctypes, threading, time
def run():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=run).start()
ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)
"""

RESPAWNER = """
import os, signal, time
def again(*_):
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
signal.signal(signal.SIGTERM, again)
print("ready", flush=True)
while True:
    time.sleep(60)
"""

TORTURES = {
    "simple": ["sh", "-c", "echo ready; exec sleep 60"],
    "term ignorer": ["sh", "-c", f"trap '' TERM; echo ready; {FOREVER}"],
    "grandchild with a later effect": ["sh", "-c", "(sleep 6; touch witness) & echo ready; wait"],
    "own process groups": [sys.executable, "-c", OWN_GROUPS],
    "session of its own": ["sh", "-c", f"setsid sh -c 'trap \"\" TERM; echo ready; {FOREVER}' & wait"],
    "daemon": [sys.executable, "-c", SETSID_DAEMON],
    "session of its own, cleared environment": ["sh", "-c", "env -i setsid sh -c 'echo ready; sleep 60' & wait"],
    "leader ends on TERM, grandchild stays": [
        "sh",
        "-c",
        f"trap 'exit 0' TERM; (trap '' TERM; echo ready; {FOREVER}) & wait",
    ],
    "zombies": [sys.executable, "-c", ZOMBIES],
    "dead main thread": [sys.executable, "-c", DEAD_MAIN_THREAD],
    "respawner": [sys.executable, "-c", RESPAWNER],
}


def _carries(path: Path, needle: bytes) -> bool:
    try:
        return needle in path.read_bytes()
    except OSError:  # gone meanwhile
        return False


def _is_alive(pid: int) -> bool:
    """Tell whether any thread of a process still runs."""
    try:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # gone meanwhile
        return False
    return any(state not in "ZX" for state in states)


def _left(mark: str) -> list[int]:
    """Return the living processes that carry a mark; an observer apart from the code under test."""
    needle = f"REMIT_RUN={mark}".encode()
    return [
        pid
        for pid in psutil.pids()
        if _is_alive(pid) and any(_carries(path, needle) for path in Path(f"/proc/{pid}/task").glob("*/environ"))
    ]


async def _stop_when_ready(argv: list[str], folder: Path, *, ready: str = "ready", **options: Any) -> CommandResult:
    """Run a program, set its run's signal once it says that it is ready, and return its end."""
    async with holding(folder) as holder:
        task = asyncio.create_task(holder.cut_short(argv, cwd=folder, **{"grace_s": 0.2, **options}))
        output = holder.folder / "process_1" / "stdout"
        await await_until(says(output, ready), message=f"{argv} never got ready")
        holder.signal.set(CAUSE)
        result = await task
    assert _left(holder.run_id) == []
    return result


@pytest.mark.requirement("E2", "E3", "E4", "E10")
@pytest.mark.field_report("F1", "F2", "F5")
def test_no_program_survives_its_cancel(tmp_path: Path) -> None:
    """All at once, so that they also have to be told apart."""

    async def scenario() -> dict[str, CommandResult]:
        for name in TORTURES:
            (tmp_path / name).mkdir()
        jobs = [_stop_when_ready(argv, tmp_path / name) for name, argv in TORTURES.items()]
        return dict(zip(TORTURES, await asyncio.gather(*jobs), strict=True))

    results = asyncio.run(scenario())
    for name, result in results.items():
        assert (name, result.outcome, result.survivors, result.denied) == (name, "cancelled", (), ())
        assert not any(_is_alive(pid) for pid in (result.pid, *result.leftovers_stopped)), name
    escalated = {name for name, result in results.items() if result.escalated}
    assert escalated == {
        "term ignorer",
        "session of its own",
        "leader ends on TERM, grandchild stays",
        "respawner",
    }
    assert results["leader ends on TERM, grandchild stays"].exit_code == 0
    assert results["session of its own, cleared environment"].leftovers_stopped
    assert not (tmp_path / "grandchild with a later effect" / "witness").exists()


@pytest.mark.requirement("E20")
@pytest.mark.field_report("F3")
def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_end(tmp_path: Path) -> None:
    # The leader ends only when the grandchild has its trap, or SIGTERM could come before it.
    trapped = tmp_path / "trapped"
    ready = f"while [ ! -e {trapped} ]; do sleep 0.01; done"
    script = f"(trap '' TERM HUP; touch {trapped}; {FOREVER}) & {ready}; echo so far; exit 0"
    started = time.monotonic()
    result = run_tool(["sh", "-c", script], tmp_path, grace_s=0.1)
    assert time.monotonic() - started < 30  # the grandchild would hold it for ever
    assert (result.outcome, result.exit_code, result.stdout.text) == ("exited", 0, "so far\n")
    assert result.escalated
    assert all(not _is_alive(pid) for pid in result.leftovers_stopped)


def test_a_stopped_program_gets_its_grace(tmp_path: Path) -> None:
    """SIGTERM alone would wait in a stopped process until SIGKILL."""
    watch = "while ! grep -q 'State:.T' /proc/$$/status; do :; done; echo ready"
    script = f"trap 'echo bye; exit 0' TERM; ({watch}) & kill -STOP $$; wait"
    result = asyncio.run(_stop_when_ready(["sh", "-c", script], tmp_path, grace_s=30))
    assert (result.outcome, result.exit_code, result.escalated) == ("cancelled", 0, False)
    assert result.stdout.text == "ready\nbye\n"


@pytest.mark.requirement("E4")
@pytest.mark.field_report("F2", "F11")
def test_a_trap_can_clean_up_within_the_grace(tmp_path: Path) -> None:
    script = "trap 'sleep 0.2; rm scratch; exit 1' TERM; touch scratch; echo ready; while :; do sleep 0.01; done"
    result = asyncio.run(_stop_when_ready(["sh", "-c", script], tmp_path, grace_s=30))
    assert (result.outcome, result.exit_code, result.escalated) == ("cancelled", 1, False)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.requirement("C35", "E20")
def test_output_without_end_is_stopped_and_shown_in_part(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo ready; exec sleep 60"
    result = asyncio.run(_stop_when_ready(["sh", "-c", script], tmp_path))
    assert result.stdout.truncated
    assert result.stdout.total_bytes == result.stdout.path.stat().st_size > 200_000
    assert result.stdout.text.startswith("line 0\n")
    assert result.stdout.text.endswith("line 19999\nready\n")


@pytest.mark.requirement("E2")
def test_programs_of_others_are_left_alone(tmp_path: Path) -> None:
    environ = {**os.environ, "REMIT_RUN": "run_mine", "REMIT_PROCESS": "0123456789abcdef"}
    with subprocess.Popen(["sleep", "60"], env=environ) as other:
        result = asyncio.run(_stop_when_ready(["sh", "-c", "echo ready; exec sleep 60"], tmp_path))
        assert other.poll() is None
        other.kill()
    assert other.pid not in (result.pid, *result.leftovers_stopped)
