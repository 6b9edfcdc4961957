"""Identifiers: short typed texts that sort by the time they were made.

An identifier is a prefix, an underscore, ten characters of wall time in
milliseconds and ten random characters, all in Crockford's base 32, so that a
plain text sort is a sort by age (the layout follows ULID, github.com/ulid/spec).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NewType

__all__ = [
    "ApprovalId",
    "AttemptNumber",
    "ClaimId",
    "ClientId",
    "HostId",
    "IdFactory",
    "NodeId",
    "RequestId",
    "RunId",
    "SessionId",
    "TurnId",
    "is_run_id",
    "is_turn_id",
]

NodeId = NewType("NodeId", str)
"""A turn or a run: a node of the delegation tree."""
RunId = NewType("RunId", NodeId)
"""One delegation, `run_...`."""
TurnId = NewType("TurnId", NodeId)
"""One turn of a parent agent, `turn_...`."""
SessionId = NewType("SessionId", str)
"""A conversation that groups turns; chosen by the caller or made as `session_...`."""
ClientId = NewType("ClientId", str)
"""One connected process (driver, host or command), `client_...`."""
HostId = NewType("HostId", str)
"""One agent host, `host_...`."""
ClaimId = NewType("ClaimId", str)
"""One request for claims on workspace paths, `claim_...`."""
ApprovalId = NewType("ApprovalId", str)
"""One request for approval of an action, `approval_...`."""
RequestId = NewType("RequestId", str)
"""One request of a client, `req_...`; the same id sent twice is carried out once."""
AttemptNumber = NewType("AttemptNumber", int)
"""Which try of a run this is, from 1."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 50
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]


def _encode(value: int, width_pairs: int) -> str:
    """Write an integer in base 32, two characters at a time, most significant first."""
    parts: list[str] = []
    for _ in range(width_pairs):
        parts.append(_PAIRS[value & 1023])
        value >>= 10
    parts.reverse()
    return "".join(parts)


class IdFactory:
    """Make identifiers from a given clock and source of randomness.

    Thread-safe as far as its source is (`random.SystemRandom` and
    `random.Random` both are under the interpreter lock).

    Args:
        unix_ms: returns wall time in milliseconds since 1970.
        getrandbits: returns that many random bits as an integer.
    """

    __slots__ = ("_getrandbits", "_unix_ms")

    def __init__(
        self,
        unix_ms: Callable[[], int] | None = None,
        getrandbits: Callable[[int], int] | None = None,
    ) -> None:
        self._unix_ms = unix_ms or _system_unix_ms
        # Seeded by the operating system and not shared with user code, whose
        # own `random.seed` must never make two processes agree on an id.
        self._getrandbits = getrandbits or random.Random().getrandbits

    def new(self, prefix: str) -> str:
        """Return a new identifier with this prefix.

        Args:
            prefix: lower-case word that says what the id names.
        """
        return f"{prefix}_{_encode(self._unix_ms(), 5)}{_encode(self._getrandbits(_RANDOM_BITS), 5)}"

    def run(self) -> RunId:
        """Return a new run id."""
        return RunId(NodeId(self.new("run")))

    def turn(self) -> TurnId:
        """Return a new turn id."""
        return TurnId(NodeId(self.new("turn")))

    def session(self) -> SessionId:
        """Return a new session id."""
        return SessionId(self.new("session"))

    def client(self) -> ClientId:
        """Return a new client id."""
        return ClientId(self.new("client"))

    def host(self) -> HostId:
        """Return a new host id."""
        return HostId(self.new("host"))

    def claim(self) -> ClaimId:
        """Return a new claim id."""
        return ClaimId(self.new("claim"))

    def approval(self) -> ApprovalId:
        """Return a new approval id."""
        return ApprovalId(self.new("approval"))

    def request(self) -> RequestId:
        """Return a new request id."""
        return RequestId(self.new("req"))


def _system_unix_ms() -> int:
    return time.time_ns() // 1_000_000


def is_run_id(text: str) -> bool:
    """Tell whether a text has the shape of a run id."""
    return text.startswith("run_")


def is_turn_id(text: str) -> bool:
    """Tell whether a text has the shape of a turn id."""
    return text.startswith("turn_")
