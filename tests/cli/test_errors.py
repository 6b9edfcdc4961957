"""Bad input: one clear sentence, exit status 2, nothing started, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remit.cli import exits
from remit.core.errors import CoordinatorUnavailable, InternalError, RemitError, SessionBusy, TurnCancelled, UsageError
from remit.core.outcome import Outcome
from tests.cli.runner import invoke

HEAD = "version: 1\nname: bad\nagents:\n  echo: {command: [echo, '{word}']}\n"


def refused(command: Any, *words: str) -> str:
    """Run a command that must be refused; return the sentence."""
    result = command(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "run_accepted" not in {record.kind for record in command.system.journal.reader().read()}
    assert all(turn["outcome"] is not None for turn in command.json("ps")["turns"]), "nothing is left at work"
    sentences: str = result.stderr
    return sentences


def test_a_name_that_the_terminal_cannot_show_is_written_out(tmp_path: Path) -> None:
    folder = tmp_path / "w\u00fcst"
    folder.mkdir()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "remit", "ps", "-w", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"w\xfcst" in done.stdout


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ("  - {name: a, agent: nobody}\n", "nobody"),
        ("  - {name: a, agent: echo}\n", "word"),
        (
            "  - {name: a, agent: echo, with: {word: x}, after: b}\n"
            "  - {name: b, agent: echo, with: {word: x}, after: a}\n",
            "these runs wait for each other: a -> b -> a",
        ),
        ("  - {name: a, agent: echo, with: [1, 2]}\n", "with"),
        ("  - {name: a, agent: echo, with: {word: x}, deadline_s: soon}\n", "deadline_s"),
    ],
    ids=["unknown agent", "field missing from a template", "cycle", "wrong type", "wrong number"],
)
def test_a_swarm_file_that_does_not_hold_starts_nothing(command: Any, tmp_path: Path, runs: str, told: str) -> None:
    path = tmp_path / "swarm.yaml"
    path.write_text(HEAD + "runs:\n" + runs)
    sentence = refused(command, "run", str(path))
    assert told in sentence
    assert "swarm.yaml:" in sentence, "it names file and line"
    assert command.opened == 0, "no connection was made for it"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing_here:main"], "cannot import 'nothing_here'"),
        (["json:nothing"], "has no 'nothing'"),
        (["swarm"], "neither a file nor module:function"),
        (["missing.yaml"], "missing.yaml"),
        (["json:dumps", "a"], "not of the form key=value"),
        (["json:dumps", "--args", "[1]"], "must be a JSON mapping"),
        (["json:dumps", "--args", "{"], "not JSON"),
        (["json:dumps", "--deadline", "-1"], "deadline_s"),
    ],
)
def test_a_target_or_option_that_does_not_hold_starts_nothing(command: Any, words: list[str], told: str) -> None:
    sentence = refused(command, "run", *words)
    assert told in sentence
    assert sentence.count("\n") == 1


@pytest.mark.requirement("B38")
def test_arguments_that_do_not_fit_the_function_start_nothing(command: Any) -> None:
    assert "b" in refused(command, "run", command.target("add"), "wrong=1")


def test_a_module_that_breaks_on_import_is_named_without_a_traceback(command: Any) -> None:
    Path("breaks_on_import.py").write_text("1 / 0\n")
    result = command("run", "breaks_on_import:main")
    assert result.exit_code == 2, result.output
    assert "breaks_on_import" in result.stderr
    assert "division by zero" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["ps", "run"])
def test_a_workspace_that_cannot_be_used_is_named(tmp_path: Path, verb: str) -> None:
    words = ["json:dumps"] if verb == "run" else []
    missing = invoke([verb, "-w", str(tmp_path / "missing"), *words])
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "does not exist" in missing.stderr
    file = tmp_path / "file"
    file.touch()
    no_folder = invoke([verb, "-w", str(file), *words])
    assert no_folder.exit_code == 2
    assert "is not a folder" in no_folder.stderr


def test_no_ray_at_the_address_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = invoke(["run", "json:dumps", "-w", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "127.0.0.1:1" in result.stderr
    assert "RAY_ADDRESS" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_address_given_by_hand_is_used(command: Any) -> None:
    assert "nowhere:1" in refused(command, "run", command.target("add"), "a=1", "--address", "nowhere:1")


def test_a_cancelled_delegation_or_a_policy_is_no_usage_error() -> None:
    assert exits.of_error(SessionBusy("busy")) == exits.FAILED
    assert exits.of_error(InternalError("broken")) == exits.FAILED
    assert exits.of_error(TurnCancelled()) == exits.CANCELLED
    assert exits.of_error(CoordinatorUnavailable("no Ray")) == exits.USAGE


def _below(kind: type[RemitError]) -> list[type[RemitError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _below(child))]


@pytest.mark.parametrize("kind", _below(UsageError))
def test_every_mistake_of_the_caller_exits_with_two(kind: type[RemitError]) -> None:
    error = kind.__new__(kind)
    assert exits.of_error(error) == exits.USAGE


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.SUCCEEDED, 0),
        (Outcome.FAILED, 1),
        (Outcome.LOST, 1),
        (Outcome.TIMED_OUT, 124),
        (Outcome.CANCELLED, 130),
        (None, 1),
    ],
)
def test_the_exit_status_says_the_outcome(outcome: Outcome | None, status: int) -> None:
    assert exits.of_outcome(outcome) == status


def test_an_unforeseen_error_is_a_sentence_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended, exits.reported():
        raise ZeroDivisionError("by nought")
    assert ended.value.code == exits.FAILED
    assert capsys.readouterr().err == "remit: ZeroDivisionError: by nought (REMIT_DEBUG=1 shows where)\n"
    monkeypatch.setenv("REMIT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError), exits.reported():
        raise ZeroDivisionError("by nought")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['remit', '--help']\n"
        "from remit.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'ray', 'pydantic', 'yaml', 'rich.console', 'opentelemetry.sdk'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "remit", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cancel" in done.stdout
