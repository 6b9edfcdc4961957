"""What is the matter with the local node: findings for people, nothing changed."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from remit.coordinator.node import LocalNode, NodeRecord
from remit.coordinator.node_launch import Launcher, RayLauncher, socket_path_excess
from remit.coordinator.node_processes import listening_addresses
from remit.core.errors import CoordinatorUnavailable

__all__ = ["Finding", "FindingLevel", "doctor"]

# As the kernel shows them; the last is IPv4 loopback on a socket that serves both families.
_LOOPBACK = ("127.", "::1", "::ffff:127.")
# Below this Ray puts its object store on the disk, which is many times slower.
_SMALL_SHM_BYTES = 256 * 1024 * 1024


class FindingLevel(StrEnum):
    """How bad a finding is: `ok`, `warning` (works, but look), `error` (does not work)."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: how bad, and what."""

    level: FindingLevel
    text: str


def doctor(state_dir: Path | None = None, launcher: Launcher | None = None) -> list[Finding]:
    """Examine the local node and its surroundings; never raises for what it finds.

    Args:
        state_dir: as for `LocalNode`.
        launcher: as for `LocalNode`.
    """
    launcher = launcher if launcher is not None else RayLauncher()
    node = LocalNode(state_dir, launcher)
    return [
        *_versions(launcher),
        *_directory(node, launcher),
        *_node(node),
        *_shared_memory(Path("/dev/shm")),
    ]


def _versions(launcher: Launcher) -> list[Finding]:
    python = f"Python {platform.python_version()} ({sys.executable})"
    if not launcher.version:
        return [Finding(FindingLevel.ERROR, f"ray is not installed for {python}; run `pip install ray`")]
    return [Finding(FindingLevel.OK, f"ray {launcher.version} on {python}")]


def _directory(node: LocalNode, launcher: Launcher) -> list[Finding]:
    path = node.state.path
    try:
        exists = node.state.check()
    except CoordinatorUnavailable as error:
        return [Finding(FindingLevel.ERROR, error.message)]
    excess = socket_path_excess(node.state.temp_dir, launcher)
    if excess:
        return [
            Finding(
                FindingLevel.ERROR,
                f"state directory {path} is {excess} bytes too long for the paths of sockets;"
                " set REMIT_STATE_DIR to a shorter one",
            )
        ]
    return [Finding(FindingLevel.OK, f"state directory {path} is {'private' if exists else 'not made yet'}")]


def _node(node: LocalNode) -> list[Finding]:
    try:
        record = node.status()
    except CoordinatorUnavailable:
        return []  # Said by `_directory`.
    processes = node.processes()
    if record is not None:
        return [_up(node, record, len(processes)), *_exposed(node)]
    findings: list[Finding] = []
    if node.state.record_path.exists():
        findings.append(
            Finding(
                FindingLevel.WARNING,
                f"{node.state.record_path} is stale: its node has died; the next start or `remit down` removes it",
            )
        )
    if processes:
        names = ", ".join(f"{process.name} ({process.identity.pid})" for process in processes)
        findings.append(
            Finding(
                FindingLevel.WARNING,
                f"processes of a local node that is not up: {names}; it is being started, or `remit down` ends them",
            )
        )
    return findings or [Finding(FindingLevel.OK, "no local node is up; the next command starts one")]


def _up(node: LocalNode, record: NodeRecord, processes: int) -> Finding:
    now = time.time()
    up_s = max(0.0, now - record.started_unix_ms / 1000)
    unused_s = max(0.0, now - node.state.used_ns() / 1e9)
    return Finding(
        FindingLevel.OK,
        f"local node is up at {record.address}: {processes} processes, started {up_s:.0f} s ago,"
        f" last used {unused_s:.0f} s ago, log {record.log_path}",
    )


def _exposed(node: LocalNode) -> list[Finding]:
    return [
        Finding(FindingLevel.ERROR, f"{name} listens on {host}:{port}, beyond loopback; run `remit down`")
        for host, port, name in listening_addresses(node.processes())
        if not host.startswith(_LOOPBACK)
    ]


def _shared_memory(path: Path) -> list[Finding]:
    try:
        found = os.statvfs(path)
    except OSError:
        return []  # macOS has none, and needs none.
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    text = f"shared memory {path}: {free >> 20} MiB free of {size >> 20} MiB"
    if free < _SMALL_SHM_BYTES:
        return [Finding(FindingLevel.WARNING, f"{text}; large results go through the disk (containers: --shm-size=1g)")]
    return [Finding(FindingLevel.OK, text)]
