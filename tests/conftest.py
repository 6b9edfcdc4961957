"""Settings and guards that hold for every test.

**Guards**

1. A test that leaves a thread, a child process, an open file or an asyncio
   task behind fails, once it has had a moment to end them.
2. The guards stand down while Ray is connected in this process: its threads
   and sockets come and go by themselves. Tests that need Ray run last, so that
   all others are guarded.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.journal.postgres_server import Server, binaries

RAY_TIMEOUT_S = 180
"""Limit of one test on Ray: the first one also waits for the node to start."""

SLOW_TIMEOUT_S = 300
"""Limit of one slow test: there are more of them at once than CPUs."""

SETTLE_S = 2.0
"""How long a test's threads, processes and files may take to end after its body."""

SLOW_FOLDERS = frozenset({"faults", "simulation"})
SLOW_FILES = frozenset(
    {
        "test_node.py",
        "test_recovery_storm.py",
        "test_retention.py",
        # Real programs and daemons by the hundred.
        *("test_restarts.py", "test_daemon.py", "test_doctor.py", "test_command_torture.py"),
        *("test_keeper.py", "test_zoo.py", "test_reuse.py", "test_crashes.py", "test_output_cap.py"),
    }
)
"""What takes seconds and tells little that the rest does not tell; it runs with `--all` and against the wheel."""

INSTALLED_FOLDERS = frozenset({"cli", "contracts"})
"""Beside the files at the top of tests/: fast tests of what packaging could break, which run against the wheel too."""

_WAITING = 2
"""Processes of tests beyond one a CPU: about half of a test's time it waits."""

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2_000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `-n auto` means."""
    return len(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)) + _WAITING


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark by folder, give Ray tests their time, and let them run last in their shuffled order."""
    # Before all others, so that `-m` sees the marks; after all others, so that no shuffle undoes the order.
    here = Path(__file__).parent
    for item in items:
        top = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if top == "ray":
            item.add_marker(pytest.mark.ray)
        if top == "faults":
            item.add_marker(pytest.mark.faults)
        if top in SLOW_FOLDERS or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if top in INSTALLED_FOLDERS or item.path.parent == here:
            item.add_marker(pytest.mark.installed)
        for mark, limit_s in (("ray", RAY_TIMEOUT_S), ("slow", SLOW_TIMEOUT_S)):
            if item.get_closest_marker(mark) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(limit_s))
    yield
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)


def pytest_collection_finish() -> None:
    """Take what is there for the whole session out of what the cycle collector looks through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_state_dir() -> Iterator[Path]:
    """Give this test process a state directory, and with it a daemon of tool processes, of its own."""
    # Short: a socket's path must stay under 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    before = os.environ.get("REMIT_STATE_DIR")
    os.environ["REMIT_STATE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["REMIT_STATE_DIR"]
    else:
        os.environ["REMIT_STATE_DIR"] = before
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((folder / "procd" / "life").read_text()), signal.SIGTERM)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run tests marked `anyio` on asyncio alone; nothing else is supported."""
    return "asyncio"


@pytest.fixture(scope="session")
def project_root() -> Path:
    """Return the folder that holds tests/ (and, in a checkout, the sources)."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """Return a PostgreSQL server of the tests' own; skips where none is installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    server = Server(programs)
    yield server
    server.remove()


def _ray_is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())


def _threads() -> dict[str, str]:
    """Return the living threads; mapping of identity to name."""
    return {str(id(thread)): thread.name for thread in threading.enumerate() if thread.is_alive()}


def _children() -> dict[str, str]:
    """Return direct child processes; mapping of pid to command. Empty where /proc cannot tell."""
    found: dict[str, str] = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread ended between listing and reading
            continue
        for pid in pids:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:
                continue
            # multiprocessing keeps one tracker for the life of the interpreter.
            if "multiprocessing.resource_tracker" not in command:
                found[pid] = command or "(ended, not waited for)"
    return found


def _files() -> dict[str, str]:
    """Return open descriptors; mapping of number and target to target. Empty where /proc cannot tell."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    kept = getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)
    found: dict[str, str] = {}
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor of this very listing
            continue
        if entry.name != str(kept):
            found[f"{entry.name} {target}"] = target
    return found


_KINDS = {"threads": _threads, "child processes": _children, "open files": _files}


def _left_over(before: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return what there is now and was not before, by kind; kinds with nothing new are absent.

    A file counts only if there are more of them: a descriptor that was closed
    and opened again has a new identity.
    """
    left: dict[str, list[str]] = {}
    for kind, look in _KINDS.items():
        now = look()
        new = [f"{name} ({key.split()[0]})" for key, name in now.items() if key not in before[kind]]
        if new and (kind != "open files" or len(now) > len(before[kind])):
            left[kind] = new
    return left


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves threads, child processes, open files or asyncio tasks."""
    abandoned: list[str] = []
    # asyncio.run() cancels what is still alive when the main coroutine ends, without a word; listen in there.
    cancel_all = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def listen(loop: asyncio.AbstractEventLoop) -> None:
        abandoned.extend(repr(task) for task in asyncio.all_tasks(loop))
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", listen)
    before = {kind: look() for kind, look in _KINDS.items()}
    yield
    if _ray_is_connected():
        return
    left = _left_over(before)
    limit = time.monotonic() + SETTLE_S
    pause_s = 0.001
    while left and time.monotonic() < limit:
        # Most of it ends by itself in a moment; a collection takes longer than that, and only files need one.
        if pause_s > 0.004:
            gc.collect()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
        left = _left_over(before)
    if abandoned:
        left["asyncio tasks"] = abandoned
    if left:
        told = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in left.items())
        pytest.fail(f"left behind: {told}", pytrace=False)
