"""The agents of `audit.yaml`: each looks at one topic and delegates the programs that find things out.

A topic says what it could not look at (`notes`) instead of failing, so that one
missing program does not take the report with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from audit_report import compose

from remit.agents import RunContext, agent
from remit.agents.runs import RunOptions
from remit.core import Outcome, RunFailed

CHECKS = str(Path(__file__).with_name("audit_checks.py"))
BATCHES = 16
"""Most sub-agents among which one topic divides the files."""
BATCH_BYTES = 200_000
"""Longest list of names that one program is started with."""
LISTED = 400
"""Most places that one search hands over; the count is exact all the same."""

SKIPPED = frozenset({".git", ".remit", ".venv", "venv", "node_modules", "__pycache__", "build", "dist"})
OWN = "audit.md"

MARKS = ("TODO", "FIXME", "XXX", "HACK")
# Classes of characters in brackets: every grep knows them.
HYGIENE = {
    "trailing blanks": "[[:blank:]]+$",
    "tabs after blanks": "^ +\t",
    "carriage returns": "\r$",
    "lines over 140 characters": "^.{141,}$",
    "merge conflict marks": "^(<<<<<<<|>>>>>>>) ",
    "private keys": "-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "debugger left in": "^[[:space:]]*(breakpoint\\(\\)|import pdb|debugger;)",
}


# -- the second level: one program ------------------------------------------------------------------------------------


@agent
async def program(ctx: RunContext, argv: list[str], ok: tuple[int, ...] = (0,)) -> str:
    """Run one program in the workspace and return all that it printed."""
    # Plain messages, and no question on a terminal that is not there.
    result = await ctx.process(argv, cwd=ctx.workspace, env={"LC_ALL": "C.UTF-8", "GIT_TERMINAL_PROMPT": "0"})
    if result.exit_code not in ok:
        said = (str(result.stderr).strip() or "no message").splitlines()[0]
        raise RuntimeError(f"{argv[0]} ended with status {result.exit_code}: {said}")
    return result.stdout.path.read_text("utf-8", "replace")


async def ask(
    ctx: RunContext, programs: Mapping[str, Sequence[str]], *, ok: tuple[int, ...] = (0,)
) -> tuple[dict[str, str], list[str]]:
    """Delegate programs by name; return what they printed, and a note for each that could not tell."""
    names = list(programs)
    runs = await ctx.delegate_many(
        program,
        [{"argv": list(programs[name]), "ok": ok} for name in names],
        options=[RunOptions(name=name) for name in names],
    )
    outcomes = await ctx.gather(*runs, return_outcomes=True)
    told: dict[str, str] = {}
    notes: list[str] = []
    for name, run, outcome in zip(names, runs, outcomes, strict=True):
        if outcome is Outcome.SUCCEEDED:
            told[name] = run.value()
        else:
            notes.append(f"{name}: {run.exception()}" if outcome is not Outcome.FAILED else f"{name}: {_why(run)}")
    return told, notes


def _why(run: Any) -> str:
    """Return the reason of a failed program without the ids around it."""
    try:
        run.value()
    except RunFailed as error:
        return str(error).rpartition("Error: ")[2]
    return ""


# -- the first level: one topic ---------------------------------------------------------------------------------------


@agent
async def inventory(ctx: RunContext) -> dict[str, Any]:
    """List the files with their sizes; outside of a git checkout, what lies in the folder."""
    told, notes = await ask(
        ctx,
        {
            "git ls-files": ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            "git rev-parse": ["git", "rev-parse", "--is-shallow-repository"],
        },
    )
    listed = told.get("git ls-files")
    if listed is None:
        notes = ["not a git checkout: files are those of the folder, and there is no history to look at"]
        names = walk(ctx.workspace)
    else:
        names = [name for name in listed.split("\0") if name]
        if told.get("git rev-parse", "").strip() == "true":
            notes.append("the checkout is shallow: its history is only a part of the whole")
    names = sorted({name for name in names if name != OWN and (ctx.workspace / name).is_file() and _wanted(name)})
    counts, more = await ask(ctx, named("wc", names, ["wc", "-lc", "--"]))
    sizes: dict[str, tuple[int, int]] = {}
    for text in counts.values():
        for line in text.splitlines():
            lines, size, name = line.split(None, 2)
            sizes[name] = (int(lines), int(size))
    files = [{"path": name, "lines": sizes[name][0], "bytes": sizes[name][1]} for name in names if name in sizes]
    return {"files": files, "is_git": listed is not None, "notes": notes + more}


@agent
async def python(ctx: RunContext) -> dict[str, Any]:
    """Read the outline of every Python file, many files at once."""
    names = [name for name in await listed_files(ctx) if name.endswith((".py", ".pyi"))]
    told, notes = await ask(ctx, named("outline", names, [sys.executable, "-I", CHECKS, "outline"]))
    return {"modules": [json.loads(line) for text in told.values() for line in text.splitlines()], "notes": notes}


@agent
async def repeats(ctx: RunContext) -> dict[str, Any]:
    """Find equal blocks of code, among files of one language."""
    by_language: dict[str, list[str]] = defaultdict(list)
    for name in await listed_files(ctx):
        suffix = Path(name).suffix
        if suffix in (".py", ".js", ".ts", ".tsx", ".go", ".rs", ".c", ".h", ".cc", ".cpp", ".java", ".rb", ".sh"):
            by_language[suffix].append(name)
    # All files of a language at once, or blocks that two batches share would be missed.
    wanted = {
        f"repeats in *{suffix}": [sys.executable, "-I", CHECKS, "repeats", *_fitting(names)]
        for suffix, names in by_language.items()
    }
    told, notes = await ask(ctx, wanted)
    notes += [
        f"repeats in *{suffix}: only the first {len(_fitting(names)):,} of {len(names):,} files were compared"
        for suffix, names in by_language.items()
        if len(_fitting(names)) < len(names)
    ]
    return {"blocks": [block for text in told.values() for block in json.loads(text)], "notes": notes}


@agent
async def searches(ctx: RunContext, what: str) -> dict[str, Any]:
    """Search all files for marks or for bad habits: one `grep` for each."""
    if what == "marks":
        # In quotes it is only the word.
        patterns = {mark: rf"(^|[^[:alnum:]_'\"]){mark}([^[:alnum:]_'\"]|$)" for mark in MARKS}
    else:
        patterns = dict(HYGIENE)
    names = await listed_files(ctx)
    if what == "hygiene":
        # A Markdown line may end in blanks on purpose, and data has lines of any length.
        names = [name for name in names if not name.endswith((".md", ".csv", ".json", ".svg", ".lock"))]
    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    batches = batched(names, 1)
    for_each = {
        (f"{label} {number}" if len(batches) > 1 else label): ["grep", "-nIHE", "-e", pattern, "--", *batch]
        for label, pattern in patterns.items()
        for number, batch in enumerate(batches, 1)
    }
    told, notes = await ask(ctx, for_each, ok=(0, 1))  # 1: nothing was found
    for label in patterns:
        lines = [line for name, text in told.items() if _is_of(name, label) for line in text.splitlines()]
        found[label] = {
            "count": len(lines),
            "files": len({line.split(":", 1)[0] for line in lines}),
            "places": [line[:300] for line in lines[:LISTED]],
        }
    return {"found": found, "notes": notes}


@agent
async def history(ctx: RunContext) -> dict[str, Any]:
    """Ask git what changed, how often and by how many."""
    if not (await ctx.after["inventory"].result())["is_git"]:
        return {"commits": 0, "notes": []}
    log = ["git", "log", "--no-merges"]
    told, notes = await ask(
        ctx,
        {
            "commits": ["git", "rev-list", "--count", "HEAD"],
            "authors": ["git", "shortlog", "-sn", "--no-merges", "HEAD"],
            "changes": [*log, "--numstat", "--no-renames", "-n", "3000", "--format=@%h%x09%cs%x09%s"],
            "months": [*log, "--date=format:%Y-%m", "--format=%cd"],
            "work in progress": ["git", "status", "--porcelain"],
            "branches": ["git", "for-each-ref", "--format=%(refname:short) %(committerdate:short)", "refs/heads"],
            "tags": ["git", "tag", "--sort=-creatordate"],
        },
    )
    changes: Counter[str] = Counter()
    churn: Counter[str] = Counter()
    commits: list[dict[str, Any]] = []
    for line in told.get("changes", "").splitlines():
        if line.startswith("@"):
            short, day, subject = line[1:].split("\t", 2)
            commits.append({"id": short, "day": day, "subject": subject, "lines": 0, "files": 0})
        elif line.strip():
            added, removed, name = line.split("\t", 2)
            lines = sum(int(number) for number in (added, removed) if number.isdigit())
            changes[name] += 1
            churn[name] += lines
            commits[-1]["lines"] += lines
            commits[-1]["files"] += 1
    return {
        "commits": int(told.get("commits", "0").strip() or 0),
        "authors": [line.strip().split("\t", 1) for line in told.get("authors", "").splitlines()],
        "months": sorted(Counter(told.get("months", "").split()).items())[-12:],
        "uncommitted": len(told.get("work in progress", "").splitlines()),
        "branches": told.get("branches", "").splitlines(),
        "tags": told.get("tags", "").split()[:3],
        "changed": [[name, count, churn[name]] for name, count in changes.most_common(2000)],
        "largest": sorted(commits, key=lambda commit: -commit["lines"])[:8],
        "notes": notes,
    }


@agent
async def report(ctx: RunContext) -> str:
    """Merge what the topics found into `audit.md`."""
    found = {name: await run.result() for name, run in ctx.after.items()}
    text = compose(ctx.workspace.name, time.strftime("%Y-%m-%d"), found)
    await ctx.write_text(OWN, text)  # under the claim of its run; a reader sees the old report or the new one
    ctx.log(f"wrote {OWN}")
    return str(ctx.workspace / OWN)


# -- dividing the work ------------------------------------------------------------------------------------------------


async def listed_files(ctx: RunContext) -> list[str]:
    """Return the names that the inventory found."""
    return [entry["path"] for entry in (await ctx.after["inventory"].result())["files"]]


def walk(folder: Path) -> list[str]:
    """Return the files below a folder, without what tools keep there."""
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED]
        names += [os.path.relpath(os.path.join(place, name), folder) for name in files]
    return names


def _wanted(name: str) -> bool:
    # A line break in a name would read as two names in what programs print.
    return "\n" not in name and Path(name).parts[0] not in SKIPPED


def batched(names: Sequence[str], most: int) -> list[list[str]]:
    """Divide names among at most so many batches, or more if their lists get too long to start a program with."""
    if not names:
        return []
    wanted = max(1, min(most, len(names)), -(-sum(len(name) + 1 for name in names) // BATCH_BYTES))
    size = -(-len(names) // wanted)
    return [list(names[start : start + size]) for start in range(0, len(names), size)]


def named(what: str, names: Sequence[str], argv: Sequence[str]) -> dict[str, list[str]]:
    """Return one program for each batch, named by its first file."""
    batches = batched(names, BATCHES)
    return {
        f"{what} {batch[0]}" + (f" and {len(batch) - 1} more" if len(batch) > 1 else ""): [*argv, *batch]
        for batch in batches
    }


def _fitting(names: Sequence[str]) -> list[str]:
    """Return as many names as one program can be started with."""
    return batched(names, 1)[0] if names else []


def _is_of(name: str, label: str) -> bool:
    return name == label or (name.startswith(f"{label} ") and name.removeprefix(f"{label} ").isdigit())
