"""`remit up`, `remit down` and `remit doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.cli.records import opened
from remit.cli.tools import leftovers
from remit.coordinator.node import LocalNode
from remit.coordinator.node_doctor import Finding, FindingLevel, doctor
from remit.core.errors import Refused, RemitError
from remit.processes.aftermath import locks_in

__all__ = ["examine", "start_node", "stop_node"]


def start_node() -> None:
    """Start the local node, saying what it is doing; nothing happens if it is up."""
    node = LocalNode()
    record = node.status()
    if record is not None:
        print_lines([Line(f"the local Ray node is up at {record.address}")])
        return
    record = node.ensure(_progress)
    print_lines([Line(f"the local Ray node is up at {record.address}; `remit down` stops it", "green")])


def _progress(line: str) -> None:
    sys.stderr.write(f"remit: {line}\n")


def stop_node(workspace: Path, *, force: bool) -> None:
    """Stop the local node and all that runs on it, and say what was stopped.

    Raises:
        Refused: turns of this workspace are at work, and `force` is false.
    """
    if not force:
        _refuse_if_busy(workspace)
    node = LocalNode()
    if node.status() is None:
        stopped = node.stop()
        print_lines([Line("the local Ray node is not up"), *(Line(f"  cleared away: {what}") for what in stopped)])
        return
    stopped = node.stop()
    print_lines([Line(f"the local Ray node is down; {len(stopped)} processes were stopped"), *map(_indented, stopped)])


def _refuse_if_busy(workspace: Path) -> None:
    try:
        with opened(workspace) as records:
            busy = [turn.id for turn in records.state.turns.values() if not turn.is_ended and records.is_live]
    except RemitError:
        # Whatever is wrong with this folder, the node can be stopped all the same.
        return
    if busy:
        raise Refused(
            f"{', '.join(busy[:3])} of {workspace.resolve()} is still at work; cancel it first, or give --force"
        )


def _indented(text: str) -> Line:
    return Line(f"  {text}")


def examine(workspace: Path, *, as_json: bool) -> int:
    """Print findings about the node and the workspace; return 1 if one is an error."""
    findings = [*doctor(), *_workspace_findings(workspace), *_git_findings(workspace), *_leftover_findings()]
    if as_json:
        print_json([{"level": finding.level.value, "text": finding.text} for finding in findings])
    else:
        styles = {FindingLevel.OK: "green", FindingLevel.WARNING: "yellow", FindingLevel.ERROR: "red"}
        print_lines([Line(f"{f.level.value:8}{f.text}", styles[f.level]) for f in findings])
    return int(any(finding.level is FindingLevel.ERROR for finding in findings))


def _leftover_findings() -> list[Finding]:
    findings: list[Finding] = []
    for left in leftovers():
        owner = f"session {left.session}" if left.background else left.run or left.turn or "nobody known"
        pids = f", processes {', '.join(map(str, left.pids))}" if left.pids else ""
        command = " ".join(left.argv)[:60]
        text = f"leftover {left.job} of {owner} ({left.kind.value}): {command}{pids}; {left.detail}"
        findings.append(Finding(FindingLevel.WARNING, f"{text}; --adopt, --kill or --ignore it"))
    return findings


def _git_findings(workspace: Path) -> list[Finding]:
    """Name the git locks of the workspace: git refuses to work there, and only a person knows whose they are."""
    return [
        Finding(FindingLevel.WARNING, f"git lock {told}; if no git is at work there, remove the file")
        for told in locks_in(str(workspace))
    ]


def _workspace_findings(workspace: Path) -> list[Finding]:
    try:
        with opened(workspace) as records:
            live = [node for node in records.state.nodes.values() if not node.is_ended]
            if records.reader is None:
                return [Finding(FindingLevel.OK, f"nothing has run in {records.workspace} yet")]
            if records.is_live:
                return [
                    Finding(
                        FindingLevel.OK,
                        f"a coordinator is at work in {records.workspace}: {len(live)} turns and runs have not ended",
                    )
                ]
            if not live:
                return [Finding(FindingLevel.OK, f"{records.workspace}: everything has ended")]
            left = [p for node in live for p in (node.processes or {}).values()]
            findings = [
                Finding(
                    FindingLevel.WARNING,
                    f"{len(live)} turns and runs in {records.workspace} have not ended and no coordinator is at "
                    "work; the next `remit run` there settles them",
                )
            ]
            findings.extend(
                Finding(FindingLevel.WARNING, f"process {p.program} ({p.pid}) may have been left behind") for p in left
            )
            return findings
    except RemitError as error:
        return [Finding(FindingLevel.ERROR, str(error))]
