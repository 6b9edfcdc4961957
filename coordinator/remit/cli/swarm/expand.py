"""What `each` stands for: the files a pattern finds, a list, or the lines a command prints.

**Invariants**

1. The same workspace gives the same items in the same order.
2. No pattern leaves the workspace, by `..` or by a link.
3. A command of `lines` that is stopped before its end goes with its whole
   process group.
"""

from __future__ import annotations

import fnmatch
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from remit.cli.swarm.model import EachSpec
from remit.core.errors import SwarmFileError

__all__ = ["MAX_ITEMS", "expand", "find_items", "first_items"]

MAX_ITEMS = 100_000
"""Most runs that one `each` may stand for."""

LINES_TIMEOUT_S = 60.0
"""How long the command of `lines` may take, in seconds."""

_MAX_OUTPUT_BYTES = 64 * 1024 * 1024
_MAX_STDERR_BYTES = 64 * 1024
_SHOWN_STDERR_CHARS = 300
_NEVER_GUESSED = frozenset({".git", ".remit", ".venv", "node_modules"})
"""Folders that only a pattern which spells out their name goes into."""


def expand(each: EachSpec, workspace: Path) -> list[JsonValue]:
    """Return the items a run is repeated for.

    Args:
        each: what to look for.
        workspace: existing folder that patterns and commands are relative to.

    Returns:
        Paths relative to the workspace with `/` between their parts, sorted, each
        once; or the values of the list; or the lines that are not blank, in the
        order they were printed. At most `each.limit`.

    Raises:
        SwarmFileError: a folder cannot be read, the command fails, or there are
            more than 100,000 items. `field` names the part of `each`.
    """
    return first_items(each, find_items(each, workspace))


def find_items(each: EachSpec, workspace: Path) -> list[JsonValue]:
    """Return all items, as `expand` does before `limit`.

    Raises:
        SwarmFileError: as for `expand`, save for the number of items.
    """
    if each.glob is not None:
        return _Search(workspace, each.exclude or ()).find(each.glob)
    if each.lines is not None:
        return list[JsonValue](_lines(each.lines, workspace))
    return list(each.items or ())


def first_items(each: EachSpec, found: list[JsonValue]) -> list[JsonValue]:
    """Return the items that `limit` leaves.

    Raises:
        SwarmFileError: they are still more than 100,000.
    """
    chosen = found[: each.limit]
    if len(chosen) > MAX_ITEMS:
        field = "glob" if each.glob is not None else "lines" if each.lines is not None else "list"
        raise _refusal(field, f"stands for {len(chosen):,} items and may for {MAX_ITEMS:,}; set 'limit' or narrow it")
    return chosen


def _refusal(field: str, text: str) -> SwarmFileError:
    return SwarmFileError(f"each.{field}: {text}", field=field, text=text)


class _Search:
    """Walk the workspace once for several patterns.

    A link to a folder is entered where the pattern names its place, not by `**`,
    which could go round in circles.
    """

    def __init__(self, workspace: Path, exclude: Sequence[str]) -> None:
        self._root = os.path.realpath(workspace)
        self._exclude = [_exclusion(pattern) for pattern in exclude]
        self._listings: dict[str, list[os.DirEntry[str]]] = {}

    def find(self, patterns: Sequence[str]) -> list[JsonValue]:
        """Return what any of the patterns finds, sorted, each once."""
        found: set[str] = set()
        for pattern in patterns:
            self._find(pattern, found)
        return list[JsonValue](sorted(found))

    def _find(self, pattern: str, found: set[str]) -> None:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        folders_wanted = pattern.endswith("/")
        if not parts or parts[-1] == "**":
            parts.append("*")
        # A folder is looked at once for each part of the pattern, so that several ** cost no more than their product.
        pending, seen = [("", 0)], set[tuple[str, int]]()
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            folder, depth = place
            if parts[depth] == "**":
                pending.append((folder, depth + 1))
                below = [entry for entry in self._listing(folder) if _matches("*", entry.name)]
                pending += [(_join(folder, e.name), depth) for e in below if e.is_dir(follow_symlinks=False)]
                continue
            for entry in self._listing(folder):
                if not _matches(parts[depth], entry.name) or not self._is_inside(entry):
                    continue
                path = _join(folder, entry.name)
                if depth + 1 < len(parts):
                    if entry.is_dir():
                        pending.append((path, depth + 1))
                elif entry.is_dir() if folders_wanted else entry.is_file():
                    found.add(path)

    def _listing(self, folder: str) -> list[os.DirEntry[str]]:
        """Return what a folder holds and no exclusion leaves out."""
        if folder not in self._listings:
            self._listings[folder] = [
                entry for entry in self._scan(folder) if self._is_wanted(_join(folder, entry.name))
            ]
        return self._listings[folder]

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
                return list(entries)
        except FileNotFoundError:  # gone since its parent was listed
            return []
        except OSError as error:
            shown = folder or "the workspace"
            raise _refusal(
                "glob", f"cannot look into {shown!r}: {error.strerror}; 'exclude' can leave it out"
            ) from error

    def _is_wanted(self, path: str) -> bool:
        names = tuple(path.split("/"))
        # What lies below an excluded folder is never listed, so whole paths are enough.
        if any(_fits(pattern, names) for pattern in self._exclude):
            return False
        try:
            path.encode()
        except UnicodeEncodeError:
            raise _refusal(
                "glob", f"the file name {path!r} is not UTF-8; rename it, or leave it out by 'exclude'"
            ) from None
        return True

    def _is_inside(self, entry: os.DirEntry[str]) -> bool:
        """Tell whether an entry is in the workspace and, if a link, leads there."""
        if not entry.is_symlink():
            return True
        target = os.path.realpath(entry.path)
        return target == self._root or target.startswith(self._root.rstrip(os.sep) + os.sep)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _matches(part: str, name: str) -> bool:
    """Tell whether a name fits one part of a pattern; hidden and known bulky ones must be asked for."""
    if part == name:
        return True
    if name in _NEVER_GUESSED or (name.startswith(".") and not part.startswith(".")):
        return False
    return fnmatch.fnmatchcase(name, part)


def _exclusion(pattern: str) -> tuple[str, ...]:
    """Return the parts of a pattern for what is left out; a lone name holds in every folder."""
    parts = tuple(part for part in pattern.split("/") if part not in ("", "."))
    return parts if "/" in pattern.rstrip("/") else ("**", *parts)


def _fits(parts: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Tell whether a whole path, as names, fits a whole pattern, as parts."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(parts[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _fits(parts[1:], names[1:])


def _lines(argv: Sequence[str], workspace: Path) -> list[str]:
    """Run a command and return the lines it prints that are not blank."""
    try:
        process = subprocess.Popen(
            argv,
            cwd=workspace,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise _refusal("lines", f"{argv[0]!r} cannot be started: {reason}") from error
    try:
        output, complaint, status = _outputs(process, argv[0])
    finally:
        _stop(process)
    if status != 0:
        said = complaint.decode(errors="replace").strip()[-_SHOWN_STDERR_CHARS:]
        ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise _refusal("lines", f"{argv[0]!r} {ending}" + (f": {' '.join(said.split())}" if said else ""))
    try:
        text = output.decode()
    except UnicodeDecodeError as error:
        raise _refusal("lines", f"{argv[0]!r} printed what is not UTF-8 text") from error
    return [line for line in (raw.removesuffix("\r") for raw in text.split("\n")) if line.strip()]


def _outputs(process: subprocess.Popen[bytes], program: str) -> tuple[bytes, bytes, int]:
    """Read both outputs to their end, within the bounds of time and size; return the status too."""
    limit = time.monotonic() + LINES_TIMEOUT_S
    too_long = _refusal("lines", f"{program!r} did not end within {LINES_TIMEOUT_S:g} seconds and was stopped")
    assert process.stdout is not None
    assert process.stderr is not None
    output, complaint = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, complaint)
        while selector.get_map():
            ready = selector.select(max(0.0, limit - time.monotonic()))
            if not ready or time.monotonic() > limit:
                raise too_long
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if len(output) > _MAX_OUTPUT_BYTES:
                raise _refusal("lines", f"{program!r} printed more than {_MAX_OUTPUT_BYTES:,} bytes and was stopped")
            del complaint[:-_MAX_STDERR_BYTES]
    try:
        status = process.wait(max(0.0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise too_long from None
    return bytes(output), bytes(complaint), status


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes; kill the group of a command that has not been collected, and collect it."""
    # Once collected its number may be another's, and what it left running it left on purpose.
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except PermissionError:  # macOS, for a group of nothing but ended processes
            pass
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
