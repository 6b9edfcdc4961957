"""What bodies print goes to their run's log, not into a file of the host that nobody reads."""

from __future__ import annotations

import contextvars
import io
import sys
from collections.abc import Callable
from typing import TextIO

__all__ = ["capture_prints", "current_log"]

current_log: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "remit_current_log", default=None
)
"""Where the running body's output goes; set around each body, inherited by its tasks and threads."""


class RunStream(io.TextIOBase):
    """A text stream that writes to the current run's log, or to the stream behind it.

    Args:
        behind: the stream for what is printed outside any body.
    """

    def __init__(self, behind: TextIO) -> None:
        super().__init__()
        self._behind = behind

    def write(self, text: str, /) -> int:
        """Write a text to the log of whoever prints it."""
        log = current_log.get()
        if log is None:
            return self._behind.write(text)
        try:
            log(text)
        except OSError:
            # A full disk must not turn a print into a failure of the agent.
            self._behind.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream behind; logs are written through."""
        self._behind.flush()

    def writable(self) -> bool:
        """Tell that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream behind, for those who go around Python."""
        return self._behind.fileno()


def capture_prints() -> None:
    """Put such streams in the place of this process's `stdout` and `stderr`; idempotent."""
    if not isinstance(sys.stdout, RunStream):
        sys.stdout = RunStream(sys.stdout)
    if not isinstance(sys.stderr, RunStream):
        sys.stderr = RunStream(sys.stderr)
