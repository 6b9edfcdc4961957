"""A trace as one page of HTML that needs nothing else: no script, style or picture from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from remit.cli.waterfall import short_time
from remit.telemetry.trace import CancelPath, HopRow, Row, Trace

__all__ = ["trace_page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --plain: #4c8dd6; --stopped: #b8b8b8; --cancel: #d99a1e;
  --error: #d64545; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
.sub { opacity: .7; margin: .2rem 0 1rem; }
.key span { display: inline-block; width: 1.6em; height: .8em; margin: 0 .35em 0 1em; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .15rem .6rem .15rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; }
details { border-bottom: 1px solid var(--line); } summary { display: grid; gap: .8rem; cursor: pointer;
  grid-template-columns: minmax(16rem, 30%) 1fr 5.5rem minmax(8rem, 15rem); padding: .12rem 0; list-style: none; }
summary:hover { background: #8881; } .name { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.lane { position: relative; height: 1.2em; } .bar { position: absolute; top: .2em; height: .8em; min-width: 2px;
  border-radius: 2px; } .time { text-align: right; font-variant-numeric: tabular-nums; }
.plain { background: var(--plain); } .error { background: var(--error); } .cancel { background: var(--cancel); }
.stopped { background: repeating-linear-gradient(135deg, var(--stopped) 0 4px, #8888 4px 8px); }
.is-cancel .name { font-weight: 600; } .is-error .name, .bad { color: var(--error); }
pre { margin: .3rem 0 .6rem 1.5rem; white-space: pre-wrap; font-size: 12px; }
#only:checked ~ .rows details:not(.is-cancel) { display: none; }
"""

_KEY = (("plain", "done"), ("stopped", "stopped on purpose"), ("cancel", "the way of a cancel"), ("error", "error"))


def trace_page(trace: Trace, *, title: str) -> str:
    """Return the page: the way of each cancel, then the waterfall, each span with its details to open."""
    start, span_s = trace.start, max(trace.end - trace.start, 1e-9)
    rows = trace.rows(is_whole=True)
    key = "".join(f'<span class="{kind}"></span>{word}' for kind, word in _KEY)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">trace {trace.trace_id}, {short_time(span_s)}, {len(rows)} spans</p>',
        *(_cancel(path) for path in trace.cancels()),
        f'<h2>Waterfall</h2><p class="key">{key}</p>',
        '<input type="checkbox" id="only"><label for="only"> only the way of cancels</label><div class="rows">',
        *(_row(row, start, span_s) for row in rows),
        "</div></body></html>\n",
    ]
    return "\n".join(parts)


def _row(row: Row, start: float, span_s: float) -> str:
    left = (row.span.start - start) / span_s * 100
    width = row.span.seconds / span_s * 100
    classes = " ".join(["row", *(["is-cancel"] if row.is_cancel else []), *(["is-error"] if row.span.error else [])])
    return (
        f'<details class="{classes}"><summary>'
        f'<span class="name" style="padding-left:{row.depth * 1.1:.1f}rem">{escape(row.label)}</span>'
        f'<span class="lane"><span class="bar {row.kind}" style="left:{left:.3f}%;width:{width:.3f}%"></span></span>'
        f'<span class="time">{short_time(row.span.seconds)}</span><span>{escape(row.note)}</span>'
        f"</summary><pre>{escape(chr(10).join(_details(row, start)))}</pre></details>"
    )


def _details(row: Row, start: float) -> Iterator[str]:
    span = row.span
    yield f"{span.name}  {span.kind.name}  {'ERROR ' + span.error if span.error else 'UNSET'}"
    begins = short_time(span.start - start)
    yield f"span {span.span_id:016x}  parent {span.parent_id:016x}  begins {begins} after the first"
    for name, value in span.attributes.items():
        if value != "" and value != ():
            yield f"  {name} = {value}"
    for at, name, attributes in span.events:
        yield f"  event {name} after {short_time(max(0.0, at - span.start))} {_inline(attributes)}"
    for _, target, attributes in span.links:
        yield f"  link to {target:016x} {_inline(attributes)}"


def _inline(attributes: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in attributes.items() if value != "")


def _cancel(path: CancelPath) -> str:
    about = path.to_dict()
    by = " ".join(str(about[name]) for name in ("source", "requester", "surface") if about[name])
    head = (
        f"<h2>Cancel of {escape(str(about['target']))}</h2><p>{escape(by)} ({escape(str(about['kind']))}): "
        f"{escape(str(about['reason'] or 'no reason given'))}. {escape(str(about['result']))} after "
        f"{short_time(about['seconds'])}; {about['targets']} live, {about['unbegun'] or 0} not begun, "
        f"{about['orphans'] or 0} left.</p>"
    )
    if not path.hops:
        return head
    titles = ("hop", "what", "by", "delivery", "observed at", "observed", "cleaned up")
    table = "".join(f"<th>{title}</th>" for title in titles)
    return f"{head}<table><tr>{table}</tr>{''.join(map(_hop, path.hops))}</table>"


def _hop(hop: HopRow) -> str:
    observed = "" if hop.observed_s is None else short_time(hop.observed_s)
    cleanup = "" if hop.cleanup_s is None else short_time(hop.cleanup_s)
    said = f"{hop.delivery} {short_time(hop.delivered_s)} {hop.error}".strip()
    cells = (str(hop.number), hop.label, hop.mechanism, said, hop.observed_at, observed, cleanup)
    indent = f' style="padding-left:{hop.depth * 1.2:.1f}rem"'
    texts = "".join(f"<td{indent if number == 1 else ''}>{escape(cell)}</td>" for number, cell in enumerate(cells))
    return f"<tr{' class=bad' if hop.error else ''}>{texts}</tr>"
