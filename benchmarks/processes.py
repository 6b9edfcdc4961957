"""Tool processes: start through the daemon beside a plain start, and stop of whole trees beside SIGKILL of groups.

    python benchmarks/processes.py [--quick] [--repeat N] [--json FILE]

Needs no Ray. Both sides of a ratio are measured in turn, in the same run, so
that a busy machine is busy for both. The trees obey SIGTERM at once; the rival
kills their groups with SIGKILL, waits until all is gone, and so does not find
what has left its group, nor keep anybody's exit status.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from table import Check, Result, parse_options, show

from remit.core.ids import IdFactory
from remit.processes.client import ProcessClient
from remit.processes.containment import become_subreaper
from remit.processes.jobs import JobSpec

TREES = 200
SIZE = 5
STARTS = 200
PAUSE_S = 0.03
"""Between two starts of an agent that does something else meanwhile; the daemon forks ahead in it."""
SCOPE = "benchmark"


class Bench:
    """One daemon of its own, and what is run through it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="remit-bench-", dir="/tmp"))
        self.client = ProcessClient(state_dir=self.folder, kept=1)
        self.ids = IdFactory()
        self.env = {"PATH": os.environ["PATH"]}

    def start(self, argv: list[str], run: str) -> str:
        """Start a program; return its job."""
        job = self.ids.new("proc")
        spec = JobSpec(job=job, scope=SCOPE, run=run, argv=tuple(argv), output_dir=str(self.folder / "out" / job))
        return self.client.start(spec, env=self.env).job

    def close(self) -> None:
        """End the daemon and all that runs below it."""
        self.client.release(SCOPE)
        self.client.close()
        os.kill(int((self.folder / "procd" / "life").read_text()), signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_plain(count: int, pause_s: float = 0.0) -> float:
    """Return the median seconds of a start with `asyncio.create_subprocess_exec`, output in files."""

    async def measure() -> list[float]:
        times: list[float] = []
        with tempfile.TemporaryFile() as out:
            for _ in range(count):
                began = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    "/bin/true", stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
                times.append(time.perf_counter() - began)
                await process.wait()
                await asyncio.sleep(pause_s)
        return times

    return statistics.median(asyncio.run(measure()))


def start_through_daemon(bench: Bench, count: int, pause_s: float = 0.0) -> float:
    """Return the median seconds of a start that the daemon has confirmed."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        job = bench.start(["/bin/true"], "run_start")
        times.append(time.perf_counter() - began)
        bench.client.wait(job)
        time.sleep(pause_s)
    return statistics.median(times)


def tree_argv(marker: Path) -> list[str]:
    """Return a program that makes a tree of `SIZE` and then writes a byte to a file."""
    children = " ".join(["sleep 600 &"] * (SIZE - 1))
    return ["/bin/sh", "-c", f"{children} printf x >> {marker}; wait"]


def wait_for_bytes(marker: Path, count: int) -> None:
    """Wait until that many trees are complete."""
    while not marker.exists() or marker.stat().st_size < count:
        time.sleep(0.01)


def kill_groups(folder: Path, count: int) -> float:
    """Return the seconds from SIGKILL of all groups until no member of any is left."""
    marker = folder / f"groups-{time.monotonic_ns()}"
    processes = [subprocess.Popen(tree_argv(marker), start_new_session=True) for _ in range(count)]
    wait_for_bytes(marker, count)
    began = time.perf_counter()
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
    wait_for_all_children()
    took = time.perf_counter() - began
    for process in processes:
        process.returncode = -signal.SIGKILL  # waited for above; else it would look for its child again
    return took


def wait_for_all_children() -> None:
    """Wait until no child is left, orphans of children included: the kernel's own proof."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def stop_trees(bench: Bench, count: int) -> tuple[float, int]:
    """Return the seconds of one stop of all trees, proven, and how many processes were left."""
    run = bench.ids.new("run")
    marker = bench.folder / run
    for _ in range(count):
        bench.start(tree_argv(marker), run)
    wait_for_bytes(marker, count)
    began = time.perf_counter()
    summary = bench.client.stop_many(scope=SCOPE, runs=[run], grace_s=2.0)
    took = time.perf_counter() - began
    if len(summary.stopped) != count or summary.unconfirmed:
        sys.exit(f"only {len(summary.stopped)} of {count} trees were stopped")
    return took, len(summary.survivors)


def in_turn(repeat: int, ours: Callable[[], float], rival: Callable[[], float]) -> tuple[float, float]:
    """Return the medians of two measurements that take turns."""
    pairs = [(ours(), rival()) for _ in range(repeat)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def main() -> None:
    """Measure and print."""
    options = parse_options(__doc__)
    trees, starts = (20, 20) if options.quick else (TREES, STARTS)
    repeat = options.repeat or (1 if options.quick else 3)
    bench = Bench()
    bench.client.list()
    # After the daemon is there: orphans of the rival's trees come to us and can be waited for.
    if not become_subreaper():
        sys.exit("this benchmark needs Linux: it waits for orphans of the rival's trees")
    survivors = 0

    def stop() -> float:
        nonlocal survivors
        took, left = stop_trees(bench, trees)
        survivors += left
        return took

    try:
        start_through_daemon(bench, 5)
        start, plain = in_turn(repeat, lambda: start_through_daemon(bench, starts), lambda: start_plain(starts))
        paced, plain_paced = in_turn(
            repeat,
            lambda: start_through_daemon(bench, starts // 4, PAUSE_S),
            lambda: start_plain(starts // 4, PAUSE_S),
        )
        stopped, killed = in_turn(repeat, stop, lambda: kill_groups(bench.folder, trees))
    finally:
        bench.close()
    show(
        Result(
            title="Tool processes",
            columns=("what", "remit ms", "rival ms", "rival"),
            rows=[
                ("start after a pause", paced * 1e3, plain_paced * 1e3, "asyncio.create_subprocess_exec"),
                ("start without a pause", start * 1e3, plain * 1e3, "asyncio.create_subprocess_exec"),
                (f"stop of {trees} trees of {SIZE}", stopped * 1e3, killed * 1e3, "SIGKILL of their groups"),
            ],
            checks=[
                Check("start after a pause / plain start", paced / plain_paced, 2.0),
                Check("start without a pause / plain start", start / plain, 2.0),
                Check("stop of trees / SIGKILL of groups", stopped / killed, 3.0),
                Check("survivors", float(survivors), 0.0),
            ],
            notes=(
                f"medians of {repeat} repetitions of {starts} starts and one stop each; {os.cpu_count()} processors",
            ),
        ),
        options.json,
    )


if __name__ == "__main__":
    main()
