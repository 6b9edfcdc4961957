"""The command in this process: real verbs, a real journal file, the in-process engine instead of Ray."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from remit.coordinator import Coordinator
from remit.coordinator.life import journal_path
from remit.core.errors import CoordinatorUnavailable
from remit.journal import SqliteJournal
from remit.testing.inprocess import InProcess
from tests.cli.runner import Result, invoke

AGENTS = """
import threading

from remit.agents import agent

started = threading.Event()
stopping = threading.Event()
release = threading.Event()


@agent
async def add(ctx, a: int, b: int = 1):
    return a + b


@agent
async def words(ctx):
    return "two\\nlines"


@agent
async def talk(ctx):
    ctx.log("first word")
    ctx.log("second word")


@agent
async def wait(ctx):
    started.set()
    ctx.partial({"done": 3})
    await ctx.sleep(600)


@agent
async def fail(ctx):
    raise ValueError("no bread")


@agent
async def large(ctx):
    return "x" * 5000


@agent
async def hurry(ctx):
    await ctx.sleep(600)


@agent
async def parent(ctx):
    runs = await ctx.delegate_many(wait, [{}, {}])
    await ctx.gather(*runs)


@agent
def deaf(ctx):
    started.set()
    ctx.signal.wait_blocking(60)
    stopping.set()
    release.wait(60)
"""


@dataclass(slots=True)
class Command:
    """One workspace, one coordinator in this process, and the command on both."""

    system: InProcess
    workspace: Path
    agents: ModuleType
    """The module that `target` names functions of."""
    opened: int = 0
    """How often a verb has connected."""

    def target(self, function: str) -> str:
        """Return `module:function`."""
        return f"{self.agents.__name__}:{function}"

    def open(self, workspace: str, *, address: str | None, start: bool) -> Coordinator:
        """Connect a verb, as `remit.cli.connect.open_on_ray` does."""
        self.opened += 1
        if address == "nowhere:1":
            raise CoordinatorUnavailable("no Ray at nowhere:1")
        return self.system.coordinator(surface="cli")

    def __call__(self, *words: str) -> Result:
        """Run the command; its output is not a terminal."""
        verb, *rest = words
        return invoke([verb, "-w", str(self.workspace), *rest], obj=self.open)

    def json(self, *words: str, status: int = 0) -> Any:
        """Run the command with `--json` and return the document."""
        result = self(*words, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)


@pytest.fixture
def make_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Command]]:
    """Make commands on coordinators of given settings; all are closed at the end."""
    made: list[Command] = []
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(**settings: Any) -> Command:
        number = len(sys.modules)
        name = f"cli_agents_{number}"
        (folder / f"{name}.py").write_text(AGENTS)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        workspace = tmp_path / f"workspace_{number}"
        workspace.mkdir()
        journal = SqliteJournal.open(journal_path(workspace))
        command = Command(
            InProcess(workspace, journal=journal, poll_s=0.1, **settings), workspace, importlib.import_module(name)
        )
        made.append(command)
        return command

    yield make
    for command in made:
        command.agents.release.set()
        command.system.close()
        del sys.modules[command.agents.__name__]


@pytest.fixture
def command(make_command: Callable[..., Command]) -> Command:
    """Return the command on a coordinator with default settings."""
    return make_command()
