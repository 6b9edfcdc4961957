"""`remit drain`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from remit.cli.connect import Opener, connected
from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.cli.records import opened
from remit.core.errors import CoordinatorUnavailable
from remit.core.messages import DrainAnswer

__all__ = ["drain"]


def drain(
    open_coordinator: Opener,
    workspace: Path,
    node: str,
    *,
    reason: str,
    undo: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Move a workspace's work away from a node of the cluster, and say how much moves.

    Raises:
        NotFound: no such node, or several.
        Refused: no other node takes work.
        CoordinatorUnavailable: no coordinator is at work, so there is nothing to move.
    """
    with opened(workspace) as records:
        root = records.workspace
    coordinator = open_coordinator(root, address=address, start=False)
    try:
        with connected(coordinator):
            answer = asyncio.run(coordinator.drain(node, reason, undo=undo))
    except CoordinatorUnavailable as error:
        if not error.for_good:
            raise
        raise CoordinatorUnavailable(
            f"no coordinator is at work in {root}, so nothing runs that could be moved"
        ) from error
    if as_json:
        print_json({"node": answer.node, "name": answer.name, "hosts": answer.hosts, "runs": answer.runs, "undo": undo})
    else:
        print_lines(_lines(answer, undo=undo))


def _lines(answer: DrainAnswer, *, undo: bool) -> list[Line]:
    label = f"node {answer.node[:12]} ({answer.name})"
    if undo:
        return [Line(f"{label} takes work again; what has moved stays where it is")]
    return [
        Line(f"{label} takes no more work of this workspace; `remit drain --undo {answer.node[:12]}` takes that back"),
        Line(f"  {answer.runs} runs go on elsewhere, {answer.hosts} agent hosts end when theirs have left"),
    ]
