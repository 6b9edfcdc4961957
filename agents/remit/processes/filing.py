"""The files of one job, as its keeper writes them: spec and result once, state now and then.

**Invariants**

1. A result is written once and never changed; if there is no room, again until
   there is, for a while.
2. It is in its place before anybody is told, unless it cannot be written; it is
   on the disk before the keeper ends.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from remit.processes.draft import Draft
from remit.processes.jobs import RESULT_NAME, STATE_NAME, JobResult, JobSpec, JobState, make_durable, write_record

__all__ = ["JobFiles"]


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

    def make(self, draft: Draft | None, spec: JobSpec, state: JobState, *, digest: str) -> Draft:
        """Make the directory, of a draft that was made ahead or of a new one; return which.

        Raises:
            OSError: it cannot be made; then no file of this job is ever written.
        """
        try:
            draft = draft or Draft(self._folder.parent)
            draft.record(self._folder, spec, state, digest=digest)
        except OSError:
            self._has_no_place = True
            raise
        return draft

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
