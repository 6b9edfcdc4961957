"""What a workspace hides beside what is always hidden: keys and patterns of its own.

Bodies and callers have masked what looks like a secret before it is sent (see
`remit.journal.redact`). The rules here are for what only this workspace knows to be
one, such as the numbers of its customers. They are applied where every event comes
by, before it changes the state, so the journal, views and notices say the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from remit.core.errors import InvalidArgument
from remit.core.events import Event
from remit.journal.redact import DEFAULT_KEYS, REDACTED, redact

__all__ = ["Redaction", "load_redaction"]

_FILE = "redact.json"
_TEXTS = frozenset({"error", "name", "program", "reason", "traceback"})
"""Fields of events that people and bodies write freely."""
_DOCUMENTS = frozenset({"arguments", "preview"})
"""Fields that hold JSON text."""

_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, slots=True)
class Redaction:
    """Rules of one workspace."""

    keys: frozenset[str] = frozenset()
    """Words that make a key telling, in lower case with underscores, beside the usual ones."""
    patterns: tuple[re.Pattern[str], ...] = ()
    """What is replaced by `[redacted]` wherever it stands in a text."""

    def clean(self, event: _E) -> _E:
        """Return an event in which everything that the rules name is hidden; the same one if that is nothing."""
        changed: dict[str, Any] = {}
        for name in _written_fields(event.kind, type(event)):
            value = getattr(event, name)
            if not value:
                continue
            if name == "cause":
                hidden = replace(value, reason=self._text(value.reason)) if value.reason else value
            else:
                hidden = self._document(value) if name in _DOCUMENTS else self._text(value)
            if hidden != value:
                changed[name] = hidden
        return replace(event, **changed) if changed else event

    def _text(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def _document(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:  # cut in its midst: then patterns must do
            return self._text(text)
        hidden = self._walk(redact(value, keys=DEFAULT_KEYS | self.keys) if self.keys else value)
        return json.dumps(hidden, ensure_ascii=False) if hidden != value else text

    def _walk(self, value: Any) -> Any:
        """Apply the patterns to every text of a document; JSON's escapes would hide what they look for."""
        if isinstance(value, str):
            return self._text(value)
        if _is_list(value):
            return [self._walk(item) for item in value]
        if _is_mapping(value):
            return {self._text(key): self._walk(item) for key, item in value.items()}
        return value


_fields_of: dict[str, tuple[str, ...]] = {}
"""Kind of event -> its fields that may hold something; filled as kinds come by."""


def _written_fields(kind: str, cls: type[Event]) -> tuple[str, ...]:
    found = _fields_of.get(kind)
    if found is None:
        wanted = _TEXTS | _DOCUMENTS | {"cause"}
        found = _fields_of[kind] = tuple(each.name for each in fields(cls) if each.name in wanted)
    return found


def load_redaction(workspace: str | Path) -> Redaction | None:
    """Return the rules in `.remit/redact.json` of a workspace, or None if there are none.

    The file holds `{"keys": ["customer_number"], "patterns": ["EMP-[0-9]{6}"]}`; either may be left out.

    Args:
        workspace: the workspace's folder.

    Raises:
        InvalidArgument: the file cannot be read, or does not hold; nothing may be written then.
    """
    path = Path(workspace) / ".remit" / _FILE
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"cannot read the rules of redaction in {str(path)!r}: {error}; mend or remove it"
        ) from error
    rules: dict[str, Any] = document if _is_mapping(document) else {"a list or a value": None}
    unknown = rules.keys() - {"keys", "patterns"}
    if unknown:
        named = ", ".join(sorted(unknown))
        raise InvalidArgument(f"{str(path)!r} must be a mapping of keys and patterns, and has {named}")
    keys, patterns = _words(rules, "keys", path), _words(rules, "patterns", path)
    return Redaction(frozenset(key.lower() for key in keys), tuple(_compiled(each, path) for each in patterns))


def _words(rules: dict[str, Any], name: str, path: Path) -> list[str]:
    found: Any = rules.get(name, [])
    words = [each for each in found if isinstance(each, str) and each] if _is_list(found) else []
    if not _is_list(found) or len(words) != len(found):
        raise InvalidArgument(f"{name} in {str(path)!r} must be a list of texts that are not empty")
    return words


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _compiled(pattern: str, path: Path) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"the pattern {pattern!r} in {str(path)!r} is no regular expression: {error}") from error
    if compiled.match(""):
        raise InvalidArgument(
            f"the pattern {pattern!r} in {str(path)!r} fits an empty text, so it would fit everywhere"
        )
    return compiled
