"""Verbs about approvals and sessions: looking reads the journal; answering asks the coordinator."""

from __future__ import annotations

import asyncio
import getpass
import time
from pathlib import Path

from remit.cli.connect import Opener, connected
from remit.cli.lines import Line, duration
from remit.cli.output import print_json, print_lines
from remit.cli.records import Records, opened
from remit.coordinator.api import Coordinator
from remit.coordinator.desk import history_of, session_views
from remit.core.errors import ApprovalSettled, CoordinatorUnavailable, NotFound
from remit.core.records import ApprovalRecord, SessionView, TurnRecord

__all__ = ["answer", "show_approvals", "show_history", "show_sessions"]

_GONE = "no coordinator is at work here: this is how things stood when it went away"
_STYLES = {"approved": "green", "denied": "red", "expired": "yellow", "cancelled": "yellow"}


# -- approvals -------------------------------------------------------------------------


def show_approvals(workspace: Path, *, everything: bool, as_json: bool) -> None:
    """List requests for approval: what, who asks, since when; answered ones if asked for."""
    with opened(workspace) as records:
        found = [record for record in records.state.approvals.values() if everything or record.is_open]
        if as_json:
            listed = [record.to_dict() for record in found]
            print_json({"workspace": records.workspace, "live": records.is_live, "approvals": listed})
            return
        lines = [line for record in found for line in _approval_lines(record, records.now)]
        if lines and not records.is_live and any(record.is_open for record in found):
            lines.insert(0, Line(_GONE, "yellow"))
        print_lines(lines or [Line(f"nothing waits for approval in {records.workspace}")])


def _approval_lines(record: ApprovalRecord, now: float) -> list[Line]:
    """Return an approval as lines: id, action and state; then who asks and what it says."""
    if record.is_open:
        state = f"waits {duration(now - record.asked_at)}"
        if record.expires_at is not None:
            state += f", expires in {duration(record.expires_at - now)}"
    else:
        state = _settled(record)
    lines = [Line(f"{record.id}  {record.action}  {state}", _STYLES.get(record.decision, "bold"))]
    lines.append(Line(f"  asked by {' > '.join(record.path)} ({record.node_id})"))
    if record.details:
        lines.append(Line(f"  {record.details}"))
    return lines


def _settled(record: ApprovalRecord) -> str:
    by = f" by {record.by}" if record.by else ""
    because = f": {record.reason}" if record.reason else ""
    return f"{record.decision}{by}{because}"


def answer(
    open_coordinator: Opener,
    workspace: Path,
    target: str,
    *,
    approve: bool,
    reason: str,
    address: str | None,
    as_json: bool,
) -> None:
    """Answer a request for approval and print how it stands now.

    Raises:
        NotFound: no such approval, or several are meant.
        ApprovalSettled: it was answered, expired or cancelled before.
        CoordinatorUnavailable: nobody is there that could be told.
    """
    with opened(workspace) as records:
        record = _meant(records, target)
        root, is_live = records.workspace, records.is_live
    if not record.is_open:
        raise ApprovalSettled(
            f"{record.id} is not open any more: it was {_settled(record)}; nothing was changed",
            approval_id=record.id,
            decision=record.decision,
        )
    if not is_live:
        raise CoordinatorUnavailable(f"no coordinator is at work in {root}, so nobody waits for this answer")
    coordinator = open_coordinator(root, address=address, start=False)
    with connected(coordinator):
        settled = asyncio.run(_answer(coordinator, record.id, reason, approve=approve))
    if as_json:
        print_json(settled.to_dict())
    else:
        print_lines(_approval_lines(settled, time.time())[:2])


async def _answer(coordinator: Coordinator, approval_id: str, reason: str, *, approve: bool) -> ApprovalRecord:
    say = coordinator.approve if approve else coordinator.deny
    return await say(approval_id, reason, by=_who())


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in the system's list, as in some containers
        return ""


def _meant(records: Records, text: str) -> ApprovalRecord:
    """Return the approval that an id, or a unique part of one, means; open ones first.

    Raises:
        NotFound: none or several match.
    """
    approvals = records.state.approvals
    if not text:  # it is a part of every id
        raise NotFound("the id is empty; `remit approvals` lists what waits for an answer")
    if text in approvals:
        return approvals[text]
    found = [record for name, record in approvals.items() if name.startswith(text) or name.endswith(text)]
    found = [record for record in found if record.is_open] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no approval {text!r} in {records.workspace}; `remit approvals` lists them")
    names = ", ".join(record.id for record in found[:5])
    raise NotFound(f"{text!r} may mean {len(found)} approvals ({names}); give more of the id")


# -- sessions --------------------------------------------------------------------------


def show_sessions(workspace: Path, *, as_json: bool) -> None:
    """List sessions: how many turns, what is at work, what was spent."""
    with opened(workspace) as records:
        views = session_views(records.state)
        if as_json:
            listed = [view.to_dict() for view in views]
            print_json({"workspace": records.workspace, "live": records.is_live, "sessions": listed})
            return
        lines = [_session_line(view, records.now) for view in views]
        if not records.is_live and any(view.active or view.queued for view in views):
            lines.insert(0, Line(_GONE, "yellow"))
        print_lines(lines or [Line(f"no session in {records.workspace} yet")])


def _session_line(view: SessionView, now: float) -> Line:
    parts = [f"{view.id}  {_count(view.turns, 'turn')}"]
    if view.active:
        parts.append(f"{view.active} at work")
    if view.queued:
        parts.append(f"{len(view.queued)} queued")
    if view.last is not None and view.last.outcome is not None:
        parts.append(f"last {view.last.outcome.value}")
    parts.extend(_spent(view.tokens, view.cost, view.max_tokens, view.max_cost))
    parts.append(f"begun {duration(now - view.first_at)} ago")
    return Line(", ".join(parts), "cyan" if view.active else "")


def show_history(workspace: Path, session: str, *, as_json: bool) -> None:
    """List the turns of a session, oldest first: how each ended, at which step, and what it left.

    Raises:
        NotFound: no such session.
    """
    with opened(workspace) as records:
        turns = history_of(records.state, session)
        if as_json:
            listed = [turn.to_dict() for turn in turns]
            print_json({"workspace": records.workspace, "session": session, "turns": listed})
            return
        print_lines([line for turn in turns for line in _turn_lines(turn, records.now)])


def _turn_lines(turn: TurnRecord, now: float) -> list[Line]:
    end = turn.ended_at if turn.ended_at is not None else now
    parts = [f"{turn.name or turn.id}  {turn.describe()}", duration(end - (turn.started_at or turn.accepted_at))]
    parts.extend(_spent(turn.tokens, turn.cost))
    if turn.unconfirmed:
        parts.append("NOT CONFIRMED")
    if turn.name:
        parts.append(turn.id)
    style = "" if turn.outcome is None else "green" if turn.is_complete else "yellow"
    lines = [Line(", ".join(parts), style)]
    if turn.progress:
        lines.append(Line(f"  had: {turn.progress}"))
    for run in turn.unfinished:
        because = f": {run.reason.splitlines()[0]}" if run.reason else ""
        lines.append(Line(f"  {run.name} {run.outcome.value}{because}"))
    if turn.unfinished_count > len(turn.unfinished):
        lines.append(Line(f"  ... and {turn.unfinished_count - len(turn.unfinished)} more that did not succeed"))
    return lines


def _spent(tokens: int, cost: float, max_tokens: int | None = None, max_cost: float | None = None) -> list[str]:
    """Return what was spent in words, of how much; nothing where nothing was and nothing may be said."""
    words: list[str] = []
    if tokens or max_tokens is not None:
        words.append(f"{tokens} tokens" if max_tokens is None else f"{tokens} of {max_tokens} tokens")
    if cost or max_cost is not None:
        words.append(f"cost {cost:g}" if max_cost is None else f"cost {cost:g} of {max_cost:g}")
    return words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
