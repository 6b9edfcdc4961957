"""Messages are what their types say, before anything is decided upon them.

A decision changes the state as it is made and is journalled afterwards. What is not
of its type would fail somewhere between the two (an infinite deadline is no JSON, a
number is no `Limits`), and leave a state that no journal knows of. So every request is
held against the annotations of its class at the coordinator's one door.

Checks are built once a class. Fields that have their default are skipped.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from remit.core.errors import InvalidArgument
from remit.core.limits import is_amount

__all__ = ["MAX_SECONDS", "check_message", "check_number", "shown"]

MAX_SECONDS = 1e9
"""More than thirty years; clocks and timers of operating systems take no infinite times."""

_Check = Callable[[Any], bool]


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a user's object; and Python refuses to write numbers of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_number(
    name: str,
    value: object,
    *,
    above_zero: bool = False,
    negative: bool = False,
    most: float = MAX_SECONDS,
    whole: bool = False,
) -> None:
    """Refuse what is no finite number in its range; None is "not given" and passes.

    Args:
        name: of the argument, as the caller wrote it.
        value: what was given.
        above_zero: 0 is refused too.
        negative: less than 0 is taken as 0 is, as waits of the standard library do.
        most: the largest number, in seconds where seconds are meant.
        whole: only whole numbers.

    Raises:
        InvalidArgument: the message names the argument and its range.
    """
    if value is None:
        return
    in_range = _is_number(value) if negative else is_amount(value, above_zero=above_zero)
    good = in_range and value <= most  # type: ignore[operator]
    if good and not (whole and not isinstance(value, int)):
        return
    kind = "a whole number" if whole else "a number"
    least = "" if negative else ", more than 0" if above_zero else ", not negative"
    raise InvalidArgument(f"{name} must be {kind}{least} and at most {most:g}, not {shown(value)}")


def check_message(message: object) -> None:
    """Refuse a message with a field that is not of its type. Values that are no message pass.

    Raises:
        InvalidArgument: the message names the field and shows what it holds.
    """
    kind: Any = type(message)
    fields = _fields(kind)
    if fields is None:
        return
    for name, check, default in fields:
        value = getattr(message, name)
        if value is not default and not check(value):
            wanted = typing.get_type_hints(type(message))[name]
            text = getattr(wanted, "__name__", "") or str(wanted)
            raise InvalidArgument(f"{name} must be {text.replace('float', 'a finite number')}, not {shown(value)}")


@cache
def _fields(kind: Any) -> tuple[tuple[str, _Check, object], ...] | None:
    """Return name, check and default of each field of a message class; None for any other class."""
    fields: Any = kind
    defaults: dict[str, object]
    if dataclasses.is_dataclass(kind):
        defaults = {field.name: field.default for field in dataclasses.fields(fields)}
    elif _is_named_tuple(kind):
        defaults = {name: fields._field_defaults.get(name, dataclasses.MISSING) for name in fields._fields}
    else:
        return None
    hints = typing.get_type_hints(fields)
    return tuple((name, _check_of(hints[name]), default) for name, default in defaults.items())


@cache
def _check_of(hint: Any) -> _Check:
    """Return what tells whether a value is of an annotated type."""
    if hint is Any or hint is object:
        return lambda value: True
    if hint is None or hint is types.NoneType:
        return lambda value: value is None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        checks = tuple(map(_check_of, arguments))
        return lambda value: any(check(value) for check in checks)
    if origin is typing.Literal:
        return lambda value: value in arguments
    if origin is tuple:
        return _tuple_check(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = map(_check_of, arguments)
        return lambda value: isinstance(value, Mapping) and all(map(key, value)) and all(map(item, _values(value)))  # pyright: ignore[reportUnknownArgumentType]
    return _class_check(hint)


def _values(value: Any) -> Any:
    return value.values()


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")  # pyright: ignore[reportUnknownArgumentType]


def _tuple_check(arguments: tuple[Any, ...]) -> _Check:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _check_of(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(item, value))  # pyright: ignore[reportUnknownArgumentType]
    checks = tuple(map(_check_of, arguments))

    def is_of_these(value: Any) -> bool:
        if not isinstance(value, tuple):
            return False
        items: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]
        return len(items) == len(checks) and all(check(item) for check, item in zip(checks, items, strict=True))

    return is_of_these


def _class_check(kind: Any) -> _Check:
    if kind is float:
        return _is_number
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if issubclass(kind, Enum) or _fields(kind) is None:
        return lambda value: isinstance(value, kind)

    def is_message(value: object) -> bool:
        if not isinstance(value, kind):
            return False
        check_message(value)
        return True

    return is_message


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number, of either sign."""
    return is_amount(value) or (isinstance(value, int | float) and not isinstance(value, bool) and is_amount(-value))
