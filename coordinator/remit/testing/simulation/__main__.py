"""`python -m remit.testing.simulation`: look for holes, seed after seed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from remit.testing.simulation.plan import as_code
from remit.testing.simulation.seeds import make_plan
from remit.testing.simulation.shrink import broken_rule, history_of, shrink
from remit.testing.simulation.violation import Violation
from remit.testing.simulation.world import Simulation, Summary

__all__ = ["main"]

_BLOCK = 50
_SHOWN_LINES = 120

Say = Callable[[str], None]


def main(arguments: list[str] | None = None, say: Say = lambda line: print(line, flush=True)) -> int:  # noqa: T201
    """Simulate seeds and say what came of them.

    Args:
        arguments: those of the command line by default.
        say: writes a line.

    Returns:
        Exit status: 0 if everything held, 1 if something did not, 2 for wrong arguments.
    """
    options = _parser().parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        say("--seeds and --jobs must be 1 or more")
        return 2
    if options.show:
        for line in history_of(make_plan(options.first)):
            say(line)
        return 1 if broken_rule(make_plan(options.first)) else 0
    began = time.monotonic()
    done: list[Summary] = []
    for result in _results(options.first, options.seeds, options.jobs):
        if isinstance(result, Summary):
            done.append(result)
            if len(done) % 1_000 == 0:
                say(f"{len(done)} seeds held, {time.monotonic() - began:.0f} s")
            continue
        seed, violation = result
        _tell_violation(seed, violation, say, shrinks=not options.no_shrink)
        return 1
    say(_verdict(options.first, done, time.monotonic() - began))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m remit.testing.simulation",
        description="Simulate remit's decider with clients, hosts, network and disk, all from one seed, "
        "and check its invariants after each step (docs/simulator.md).",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to simulate (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once (default 1)")
    parser.add_argument("--show", action="store_true", help="print the whole history of --first, and nothing else")
    parser.add_argument("--no-shrink", action="store_true", help="report a failure as it is, without making it small")
    return parser


def _simulate(seed: int) -> Summary | tuple[int, Violation]:
    try:
        return Simulation(make_plan(seed)).run()
    except Violation as violation:
        return seed, violation


def _simulate_block(seeds: range) -> list[Summary | tuple[int, Violation]]:
    return [_simulate(seed) for seed in seeds]


def _results(first: int, count: int, jobs: int) -> Iterator[Summary | tuple[int, Violation]]:
    """Yield results in the order of the seeds."""
    if jobs == 1:
        yield from map(_simulate, range(first, first + count))
        return
    end = first + count
    blocks = [range(start, min(start + _BLOCK, end)) for start in range(first, end, _BLOCK)]
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for found in pool.map(_simulate_block, blocks):
                yield from found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _tell_violation(seed: int, violation: Violation, say: Say, *, shrinks: bool) -> None:
    say(f"seed {seed} does not hold: {violation}")
    plan = make_plan(seed)
    if shrinks:
        say("making it small ...")
        plan = shrink(plan, violation.rule)
    lines = history_of(plan)
    left_out = len(lines) - _SHOWN_LINES
    if left_out > 0:
        say(f"({left_out} earlier lines left out)")
    for line in lines[-_SHOWN_LINES:]:
        say(line)
    say(f"plan: {as_code(plan)}")
    say(f"again, as it was: python -m remit.testing.simulation --first {seed}")


def _verdict(first: int, done: list[Summary], seconds: float) -> str:
    totals = [sum(getattr(one, name) for one in done) for name in ("events", "runs", "cancels", "lives")]
    events, runs, cancels, lives = totals
    return (
        f"seeds {first} to {first + len(done) - 1} hold: {runs} runs, {cancels} cancels, {events} events, "
        f"{lives} lives of a coordinator, {seconds:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
