"""Delegate from Python, two levels deep, and stop it all if it takes too long.

python examples/delegate.py                      count the words of this folder's Markdown files
python examples/delegate.py --pause 30 --cancel-after 3
                                                 let each count dawdle, and call it off
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path

from remit.agents import RunContext, RunOptions, agent
from remit.coordinator import Coordinator, Turn
from remit.core import TurnCancelled


@agent
async def count(ctx: RunContext, path: str, pause_s: float) -> int:
    """Count the words of one file with a program, which dies with this run if it is cancelled."""
    done = await ctx.process(["wc", "-w", path], cwd=ctx.workspace)
    if done.exit_code != 0:
        raise RuntimeError(str(done.stderr).strip())
    await ctx.sleep(pause_s)
    return int(str(done.stdout).split()[0])


@agent
async def folder(ctx: RunContext, paths: list[str], pause_s: float) -> int:
    """Count one folder: delegates a run for each file, just as the turn delegates folders."""
    runs = await ctx.delegate_many(
        count,
        [{"path": path, "pause_s": pause_s} for path in paths],
        options=[RunOptions(name=path) for path in paths],
    )
    return sum(await ctx.gather(*runs))


def texts(workspace: Path) -> dict[str, list[str]]:
    """Return the Markdown files by folder, relative to the workspace, hidden ones left out."""
    folders: dict[str, list[str]] = {}
    for path in sorted(workspace.rglob("*.md")):
        inside = path.relative_to(workspace)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            folders.setdefault(str(inside.parent), []).append(str(inside))
    return folders


async def words(turn: Turn, workspace: Path, pause_s: float) -> Counter[str]:
    """Return words by folder."""
    folders = await asyncio.to_thread(texts, workspace)
    names = list(folders)
    runs = await turn.delegate_many(
        folder,
        [{"paths": folders[name], "pause_s": pause_s} for name in names],
        options=[RunOptions(name=name) for name in names],
    )
    total = Counter[str]()
    async for run in turn.as_completed(runs):
        total[run.name] = run.value()
        print(f"{run.name}: {total[run.name]:,} words", flush=True)
    return total


async def main() -> int:
    options = arguments()
    workspace: Path = options.workspace
    async with Coordinator.open(workspace, progress=lambda line: print(line, file=sys.stderr)) as coordinator:
        turn = coordinator.turn("count words")
        stopping: asyncio.Task[None] | None = None
        try:
            async with turn:
                if options.cancel_after is not None:
                    stopping = asyncio.create_task(stop(coordinator, turn.id, options.cancel_after))
                total = await words(turn, workspace, options.pause)
                print(f"{sum(total.values()):,} words in {len(total)} folders")
        except TurnCancelled as error:
            print(f"the turn was cancelled: {error.cause.describe() if error.cause else 'no cause'}")
            return 130
        finally:
            if stopping is not None:
                if turn.cause is None:  # it was over before its time
                    stopping.cancel()
                await asyncio.wait([stopping])
    return 0


async def stop(coordinator: Coordinator, turn_id: str, after_s: float) -> None:
    """Cancel a turn after a while and say what became of it; any process of the workspace may do this."""
    await asyncio.sleep(after_s)
    receipt = await coordinator.cancel(turn_id, "took too long")
    print(f"accepted: {receipt.accepted}, {receipt.live} runs were live")
    receipt = await receipt.quiet(timeout_s=30)
    print(f"quiet after {receipt.seconds_to_quiet:.3f} s: {dict(receipt.runs)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, default=Path.cwd(), help="folder to look at (default: this one)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="seconds that each count dawdles")
    parser.add_argument("--cancel-after", type=float, metavar="S", help="seconds until the turn is cancelled")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
