"""The command on real Ray, in shells of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.cli.records import Records, opened
from remit.coordinator.state import Node, NodeState
from remit.core.errors import JournalError
from remit.testing.wait import wait_until

pytestmark = pytest.mark.slow

AGENTS = """
from remit.agents import CommandAgent, agent

program = CommandAgent(["sleep", "300"], name="program")


@agent
async def quick(ctx, a: int):
    return a + 1


@agent
async def nap(ctx):
    await ctx.sleep(300)


@agent
async def parent(ctx):
    runs = await ctx.delegate_many(nap, [{}, {}, {}])
    runs += await ctx.delegate_many(program, [{}, {}])
    await ctx.gather(*runs)
"""
BELOW_PARENT = 6
# Of the wait for the machine; what is promised is said where it is asserted.
_PATIENCE_S = 60.0


class Shell:
    """One process whose output goes to a terminal of 24 lines."""

    def __init__(self, words: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.process = subprocess.Popen(
            words, cwd=cwd, env={**env, "TERM": "xterm"}, stdin=subprocess.DEVNULL, stdout=inside, stderr=inside
        )
        os.close(inside)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # nobody has the other end open any more
                return
            if not data:
                return
            self._written += data

    def wait(self, timeout_s: float = _PATIENCE_S) -> int:
        """Wait for the end of the process and of its output; return the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    @property
    def text(self) -> str:
        """What was written, without colours and movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._written.decode("utf-8", "replace")).replace("\r", "")

    def close(self) -> None:
        """End the process if it is there, and let go of the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5.0)
        os.close(self._terminal)


class Shells:
    """Shells in one workspace."""

    def __init__(self, workspace: Path, env: dict[str, str]) -> None:
        self.workspace = workspace
        self._env = env
        (workspace / "shell_agents.py").write_text(AGENTS)

    def _words(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "remit", *words]

    @contextmanager
    def terminal(self, *words: str) -> Iterator[Shell]:
        """Run the command in a terminal for the time of a block."""
        shell = Shell(self._words(words), cwd=self.workspace, env=self._env)
        try:
            yield shell
        finally:
            shell.close()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            self._words(words),
            cwd=self.workspace,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )

    def look(self, question: Callable[[Records], Any]) -> Any:
        """Ask the workspace's journal."""
        with opened(self.workspace) as records:
            return question(records)

    def node(self, node_id: str) -> Node:
        """Return a turn or run as it stands."""
        found: Node = self.look(lambda records: records.find(node_id))
        return found

    def turn_named(self, name: str, *, runs: int) -> str:
        """Wait until the turn of this name has so many runs at work; return its id."""
        found: list[str] = []

        def find(records: Records) -> None:
            for turn in records.state.turns.values():
                below = [n for n in records.state.nodes.values() if n.turn_id == turn.id and not n.is_turn]
                busy = [n for n in below if n.state is NodeState.RUNNING or n.waiting_on]
                if turn.name == name and len(busy) >= runs:
                    found.append(turn.id)

        def is_at_work() -> bool:
            try:
                self.look(find)
            except JournalError:  # it is being made at this moment
                return False
            return bool(found)

        wait_until(is_at_work, timeout_s=_PATIENCE_S, message=f"{runs} runs of {name} at work")
        return found[0]

    def programs(self, turn_id: str) -> list[int]:
        """Return the process ids of the programs of a turn, as recorded."""

        def ask(records: Records) -> list[int]:
            nodes = records.state.nodes.values()
            return [p.pid for n in nodes if n.turn_id == turn_id for p in (n.processes or {}).values()]

        found: list[int] = self.look(ask)
        return found


@pytest.fixture(scope="module")
def shells(ray_node: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Shells:
    return Shells(tmp_path_factory.mktemp("shells"), ray_node)


@pytest.mark.requirement("D20")
@pytest.mark.requirement("B5")
@pytest.mark.field_report("M9")
def test_a_cancel_from_a_second_shell_is_agreed_on_by_both(shells: Shells) -> None:
    with shells.terminal("run", "shell_agents:parent", "--name", "two shells") as first:
        turn = shells.turn_named("two shells", runs=BELOW_PARENT)
        wait_until(lambda: len(shells.programs(turn)) == 2, timeout_s=_PATIENCE_S)
        programs = shells.programs(turn)
        second = shells.run("cancel", turn, "--reason", "wrong folder", "--json")
        assert second.returncode == 0, second.stderr
        receipt = json.loads(second.stdout)
        assert (receipt["accepted"], receipt["quiet"]) == (True, True)
        assert receipt["runs"] == {"cancelled": BELOW_PARENT}
        assert (receipt["processes_stopped"], receipt["processes_left"]) == (2, [])
        assert first.wait() == 130, first.text
        last = first.text.rstrip().splitlines()[-1]
        assert f"{turn} cancelled" in last
        assert f"({BELOW_PARENT} cancelled), user_interrupt through cli: wrong folder" in last
        assert "Traceback" not in first.text + second.stderr
    assert not [pid for pid in programs if psutil.pid_exists(pid)]


@pytest.mark.requirement("A21")
def test_ctrl_c_in_a_terminal_stops_all_and_ends_with_a_receipt(shells: Shells) -> None:
    with shells.terminal("run", "shell_agents:parent", "--name", "ctrl-c") as shell:
        turn = shells.turn_named("ctrl-c", runs=BELOW_PARENT)
        wait_until(lambda: f"{BELOW_PARENT - 1} runs" in shell.text, timeout_s=_PATIENCE_S, message="the live tree")
        wait_until(lambda: len(shells.programs(turn)) == 2, timeout_s=_PATIENCE_S, message="its programs")
        shell.process.send_signal(signal.SIGINT)
        assert shell.wait() == 130, shell.text
        assert "Ctrl-C: stopping; once more kills what is left" in shell.text
        assert f"cancel of {turn} accepted: {BELOW_PARENT} runs told to stop" in shell.text
        assert "processes  2 stopped, 0 left" in shell.text
        assert "Traceback" not in shell.text


def test_a_killed_command_loses_its_runs_and_a_detached_one_does_not(shells: Shells) -> None:
    detached = shells.run("run", "shell_agents:nap", "--detach", "--name", "goes on")
    assert detached.returncode == 0, detached.stderr
    goes_on = shells.turn_named("goes on", runs=1)
    with shells.terminal("run", "shell_agents:parent", "--name", "killed") as shell:
        turn = shells.turn_named("killed", runs=BELOW_PARENT)
        shell.process.kill()
        killed = time.monotonic()
        # Ten seconds of grace for the client, and what the stop itself takes.
        wait_until(lambda: shells.node(turn).is_ended, timeout_s=10.0 + 10.0)
        assert time.monotonic() - killed > 5.0, "the grace was given"
    nodes = shells.look(lambda records: [n for n in records.state.nodes.values() if n.turn_id == turn])
    assert {n.outcome.value for n in nodes} == {"cancelled"}
    assert {(n.cause.kind.value, n.cause.origin) for n in nodes} == {("parent_lost", turn)}
    assert not shells.programs(turn)
    # Its command has been gone for longer than the other's grace.
    assert not shells.node(goes_on).is_ended
    assert shells.run("cancel", goes_on).returncode == 0
    assert shells.node(goes_on).outcome == "cancelled"


def test_a_second_command_on_a_warm_node_runs_its_first_agent_within_a_second(shells: Shells) -> None:
    assert shells.run("run", "shell_agents:quick", "a=1").returncode == 0
    done = shells.run("run", "shell_agents:quick", "a=41", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["result"] == 42
    turn, run = document["tree"]["nodes"]
    assert run["started_at"] - turn["accepted_at"] < 1.0
