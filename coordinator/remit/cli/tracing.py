"""`remit trace`: a turn's spans from the workspace's files, without any server."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.cli.records import Records, opened
from remit.cli.trace_page import trace_page
from remit.cli.waterfall import cancel_lines, waterfall_lines
from remit.coordinator.state import Node
from remit.core.errors import InvalidArgument, NotFound
from remit.core.events import decode_event
from remit.telemetry.files import read_traces, traces_folder
from remit.telemetry.fold import Folder
from remit.telemetry.record import SpanRecord
from remit.telemetry.trace import Trace, is_node, span_dict

__all__ = ["show_trace"]

_SETTLE_S = 3.0
"""How long the last spans of a turn that has just ended may take to reach the disk."""
_LOOK_S = 0.1
_PIPE_COLUMNS = 120


def show_trace(workspace: Path, target: str | None, *, only_cancels: bool, as_json: bool, html: Path | None) -> None:
    """Draw a turn's trace, or only the way of its cancels; as JSON or as a page if asked.

    Raises:
        NotFound: no such turn, or nothing is known of what it did.
        InvalidArgument: the page cannot be written there.
    """
    with _without_collections(), opened(workspace) as records:
        node = records.latest_turn() if target is None else records.find(target)
        turn = records.state.nodes.get(node.turn_id, node)
        spans, drawn = _spans_of(records, turn)
        if not spans:
            raise NotFound(f"{turn.id} has no finished span yet; `remit tree {turn.id}` shows what is at work")
        trace = Trace(spans)
        if html is not None:
            _write_page(html, trace_page(trace, title=f"{turn.name or 'turn'} {turn.id}"))
            print_lines([Line(f"wrote {html}: {len(spans)} spans of {turn.id}")])
            return
        if as_json:
            cancels = [path.to_dict() for path in trace.cancels()]
            document = {"workspace": records.workspace, "turn": turn.id, "trace_id": trace.trace_id}
            shown = [] if only_cancels else [span_dict(row.span) for row in trace.rows(is_whole=True)]
            print_json({**document, "cancels": cancels, "spans": shown})
            return
        print_lines([*_notes(turn, drawn=drawn, spans=len(spans)), *_drawn(trace, only_cancels=only_cancels)])


@contextmanager
def _without_collections() -> Generator[None]:
    """Keep the collector of cycles from looking through all spans again and again: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _drawn(trace: Trace, *, only_cancels: bool) -> list[Line]:
    if only_cancels:
        return cancel_lines(trace)
    width = shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns
    is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
    return waterfall_lines(trace, width=width, is_ascii=is_ascii, is_cut=sys.stdout.isatty())


def _notes(turn: Node, *, drawn: int, spans: int) -> list[Line]:
    lines: list[Line] = []
    if not turn.is_ended:
        lines.append(Line(f"{turn.id} has not ended: only finished spans are here; `remit tree` shows the rest"))
    if drawn:
        what = "its traces" if drawn == spans else f"{drawn} of its spans"
        lines.append(Line(f"{what} are not in the files (any more): drawn from the journal, without hosts' times"))
    return [Line(line.text, "yellow") for line in lines]


def _spans_of(records: Records, turn: Node) -> tuple[list[SpanRecord], int]:
    """Return a turn's spans, and how many had to be made from the journal."""
    folder = traces_folder(records.workspace)
    limit = time.monotonic() + _SETTLE_S
    while True:
        spans = list(read_traces(folder, turn.id))
        found = {span.run_id for span in spans if is_node(span)}
        # They follow the end of the turn by a moment; a turn that ended long ago gets no more.
        is_fresh = turn.is_ended and records.is_live and time.time() - (turn.ended_at or 0.0) < _SETTLE_S
        if turn.id in found or not is_fresh or time.monotonic() > limit:
            break
        time.sleep(_LOOK_S)
    if not turn.is_ended or found.issuperset(_ended_nodes(records, turn)):
        return spans, 0
    known = {span.span_id for span in spans}
    drawn = [span for span in _fold(records, turn.id) if span.span_id not in known]
    return [*spans, *drawn], len(drawn)


def _ended_nodes(records: Records, turn: Node) -> Iterator[str]:
    """Yield the turn and those of its runs that have ended: each has had a span."""
    for node in records.state_of(turn).nodes.values():
        if node.turn_id == turn.id and node.is_ended:
            yield node.id


def _fold(records: Records, turn_id: str) -> list[SpanRecord]:
    if records.reader is None:
        return []
    folder = Folder(is_measured=False)
    for r in records.reader.read(turn_id=turn_id):
        folder.event(decode_event(r.kind, r.node_id, r.turn_id, r.data))
    folder.close(records.now)
    return folder.take().spans


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
