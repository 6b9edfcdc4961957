"""Arguments, results and agents as bytes: pickled once at the edge, opened once at the other.

Plain values take the fast way; everything else goes through cloudpickle, which
also carries what was defined in a script or a notebook.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from remit.core.errors import ArgumentNotPicklable, RemitError

__all__ = ["ResultNotPicklable", "ResultTooLarge", "decode", "encode_arguments", "encode_result"]

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
    if kind is dict:
        return all(
            type(key) in _PLAIN and _is_plain(item, depth + 1)
            for key, item in value.items()  # type: ignore[attr-defined]
        )
    if kind is list or kind is tuple:
        return all(_is_plain(item, depth + 1) for item in value)  # type: ignore[attr-defined]
    return False


def _dumps(value: object) -> bytes:
    if _is_plain(value):
        return pickle.dumps(value, protocol=5)
    import cloudpickle  # costs 20 ms, and plain values do not need it

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
    import cloudpickle

    try:
        blob: bytes = cloudpickle.dumps(agent, protocol=5)
    except Exception as error:  # pickling runs user code: anything may come out
        raise ArgumentNotPicklable(
            f"agent {agent_name!r} cannot be pickled ({error}); "
            "it must not refer to open files, locks, sockets or other live things"
        ) from error
    return blob


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


def decode(blob: bytes) -> Any:
    """Return the value behind bytes that one of the functions above made."""
    return pickle.loads(blob)  # the cluster is one trust domain
