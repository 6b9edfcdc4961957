"""The daemon of tool processes: `python -m remit.processes.procd --state-dir DIR`.

One a node and user. It detaches from whoever starts it, twice forked and in a
session of its own, so that neither Ray's clean-up nor a closed terminal takes
it, and exits by itself when it has had nothing to do for long. The process between
the two forks stays as its warden.

Two daemons never serve one directory: the lock of life comes before the socket.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path

from remit.core.clock import SystemClock
from remit.core.errors import ProcdUnavailable
from remit.processes.containment import become_subreaper, detect
from remit.processes.forks import SystemForks
from remit.processes.leases import LEASE_S
from remit.processes.place import Place, try_lock
from remit.processes.server import IDLE_S, Server
from remit.processes.starting import READY, TAKEN
from remit.processes.warden import keep_watch

__all__ = ["main"]

_LOG_BYTES = 1_000_000
_BACKLOG = 1024


def main(argv: list[str] | None = None) -> int:
    """Run the daemon; return its exit status. With `--detach`, returns in the starter at once."""
    options = _parser().parse_args(argv)
    try:
        return _serve(options)
    except (ProcdUnavailable, OSError) as error:
        _log(f"cannot serve: {error}")
        return 1


def _serve(options: argparse.Namespace) -> int:
    place = Place(options.state_dir)
    place.create()
    ready: int | None = options.ready_fd
    warden: int | None = None
    if options.detach:
        if os.fork():
            return 0
        warden = _detach(place)
    lock = try_lock(place.life_lock)
    if lock is None:
        _tell(ready, TAKEN)
        return 0
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    forks = SystemForks(jobs=place.jobs, reattach_grace_s=options.reattach_grace_s, warden=warden)
    forks.take_in_orphans()
    server = Server(
        place,
        _listen(place),
        clock=SystemClock(),
        forks=forks,
        log=_log,
        idle_s=options.idle_s,
        lease_s=options.lease_s,
    )
    living = server.adopt()
    _log(f"serving, pid {os.getpid()}, {living} jobs taken over")
    _tell(ready, READY)
    # Everything so far stays shared with the keepers that are forked from here.
    gc.collect()
    gc.freeze()
    server.run()
    _log("nothing to do; ending")
    place.socket.unlink(missing_ok=True)
    server.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="procd", description="The daemon that holds the tool processes of a node.")
    parser.add_argument("--state-dir", type=Path, help="directory of the node; default: $REMIT_STATE_DIR")
    parser.add_argument("--detach", action="store_true", help="go into the background")
    parser.add_argument("--ready-fd", type=int, help="descriptor to write to when it serves")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="seconds without work until it ends")
    parser.add_argument("--lease-s", type=float, default=LEASE_S, help="seconds that a start vouches for its workspace")
    parser.add_argument(
        "--reattach-grace-s",
        type=float,
        default=LEASE_S * 2 / 3,
        help="seconds that a keeper waits for the next daemon when this one is killed",
    )
    return parser


def _detach(place: Place) -> int | None:
    """Go into a new session and fork the daemon; return in it the number of its warden, None without one.

    The process that called becomes the warden, or ends where it cannot be one.
    """
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    has_warden = detect().subreaper and become_subreaper()
    if os.fork():
        if has_warden:
            keep_watch()
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    # Its starter may ignore or block what we need: waiting for children, above all.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if place.log.exists() and place.log.stat().st_size > _LOG_BYTES:
        place.log.replace(place.log.with_suffix(".old"))
    handle = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return os.getppid() if has_warden else None


def _listen(place: Place) -> socket.socket:
    """Bind the socket; only the holder of the lock of life may take away an old one."""
    place.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.getcwd()
    mask = os.umask(0o177)
    try:
        # By its short name: an address holds 108 bytes, and the directory may be deep.
        os.chdir(place.root)
        listener.bind(place.socket.name)
    finally:
        os.umask(mask)
        os.chdir(before)
    listener.listen(_BACKLOG)
    return listener


def _tell(ready: int | None, word: bytes) -> None:
    if ready is not None:
        with contextlib.suppress(OSError):  # the starter has given up
            os.write(ready, word)
        os.close(ready)


def _log(line: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # a full disk must not end the daemon
        sys.stderr.write(f"{stamp} {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
