"""The dashboard, the alerts and the searches of the documentation name what is there, as those who read them expect.

What is there is read from the sources: every call that measures names its metric and its attributes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from remit.telemetry.names import METRICS, MetricKind

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)
SOURCES = ROOT / "coordinator" / "remit" / "telemetry"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "remit.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "grafana" / "alerts.yaml").read_text())
PAGE = (ROOT / "docs" / "tracing.md").read_text()
FUNCTIONS = {"sum", "by", "le", "rate", "increase", "histogram_quantile", "vector", "or", "and"}
GRID_COLUMNS = 24


def _trees() -> Iterator[ast.Module]:
    for path in SOURCES.glob("*.py"):
        yield ast.parse(path.read_text())


def _texts(node: ast.expr) -> list[str]:
    parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def measured() -> dict[str, set[str]]:
    """Return the attributes of each metric, by the names they are measured under."""
    renamed = {"agent": "gen_ai.agent.name", "error_type": "error.type"}
    found: dict[str, set[str]] = {}
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "measure":
                keys = {renamed.get(str(word.arg), str(word.arg)) for word in node.keywords}
                for name in _texts(node.args[0]):
                    found.setdefault(name, set()).update(keys)
    return found


MEASURED = measured()


def prometheus_names() -> dict[str, str]:
    """Return our metrics by the names that Prometheus has for their series.

    Source: https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
    """
    found: dict[str, str] = {}
    for name, metric in METRICS.items():
        base = name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
        match metric.kind:
            case MetricKind.COUNTER:
                found[f"{base}_total"] = name
            case MetricKind.UP_DOWN:
                found[base] = name
            case MetricKind.HISTOGRAM:
                found |= {f"{base}_{part}": name for part in ("bucket", "count", "sum")}
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARD["panels"]
    return found


def expressions() -> list[tuple[str, str]]:
    """Return every expression, with the legend of its series."""
    shown = [(t["expr"], t.get("legendFormat", "")) for panel in panels() for t in panel["targets"]]
    return shown + [(rule["expr"], "") for group in ALERTS["groups"] for rule in group["rules"]]


def test_every_metric_is_measured_somewhere_and_every_measurement_is_named() -> None:
    assert set(MEASURED) == set(METRICS)


@pytest.mark.parametrize(("expression", "legend"), expressions())
def test_an_expression_names_series_and_labels_that_are_there(expression: str, legend: str) -> None:
    known = prometheus_names()
    bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([\w, ]*\)(?= \()", " ", expression)
    series = set(re.findall(r"\b[a-z]\w{2,}\b", bare)) - FUNCTIONS
    assert series
    assert series <= set(known)
    grouped = {label.strip() for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(",")}
    matched = set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression))
    labels = {label.replace(".", "_") for name in series for label in MEASURED[known[name]]}
    assert (grouped | matched) - {"le"} <= labels
    assert ("le" in grouped) is ("histogram_quantile" in expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped


@pytest.mark.parametrize(("expression", "legend"), expressions())
def test_what_is_added_to_or_left_out_of_a_sum_counts_as_nothing(expression: str, legend: str) -> None:
    # A counter that nothing was ever added to has no series, and a sum with no series is none.
    for part in re.split(r" \+ ", expression) if " + " in expression else ():
        assert "or vector(0)" in part, part


def test_the_dashboard_is_as_grafana_imports_it() -> None:
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert "id" not in DASHBOARD  # of one server; importing with it would look for that dashboard
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${" + variable["name"] + "}"}
        assert panel["title"]
        assert {"defaults", "overrides"} <= set(panel["fieldConfig"])
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "reqps")
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0


def test_no_panel_lies_on_another_or_sticks_out() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert cells
        assert at["x"] + at["w"] <= GRID_COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_are_as_prometheus_reads_them() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


def test_searches_and_commands_of_the_page_name_what_is_there() -> None:
    texts = {n.value for tree in _trees() for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    searched = set(re.findall(r"span\.([\w.]+)", PAGE)) | set(re.findall(r"tag `([\w.]+)=", PAGE))
    for found in re.findall(r"attributes((?:\['\w+'\])+)", PAGE):
        searched.add(".".join(re.findall(r"\w+", found)))
    searched -= {"error"}  # Jaeger's own
    assert {"remit.outcome", "remit.cancel.orphans"} <= searched
    assert searched <= texts
    named = set(re.findall(r"`(remit\.\w[\w.]+)`", PAGE)) - {"remit.telemetry"}
    assert {name for name in named if name not in texts and name not in METRICS} == set()
    from typer.main import get_command

    from remit.cli.main import app

    verbs = set(getattr(get_command(app), "commands"))  # noqa: B009 - a group, which typer's types do not say
    told = set(re.findall(r"`remit (\w+)", PAGE + json.dumps(DASHBOARD) + json.dumps(ALERTS)))
    assert told
    assert told <= verbs
