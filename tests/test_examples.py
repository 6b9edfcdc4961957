"""The examples do what they say, on the in-process engine."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from remit.agents import RunOptions
from remit.cli.swarm import PlannedPython, build_plan, load_swarm_file
from remit.core import Outcome
from remit.testing.inprocess import open_inprocess

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.slow

PLANTED = {
    "src/good.py": '"""Fine."""\n\n\ndef one() -> int:\n    """Return one."""\n    return 1\n',
    "src/odd.py": "def two(x=[]):\n    try:\n        return x\n    except:\n        pass\n    # TODO: say more   \n",
    "src/broken.py": "def three(:\n",
    "tests/test_good.py": "from src.good import one\n\n\ndef test_one():\n    assert one() == 1\n",
    "name with blanks.md": "some words\n",
}


def checkout(folder: Path, *, git: bool) -> None:
    """Make a small checkout with known faults."""
    for name, text in PLANTED.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if git:
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "Begin"]):
            subprocess.run(["git", *words], cwd=folder, check=True, stdin=subprocess.DEVNULL)


def audit(workspace: Path) -> tuple[list[Outcome | None], int]:
    """Carry out examples/audit.yaml; return the outcomes of its runs and how many runs there were in all."""
    plan = build_plan(load_swarm_file(EXAMPLES / "audit.yaml"), workspace)
    places = {agent.name: agent.reference for agent in plan.agents if isinstance(agent, PlannedPython)}
    outcomes: list[Outcome | None] = []
    counts: list[int] = []

    async def main() -> None:
        with open_inprocess(workspace) as system:
            async with system.coordinator() as coordinator, coordinator.turn("audit") as turn:
                request, runs = turn.prepare(
                    [places[run.agent] for run in plan.runs],
                    [run.arguments for run in plan.runs],
                    [RunOptions(name=run.name, after=run.after, claims=run.claims) for run in plan.runs],
                )
                await turn.send(request, runs)
                outcomes.extend(await turn.gather(*runs, return_outcomes=True))
                counts.append(len(await coordinator.runs()))

    asyncio.run(main())
    return outcomes, counts[0]


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs a swarm file puts its folder on the import path.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.invalidate_caches()


def test_the_audit_finds_what_is_there_with_more_than_twenty_sub_agents(tmp_path: Path) -> None:
    checkout(tmp_path, git=True)
    outcomes, count = audit(tmp_path)
    assert set(outcomes) == {Outcome.SUCCEEDED}
    assert count > len(outcomes) + 20
    report = (tmp_path / "audit.md").read_text()
    for told in (
        "**5 files, 19 lines**",
        "`src/broken.py:1` does not parse",
        "`src/odd.py:4`: `except:` catches",
        "`two` has a default that all calls share",
        "`src/odd.py:6` # TODO: say more",
        "1 trailing blanks",
        "1 commit by 1 author",
        "`src/odd.py`",
    ):
        assert told in report
    assert "not looked at" not in report


def test_the_audit_of_a_folder_without_git_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    checkout(tmp_path, git=False)
    outcomes, _ = audit(tmp_path)
    assert set(outcomes) == {Outcome.SUCCEEDED}
    report = (tmp_path / "audit.md").read_text()
    assert "**5 files, 19 lines**" in report
    assert "not a git checkout" in report
    assert "## History" not in report


def test_the_audit_of_an_empty_folder_is_a_report_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    outcomes, _ = audit(tmp_path)
    assert set(outcomes) == {Outcome.SUCCEEDED}
    assert "**0 files, 0 lines**" in (tmp_path / "audit.md").read_text()


def test_the_checks_of_the_audit_say_how_to_call_them() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "audit_checks.py"), "nonsense"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    assert "neither 'outline' nor 'repeats'" in done.stderr
