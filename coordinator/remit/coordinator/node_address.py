"""Which Ray to use, and whether anything answers there, without importing ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from remit.core.errors import CoordinatorUnavailable

__all__ = ["AddressSource", "probe", "resolve_address"]

AddressSource = Literal["explicit", "environment", "local"]
"""Who named the address: the caller, `RAY_ADDRESS`, or nobody (then the local node is meant)."""

_LOCAL_WORDS = ("", "local")


def resolve_address(explicit: str | None, environ: Mapping[str, str] | None = None) -> tuple[AddressSource, str | None]:
    """Decide which Ray is meant: the caller's, that of `RAY_ADDRESS`, or the local node.

    Args:
        explicit: the caller's address, or None; "local" asks for the local node
            whatever the environment says.
        environ: the environment; None means `os.environ`.

    Returns:
        Who decided, and the address; None as the address means the local node.
    """
    if explicit is not None and explicit.strip():
        address = explicit.strip()
        return ("local", None) if address in _LOCAL_WORDS else ("explicit", address)
    address = (os.environ if environ is None else environ).get("RAY_ADDRESS", "").strip()
    return ("local", None) if address in _LOCAL_WORDS else ("environment", address)


def probe(address: str, timeout_s: float = 2.0, *, source: str = "RAY_ADDRESS") -> None:
    """Return if something accepts connections at an address; takes milliseconds where it is near.

    That it is Ray, of a version that fits, shows only when connecting in earnest.

    Args:
        address: `host:port`, `auto` (the node that `ray start` has noted on this
            machine) or `local` (nothing to ask).
        timeout_s: seconds to wait for the connection.
        source: what the message calls the place the address came from.

    Raises:
        CoordinatorUnavailable: nothing answers, or the address has no such form.
    """
    named = f"{source}={address}"
    if address in _LOCAL_WORDS:
        return
    if address.startswith("ray://"):
        raise CoordinatorUnavailable(
            f"{named} is a Ray client address, and client mode is not supported: run on a node of the"
            " cluster and give the address of its control service as host:port"
        )
    target = address
    if address == "auto":
        target = _noted_address()
        if not target:
            raise CoordinatorUnavailable(
                f"no Ray answers at {named}: no node was started on this machine by `ray start`;"
                f" start one, give host:port, or unset {source} to use the local node"
            )
    host, port = _split(target, named)
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        raise CoordinatorUnavailable(
            f"no Ray answers at {named}: {reason[:1].lower()}{reason[1:]}; start that cluster, correct the"
            f" address, or unset {source} to use the local node"
        ) from error


def _split(target: str, named: str) -> tuple[str, int]:
    """Split `host:port`, with brackets around an IPv6 host."""
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CoordinatorUnavailable(f"no Ray answers at {named}: the address must be host:port, auto or local")
    return host.strip("[]"), int(port)


def _noted_address() -> str:
    """Return the address that `ray start` has noted on this machine, or the empty text."""
    # Source: ray/_common/utils.py, get_default_system_temp_dir.
    parent = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR")) or "/tmp"
    try:
        return Path(parent, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return ""
