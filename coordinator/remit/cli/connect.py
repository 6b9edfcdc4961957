"""How a verb comes to its coordinator: through Ray, unless whoever calls the command says otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from remit.core.errors import CoordinatorUnavailable

if TYPE_CHECKING:
    import typer

    from remit.coordinator.api import Coordinator

_RESTART_S = 15.0
_PAUSE_S = 0.2

__all__ = ["Opener", "connected", "open_on_ray", "opener"]


class Opener(Protocol):
    """Returns the coordinator of a workspace, not yet connected."""

    def __call__(self, workspace: str, *, address: str | None, start: bool) -> Coordinator:
        """Return it.

        Args:
            workspace: absolute path.
            address: `host:port` of a Ray cluster; None for the order of `Coordinator.open`.
            start: whether a missing local node and coordinator are started.
        """
        ...


def open_on_ray(workspace: str, *, address: str | None, start: bool) -> Coordinator:
    """Return the coordinator that runs, or will run, on Ray; says on stderr what is being started."""
    from remit.coordinator.api import Coordinator
    from remit.coordinator.connecting import RayConnection

    connection = RayConnection(workspace, address=address, progress=_progress, start=start)
    return Coordinator(workspace, connection.open, surface="cli", on_close=connection.close)


def opener(context: typer.Context) -> Opener:
    """Return what opens coordinators for this call: the object given to it, else Ray."""
    found: Opener | None = context.obj
    return found or open_on_ray


@contextmanager
def connected(coordinator: Coordinator) -> Generator[None]:
    """Connect for the time of a block.

    In the main thread and outside any event loop, so that Ctrl-C ends the start of
    a node at once: it would wait for a thread.

    A coordinator that is just being restarted is waited for.

    Raises:
        CoordinatorUnavailable: see `Coordinator.connect`.
    """
    give_up_at = time.monotonic() + _RESTART_S
    while True:
        try:
            coordinator.connect()
            break
        except CoordinatorUnavailable as error:
            if error.for_good or time.monotonic() >= give_up_at:
                raise
            time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        coordinator.close()


def _progress(line: str) -> None:
    sys.stderr.write(f"remit: {line}\n")
    sys.stderr.flush()
