"""`remit trace`: from files, from the journal, as lines, as JSON, as a page."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from remit.cli.trace_page import trace_page
from remit.cli.waterfall import cancel_lines, short_time, waterfall_lines
from remit.telemetry import TelemetrySettings
from remit.telemetry.files import read_traces, traces_folder
from remit.telemetry.otlp import encode_spans
from remit.telemetry.record import SpanRecord
from remit.telemetry.trace import Trace


@pytest.fixture
def traced(make_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command on a workspace whose traces are kept, in a terminal that cuts no name."""
    monkeypatch.setenv("COLUMNS", "160")
    return make_command(telemetry=TelemetrySettings())


@pytest.fixture
def stopped(traced: Any) -> str:
    """Run a parent with two children, cancel it, and return the turn's id."""
    traced("run", traced.target("parent"), "--detach")
    assert traced.agents.started.wait(20)
    turn: str = traced.json("ps")["turns"][0]["id"]
    assert traced("cancel", turn, "--reason", "wrong folder").exit_code == 0
    return turn


def test_a_waterfall_shows_the_tree_and_marks_the_way_of_the_cancel(traced: Any, stopped: str) -> None:
    result = traced("trace")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("trace ")
    rows = [line.split("|")[0].rstrip() for line in lines[1:]]
    assert [row for row in rows if not row.startswith("!")] == [
        f"  invoke_workflow {traced.target('parent')}",
        "    parent",
        "      wait",
        "      wait",
    ]
    marked = [row.split() for row in rows if row.startswith("!")]
    assert [words[1] for words in marked].count("cancel.deliver") == 3
    assert [words[1] for words in marked].count("cancel.observe") == 3
    assert "cancelled" in lines[1]
    assert "wrong folder" in result.stdout
    assert traced("trace", stopped[-8:]).stdout.splitlines()[0] == lines[0]


def test_only_the_way_of_the_cancel_with_the_times_of_each_hop(traced: Any, stopped: str) -> None:
    result = traced("trace", stopped, "--cancel")
    assert result.exit_code == 0
    text = result.stdout
    assert f"of {stopped}" in text
    assert "asked by     user through cli (user_interrupt): wrong folder" in text
    assert "quiet after" in text
    hops = [line for line in text.splitlines() if line.lstrip().startswith("hop")]
    assert len(hops) == 3
    assert sum("observed at child_wait" in line for line in hops) == 1
    assert all("acknowledged" in line and "cleaned up" in line for line in hops)
    assert "invoke" not in text


def test_json_has_every_span_and_the_hops(traced: Any, stopped: str) -> None:
    document = traced.json("trace", stopped)
    assert document["turn"] == stopped
    names = [span["name"] for span in document["spans"]]
    assert names.count("invoke_agent wait") == 4  # two runs, each with its attempt
    assert {span["status"] for span in document["spans"]} == {"UNSET"}
    (cancel,) = document["cancels"]
    assert (cancel["reason"], cancel["result"], cancel["orphans"]) == ("wrong folder", "quiet", 0)
    assert {hop["observed_at"] for hop in cancel["hops"]} == {"child_wait", "checkpoint"}
    only = traced.json("trace", stopped, "--cancel")
    assert only["spans"] == []
    assert only["cancels"] == document["cancels"]


def test_a_turn_without_a_cancel_says_so(traced: Any) -> None:
    traced("run", traced.target("add"), "a=1")
    assert traced("trace", "--cancel").stdout == "nothing was cancelled in this turn\n"


class Page(HTMLParser):
    """Collects what a page would load, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_a_page_stands_alone(traced: Any, stopped: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    result = traced("trace", stopped, "--html", str(path))
    assert result.exit_code == 0
    assert str(path) in result.stdout
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert page.tags.count("details") == len(traced.json("trace", stopped)["spans"])
    assert "wrong folder" in text
    assert traced("trace", stopped, "--html", str(tmp_path / "no" / "where.html")).exit_code == 2


def test_texts_of_others_are_no_markup() -> None:
    bad = "<script>alert(1)</script>"
    span = SpanRecord(bad, 1, 2, 0, 0.0, 1.0, {"remit.outcome": bad}, error=bad)
    page = trace_page(Trace([span]), title=bad)
    assert "<script" not in page


def test_without_files_it_is_drawn_from_the_journal(traced: Any, stopped: str) -> None:
    # Nobody writes there from here on.
    traced.system.close()
    shutil.rmtree(traces_folder(traced.workspace))
    result = traced("trace", stopped)
    assert result.exit_code == 0
    assert "drawn from the journal" in result.stdout
    assert "invoke_workflow" in result.stdout
    assert result.stdout.count("cancel.deliver") == result.stdout.count("acknowledged") == 3


def test_what_has_gone_from_the_files_is_filled_in_from_the_journal(traced: Any, stopped: str) -> None:
    whole = traced("trace").stdout.splitlines()
    (path,) = traces_folder(traced.workspace).glob("traces-*.jsonl")
    kept = list(read_traces(path.parent, stopped))
    gone = next(span.run_id for span in kept if span.name == "invoke_agent wait")
    path.write_text(encode_spans([span for span in kept if span.run_id != gone], {}) + "\n")
    assert len(kept) > len(list(read_traces(path.parent, stopped))) > 0
    note, *lines = traced("trace").stdout.splitlines()
    assert note == "3 of its spans are not in the files (any more): drawn from the journal, without hosts' times"
    # All but what the host alone had told: what the run was at when it heard.
    assert len(lines) == len(whole) - 1
    assert [line.split("|")[0].split() for line in lines if not line.startswith("!")][-2:] == [["wait"], ["wait"]]


def test_a_turn_at_work_says_that_the_rest_is_to_come(traced: Any) -> None:
    traced("run", traced.target("parent"), "--detach")
    assert traced.agents.started.wait(20)
    result = traced("trace")
    assert result.exit_code != 0 or "has not ended" in result.stdout
    assert "remit tree" in result.output


def test_nothing_there_is_one_sentence(command: Any) -> None:
    result = command("trace")
    assert result.exit_code != 0
    assert result.output.startswith("remit: nothing has run in ")
    assert len(result.output.splitlines()) == 1


def rows(count: int) -> Trace:
    root = SpanRecord("invoke_workflow t", 1, 1, 0, 0.0, 10.0, {"remit.outcome": "failed"}, error="ValueError")
    spans = [
        SpanRecord(f"invoke_agent a{n}", 1, n + 2, 1, n * 0.001, 5.0 + n * 0.001, {"remit.outcome": "cancelled"})
        for n in range(count)
    ]
    return Trace([*spans, root])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_and_bars_lie_where_the_time_went(width: int) -> None:
    lines = waterfall_lines(rows(3), width=width, is_ascii=True)
    bars = [line.text.split("|")[1] for line in lines[1:]]
    assert len({len(bar) for bar in bars}) == 1
    assert set(bars[0]) == {"x"}
    assert bars[1].startswith("-")
    assert bars[1].rstrip() == "-" * round(len(bars[1]) / 2)
    assert lines[1].style == "red"
    assert lines[2].style == "yellow"
    assert max(len(line.text) for line in lines[1:]) <= max(width, 90)


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_lines_of_a_terminal_fit_it_whatever_the_words(width: int) -> None:
    request = SpanRecord("cancel.request", 1, 3, 2, 0.0, 1.0, {"remit.cancel.reason": "because " * 30})
    deep = [SpanRecord(f"lock.hold of the {n}th" * 3, 1, 10 + n, 9 + n, 0.0, 1.0, {}) for n in range(1, 9)]
    trace = Trace([SpanRecord("invoke_workflow t", 1, 2, 0, 0.0, 1.0, {}), request, *deep])
    lines = waterfall_lines(trace, width=width, is_ascii=True, is_cut=True)[1:]
    assert max(len(line.text) for line in lines) <= width
    assert all(line.text.count("|") == 2 for line in lines)
    assert any("bec" in line.text for line in lines) or width < 60
    whole = waterfall_lines(trace, width=width, is_ascii=True)
    assert any("because because because because" in line.text for line in whole)


def test_texts_of_others_do_not_get_at_the_terminal() -> None:
    bad = "\x1b[2Jgone\nnext\u202e"
    about: dict[str, Any] = {"remit.cancel.reason": bad, "remit.cancel.requester": bad, "remit.cancel.id": "req_1"}
    request = SpanRecord("cancel.request", 1, 2, 0, 0.0, 1.0, about)
    hop = SpanRecord("cancel.deliver", 1, 3, 2, 0.0, 1.0, {"gen_ai.agent.name": bad}, error=bad)
    trace = Trace([request, hop, SpanRecord(bad, 1, 4, 2, 0.0, 1.0, {})])
    lines = [*waterfall_lines(trace, width=100, is_ascii=True), *cancel_lines(trace)]
    assert all(line.text.isprintable() for line in lines)
    assert any("gone" in line.text for line in lines)


def test_a_thousand_spans_are_cut_and_counted() -> None:
    lines = waterfall_lines(rows(1_000), width=100, is_ascii=False)
    assert len(lines) == 502
    assert lines[-1].text == "... 501 more spans; --json and --html show all"


def test_what_is_cut_off_is_told_if_it_matters() -> None:
    root = SpanRecord("invoke_workflow t", 1, 1, 0, 0.0, 10.0, {})
    runs = [SpanRecord("invoke_agent a", 1, n + 10, 1, 0.0, 1.0, {}) for n in range(600)]
    request = SpanRecord("cancel.request", 1, 2, 1, 5.0, 6.0, {})
    hops = [SpanRecord("cancel.deliver", 1, n + 3, 2, 5.0, 6.0, {}, error="x" if n else "") for n in range(3)]
    last = waterfall_lines(Trace([root, *runs, request, *hops]), width=100, is_ascii=True)[-1].text
    assert last == "... 105 more spans, 4 of a cancel (see --cancel), 2 errors; --json and --html show all"


@pytest.mark.timeout(20)
def test_a_cancel_of_ten_thousand_runs_is_drawn_in_a_moment() -> None:
    # Looking through all spans for the name of each hop would take minutes.
    count = 10_000
    request = SpanRecord("cancel.request", 1, 2, 1, 0.0, 1.0, {"remit.cancel.id": "req_1"})
    spans = [SpanRecord("invoke_workflow t", 1, 1, 0, 0.0, 1.0, {"remit.turn.id": "turn_1"}), request]
    for n in range(count):
        about: dict[str, Any] = {"remit.run.id": f"run_{n}", "remit.cancel.target.run_id": f"run_{n}"}
        spans.append(SpanRecord(f"invoke_agent a{n}", 1, 10 + n, 1, 0.0, 1.0, about))
        spans.append(SpanRecord("cancel.deliver", 1, 20_000 + n, 2, 0.0, 1.0, about))
        spans.append(SpanRecord("cancel.observe", 1, 40_000 + n, 20_000 + n, 0.0, 1.0, about))
    lines = cancel_lines(Trace(spans))
    hops = [line.text.split(",")[0] for line in lines if line.text.startswith("  hop")]
    assert len(hops) == count
    assert all(hop.startswith("  hop 1  a") for hop in hops)


def test_a_librarys_span_of_an_agent_is_not_taken_for_the_run() -> None:
    about: dict[str, Any] = {"remit.run.id": "run_1", "remit.cancel.target.run_id": "run_1"}
    spans = [
        SpanRecord("cancel.request", 1, 2, 0, 0.0, 1.0, {}),
        SpanRecord("cancel.deliver", 1, 3, 2, 0.0, 1.0, about),
        SpanRecord("invoke_agent mine", 1, 4, 0, 0.0, 1.0, about),
        SpanRecord("invoke_agent inner", 1, 5, 4, 0.0, 1.0, {**about, "otel.scope.name": "some.library"}),
    ]
    assert any("  hop 1  mine  " in line.text for line in cancel_lines(Trace(spans)))


def test_a_span_of_nowhere_is_a_root_and_doubles_count_once() -> None:
    lost = SpanRecord("chat", 1, 7, 99, 0.0, 1.0, {})
    trace = Trace([lost, lost])
    assert [(row.label, row.depth) for row in trace.rows()] == [("chat", 0)]
    assert Trace([]).rows() == []
    assert waterfall_lines(Trace([]), width=80, is_ascii=True)[0].text.startswith("trace ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.42 ms"), (0.037, "37 ms"), (1.35, "1.35 s"), (74.2, "74 s"), (750.0, "12.5 min")],
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert short_time(seconds) == text
