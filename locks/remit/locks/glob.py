"""Patterns of names: parsed once, compared exactly.

Two patterns are compared by the product of their automata, never by matching
one against the other's text, so `src/*.py` and `src/a*` are known to meet in
`src/a.py`. A name is a sequence of tokens and a path a sequence of names; both
levels have one token that stands for any number of others (`*` in a name, `**`
in a path), so the same two functions, `meet` and `include`, serve both.

Source: intersection of regular languages by the product construction (Hopcroft
and Ullman, Introduction to Automata Theory, section on closure properties).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeVar

from remit.locks.errors import InvalidClaim

__all__ = [
    "DEEP",
    "Name",
    "Wild",
    "expand_braces",
    "include",
    "meet",
    "name_includes",
    "names_meet",
    "parse_name",
]

Token = TypeVar("Token")

Characters = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, inclusive ranges; empty for the star token."""

_STAR: Final[Characters] = ()
_LAST: Final = 0x10FFFF
_SLASH: Final = ord("/")


@dataclass(frozen=True, slots=True)
class Wild:
    """A name with wildcards. Names without any stay plain texts."""

    text: str
    """As written."""
    tokens: tuple[Characters, ...]
    """One set of characters each, or the star."""


Name = str | Wild
"""One part of a path: a literal text or a pattern."""

DEEP: Final = Wild("**", ())
"""Any number of names, none included."""


def parse_name(text: str) -> Name:
    """Parse one part of a pattern.

    An unclosed `[` is a plain character, as in a shell; a leading `!` or `^`
    turns a class around.

    Args:
        text: the part, without slashes.

    Returns:
        the text itself if only that text matches; otherwise the pattern.

    Raises:
        InvalidClaim: a class that no character is in, as `[z-a]`.
    """
    if text == "**":
        return DEEP
    tokens: list[Characters] = []
    at = 0
    while at < len(text):
        token, at = _token(text, at)
        if not (token == _STAR and tokens and tokens[-1] == _STAR):
            tokens.append(token)
    if all(len(token) == 1 and token[0][0] == token[0][1] for token in tokens):
        return "".join(chr(token[0][0]) for token in tokens)
    return Wild(text, tuple(tokens))


def _token(text: str, at: int) -> tuple[Characters, int]:
    """Return the token that starts here, and where the next one does."""
    char = text[at]
    if char == "*":
        return _STAR, at + 1
    if char == "?":
        return _complement([(_SLASH, _SLASH)]), at + 1
    if char == "[":
        negated = text[at + 1 : at + 2] in ("!", "^")
        start = at + 1 + negated
        end = text.find("]", start + 1)  # a first "]" is a member
        if end > 0:
            return _class(text[start:end], negated, text), end + 1
    return ((ord(char), ord(char)),), at + 1


def _class(body: str, negated: bool, whole: str) -> Characters:
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(body):
        low = high = ord(body[at])
        at += 1
        if at + 1 < len(body) and body[at] == "-":
            high = ord(body[at + 1])
            at += 2
        if low <= high:
            ranges.append((low, high))
    # A slash parts names, so no class can match it, whichever way it is written.
    found = _complement([*ranges, (_SLASH, _SLASH)])
    if not negated:
        found = _complement([*found, (_SLASH, _SLASH)])
    if not found:
        raise InvalidClaim(f"{whole!r} holds a class that no character is in")
    return found


def _complement(ranges: Sequence[tuple[int, int]]) -> Characters:
    """Return the code points that are in none of the ranges."""
    gaps: list[tuple[int, int]] = []
    next_free = 0
    for low, high in sorted(ranges):
        if low > next_free:
            gaps.append((next_free, low - 1))
        next_free = max(next_free, high + 1)
    if next_free <= _LAST:
        gaps.append((next_free, _LAST))
    return tuple(gaps)


def expand_braces(text: str, *, limit: int) -> list[str]:
    """Return the patterns that `{a,b}` stands for, innermost alternatives included.

    Braces without a comma, or never closed, are plain characters, as in a shell.

    Args:
        text: the pattern.
        limit: the most patterns that one may stand for.

    Raises:
        InvalidClaim: it stands for more.
    """
    done: list[str] = []
    todo = [text]
    while todo:
        if len(done) + len(todo) > limit:
            raise InvalidClaim(f"{text!r} stands for more than {limit} patterns; claim a folder instead")
        current = todo.pop()
        group = _first_group(current)
        if group is None:
            done.append(current)
            continue
        start, end, options = group
        todo.extend(current[:start] + option + current[end:] for option in reversed(options))
    return done


def _first_group(text: str) -> tuple[int, int, list[str]] | None:
    """Find the first brace pair with a comma of its own: start, end after it, options."""
    for start in range(len(text)):
        if text[start] != "{":
            continue
        depth, cuts = 0, [start]
        for at in range(start, len(text)):
            char = text[at]
            depth += (char == "{") - (char == "}")
            if depth == 1 and char == ",":
                cuts.append(at)
            if depth == 0:
                cuts.append(at)
                break
        if depth == 0 and len(cuts) > 2:
            return start, cuts[-1] + 1, [text[a + 1 : b] for a, b in pairwise(cuts)]
    return None


def meet(
    one: Sequence[Token],
    two: Sequence[Token],
    star: Token,
    tokens_meet: Callable[[Token, Token], bool],
) -> bool:
    """Tell whether some sequence is matched by both patterns. Exact.

    Time is the product of the two lengths.

    Args:
        one: a pattern, as tokens.
        two: another one.
        star: the token for any number of others.
        tokens_meet: whether one item is matched by both of two plain tokens.
    """
    # row[j]: what has been read of `one`, and two[:j], have a sequence in common.
    row = [True] + [False] * len(two)
    for j, other in enumerate(two):
        row[j + 1] = row[j] and other == star
    for token in one:
        is_star = token == star
        new = [row[0] and is_star]
        for j, other in enumerate(two):
            if is_star or other == star:
                # The star takes nothing, or swallows the other side's token.
                new.append(new[j] or row[j + 1])
            else:
                new.append(row[j] and tokens_meet(token, other))
        row = new
    return row[-1]


def include(
    wide: Sequence[Token],
    narrow: Sequence[Token],
    star: Token,
    token_includes: Callable[[Token, Token], bool],
) -> bool:
    """Tell whether everything that `narrow` matches is certainly matched by `wide`.

    Never wrongly true. It may be false for two patterns of which one does
    include the other, when only a case distinction would show it.

    Args:
        wide: a pattern, as tokens.
        narrow: another one.
        star: the token for any number of others.
        token_includes: whether the first plain token matches all that the second does.
    """
    # row[j]: what is left of `wide` includes narrow[j:]; filled from the ends.
    row = [False] * len(narrow) + [True]
    for token in reversed(wide):
        is_star = token == star
        new = [False] * len(narrow) + [is_star and row[-1]]
        for j in range(len(narrow) - 1, -1, -1):
            if is_star:
                new[j] = row[j] or new[j + 1]
            else:
                new[j] = row[j + 1] and narrow[j] != star and token_includes(token, narrow[j])
        row = new
    return row[0]


@lru_cache(maxsize=65_536)
def names_meet(one: Name, two: Name) -> bool:
    """Tell whether some name is matched by both; neither is `**`."""
    if isinstance(one, str) and isinstance(two, str):
        return one == two
    return meet(_tokens(one), _tokens(two), _STAR, _share)


@lru_cache(maxsize=65_536)
def name_includes(wide: Name, narrow: Name) -> bool:
    """Tell whether the first certainly matches all that the second does; neither is `**`."""
    if isinstance(wide, str) and isinstance(narrow, str):
        return wide == narrow
    return include(_tokens(wide), _tokens(narrow), _STAR, _holds)


def _tokens(name: Name) -> tuple[Characters, ...]:
    if isinstance(name, str):
        return tuple(((ord(char), ord(char)),) for char in name)
    return name.tokens


def _share(one: Characters, two: Characters) -> bool:
    """Tell whether two sets have a character in common."""
    return any(low <= high2 and low2 <= high for low, high in one for low2, high2 in two)


def _holds(wide: Characters, narrow: Characters) -> bool:
    """Tell whether the first set holds the second; ranges are merged, so one must hold each."""
    return all(any(low2 <= low and high <= high2 for low2, high2 in wide) for low, high in narrow)
