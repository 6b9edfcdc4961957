"""Cancel of N waiting sub-agents: from the request to the last one that observed it.

The limit is the same number of asyncio tasks in one Ray actor, cancelled by one call;
the rival is one `ray.cancel` for each of as many calls of one async actor. Ray's own
tasks would need a process each (thousands do not fit on a machine), so that form is
measured with few and told per task. All clocks are this machine's monotonic one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray as _ray
from bodies import waiting
from table import Check, Result, own_node, parse_options, show

from remit.coordinator import Coordinator
from remit.core.errors import TurnCancelled
from remit.core.limits import Limits

# Ray's annotations are incomplete.
ray: Any = _ray

MANY = 100_000
GRACE_S = 60.0
PROCESS_TASKS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One cancel of N sub-agents, in seconds and messages."""

    observed_s: float
    receipt_s: float
    quiet_s: float
    orders: int
    reports: int
    hosts: int


class Tasks:
    """Asyncio tasks that wait, in one actor: what a cancel of many costs at least."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0.0

    async def fill(self, count: int) -> None:
        self._tasks = {asyncio.create_task(self._wait()) for _ in range(count)}
        await asyncio.sleep(0.2)

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            self._last = time.monotonic()

    async def cancel(self) -> float:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        return self._last


class Calls:
    """Calls that wait, each of which Ray cancels by itself."""

    def __init__(self) -> None:
        self._entered = 0
        self._last = 0.0
        self._left = 0

    async def wait(self) -> None:
        self._entered += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self._left += 1
            self._last = time.monotonic()

    async def counts(self) -> tuple[int, int, float]:
        return self._entered, self._left, self._last


async def ours(coordinator: Coordinator, count: int, folder: Path) -> Sample:
    """Delegate, wait until all bodies wait, cancel the turn, and see it quiet."""
    for path in folder.iterdir():
        path.unlink()
    turn = coordinator.turn(f"cancel {count}", grace_s=GRACE_S)
    before: dict[str, Any] = {}
    asked = 0.0
    answered: list[float] = []
    cancelling: asyncio.Task[Any] | None = None
    try:
        async with turn:
            await turn.delegate_many(waiting, [{"folder": str(folder)}] * count)
            await until(lambda: total(folder, "entered") == count, f"{count} bodies wait")
            before = await coordinator.statistics()
            asked = time.monotonic()
            cancelling = asyncio.create_task(coordinator.cancel(turn.id, "benchmark"))
            cancelling.add_done_callback(lambda _: answered.append(time.monotonic()))
            await turn.sleep(3600)
    except TurnCancelled:
        pass
    assert cancelling is not None
    receipt = await (await cancelling).quiet(GRACE_S)
    after = await coordinator.statistics()
    if total(folder, "stopped") != count or receipt.seconds_to_quiet is None:
        raise RuntimeError(f"{total(folder, 'stopped')} of {count} observed the cancel: {receipt}")
    last = max(json.loads(path.read_text())["last"] for path in folder.glob("stopped-*"))
    messages = {name: after["messages"][name] - before["messages"][name] for name in ("orders", "reports")}
    hosts = sum(host["runs"] > 0 for host in before["hosts"])
    return Sample(
        observed_s=last - asked,
        receipt_s=answered[0] - asked,
        quiet_s=receipt.seconds_to_quiet,
        orders=messages["orders"],
        reports=messages["reports"],
        hosts=hosts,
    )


def total(folder: Path, word: str) -> int:
    return sum(int(json.loads(path.read_text())["count"]) for path in folder.glob(f"{word}-*[0-9]"))


async def until(condition: Any, what: str, timeout_s: float = 120.0) -> None:
    """Poll for something that another process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        await asyncio.sleep(0.05)


async def limit(actor: Any, count: int) -> float:
    """Return the seconds that the same number of plain tasks take."""
    await actor.fill.remote(count)
    asked = time.monotonic()
    last: float = await actor.cancel.remote()
    return last - asked


async def rival(count: int) -> float:
    """Return the seconds that as many `ray.cancel` take, counted until the last was observed."""
    actor = ray.remote(num_cpus=0, max_concurrency=MANY)(Calls).remote()
    refs = [actor.wait.remote() for _ in range(count)]
    deadline = time.monotonic() + 120
    while (await actor.counts.remote())[0] < count and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    asked = time.monotonic()
    for ref in refs:
        ray.cancel(ref)
    deadline = time.monotonic() + 300
    while True:
        _, left, last = await actor.counts.remote()
        if left == count or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.02)
    del refs
    ray.kill(actor)
    if left < count:
        raise RuntimeError(f"ray.cancel reached {left} of {count} calls")
    return float(last) - asked


def process_task_cancel_s() -> float | None:
    """Return the seconds a task that `ray.cancel` takes for tasks in worker processes, if they end at all."""

    def wait(path: str) -> None:
        Path(path).touch()
        while True:  # Ray's interrupt does not wake a sleep, it is noticed after it
            time.sleep(0.01)

    task = ray.remote(num_cpus=0, max_retries=0)(wait)
    with tempfile.TemporaryDirectory() as folder:
        refs = [task.remote(f"{folder}/{number}") for number in range(PROCESS_TASKS)]
        deadline = time.monotonic() + 120
        while len(list(Path(folder).iterdir())) < PROCESS_TASKS and time.monotonic() < deadline:
            time.sleep(0.05)
        asked = time.monotonic()
        for ref in refs:
            ray.cancel(ref)
        _, left = ray.wait(refs, num_returns=len(refs), timeout=60)
        return None if left else (time.monotonic() - asked) / PROCESS_TASKS


async def measure(workspace: Path, counts: list[int], repeat: int) -> Result:
    rows: list[tuple[str | float | None, ...]] = []
    checks: list[Check] = []
    folder = workspace / "seen"
    folder.mkdir()
    limits = Limits(max_shared=max(counts) + 256)
    async with Coordinator.open(workspace, limits=limits) as coordinator:
        tasks = ray.remote(num_cpus=0)(Tasks).remote()
        await ours(coordinator, 10, folder)
        await limit(tasks, 10)
        for count in counts:
            samples: list[Sample] = []
            least: list[float] = []
            for _ in range(repeat):
                samples.append(await ours(coordinator, count, folder))
                least.append(await limit(tasks, count))
            rivals = [await rival(count) for _ in range(1 if count > 1000 else repeat)]
            observed = statistics.median(sample.observed_s for sample in samples)
            bound, other = statistics.median(least), statistics.median(rivals)
            rows.append(
                (
                    f"{count:,}",
                    observed * 1e3,
                    bound * 1e3,
                    observed / bound,
                    other * 1e3,
                    other / observed,
                    statistics.median(sample.receipt_s for sample in samples) * 1e3,
                    statistics.median(sample.quiet_s for sample in samples) * 1e3,
                    max(sample.hosts for sample in samples),
                    max(sample.orders for sample in samples),
                    max(sample.reports for sample in samples),
                )
            )
            print("  ".join(f"{sample.observed_s * 1e3:.0f}" for sample in samples), "ms;", file=sys.stderr)
            checks.append(Check(f"{count:,} observed, by the limit", observed / bound, 2.0))
            checks.append(Check(f"{count:,} observed, rival by ours", other / observed, 20.0, at_least=True))
            orders = max(sample.orders / max(sample.hosts, 1) for sample in samples)
            checks.append(Check(f"{count:,} orders a host", orders, 1.0))
        process_s = await asyncio.to_thread(process_task_cancel_s)
        await coordinator.shutdown()
    columns = (
        "sub-agents", "observed ms", "limit ms", "ratio", "ray.cancel ms", "rival/ours",
        "receipt ms", "quiet ms", "hosts", "orders", "reports",
    )  # fmt: skip
    told = "not all ended within 60 s" if process_s is None else f"{process_s * 1e3:.1f} ms a task"
    note = f"ray.cancel of tasks in processes of their own ({PROCESS_TASKS} of them): {told}"
    return Result("cancel of N waiting sub-agents, medians", columns, rows, checks, (note,))


def main() -> None:
    options = parse_options(__doc__)
    counts = [100, 1_000] if options.quick else [100, 1_000, 10_000]
    repeat = options.repeat or (2 if options.quick else 5)
    with own_node() as workspace:
        show(asyncio.run(measure(workspace, counts, repeat)), options.json)


if __name__ == "__main__":
    main()
