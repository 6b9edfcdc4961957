"""Claims on paths, with the journal on: one client and 64, each on a path of its own or all on one.

A claim stands beside one bare round trip to an async Ray actor, which is what it is
made of at least; a claim and its release beside two, beside an `asyncio.Lock` for
each path in one Ray actor (no journal, no order of several paths, nothing freed when
a caller dies), and beside the `filelock` package (a file for each lock, polled).
The cost of the table alone is measured by `lock_table.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import filelock
import ray as _ray
from table import Check, Result, own_node, parse_options, show

from remit.coordinator import Coordinator, Turn
from remit.locks import write

# Ray's annotations are incomplete.
ray: Any = _ray

CLIENTS = 64
AIM = 1.3

Pair = Callable[[int, str], Awaitable[float]]
"""Take a client's lock on a path, let it go, and return the seconds until it was taken."""


class Locks:
    """A lock for each path, in one Ray actor; and the cheapest thing that answers."""

    def __init__(self) -> None:
        self.locks: dict[str, asyncio.Lock] = {}

    async def echo(self) -> None:
        return None

    async def acquire(self, path: str) -> None:
        await self.locks.setdefault(path, asyncio.Lock()).acquire()

    async def release(self, path: str) -> None:
        self.locks[path].release()


def ours(turns: list[Turn]) -> Pair:
    async def pair(client: int, path: str) -> float:
        began = time.perf_counter()
        async with turns[client].claim(write(path)):
            return time.perf_counter() - began

    return pair


def in_actor(actor: Any) -> Pair:
    async def pair(client: int, path: str) -> float:
        began = time.perf_counter()
        await actor.acquire.remote(path)
        took = time.perf_counter() - began
        await actor.release.remote(path)
        return took

    return pair


def in_files(folder: Path, threads: ThreadPoolExecutor) -> Pair:
    def blocking(path: str) -> float:
        began = time.perf_counter()
        with filelock.FileLock(folder / path, thread_local=False):
            return time.perf_counter() - began

    async def pair(client: int, path: str) -> float:
        return await asyncio.get_running_loop().run_in_executor(threads, blocking, path)

    return pair


def bare(actor: Any) -> Pair:
    """Two round trips of which the first counts as the lock."""

    async def pair(client: int, path: str) -> float:
        began = time.perf_counter()
        await actor.echo.remote()
        took = time.perf_counter() - began
        await actor.echo.remote()
        return took

    return pair


async def drive(pair: Pair, clients: int, count: int, *, disjoint: bool) -> tuple[float, float]:
    """Let each client take and give back a lock so often.

    Returns:
        median seconds until a lock was taken; pairs a second over all clients.
    """
    taken: list[float] = []
    # New paths each time: a lock that was seen before may be cheaper.
    number = next(_numbers)

    async def client(own: int) -> None:
        path = f"p{number}_{own if disjoint else 0}"
        taken.extend([await pair(own, path) for _ in range(count)])

    began = time.perf_counter()
    await asyncio.gather(*(client(own) for own in range(clients)))
    return statistics.median(taken), clients * count / (time.perf_counter() - began)


_numbers = itertools.count()


async def measure(workspace: Path, repeat: int, count: int) -> Result:
    actor = None
    rows: list[tuple[str | float | None, ...]] = []
    checks: list[Check] = []
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator.open(workspace))
        stack.push_async_callback(coordinator.shutdown)
        actor = ray.remote(num_cpus=0, max_concurrency=100_000)(Locks).remote()
        turns = [await stack.enter_async_context(coordinator.turn(f"t{n}")) for n in range(CLIENTS)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="remit-filelock-")))
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        kinds = {
            "remit": ours(turns),
            "bare round trips": bare(actor),
            "asyncio.Lock in an actor": in_actor(actor),
            "filelock": in_files(folder, threads),
        }
        for clients, disjoint in ((1, True), (CLIENTS, True), (CLIENTS, False)):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
            each = count if clients == 1 else max(1, count // 10)
            for turn in range(repeat + 1):
                # In turns, so that a busy machine hurts all alike; the first round is for warming up.
                for name, pair in kinds.items():
                    sample = await drive(pair, clients, each, disjoint=disjoint)
                    if turn:
                        found[name].append(sample)
            middle = {
                name: tuple(map(statistics.median, zip(*samples, strict=True))) for name, samples in found.items()
            }
            where = f"{clients} client{'s' if clients > 1 else ''}, {'a path each' if disjoint else 'one path'}"
            base = middle["bare round trips"]
            for name, (taken, rate) in middle.items():
                rows.append((f"{where}: {name}", taken * 1e3, rate, taken / base[0], base[1] / rate))
            if clients == 1:
                checks.append(Check("uncontended claim by one bare round trip", middle["remit"][0] / base[0], AIM))
                best = {name: min(taken for taken, _ in samples) for name, samples in found.items()}
                told = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in best.items())
                notes.append(f"best round, until taken: {told}")
    columns = ("what", "ms until taken", "pairs/s", "taken by bare", "pair by bare")
    return Result("claim and release; medians", columns, rows, checks, tuple(notes))


def main() -> None:
    options = parse_options(__doc__)
    repeat = options.repeat or (2 if options.quick else 7)
    with own_node() as workspace:
        show(asyncio.run(measure(workspace, repeat, 30 if options.quick else 100)), options.json)


if __name__ == "__main__":
    main()
