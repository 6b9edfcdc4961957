import importlib
import json
from typing import Any

import pytest
import yaml

from remit.cli.swarm import json_schema, parse_swarm

GOOD = """\
version: 1
name: audit
x-usual: {anything: [1]}
deadline_s: 600
limits: {max_depth: 2}
approvals:
  - {action: "git push*", answer: deny, reason: not from here}
  - {action: "*", answer: ask}
on_failure: stop
agents:
  lint: {command: [ruff, 3, "{path}"], env: {A: 1}, ok_exit_codes: [0, 1]}
  merge: {command: "cat {after}", shell: true}
  think: {python: "m:f", isolation: actor, retries: 1}
runs:
  - {name: a, agent: lint, each: "*.py", as: path}
  - {name: b, agent: think, each: [1, {k: v}], with: {v: "{item}"}}
  - {name: c, agent: think, each: {lines: [git, ls-files], limit: 3}}
  - {name: d, agent: think, each: {glob: ["*.py"], exclude: x, as: y}}
  - {name: e, agent: merge, after: [a, b], detached: true, deadline_s: 1.5, approvals: deny}
"""

BAD = [
    ("agents: {}", {"agents": {}}),
    ("unknown field", {"agnts": 1}),
    ("neither command nor python", {"agents": {"a": {}}}),
    ("both", {"agents": {"a": {"command": ["x"], "python": "a:b"}}}),
    ("number of seconds", {"deadline_s": -1}),
    ("word", {"on_failure": "explode"}),
    ("no runs", {"runs": []}),
    ("policy word", {"approvals": "yes"}),
    ("no rules", {"approvals": []}),
    ("rule without answer", {"approvals": [{"action": "x"}]}),
    ("rule with another answer", {"approvals": [{"action": "x", "answer": "allow"}]}),
    ("rule for nothing", {"approvals": [{"action": "", "answer": "deny"}]}),
    ("two kinds of each", {"runs": [{"name": "a", "agent": "a", "each": {"glob": "a", "list": []}}]}),
    ("with is a list", {"runs": [{"name": "a", "agent": "a", "with": []}]}),
    ("run without agent", {"runs": [{"name": "a"}]}),
]


def validator() -> Any:
    """Return a validator; the library brings no types of its own."""
    return importlib.import_module("jsonschema").Draft202012Validator(json_schema())


def test_the_schema_is_one_and_goes_through_json() -> None:
    validator().check_schema(json.loads(json.dumps(json_schema())))


def test_what_loads_is_valid_by_the_schema() -> None:
    parse_swarm(GOOD)
    assert [error.message for error in validator().iter_errors(yaml.safe_load(GOOD))] == []


@pytest.mark.parametrize("change", [change for _, change in BAD], ids=[name for name, _ in BAD])
def test_what_has_the_wrong_shape_is_not_valid(change: dict[str, object]) -> None:
    assert not validator().is_valid(yaml.safe_load(GOOD) | change)


def test_every_field_has_a_name_and_a_description_for_editors() -> None:
    schema = json_schema()
    for one in (schema, *schema["$defs"].values()):
        assert one["description"]
        for name, field in one.get("properties", {}).items():
            assert field["title"] == name
            assert field["description"], name
