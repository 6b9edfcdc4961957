"""Command templates: an argument list with named fields, filled without surprises.

**Invariants**

1. One item of the template becomes exactly one item of the argument list,
   whatever the values hold; no value is split, expanded or read by a shell.
2. With `shell=True` each value is quoted as one word of the shell, and fields
   stand only where such quoting holds: never inside quotes, after a backslash,
   or past a construct that reads its text twice.
3. All mistakes of the template itself are found when it is made, not when it
   is used.
"""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remit.core.errors import InvalidArgument

__all__ = ["CommandTemplate"]

_Part = tuple[str, str | None]
"""Literal text, and the name of the field that follows it, or None."""


class CommandTemplate:
    """A command line with fields such as `{path}`, checked when it is made.

    Fields are plain names: no attributes, indexes, conversions or format
    specifications. Literal braces are written `{{` and `}}`.

    Args:
        argv: program and arguments, one text an item. A single text is one
            command line: split here by the shell's rules for words, or with
            `shell=True` given to `/bin/sh -c` as it is.
        shell: run `argv`, which must then be one text, by `/bin/sh`. Values are
            quoted here: write `{name}`, not `"{name}"`.

    Raises:
        InvalidArgument: `argv` is empty, has items that are no texts, does not
            parse, holds a field that is more than a plain name, or (with a
            shell) a field at a place where quoting would not hold.
    """

    __slots__ = ("_items", "argv", "fields", "shell")

    argv: tuple[str, ...]
    """The template as given, one text an item."""
    fields: frozenset[str]
    """Names of the fields that `render` needs."""
    shell: bool
    """Whether `/bin/sh` runs the rendered text."""

    def __init__(self, argv: Sequence[str] | str, *, shell: bool = False) -> None:
        self.shell = shell
        self.argv = _words(argv, shell=shell)
        self._items: tuple[tuple[_Part, ...], ...] = tuple(
            _parse(item, position) for position, item in enumerate(self.argv)
        )
        if shell:
            _check_quoting(self._items[0])
        self.fields = frozenset(name for item in self._items for _, name in item if name is not None)

    def render(self, values: Mapping[str, object]) -> list[str]:
        """Return the argument list with every field filled in.

        A value that starts with a dash stays one argument, but the program may
        read it as an option: put `"--"` before such a field in the template.

        Args:
            values: mapping field name -> text, number, truth value (written
                `true` or `false`) or path.

        Returns:
            As many items as the template has; with `shell=True` the three items
            `/bin/sh`, `-c` and the command line.

        Raises:
            InvalidArgument: a field has no value, a value has no field, or a
                value is of another type, holds a NUL character, or would leave
                the program's name empty.
        """
        self._check_names(values)
        rendered = [
            "".join(
                literal + ("" if name is None else self._text(values[name], name, position)) for literal, name in item
            )
            for position, item in enumerate(self._items)
        ]
        if not rendered[0].strip():
            raise InvalidArgument(
                f"the program's name is empty: {self.argv[0]!r} was filled with empty text; give it a value",
                position=0,
            )
        return ["/bin/sh", "-c", rendered[0]] if self.shell else rendered

    def _check_names(self, values: Mapping[str, object]) -> None:
        """Compare the names of the values with the fields, both ways."""
        missing = sorted(self.fields - values.keys())
        if missing:
            places = ", ".join(f"{name!r} (argument {self._position_of(name)})" for name in missing)
            raise InvalidArgument(f"no value for field {places} of command {self.argv[0]!r}", missing=tuple(missing))
        unknown = sorted(str(name) for name in values.keys() - self.fields)
        if unknown:
            known = ", ".join(sorted(self.fields)) or "none"
            raise InvalidArgument(
                f"command {self.argv[0]!r} has no field {', '.join(map(repr, unknown))}; its fields are: {known}",
                unknown=tuple(unknown),
            )

    def _position_of(self, field: str) -> int:
        return next(i for i, item in enumerate(self._items) if any(name == field for _, name in item))

    def _text(self, value: object, name: str, position: int) -> str:
        """Return one value as text, quoted if a shell will read it."""
        if not isinstance(value, str | int | float | Path):  # bool is an int
            raise InvalidArgument(
                f"field {name!r} (argument {position}) must be a text, number, truth value or path, "
                f"not {type(value).__name__}",
                field=name,
                position=position,
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not _is_encodable(text):
            raise InvalidArgument(
                f"the value of field {name!r} (argument {position}) holds characters that are no valid Unicode",
                field=name,
                position=position,
            )
        if "\0" in text:
            raise InvalidArgument(
                f"the value of field {name!r} (argument {position}) holds a NUL character, "
                "which no command line can carry",
                field=name,
                position=position,
            )
        return shlex.quote(text) if self.shell else text

    def __repr__(self) -> str:
        return f"CommandTemplate({list(self.argv)!r}, shell={self.shell})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommandTemplate):
            return NotImplemented
        return (self.argv, self.shell) == (other.argv, other.shell)

    def __hash__(self) -> int:
        return hash((self.argv, self.shell))

    def __reduce__(self) -> tuple[Any, ...]:
        # The parsed parts are made again: a pickled template never skips the checks.
        return _rebuild, (self.argv, self.shell)


def _rebuild(argv: tuple[str, ...], shell: bool) -> CommandTemplate:
    return CommandTemplate(argv[0] if shell else argv, shell=shell)


def _words(argv: Sequence[str] | str, *, shell: bool) -> tuple[str, ...]:
    """Return the items of the template; a single text is split unless a shell reads it."""
    if shell:
        if not isinstance(argv, str):
            raise InvalidArgument("with shell=True the command must be one text, not a list of arguments")
        return _checked((argv,))
    if isinstance(argv, str):
        try:
            return _checked(shlex.split(argv))
        except ValueError as error:
            raise InvalidArgument(f"command {argv!r} does not split into words: {error}") from error
    return _checked(argv)


def _checked(words: Sequence[object]) -> tuple[str, ...]:
    """Return the items if each is a text and the first names a program."""
    texts: list[str] = []
    for position, word in enumerate(words):
        if not isinstance(word, str):
            raise InvalidArgument(
                f"argument {position} of the command must be a text, not {type(word).__name__}", position=position
            )
        if "\0" in word:
            raise InvalidArgument(f"argument {position} of the command holds a NUL character", position=position)
        texts.append(word)
    if not texts or not texts[0].strip():
        raise InvalidArgument("the command is empty; its first item must name a program")
    return tuple(texts)


def _parse(item: str, position: int) -> tuple[_Part, ...]:
    """Split one item into literals and plain field names."""
    parts: list[_Part] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(item):
            if name is not None and (spec or conversion or not name.isidentifier()):
                raise InvalidArgument(
                    f"field {_shown(name, conversion, spec)} in argument {position} must be a plain name in braces; "
                    "write literal braces as {{ and }}",
                    position=position,
                )
            parts.append((literal, name))
    except InvalidArgument:  # is also a ValueError; its own message is better
        raise
    except ValueError as error:
        raise InvalidArgument(
            f"argument {position} ({item!r}) does not parse: {error}; write literal braces as {{{{ and }}}}",
            position=position,
        ) from error
    return tuple(parts)


def _is_encodable(text: str) -> bool:
    """Tell whether the operating system can be given this text."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _check_quoting(parts: tuple[_Part, ...]) -> None:
    """Refuse fields of a shell command at places where a quoted value would not stay one word.

    Inside double quotes, the single quotes that `shlex.quote` adds are plain
    characters and `$(...)` of a value would run. The scan knows quotes,
    backslashes and comments; what it does not follow (backticks, here-documents,
    `$'...'`, expansions inside double quotes) makes every later field refused.

    Source: POSIX.1-2024, Shell Command Language, section 2.2 Quoting.
    """
    state = _QuoteScan()
    for literal, name in parts:
        state.read(literal)
        if name is not None and state.doubt:
            raise InvalidArgument(
                f"field {name!r} stands {state.doubt}, where a shell would not keep its value one word; "
                "leave the field outside (values are quoted for you), or use a list of arguments without a shell",
                field=name,
            )
        if name is not None:
            state.read_value()


class _QuoteScan:
    """Where in the shell's quoting the end of the text read so far stands."""

    __slots__ = ("_after_word", "_escaped", "_quote", "_unclear")

    def __init__(self) -> None:
        self._quote = ""  # one of '', "'", '"', '#'
        self._escaped = False
        self._unclear = ""
        self._after_word = False  # a '#' inside a word starts no comment

    @property
    def doubt(self) -> str:
        """Return where a field would stand here, or the empty text if it is safe."""
        if self._unclear:
            return f"after {self._unclear}"
        if self._escaped:
            return "after a backslash"
        return {"": "", "#": "in a comment"}.get(self._quote, "inside quotes")

    def read(self, text: str) -> None:
        """Go on over literal text."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
                self._after_word = True
            else:
                self._step(char, text[index : index + 2])

    def read_value(self) -> None:
        """Go on over a quoted value: it is part of a word."""
        self._after_word = True

    def _step(self, char: str, pair: str) -> None:
        if self._quote == "#":
            self._quote = "" if char == "\n" else "#"
        elif self._quote == "'":
            self._quote = "" if char == "'" else "'"
        elif char == "\\":
            self._escaped = True
        elif char == "`" or (self._quote == '"' and pair in ("$(", "${")) or (not self._quote and pair in ("<<", "$'")):
            self._unclear = self._unclear or repr(pair if char != "`" else char)
        elif char == '"':
            self._quote = "" if self._quote else '"'
        elif not self._quote and char == "'":
            self._quote = "'"
        elif not self._quote and char == "#" and not self._after_word:
            self._quote = "#"
        self._after_word = not (char.isspace() or char in ";&|()<>")


def _shown(name: str, conversion: str | None, spec: str | None) -> str:
    """Return a refused field as it was written."""
    return "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
