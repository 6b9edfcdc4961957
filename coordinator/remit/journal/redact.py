"""Keep secrets and masses out of what is written down: redaction and bounded previews.

Two nets, since neither is enough: values under a telling key (`api_key`,
`Authorization`) go whole, and texts are searched for what looks like a secret.
It is a net, not a proof: what must not leak should not be handed over.

Everything here is bounded in time: patterns have no unbounded repetition that
can start at every character, and walks stop at a depth and a number of values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, TypeGuard, cast

from remit.core.errors import InvalidArgument

__all__ = ["DEFAULT_KEYS", "REDACTED", "mask_text", "preview", "redact"]

REDACTED = "[redacted]"
"""What stands in the place of a secret."""

DEFAULT_KEYS = frozenset(
    {
        "access_key",
        "api_key",
        "auth",
        "authorization",
        "cookie",
        "credential",
        "passphrase",
        "passwd",
        "password",
        "private_key",
        "pwd",
        "secret",
        "token",
    }
)
"""Words that make a key telling, in lower case with underscores; `redact` finds them within longer keys."""

_CUT = "[cut]"
_MAX_DEPTH = 40
_MAX_VALUES = 100_000
_MAX_INTEGER_BITS = 1024
"""Above this an integer is told by its size; Python itself refuses to print huge ones."""

_COUNTING = frozenset(
    {"budget", "completion", "count", "input", "left", "limit", "max", "maximum", "min", "number"}
    | {"output", "prompt", "remaining", "total", "usage", "used"}
)
"""Words that turn `tokens` into a number of them, as language models count."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_KEYS_IN_TEXT = r"(?:api[_-]?key|access[_-]?key|private[_-]?key|authorization|passphrase|password|passwd|secret|token)"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}KEY-----|\Z)", re.S), REDACTED),
    # Keys of known makers, by the prefixes that these document for secret scanners.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:"
            r"sk-[A-Za-z0-9_-]{16,}"
            r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
            r"|AIza[A-Za-z0-9_-]{30,}|hf_[A-Za-z0-9]{20,}|xox[a-z]-[A-Za-z0-9-]{10,}"
            r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
            r")"
        ),
        REDACTED,
    ),
    (re.compile(r"(?<=://)[^/\s:@]{0,200}:[^/\s@]{1,500}(?=@)"), REDACTED),
    (re.compile(r"(?i)\b(bearer\s{1,4})[A-Za-z0-9._~+/-]{12,}=*"), rf"\1{REDACTED}"),
    (
        re.compile(
            rf"""(?ix) (?<![a-z0-9]) (?P<head> [\w-]{{0,40}}? {_KEYS_IN_TEXT} [\\"']{{0,4}} \s{{0,8}} [:=] \s{{0,8}}
            (?: (?:basic|bearer|digest|token) \s{{1,4}} )? \\? (?P<quote>["'])? )
            (?(quote) (?: [^"'\\\n] | \\(?!["']) ){{1,500}} | [^\s,;"'&\\)\]}}]+ \]? )"""
        ),
        rf"\g<head>{REDACTED}",
    ),
)


def mask_text(text: str) -> str:
    """Return a text with everything that looks like a secret replaced by `[redacted]`.

    Args:
        text: any text; time grows with its length only.
    """
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact(value: Any, *, keys: Collection[str] = DEFAULT_KEYS) -> Any:
    """Return a copy that JSON can keep, with secrets replaced by `[redacted]`.

    Mappings become dicts with text keys; lists, tuples and sets become lists; bytes
    are told by their number; anything else that JSON lacks by its `repr`. What lies
    deeper than 40 levels or behind 100,000 values is cut and says so.

    Args:
        value: anything; it is not changed.
        keys: words that make a key telling, in lower case with underscores. A key
            matches when it has the word in it (`X-Api-Key`, `dbPassword`), save
            where it counts something (`max_tokens: 4096`) and the word is one of the default ones.
    """
    return _Redaction(keys).walk(value, _MAX_DEPTH)


def preview(value: Any, *, max_bytes: int = 4096, keys: Collection[str] = DEFAULT_KEYS) -> Any:
    """Return a bounded, redacted rendering of any value that JSON can keep.

    Where something was left out the rendering says how much: `[+900 characters]`
    at the end of a text, `[17 more]` at the end of a list, a key `[more]` in a mapping.

    Args:
        value: anything; only as much of it is looked at as is shown.
        max_bytes: most bytes of the rendering as JSON text, at least 64.
        keys: as for `redact`.

    Raises:
        InvalidArgument: `max_bytes` is below 64.
    """
    if max_bytes < 64:
        raise InvalidArgument(f"max_bytes must be at least 64, got {max_bytes}")
    return _Preview(keys).render(value, max_bytes, _MAX_DEPTH)[0]


class _Keys:
    """Decides which keys are telling."""

    def __init__(self, keys: Collection[str]) -> None:
        self._padded, self._endings = _forms(keys)
        # Whoever names a key of his own means it, whatever else the key counts.
        self._own = _forms([key for key in keys if key not in DEFAULT_KEYS])
        self._seen: dict[str, bool] = {}

    def hides(self, key: str, value: Any) -> bool:
        """Return whether what lies under this key is a secret."""
        telling = self._seen.get(key)
        if telling is None:
            telling = self._seen[key] = self._is_telling(_split(key))
        if not telling or value is None or isinstance(value, bool):
            return False
        is_number = isinstance(value, int | float)
        return not (is_number and self._is_count(_split(key)) and not _matches(_split(key), *self._own))

    def _is_telling(self, words: list[str]) -> bool:
        return _matches(words, self._padded, self._endings)

    def _is_count(self, words: list[str]) -> bool:
        return words[-1] == "tokens" or not _COUNTING.isdisjoint(words)


def _forms(keys: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what stands for these keys within a padded key, and at the end of one without gaps."""
    padded = tuple(f"_{key}{plural}_" for key in keys for plural in ("", "s"))
    return padded, tuple(key.replace("_", "") for key in keys if len(key) > 4)


def _matches(words: list[str], padded: tuple[str, ...], endings: tuple[str, ...]) -> bool:
    text = f"_{'_'.join(words)}_"
    return any(key in text for key in padded) or (bool(endings) and "".join(words).endswith(endings))


class _Redaction(_Keys):
    """One walk over one value."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(keys)
        self._left = _MAX_VALUES

    def walk(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth == 0 or self._left < 0:
            return _CUT
        if _is_mapping(value):
            return self._mapping(value, depth)
        if _is_items(value):
            return self._items(value, depth)
        return _plain(value)

    def _mapping(self, mapping: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in mapping.items():
            name = _key_text(key)
            if self._left < 0:
                result[_CUT] = len(mapping) - len(result)
                break
            result[mask_text(name)] = REDACTED if self.hides(name, item) else self.walk(item, depth - 1)
        return result

    def _items(self, items: Collection[Any], depth: int) -> list[Any]:
        result: list[Any] = []
        option = ""  # the option before, in a command line such as ["--token", "abc"]
        for item in items:
            if self._left < 0:
                result.append(_CUT)
                break
            hidden = bool(option) and isinstance(item, str) and self.hides(option, item)
            result.append(REDACTED if hidden else self.walk(item, depth - 1))
            option = _option(item)
        return result


class _Preview(_Keys):
    """One rendering. Every method returns what it made and its size as JSON text, at most `room`.

    `room` also bounds the walk: whatever is looked at takes some of it.
    """

    _LEAST = len(_CUT) + 2
    _MARK = 36
    """Room kept for saying how much was left out."""

    def render(self, value: Any, room: int, depth: int) -> tuple[Any, int]:
        if isinstance(value, str) and type(value) is not str:
            value = str.__str__(value)
        if _is_mapping(value):
            return self._mapping(value, room, depth)
        if _is_items(value):
            return self._items(value, room, depth)
        if isinstance(value, str):
            return self._text(value, room)
        plain = _plain(value, most=4 * room)
        if isinstance(plain, str):
            return self._text(plain, room)
        size = _size(plain)
        return (plain, size) if size <= room else (_CUT, self._LEAST)

    def _share(self, rest: int, items: int) -> int:
        """Return the room for the next of so many items: none may take it all, none gets a crumb."""
        return min(rest, max(256, rest // items))

    def _text(self, text: str, room: int) -> tuple[str, int]:
        shown = mask_text(text[: room + 1024])
        if len(text) > room + 1024:
            # A secret that the slice went through may not look like one any more.
            shown = shown[:-512]
        elif (size := _size(shown)) <= room:
            return shown, size
        # A character takes one to twelve bytes; try the most that may fit, then less.
        keep = min(len(shown), room)
        while keep > 0:
            cut = f"{shown[:keep]} [+{len(text) - min(keep, len(text))} characters]"
            if (size := _size(cut)) <= room:
                return cut, size
            keep = keep - max(1, (size - room) // 12)
        return _CUT, self._LEAST

    def _items(self, items: Collection[Any], room: int, depth: int) -> tuple[Any, int]:
        if not items:
            return [], 2
        if depth == 0 or room < 2 + self._MARK + self._LEAST:
            return _CUT, self._LEAST
        result: list[Any] = []
        used = 2
        option = ""
        for number, item in enumerate(items):
            rest = room - used - 1 - self._MARK
            if rest < self._LEAST:
                mark = f"[{len(items) - number} more]"
                result.append(mark)
                used += _size(mark) + 1
                break
            if option and isinstance(item, str) and self.hides(option, item):
                item = REDACTED
            shown, size = self.render(item, self._share(rest, len(items) - number), depth - 1)
            result.append(shown)
            used += size + 1
            option = _option(item)
        return result, used

    def _mapping(self, mapping: Mapping[Any, Any], room: int, depth: int) -> tuple[Any, int]:
        if not mapping:
            return {}, 2
        if depth == 0 or room < 2 + self._MARK + self._LEAST:
            return _CUT, self._LEAST
        result: dict[str, Any] = {}
        used = 2
        for number, (key, item) in enumerate(islice(mapping.items(), room)):
            name = _key_text(key)
            rest = room - used - 2 - self._MARK
            shown_name, size = self._text(name, min(rest, 200)) if rest >= self._LEAST else ("", room)
            if rest - size < self._LEAST:
                result["[more]"] = len(mapping) - number
                used += _size({"[more]": len(mapping) - number})
                break
            hidden = self.hides(name, item)
            share = self._share(rest - size, len(mapping) - number)
            shown, item_size = self.render(REDACTED if hidden else item, share, depth - 1)
            result[shown_name] = shown
            used += size + item_size + 2
        return result, used


def _plain(value: Any, *, most: int = 1_000_000) -> Any:
    """Return a value that is no container as JSON can keep it, texts masked.

    Args:
        value: anything.
        most: characters of a `repr` that are looked at.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return mask_text(str.__str__(value))
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INTEGER_BITS else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{memoryview(cast('bytes', value)).nbytes} bytes>"
    try:
        text = repr(value)
    # A user's `__repr__` may raise anything, and a preview must not be what breaks a run.
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return mask_text(text if len(text) <= most else f"{text[:most]} [+{len(text) - most} characters]")


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_items(value: Any) -> TypeGuard[Collection[Any]]:
    return isinstance(value, list | tuple | set | frozenset)


def _key_text(key: Any) -> str:
    """Return a mapping's key as the text that JSON needs."""
    return str.__str__(key) if isinstance(key, str) else str(_plain(key, most=200))


def _option(item: Any) -> str:
    """Return the name of a command line option that stands alone, or the empty text."""
    return item.lstrip("-") if isinstance(item, str) and item.startswith("-") and "=" not in item else ""


def _split(key: str) -> list[str]:
    """Return the words of a key in lower case: `X-ApiKey` is `x`, `api`, `key`."""
    return [word.lower() for word in _WORD.findall(key[:200])] or [""]


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))
