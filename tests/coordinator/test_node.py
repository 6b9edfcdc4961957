"""The local node with a small program in Ray's place: real processes, real locks, no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from remit.coordinator.node import LocalNode, NodeRecord, probe, resolve_address
from remit.coordinator.node_doctor import Finding, FindingLevel, doctor
from remit.coordinator.node_processes import NODE_MARK, ProcessIdentity, identify, is_alive, send_signal
from remit.coordinator.node_watch import IdleCount
from remit.core.errors import CoordinatorUnavailable, InvalidArgument

# Plays `ray start`: leaves a control service that listens, a node manager with a
# worker in a session of its own, and a monitor; notes the address; ends.
_START = """
import os, subprocess, sys
temp, mode, serve = sys.argv[1:4]
def spawn(role):
    command = [sys.executable, "-S", "-c", serve, f"--log-dir={temp}/session_1/logs", role]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
print("booting", flush=True)
if mode == "slow":
    sys.stdin.close(); spawn("raylet").stdout.readline(); open(temp + "/halfway", "w").close()
    import signal; signal.pause()
gcs = spawn("gcs_server"); port = gcs.stdout.readline().decode().strip()
if mode == "fails":
    print("no room for the object store"); sys.exit(3)
spawn("raylet" if mode != "stubborn" else "raylet-stubborn").stdout.readline()
spawn("monitor").stdout.readline()
open(temp + "/ray_current_cluster", "w").write("127.0.0.1:" + port)
os._exit(0)
"""
_SERVE = """
import os, signal, socket, subprocess, sys
role = sys.argv[-1]
if role == "raylet-stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = b"ready"
if role == "gcs_server":
    server = socket.create_server(("127.0.0.1", 0)); line = str(server.getsockname()[1]).encode()
if role.startswith("raylet"):
    subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()", "worker"], start_new_session=True,
                     stdout=subprocess.DEVNULL)
os.write(1, line + b"\\n"); os.close(1)
while True:
    signal.pause()
"""


@dataclass(frozen=True, slots=True)
class SmallLauncher:
    """A launcher of a few small processes; `mode` is ok, fails, slow or stubborn."""

    mode: str = "ok"
    version: str = "1.0"

    def command(self, temp_dir: Path) -> list[str]:
        return [sys.executable, "-S", "-c", _START, str(temp_dir), self.mode, _SERVE]

    def environment(self, token_path: Path) -> dict[str, str]:
        return {"RAY_AUTH_TOKEN_PATH": str(token_path)}

    def is_essential(self, command: Sequence[str]) -> bool:
        return command[-1] in ("gcs_server", "raylet", "raylet-stubborn") if command else False

    def stage(self, temp_dir: Path) -> str:
        return "halfway" if (temp_dir / "halfway").exists() else "loading"

    def longest_socket(self) -> str:
        return "session_1/sockets/store"


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "state"
    yield path
    with contextlib.suppress(CoordinatorUnavailable):
        LocalNode(path, SmallLauncher()).stop(grace_s=0)


@pytest.fixture
def node(state_dir: Path) -> LocalNode:
    return LocalNode(state_dir, SmallLauncher())


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def identities(node: LocalNode) -> list[ProcessIdentity]:
    return [process.identity for process in node.processes()]


# Addresses


@pytest.mark.parametrize(
    ("explicit", "environ", "expected"),
    [
        (None, {}, ("local", None)),
        (None, {"RAY_ADDRESS": ""}, ("local", None)),
        (None, {"RAY_ADDRESS": "local"}, ("local", None)),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, ("environment", "10.0.0.1:6379")),
        ("auto", {"RAY_ADDRESS": "10.0.0.1:6379"}, ("explicit", "auto")),
        ("local", {"RAY_ADDRESS": "10.0.0.1:6379"}, ("local", None)),
        ("  ", {"RAY_ADDRESS": "h:1"}, ("environment", "h:1")),
    ],
)
def test_callers_address_comes_before_the_environment_and_that_before_the_local_node(
    explicit: str | None, environ: dict[str, str], expected: tuple[str, str | None]
) -> None:
    assert resolve_address(explicit, environ) == expected


def test_probe_passes_where_something_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe(f"127.0.0.1:{server.getsockname()[1]}")
    probe("local")


def test_probe_of_a_closed_port_says_where_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CoordinatorUnavailable) as raised:
        probe(f"127.0.0.1:{port}")
    assert raised.value.message.startswith(
        f"no Ray answers at RAY_ADDRESS=127.0.0.1:{port}: connection refused; start that cluster"
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://head:10001", "client mode is not supported"),
        ("head", "must be host:port"),
        ("head:many", "must be host:port"),
        ("head:0", "must be host:port"),
        (":6379", "must be host:port"),
    ],
)
def test_probe_refuses_other_forms_in_one_sentence(address: str, words: str) -> None:
    with pytest.raises(CoordinatorUnavailable, match=words) as raised:
        probe(address, source="--address")
    assert f"--address={address}" in raised.value.message


def test_probe_of_auto_asks_the_node_that_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(CoordinatorUnavailable, match="no node was started on this machine"):
        probe("auto")
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        probe("auto")


# State directory


def test_state_directory_comes_from_the_environment_or_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMIT_STATE_DIR", raising=False)
    assert LocalNode().state.path == Path(f"/tmp/remit-{os.geteuid()}")
    monkeypatch.setenv("REMIT_STATE_DIR", "/run/elsewhere")
    assert LocalNode().state.path == Path("/run/elsewhere")


def test_status_and_stop_without_a_node_make_nothing(node: LocalNode, state_dir: Path) -> None:
    assert node.status() is None
    assert node.stop() == []
    node.touch()
    assert not state_dir.exists()


@pytest.mark.parametrize("flaw", ["link", "file", "open to others", "of somebody else"])
def test_unsafe_state_directory_is_refused(
    flaw: str, node: LocalNode, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flaw == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        state_dir.symlink_to(tmp_path / "real")
    elif flaw == "file":
        state_dir.touch(mode=0o600)
    else:
        state_dir.mkdir(mode=0o700)
    if flaw == "open to others":
        state_dir.chmod(0o755)
    if flaw == "of somebody else":
        monkeypatch.setattr(os, "geteuid", lambda: state_dir.stat().st_uid + 1)
    for call in (node.ensure, node.status, node.stop):
        with pytest.raises(CoordinatorUnavailable, match=r"cannot be used: .*REMIT_STATE_DIR"):
            call()
    assert FindingLevel.ERROR in {finding.level for finding in doctor(state_dir, SmallLauncher())}
    if flaw not in ("link", "file"):
        assert list(state_dir.iterdir()) == []


def test_too_long_path_for_sockets_is_refused_before_anything_starts(tmp_path: Path) -> None:
    long = LocalNode(tmp_path / ("s" * 100), SmallLauncher())
    with pytest.raises(CoordinatorUnavailable, match="too long for the paths of sockets"):
        long.ensure()
    assert long.processes() == []


@pytest.mark.parametrize("idle_s", ["0", "-1", "soon", "nan"])
def test_idle_time_must_be_a_positive_number(idle_s: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMIT_NODE_IDLE_S", idle_s)
    with pytest.raises(InvalidArgument, match="REMIT_NODE_IDLE_S"):
        LocalNode()


# Start


def test_node_is_started_once_and_then_found(node: LocalNode, state_dir: Path) -> None:
    lines: list[str] = []
    record = node.ensure(lines.append)
    assert "starting a local Ray node" in lines[0]
    assert all(line.endswith(" s)") for line in lines)
    assert lines[-1].startswith(f"the local Ray node is up at {record.address}")
    again: list[str] = []
    assert LocalNode(state_dir, SmallLauncher()).ensure(again.append) == record
    assert again == []
    assert node.status() == record
    assert len(record.pids) == 2
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(record.token_path.stat().st_mode) == 0o600
    assert len(record.token_path.read_text()) == 64


def test_two_starters_at_once_agree_on_one_node(state_dir: Path) -> None:
    both = threading.Barrier(2)
    records: list[NodeRecord] = []
    waited: list[str] = []

    def start() -> None:
        both.wait()
        records.append(LocalNode(state_dir, SmallLauncher()).ensure(waited.append))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records[0] == records[1]
    assert any("another process is starting" in line for line in waited)


def test_waiting_for_another_starter_has_an_end(node: LocalNode) -> None:
    node.state.create()
    with node.state.lock(0):
        with pytest.raises(CoordinatorUnavailable, match="another process is starting or stopping"):
            node.ensure(timeout_s=0)


def test_failed_start_shows_the_log_and_leaves_nothing(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher("fails"))
    with pytest.raises(CoordinatorUnavailable) as raised:
        node.ensure()
    assert "ended with status 3" in raised.value.message
    assert "remit doctor" in raised.value.message
    assert raised.value.message.endswith("booting\nno room for the object store")
    assert node.processes() == []
    assert sorted(path.name for path in state_dir.iterdir()) == ["lock", "node.log"]


def test_start_that_takes_too_long_is_ended(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher("slow"))
    with pytest.raises(CoordinatorUnavailable, match="not up in time"):
        node.ensure(timeout_s=0.5)
    assert node.processes() == []


def test_ctrl_c_during_a_start_leaves_nothing(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher("slow"))
    started: list[ProcessIdentity] = []

    def interrupt(line: str) -> None:
        if line.startswith("halfway"):
            started.extend(identities(node))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        node.ensure(interrupt)
    assert len(started) >= 3
    assert not any(is_alive(identity) for identity in started)
    assert node.processes() == []
    assert not node.state.temp_dir.exists()


def test_start_whose_starter_is_killed_is_swept_by_the_watch(state_dir: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; from test_node import *;"
        "LocalNode(Path(sys.argv[1]), SmallLauncher('slow'), idle_s=0.5).ensure()"
    )
    command = [sys.executable, "-c", code, str(state_dir), str(Path(__file__).parent)]
    starter = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    node = LocalNode(state_dir, SmallLauncher("slow"))
    wait_until((node.state.temp_dir / "halfway").exists, "the start is halfway")
    started = identities(node)
    starter.kill()
    starter.wait()
    assert len(started) >= 3
    wait_until(lambda: not any(is_alive(identity) for identity in started), "all that was started has ended")
    wait_until(lambda: not node.state.temp_dir.exists(), "its directory is gone")


def test_node_starts_without_what_belongs_to_another_cluster(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    record = node.ensure()
    environ = Path(f"/proc/{record.pids[0].pid}/environ").read_text().split("\0")
    assert not [line for line in environ if line.startswith(("RAY_ADDRESS=", "RAY_AUTH_TOKEN="))]
    assert f"RAY_AUTH_TOKEN_PATH={record.token_path}" in environ
    assert f"REMIT_STATE_DIR={node.state.path}" in environ
    assert node.environment(record) == {
        "RAY_AUTH_TOKEN_PATH": str(record.token_path),
        "RAY_AUTH_TOKEN": record.token_path.read_text(),
    }


# Death, stale records, other environments


def test_node_that_has_lost_a_process_is_replaced_and_its_rest_ended(node: LocalNode) -> None:
    first = node.ensure()
    rest = identities(node)
    os.kill(first.pids[0].pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(first.pids[0]), "the control service is dead")
    assert node.status() is None
    assert any("stale" in finding.text for finding in doctor(node.state.path, SmallLauncher()))
    second = node.ensure()
    assert second.pids != first.pids
    assert not any(is_alive(identity) for identity in rest)


@pytest.mark.field_report("F7")
def test_reused_process_number_is_neither_alive_nor_killed(node: LocalNode) -> None:
    record = node.ensure()
    with _bystander() as bystander:
        identity = identify(bystander.pid)
        assert identity is not None
        wrong = ProcessIdentity(identity.pid, identity.start_time - 1)
        node.state.save(dataclasses.replace(record, pids=(wrong, *record.pids)))
        assert node.status() is None
        assert not send_signal(wrong, signal.SIGKILL)
        node.stop()
        assert is_alive(identity)


def test_record_of_an_earlier_boot_does_not_count(node: LocalNode) -> None:
    record = node.ensure()
    node.state.save(dataclasses.replace(record, boot_id="earlier"))
    assert node.status() is None


def test_unreadable_record_does_not_hinder_a_start(node: LocalNode) -> None:
    node.state.create()
    for text in ("", "[]", "{}", '{"pids": 3}'):
        node.state.record_path.write_text(text)
        assert node.status() is None
    assert node.ensure().pids


def test_node_of_other_versions_is_refused_while_used_and_replaced_when_idle(node: LocalNode) -> None:
    first = node.ensure()
    newer = LocalNode(node.state.path, SmallLauncher(version="2.0"))
    with pytest.raises(CoordinatorUnavailable, match=r"in use and runs ray 1\.0 on Python .*remit down"):
        newer.ensure()
    assert node.status() == first
    os.utime(node.state.used_path, (0, 0))
    assert newer.ensure().ray_version == "2.0"
    assert not any(is_alive(identity) for identity in first.pids)


def test_node_of_another_environment_is_refused_while_used(node: LocalNode) -> None:
    record = node.ensure()
    node.state.save(dataclasses.replace(record, python="/opt/other/bin/python"))
    with pytest.raises(CoordinatorUnavailable, match="belongs to another environment"):
        node.ensure()


# Stop


@contextlib.contextmanager
def _bystander(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "import os, signal; os.write(1, b'.'); signal.pause()", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environ})
    assert process.stdout is not None
    with process.stdout:
        process.stdout.read(1)
        yield process
        process.kill()
        process.wait()


def test_stop_ends_the_whole_tree_and_removes_what_was_left(node: LocalNode, state_dir: Path) -> None:
    record = node.ensure()
    everything = identities(node)
    assert len(everything) == 5  # control service, node manager, its worker, monitor, watch
    stopped = node.stop()
    assert len(stopped) == 5
    assert any(f"({record.pids[0].pid})" in line for line in stopped)
    assert not any(is_alive(identity) for identity in everything)
    assert node.status() is None
    assert node.stop() == []
    assert sorted(path.name for path in state_dir.iterdir()) == ["lock", "node.log"]


def test_process_that_ignores_sigterm_is_killed_after_the_grace(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher("stubborn"))
    node.ensure()
    everything = identities(node)
    node.stop(grace_s=0.3)
    assert not any(is_alive(identity) for identity in everything)


def test_stop_spares_who_only_reads_the_nodes_files_or_only_has_its_mark(node: LocalNode) -> None:
    node.ensure()
    temp_dir, state = node.state.temp_dir, node.state.path
    with _bystander(f"{temp_dir}/session_1/logs/raylet.out") as reader:
        with _bystander(**{NODE_MARK: str(state)}) as marked:
            node.stop()
            assert reader.poll() is None
            assert marked.poll() is None


def test_node_without_a_record_is_found_and_stopped(node: LocalNode) -> None:
    node.ensure()
    everything = identities(node)
    node.state.record_path.unlink()
    node.stop()
    assert not any(is_alive(identity) for identity in everything)


# Idle watch


def test_idle_time_counts_from_the_last_change_and_not_from_the_wall_clock() -> None:
    count = IdleCount(stamp=50, now=100.0)
    assert count.see(50, 130.0) == 30.0
    assert count.see(10**18, 131.0) == 0.0  # a wall clock that jumped is still only a change
    assert count.see(10**18, 140.0) == 9.0
    assert count.see(10, 141.0) == 0.0


def test_idle_node_is_stopped_by_its_watch_which_then_ends(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher(), idle_s=0.5)
    record = node.ensure()
    # By the record: on a loaded machine its time is over by the time one has looked.
    assert record.watch is not None
    everything = {*record.pids, *record.side_pids, record.watch}
    assert len(everything) == 5
    wait_until(lambda: not any(is_alive(identity) for identity in everything), "node and watch have ended")
    assert node.status() is None
    assert not node.state.temp_dir.exists()


def test_node_that_was_touched_meanwhile_is_not_stopped(node: LocalNode) -> None:
    record = node.ensure()
    seen = node.state.used_ns()
    os.utime(node.state.used_path, ns=(seen + 1, seen + 1))
    assert not node.stop_unless_used(seen)
    assert node.status() == record
    with node.state.lock(0):
        assert not node.stop_unless_used(node.state.used_ns())
    assert node.stop_unless_used(node.state.used_ns())
    assert node.status() is None


def test_watch_ends_when_its_node_was_stopped(state_dir: Path) -> None:
    node = LocalNode(state_dir, SmallLauncher(), idle_s=1.0)
    record = node.ensure()
    assert record.watch is not None
    for identity in record.pids:
        os.kill(identity.pid, signal.SIGKILL)
    wait_until(lambda: record.watch is not None and not is_alive(record.watch), "the watch has ended")
    assert node.processes() == []
    assert not node.state.record_path.exists()


# Doctor


def test_doctor_tells_up_from_down(node: LocalNode) -> None:
    node.state.create()
    assert Finding(FindingLevel.OK, "no local node is up; the next command starts one") in doctor(
        node.state.path, SmallLauncher()
    )
    record = node.ensure()
    findings = doctor(node.state.path, SmallLauncher())
    assert any(f"up at {record.address}: 5 processes" in finding.text for finding in findings)
    assert FindingLevel.ERROR not in {finding.level for finding in findings}
    assert Finding(FindingLevel.ERROR, "") not in findings
    assert doctor(node.state.path, SmallLauncher(version=""))[0].level is FindingLevel.ERROR


@pytest.mark.checkout
def test_node_modules_do_not_import_ray() -> None:
    code = "import sys, remit.coordinator.node, remit.coordinator.node_doctor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
