"""What spans cost: batches and cancels with spans off, in files, and with a collector that never answers.

A collector that accepts connections and says nothing is the worst kind: a dead one is
found out at once. Each way of tracing has a workspace, and so a coordinator and hosts,
of its own; they are measured in turns, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bodies import empty, waiting
from table import Check, Result, own_node, parse_options, show

from remit.coordinator import Coordinator
from remit.core import TurnCancelled

BATCH = 1_000
WAYS = ("off", "files", "deaf collector")


@contextmanager
def deaf_collector() -> Generator[str]:
    """Accept connections and never answer."""
    server = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                held.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.close()
        for each in held:
            each.close()


@contextmanager
def tracing(way: str, endpoint: str) -> Generator[None]:
    """Set the variables that a coordinator takes over when it is started."""
    wanted = {
        "off": {"OTEL_SDK_DISABLED": "true"},
        "files": {},
        "deaf collector": {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
    }[way]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


async def batch(coordinator: Coordinator) -> float:
    """Return the seconds of a batch of empty runs, until all results are there."""
    async with coordinator.turn("batch") as turn:
        began = time.perf_counter()
        runs = await turn.delegate_many(empty, [{"i": i} for i in range(BATCH)])
        await turn.gather(*runs)
        took = time.perf_counter() - began
    return took


async def cancel(coordinator: Coordinator, folder: Path, count: int) -> float:
    """Return the seconds from the request of a cancel of waiting runs until all is quiet."""
    folder.mkdir()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with coordinator.turn("cancel") as turn:
            await turn.delegate_many(waiting, [{"folder": str(folder)}] * count)
            while _entered(folder) < count:
                await asyncio.sleep(0.02)
            ready.set_result(turn)
            await turn.sleep(600)

    holding = asyncio.ensure_future(hold())
    turn = await ready
    began = time.perf_counter()
    await (await coordinator.cancel(turn.id)).quiet()
    took = time.perf_counter() - began
    try:
        await holding
    except TurnCancelled:
        return took
    raise AssertionError("the turn was not cancelled")


def _entered(folder: Path) -> int:
    import json

    return sum(json.loads(path.read_text())["count"] for path in folder.glob("entered-*[0-9]"))


async def measure(workspace: Path, repeat: int, count: int) -> Result:
    batches: dict[str, list[float]] = {way: [] for way in WAYS}
    cancels: dict[str, list[float]] = {way: [] for way in WAYS}
    with deaf_collector() as endpoint:
        coordinators: dict[str, Coordinator] = {}
        for way in WAYS:
            own = workspace / way.replace(" ", "-")
            own.mkdir()
            with tracing(way, endpoint):
                coordinators[way] = await Coordinator.open(own).__aenter__()
            await batch(coordinators[way])
        try:
            for number in range(repeat):
                # In another order each time: who comes first has the warmer caches.
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    batches[way].append(await batch(coordinators[way]))
                    cancels[way].append(await cancel(coordinators[way], workspace / f"{way[:4]}{number}", count))
            dropped = (await coordinators["deaf collector"].statistics())["telemetry"]["dropped"]
        finally:
            for coordinator in coordinators.values():
                await coordinator.shutdown(timeout_s=5.0)
                await coordinator.__aexit__(None, None, None)
    base, stop = statistics.median(batches["off"]), statistics.median(cancels["off"])
    rows: list[tuple[str | float | None, ...]] = []
    for way in WAYS:
        whole, quiet = statistics.median(batches[way]), statistics.median(cancels[way])
        rows.append((f"spans: {way}", whole * 1e3, whole / base, quiet * 1e3, quiet / stop))
    checks = [
        Check("batch, spans in files by spans off", statistics.median(batches["files"]) / base, 1.1),
        Check("batch, deaf collector by spans off", statistics.median(batches["deaf collector"]) / base, 1.1),
        Check("cancel, spans in files by spans off", statistics.median(cancels["files"]) / stop, 1.1),
        Check("cancel, deaf collector by spans off", statistics.median(cancels["deaf collector"]) / stop, 1.1),
    ]
    best = "best: " + ", ".join(
        f"{way} {min(batches[way]) * 1e3:.0f} and {min(cancels[way]) * 1e3:.0f} ms" for way in WAYS
    )
    columns = ("what", f"batch of {BATCH:,} ms", "ratio", f"cancel of {count:,} until quiet, ms", "ratio")
    return Result("spans; medians", columns, rows, checks, (best, f"spans given up so far: {dropped}"))


def main() -> None:
    options = parse_options(__doc__)
    repeat = options.repeat or (3 if options.quick else 15)
    with own_node() as workspace:
        show(asyncio.run(measure(workspace, repeat, 100 if options.quick else 1_000)), options.json)


if __name__ == "__main__":
    main()
