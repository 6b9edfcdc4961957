"""Arguments, results and agents as bytes: pickled once at the edge, opened once at the other.

Plain values take the fast way; everything else goes through cloudpickle, which
also carries what was defined in a script or a notebook.
"""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from remit.core.errors import ArgumentNotPicklable, RemitError
from remit.journal.redact import REDACTED, mask_text, preview, redact

__all__ = ["ResultNotPicklable", "ResultTooLarge", "decode", "encode_arguments", "encode_result", "short_preview"]

_PLAIN = (str, int, float, bool, bytes, type(None))
_MAX_NESTING = 4


class ResultNotPicklable(RemitError, TypeError):
    """A body returned something that cannot travel; the run fails with this."""

    code = "result_not_picklable"


class ResultTooLarge(RemitError):
    """A body returned more than `Limits.max_result_bytes`; the run fails with this."""

    code = "result_too_large"


def _is_plain(value: object, depth: int = 0) -> bool:
    """Tell whether a value is built of exact built-in types only, a few levels deep."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if depth >= _MAX_NESTING:
        return False
    items: list[object]
    if kind is dict:
        mapping = cast("dict[object, object]", value)
        items = [*mapping.keys(), *mapping.values()]
    elif kind is list or kind is tuple:
        items = list(cast("list[object]", value))
    else:
        return False
    return all(_is_plain(item, depth + 1) for item in items)


def _dumps(value: object) -> bytes:
    if _is_plain(value):
        return pickle.dumps(value, protocol=5)
    return _pickle_by_value(value)


def _pickle_by_value(value: object) -> bytes:
    # Imported here: it costs 20 ms, which plain values need not pay. It has no type stubs.
    cloudpickle: Any = importlib.import_module("cloudpickle")
    blob: bytes = cloudpickle.dumps(value, protocol=5)
    return blob


def encode_arguments(arguments: Mapping[str, Any], agent_name: str) -> bytes:
    """Return keyword arguments as bytes.

    Raises:
        ArgumentNotPicklable: one of them cannot be pickled; the message names it.
    """
    try:
        return _dumps(dict(arguments))
    except Exception as error:  # pickling runs user code: anything may come out
        for name, value in arguments.items():
            try:
                _dumps(value)
            except Exception as inner:  # as above
                raise ArgumentNotPicklable(
                    f"argument {name!r} of {agent_name!r} is a {type(value).__name__} and cannot "
                    f"be pickled ({inner}); pass plain data, a path or an id instead"
                ) from inner
        raise ArgumentNotPicklable(f"the arguments of {agent_name!r} cannot be pickled: {error}") from error


def encode_agent(agent: object, agent_name: str) -> bytes:
    """Return an agent as bytes.

    Raises:
        ArgumentNotPicklable: it refers to something that cannot be pickled.
    """
    try:
        return _pickle_by_value(agent)
    except Exception as error:  # pickling runs user code: anything may come out
        raise ArgumentNotPicklable(
            f"agent {agent_name!r} cannot be pickled ({error}); "
            "it must not refer to open files, locks, sockets or other live things"
        ) from error


def encode_result(value: object, limit_bytes: int) -> bytes:
    """Return what a body returned as bytes.

    Args:
        value: the result.
        limit_bytes: largest size that may travel.

    Raises:
        ResultNotPicklable: it cannot be pickled.
        ResultTooLarge: it is larger than the limit.
    """
    try:
        blob = _dumps(value)
    except Exception as error:  # pickling runs user code: anything may come out
        raise ResultNotPicklable(
            f"the result is a {type(value).__name__} and cannot be pickled ({error}); "
            "return plain data, or write a file and return its path"
        ) from error
    if len(blob) > limit_bytes:
        raise ResultTooLarge(
            f"the result is {len(blob)} bytes pickled and the limit is {limit_bytes}; write a file and return its path"
        )
    return blob


_SHORT = 200


@lru_cache(maxsize=4096)
def _may_show(key: str) -> bool:
    """Tell whether values under this key are no secrets by its name."""
    return REDACTED not in redact({key: 0}).values()


def short_preview(value: Any, max_bytes: int) -> str:
    """Return a bounded, redacted rendering of a value as JSON text; the empty text for None.

    Numbers and short texts, which most arguments and results are, take a short way.
    """
    if value is None:
        return ""
    is_mapping = type(value) is dict
    shown = _shown_mapping(cast("dict[Any, Any]", value)) if is_mapping else _shown_scalar(value)
    if shown is _UNKNOWN:
        shown = preview(value, max_bytes=max_bytes)
    return json.dumps(shown, ensure_ascii=False)


_UNKNOWN = object()


def _shown_scalar(value: Any) -> Any:
    if value is None or type(value) in (int, bool):
        return value
    if type(value) is str and len(value) <= _SHORT:
        return mask_text(value)
    return _UNKNOWN


def _shown_mapping(mapping: dict[Any, Any]) -> Any:
    if len(mapping) > 4:
        return _UNKNOWN
    shown: dict[str, Any] = {}
    for key, value in mapping.items():
        item = _shown_scalar(value)
        if item is _UNKNOWN or type(key) is not str or not _may_show(key):
            return _UNKNOWN
        shown[key] = item
    return shown


def decode(blob: bytes) -> Any:
    """Return the value behind bytes that one of the functions above made."""
    return pickle.loads(blob)  # the cluster is one trust domain
