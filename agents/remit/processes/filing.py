"""The files of one job, as its keeper writes them: spec and result once, state now and then.

**Invariants**

1. The directory of a job is there with spec, state and socket, or it is not there:
   it is made beside its place and renamed.
2. A result is written once and never changed; if there is no room, again until
   there is, for a while.
3. It is in its place before anybody is told, unless it cannot be written; it is
   on the disk before the keeper ends.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from remit.processes.jobs import (
    RESULT_NAME,
    SPEC_NAME,
    STATE_NAME,
    JobResult,
    JobSpec,
    JobState,
    make_durable,
    write_record,
)

__all__ = ["DIGEST_FIELD", "JobFiles", "is_unfinished", "make_directory", "unfinished"]

DIGEST_FIELD = "digest"
"""Field of the spec's file with the fingerprint of its command, for a daemon that does not know the environment."""
_BESIDE = "."
"""What the name of a directory begins with that is not complete yet."""


def unfinished(folder: Path) -> Path:
    """Return where the directory of a job is made before it gets its name."""
    return folder.with_name(_BESIDE + folder.name)


def is_unfinished(folder: Path) -> bool:
    """Tell whether a directory belongs to a job that was never recorded."""
    return folder.name.startswith(_BESIDE)


def make_directory(
    folder: Path,
    spec: JobSpec,
    *,
    digest: str,
    state: JobState | None = None,
    furnish: Callable[[Path], None] | None = None,
) -> None:
    """Make the directory of a job, whole or not at all.

    Args:
        folder: its place; there may be an empty directory.
        spec: of the job.
        digest: fingerprint of its command.
        state: what is known before the start; None for a job that no keeper has begun with.
        furnish: called with the directory before it has its name.

    Raises:
        OSError: no space, no right, or there is such a job; nothing is left behind.
    """
    beside = unfinished(folder)
    try:
        os.mkdir(beside, 0o700)
        _write(beside / SPEC_NAME, {**spec.to_dict(), DIGEST_FIELD: digest})
        if state is not None:
            _write(beside / STATE_NAME, state.to_dict())
        if furnish is not None:
            furnish(beside)
        os.rename(beside, folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write(path: Path, data: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(json.dumps(data, separators=(",", ":")).encode())
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


class JobFiles:
    """State and result in the directory of one job.

    Args:
        folder: the directory.
        retry_s: seconds for which a result that cannot be written is tried again.
    """

    def __init__(self, folder: Path, *, retry_s: float) -> None:
        self._folder = folder
        self._retry_s = retry_s
        self._has_no_place = False
        self._unwritten: JobResult | None = None
        self._until = 0.0

    @property
    def is_settled(self) -> bool:
        """Tell whether no result waits to be written."""
        return self._unwritten is None

    def make(self, spec: JobSpec, state: JobState, *, digest: str, furnish: Callable[[Path], None]) -> None:
        """Make the directory, see `make_directory`.

        Raises:
            OSError: it cannot be made; then no file of this job is ever written.
        """
        try:
            make_directory(self._folder, spec, digest=digest, state=state, furnish=furnish)
        except OSError:
            self._has_no_place = True
            raise

    def remove(self) -> None:
        """Remove the directory; for a job that nobody is told of."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def save(self, state: JobState) -> None:
        """Write the state.

        Raises:
            OSError: it cannot be written; the older one is still there.
        """
        write_record(self._folder / STATE_NAME, state)

    def save_if_possible(self, state: JobState) -> None:
        """Write the state, or leave the older one, which finds the same processes."""
        with suppress(OSError):
            self.save(state)

    def file(self, result: JobResult, *, now: float) -> None:
        """Write the result, now or by `retry`.

        Args:
            result: of the job.
            now: monotonic seconds.
        """
        self._unwritten = None if self._has_no_place else result
        self._until = now + self._retry_s
        self.retry(now)

    def retry(self, now: float) -> None:
        """Write what could not be written so far; give up when its time is over."""
        if self._unwritten is None:
            return
        try:
            write_record(self._folder / RESULT_NAME, self._unwritten)
        except OSError:
            # A full disk may have room again soon; whoever is connected was told without waiting for that.
            if now >= self._until:
                self._unwritten = None
        else:
            self._unwritten = None

    def make_durable(self) -> None:
        """Wait until the result is on the disk, if there is one."""
        with suppress(OSError):
            make_durable(self._folder / RESULT_NAME)
