"""The seam between the coordinator and whatever runs its hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["Engine", "HostLink", "Scheduler", "TimerHandle"]


class HostLink(Protocol):
    """A living host. Sending returns at once; a host that is gone is told of elsewhere."""

    @property
    def pid(self) -> int:
        """Process id of the host."""
        ...

    @property
    def machine(self) -> str:
        """Name of the machine that it runs on."""
        ...

    def start(self, batch: bytes) -> None:
        """Send a `StartBatch`."""
        ...

    def control(self, orders: bytes) -> None:
        """Send control messages; heard also while the host's bodies block."""
        ...

    async def flush(self, timeout_s: float) -> None:
        """Let the host hand on spans that have ended; returns when it has, or when it is gone."""
        ...


class Engine(Protocol):
    """Starts and ends agent hosts."""

    async def spawn(self, host_id: str, resources: Mapping[str, Any], on_gone: Callable[[str], None]) -> HostLink:
        """Start a host and return once it answers.

        Args:
            host_id: its id.
            resources: what the engine was asked for (`num_cpus`, `num_gpus`, `runtime_env`).
            on_gone: called once, from any thread, with the reason when it dies.

        Raises:
            CoordinatorUnavailable: the host could not be started.
        """
        ...

    async def kill(self, host_id: str) -> None:
        """End a host without asking it; `on_gone` follows."""
        ...

    def sweep(self, run_id: str, pid: int, start_time: float, machine: str, on_done: Callable[[bool], None]) -> None:
        """End a tool process whose host died, if it can be reached from here.

        Args:
            run_id: the run that had started it.
            pid: its process id.
            start_time: its start time, as it was reported.
            machine: where it ran.
            on_done: called once, from any thread: whether it is proven gone.
        """
        ...

    def exit(self) -> None:
        """End the coordinator's own process, once all is closed."""
        ...


class TimerHandle(Protocol):
    """A timer that can be called off."""

    def cancel(self) -> None:
        """Call the timer off; harmless when it has fired."""
        ...


class Scheduler(Protocol):
    """Calls back at a point in coordinator time."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back once `when` (seconds since 1970) has come."""
        ...
