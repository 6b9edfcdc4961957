"""`remit processes`, `remit kill` and the leftovers of `remit doctor`, on the real daemon of this test process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.agents.tooldesk import scope_of
from remit.core.ids import IdFactory
from remit.processes import JobSpec, ProcessClient, StartAnswer
from remit.processes.place import Place
from remit.testing import wait_until
from tests.agents.git_world import Repository
from tests.cli.runner import Result, invoke

LIMIT_S = 40.0


class Scene:
    """One workspace, and what is started in its name."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.client = ProcessClient()
        self.ids = IdFactory()

    def start(self, *argv: str, workspace: Path | None = None, **fields: Any) -> StartAnswer:
        """Start a program as an agent of the workspace would."""
        job = str(fields.pop("job", self.ids.new("proc")))
        owner: dict[str, Any] = {"session": "s1", "turn": "turn_1", "run": "run_1"}
        spec = JobSpec(
            job=job,
            scope=scope_of(workspace or self.workspace),
            argv=argv,
            output_dir=str(self.workspace / "out" / job),
            **{**owner, **fields},
        )
        return self.client.start(spec, env={"PATH": os.environ["PATH"]})

    def __call__(self, verb: str, *words: str) -> Result:
        """Run the command; its output is not a terminal."""
        return invoke([verb, "-w", str(self.workspace), *words])

    def json(self, verb: str, *words: str, status: int = 0) -> Any:
        """Run the command with `--json` and return the document."""
        result = self(verb, *words, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    def kill_daemon(self) -> None:
        """Kill the daemon with -9 and wait until it is gone."""
        process = psutil.Process(int(Place().life_lock.read_text()))
        process.kill()
        wait_until(lambda: not is_alive(process.pid), timeout_s=LIMIT_S)

    def close(self) -> None:
        """End what is left of this workspace, and of the other one."""
        for view in self.client.list():
            if view.state != "ended" and view.output_dir.startswith(str(self.workspace)):
                self.client.stop(scope=view.scope, job=view.job, kill=True)
        self.client.close()


def is_alive(pid: int) -> bool:
    """Tell whether a process lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Return a workspace with nothing running in it."""
    scene = Scene(tmp_path)
    yield scene
    scene.close()


# -- remit processes --------------------------------------------------------------------


@pytest.mark.requirement("A16")
def test_programs_are_listed_with_whom_they_belong_to(scene: Scene, tmp_path: Path) -> None:
    front = scene.start("sleep", "600")
    behind = scene.start("sleep", "601", background=True)
    scene.start("sleep", "602", workspace=tmp_path / "elsewhere")
    lines = scene("processes").stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{front.job}  running  foreground  pid {front.pid}  ")
    assert lines[0].endswith("  run_1  sleep 600")
    assert lines[1].startswith(f"{behind.job}  running  background  ")
    assert lines[1].endswith("  session s1  sleep 601")
    assert "sleep 602" in scene("processes", "--everywhere").stdout


def test_programs_as_json_show_neither_key_nor_scope(scene: Scene) -> None:
    answer = scene.start("sleep", "600", key="secret-key")
    (view,) = scene.json("processes")
    assert (view["job"], view["pid"], view["argv"], view["state"]) == (
        answer.job,
        answer.pid,
        ["sleep", "600"],
        "running",
    )
    assert not {"key", "scope"} & set(view)


def test_ended_programs_are_shown_when_asked_for(scene: Scene) -> None:
    answer = scene.start("sh", "-c", "exit 3")
    scene.client.wait(answer.job, timeout_s=LIMIT_S)
    assert scene("processes").stdout == f"no program of {scene.workspace} is running on this machine\n"
    assert f"{answer.job}  exited  " in scene("processes", "--all").stdout
    (view,) = scene.json("processes", "-a")
    assert (view["state"], view["result"]["exit_code"]) == ("ended", 3)


def test_without_a_daemon_nothing_runs_and_none_is_started(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMIT_STATE_DIR", str(tmp_path / "none"))
    assert "is running on this machine" in scene("processes").stdout
    assert scene.json("processes", "--everywhere") == []
    assert not (tmp_path / "none").exists()


# -- remit kill -------------------------------------------------------------------------


@pytest.mark.requirement("A17")
def test_a_program_is_stopped_by_its_handle_with_its_tree(scene: Scene) -> None:
    answer = scene.start("sh", "-c", "sleep 600 & wait", background=True)
    wait_until(lambda: bool(psutil.Process(answer.pid).children()), timeout_s=LIMIT_S)
    (child,) = psutil.Process(answer.pid).children()
    result = scene("kill", answer.job)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{answer.job} is stopped with everything below it: ")
    assert result.stdout.endswith("ended on SIGTERM\n")
    assert not is_alive(answer.pid)
    assert not is_alive(child.pid)
    again = scene("kill", answer.job)
    assert (again.exit_code, again.stdout) == (0, f"{answer.job} had ended already\n")


def test_a_unique_part_of_a_handle_is_enough_and_now_skips_the_grace(scene: Scene) -> None:
    answer = scene.start("sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 60; done", job="proc_aaa1")
    out = scene.workspace / "out" / answer.job / "stdout"
    wait_until(lambda: out.exists() and bool(out.read_text()), timeout_s=LIMIT_S)
    told = scene.json("kill", "aaa", "--now", "--grace", "600")
    assert (told["kind"], told["job"], told["result"]["signal"]) == ("stopped", answer.job, 9)
    assert not is_alive(answer.pid)


def test_an_ambiguous_handle_stops_nothing(scene: Scene) -> None:
    started = [scene.start("sleep", "600", job=f"proc_bbb{number}") for number in range(2)]
    result = scene("kill", "bbb")
    assert result.exit_code == 2
    assert "'bbb' is part of 2 handles: proc_bbb0, proc_bbb1; give more of it" in " ".join(result.stderr.split())
    assert all(is_alive(answer.pid) for answer in started)


@pytest.mark.requirement("C8")
def test_an_unknown_handle_and_one_of_another_workspace_are_not_found(scene: Scene, tmp_path: Path) -> None:
    foreign = scene.start("sleep", "600", workspace=tmp_path / "elsewhere")
    for handle in ("proc_none", foreign.job):
        result = scene("kill", handle)
        assert result.exit_code != 0
        assert f"no program '{handle}' of {scene.workspace} on this machine; see `remit processes`" in result.stderr
        assert scene("kill", handle, "--json").exit_code == result.exit_code
    assert is_alive(foreign.pid)


def test_a_variable_that_was_never_filled_in_kills_nothing(scene: Scene) -> None:
    answer = scene.start("sleep", "600")
    result = scene("kill", "")
    assert (result.exit_code, "the handle is empty" in result.stderr) == (2, True), result.output
    assert is_alive(answer.pid)


# -- remit doctor -----------------------------------------------------------------------


def _findings(scene: Scene, job: str) -> list[str]:
    result = scene("doctor", "--json")
    return [finding["text"] for finding in json.loads(result.stdout) if job in finding["text"]]


@pytest.mark.field_report("G14")
def test_git_locks_are_named_with_what_is_known_of_them_and_left_alone(scene: Scene) -> None:
    repository = Repository(scene.workspace)
    assert _findings(scene, "git lock") == []
    lock = repository.data / "index.lock"
    lock.touch()
    told = f"git lock {lock}: nobody knows whose it is; if no git is at work there, remove the file"
    assert _findings(scene, "git lock") == [told]
    with lock.open():
        (told,) = _findings(scene, "git lock")
        assert f"({os.getpid()}) has it open" in told
    assert lock.exists()


def test_a_leftover_is_shown_with_its_run_and_adopted(scene: Scene) -> None:
    answer = scene.start("sleep", "600", background=True)
    assert _findings(scene, answer.job) == []
    scene.kill_daemon()
    (text,) = _findings(scene, answer.job)
    assert f"leftover {answer.job} of session s1 (orphan): sleep 600, processes {answer.pid}" in text
    result = scene("doctor", "--adopt", answer.job)
    assert (result.exit_code, answer.job in result.stdout) == (0, True)
    assert _findings(scene, answer.job) == []
    assert is_alive(answer.pid)
    assert answer.job in scene("processes").stdout


def test_a_leftover_is_ended(scene: Scene) -> None:
    answer = scene.start("sleep", "600", background=True)
    scene.kill_daemon()
    result = scene("doctor", "--kill", answer.job)
    assert (result.exit_code, result.stdout) == (0, f"{answer.job} is gone\n")
    assert not is_alive(answer.pid)
    assert _findings(scene, answer.job) == []


def test_a_leftover_is_ignored_and_still_runs(scene: Scene) -> None:
    answer = scene.start("sleep", "600", background=True)
    scene.kill_daemon()
    result = scene("doctor", "--ignore", answer.job)
    assert (result.exit_code, result.stdout) == (0, f"{answer.job} is not shown again\n")
    assert _findings(scene, answer.job) == []
    assert is_alive(answer.pid)


def test_a_leftover_that_could_not_be_ended_is_no_success(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = scene.start("sleep", "600", background=True)
    scene.kill_daemon()

    def fail(place: Place, job: str) -> tuple[int, ...]:
        return (answer.pid,)

    monkeypatch.setattr("remit.cli.tools.kill_leftover", fail)
    result = scene("doctor", "--kill", answer.job)
    assert (result.exit_code, result.stdout) == (1, f"{answer.job}: LEFT {answer.pid}\n")


@pytest.mark.parametrize("option", ["--adopt", "--kill", "--ignore"])
def test_what_is_no_leftover_is_not_treated(scene: Scene, option: str) -> None:
    answer = scene.start("sleep", "600")
    for job in (answer.job, "proc_none"):
        result = scene("doctor", option, job)
        assert result.exit_code != 0
        assert f"there is no leftover '{job}'; `remit doctor` lists them" in result.stderr
    assert is_alive(answer.pid)


# -- help -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("processes", ["--everywhere", "--all", "--json", "(background)"]),
        ("kill", ["handle", "--grace", "--now", "--json", "with proof"]),
        ("doctor", ["--adopt", "--kill", "--ignore", "leftover"]),
    ],
)
def test_help_names_every_option(verb: str, words: list[str]) -> None:
    result = invoke([verb, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0
    assert [word for word in words if word.lower() not in result.stdout.lower()] == []
