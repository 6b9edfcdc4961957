"""How stops and errors travel between clients and the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from remit.core.errors import InvalidArgument, NotFound, ProcessError, RemitError
from remit.processes.records import StopWish

__all__ = ["decode_error", "encode_error", "encode_wish"]


def encode_wish(wish: StopWish) -> dict[str, Any]:
    """Return how a stop travels."""
    return {"cause": wish.cause, "grace_s": wish.grace_s, "kill": wish.kill}


def encode_error(error: RemitError) -> dict[str, Any]:
    """Return how a typed error travels: its code, its line, and its plain attributes."""
    data = {name: value for name, value in vars(error).items() if name != "message" and _is_plain(value)}
    return {"code": error.code, "message": error.message, "data": data}


def decode_error(message: Mapping[str, Any]) -> RemitError:
    """Return the error that `encode_error` wrote; an unknown code becomes a `ProcessError`."""
    kind = _ERRORS.get(str(message.get("code")), ProcessError)
    data = {str(name): value for name, value in dict(message.get("data") or {}).items()}
    return kind(str(message.get("message")), **data)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _tree(kind: type[RemitError]) -> Iterator[type[RemitError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


_KINDS: tuple[type[RemitError], ...] = (*_tree(ProcessError), InvalidArgument, NotFound)
_ERRORS = {kind.code: kind for kind in _KINDS}
