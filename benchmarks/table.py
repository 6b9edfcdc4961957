"""What the benchmarks on Ray share: options, a node of their own, one table, one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from remit.coordinator.node import LocalNode

__all__ = ["Check", "Result", "own_node", "parse_options", "show"]


@dataclass(frozen=True, slots=True)
class Check:
    """A ratio of one run beside what it should be."""

    what: str
    ratio: float
    aim: float
    at_least: bool = False
    """Whether the aim is a lower bound; an upper one otherwise."""

    @property
    def met(self) -> bool:
        """Tell whether the aim was reached."""
        return self.ratio >= self.aim if self.at_least else self.ratio <= self.aim


@dataclass(frozen=True, slots=True)
class Result:
    """One table: its columns, its rows, and the aims that were checked."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | float | None, ...]]
    checks: list[Check]
    notes: tuple[str, ...] = ()


def parse_options(description: str | None) -> argparse.Namespace:
    """Return `quick` (smaller numbers), `repeat` (or None) and `json` (a path or None)."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it works")
    parser.add_argument("--repeat", type=int, help="repetitions of each measurement; their median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_args()


@contextmanager
def own_node() -> Generator[Path]:
    """Start a local node for this benchmark alone; yield a workspace; leave nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="remit-bench-", dir="/tmp"))
    workspace = folder / "workspace"
    workspace.mkdir()
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["REMIT_STATE_DIR"] = str(folder / "node")
    # The actors that stand beside ours are imported by Ray's workers, which know no path of ours.
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([known] if known else [])])
    node = LocalNode()
    try:
        node.ensure(lambda line: print(line, file=sys.stderr))
        yield workspace
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def show(result: Result, path: Path | None) -> None:
    """Print a table with the aims below it, and write it as JSON if there is a path."""
    rows = [[_text(cell) for cell in row] for row in result.rows]
    widths = [max(len(row[at]) for row in [list(result.columns), *rows]) for at in range(len(result.columns))]
    print(result.title)
    for row in [list(result.columns), ["-" * width for width in widths], *rows]:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(cells)))
    for check in result.checks:
        bound = "at least" if check.at_least else "at most"
        verdict = "met" if check.met else "MISSED"
        print(f"{check.what}: {_text(check.ratio)} (aim: {bound} {_text(check.aim)}) {verdict}")
    for note in result.notes:
        print(note)
    if path is not None:
        checks = [{**asdict(check), "met": check.met} for check in result.checks]
        path.write_text(json.dumps({**asdict(result), "checks": checks}, indent=2) + "\n", encoding="utf-8")


def _text(value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
