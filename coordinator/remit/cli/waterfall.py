"""A trace as lines of text: a waterfall, or the way of its cancels."""

from __future__ import annotations

from remit.cli.lines import Line
from remit.core.texts import one_line
from remit.telemetry.trace import CancelPath, HopRow, Row, Trace

__all__ = ["cancel_lines", "waterfall_lines"]

_STYLES = {"error": "red", "stopped": "yellow", "cancel": "bold yellow", "plain": ""}
_UNICODE = {"error": "█", "stopped": "▒", "cancel": "▬", "plain": "█"}
_ASCII = {"error": "x", "stopped": "-", "cancel": "!", "plain": "="}
_MOST_ROWS = 500
_LEAST_BAR = 8
_LEAST_LABEL = 16
_NOTE_WIDTH = 24
_TIME_WIDTH = 9


def short_time(seconds: float) -> str:
    """Return a time span in three figures: `0.42 ms`, `37 ms`, `1.35 s`, `74 s`, `12.5 min`."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min"


def waterfall_lines(trace: Trace, *, width: int, is_ascii: bool, is_cut: bool = False) -> list[Line]:
    """Return a trace as a waterfall: one line a span, parents first, steps of cancels marked with `!`.

    Args:
        trace: what to draw.
        width: columns of the terminal.
        is_ascii: without block characters.
        is_cut: whether notes are cut too, so that no line is longer than a terminal of 44 columns or more.
    """
    rows = trace.rows()
    shown = rows[:_MOST_ROWS]
    labels = [one_line(f"{'!' if row.is_cancel else ' '} {'  ' * row.depth}{row.label}") for row in shown]
    label_width = min(max((len(label) for label in labels), default=0), max(_LEAST_LABEL, width * 2 // 5))
    left = width - label_width - _TIME_WIDTH - len(" ||  ")
    bar_width = max(_LEAST_BAR, left - _NOTE_WIDTH)
    note_width = max(0, left - bar_width) if is_cut else None
    start, span_s = trace.start, max(trace.end - trace.start, 1e-9)
    marks = _ASCII if is_ascii else _UNICODE
    head = f"trace {trace.trace_id}, {short_time(span_s)}, {_count(len(trace.spans), 'span')}"
    lines = [Line(head, "bold")]
    for row, label in zip(shown, labels, strict=True):
        bar = _bar(row, start, span_s, bar_width, marks[row.kind])
        time = short_time(row.span.seconds).rjust(_TIME_WIDTH)
        note = one_line(row.note) if note_width is None else _cut(one_line(row.note), note_width)
        text = f"{_cut(label, label_width).ljust(label_width)} |{bar}|{time}  {note}".rstrip()
        lines.append(Line(text, _STYLES[row.kind]))
    if len(rows) > len(shown):
        lines.append(Line(_rest(rows[_MOST_ROWS:])))
    return lines


def _rest(rows: list[Row]) -> str:
    """Say what is not shown, and what of it people look for."""
    cancels, errors = sum(row.is_cancel for row in rows), sum(bool(row.span.error) for row in rows)
    text = f"... {_count(len(rows), 'more span')}"
    text += f", {cancels} of a cancel (see --cancel)" if cancels else ""
    text += f", {_count(errors, 'error')}" if errors else ""
    return f"{text}; --json and --html show all"


def _bar(row: Row, start: float, span_s: float, width: int, mark: str) -> str:
    left = min(width - 1, int((row.span.start - start) / span_s * width))
    length = max(1, round(row.span.seconds / span_s * width))
    return (" " * left + mark * length)[:width].ljust(width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"[:width]


def cancel_lines(trace: Trace) -> list[Line]:
    """Return the way of every cancel: who asked, then hop by hop who heard it, where, and how fast."""
    paths = trace.cancels()
    if not paths:
        return [Line("nothing was cancelled in this turn")]
    lines: list[Line] = []
    for path in paths:
        lines.extend(_path_lines(path))
    return lines


def _path_lines(path: CancelPath) -> list[Line]:
    about = path.to_dict()
    by = f" by {about['requester']}" if about["requester"] else ""
    through = f" through {about['surface']}" if about["surface"] else ""
    because = f": {about['reason']}" if about["reason"] else ""
    lines = [
        Line(f"cancel {about['id']} of {about['target']}", "bold"),
        Line(f"  asked by     {about['source']}{by}{through} ({about['kind']}){because}"),
    ]
    if about["joined"]:
        lines.append(Line(f"  joined       {about['joined']}, which had come first"))
    left = about["orphans"] or 0
    result = f"{about['result']} after {short_time(about['seconds'])}; {about['targets']} live when it was accepted"
    if about["unbegun"]:
        result += f", {about['unbegun']} had not begun"
    lines.append(Line(f"  result       {result}" + (f", {left} left" if left else ""), "red" if left else ""))
    lines.extend(_hop_line(hop) for hop in path.hops)
    return lines


def _hop_line(hop: HopRow) -> Line:
    """Return one hop: its number, whom it reached by which means, and the times of its steps."""
    heard = f"{hop.delivery} {short_time(hop.delivered_s)}"
    parts = [f"  hop {hop.number}{'  ' * hop.depth}  {hop.label}  {hop.mechanism}", heard]
    if hop.observed_at and hop.observed_s is not None:
        parts.append(f"observed at {hop.observed_at} {short_time(hop.observed_s)}")
    if hop.cleanup_s is not None:
        parts.append(f"cleaned up {short_time(hop.cleanup_s)}")
    if hop.error:
        parts.append(hop.error)
    parts.append(hop.target)
    return Line(", ".join(parts), "red" if hop.error else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
