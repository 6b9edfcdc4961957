"""What the command says with its exit status: one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from remit.core.errors import RemitError, TurnCancelled, UsageError
from remit.core.outcome import Outcome
from remit.core.texts import error_text, one_line

__all__ = ["CANCELLED", "FAILED", "TIMED_OUT", "USAGE", "of_error", "of_outcome", "reported", "show_any_text"]

FAILED = 1
USAGE = 2
TIMED_OUT = 124
"""As timeout(1) of coreutils."""
CANCELLED = 130
"""As a shell reports an end by SIGINT."""

_OUTCOMES = {
    Outcome.SUCCEEDED: 0,
    Outcome.FAILED: FAILED,
    Outcome.LOST: FAILED,
    Outcome.TIMED_OUT: TIMED_OUT,
    Outcome.CANCELLED: CANCELLED,
}

# Besides the caller's own mistakes, what only the caller can mend: no Ray, or nothing that runs.
_USAGE_CODES = {"coordinator_unavailable"}


def of_outcome(outcome: Outcome | None) -> int:
    """Return the exit status for how a turn or run ended; 1 if that is not known."""
    return FAILED if outcome is None else _OUTCOMES[outcome]


def of_error(error: BaseException) -> int:
    """Return the exit status for an error."""
    if isinstance(error, TurnCancelled):
        return CANCELLED
    if isinstance(error, UsageError) or (isinstance(error, RemitError) and error.code in _USAGE_CODES):
        return USAGE
    return FAILED


def show_any_text() -> None:
    """Let both streams take what their encoding has no bytes for, as its escape: better than no answer."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


@contextmanager
def reported() -> Generator[None]:
    """Say what went wrong in one sentence on stderr, and exit with the status for it.

    `REMIT_DEBUG=1` shows the traceback instead.

    Raises:
        SystemExit: something of ours came out of the block.
    """
    show_any_text()
    try:
        yield
    except (RemitError, TurnCancelled) as error:
        if os.environ.get("REMIT_DEBUG"):
            raise
        problems: tuple[str, ...] = getattr(error, "problems", ())
        for line in problems or (f"{error} ({error.code})",):
            sys.stderr.write(f"remit: {one_line(line)}\n")
        raise SystemExit(of_error(error)) from None
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(CANCELLED) from None
    except Exception as error:  # the outermost edge: people get a sentence, whatever broke
        if os.environ.get("REMIT_DEBUG"):
            raise
        what = one_line(f"{type(error).__name__}: {error_text(error)}")
        sys.stderr.write(f"remit: {what} (REMIT_DEBUG=1 shows where)\n")
        raise SystemExit(FAILED) from None
