"""What works while everything around it is killed: agents with claims and programs, and their clients."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from remit.agents import RunContext, RunOptions, agent
from remit.coordinator import Coordinator, Turn
from remit.core import TurnCancelled
from remit.core.errors import CoordinatorUnavailable
from remit.locks import write

MARK = "CHAOS_HOME"
"""Variable that every program is born with, and what it forks as well; holds the folder of notes."""

PATHS = 8

# Whoever is inside a path names itself there, by process id and start time, and tells of a predecessor that
# still lives. Its child ignores SIGTERM in a session of its own and outlasts it: somebody has to end it.
_SCRIPT = """
file="$CHAOS_HOME/inside.$1"
start_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
if [ -s "$file" ]; then
    read -r pid start name < "$file"
    [ "$(start_of "$pid")" = "$start" ] && echo "$3 came in while $name ($pid) was inside $1" >> "$CHAOS_HOME/overlaps"
fi
echo "$$ $(start_of $$) $3" > "$file"
echo "$REMIT_CHAOS_KEY" >> "$CHAOS_HOME/started"
(trap '' TERM; exec setsid sleep 300) &
sleep "$2"
"""


@agent
async def work(ctx: RunContext, home: str, path: int, for_s: float) -> int | None:
    """Hold one path and run a program in it."""
    async with ctx.claim(write(f"path{path}")):
        argv = ["sh", "-c", _SCRIPT, "work", str(path), f"{for_s:.2f}", ctx.run_id]
        # What its key is made of, beside the command, which is the run's own: an attempt that
        # goes on with an earlier one's programs has the same. No part of the command itself.
        key = f"{ctx.run_id} {ctx.tool_lineage()}"
        return (await ctx.process(argv, env={MARK: home, "REMIT_CHAOS_KEY": key}, grace_s=0.2)).exit_code


@agent
async def last(ctx: RunContext, home: str) -> None:
    """Hold a path of its own and run a program that does not end: whoever is over must have it ended."""
    async with ctx.claim(write(f"own/{ctx.run_id}")):
        await ctx.process(["sleep", "300"], env={MARK: home}, grace_s=0.2)


work_alone = agent(name="work_alone", isolation="actor")(work.fn)


@agent
async def branch(ctx: RunContext, home: str, seed: int) -> int:
    """Delegate three pieces of work and wait for them."""
    chance = random.Random(seed)
    runs = await ctx.delegate_many(work, [_piece(home, chance) for _ in range(3)], options=RunOptions(retries=1))
    await ctx.gather(*runs, return_outcomes=True)
    return len(runs)


def _piece(home: str, chance: random.Random) -> dict[str, Any]:
    return {"home": home, "path": chance.randrange(PATHS), "for_s": chance.uniform(0.0, 0.5)}


async def _turn(turn: Turn, home: str, chance: random.Random) -> None:
    options = RunOptions(retries=chance.choice((0, 1, 2)))
    runs = await turn.delegate_many(work, [_piece(home, chance) for _ in range(6)], options=options)
    seeds = [{"home": home, "seed": chance.randrange(10**6)} for _ in range(2)]
    runs += await turn.delegate_many(branch, seeds, options=options)
    if chance.random() < 0.1:
        runs.append(await turn.delegate(work_alone, **_piece(home, chance)))
    lasting = await turn.delegate_many(last, [{"home": home}] * 2, options=RunOptions(retries=chance.choice((0, 1))))
    if chance.random() < 0.3:
        # Until the end of the turn, or of whoever holds it.
        await turn.start_process(["sleep", "300"], env={MARK: home}, grace_s=0.2)
    if chance.random() < 0.2:
        await turn.sleep(chance.uniform(0.0, 1.0))
        await turn.cancel("enough")
    await turn.gather(*runs, return_outcomes=True)
    for run in lasting:
        await run.cancel("no more of it")
    await turn.gather(*lasting, return_outcomes=True)


async def _client(workspace: str, home: str, seed: int) -> None:
    chance = random.Random(seed)
    over = Path(home, "over")
    while not over.exists():
        try:
            async with Coordinator.open(workspace, grace_s=3.0) as coordinator:
                while not over.exists():
                    try:
                        async with coordinator.turn(f"client {seed}", grace_s=2.0) as turn:
                            await _turn(turn, home, chance)
                    except TurnCancelled:
                        continue
        except CoordinatorUnavailable as error:
            # Contact was lost for longer than a client waits: deaths in a row. Its turns were cancelled.
            _note(home, "lost_contact", f"client {seed}: {error}")


def _note(home: str, name: str, line: str) -> None:
    with Path(home, name).open("a") as file:
        file.write(line + "\n")


def _be_client(workspace: str, home: str, seed: int) -> None:
    """Hold turns until the file `over` is there; what must not happen goes to the file `errors`."""
    with Path(home, f"stacks.{seed}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            asyncio.run(_client(workspace, home, seed))
        except BaseException:
            _note(home, "errors", f"client {seed}, process {os.getpid()}: {traceback.format_exc()}")
            raise


def main(workspace: str, home: str) -> None:
    """Fork a client for each seed that is read, and print its process id.

    Forked and not executed: importing Ray costs seconds, and clients die often.
    """
    # Imported, not connected: it has no thread yet.
    importlib.import_module("remit.coordinator.ray_engine")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(2, 1)
            status = 1
            try:
                _be_client(workspace, home, int(line))
                status = 0
            finally:
                os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
