"""Areas: normalised claims, and when two of them overlap or one includes the other.

An area's key is text that two spellings of the same place share: names joined
by `/`, relative to the workspace, the empty text for the workspace itself.
`Workspace.areas` makes areas; everything here is pure.

**Invariants**

1. Overlap is symmetric and exact; it never misses a common path.
2. `includes` is never wrongly true.
3. A path area covers the path and all below; a glob area what it matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from remit.core.texts import one_line
from remit.locks.claims import Mode
from remit.locks.glob import DEEP, Name, include, meet, name_includes, names_meet, parse_name

__all__ = ["Area", "AreaKind", "Pattern", "conflict", "includes", "merge", "overlap", "pattern_of"]


class AreaKind(StrEnum):
    """What the key of an area means."""

    PATH = "path"
    """A literal path and all that lies below it."""
    GLOB = "glob"
    """What the pattern matches, and nothing else."""
    INODE = "inode"
    """One file with several names, as `device:inode`; meets only itself."""


@dataclass(frozen=True, slots=True)
class Area:
    """One normalised claim: a mode and a set of paths."""

    mode: Mode
    """Read or write."""
    key: str
    """The normalised path or pattern; the empty text is the whole workspace."""
    kind: AreaKind = AreaKind.PATH
    """What the key means."""
    label: str = field(default="", compare=False)
    """The spelling for people where it differs from the key; empty where it does not."""

    def describe(self) -> str:
        """Return the area as people write it: `write src/a.py`."""
        kind = "" if self.kind is AreaKind.PATH else f"{self.kind.value} "
        text = self.label or self.key or "."
        return f"{self.mode.value} {kind}{one_line(text)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the area as a mapping of texts, for JSON."""
        data = {"mode": self.mode.value, self.kind.value: self.key}
        if self.label:
            data["label"] = self.label
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Area:
        """Return the area that `to_dict` wrote."""
        kind = next(kind for kind in AreaKind if kind.value in data)
        return cls(Mode(data["mode"]), data[kind.value], kind, data.get("label", ""))


@dataclass(frozen=True, slots=True)
class Pattern:
    """The parsed key of an area."""

    anchor: tuple[str, ...]
    """The literal names that everything in the area begins with."""
    tail: tuple[Name, ...]
    """What follows the anchor; begins with a wildcard, or is empty."""
    names: tuple[Name, ...]
    """Anchor and tail in one."""


@lru_cache(maxsize=65_536)
def pattern_of(kind: AreaKind, key: str) -> Pattern:
    """Parse a key.

    Args:
        kind: what the key means.
        key: the normalised text.

    Raises:
        InvalidClaim: a class in a glob that no character is in.
    """
    parts = key.split("/") if key else []
    if kind is not AreaKind.GLOB:
        anchor = tuple(parts)
        return Pattern(anchor, (DEEP,), (*anchor, DEEP))
    names = tuple(parse_name(part) for part in parts)
    literal = 0
    while literal < len(names) and isinstance(names[literal], str):
        literal += 1
    return Pattern(tuple(str(name) for name in names[:literal]), names[literal:], names)


# Read once: looking up a member of an enumeration costs as much as a comparison of two paths.
_READ: Final = Mode.READ
_WRITE: Final = Mode.WRITE
_PATH: Final = AreaKind.PATH
_INODE: Final = AreaKind.INODE


def overlap(one: Area, two: Area) -> bool:
    """Tell whether some path lies in both areas; modes do not matter."""
    if one.kind is _INODE or two.kind is _INODE:
        return one.kind is two.kind and one.key == two.key
    if one.kind is _PATH and two.kind is _PATH:
        return _is_below(one.key, two.key) or _is_below(two.key, one.key)
    return _patterns_meet(one.kind, one.key, two.kind, two.key)


def conflict(one: Area, two: Area) -> bool:
    """Tell whether two areas overlap and at least one of them writes."""
    return (one.mode is _WRITE or two.mode is _WRITE) and overlap(one, two)


def includes(wide: Area, narrow: Area) -> bool:
    """Tell whether holding the first certainly allows all that the second would.

    Exact between paths; between globs it may be false where only a case
    distinction would show the inclusion. Never wrongly true.
    """
    if wide.mode is _READ and narrow.mode is _WRITE:
        return False
    if wide.kind is _PATH and narrow.kind is _PATH:
        key, folder = narrow.key, wide.key
        # As `_is_below`; this is asked for each pair of paths in a claim.
        return key.startswith(folder) and (not folder or len(key) == len(folder) or key[len(folder)] == "/")
    if wide.kind is _INODE or narrow.kind is _INODE:
        return wide.kind is narrow.kind and wide.key == narrow.key
    return _pattern_includes(wide.kind, wide.key, narrow.kind, narrow.key)


def merge(areas: Iterable[Area]) -> tuple[Area, ...]:
    """Return the fewest of these areas that cover the same, in the order given.

    A path to be read and written is written; what lies in another area of at
    least the same mode is left out.
    """
    kept: list[Area] = []
    for area in areas:
        # Plain loops: every claim on several paths comes by here, twice.
        for other in kept:
            if includes(other, area):
                break
        else:
            for other in kept:
                if includes(area, other):
                    kept = [other for other in kept if not includes(area, other)]
                    break
            kept.append(area)
    return tuple(kept)


def _is_below(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")


@lru_cache(maxsize=65_536)
def _patterns_meet(kind: AreaKind, key: str, other_kind: AreaKind, other_key: str) -> bool:
    names, others = pattern_of(kind, key).names, pattern_of(other_kind, other_key).names
    return meet(names, others, DEEP, names_meet)


@lru_cache(maxsize=65_536)
def _pattern_includes(kind: AreaKind, key: str, other_kind: AreaKind, other_key: str) -> bool:
    names, others = pattern_of(kind, key).names, pattern_of(other_kind, other_key).names
    return include(names, others, DEEP, name_includes)
