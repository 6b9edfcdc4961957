"""Surroundings that are against us: terminals, descriptors that got out, full disks, groups that cannot be made."""

from __future__ import annotations

import array
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remit.processes.jobs import JobOutcome
from tests.processes.world import World, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the observer reads /proc")


@pytest.mark.requirement("P1", "P8")
@pytest.mark.parametrize("containment", ["", "-subreaper,-pidfd,-cgroup"])
def test_a_program_that_holds_a_terminal_ends_with_what_runs_on_it(containment: str, world: World) -> None:
    script = (
        "import os, pty, sys, time\n"
        "pid, master = pty.fork()\n"
        "if pid == 0:\n"
        "    os.execvp('sh', ['sh', '-c', 'echo ready; while :; do sleep 60; done', sys.argv[1]])\n"
        "os.write(1, os.read(master, 100))\n"
        "time.sleep(600)\n"
    )
    name = f"proc_{os.urandom(8).hex()}"
    job = world.start([sys.executable, "-c", script, name], job=name, containment=containment).wait_ready(b"ready")
    assert len(marked(job)) >= 2  # the one that holds the terminal, and the shell on it
    result = job.stop(grace_s=0.0)
    assert (result.outcome, result.survivors) == (JobOutcome.CANCELLED, ())
    assert marked(job) == []


@pytest.mark.requirement("P8", "C35")
def test_an_output_that_a_stranger_holds_open_holds_up_no_end(world: World, tmp_path: Path) -> None:
    """The program sends its standard output to a process that lives on."""
    script = (
        "import array, socket, sys\n"
        "with socket.socket(socket.AF_UNIX) as peer:\n"
        "    peer.connect(sys.argv[1])\n"
        "    peer.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])\n"
        "print('all')\n"
    )
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        job = world.start([sys.executable, "-c", script, address])
        peer, _ = listener.accept()
        with peer:
            _, ancillary, _, _ = peer.recvmsg(1, socket.CMSG_SPACE(4))
        held = array.array("i", ancillary[0][2])[0]
    try:
        result = job.result()
        assert (result.outcome, result.exit_code, result.survivors) == (JobOutcome.EXITED, 0, ())
        assert (job.output(), result.stdout_bytes) == (b"all\n", 4)
        job.wait_gone()
    finally:
        os.close(held)


# --- full disks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.faults
@pytest.mark.requirement("P3", "P7")
def test_a_disk_that_is_full_of_output_is_the_programs_trouble_alone(small_disk: Path, world: World) -> None:
    job = world.sh("head -c 1000000 /dev/zero; exit 7", output_dir=str(small_disk / "out"))
    result = job.result()
    assert (result.outcome, result.exit_code, result.survivors) == (JobOutcome.EXITED, 7, ())
    assert 0 < result.stdout_bytes <= 262_144
    assert marked(job) == []


@pytest.mark.faults
@pytest.mark.requirement("P7", "C26")
@pytest.mark.parametrize("is_watched", [False, True])
def test_no_room_for_the_record_starts_nothing_and_says_so(is_watched: bool, small_disk: Path, tmp_path: Path) -> None:
    world = World(folder=small_disk)
    try:
        fill(small_disk)
        job = world.sh(f"touch {tmp_path}/ran", output_dir=str(tmp_path / "out"), is_watched=is_watched)
        job.wait_gone()
        (small_disk / "filler").unlink()
        assert not (tmp_path / "ran").exists()
        assert sorted(path.name for path in world.folder.iterdir()) == [job.tag]
        assert not (job.dir / "state.json").exists()
    finally:
        (small_disk / "filler").unlink(missing_ok=True)
        world.close()


@pytest.mark.faults
@pytest.mark.requirement("P3")
def test_no_room_for_the_result_is_waited_for(small_disk: Path, tmp_path: Path) -> None:
    world = World(folder=small_disk)
    try:
        script = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit 3"
        job = world.sh(script, output_dir=str(tmp_path / "out")).wait_ready()
        fill(small_disk)
        with job.talk() as talk:
            talk.send("wait")
            (tmp_path / "go").touch()
            # Told without waiting for the disk.
            answer = talk.receive()
        assert (answer["kind"], answer["result"]["exit_code"]) == ("ended", 3)
        assert not (job.dir / "result.json").exists()
        (small_disk / "filler").unlink()
        assert job.result().exit_code == 3
    finally:
        (small_disk / "filler").unlink(missing_ok=True)
        world.close()


# --- control groups --------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.requirement("P1", "P7")
def test_where_the_groups_are_read_only_trees_are_held_without_them() -> None:
    unshare = shutil.which("unshare")
    remount = "for place in /sys/fs/cgroup /sys/fs/cgroup/*; do mount -o remount,bind,ro $place 2>/dev/null; done; exec"
    if unshare is None or os.geteuid() != 0:
        pytest.skip("a file system can be remounted by root alone")
    prefix = (unshare, "--mount", "sh", "-c", f'{remount} "$@"', "sh")
    world = World(prefix=prefix)
    try:
        jobs = [world.creature("both", is_watched=is_watched).wait_ready() for is_watched in (False, True)]
        for job in jobs:
            result = job.stop(grace_s=0.0)
            assert (result.outcome, result.survivors) == (JobOutcome.CANCELLED, ())
            assert "cgroup" not in result.containment
            assert marked(job) == []
    finally:
        world.close()
