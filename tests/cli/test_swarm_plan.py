from pathlib import Path

import pytest

from remit.cli.swarm import plan as plan_module
from remit.cli.swarm.load import parse_swarm
from remit.cli.swarm.model import Isolation, OnFailure, SwarmFile
from remit.cli.swarm.plan import PlannedCommand, PlannedPython, PlannedRun, SwarmPlan, build_plan
from remit.core.approvals import ApprovalRule
from remit.core.errors import InvalidArgument, SwarmFileError
from remit.core.limits import Limits
from remit.locks import exclusive, read, write

AGENTS = """\
agents:
  lint: {command: [ruff, check, "--x={flag}", "{path}"], deadline_s: 30, retries: 2}
  show: {command: [cat, "{item}"]}
  merge: {command: "cat {after} > out", shell: true}
  think: {python: "mine.agents:think"}
"""


def plan(workspace: Path, *runs: str, top: str = "") -> SwarmPlan:
    text = top + AGENTS + "runs:\n" + "".join(f"  - {run}\n" for run in runs)
    return build_plan(parse_swarm(text, label="audit.yaml"), workspace)


def arguments(workspace: Path, run: str) -> list[dict[str, object]]:
    return [dict(one.arguments) for one in plan(workspace, f"{{name: a, {run}}}").runs]


def names(made: SwarmPlan) -> list[str]:
    return [run.name for run in made.runs]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_a_plan_carries_what_the_file_says(tmp_path: Path) -> None:
    text = """\
name: audit
description: look at all
deadline_s: 600
limits: {max_concurrent: 4}
on_failure: stop
agents:
  tool:
    description: a tool
    command: [tool, "{path}", "{after}"]
    cwd: sub
    env: {A: b}
    timeout_s: 10
    grace_s: 0
    ok_exit_codes: [0, 1]
  code: {python: "m:f", isolation: actor}
runs:
  - {name: first, agent: code, limits: {max_depth: 2}, detached: true, attempt_timeout_s: 5, description: begin}
  - {name: last, agent: tool, after: first, with: {path: x}}
"""
    made = build_plan(parse_swarm(text), tmp_path)
    assert (made.name, made.description, made.deadline_s, made.on_failure) == (
        "audit",
        "look at all",
        600,
        OnFailure.STOP,
    )
    assert made.limits == Limits(max_concurrent=4)
    assert made.agents == (
        PlannedCommand(
            name="tool",
            description="a tool",
            command=("tool", "{path}", "{after}"),
            shell=False,
            cwd="sub",
            env={"A": "b"},
            timeout_s=10,
            grace_s=0,
            ok_exit_codes=(0, 1),
            reads_after=True,
        ),
        PlannedPython(name="code", description="", reference="m:f", isolation=Isolation.ACTOR),
    )
    assert made.runs[0] == PlannedRun(
        name="first",
        group="first",
        agent="code",
        description="begin",
        arguments={},
        after=(),
        deadline_s=None,
        attempt_timeout_s=5,
        retries=0,
        detached=True,
        limits=Limits(max_depth=2),
    )
    assert (made.runs[1].after, made.runs[1].arguments, made.notes) == (("first",), {"path": "x"}, ())


def test_a_run_takes_deadline_and_retries_of_its_agent_unless_it_has_its_own(files: Path) -> None:
    made = plan(
        files,
        "{name: a, agent: lint, with: {path: x, flag: y}}",
        "{name: b, agent: lint, with: {path: x, flag: y}, deadline_s: 5, retries: 0}",
    )
    assert [(run.deadline_s, run.retries) for run in made.runs] == [(30, 2), (5, 0)]


def test_a_run_with_each_becomes_one_run_an_item(files: Path) -> None:
    made = plan(files, "{name: a, agent: lint, each: '*.py', as: path, with: {flag: 'in {path}!'}}")
    assert names(made) == ["a[a.py]", "a[b.py]"]
    assert [run.group for run in made.runs] == ["a", "a"]
    assert made.runs[1].arguments == {"path": "b.py", "flag": "in b.py!"}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("[x, 7, true, 0.5]", ["a[x]", "a[7]", "a[true]", "a[0.5]"]),
        ("[x, x]", ["a[0]", "a[1]"]),
        ("['1', 1]", ["a[0]", "a[1]"]),
        ("[{k: 1}, x]", ["a[0]", "a[1]"]),
        ("['', x]", ["a[0]", "a[1]"]),
        ('["a\\nb", x]', ["a[0]", "a[1]"]),
        (f"[{'x' * 300}]", ["a[0]"]),
    ],
)
def test_repeated_runs_are_named_by_item_if_that_tells_them_apart(
    tmp_path: Path, items: str, expected: list[str]
) -> None:
    assert names(plan(tmp_path, f"{{name: a, agent: think, each: {items}}}")) == expected


def test_a_text_that_is_only_the_item_keeps_its_type(tmp_path: Path) -> None:
    run = (
        "agent: think, each: [{k: [1, {z: null}]}], with: {whole: '{item}', part: '{item.k}', deep: [{in: '{item.k}'}]}"
    )
    value = [1, {"z": None}]
    assert arguments(tmp_path, run) == [{"whole": {"k": value}, "part": value, "deep": [{"in": value}]}]


def test_the_item_stands_in_texts_as_json_unless_it_is_a_text(tmp_path: Path) -> None:
    run = "agent: think, each: [text, 1, 0.5, true, null, [a]], with: {v: '<{item}>'}"
    told = [one["v"] for one in arguments(tmp_path, run)]
    assert told == ["<text>", "<1>", "<0.5>", "<true>", "<null>", '<["a"]>']


def test_doubled_and_other_braces_are_text(tmp_path: Path) -> None:
    run = """agent: think, each: [x], with: {v: '{{item}} {"a": {"b": 1}} {} { item } {item}'}"""
    assert arguments(tmp_path, run) == [{"v": '{item} {"a": {"b": 1}} {} { item } x'}]


def test_an_item_is_never_read_as_a_template_again(tmp_path: Path) -> None:
    assert arguments(tmp_path, "agent: think, each: ['{item}{{x}}'], with: {v: '-{item}'}") == [{"v": "-{item}{{x}}"}]


def test_a_commands_field_of_the_items_name_is_filled_by_itself(files: Path) -> None:
    assert arguments(files, "agent: show, each: '*.py'") == [{"item": "a.py"}, {"item": "b.py"}]
    assert arguments(files, "agent: show, each: '*.py', with: {item: './{item}'}")[0] == {"item": "./a.py"}
    assert arguments(files, "agent: think, each: '*.py'") == [{}, {}]


def test_truth_values_reach_a_command_as_the_file_spells_them(tmp_path: Path) -> None:
    assert arguments(tmp_path, "agent: lint, with: {flag: true, path: 3}") == [{"flag": "true", "path": 3}]
    assert arguments(tmp_path, "agent: think, with: {flag: true}") == [{"flag": True}]


@pytest.mark.requirement("B38")
def test_runs_stand_behind_what_they_come_after(files: Path) -> None:
    made = plan(
        files,
        "{name: last, agent: merge, after: [mid, first]}",
        "{name: mid, agent: lint, each: '*.py', as: path, with: {flag: 1}, after: first}",
        "{name: first, agent: think}",
    )
    assert names(made) == ["first", "mid[a.py]", "mid[b.py]", "last"]
    assert [run.after for run in made.runs] == [(), ("first",), ("first",), ("mid[a.py]", "mid[b.py]", "first")]
    assert made.runs[1].after is made.runs[2].after


def test_an_each_that_finds_nothing_is_said_and_counts_as_done(tmp_path: Path) -> None:
    made = plan(tmp_path, "{name: a, agent: think, each: '*.none'}", "{name: b, agent: merge, after: a}")
    assert names(made) == ["b"]
    assert made.runs[0].after == ()
    assert made.notes[0] == "run 'a' has nothing to do: its 'each' found nothing, and counts as done"


def test_what_a_limit_leaves_out_and_agents_without_runs_are_said(files: Path) -> None:
    made = plan(files, "{name: a, agent: show, each: {glob: '*.py', limit: 1}}")
    assert made.notes == (
        "run 'a' takes 1 of 2 items, as 'limit' says",
        "agent 'lint' is used by no run",
        "agent 'merge' is used by no run",
        "agent 'think' is used by no run",
    )


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (
            "agent: show, each: [[x]]",
            r"audit.yaml:7: runs\[0\]: field 'item' .* must be a text.*\(with item = \[\"x\"\]\)",
        ),
        ('agent: show, each: ["a\\0b"]', r"audit.yaml:7: runs\[0\]: the value of field 'item' .* NUL"),
        (
            "agent: think, each: [{a: 1}, {b: 1}], with: {v: '{item.a}'}",
            r"runs\[0\].with: the item has no 'a'.*\{\"b\": 1\}",
        ),
        (
            "agent: think, each: [x], with: {v: '{item.a}'}",
            r"runs\[0\].with: the item has no 'a', which \{item.a\} asks",
        ),
        (
            "agent: think, each: {lines: [no-such-program-x]}",
            r"audit.yaml:7: runs\[0\].each.lines: 'no-such-program-x' cannot",
        ),
    ],
)
def test_what_only_shows_in_the_workspace_names_file_line_and_field_too(tmp_path: Path, run: str, told: str) -> None:
    with pytest.raises(SwarmFileError, match=told) as caught:
        plan(tmp_path, f"{{name: a, {run}}}")
    assert vars(caught.value)["problems"] == (str(caught.value),)


def test_too_many_runs_and_dependencies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ("{name: a, agent: think, each: [1, 2, 3]}", "{name: b, agent: think, each: [1, 2, 3], after: a}")
    assert len(plan(tmp_path, *runs).runs) == 6
    monkeypatch.setattr(plan_module, "MAX_DEPENDENCIES", 8)
    with pytest.raises(SwarmFileError, match=r"runs\[1\]\.after: makes more than 8 dependencies; put one run between"):
        plan(tmp_path, *runs)
    monkeypatch.setattr(plan_module, "MAX_ITEMS", 5)
    monkeypatch.setattr(plan_module, "MAX_DEPENDENCIES", 9)
    with pytest.raises(SwarmFileError, match="come to more than 5 runs"):
        plan(tmp_path, *runs)


@pytest.mark.parametrize("kind", ["none", "file"])
def test_a_workspace_that_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=f"{kind}' is not a folder"):
        plan(tmp_path / kind, "{name: a, agent: think}")


def test_a_model_made_by_hand_is_checked_too(tmp_path: Path) -> None:
    model = SwarmFile.model_validate({"agents": {"a": {"python": "m:f"}}, "runs": [{"name": "r", "agent": "b"}]})
    with pytest.raises(SwarmFileError, match=r"runs\.0\.agent: no agent named 'b'; agents are a"):
        build_plan(model, tmp_path)


def test_policies_are_rules_and_words_are_short_for_one() -> None:
    rules = '[{action: "git push*", answer: deny, reason: no}, {action: "git *", answer: approve}]'
    model = parse_swarm(
        f"approvals: {rules}\n{AGENTS}runs:\n"
        "  - {name: a, agent: think, approvals: auto}\n  - {name: b, agent: think, approvals: deny}\n"
        "  - {name: c, agent: think, approvals: ask}\n  - {name: d, agent: think}\n"
    )
    made = build_plan(model, Path())
    assert made.approvals == (ApprovalRule("git push*", "deny", "no"), ApprovalRule("git *", "approve"))
    every = {run.name: run.approvals for run in made.runs}
    word = {"a": "approve", "b": "deny", "c": "ask"}
    assert every == {"d": (), **{name: (ApprovalRule("*", answer),) for name, answer in word.items()}}
    assert build_plan(parse_swarm(f"{AGENTS}runs:\n  - {{name: a, agent: think}}\n"), Path()).approvals == ()


@pytest.mark.requirement("B39")
def test_claims_are_filled_with_the_item_and_its_wildcards_are_plain_in_a_pattern(tmp_path: Path) -> None:
    run = '{name: a, agent: think, each: ["x[1].py"], claims: ["write src/{item}", "read glob {item}/*", exclusive]}'
    (made,) = plan(tmp_path, run).runs
    assert made.claims == (write("src/x[1].py"), read(glob="x[[]1].py/*"), exclusive())
    (bare,) = plan(tmp_path, "{name: a, agent: think}").runs
    assert bare.claims == ()


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        ("[lock src]", "runs[0].claims[0]: must be 'write PATH'"),
        ("write", "runs[0].claims: must be 'write PATH'"),
        ("'write {thing}'", "nothing fills {thing}"),
        ("write ../x", "runs[0].claims: '../x' leads out of the workspace"),
        ("write /etc", "runs[0].claims: '/etc' leads out of the workspace"),
        ("'read glob [z-a]'", "runs[0].claims: '[z-a]' holds a class that no character is in"),
        ('"write a\\0b"', "runs[0].claims: 'a\\x00b' holds a NUL character"),
    ],
)
def test_a_claim_that_cannot_be_is_told_with_its_place(tmp_path: Path, claims: str, told: str) -> None:
    with pytest.raises(SwarmFileError) as caught:
        plan(tmp_path, f"{{name: a, agent: think, claims: {claims}}}")
    assert told in str(caught.value)
