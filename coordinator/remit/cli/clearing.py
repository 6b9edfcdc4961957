"""`remit locks --clear`: let go of claims whose owner is gone but was never proven to be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from remit.cli.connect import Opener, connected
from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.cli.records import opened
from remit.core.errors import CoordinatorUnavailable, NotFound, UsageError
from remit.locks import ClaimState, ClaimView

__all__ = ["clear_quarantined"]


def clear_quarantined(
    open_coordinator: Opener,
    workspace: Path,
    target: str,
    *,
    yes: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Free what is quarantined for a turn or run, once a person has vouched for it.

    Args:
        open_coordinator: how to reach the coordinator.
        workspace: the workspace's folder.
        target: the owner, or a unique part of its id.
        yes: whether the caller has confirmed already.
        address: `host:port` of a Ray cluster, or None.
        as_json: print one JSON document; then `yes` is needed.

    Raises:
        NotFound: no such turn or run, or nothing is quarantined for it.
        CoordinatorUnavailable: no coordinator is at work.
        UsageError: nobody confirmed; nothing was freed.
    """
    with opened(workspace) as records:
        owner = records.find(target).id
        kept = [claim for claim in records.state.locks.claims(owner) if claim.state is ClaimState.QUARANTINED]
        root, is_live = records.workspace, records.is_live
    if not kept:
        raise NotFound(f"nothing is quarantined for {owner}; `remit locks` lists what is")
    if not is_live:
        raise CoordinatorUnavailable(
            f"no coordinator is at work in {root}; start a run first: it tries to prove by itself that they are gone"
        )
    if not yes:
        _confirm(owner, kept, asks=not as_json)
    coordinator = open_coordinator(root, address=address, start=False)
    with connected(coordinator):
        asyncio.run(coordinator.clear_claims(owner))
    if as_json:
        print_json({"owner": owner, "freed": [claim.to_dict() for claim in kept]})
        return
    print_lines([Line(f"freed: {' and '.join(claim.wants)} of {owner}", "green") for claim in kept])


def _confirm(owner: str, kept: list[ClaimView], *, asks: bool) -> None:
    """Show what would be freed and why it is kept; return only if a person says yes."""
    if asks:
        print_lines([Line(f"{' and '.join(claim.wants)}  of {owner}: {claim.note}", "red") for claim in kept])
        typer.echo("Others may write there as soon as this is freed. Look first that nothing of it still runs.")
        try:
            if typer.confirm("Free it?"):
                return
        except typer.Abort:
            typer.echo()
    raise UsageError("nothing was freed: nobody confirmed; answer y, or add --yes")
