import itertools
import os
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.cli.swarm.load import MAX_FILE_BYTES, load_swarm_file, parse_swarm
from remit.cli.swarm.model import SwarmFile
from remit.core.errors import SwarmFileError, UsageError

AGENTS = """\
agents:
  lint: {command: [ruff, check, "{path}"]}
  merge: {command: [cat, "{after}"]}
  think: {python: "mine.agents:think"}
"""


def refused(text: str) -> SwarmFileError:
    with pytest.raises(SwarmFileError) as caught:
        parse_swarm(text, label="audit.yaml")
    return caught.value


def problems(text: str) -> list[str]:
    return list(vars(refused(text))["problems"])


def only_problem(text: str) -> str:
    told = problems(text)
    assert len(told) == 1, told
    return told[0]


def with_runs(*runs: str) -> str:
    return AGENTS + "runs:\n" + "".join(f"  - {run}\n" for run in runs)


def load(*runs: str) -> SwarmFile:
    return parse_swarm(with_runs(*runs), label="audit.yaml")


def test_a_small_file_loads_with_its_defaults() -> None:
    swarm = load("{name: a, agent: lint, with: {path: a.py}}")
    assert (swarm.version, swarm.name, swarm.on_failure, swarm.runs[0].detached) == (1, "audit", "continue", False)
    assert swarm.describe(("runs", 0, "agent")) == "audit.yaml:6: runs[0].agent"


def test_a_mistake_names_file_line_and_field_and_suggests_the_nearest_name() -> None:
    assert only_problem(with_runs("{name: a, agent: lnt}")) == (
        "audit.yaml:6: runs[0].agent: no agent named 'lnt'; agents are lint, merge, think (did you mean 'lint'?)"
    )


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("yes", "approvals: must be 'ask', 'auto', 'deny' or a list of rules, not 'yes'"),
        ("denny", "approvals: must be 'ask', 'auto', 'deny' or a list of rules, not 'denny' (did you mean 'deny'?)"),
        ("true", "approvals: must be 'ask', 'auto', 'deny' or a list of rules, not true"),
        ("{action: x, answer: deny}", "approvals: must be 'ask', 'auto', 'deny' or a list of rules, not a mapping"),
        ("[]", "approvals: must not be empty"),
        ("[auto]", "approvals[0]: must be a mapping of fields, not 'auto'"),
        ("[{action: x}]", "approvals[0]: the required field 'answer' is missing"),
        ("[{action: '', answer: deny}]", "approvals[0].action: must not be empty"),
        ("[{action: 5, answer: deny}]", "approvals[0].action: must be text, not the number 5"),
        (
            "[{action: x, answer: approves}]",
            "approvals[0].answer: must be 'approve', 'deny' or 'ask', not 'approves' (did you mean 'approve'?)",
        ),
        (
            "[{action: x, answer: deny, because: y}]",
            "approvals[0].because: no such field; fields are action, answer, reason",
        ),
    ],
)
def test_a_policy_that_does_not_hold_is_told_with_its_place(policy: str, told: str) -> None:
    text = with_runs("{name: a, agent: think}")
    assert only_problem(f"approvals: {policy}\n{text}") == f"audit.yaml:1: {told}"
    inside = with_runs(f"{{name: a, agent: think, approvals: {policy}}}")
    assert only_problem(inside) == f"audit.yaml:6: runs[0].{told}"


@pytest.mark.requirement("B38")
def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = with_runs(
        "{name: a, agent: lnt}",
        "{name: a, agent: think, after: [b, nobody]}",
        "{name: b, agent: think, retries: -1}",
        "7",
    )
    error = refused("agnts: {}\n" + text)
    told = list(vars(error)["problems"])
    assert [line.split(":")[1] for line in told] == ["1", "7", "8", "8", "9", "10"]
    assert error.message == told[0] + " (and 5 more)"
    assert isinstance(error, UsageError)
    assert vars(pickle.loads(pickle.dumps(error)))["problems"] == tuple(told)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("{agent: think}", "runs[0]: the required field 'name' is missing"),
        ("{name: a}", "runs[0]: the required field 'agent' is missing"),
        ("{name: a, agent: think, aftr: b}", "runs[0].aftr: no such field;"),
        ("{name: a, agent: think, retries: '3'}", "runs[0].retries: must be a whole number, not '3'"),
        ("{name: a, agent: think, retries: 1.5}", "runs[0].retries: must be a whole number, not the number 1.5"),
        ("{name: a, agent: think, retries: -1}", "runs[0].retries: must be at least 0, not the number -1"),
        ("{name: a, agent: think, deadline_s: 0}", "runs[0].deadline_s: must be above 0, not the number 0"),
        ("{name: a, agent: think, deadline_s: .inf}", "runs[0].deadline_s: must be a number, not '.inf'"),
        ("{name: a, agent: think, deadline_s: 1e99}", "runs[0].deadline_s: must be at most 31622400, not"),
        ("{name: a, agent: think, detached: 1}", "runs[0].detached: must be true or false, not the number 1"),
        ("{name: a, agent: think, with: [1]}", "runs[0].with: must be a mapping, not a list"),
        ("{name: a, agent: think, after: [think, 3]}", "runs[0].after[1]: must be text, not the number 3"),
        ("{name: a, agent: think, after: []}", "runs[0].after: must be a text or a list of texts that is not empty"),
        ("{name: a, agent: think, limits: {max_depth: 0}}", "runs[0].limits.max_depth: must be at least 1"),
        ("{name: a, agent: think, limits: {depth: 1}}", "runs[0].limits.depth: no such field; fields are max_depth,"),
        ("{name: '', agent: think}", "runs[0].name: a name has 1 to 100 printable characters"),
        ("{name: 'a[1]', agent: think}", "runs[0].name: a name has 1 to 100 printable characters"),
        ("{name: a, agent: think, with: {a-b: 1}}", "runs[0].with.a-b: must be the name of an argument"),
        ("{name: a, agent: lint}", "runs[0]: 'with' gives no 'path', which the command of agent 'lint' needs"),
        (
            "{name: a, agent: lint, with: {path: x, pth: x}}",
            "has no field {pth}; its fields are path (did you mean 'path'?)",
        ),
        ("{name: a, agent: lint, with: {path: [x]}}", "runs[0].with.path: must be a text, number or truth value"),
        ("{name: a, agent: merge}", "runs[0]: the command of agent 'merge' reads {after}, and this run comes after"),
        ("{name: a, agent: think, after: b}", "runs[0].after: no run named 'b'; runs are a"),
        ("{name: a, agent: think, as: x}", "runs[0].as: names the item of 'each', and this run has no 'each'"),
        ("{name: a, agent: think, each: [1], as: after}", "runs[0].as: must be a plain name other than 'after'"),
        (
            "{name: a, agent: think, each: {list: [1], as: x}, as: y}",
            "runs[0].as: says 'y', and 'as' in 'each' says 'x'",
        ),
        ("{name: a, agent: think, each: 7}", "runs[0].each: must be a mapping of fields, not the number 7"),
        (
            "{name: a, agent: think, each: {}}",
            "runs[0].each: needs exactly one of 'glob', 'list' and 'lines'; it has none",
        ),
        ("{name: a, agent: think, each: {glob: a, list: []}}", "it has glob, list"),
        ("{name: a, agent: think, each: {list: [], exclude: a}}", "runs[0].each.exclude: goes with 'glob' only"),
        ("{name: a, agent: think, each: {glbo: a, list: []}}", "runs[0].each.glbo: no such field; fields are glob,"),
        ("{name: a, agent: think, each: ../*}", "runs[0].each: must be relative to the workspace and stay inside it"),
        ("{name: a, agent: think, each: {glob: /etc/*}}", "runs[0].each.glob: must be relative to the workspace"),
        ("{name: a, agent: think, each: '*.{a,b}'}", "runs[0].each: braces are not expanded"),
        (
            "{name: a, agent: think, each: {lines: git ls-files}}",
            "runs[0].each.lines: must be a list, one item an argument",
        ),
        ("{name: a, agent: think, each: {lines: ['']}}", "runs[0].each.lines: must begin with a program's name"),
        (
            "{name: a, agent: think, with: {p: '{item}'}}",
            "nothing fills {item}: the run has no 'each'; write {{item}} for",
        ),
        (
            "{name: a, agent: think, each: [1], with: {p: ['{itm}']}}",
            "runs[0].with.p[0]: nothing fills {itm}: the item is {item}",
        ),
        (
            "{name: a, agent: think, each: [3.9, 3.10]}",
            "runs[0].each[1]: 3.10 is read as the number 3.1; write it in quotes",
        ),
        ("just words", "runs[0]: must be a mapping of fields, not 'just words'"),
    ],
)
def test_a_mistake_in_a_run_is_one_clear_sentence(run: str, told: str) -> None:
    problem = only_problem(with_runs(run))
    assert problem.startswith("audit.yaml:6: ")
    assert told in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("{}", "agents.x: needs either 'command' or 'python'"),
        ("{command: [a], python: 'a:b'}", "agents.x.python: 'command' and 'python' exclude each other"),
        ("{command: ruff check}", "agents.x.command: must be a list, one item an argument"),
        ("{command: [a], shell: true}", "agents.x.command: with shell=True the command must be one text"),
        ("{command: []}", "agents.x.command: must be a text or a list of texts that is not empty"),
        ("{command: [a, [b]]}", "agents.x.command[1]: must be text, not a list"),
        ("{command: [a, null]}", "agents.x.command[1]: must be text, not nothing"),
        ("{command: [a, '{']}", "agents.x.command: argument 1 ('{') does not parse"),
        ("{command: [a, '{b.c}']}", "agents.x.command: field {b.c} in argument 1 must be a plain name"),
        ("{command: [a], cwd: ../b}", "agents.x.cwd: must be relative to the workspace and stay inside it"),
        ("{command: [a], env: {'A=B': c}}", "agents.x.env.'A=B': is no environment variable"),
        ("{command: [a], env: {A: [c]}}", "agents.x.env.A: must be text, not a list"),
        ("{command: [a], timeout_s: -1}", "agents.x.timeout_s: must be above 0, not the number -1"),
        ("{command: [a], grace_s: -1}", "agents.x.grace_s: must be at least 0, not the number -1"),
        ("{command: [a], ok_exit_codes: [0, 300]}", "agents.x.ok_exit_codes[1]: must be at most 255"),
        ("{command: [a], ok_exit_codes: []}", "agents.x.ok_exit_codes: must not be empty"),
        ("{command: [a], ok_exit_codes: 0}", "agents.x.ok_exit_codes: must be a list, not the number 0"),
        ("{command: [a], isolation: actor}", "agents.x.isolation: is for agents with 'python'"),
        ("{python: a.b}", "agents.x.python: must be 'module:function', such as 'a:b', not 'a.b'"),
        ("{python: 'a:'}", "agents.x.python: must be 'module:function'"),
        ("{python: 'a b:c'}", "agents.x.python: must be 'module:function'"),
        ("{python: 'a:b', timeout_s: 3}", "agents.x.timeout_s: is for agents with 'command'"),
        (
            "{python: 'a:b', isolation: actr}",
            "agents.x.isolation: must be 'shared' or 'actor', not 'actr' (did you mean 'actor'?)",
        ),
        ("{python: 'a:b', retires: 2}", "(did you mean 'retries'?)"),
        ("ruff", "agents.x: must be a mapping of fields, not 'ruff'"),
    ],
)
def test_a_mistake_in_an_agent_is_one_clear_sentence(agent: str, told: str) -> None:
    problem = only_problem(f"agents:\n  x: {agent}\nruns:\n  - {{name: a, agent: x}}\n")
    assert problem.startswith("audit.yaml:2: agents.x")
    assert told in problem


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "audit.yaml: is empty; a swarm file has 'agents' and 'runs'"),
        ("# nothing\n", "audit.yaml: is empty"),
        ("- a\n", "audit.yaml:1: must be a mapping with 'agents' and 'runs'"),
        ("a: b: c\n", "audit.yaml:1: is not valid YAML: mapping values are not allowed"),
        ("a: 'x\n", "audit.yaml:2: is not valid YAML:"),
        ("agents:\n\t- x\n", "audit.yaml:2: is indented with a tab; YAML takes spaces only"),
        ("a: 1\n---\nb: 2\n", "audit.yaml:2: holds more than one document"),
        ("a: *x\n", "audit.yaml:1: refers to *x, and nothing above is marked &x"),
        ("a: &x [*x]\n", "audit.yaml:1: *x stands inside &x and would contain itself"),
        ("? [a]\n: b\n", "audit.yaml:1: has a list or mapping as a key"),
        ("a: &x b\n*x : c\n", "audit.yaml:2: has an alias as a key"),
        ("a: " + "[" * 200, "audit.yaml:1: is nested deeper than 64 levels"),
        ("# x\na: \a\n", "audit.yaml:2: holds a character that YAML does not allow (U+0007)"),
        ('a: "\\UFFFFFFFF"\n', "audit.yaml:1: is not valid YAML:"),
    ],
)
def test_text_that_is_no_swarm_file_is_one_clear_sentence(text: str, told: str) -> None:
    assert only_problem(text).startswith(told)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("name: !!python/object/apply:os.getcwd []", "audit.yaml:1: name: must be text, not a list"),
        ("name: !!python/name:os.getcwd ''", "audit.yaml:1: name: cannot have the tag"),
        ("name: !!int word", "audit.yaml:1: name: cannot have the tag"),
        ("deadline_s: " + "9" * 5000, "audit.yaml:1: deadline_s: is a number out of range"),
        ("deadline_s: 1e999", "audit.yaml:1: deadline_s: is a number out of range"),
        ("version: 2", "audit.yaml:1: version: must be at most 1, not the number 2"),
        ("on_failure: explode", "audit.yaml:1: on_failure: must be 'continue' or 'stop', not 'explode'"),
        ("limits: {<<: 1}", "audit.yaml:1: limits: '<<' takes a mapping, or a list of mappings"),
    ],
)
def test_a_bad_value_at_the_top_is_told_with_its_line(line: str, told: str) -> None:
    assert problems(line + "\n" + with_runs("{name: a, agent: think}"))[0].startswith(told)


def test_tags_make_no_objects(tmp_path: Path) -> None:
    target = tmp_path / "made"
    refused(f"agents: !!python/object/apply:os.mkdir ['{target}']\nruns: []\n")
    assert not target.exists()


def test_aliases_cannot_make_a_file_grow_without_bound() -> None:
    layers = ["x-0: &l0 [" + ", ".join(["a"] * 10) + "]"]
    layers += [f"x-{n}: &l{n} [" + ", ".join([f"*l{n - 1}"] * 10) + "]" for n in range(1, 30)]
    assert "grows to more than 200,000 values" in only_problem("\n".join(layers))


def test_aliases_cannot_make_a_file_deep_without_bound() -> None:
    layers = ["x-0: &l0 " + "[" * 50 + "]" * 50]
    layers += [f"x-{n}: &l{n} " + "[" * 50 + f"*l{n - 1}" + "]" * 50 for n in range(1, 400)]
    assert "is nested deeper than 64 levels" in only_problem("\n".join(layers))


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    text = with_runs("{name: a, agent: think}") + "agents: {}\n"
    assert only_problem(text) == "audit.yaml:1: agents: stands here twice, first on line 1 and again on line 7"


def test_the_field_that_is_filled_with_earlier_results_cannot_be_given() -> None:
    told = only_problem(with_runs("{name: a, agent: think}", "{name: b, agent: merge, after: a, with: {after: x}}"))
    assert told.startswith("audit.yaml:7: runs[1].with.after: is filled by remit itself")


def test_two_runs_of_one_name_are_refused() -> None:
    told = only_problem(with_runs("{name: a, agent: think}", "{name: a, agent: think}"))
    assert told == "audit.yaml:7: runs[1].name: 'a' is the name of runs[0] already"


@pytest.mark.requirement("B38")
def test_a_cycle_is_spelled_out() -> None:
    told = only_problem(
        with_runs(
            "{name: a, agent: think, after: b}",
            "{name: b, agent: think, after: [c, d]}",
            "{name: c, agent: think, after: a}",
            "{name: d, agent: think}",
        )
    )
    cycle = told.split("wait for each other: ")[1].split(" -> ")
    assert cycle[0] == cycle[-1]
    after = {"a": "b", "b": "c", "c": "a"}
    assert all(after[one] == other for one, other in itertools.pairwise(cycle))
    assert len(cycle) == 4


def test_a_run_after_itself_is_a_cycle() -> None:
    assert "wait for each other: a -> a" in only_problem(with_runs("{name: a, agent: think, after: a}"))


def test_a_chain_of_thousands_of_runs_is_checked() -> None:
    runs = ["{name: r0, agent: think}"]
    runs += [f"{{name: r{n}, agent: think, after: r{n - 1}}}" for n in range(1, 2000)]
    assert len(load(*runs).runs) == 2000


def test_thousands_of_mistakes_are_cut_short() -> None:
    told = problems(with_runs(*(f"{{name: r{n}, agent: think, after: q{n}}}" for n in range(2000))))
    assert 1 < len(told) <= 200


def test_plain_words_mean_what_yaml_1_2_says() -> None:
    run = load(
        "{name: a, agent: think, with: {a: no, b: on, c: 012, d: 0x10, e: 1:30, f: 2024-01-01, g: ~, h: 1e2}}"
    ).runs[0]
    expected = {"a": "no", "b": "on", "c": 12, "d": 16, "e": "1:30", "f": "2024-01-01", "g": None, "h": 100.0}
    assert run.arguments == expected


def test_numbers_in_commands_and_environments_stay_as_they_are_written() -> None:
    text = (
        "agents:\n  x: {command: [tool, 3.10, 007, true], env: {V: 1.10, ON: false}}\nruns:\n  - {name: a, agent: x}\n"
    )
    agent = parse_swarm(text).agents["x"]
    assert agent.command == ("tool", "3.10", "007", "true")
    assert agent.env == {"V": "1.10", "ON": "false"}


def test_anchors_and_merge_keys_work_with_a_place_of_their_own() -> None:
    text = """\
x-usual: &usual {retries: 2, deadline_s: 60}
agents:
  x: {<<: *usual, python: "a:b", retries: 5}
  y: {<<: [{deadline_s: 1}, *usual], python: "a:b"}
runs:
  - {name: a, agent: x}
  - {name: b, agent: y}
"""
    agents = parse_swarm(text).agents
    assert (agents["x"].retries, agents["x"].deadline_s) == (5, 60)
    assert (agents["y"].retries, agents["y"].deadline_s) == (2, 1)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: 1\nb: \xff\n", "audit.yaml:2: is not UTF-8 text"),
        ("a: 1".encode("utf-16"), "audit.yaml:1: is not UTF-8 text"),
        (b"#" * (MAX_FILE_BYTES + 1), "audit.yaml: is larger than 1,048,576 bytes"),
    ],
)
def test_a_file_with_unusable_content_is_one_clear_sentence(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "audit.yaml"
    path.write_bytes(content)
    with pytest.raises(SwarmFileError) as caught:
        load_swarm_file(path)
    assert str(caught.value).startswith(f"{tmp_path}/{told}")


def test_a_path_that_is_no_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(SwarmFileError, match="is a folder, not a swarm file"):
        load_swarm_file(tmp_path)
    with pytest.raises(SwarmFileError, match="cannot be read: No such file or directory"):
        load_swarm_file(tmp_path / "none.yaml")
    with pytest.raises(SwarmFileError, match="cannot be read"):
        load_swarm_file(Path("a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_without_the_right_to_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text("a: 1")
    path.chmod(0)
    with pytest.raises(SwarmFileError, match="cannot be read: Permission denied"):
        load_swarm_file(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "named.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + with_runs("{name: a, agent: think}").encode())
    assert load_swarm_file(path).name == "named"


WORDS = st.sampled_from(
    [
        "agents",
        "runs",
        "name",
        "agent",
        "with",
        "each",
        "after",
        "as",
        "glob",
        "list",
        "lines",
        "command",
        "python",
        "limits",
        "version",
        "retries",
        "deadline_s",
        "on_failure",
        "isolation",
        "env",
        "shell",
        "x",
        "think",
        "lint",
        "-1",
        "0",
        "3.10",
        "1e999",
        "0x1f",
        "null",
        "true",
        "~",
        "''",
        '"{item}"',
        '"{{a}}"',
        "{item}",
        "a:b",
        "a.b:c",
        "*a",
        "&a",
        "<<",
        "!!str",
        "!!int",
        "!x",
        "[a,b]",
        "{a:1}",
        "-",
        "?",
        "|",
        ">",
        "#",
        "%",
        "@",
        "`",
    ]
)
LAYOUT = st.sampled_from(
    [" ", "\n", "\n  ", "\n    ", ": ", ":\n  ", "\n  - ", ", ", "[", "]", "{", "}", "\t", '"', "'"]
)


def only_our_error(text: str) -> None:
    caught: SwarmFileError | None = None
    try:
        parse_swarm(text, label="x.yaml")
    except SwarmFileError as error:
        caught = error
    if caught is not None:
        assert str(caught).startswith("x.yaml")
        assert vars(caught)["problems"]
        assert str(caught).encode()


@given(st.text(max_size=200))
def test_any_text_gives_a_model_or_our_error(text: str) -> None:
    only_our_error(text)


@given(st.lists(st.one_of(WORDS, LAYOUT), max_size=60).map("".join))
def test_any_text_of_yaml_pieces_gives_a_model_or_our_error(text: str) -> None:
    only_our_error(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | WORDS, inner, max_size=6),
    max_leaves=20,
)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {"agents": st.dictionaries(WORDS, JSON, max_size=3) | JSON, "runs": st.lists(JSON, max_size=3) | JSON}
    ),
    st.dictionaries(st.sampled_from(["name", "agent", "with", "each", "after", "as", "limits", "retries"]), JSON),
)
def test_any_data_gives_a_model_or_our_error(data: dict[str, object], run: dict[str, object]) -> None:
    if isinstance(data["runs"], list):
        data["runs"].append(run)
    only_our_error(yaml.safe_dump(data, allow_unicode=True))


@given(st.integers(min_value=0), st.characters())
def test_a_file_with_one_character_changed_gives_a_model_or_our_error(at: int, char: str) -> None:
    text = with_runs(
        "{name: a, agent: lint, each: {glob: '*.py', limit: 3}, as: path}", "{name: b, agent: merge, after: a}"
    )
    place = at % len(text)
    only_our_error(text[:place] + char + text[place + 1 :])
