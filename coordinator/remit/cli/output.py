"""Printing: documents as JSON, lines for people, results as what they are."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from remit.cli.lines import Line, duration

if TYPE_CHECKING:
    from remit.agents.runs import CancelReceipt

__all__ = ["print_json", "print_lines", "program_output", "receipt_dict", "receipt_lines", "result_value"]


def print_json(document: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, default=repr) + "\n")


def print_lines(lines: list[Line]) -> None:
    """Print lines, in colour if a terminal reads them."""
    if not sys.stdout.isatty():
        sys.stdout.write("".join(f"{line.text}\n" for line in lines))
        return
    from rich.console import Console

    console = Console()
    # Lines of one look in one call: ten thousand calls would take seconds.
    for style, group in groupby(lines, key=lambda line: line.style):
        text = "\n".join(line.text for line in group)
        console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)


def result_value(blob: bytes | None) -> Any:
    """Return a stored result as JSON data or text; None where there is none.

    A result of a class that cannot be imported here is told by what went wrong.
    """
    if blob is None:
        return None
    # Listing things needs neither, and they cost more than that.
    from remit.agents.payload import decode
    from remit.processes import CommandResult

    try:
        value = decode(blob)
    except Exception as error:  # unpickling runs user code: anything may come out
        return f"(the result cannot be read here: {error})"
    if isinstance(value, CommandResult):
        return {
            "exit_code": value.exit_code,
            "stdout": value.stdout.text,
            "stderr": value.stderr.text,
            "duration_s": round(value.duration_s, 3),
        }
    return value


def program_output(value: object) -> dict[str, str] | None:
    """Return what a program wrote if that is what a result is, else None."""
    if not isinstance(value, dict):
        return None
    mapping = cast("dict[str, object]", value)
    if set(mapping) != {"exit_code", "stdout", "stderr", "duration_s"}:
        return None
    return {name: str(mapping[name]) for name in ("stdout", "stderr")}


def receipt_dict(receipt: CancelReceipt) -> dict[str, Any]:
    """Return a receipt as a mapping for JSON."""
    summary = receipt.summary
    return {
        "target": receipt.target,
        "request_id": receipt.request_id,
        "accepted": receipt.accepted,
        "live": receipt.live,
        "already": receipt.already.value if receipt.already else None,
        "cause": receipt.cause.to_dict() if receipt.cause else None,
        "message": receipt.message,
        "nodes": list(receipt.nodes),
        "quiet": receipt.is_quiet,
        "seconds_to_quiet": receipt.seconds_to_quiet,
        "runs": dict(receipt.runs),
        "processes_stopped": summary.processes_stopped if summary else None,
        "processes_left": list(summary.processes_left) if summary else None,
        "effects_uncertain": summary.effects_uncertain if summary else None,
        "unconfirmed": list(summary.unconfirmed) if summary else None,
        "remaining": summary.remaining if summary else None,
        "claims_freed": summary.claims_freed if summary else None,
        "claims_quarantined": list(summary.claims_quarantined) if summary else None,
        "tokens": summary.tokens if summary else None,
        "cost": summary.cost if summary else None,
        "git_locks_removed": list(summary.git_locks_removed) if summary else None,
        "git_locks_left": list(summary.git_locks_left) if summary else None,
    }


def receipt_lines(receipt: CancelReceipt) -> list[Line]:
    """Return a receipt for people."""
    if not receipt.accepted:
        return [Line(receipt.message or f"nothing to cancel in {receipt.target}")]
    lines = [Line(f"cancel of {receipt.target} accepted: {_count(receipt.live, 'run')} told to stop")]
    if receipt.cause is not None:
        lines.append(Line(f"  cause      {receipt.cause.describe()}"))
    summary = receipt.summary
    if summary is None:
        return lines
    if summary.quiet and summary.seconds_to_quiet is not None:
        lines.append(Line(f"  quiet      after {duration(summary.seconds_to_quiet)}", "green"))
    else:
        lines.append(Line(f"  quiet      NOT YET: {_count(summary.remaining, 'run')} still stopping", "bold yellow"))
    outcomes = ", ".join(f"{count} {word}" for word, count in sorted(summary.runs.items())) or "none"
    lines.append(Line(f"  runs       {outcomes}"))
    lines.append(Line(f"  processes  {summary.processes_stopped} stopped, {len(summary.processes_left)} left"))
    lines.extend(Line(f"             left: {process}", "red") for process in summary.processes_left)
    if summary.claims_freed or summary.claims_quarantined:
        kept = f", {len(summary.claims_quarantined)} quarantined" if summary.claims_quarantined else ""
        lines.append(Line(f"  claims     {summary.claims_freed} freed{kept}"))
    lines.extend(Line(f"             quarantined: {claim}", "red") for claim in summary.claims_quarantined)
    if summary.git_locks_removed:
        lines.append(Line(f"  git locks  {len(summary.git_locks_removed)} of killed programs removed"))
    lines.extend(Line(f"  git lock left: {lock}", "yellow") for lock in summary.git_locks_left)
    if summary.tokens or summary.cost:
        lines.append(Line(f"  spent      {summary.tokens} tokens, cost {summary.cost:g}"))
    if summary.effects_uncertain:
        lines.append(Line(f"  uncertain  {_count(summary.effects_uncertain, 'effect')}", "yellow"))
    lines.extend(Line(f"  not confirmed: {run_id}", "red") for run_id in summary.unconfirmed)
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
