"""`ps`, `tree`, `result` and `logs`: they read the journal and the output files, and start nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import invoke

SWARM = """
version: 1
name: talk
agents:
  both: {command: [sh, -c, "echo out {word}; echo err {word} >&2; exit {code}"], shell: false}
runs:
  - {name: good, agent: both, with: {word: one, code: 0}}
  - {name: bad, agent: both, with: {word: two, code: 3}}
"""


@pytest.fixture
def talk(command: Any, tmp_path: Path) -> dict[str, str]:
    """Run two programs, one of which fails; return ids by name."""
    path = tmp_path / "swarm.yaml"
    path.write_text(SWARM)
    document = command.json("run", str(path), status=1)
    return {run["name"]: run["id"] for run in document["runs"]} | {"turn": document["turn"]}


def test_looking_at_a_workspace_where_nothing_has_run_says_so(tmp_path: Path) -> None:
    result = invoke(["ps", "-w", str(tmp_path)])
    assert result.exit_code == 0
    assert "nothing has run" in result.stdout
    assert not (tmp_path / ".remit").exists(), "looking leaves nothing behind"
    assert invoke(["tree", "-w", str(tmp_path)]).exit_code == 2


def test_looking_needs_no_connection(command: Any, talk: dict[str, str]) -> None:
    before = command.opened
    for words in (["ps"], ["tree"], ["tree", talk["bad"]], ["result", talk["good"]], ["logs", talk["turn"]]):
        assert command(*words).exit_code == 0
    assert command.opened == before


def test_ps_counts_runs_by_outcome(command: Any, talk: dict[str, str]) -> None:
    result = command("ps")
    assert "x talk  failed, " in result.stdout
    assert "[1 failed, 1 succeeded]" in result.stdout
    (turn,) = command.json("ps")["turns"]
    assert (turn["id"], turn["runs"], turn["outcome"]) == (talk["turn"], 2, "failed")


def test_names_and_errors_of_others_break_no_line_and_command_no_terminal(command: Any) -> None:
    odd = "a\n\x1b[2Jb\udcff"

    async def failing() -> None:
        async with command.system.coordinator() as coordinator:
            with contextlib.suppress(OSError):
                async with coordinator.turn(odd, session=odd):
                    raise OSError(odd)

    asyncio.run(failing())
    for words in (["ps"], ["tree"], ["sessions"]):
        shown = command(*words).stdout
        assert "a\\n\\x1b[2Jb\\udcff" in shown
        assert len(shown.splitlines()) == 1
        assert "\x1b" not in shown
    assert command.json("ps")["turns"][0]["name"] == odd


def test_ps_leaves_old_turns_out_unless_asked(command: Any) -> None:
    async def twelve() -> None:
        async with command.system.coordinator() as coordinator:
            for number in range(12):
                async with coordinator.turn(f"turn{number}"):
                    pass

    asyncio.run(twelve())
    short = command("ps").stdout
    assert "turn11" in short
    assert "turn0 " not in short
    assert "2 older ones; --all shows them" in short
    assert "turn0 " in command("ps", "--all").stdout


def test_tree_shows_the_latest_turn_with_reasons(command: Any, talk: dict[str, str]) -> None:
    lines = command("tree").stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("x talk  failed")
    assert lines[1].startswith("  + good (both)  succeeded")
    assert "status 3" in lines[2]
    assert lines[2].endswith(talk["bad"])


@pytest.mark.parametrize("verb", ["tree", "result", "cancel", "logs"])
def test_a_variable_that_was_never_filled_in_means_no_run(command: Any, verb: str) -> None:
    """An empty text is part of every id: with one turn it would mean that one."""
    command("run", command.target("add"), "a=1")
    for text, told in (("", "the id is empty"), ("\udcff", "no turn or run")):
        result = command(verb, text)
        assert (result.exit_code, told in result.stderr) == (2, True), (result.output, result.stderr)


def test_a_part_of_an_id_and_a_unique_name_will_do(command: Any, talk: dict[str, str]) -> None:
    assert command.json("result", talk["good"][-6:])["id"] == talk["good"]
    assert command.json("result", "good")["id"] == talk["good"]
    several = command("result", "run_")
    assert several.exit_code == 2
    assert "may mean 2 turns or runs" in several.stderr
    nothing = command("result", "run_none")
    assert nothing.exit_code == 2
    assert "remit ps --all" in nothing.stderr


def test_the_result_of_a_program_is_what_it_wrote(command: Any, talk: dict[str, str]) -> None:
    result = command("result", talk["good"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out one\n", "err one\n")
    assert command.json("result", talk["good"])["value"]["exit_code"] == 0


def test_the_result_of_a_failed_run_is_its_error_and_exit_status(command: Any, talk: dict[str, str]) -> None:
    result = command("result", talk["bad"])
    assert result.exit_code == 1
    assert "failed" in result.stderr
    assert "status 3" in result.stderr


@pytest.mark.requirement("D9")
@pytest.mark.field_report("E12")
def test_the_result_of_a_cancelled_run_is_its_cause_and_what_it_had(command: Any) -> None:
    command("run", command.target("wait"), "--detach")
    assert command.agents.started.wait(20)
    run = command.json("tree")["nodes"][1]["id"]
    assert command("cancel", run, "--reason", "enough").exit_code == 0
    result = command("result", run)
    assert result.exit_code == 130
    assert "user_interrupt through cli: enough" in result.stderr
    assert "partial result, incomplete" in result.stderr
    assert command.json("result", run, status=130)["value"] == {"done": 3}


def test_a_result_of_an_unfinished_run_says_how_it_stands(command: Any) -> None:
    command("run", command.target("wait"), "--detach")
    assert command.agents.started.wait(20)
    result = command("result", command.json("tree")["nodes"][1]["id"])
    assert result.exit_code == 1
    assert "not ended: running" in result.stderr


def test_texts_and_data_are_printed_as_what_they_are(command: Any) -> None:
    command("run", command.target("words"))
    assert command("result", command.json("tree")["nodes"][1]["id"]).stdout == "two\nlines\n"


def test_logs_of_a_turn_name_the_run_of_each_line(command: Any, talk: dict[str, str]) -> None:
    lines = command("logs", talk["turn"]).stdout.splitlines()
    assert lines == ["good | out one", "good | err one", "bad | out two", "bad | err two"]
    assert command("logs", talk["bad"], "--stderr").stdout == "err two\n"


def test_what_a_body_logs_is_in_its_log(command: Any) -> None:
    command("run", command.target("talk"))
    run = command.json("tree")["nodes"][1]["id"]
    text = command("logs", run).stdout
    assert text.index("first word") < text.index("second word")
    assert command("logs", run, "--follow").stdout == text
    silent = command("logs", run, "--stderr")
    assert (silent.exit_code, silent.stdout, silent.stderr) == (0, "", "remit: nothing was written\n")


def test_what_has_not_ended_without_a_coordinator_is_shown_with_a_word_about_it(command: Any) -> None:
    command("run", command.target("wait"), "--detach")
    assert command.agents.started.wait(20)
    command.system.crash_coordinator()
    command.system.close()
    for verb in ("ps", "tree"):
        result = command(verb)
        assert result.stdout.splitlines()[0].startswith("no coordinator is at work here"), result.output
        assert "running" in result.stdout
    assert command.json("ps")["live"] is False
    stop = command("cancel", command.json("ps")["turns"][0]["id"])
    assert stop.exit_code == 2
    assert "no coordinator is at work" in stop.stderr


def test_the_schema_is_one_json_document() -> None:
    assert json.loads(invoke(["schema"]).stdout)["type"] == "object"
