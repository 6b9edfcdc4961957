"""Verbs that only look: they read the journal and start nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import assert_never

from remit.cli.exits import FAILED, of_outcome
from remit.cli.lines import Line, node_line, tree_lines, word_counts
from remit.cli.output import print_json, print_lines, program_output, result_value
from remit.cli.records import Records, opened
from remit.coordinator.state import Node
from remit.coordinator.views import NodeView, node_view, tree_view
from remit.core.outcome import Outcome
from remit.core.texts import one_line
from remit.locks import ClaimState, ClaimView

__all__ = ["show_locks", "show_result", "show_tree", "show_turns"]

_RECENT = 10


def _gone_note(records: Records, nodes: list[NodeView]) -> list[Line]:
    """Say that nobody is at work although something has not ended."""
    if records.is_live or all(node.outcome is not None for node in nodes):
        return []
    return [Line("no coordinator is at work here: this is how things stood when it went away", "yellow")]


def show_turns(workspace: Path, *, everything: bool, as_json: bool) -> None:
    """List turns: live ones, and the latest that have ended."""
    with opened(workspace) as records:
        turns, hidden = _chosen_turns(records, everything=everything)
        views = [node_view(records.state_of(turn), turn) for turn in turns]
        below = _runs_below(records, {turn.id for turn in turns})
        if as_json:
            print_json(
                {
                    "workspace": records.workspace,
                    "live": records.is_live,
                    "turns": [{**view.to_dict(), "runs": len(below.get(view.id, []))} for view in views],
                }
            )
            return
        lines = _gone_note(records, views)
        for view in views:
            runs = below.get(view.id, [])
            line = node_line(view, records.now)
            lines.append(Line(f"{line.text}  [{word_counts(runs)}]" if runs else line.text, line.style))
        if hidden:
            lines.append(Line(f"... {hidden} older ones; --all shows them"))
        print_lines(lines or [Line(f"nothing has run in {records.workspace} yet")])


def _chosen_turns(records: Records, *, everything: bool) -> tuple[list[Node], int]:
    """Return the turns to show, in the order of their acceptance, and how many older ones are left out."""
    ended = records.ended_turns()
    shown = ended if everything else ended[:_RECENT]
    turns: list[Node] = []
    for turn_id in reversed(shown):
        turn = records.state.turns.get(turn_id) or records.older_turn(turn_id)
        if turn is not None:
            turns.append(turn)
    turns.extend(turn for turn in records.state.turns.values() if not turn.is_ended)
    return sorted(turns, key=lambda turn: turn.accepted_at), len(ended) - len(shown)


def _runs_below(records: Records, turn_ids: set[str]) -> dict[str, list[str]]:
    """Return the states of the runs of some turns, in words; views of ten thousand would take longer than the fold."""
    below: dict[str, list[str]] = {}
    for state in (records.state, *records.past.values()):
        for node in state.nodes.values():
            if node.turn_id in turn_ids and not node.is_turn:
                word = node.outcome.value if node.outcome is not None else node.state.value
                below.setdefault(node.turn_id, []).append("blocked" if node.blocked_by else word)
    return below


def show_tree(workspace: Path, target: str | None, *, as_json: bool) -> None:
    """Show a turn or run with everything below it."""
    with opened(workspace) as records:
        node = records.latest_turn() if target is None else records.find(target)
        view = tree_view(records.state_of(node), node, records.now)
        if as_json:
            print_json({"workspace": records.workspace, "live": records.is_live, **view.to_dict()})
            return
        print_lines([*_gone_note(records, list(view.nodes)), *tree_lines(view)])


def show_locks(workspace: Path, *, as_json: bool) -> None:
    """List claims: who holds what since when, who waits for what behind whom."""
    with opened(workspace) as records:
        claims = records.state.locks.claims()
        if as_json:
            listed = [claim.to_dict() for claim in claims]
            print_json({"workspace": records.workspace, "live": records.is_live, "claims": listed})
            return
        lines = [_claim_line(records, claim) for claim in claims]
        if lines and not records.is_live:
            gone = "no coordinator is at work here: this is how things stood when it went away"
            lines.insert(0, Line(gone, "yellow"))
        print_lines(lines or [Line(f"nothing is claimed in {records.workspace}")])


def _claim_line(records: Records, claim: ClaimView) -> Line:
    """Return one claim as a line: what, who, since when, behind whom."""
    node = records.state.nodes.get(claim.owner)
    label = f" ({node.name or node.agent})" if node is not None and (node.name or node.agent) else ""
    text = f"{' and '.join(claim.wants)}  {claim.state.value}  {claim.owner}{label}"
    text += f"  {max(0.0, records.now - claim.since):.0f} s"
    match claim.state:
        case ClaimState.GRANTED:
            return Line(f"{text}  token {claim.token}")
        case ClaimState.QUEUED:
            held = f"held by {', '.join(claim.held_by)}" if claim.held_by else f"behind {', '.join(claim.behind)}"
            return Line(f"{text}  {held}", "yellow")
        case ClaimState.QUARANTINED:
            return Line(f"{text}  {claim.note}", "red")
        case _:
            assert_never(claim.state)


def show_result(workspace: Path, target: str, *, as_json: bool) -> int:
    """Print a run's result, or how it ended; return the exit status."""
    with opened(workspace) as records:
        node = records.find(target)
        view = node_view(records.state_of(node), node)
        value = result_value(records.payload(node.id))
    if as_json:
        print_json({**view.to_dict(), "value": value})
    elif view.outcome is Outcome.SUCCEEDED:
        _print_value(value)
    else:
        _print_ending(view, value)
    return FAILED if view.outcome is None else of_outcome(view.outcome)


def _print_value(value: object) -> None:
    """Print a result as what it is: a program's output, a text, or data."""
    program = program_output(value)
    if program is not None:
        sys.stdout.write(program["stdout"])
        sys.stderr.write(program["stderr"])
    elif isinstance(value, str):
        sys.stdout.write(value if value.endswith("\n") else f"{value}\n")
    elif value is not None:
        print_json(value)


def _print_ending(view: NodeView, partial: object) -> None:
    state = view.outcome.value if view.outcome is not None else f"not ended: {view.state}"
    lines = [f"{view.id} {state}"]
    if view.cause is not None:
        lines.append(f"cause: {view.cause.describe()} (origin {view.cause.origin})")
    if view.error:
        lines.append(f"error: {view.error_type}: {view.error}" if view.error_type else f"error: {view.error}")
    if view.unconfirmed:
        lines.append("it is not confirmed that its body is gone")
    sys.stderr.write("".join(f"{one_line(line)}\n" for line in lines))
    if partial is not None:
        sys.stderr.write("partial result, incomplete:\n")
        _print_value(partial)
