"""A tiny process that stops the local node when nobody has used it for long, then ends.

    python node_watch.py STATE_DIR IDLE_S

It prints its number and goes to the background. It also ends a node whose
starter was killed halfway, and removes what a node that died has left. It is run
by file and imports the rest of `remit` only to stop something, so that it
stays at the size of a bare interpreter.

Idle time is counted on the monotonic clock between changes of the file `used`:
neither a changed wall clock nor a machine that slept looks like disuse.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["IdleCount", "main"]

_LONGEST_POLL_S = 5.0


class IdleCount:
    """Seconds since a time stamp last changed.

    Args:
        stamp: the first value seen.
        now: seconds on a monotonic clock.
    """

    __slots__ = ("_since", "stamp")

    def __init__(self, stamp: int, now: float) -> None:
        self.stamp = stamp
        self._since = now

    def see(self, stamp: int, now: float) -> float:
        """Return for how many seconds the stamp has been the same.

        Args:
            stamp: its value now.
            now: seconds on the same monotonic clock.
        """
        if stamp != self.stamp:
            self.stamp = stamp
            self._since = now
        return now - self._since


def main(arguments: list[str]) -> int:
    """Start the watch in the background, print its number, and return at once.

    Args:
        arguments: state directory and idle seconds.
    """
    state_dir, idle_s = Path(arguments[0]), float(arguments[1])
    child = os.fork()
    if child:
        sys.stdout.write(f"{child}\n")
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    _watch(state_dir, idle_s)
    return 0


def _watch(state_dir: Path, idle_s: float) -> None:
    """Look every few seconds until there is nothing to watch."""
    count = IdleCount(_used_ns(state_dir), time.monotonic())
    pause_s = min(_LONGEST_POLL_S, max(0.05, idle_s / 10))
    while state_dir.is_dir():
        time.sleep(pause_s)
        idle_for_s = count.see(_used_ns(state_dir), time.monotonic())
        record = _record(state_dir)
        if record is not None and record["watch"][0] != os.getpid():
            return  # Another node, with a watch of its own.
        over = record is None or not _is_running(record) or idle_for_s >= idle_s
        if over and _stopped(state_dir, count.stamp):
            return


def _stopped(state_dir: Path, used_ns: int) -> bool:
    """Stop the node and return True; False if it was used meanwhile, is being started, or resists."""
    try:
        from remit.coordinator.node import LocalNode

        return LocalNode(state_dir, idle_s=1.0).stop_unless_used(used_ns)
    except Exception:
        # Outer edge of the process: whatever is wrong (the package is being
        # upgraded, the disk is full) may be right at the next look.
        (state_dir / "watch.log").write_text(traceback.format_exc())
        return False


def _record(state_dir: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((state_dir / "node.json").read_bytes())
        return record if record.get("watch") else None
    except (OSError, ValueError):
        return None


def _is_running(record: dict[str, Any]) -> bool:
    """Tell whether the numbers of all essential processes are in use; a first look, identity is checked later."""
    for pid, _ in record["pids"]:
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        try:
            # In a container without an init process the dead stay as zombies.
            if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                return False
        except OSError:
            pass  # Not Linux, or gone just now: the next look tells.
    return True


def _used_ns(state_dir: Path) -> int:
    try:
        return (state_dir / "used").stat().st_mtime_ns
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
