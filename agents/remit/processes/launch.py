"""Fork and execute the program of one job, from its keeper.

There are two ways. `spawn` forks without a copy of the keeper (vfork) and returns
when the program is executed; it is for keepers whose death somebody else notices
and answers (`remit.processes.warden`). `fork_waiting` forks a child that waits at a
gate and dies with its keeper; it needs nobody else, and takes several times as long,
since each page that it writes to is copied and all of them are given back by the exec.

**Invariants**

1. Nothing of the program runs before its record is made. Behind the gate, nothing
   ever does when the keeper dies before the order came through whole.
2. The program has a session and a group of its own, default signals and three
   open descriptors. One that came through the gate dies with its keeper where the
   system has that.
3. Whatever kept it from being executed is told once.

The child behind the gate may be forked before it is known what it will become. The
keeper has one thread, so that Python code may run between fork and exec.
"""

from __future__ import annotations

import errno
import json
import marshal
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from remit.processes.containment import Cgroup, die_with_parent
from remit.processes.jobs import JobSpec
from remit.processes.table import MARK_VARIABLE

__all__ = [
    "RUN_VARIABLE",
    "StartFailure",
    "Waiting",
    "describe_failure",
    "environment",
    "fork_waiting",
    "prefer_as_victim",
    "spawn",
]

RUN_VARIABLE = "REMIT_RUN"
"""Environment variable that tells a program which run, or turn, it belongs to."""

_OOM_SCORE = b"300"
"""Out of memory, a tool goes before the agents that can report it; proc_pid_oom_score_adj(5)."""


_ORDER_LIMIT_S = 5.0
"""How long a child may take to read its order; somebody may have stopped it."""
_READ_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class Waiting:
    """A forked child that waits at its gate."""

    pid: int
    """Its number; not waited for."""
    gate: socket.socket
    """Takes the order; its end without one is the end of the child."""
    report: int
    """Descriptor that ends when the program is executed, or gives a `StartFailure` before."""

    def is_there(self) -> bool:
        """Tell whether it still lives; one that was killed is waited for."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def order(self, spec: JobSpec, env: Mapping[str, str], stdio: tuple[int, int, int]) -> None:
        """Let it execute the program.

        Args:
            spec: of the job.
            env: the whole environment.
            stdio: descriptors that become standard input, output and error.

        Raises:
            OSError: it does not read.
        """
        data = memoryview(marshal.dumps((spec.argv, dict(env), spec.cwd or "/", spec.umask)))
        with self.gate, suppress(BrokenPipeError, ConnectionResetError):  # it is gone already; its end tells
            self.gate.settimeout(_ORDER_LIMIT_S)
            sent = socket.send_fds(self.gate, [data], stdio)
            if sent < len(data):
                self.gate.sendall(data[sent:])

    def dismiss(self) -> None:
        """Close the gate, and wait until the child has ended."""
        self.gate.close()
        os.close(self.report)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why a program could not be executed."""

    errno: int | None
    """The system's number of the error."""
    text: str
    """One sentence: what, and what to do."""

    @classmethod
    def from_report(cls, data: bytes, spec: JobSpec) -> StartFailure:
        """Return the failure that the child reported."""
        stage, number, text = json.loads(data)
        return cls(number, describe_failure(spec, stage=stage, number=number, text=text))


def environment(spec: JobSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's program: what was given, and whose it is.

    The mark is added to the one that is there: a program that was started from
    inside another one belongs to both.
    """
    mark = "/".join(filter(None, (env.get(MARK_VARIABLE), spec.run or spec.turn, spec.job)))
    return {**env, RUN_VARIABLE: spec.run or spec.turn, MARK_VARIABLE: mark}


def fork_waiting(cgroup: Cgroup | None) -> Waiting:
    """Fork a child that will become a program, and leave it waiting at its gate.

    Args:
        cgroup: the group to enter, or None.

    Raises:
        OSError: no process or descriptor is left.
    """
    keeper = os.getpid()
    gate, opener = socket.socketpair()
    report, reporter = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        gate.close()
        opener.close()
        os.close(report)
        os.close(reporter)
        raise
    if pid == 0:
        opener.close()  # else it would keep its own gate from ending
        _become(cgroup, keeper, gate, reporter)
    gate.close()
    os.close(reporter)
    return Waiting(pid, opener, report)


def spawn(spec: JobSpec, env: Mapping[str, str], stdio: tuple[int, int, int]) -> int | StartFailure:
    """Execute a program as a child of this process; return its number when it runs, else why it does not.

    It is in the control group of this process. No signal may be ignored or blocked
    here, since the program would ignore it as well.

    Args:
        spec: of the job.
        env: the whole environment.
        stdio: descriptors that become standard input, output and error.
    """
    cwd = spec.cwd or "/"
    try:
        child = subprocess.Popen(
            spec.argv,
            stdin=stdio[0],
            stdout=stdio[1],
            stderr=stdio[2],
            env=env,
            cwd=cwd,
            umask=spec.umask,
            start_new_session=True,
        )
    except OSError as error:
        stage = "fork" if error.filename is None else "cwd" if error.filename == cwd else "exec"
        number, text = error.errno, error.strerror or str(error)
    except ValueError as error:  # NUL characters, `=` in a name, characters that no program can be given
        stage, number, text = "exec", errno.EINVAL, str(error)
    else:
        # Waited for by the tree's stop alone; the object must never do that.
        child.returncode = 0
        return child.pid
    return StartFailure(number, describe_failure(spec, stage=stage, number=number, text=text))


def prefer_as_victim(pid: int | str) -> None:
    """Let a process, and what it starts from now on, go before others when memory runs out.

    Args:
        pid: its number, or `self`.
    """
    with suppress(OSError):  # it has ended, or the system has no such thing
        descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, _OOM_SCORE)
        finally:
            os.close(descriptor)


def _become(cgroup: Cgroup | None, keeper: int, gate: socket.socket, reporter: int) -> NoReturn:
    stage = "setup"
    try:
        _settle_in(cgroup, keeper)
        argv, env, cwd, umask = _read_order(gate)
        os.umask(umask)
        stage = "cwd"
        os.chdir(cwd)
        stage = "exec"
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        _report(reporter, stage, error.errno, error.strerror or str(error))
    except ValueError as error:  # NUL characters, `=` in a name, characters that no program can be given
        _report(reporter, stage, errno.EINVAL, str(error))
    finally:
        os._exit(127)


def _settle_in(cgroup: Cgroup | None, keeper: int) -> None:
    """Do all that does not depend on the program."""
    os.setsid()
    die_with_parent(keeper)
    with suppress(OSError):  # not allowed here; the tree is found by the other ways
        if cgroup is not None:
            cgroup.enter()
    prefer_as_victim("self")
    # Handlers end with exec by themselves; until then, a signal must find none of the keeper's.
    for signum in signal.valid_signals():
        if signal.getsignal(signum) not in (signal.SIG_DFL, None):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _read_order(gate: socket.socket) -> tuple[tuple[str, ...], dict[str, str], str, int]:
    """Wait for the order and take its descriptors; end this process if it does not come whole."""
    data, descriptors, _, _ = socket.recv_fds(gate, _READ_BYTES, 3)
    parts = [data]
    while part := gate.recv(_READ_BYTES) if data else b"":
        parts.append(part)
    try:
        order = marshal.loads(b"".join(parts))
    except (EOFError, ValueError, TypeError):  # the keeper died, or needs nobody
        os._exit(1)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    argv, env, cwd, umask = order
    return argv, env, cwd, umask


def _report(reporter: int, stage: str, number: int | None, text: str) -> None:
    os.write(reporter, json.dumps([stage, number, text]).encode())


def describe_failure(spec: JobSpec, *, stage: str, number: int | None, text: str) -> str:
    """Return one sentence: which program, why not, and what to do."""
    if stage == "files":
        what = f"its files below {spec.output_dir!r} or its record cannot be made: {text}; check rights and space"
    elif stage == "fork":
        what = f"the machine has no process or descriptor left ({text}); end something, or raise the limit"
    elif stage == "cwd" or (spec.cwd is not None and not Path(spec.cwd).is_dir()):
        what = f"its working directory {spec.cwd or '/'!r} cannot be entered ({text}); make it, or give another one"
    elif number == errno.ENOENT:
        what = "there is no such program; install it, put it on PATH, or give its full path"
    elif number in (errno.EACCES, errno.EPERM):
        what = "it may not be executed; check that it is a program and its rights (chmod +x)"
    elif number == errno.ENOEXEC:
        what = "it is no executable format; does a script lack its first line (#!)?"
    elif number == errno.E2BIG:
        what = "its arguments and environment are too long; pass long values in a file"
    else:
        what = text
    return f"cannot start {spec.argv[0]!r}: {what}"
