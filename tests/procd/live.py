"""A real daemon for tests: real processes in a directory of its own, all ended afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from remit.core.errors import ProcessProtocolError
from remit.processes.answers import StartAnswer
from remit.processes.client import ProcessClient
from remit.processes.forks import MAX_SPARES
from remit.processes.jobs import STATE_NAME, JobSpec, JobState, read_record
from remit.processes.place import Place
from remit.processes.starting import ensure_daemon
from remit.testing import wait_until

LIMIT_S = 40.0
"""Far above what anything takes on an idle machine."""


class Node:
    """One daemon, its clients, and everything that runs below it."""

    def __init__(self, *options: str) -> None:
        # Short, for the sockets' paths.
        self.directory = Path(tempfile.mkdtemp(prefix="rp", dir="/tmp"))
        self.place = Place(self.directory)
        self.numbers = itertools.count(1)
        self.options = options
        self.clients: list[ProcessClient] = []
        self.scope = self.run_id = ""
        self.renew_names()
        self.client = self.connect()
        self.start_daemon()

    def renew_names(self) -> None:
        """Take names that no test before has used: a scope, a run, and the tag of its processes."""
        number = next(self.numbers)
        self.tag = f"remit-test-{self.directory.name}-{number}"
        self.scope, self.run_id = f"scope-{number}", f"run_{number}"

    def empty(self) -> None:
        """End what a test left running, and its clients."""
        for client in self.clients:
            client.close()
        self.clients = [self.client]
        for view in self.client.list():
            if view.state != "ended":
                self.client.stop(scope=view.scope, job=view.job, kill=True)
        self.wait_empty()

    def start_daemon(self) -> None:
        """Start the daemon with this node's options, if there is none."""
        ensure_daemon(self.place, options=self.options, limit_s=LIMIT_S)

    def connect(self, **options: Any) -> ProcessClient:
        """Return a new client."""
        client = ProcessClient(state_dir=self.directory, **options)
        self.clients.append(client)
        return client

    @property
    def env(self) -> dict[str, str]:
        """An environment by which everything that this node runs is found again."""
        return {"PATH": os.environ["PATH"], "REMIT_TEST_NODE": self.tag}

    def spec(self, *argv: str, **fields: Any) -> JobSpec:
        """Return a spec with a new job id."""
        job = f"proc_{self.directory.name}{next(self.numbers)}"
        defaults: dict[str, Any] = {"scope": self.scope, "session": "s", "turn": "turn_1", "run": self.run_id}
        return JobSpec(
            **{**defaults, "job": job, "argv": argv, "output_dir": str(self.directory / "out" / job), **fields}
        )

    def run(self, *argv: str, **fields: Any) -> StartAnswer:
        """Start a program and return the answer."""
        return self.client.start(self.spec(*argv, **fields), env=self.env)

    def tree(self, **fields: Any) -> StartAnswer:
        """Start a tree of three that ignores nothing, one of them in a session of its own; wait until it is up."""
        answer = self.run("sh", "-c", "setsid sleep 1000 & sleep 1000 & echo ready; wait", **fields)
        self.wait_output(answer.job, b"ready")
        wait_until(lambda: len(self.sleeping()) >= 2, timeout_s=LIMIT_S, message="the tree did not come up")
        return answer

    def wait_output(self, job: str, text: bytes) -> None:
        """Wait until a program has printed something."""
        path = self.directory / "out" / job / "stdout"
        wait_until(
            lambda: path.exists() and text in path.read_bytes(), timeout_s=LIMIT_S, message=f"{job} never said {text!r}"
        )

    def state(self, job: str) -> JobState:
        """Return the keeper's state."""
        state = read_record(self.place.job(job) / STATE_NAME, JobState)
        assert state is not None
        return state

    def daemon_pid(self) -> int:
        """Return the daemon's number."""
        return int(self.place.life_lock.read_text())

    def wait_reaped(self) -> None:
        """Wait until the daemon has no child but the keepers that wait for jobs."""
        daemon = psutil.Process(self.daemon_pid())
        wait_for(lambda: len(daemon.children()) <= MAX_SPARES, "children of the daemon stay")
        wait_for(lambda: all(is_running(child.pid) for child in daemon.children()), "a zombie of the daemon stays")

    def kill_daemon(self) -> int:
        """Kill the daemon with -9, wait until it is gone, and return its number."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        return pid

    def processes(self) -> list[psutil.Process]:
        """Return every living process that carries this node's tag, keepers and daemon aside."""
        return [process for process in psutil.process_iter() if _has_tag(process, self.tag)]

    def sleeping(self) -> list[psutil.Process]:
        """Return those of them that run `sleep`."""
        return [process for process in self.processes() if _name(process) == "sleep"]

    def wait_empty(self) -> None:
        """Wait until nothing that was started lives."""
        wait_until(lambda: not self.processes(), timeout_s=LIMIT_S, message=f"left: {self.processes()}")

    def close(self) -> None:
        """End everything of this node, whatever state it is in."""
        for client in self.clients:
            client.close()
        pids = {_pid_in(self.place.life_lock)}
        for path in self.place.jobs.glob(f"*/{STATE_NAME}"):
            try:
                state = read_record(path, JobState)
            except (ProcessProtocolError, OSError):
                continue
            if state is not None and _is_python(state.keeper.pid):
                pids.add(state.keeper.pid)
        for pid in pids - {0}:
            _kill(pid)
        until = time.monotonic() + LIMIT_S
        while (left := self.processes()) and time.monotonic() < until:
            for process in left:
                _kill(process.pid)
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_gone(pid: int) -> None:
    """Wait until a process is gone, or only its parent's wait is missing."""
    wait_until(lambda: not is_running(pid), timeout_s=LIMIT_S, message=f"process {pid} stays")


def is_running(pid: int) -> bool:
    """Tell whether a process lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], message: str) -> None:
    """Wait for a condition, long enough for a loaded machine."""
    wait_until(condition, timeout_s=LIMIT_S, message=message)


def _has_tag(process: psutil.Process, tag: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("REMIT_TEST_NODE") == tag
    except (psutil.Error, OSError):
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _is_python(pid: int) -> bool:
    try:
        return psutil.Process(pid).exe() == os.path.realpath(sys.executable)
    except psutil.Error:
        return False


def _pid_in(path: Path) -> int:
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return 0
    return pid if _is_python(pid) else 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
