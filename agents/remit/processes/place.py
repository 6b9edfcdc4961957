"""Where the daemon of this node and user keeps its things, and that nobody else can reach them.

STATE_DIR/procd/      0700, of this user
sock                the daemon's socket
start               locked by whoever starts a daemon: one at a time
life                locked by the daemon as long as it lives: never two
leases.json         until when each workspace is vouched for
stops               what was stopped before it was started
log                 what the daemon had to say
j/<job>/            0700, one directory a job, see `remit.processes.jobs`
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from remit.core.errors import ProcdUnavailable

__all__ = ["Place", "default_state_dir", "try_lock", "unsafe_reason"]


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return `$REMIT_STATE_DIR`, else `/tmp/remit-<uid>`.

    `/tmp` and not the user's own directory, because a socket's path must stay
    under 108 bytes.

    Args:
        environ: the environment; None means `os.environ`.
    """
    chosen = (os.environ if environ is None else environ).get("REMIT_STATE_DIR", "").strip()
    return Path(chosen).absolute() if chosen else Path(f"/tmp/remit-{os.geteuid()}")


def unsafe_reason(path: Path) -> str | None:
    """Return why a directory must not be trusted, or None if it is ours alone.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to user {os.geteuid()}"
    mode = stat.S_IMODE(found.st_mode)
    return f"others may enter it (mode {mode:04o}); run `chmod 700 {path}`" if mode & 0o077 else None


class Place:
    """The paths of one daemon.

    Args:
        state_dir: the node's state directory; need not exist. None means the default.
    """

    __slots__ = ("root", "state_dir")

    state_dir: Path
    """The node's state directory."""
    root: Path
    """The daemon's directory in it."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self.state_dir = (state_dir or default_state_dir()).absolute()
        self.root = self.state_dir / "procd"

    @property
    def socket(self) -> Path:
        """Socket of the daemon."""
        return self.root / "sock"

    @property
    def start_lock(self) -> Path:
        """File that is locked while somebody starts a daemon."""
        return self.root / "start"

    @property
    def life_lock(self) -> Path:
        """File that the daemon keeps locked, with its number in it."""
        return self.root / "life"

    @property
    def leases(self) -> Path:
        """File of the leases."""
        return self.root / "leases.json"

    @property
    def stops(self) -> Path:
        """File of the stops that came before their start."""
        return self.root / "stops"

    @property
    def log(self) -> Path:
        """File with what the daemon had to say."""
        return self.root / "log"

    @property
    def jobs(self) -> Path:
        """Directory of the jobs' directories."""
        return self.root / "j"

    def job(self, job: str) -> Path:
        """Return the directory of one job."""
        return self.jobs / job

    def create(self) -> None:
        """Make the directories, for this user alone.

        Raises:
            ProcdUnavailable: they cannot be made, or others may enter them.
        """
        try:
            self.state_dir.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.state_dir, self.root, self.jobs):
                path.mkdir(mode=0o700, exist_ok=True)
                # Looked at even when just made: somebody may have put another one in its place.
                reason = unsafe_reason(path)
                if reason is not None:
                    raise self._unusable(path, reason)
        except OSError as error:
            raise self._unusable(self.root, str(error)) from error

    def _unusable(self, path: Path, reason: str) -> ProcdUnavailable:
        return ProcdUnavailable(
            f"the state directory {path} cannot be used: {reason}; or set REMIT_STATE_DIR to another one",
            path=str(path),
        )


def try_lock(path: Path) -> int | None:
    """Take a lock that ends with this process; return its descriptor, or None when somebody has it.

    A record lock: children that are forked do not inherit it, so a keeper never
    keeps the place of a daemon that is gone. It ends as soon as this process
    closes any descriptor of that file.

    Raises:
        OSError: the file cannot be opened.

    Source: fcntl_locking(2), "Advisory record locking".
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle
