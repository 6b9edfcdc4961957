"""`remit cancel`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from remit.agents.runs import CancelReceipt
from remit.cli.connect import Opener, connected
from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines, receipt_dict, receipt_lines
from remit.cli.records import Records, opened
from remit.coordinator.api import Coordinator
from remit.core.errors import CoordinatorUnavailable, NotFound

__all__ = ["cancel_target"]


def cancel_target(
    open_coordinator: Opener,
    workspace: Path,
    target: str,
    *,
    reason: str,
    kill: bool,
    dry_run: bool,
    wait_s: float,
    address: str | None,
    as_json: bool,
) -> int:
    """Cancel a turn, run or session, and print the receipt; return the exit status.

    Raises:
        NotFound: no such turn, run or session.
        CoordinatorUnavailable: something has not ended and nobody can be told.
    """
    with opened(workspace) as records:
        meant, ended = _meant(records, target)
        root, is_live = records.workspace, records.is_live
    if ended:
        _say(ended, meant, as_json=as_json)
        return 0
    coordinator = open_coordinator(root, address=address, start=False)
    try:
        with connected(coordinator):
            receipt = asyncio.run(
                _cancel(coordinator, meant, reason, kill=kill, dry_run=dry_run, wait_s=0.0 if dry_run else wait_s)
            )
    except CoordinatorUnavailable as error:
        if is_live or not error.for_good:
            raise
        # One that is just being restarted would have been found.
        raise CoordinatorUnavailable(
            f"no coordinator is at work in {root}, so nothing runs that could be stopped"
        ) from error
    if as_json:
        print_json(receipt_dict(receipt))
    elif dry_run:
        print_lines([Line(f"would stop {receipt.live} runs:"), *(Line(f"  {name}") for name in receipt.nodes)])
    else:
        print_lines(receipt_lines(receipt))
    return 0 if not receipt.accepted or dry_run or wait_s <= 0 or receipt.is_quiet else 1


async def _cancel(
    coordinator: Coordinator, target: str, reason: str, *, kill: bool, dry_run: bool, wait_s: float
) -> CancelReceipt:
    receipt = await coordinator.cancel(target, reason, kill=kill, dry_run=dry_run)
    return await receipt.quiet(wait_s) if wait_s > 0 else receipt


def _meant(records: Records, target: str) -> tuple[str, str]:
    """Return the id or session that is meant, and a sentence if there is nothing to stop any more."""
    if target in records.state.sessions:
        return target, ""
    try:
        node = records.find(target)
    except NotFound:
        if any(turn.session_id == target for turn in records.state.turns.values()):
            return target, f"nothing to cancel: no turn of session {target!r} is at work"
        raise
    return node.id, f"nothing to cancel: {node.id} has ended: {node.outcome}" if node.is_ended else ""


def _say(sentence: str, target: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"target": target, "accepted": False, "live": 0, "message": sentence})
    else:
        print_lines([Line(sentence)])
