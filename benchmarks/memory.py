"""Memory that an idle sub-agent costs: growth of resident memory with 10,000 of them.

They wait in `ctx.sleep`, in shared isolation. The limit beside it is what as many bare
asyncio tasks cost in one Ray actor. Each repetition has a coordinator and hosts of its
own, since memory that was freed once would hide the growth of a second fill.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import ray as _ray
from bodies import waiting
from cancel import Tasks, total, until
from table import Check, Result, own_node, parse_options, show

from remit.coordinator import Coordinator
from remit.core.errors import TurnCancelled
from remit.core.limits import Limits

# Ray's annotations are incomplete.
ray: Any = _ray

WARM = 200


def resident(statistics_: dict[str, Any]) -> dict[str, int]:
    """Return resident bytes by role."""
    gc.collect()
    hosts = [host["pid"] for host in statistics_["hosts"] if host["pool"] == "shared"]
    return {
        "hosts": sum(psutil.Process(pid).memory_info().rss for pid in hosts),
        "coordinator": psutil.Process(statistics_["pid"]).memory_info().rss,
        "driver": psutil.Process(os.getpid()).memory_info().rss,
    }


class Limit(Tasks):
    """Tasks in one actor that says how much memory it has."""

    async def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)


async def fill(workspace: Path, count: int) -> dict[str, float]:
    """Return bytes a sub-agent, by role, in a coordinator of its own."""
    folder = workspace / "seen"
    folder.mkdir(parents=True)
    grown: dict[str, float] = {}
    limits = Limits(max_shared=count + WARM)
    async with Coordinator.open(workspace, limits=limits) as coordinator:
        actor = ray.remote(num_cpus=0)(Limit).remote()
        await actor.fill.remote(WARM)
        bare = await actor.resident.remote()
        await actor.fill.remote(count)
        grown["limit"] = (await actor.resident.remote() - bare) / count
        ray.kill(actor)
        turn = coordinator.turn("memory")
        try:
            async with turn:
                arguments = {"folder": str(folder)}
                warm = await turn.delegate_many(waiting, [arguments] * WARM)
                await until(lambda: total(folder, "entered") == WARM, "the first bodies wait")
                await two_hosts(coordinator)
                before = resident(await coordinator.statistics())
                runs = await turn.delegate_many(waiting, [arguments] * count)
                await until(lambda: total(folder, "entered") == WARM + count, "all bodies wait")
                await asyncio.sleep(1.0)
                after = resident(await coordinator.statistics())
                grown |= {role: (after[role] - before[role]) / count for role in before}
                assert len(warm) + len(runs) == WARM + count
                await turn.cancel("measured")
        except TurnCancelled:
            pass
        await coordinator.shutdown()
    return grown


async def two_hosts(coordinator: Coordinator) -> None:
    """Wait until no host is being started, so that none comes up between the measurements."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(host["ready"] for host in (await coordinator.statistics())["hosts"]):
            return
        await asyncio.sleep(0.2)


def main() -> None:
    options = parse_options(__doc__)
    count = 1_000 if options.quick else 10_000
    repeat = options.repeat or (1 if options.quick else 3)
    with own_node() as workspace:
        samples = [asyncio.run(fill(workspace / f"fill{number}", count)) for number in range(repeat)]
    kilobytes = {role: statistics.median(sample[role] for sample in samples) / 1e3 for role in samples[0]}
    rows: list[tuple[str | float | None, ...]] = [
        ("agent hosts", kilobytes["hosts"]),
        ("coordinator", kilobytes["coordinator"]),
        ("driver (holds the handles)", kilobytes["driver"]),
        ("all together", sum(kilobytes[role] for role in ("hosts", "coordinator", "driver"))),
        ("limit: a bare asyncio task in an actor", kilobytes["limit"]),
    ]
    checks = [Check("kB in the host an idle sub-agent", kilobytes["hosts"], 10.0)]
    title = f"resident memory an idle sub-agent, {count:,} of them, medians of {repeat}"
    show(Result(title, ("where", "kB each"), rows, checks), options.json)


if __name__ == "__main__":
    main()
