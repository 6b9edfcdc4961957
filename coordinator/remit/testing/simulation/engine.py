"""Starts and ends hosts, as a model of the engines, and breaks them.

Hosts may end with their coordinator or outlive it until the next one ends them by their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from remit.testing.simulation.host import HostModel
from remit.testing.simulation.keepers import Keepers
from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["EngineModel", "Life"]


class Life(Protocol):
    """One life of the coordinator, as engines know it."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        ...

    def host_ready(self, host: HostModel) -> None:
        """A host answers."""
        ...

    def host_gone(self, host_id: str, reason: str) -> None:
        """A host is not there any more."""
        ...

    def swept(self, run_id: str, pid: int, *, gone: bool) -> None:
        """A process that a dead host had left is gone, or could not be ended."""
        ...


class EngineModel:
    """All hosts of a simulation, over all lives of the coordinator.

    Args:
        kernel: the clock.
        dice: delays, and which starts fail.
        keepers: where tool processes run.
        make: makes a host of an id.
        spawn_failure: probability that a host does not start, until `calm_at`.
        calm_at: when all faults end.
    """

    def __init__(
        self,
        kernel: Kernel,
        dice: Dice,
        keepers: Keepers,
        make: Callable[[str], HostModel],
        *,
        spawn_failure: float,
        calm_at: float,
    ) -> None:
        self.hosts: dict[str, HostModel] = {}
        """All that were ever started."""
        self.life: Life | None = None
        """The life that serves: it finds out what dies, because its parked call ends."""
        self._kernel = kernel
        self._dice = dice
        self._keepers = keepers
        self._make = make
        self._spawn_failure = spawn_failure
        self._calm_at = calm_at

    def spawn(self, host_id: str) -> None:
        """Start a host for the life that serves, or fail to."""
        life = self.life
        assert life is not None
        delay = self._dice.between(0.05, 0.6, "spawn", host_id)
        if self._kernel.now < self._calm_at and self._dice.chance(self._spawn_failure, "spawn fails", host_id):
            self._kernel.after(delay, lambda: life.host_gone(host_id, "it did not start"))
            return

        def ready() -> None:
            if not life.is_over:
                host = self.hosts[host_id] = self._make(host_id)
                life.host_ready(host)

        self._kernel.after(delay, ready)

    def kill(self, host_id: str) -> None:
        """End a host without asking it; nothing happens if it has not started, or is gone."""
        host = self.hosts.get(host_id)
        if host is not None:
            delay = self._dice.between(0.005, 0.1, "kill", host_id)
            self._kernel.after(delay, lambda: host.die(lambda: self._died(host_id, "killed")))

    def sweep(self, run_id: str, pid: int) -> None:
        """End a process that a dead host has left, and tell the life that asked."""
        life = self.life
        assert life is not None
        self._keepers.sweep(pid, lambda gone: life.swept(run_id, pid, gone=gone))

    def alive(self) -> list[HostModel]:
        """Return the hosts that are there and not taken for dead; those at work if there are any."""
        found = [host for host in self.hosts.values() if not host.is_dead and not host.is_zombie]
        return [host for host in found if host.bodies] or found

    def crash(self, host: HostModel) -> None:
        """Let a host die."""
        host.die(lambda: self._died(host.id, "it crashed"))

    def disown(self, host: HostModel, seconds: float) -> None:
        """Let a host be taken for dead while it acts on for some seconds."""
        host.is_zombie = True
        self._died(host.id, "it is taken for dead")
        self._kernel.after(seconds, host.die)

    def end_all(self) -> None:
        """End all hosts with their coordinator, at once and without a word."""
        for host in self.hosts.values():
            host.die()

    def _died(self, host_id: str, reason: str) -> None:
        life = self.life
        if life is not None:
            delay = self._dice.between(0.005, 0.05, "death", host_id)
            self._kernel.after(delay, lambda: life.host_gone(host_id, reason))
