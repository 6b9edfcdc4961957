"""What a caller asks for: one path or one glob, to read or to write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from remit.locks.errors import InvalidClaim

__all__ = ["Claim", "Mode", "exclusive", "read", "write"]


class Mode(StrEnum):
    """How a claim is used: readers share, a writer shares with nobody unrelated."""

    READ = "read"
    """Look at it; nobody else may change it meanwhile."""
    WRITE = "write"
    """Change, create, rename or remove it; nobody else may even look."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One wish, as the caller spelled it; `Workspace.areas` makes it comparable.

    Build it with `read`, `write` or `exclusive`.
    """

    mode: Mode
    """Read or write."""
    text: str
    """The path or the pattern, unchanged."""
    is_glob: bool = False
    """True if the text is a pattern. Never guessed: `app/[id]/page.tsx` is a file."""

    def describe(self) -> str:
        """Return the claim as people write it: `write src/a.py`, `read glob docs/*.md`."""
        return f"{self.mode.value} {'glob ' if self.is_glob else ''}{self.text}"


def read(path: str | os.PathLike[str] | None = None, *, glob: str | None = None) -> Claim:
    """Claim a path and all that lies below it, or what a glob matches, for reading.

    Args:
        path: literal path, relative to the workspace or absolute inside it.
        glob: pattern instead of a path, relative to the workspace. `*`, `?` and
            `[...]` match within a name, dotfiles included; `**` is any number of
            names, none included; `{a,b}` is either. It covers exactly what it
            matches, so `*.md` means the top level alone.

    Raises:
        InvalidClaim: neither or both are given, or the one given is empty.
    """
    return _claim(Mode.READ, path, glob)


def write(path: str | os.PathLike[str] | None = None, *, glob: str | None = None) -> Claim:
    """Claim a path and all that lies below it, or what a glob matches, for writing.

    A rename is a claim on both ends in one request; removing a folder needs a
    claim on the folder, since that covers what is below it.

    Args:
        path: as for `read`.
        glob: as for `read`.

    Raises:
        InvalidClaim: neither or both are given, or the one given is empty.
    """
    return _claim(Mode.WRITE, path, glob)


def exclusive() -> Claim:
    """Claim the whole workspace for writing, as an opaque command needs it."""
    return Claim(Mode.WRITE, ".")


def _claim(mode: Mode, path: str | os.PathLike[str] | None, glob: str | None) -> Claim:
    if (path is None) == (glob is None):
        raise InvalidClaim(f"{mode.value}() takes a path or a glob, and exactly one of them")
    text = os.fsdecode(path) if path is not None else glob
    # An empty text is far more often a variable that was never filled in than
    # the wish to lock everything, which has a name of its own.
    if not text:
        raise InvalidClaim(f'{mode.value}("") claims nothing; use "." or exclusive() for the whole workspace')
    return Claim(mode, text, is_glob=glob is not None)
