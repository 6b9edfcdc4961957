"""The directory of a job before it has a job: made ahead, beside its place, and given its name with the record.

**Invariants**

1. The directory of a job is there with spec, state and socket, or it is not there.
2. A name stands for one job: whoever comes second with it fails.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from remit.processes.jobs import SOCKET_NAME, SPEC_NAME, STATE_NAME, JobSpec, JobState

__all__ = ["DIGEST_FIELD", "Draft", "is_draft", "make_directory", "remove_left_drafts"]

DIGEST_FIELD = "digest"
"""Field of the spec's file with the fingerprint of its command, for a daemon that does not know the environment."""
_PREFIX = ".keeper_"
_BACKLOG = 64
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Draft:
    """A directory without a job, of this process alone. It makes this process enter the directory.

    Args:
        above: the directory of the jobs' directories.

    Raises:
        OSError: no space, or no right; nothing is left behind.
    """

    __slots__ = ("_spec", "_state", "folder", "listener")

    folder: Path
    """Where it is."""
    listener: socket.socket
    """Listens on the socket in it; whoever uses the draft closes it."""

    def __init__(self, above: Path) -> None:
        self.folder = above / f"{_PREFIX}{os.getpid()}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Of an earlier process of this number.
            shutil.rmtree(self.folder, ignore_errors=True)
            os.mkdir(self.folder, 0o700)
            # From within: the address of a socket holds 108 bytes only.
            os.chdir(self.folder)
            self.listener.setblocking(False)
            self.listener.bind(SOCKET_NAME)
            self.listener.listen(_BACKLOG)
            self._spec = os.open(SPEC_NAME, _FLAGS, 0o600)
            self._state = os.open(STATE_NAME, _FLAGS, 0o600)
        except OSError:
            self.remove()
            raise

    def record(self, jobdir: Path, spec: JobSpec, state: JobState, *, digest: str) -> None:
        """Give the directory to a job; from here on the draft is used up.

        Args:
            jobdir: its place; there may be an empty directory.
            spec: of the job.
            state: what is known before the start.
            digest: fingerprint of the command.

        Raises:
            OSError: no space, no right, or there is such a job; nothing is left behind.
        """
        try:
            _write(self._spec, {**spec.to_dict(), DIGEST_FIELD: digest})
            _write(self._state, state.to_dict())
            os.rename(self.folder, jobdir)
        except OSError:
            self.remove()
            raise
        finally:
            os.close(self._spec)
            os.close(self._state)

    def remove(self) -> None:
        """Remove the directory; for a draft that is not used."""
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def make_directory(jobdir: Path, spec: JobSpec, *, digest: str) -> None:
    """Make the directory of a job that no keeper has recorded.

    Raises:
        OSError: no space, no right, or there is one.
    """
    os.mkdir(jobdir, 0o700)
    descriptor = os.open(jobdir / SPEC_NAME, _FLAGS, 0o600)
    try:
        _write(descriptor, {**spec.to_dict(), DIGEST_FIELD: digest})
    finally:
        os.close(descriptor)


def is_draft(folder: Path) -> bool:
    """Tell whether a directory has no job yet."""
    return folder.name.startswith(_PREFIX)


def remove_left_drafts(above: Path) -> None:
    """Remove the drafts of keepers that are gone.

    Args:
        above: the directory of the jobs' directories.
    """
    with suppress(OSError):
        for name in os.listdir(above):
            if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{name.removeprefix(_PREFIX)}"):
                shutil.rmtree(above / name, ignore_errors=True)


def _write(descriptor: int, data: dict[str, Any]) -> None:
    view = memoryview(json.dumps(data, separators=(",", ":")).encode())
    while view:
        view = view[os.write(descriptor, view) :]
