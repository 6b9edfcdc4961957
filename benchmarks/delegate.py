"""Delegate, run and result of empty sub-agents, with the journal on.

Batches stand beside as many bare calls of one async Ray actor, sent without waiting,
and beside one new Ray actor a run; a single delegation beside two bare round trips,
which is what it is made of at least: to the coordinator and to a host.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import ray as _ray
from bodies import empty
from table import Check, Result, own_node, parse_options, show

from remit.coordinator import Coordinator

# Ray's annotations are incomplete.
ray: Any = _ray

NEW_ACTORS = 10


class Bare:
    """The cheapest thing that answers."""

    async def echo(self, i: int) -> int:
        return i


async def batch(turn: Any, count: int) -> tuple[float, float]:
    """Return seconds until a batch was accepted, and until all its results were there."""
    arguments = [{"i": i} for i in range(count)]
    began = time.perf_counter()
    runs = await turn.delegate_many(empty, arguments)
    accepted = time.perf_counter()
    results = await turn.gather(*runs)
    ended = time.perf_counter()
    assert results == list(range(count))
    return accepted - began, ended - began


def bare_batch(actor: Any, count: int) -> float:
    began = time.perf_counter()
    assert ray.get([actor.echo.remote(i) for i in range(count)]) == list(range(count))
    return time.perf_counter() - began


def new_actors(count: int) -> float:
    """Return the seconds a run, with an actor each, all asked for at once."""
    kind = ray.remote(num_cpus=0)(Bare)
    began = time.perf_counter()
    actors = [kind.remote() for _ in range(count)]
    ray.get([actor.echo.remote(1) for actor in actors])
    took = time.perf_counter() - began
    for actor in actors:
        ray.kill(actor)
    return took / count


async def single(turn: Any) -> float:
    began = time.perf_counter()
    assert await (await turn.delegate(empty, i=1)).result() == 1
    return time.perf_counter() - began


async def bare_pair(actor: Any) -> float:
    began = time.perf_counter()
    await actor.echo.remote(1)
    await actor.echo.remote(1)
    return time.perf_counter() - began


async def measure(workspace: Path, count: int, repeat: int, singles: int) -> Result:
    async with Coordinator.open(workspace) as coordinator:
        actor = ray.remote(num_cpus=0, max_concurrency=100_000)(Bare).remote()
        async with coordinator.turn("delegate") as turn:
            await batch(turn, count)
            bare_batch(actor, count)
            accepted: list[float] = []
            ours: list[float] = []
            bare: list[float] = []
            for _ in range(repeat):
                first, whole = await batch(turn, count)
                accepted.append(first)
                ours.append(whole)
                bare.append(bare_batch(actor, count))
            one: list[float] = []
            pair: list[float] = []
            for _ in range(singles):
                one.append(await single(turn))
                pair.append(await bare_pair(actor))
        actors = await asyncio.to_thread(new_actors, NEW_ACTORS)
        await coordinator.shutdown()
    whole, plain = statistics.median(ours), statistics.median(bare)
    alone, trips = statistics.median(one), statistics.median(pair)
    rows: list[tuple[str | float | None, ...]] = [
        (f"batch of {count:,}: all results", whole * 1e3, count / whole, whole / plain),
        (f"batch of {count:,}: accepted and durable", statistics.median(accepted) * 1e3, None, None),
        (f"{count:,} bare actor calls", plain * 1e3, count / plain, 1.0),
        ("one new actor a run", actors * 1e3, 1 / actors, None),
        ("single: start to result", alone * 1e3, 1 / alone, alone / trips),
        ("two bare round trips", trips * 1e3, 1 / trips, 1.0),
    ]
    checks = [
        Check("batch by bare calls", whole / plain, 0.3),
        Check("runs by new actors, rate", count / whole * actors, 1000.0, at_least=True),
        Check("single by two bare round trips", alone / trips, 2.5),
    ]
    best = f"best of {repeat}: batch {min(ours) * 1e3:.1f} ms, bare calls {min(bare) * 1e3:.1f} ms"
    return Result("delegate, run, result; medians", ("what", "ms", "per second", "ratio"), rows, checks, (best,))


def main() -> None:
    options = parse_options(__doc__)
    repeat = options.repeat or (3 if options.quick else 15)
    with own_node() as workspace:
        show(asyncio.run(measure(workspace, 1_000, repeat, 20 if options.quick else 200)), options.json)


if __name__ == "__main__":
    main()
