"""The leases on the disk, so that a daemon's death makes none longer.

A lease that ends in the monotonic time of one boot means nothing after another
one, so the boot is written with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from remit.processes.jobs import boot_id
from remit.processes.leases import MAX_TTL_S, Leases

__all__ = ["LeaseFile"]


class LeaseFile:
    """Writes and reads the leases of one daemon.

    Args:
        path: the file.
        leases: what is written, and read into.
    """

    def __init__(self, path: Path, leases: Leases) -> None:
        self._path = path
        self._leases = leases

    def save(self) -> None:
        """Write all leases, whole or not at all; a full disk keeps what was written before."""
        data = {"boot": boot_id(), "leases": [lease.to_dict() for lease in self._leases.all()]}
        beside = self._path.with_suffix(".new")
        try:
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            beside.replace(self._path)
        except OSError:
            # Written again at the next renewal. Until then a restarted daemon trusts an older and
            # so shorter lease, which ends processes early rather than late.
            beside.unlink(missing_ok=True)

    def load(self, now: float) -> None:
        """Read the leases of an earlier daemon of this boot; garbage and other boots count as none."""
        try:
            data: dict[str, Any] = json.loads(self._path.read_bytes())
            if data["boot"] != boot_id():
                return
            items: list[Any] = list(data["leases"])
        except (OSError, ValueError, TypeError, LookupError):
            return
        for item in items:
            try:
                if self._leases.get(item["scope"]) is None:
                    self._leases.restore(item, now=now, limit_s=MAX_TTL_S)
            except (KeyError, TypeError, ValueError):
                continue  # one that does not hold makes the others no worse
