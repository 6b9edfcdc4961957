"""Numbers that are used again: in a namespace of its own, where the next number can be chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process namespaces are Linux's")

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]

# Runs as the first process of a namespace: forks a keeper, lets a member of the tree end and gives
# its number to a stranger; then the tree is stopped, or swept after the keeper's death.
SCENE = '''
import os, signal, subprocess, sys, tempfile, time
from pathlib import Path
from remit.processes import frames
from remit.processes.jobs import JobSpec, JobState, read_record
from remit.processes.keeper import fork_keeper
from remit.processes.containment import Cgroup
from remit.processes.sweep import sweep

containment, case = sys.argv[1:3]
folder = Path(tempfile.mkdtemp(prefix="rn"))

def until(condition):
    limit = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < limit, "not true in time"
        time.sleep(0.002)

def stranger(pid):
    """Start a process with a number of our choice."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        found = subprocess.Popen(["sleep", "600"])
        if found.pid == pid:
            return found
        found.kill()
        found.wait()
    raise AssertionError("the number was never given")

MEMBER = """
import os, signal, sys, time
pid = os.fork()
if pid == 0:
    os.setsid()
    os.read(0, 1)
    os._exit(0)
print(pid, flush=True)
os.waitpid(pid, 0)
print("gone", flush=True)
signal.pause()
"""
spec = JobSpec(job="proc_reuse", scope="s", argv=(sys.executable, "-c", MEMBER), output_dir=str(folder / "out"),
               stdin="pipe", grace_s=0.1)
keeper = fork_keeper(spec, env=dict(os.environ), jobdir=folder, containment=containment)
out = folder / "out" / "stdout"
until(lambda: out.exists() and out.read_bytes().endswith(b"\\n"))
member = int(out.read_text())
# Sampled at least once, so that it is remembered where there is no subreaper.
def reads():
    return int(Path(f"/proc/{keeper.pid}/io").read_text().split("syscr:")[1].split()[0])
seen = reads()
if "-subreaper" in containment:
    until(lambda: reads() > seen + 20)
until(lambda: frames.receive(keeper.lifeline)["op"] == "started")
state = read_record(folder / "state.json", JobState)
frames.send(keeper.lifeline, "write", id=1, data="eA==")
until(lambda: b"gone" in out.read_bytes())

if case == "member":
    other = stranger(member)
    frames.send(keeper.lifeline, "stop", id=2, grace_s=0.1, kill=False)
    while frames.receive(keeper.lifeline)["op"] != "ended":
        pass
    os.waitpid(keeper.pid, 0)
else:
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitpid(keeper.pid, 0)
    # The program is dead with its keeper, and waited for by the first process, which is this one.
    until(lambda: not os.path.exists(f"/proc/{state.root.pid}") or os.waitpid(state.root.pid, os.WNOHANG)[0])
    other = stranger(state.root.pid)
    if state.cgroup:
        until(Cgroup(Path(state.cgroup)).remove)
    report = sweep(state.root.pid, state.root.started, token=state.token, grace_s=0.0)
    assert report.survivors == (), report
assert other.poll() is None, "a stranger was hit"
print("untouched")
other.kill()
other.wait()
'''


def namespaces_are_allowed() -> bool:
    probe = "from pathlib import Path; Path('/proc/sys/kernel/ns_last_pid').write_text('300')"
    try:
        done = subprocess.run([*UNSHARE, sys.executable, "-c", probe], capture_output=True, timeout=40, check=False)
    except OSError:  # no such program
        return False
    return done.returncode == 0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not namespaces_are_allowed():
        pytest.skip("no process namespace, or no choice of numbers, is allowed here")
    path = tmp_path_factory.mktemp("scene") / "scene.py"
    path.write_text(SCENE)
    return path


@pytest.mark.requirement("P2", "E8", "E9")
@pytest.mark.field_report("F7")
@pytest.mark.parametrize("case", ["member", "root"])
@pytest.mark.parametrize("containment", ["", "-subreaper,-cgroup", "-subreaper,-pidfd,-cgroup"])
def test_a_stranger_with_the_number_of_a_member_is_never_hit(
    containment: str, case: str, scene: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*UNSHARE, sys.executable, str(scene), containment, case],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "untouched"), done.stderr
