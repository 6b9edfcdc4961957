"""Find the daemon of this node and user, or start it: one wins, the others find it."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import remit
from remit.core.errors import ProcdUnavailable
from remit.processes.containment import SWITCH_VARIABLE
from remit.processes.frames import connect
from remit.processes.place import Place

__all__ = ["READY", "TAKEN", "daemon_environ", "ensure_daemon", "is_serving"]

READY = b"ready"
"""What the daemon writes to the descriptor of its starter when it serves."""
TAKEN = b"taken"
"""What it writes when another daemon serves already."""

START_LIMIT_S = 20.0
"""How long a start may take, the import of Python on a loaded machine included."""
_POLL_S = 0.02
_KEPT_VARIABLES = (
    *("HOME", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER"),
    *("LANG", "LC_ALL", "LC_CTYPE"),
    *("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"),
    SWITCH_VARIABLE,
)


def is_serving(place: Place) -> bool:
    """Tell whether a daemon listens there."""
    try:
        connect(place.socket, timeout_s=1.0).close()
    except OSError:
        return False
    return True


def ensure_daemon(place: Place, *, limit_s: float = START_LIMIT_S, options: tuple[str, ...] = ()) -> None:
    """Return when a daemon serves, after starting one if there is none.

    Any number of threads and processes may call this at once; one daemon comes
    of it. It belongs to nobody: it outlives this process.

    Args:
        place: where.
        limit_s: seconds.
        options: further arguments of the daemon.

    Raises:
        ProcdUnavailable: it did not serve in time; the message has its last words.
    """
    place.create()
    until = time.monotonic() + limit_s
    handle = os.open(place.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not is_serving(place):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Somebody else is starting it.
                if time.monotonic() >= until:
                    raise _unavailable(place, limit_s) from None
                time.sleep(_POLL_S)
                continue
            # It may have been started between the look and the lock.
            if not is_serving(place):
                _start(place, until, limit_s, options)
            return
    except OSError as error:
        raise ProcdUnavailable(
            f"the daemon of tool processes cannot be started in {place.root}: {error}; free space or processes",
            path=str(place.root),
        ) from error
    finally:
        os.close(handle)


def daemon_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment the daemon needs.

    No secret of its starter, and no mark of a job: else the stop of a process
    that happened to start the daemon would end it as one of its tree.
    """
    return {name: environ[name] for name in _KEPT_VARIABLES if name in environ}


def _start(place: Place, until: float, limit_s: float, options: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    try:
        process = _popen(place, writer, options)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        word = _read_word(reader, until)
        process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise _unavailable(place, limit_s) from None
    finally:
        os.close(reader)
    if word == TAKEN:
        # One that was started by hand, or whose starter died, and that does not listen yet.
        while not is_serving(place):
            if time.monotonic() >= until:
                raise _unavailable(place, limit_s)
            time.sleep(_POLL_S)
    elif word != READY:
        raise _unavailable(place, limit_s)


def _popen(place: Place, ready: int, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "remit.processes.procd", "--detach", "--state-dir", str(place.state_dir)]
    return subprocess.Popen(
        [*command, "--ready-fd", str(ready), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(ready,),
        env=_environ(),
        cwd="/",
        start_new_session=True,
    )


def _read_word(reader: int, until: float) -> bytes:
    ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
    return os.read(reader, 16) if ready else b""


def _environ() -> dict[str, str]:
    environ = daemon_environ(os.environ)
    # Wherever this process has us from, a wheel given to a Ray worker included.
    roots = [str(Path(root).parent) for root in remit.__path__]
    environ["PYTHONPATH"] = os.pathsep.join([*roots, *filter(None, [environ.get("PYTHONPATH")])])
    return environ


def _unavailable(place: Place, limit_s: float) -> ProcdUnavailable:
    try:
        last = place.log.read_text(errors="replace").strip().splitlines()[-1:]
    except OSError:
        last = []
    said = f" Its last words: {last[0]!r}." if last else ""
    return ProcdUnavailable(
        f"the daemon of tool processes did not serve within {limit_s:g} s.{said} See {place.log}",
        path=str(place.log),
    )
