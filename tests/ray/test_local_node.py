"""The local node with Ray itself: one start, one look at everything that it promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remit.coordinator.node import LocalNode, NodeRecord
from remit.coordinator.node_doctor import FindingLevel, doctor
from remit.coordinator.node_processes import is_alive, listening_addresses

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

# Connects, starts a worker, and has the worker start a program in a session of its own.
_CLIENT = """
import os, subprocess, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=0, lifetime="detached", name="holder", namespace="check")
class Holder:
    def start(self):
        command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        return subprocess.Popen(command, start_new_session=True).pid, os.getpid(), os.getcwd()
print(*ray.get(Holder.remote().start.remote()))
"""


@pytest.fixture
def node() -> Iterator[LocalNode]:
    # Not `tmp_path`: its names are too long for the paths of sockets.
    state_dir = Path(tempfile.mkdtemp(prefix="remit-", dir="/tmp"))
    node = LocalNode(state_dir)
    yield node
    node.stop(grace_s=2.0)
    shutil.rmtree(state_dir)


def _client(node: LocalNode, record: NodeRecord, *, token: bool) -> subprocess.Popen[str]:
    settings = node.environment(record)
    if not token:
        wrong = node.state.path / "wrong"
        wrong.write_text("0" * 64)
        settings["RAY_AUTH_TOKEN_PATH"] = str(wrong)
    return subprocess.Popen(
        [sys.executable, "-c", _CLIENT, record.address],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ray_node_listens_on_loopback_only_asks_for_the_token_and_ends_without_remains(node: LocalNode) -> None:
    lines: list[str] = []
    record = node.ensure(lines.append)
    assert [line for line in lines if "control service" in line or "node manager" in line], lines
    assert len(record.pids) == 2
    assert record.address.startswith("127.0.0.1:")

    began = time.perf_counter()
    assert node.status() == record
    assert time.perf_counter() - began < 0.03

    # Started first, since Ray tries for twenty seconds before it gives up.
    intruder = _client(node, record, token=False)
    client = _client(node, record, token=True)
    output, errors = client.communicate(timeout=90)
    assert client.returncode == 0, errors
    program, worker, directory = output.split()[-3:]
    assert Path(directory) == node.state.temp_dir

    everything = node.processes()
    numbers = {process.identity.pid for process in everything}
    assert {int(program), int(worker)} <= numbers
    # By this a worker is known whose node manager has died.
    assert os.readlink(f"/proc/{worker}/fd/1").startswith(f"{node.state.temp_dir}/")
    listening = listening_addresses(everything)
    assert {name for _, _, name in listening} >= {"gcs_server", "raylet"}
    assert [entry for entry in listening if not entry[0].startswith(("127.", "::ffff:127."))] == []
    assert FindingLevel.ERROR not in {finding.level for finding in doctor(node.state.path)}

    _, errors = intruder.communicate(timeout=90)
    assert intruder.returncode != 0
    assert "auth" in errors.lower()

    began = time.perf_counter()
    stopped = node.stop()
    assert time.perf_counter() - began < 8.0, "all of Ray ends when asked, before the grace is over"
    assert len(stopped) >= len(everything)
    assert not any(is_alive(process.identity) for process in everything)
    assert node.processes() == []
    assert node.status() is None
    assert sorted(path.name for path in node.state.path.iterdir()) == ["lock", "node.log", "wrong"]
