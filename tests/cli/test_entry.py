"""Where the command begins: the short way of `ps` and `tree` knows what the long way knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from remit.cli.entry import PlainCall, plain_call
from remit.cli.main import app


def options_of(verb: str) -> dict[str, tuple[str, bool]]:
    """Return what the long way knows of a verb: spelling -> (name, whether a value follows)."""
    group: Any = typer.main.get_command(app)
    found = {}
    for parameter in group.commands[verb].params:
        takes = not getattr(parameter, "is_flag", False)
        for spelling in parameter.opts if parameter.param_type_name == "option" else ():
            found[spelling] = (parameter.name, takes)
    return found


@pytest.mark.parametrize("verb", ["ps", "tree"])
def test_every_option_of_a_short_verb_is_read_the_short_way_too(verb: str) -> None:
    for spelling, (name, takes) in options_of(verb).items():
        if name == "help":
            continue
        call = plain_call([verb, spelling, *(["/x"] if takes else [])])
        assert call is not None, spelling
        assert getattr(call, name) == (Path("/x") if takes else True)


def test_a_target_may_stand_anywhere() -> None:
    expected = PlainCall("tree", target="run_1", workspace=Path("w"))
    assert plain_call(["tree", "run_1", "-w", "w"]) == expected
    assert plain_call(["tree", "-w", "w", "run_1"]) == expected


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["ps", "--help"],
        ["ps", "-h"],
        ["ps", "turn_1"],
        ["ps", "-w"],
        ["tree", "--all"],
        ["tree", "one", "two"],
        ["tree", "--", "one"],
        ["run", "swarm.yaml"],
    ],
)
def test_what_takes_more_to_read_goes_the_long_way(words: list[str]) -> None:
    assert plain_call(words) is None


def test_looking_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['remit', 'ps', '-w', {str(tmp_path)!r}]\n"
        "from remit.cli.entry import main\n"
        "main()\n"
        "heavy = {'ray', 'typer', 'pydantic', 'yaml', 'rich', 'psutil', 'cloudpickle', 'opentelemetry', 'anyio'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "ours = {'remit.agents.client', 'remit.agents.context', 'remit.processes', 'remit.coordinator.api'}\n"
        "assert not ours & set(sys.modules), ours & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing has run" in done.stdout


def test_a_mistake_on_the_short_way_is_told_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "remit", "tree", "-w", str(tmp_path / "nowhere")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("remit: workspace ")
    assert done.stderr.count("\n") == 1


def test_help_is_what_it_was() -> None:
    done = subprocess.run([sys.executable, "-m", "remit", "ps", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--all" in done.stdout
