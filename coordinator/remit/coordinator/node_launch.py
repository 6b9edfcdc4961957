"""How a local node is launched: the one command, its environment, what it leaves to be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

__all__ = ["Launcher", "RayLauncher", "child_environment", "socket_path_excess"]

# A name made by Ray: session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store,
# with the longest process number Linux gives out.
_LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# sockaddr_un.sun_path, less its ending zero.
_SOCKET_LIMIT = 103 if sys.platform == "darwin" else 107

# What would tie the node to another cluster, to a job in it, or to another token.
_FOREIGN = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_NODE_ID",
    "RAY_RAYLET_PID",
)


class Launcher(Protocol):
    """What a local node needs to know about the program it runs; the tests have a small one."""

    @property
    def version(self) -> str:
        """Version of the program, without importing it."""
        ...

    def command(self, temp_dir: Path) -> list[str]:
        """Return the command that starts the node and then ends with status 0.

        The processes it leaves must carry `temp_dir` in their arguments, and the
        file `ray_current_cluster` in it must hold `host:port`.
        """
        ...

    def environment(self, token_path: Path) -> dict[str, str]:
        """Return what must be set for the node and for all who connect to it."""
        ...

    def is_essential(self, command: Sequence[str]) -> bool:
        """Tell by the arguments of a process whether the node ends with it."""
        ...

    def stage(self, temp_dir: Path) -> str:
        """Return in a few words how far the start has come."""
        ...

    def longest_socket(self) -> str:
        """Return the longest path of a socket below `temp_dir`."""
        ...


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Start Ray by `ray start`, in a process of its own: importing ray here would cost two seconds.

    Attributes:
        num_cpus: CPUs that the node offers; None for all that this process may use.
    """

    num_cpus: int | None = None

    @property
    def version(self) -> str:
        """Version of the installed ray, or the empty text."""
        try:
            return metadata.version("ray")
        except metadata.PackageNotFoundError:
            return ""

    def command(self, temp_dir: Path) -> list[str]:
        """Return the `ray start` command; by module, since the script may not be on PATH."""
        return [
            sys.executable,
            "-c",
            "from ray.scripts.scripts import main; main()",
            "start",
            "--head",
            "--node-ip-address=127.0.0.1",
            "--port=0",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--temp-dir={temp_dir}",
            f"--num-cpus={self.num_cpus or _usable_cpus()}",
        ]

    def environment(self, token_path: Path) -> dict[str, str]:
        """Return loopback only, and token authentication."""
        return {
            # Ray otherwise replaces 127.0.0.1 by the address of the network card
            # and listens there (ray/_private/services.py, resolve_ip_for_localhost).
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_path),
        }

    def is_essential(self, command: Sequence[str]) -> bool:
        """Tell whether this is Ray's control service or its node manager."""
        return bool(command) and os.path.basename(command[0]) in ("gcs_server", "raylet")

    def stage(self, temp_dir: Path) -> str:
        """Read the stage from the files that Ray makes on its way."""
        session = temp_dir / "session_latest"
        if (session / "sockets" / "raylet").exists():
            return "waiting for the node manager"
        if any(session.glob("gcs_server_port_*")):
            return "starting the node manager"
        if session.exists():
            return "starting the control service"
        return "loading Ray"

    def longest_socket(self) -> str:
        """Return the path of Ray's object store socket."""
        return _LONGEST_SOCKET


def socket_path_excess(temp_dir: Path, launcher: Launcher) -> int:
    """Return by how many bytes socket paths below this directory would be too long; 0 if they fit."""
    return max(0, len(os.fsencode(temp_dir / launcher.longest_socket())) - _SOCKET_LIMIT)


def child_environment() -> dict[str, str]:
    """Return our environment without what belongs to another cluster, and with no relative import path."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if environment.get("PYTHONPATH"):
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)
    return environment


def _usable_cpus() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    else:
        return os.cpu_count() or 1
