"""What runs have printed and what their programs have written, from files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from remit.cli.records import opened
from remit.coordinator.state import Node

__all__ = ["follow_logs", "print_logs"]

_PAUSE_S = 0.2


def _files(workspace: str, run_id: str, *, stderr: bool) -> list[Path]:
    """Return a run's output files in the order in which they were begun."""
    folder = Path(workspace) / ".remit" / "output" / run_id
    names = ["stderr"] if stderr else ["stdout", "stderr"]
    found = [folder / "log"] if not stderr else []
    processes = sorted(folder.glob("process_*"), key=lambda p: int(p.name.partition("_")[2] or 0))
    found.extend(process / name for process in processes for name in names)
    return [path for path in found if path.is_file()]


def _below(nodes: list[Node], root: Node) -> list[Node]:
    """Return the runs of a node and everything below it, in order of acceptance."""
    inside = {root.id}
    found: list[Node] = []
    for node in nodes:
        if node.id == root.id or node.parent_id in inside:
            inside.add(node.id)
            if not node.is_turn:
                found.append(node)
    return found


def print_logs(workspace: str | Path, target: str, *, stderr: bool) -> int:
    """Print the logs of a run, or of all runs of a turn, each line with its run; return how many files."""
    with opened(workspace) as records:
        root = records.find(target)
        runs = _below(list(records.state_of(root).nodes.values()), root)
        root_path = records.workspace
    count = 0
    for run in runs:
        prefix = f"{run.name or run.agent or run.id} | " if len(runs) > 1 else ""
        for path in _files(root_path, run.id, stderr=stderr):
            count += 1
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    sys.stdout.write(prefix + (line if line.endswith("\n") else line + "\n"))
    return count


def follow_logs(workspace: str | Path, target: str, *, stderr: bool) -> None:
    """Print what is there and what is added, until the run or turn has ended."""
    offsets: dict[Path, int] = {}
    while True:
        with opened(workspace) as records:
            root = records.find(target)
            runs = _below(list(records.state_of(root).nodes.values()), root)
            over = root.is_ended or not records.is_live
            root_path = records.workspace
        for run in runs:
            prefix = f"{run.name or run.agent or run.id} | " if len(runs) > 1 else ""
            for path in _files(root_path, run.id, stderr=stderr):
                for line in _new_lines(path, offsets, last=over):
                    sys.stdout.write(prefix + line)
        sys.stdout.flush()
        if over:
            return
        time.sleep(_PAUSE_S)


def _new_lines(path: Path, offsets: dict[Path, int], *, last: bool) -> Iterator[str]:
    """Yield whole lines that were added since the last time; a rest without its end comes last."""
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        data = file.read()
    whole = len(data) if last else data.rfind(b"\n") + 1
    offsets[path] = offsets.get(path, 0) + whole
    for line in data[:whole].splitlines():
        yield line.decode("utf-8", "replace") + "\n"
