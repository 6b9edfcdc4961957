"""The last words of `remit run`."""

from __future__ import annotations

from typing import Any

from remit.cli.lines import Line, duration, summary
from remit.cli.output import program_output, receipt_dict, receipt_lines, result_value
from remit.cli.running import Finished
from remit.core.errors import RunEnded
from remit.core.outcome import Outcome

__all__ = ["finished_dict", "finished_lines"]

_SHOWN_FAILURES = 10


def finished_dict(finished: Finished, *, shows_result: bool) -> dict[str, Any]:
    """Return what became of a turn as a mapping for JSON."""
    document: dict[str, Any] = {
        "turn": finished.turn_id,
        "outcome": finished.outcome.value if finished.outcome else None,
        "seconds": round(finished.seconds, 3),
        "runs": [
            {"id": run.id, "name": run.name, "outcome": run.outcome.value if run.outcome else None}
            for run in finished.runs
        ],
        "receipt": receipt_dict(finished.receipt) if finished.receipt else None,
    }
    if finished.tree is not None:
        document["tree"] = finished.tree.to_dict()
    if shows_result and finished.runs:
        document["result"] = _result(finished)
    return document


def _result(finished: Finished) -> Any:
    run = finished.runs[0]
    if run.outcome is not Outcome.SUCCEEDED:
        return None
    return result_value(run.payload)


def finished_lines(finished: Finished, *, shows_result: bool) -> list[Line]:
    """Return what became of a turn for people."""
    if finished.outcome is None:
        return [
            Line(f"{finished.turn_id} goes on without this command"),
            Line(f"  remit tree {finished.turn_id}     shows it"),
            Line(f"  remit cancel {finished.turn_id}   stops it"),
        ]
    lines: list[Line] = []
    if shows_result and finished.outcome is Outcome.SUCCEEDED and finished.runs:
        lines.extend(_result_lines(_result(finished)))
    lines.extend(_failures(finished))
    if finished.receipt is not None:
        lines.extend(receipt_lines(finished.receipt))
    style = "green" if finished.outcome is Outcome.SUCCEEDED else "red"
    told = ""
    if finished.tree is not None:
        told = f" ({summary(node for node in finished.tree.nodes if node.kind == 'run')})"
        cause = finished.tree.root.cause
        if cause is not None and finished.receipt is None:
            told += f", {cause.describe()}"
    lines.append(Line(f"{finished.turn_id} {finished.outcome.value} in {duration(finished.seconds)}{told}", style))
    return lines


def _result_lines(value: Any) -> list[Line]:
    import json

    if value is None:
        return []
    if isinstance(value, str):
        return [Line(line) for line in value.splitlines()]
    program = program_output(value)
    if program is not None:
        return [Line(line) for line in program["stdout"].splitlines()]
    return [Line(line) for line in json.dumps(value, indent=2, ensure_ascii=False, default=repr).splitlines()]


def _failures(finished: Finished) -> list[Line]:
    bad = [run for run in finished.runs if run.outcome in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)]
    lines: list[Line] = []
    for run in bad[:_SHOWN_FAILURES]:
        error: RunEnded = run.exception()
        lines.append(Line(f"{error.message.splitlines()[0][:300]}", "red"))
        lines.append(Line(f"  remit logs {run.id}"))
    if len(bad) > _SHOWN_FAILURES:
        lines.append(Line(f"... and {len(bad) - _SHOWN_FAILURES} more that did not succeed", "red"))
    return lines
