"""Finding Ray, or starting it, and the workspace's coordinator on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from remit.coordinator.node import LocalNode
from remit.coordinator.node_address import probe, resolve_address
from remit.core.errors import CoordinatorUnavailable

if TYPE_CHECKING:
    from remit.agents.link import Link
    from remit.core.limits import Limits

__all__ = ["RayConnection"]


def _silent(_: str) -> None:
    """Say nothing."""


class RayConnection:
    """One coordinator's way to Ray: opened once, closed once.

    Args:
        workspace: absolute path of the workspace.
        address: `host:port`, or None for the order of `Coordinator.open`.
        progress: called with lines about what is being started.
        limits: bounds of the workspace for a coordinator that is started here.
        start: whether a missing local node and coordinator are started.
    """

    def __init__(
        self,
        workspace: str,
        *,
        address: str | None = None,
        progress: Callable[[str], None] | None = None,
        limits: Limits | None = None,
        start: bool = True,
    ) -> None:
        self._workspace = workspace
        self._address = address
        self._progress = progress or _silent
        self._limits = limits
        self._start = start
        self._connected = False

    def open(self) -> Link:
        """Connect and return the link to the coordinator.

        Raises:
            CoordinatorUnavailable: no Ray at the address, or it could not be started, or
                (with `start` false) nothing runs.
        """
        address = None if _already_connected() else self._find_ray()
        # Ray would copy the environment that `uv run` made into every worker.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
        from remit.coordinator import ray_engine

        ray_engine.connect(address or "auto")
        self._connected = True
        link = ray_engine.find_coordinator(self._workspace, self._limits, create=self._start)
        if link is None:
            self.close()
            raise CoordinatorUnavailable(
                f"no coordinator runs for workspace {self._workspace}; nothing is going on there",
                for_good=True,
            )
        return link

    def _find_ray(self) -> str:
        try:
            return self._locate()
        except CoordinatorUnavailable as error:
            # A cluster that is not there, unlike a coordinator, does not come back in a moment.
            error.for_good = True
            raise

    def _locate(self) -> str:
        source, address = resolve_address(self._address)
        if address is not None:
            probe(address, source="RAY_ADDRESS" if source == "environment" else "--address")
            return address
        node = LocalNode()
        record = node.status()
        if record is None:
            if not self._start:
                raise CoordinatorUnavailable("the local Ray node is not up, so nothing runs; `remit up` starts it")
            record = node.ensure(self._progress)
        os.environ.update(node.environment(record))
        node.touch()
        return record.address

    def close(self) -> None:
        """Undo `open`; harmless when it had not got that far."""
        if self._connected:
            self._connected = False
            from remit.coordinator import ray_engine

            ray_engine.disconnect()


def _already_connected() -> bool:
    """Tell whether this process has a Ray connection, without importing Ray for it."""
    module = sys.modules.get("ray")
    return module is not None and bool(module.is_initialized())
