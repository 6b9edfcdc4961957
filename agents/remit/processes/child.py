"""One child process: started in a session of its own, watched, and waited for once.

**Invariants**

1. Nobody but `Child.reap` waits for the child, so its number stays its own
   until then; `has_exited` looks without taking.
2. The exit status is the kernel's or unknown, never a guess.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from remit.core.errors import CommandNotStarted, InvalidArgument
from remit.processes.output import STDERR_NAME, STDOUT_NAME, open_output
from remit.processes.table import MARK_VARIABLE, ProcessIdentity
from remit.processes.tree import identify

__all__ = ["Child", "ExitStatus", "spawn"]

RUN_VARIABLE = "REMIT_RUN"
"""Environment variable that tells a program which run it belongs to."""

_STDIN_NAME = "stdin"
_HAS_WAITID = hasattr(os, "waitid")  # macOS has it from Python 3.13 on
_EXIT_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended; both None when nobody can know."""

    exit_code: int | None = None
    """Status that it gave to exit, from 0."""
    signal: int | None = None
    """Number of the signal that ended it."""


class Child:
    """A started program that leads its own session and process group.

    Args:
        process: just started, in a new session, and not waited for.
        token: text that marks its tree, see `MARK_VARIABLE`.
        offsets: where its output begins in the files, standard output first.
    """

    __slots__ = ("_process", "_status", "identity", "offsets", "token")

    identity: ProcessIdentity
    """Number and start time."""
    offsets: tuple[int, int]
    """Sizes of the files of standard output and standard error before the start, in bytes."""
    token: str
    """Text that marks its tree."""

    def __init__(self, process: subprocess.Popen[bytes], *, token: str, offsets: tuple[int, int]) -> None:
        self._process = process
        self._status: ExitStatus | None = None
        self.token = token
        self.offsets = offsets
        # Not there only if somebody else in this process waits for all children; 0 then matches nothing.
        self.identity = identify(process.pid) or ProcessIdentity(process.pid, 0)

    @property
    def pid(self) -> int:
        """Return the process number."""
        return self.identity.pid

    def has_exited(self) -> bool:
        """Tell whether the program has ended, without waiting for it. Thread-safe."""
        if self._status is not None:
            return True
        if not _HAS_WAITID:
            try:
                return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:  # SIGCHLD is ignored here, or other code waits for every child
            return True

    def reap(self) -> ExitStatus | None:
        """Wait for an ended child and return how it ended; None while it still runs.

        Call it only when nothing will be signalled by the child's number any
        more. Later calls return the same.
        """
        if self._status is None and self.has_exited():
            try:
                _, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._settle(ExitStatus(), 0)
            else:
                code = os.waitstatus_to_exitcode(status)
                self._settle(ExitStatus(exit_code=code) if code >= 0 else ExitStatus(signal=-code), code)
        return self._status

    def _settle(self, status: ExitStatus, code: int) -> None:
        self._status = status
        # The child is gone; without this, the process object would look for it again.
        self._process.returncode = code

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> Callable[[], None]:
        """Call a function once, in the loop's thread, when the child has ended.

        Returns:
            A function that ends the watch; call it in the loop's thread.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, an old kernel, a sandbox, or no descriptor left
            return self._watch_by_thread(loop, on_exit)
        try:
            return _watch_by_handle(handle, loop, on_exit)
        except NotImplementedError:  # a loop without readers
            os.close(handle)
            return self._watch_by_thread(loop, on_exit)

    def _watch_by_thread(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> Callable[[], None]:
        is_closed = threading.Event()

        def wait() -> None:
            while not self.has_exited():
                if is_closed.wait(_EXIT_POLL_S):
                    return
            call_in_loop(loop, lambda: None if is_closed.is_set() else on_exit())

        threading.Thread(target=wait, name=f"remit-wait-{self.pid}", daemon=True).start()
        return is_closed.set


def _watch_by_handle(handle: int, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> Callable[[], None]:
    def close() -> None:
        nonlocal handle
        if handle >= 0:
            loop.remove_reader(handle)
            os.close(handle)
            handle = -1

    def ended() -> None:
        close()
        on_exit()

    loop.add_reader(handle, ended)
    return close


def call_in_loop(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> None:
    """Run a function soon in the loop's thread; do nothing when the loop is closed."""
    try:
        loop.call_soon_threadsafe(fn)
    except RuntimeError:  # closed: whoever waited there is gone as well
        pass


def spawn(
    argv: Sequence[str],
    *,
    output_dir: Path,
    mark: str,
    cwd: Path | None,
    env: Mapping[str, str] | None,
    stdin: bytes | None,
) -> Child:
    """Start a program in a session of its own, with its output in files.

    Raises:
        CommandNotStarted: it cannot be executed, or its files cannot be made.
        InvalidArgument: an argument or a variable cannot be given to a program.
    """
    program = argv[0]
    token = secrets.token_hex(8)
    environ = dict(os.environ if env is None else env)
    environ[RUN_VARIABLE] = mark
    # Added to what is there: a command started from inside a command belongs to both. The run's id
    # finds all commands of a run, the token tells apart those that run side by side.
    environ[MARK_VARIABLE] = "/".join(filter(None, (environ.get(MARK_VARIABLE), mark, token)))
    descriptors: list[int] = []
    try:
        output_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptors = [open_output(output_dir / STDOUT_NAME), open_output(output_dir / STDERR_NAME)]
        offsets = (os.fstat(descriptors[0]).st_size, os.fstat(descriptors[1]).st_size)
        descriptors.append(_open_stdin(output_dir, stdin))
    except OSError as error:
        _close_all(descriptors)
        raise CommandNotStarted(
            f"cannot start {program!r}: its output directory is not usable: {error}; check the directory's rights",
            program=program,
            errno=error.errno,
        ) from error
    try:
        process = subprocess.Popen(
            list(argv),
            stdout=descriptors[0],
            stderr=descriptors[1],
            stdin=descriptors[2],
            cwd=cwd,
            env=environ,
            close_fds=True,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(program, cwd, error) from error
    except ValueError as error:
        raise InvalidArgument(f"cannot start {program!r}: {error} in its arguments or environment") from error
    finally:
        _close_all(descriptors)
    return Child(process, token=token, offsets=offsets)


def _open_stdin(output_dir: Path, stdin: bytes | None) -> int:
    """Return a descriptor to read standard input from; a file, so that nobody has to feed it."""
    if stdin is None:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    path = output_dir / _STDIN_NAME
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(stdin)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _not_started(program: str, cwd: Path | None, error: OSError) -> CommandNotStarted:
    """Return the error with a sentence on what to do."""
    if cwd is not None and not cwd.is_dir():
        what = f"its working directory {str(cwd)!r} does not exist; make it, or give another one"
    elif error.errno == errno.ENOENT:
        what = "there is no such program; install it, put it on PATH, or give its full path"
    elif error.errno in (errno.EACCES, errno.EPERM):
        what = "it may not be executed; check that it is a program and its rights (chmod +x)"
    elif error.errno == errno.ENOEXEC:
        what = "it is no executable format; does a script lack its first line (#!)?"
    elif error.errno == errno.E2BIG:
        what = "its arguments and environment are too long; pass long values in a file"
    else:
        what = f"{error.strerror or error}"
    return CommandNotStarted(f"cannot start {program!r}: {what}", program=program, errno=error.errno)
