"""Messages between agents, `procd` and keepers: length and JSON, over a unix socket.

A frame is a length of four bytes, most significant first, and that many bytes
of one JSON object in UTF-8 with `v`, the version, and `op`, a word.

**What a keeper understands.** Each request may carry `id`, a number that its answer
repeats; an answer is `{"op": "answer", "id": ..., "kind": ...}`.

| `op` | fields | `kind` of the answer |
|---|---|---|
| `status` | | `status` with `state` |
| `stop` | `cause` (object or null), `grace_s`, `kill` | when nothing is left: `stopped`, `not_running`; `result` |
| `wait` | | at the end: `ended` with `result` |
| `detach` | | `detached`: it belongs to the session from now on |
| `attach` | `epoch` | `attached` with `state`: this connection is the lifeline now; or `stale_epoch` |
| `write` | `data` (base64) | when it is written: `written`; or `stdin_closed`, `stdin_full` |
| `close_stdin` | | when all before it is written: `stdin_closed` |

An unknown `op` or version is answered `unsupported`; a field that does not hold, `bad_request`
with `error`. **What a keeper says unasked**, to whoever holds the lifeline:
`started` with `state` once the program is executed, `backgrounded` with `state` when its time
limit made it the session's, `ended` with `result`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from remit.core.errors import ProcessProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "VERSION",
    "FrameReader",
    "connect",
    "encode",
    "peer_uid",
    "receive",
    "refusal",
    "send",
]

VERSION = 1
"""Version of the messages."""
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Longest frame; what announces more is no peer of ours."""

_LENGTH = struct.Struct(">I")
_SUN_PATH_BYTES = 100  # 108 on Linux, 104 on macOS, the closing NUL included: unix(7)


def encode(op: str, **fields: Any) -> bytes:
    """Return one message as a frame.

    Raises:
        ProcessProtocolError: it is longer than `MAX_FRAME_BYTES`.
    """
    data = json.dumps({"v": VERSION, "op": op, **fields}, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ProcessProtocolError(
            f"a message {op!r} of {len(data)} bytes is above the limit of {MAX_FRAME_BYTES}; use a file",
            version=VERSION,
        )
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Put messages together from bytes as they come."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_midway(self) -> bool:
        """Tell whether part of a message is there and its end is not."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes, of any length, and return the messages that are complete with them.

        Raises:
            ProcessProtocolError: these are no frames; the connection is of no use any more.
        """
        self._buffer += data
        messages: list[dict[str, Any]] = []
        while len(self._buffer) >= _LENGTH.size:
            size = _checked_size(self._buffer)
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            messages.append(_decode(body))
        return messages


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Wait for one message; return None when the peer has closed the connection.

    Raises:
        ProcessProtocolError: what came is no message, or it was cut short.
        OSError: the connection broke, or its timeout passed.
    """
    header = _read_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(connection, _checked_size(header))
    if body is None:
        raise ProcessProtocolError("the connection ended within a message", version=VERSION)
    return _decode(body)


def send(connection: socket.socket, op: str, **fields: Any) -> None:
    """Send one message, waiting until the socket has taken all of it.

    Raises:
        ProcessProtocolError: it is too long.
        OSError: the connection broke, or its timeout passed.
    """
    connection.sendall(encode(op, **fields))


def refusal(message: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any] | None:
    """Return the fields of the answer to a message that we cannot serve; None for one that we can.

    Args:
        message: as it was received.
        known: the operations that this peer serves.
    """
    if message.get("v") == VERSION and message.get("op") in known:
        return None
    return {"id": message.get("id"), "kind": "unsupported", "version": VERSION, "asked": str(message.get("op"))}


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """Return a connection to a unix socket, at a path of any length.

    Args:
        path: of the socket.
        timeout_s: seconds for this and each later call on the connection; None waits.

    Raises:
        OSError: there is no such socket, or nobody listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
            connection.connect(str(path))
        else:
            _connect_through_directory(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_through_directory(connection: socket.socket, path: Path) -> None:
    # An address holds 108 bytes; a descriptor of the directory makes any path short.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user at the other end of a unix socket; None where the system does not tell.

    Source: unix(7), SO_PEERCRED; for macOS, LOCAL_PEERCRED in unix(4).
    """
    platform: str = sys.platform
    try:
        if platform == "linux":
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", data)[1])
        if platform == "darwin":
            data = connection.getsockopt(0, 0x001, struct.calcsize("IIh16I"))
            return int(struct.unpack_from("II", data)[1])
    except OSError:  # not a unix socket, or the peer has gone
        return None
    return None


def _checked_size(data: bytes | bytearray) -> int:
    size = int(_LENGTH.unpack_from(data)[0])
    if size > MAX_FRAME_BYTES:
        raise ProcessProtocolError(
            f"a message of {size} bytes is above the limit of {MAX_FRAME_BYTES}; the peer speaks something else",
            version=None,
        )
    return size


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProcessProtocolError(f"a message is no JSON: {error}", version=None) from error
    if not isinstance(message, dict):
        raise ProcessProtocolError("a message is no JSON object", version=None)
    return cast(dict[str, Any], message)


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Return that many bytes, or None when the connection ended before the first one."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            if not parts:
                return None
            raise ProcessProtocolError("the connection ended within a message", version=VERSION)
        parts += part
    return bytes(parts)
