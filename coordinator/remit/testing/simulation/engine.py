"""Starts and ends hosts, as a model of the engines, and breaks them.

Hosts may end with their coordinator or outlive it; then the next one finds them by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from remit.testing.simulation.host import HostModel
from remit.testing.simulation.keepers import Keepers
from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["NODES", "EngineModel", "Life"]

NODES = ("node_1", "node_2")
"""Nodes of the simulated cluster."""


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
        make: makes a host of an id on a node.
        spawn_failure: probability that a host does not start, until `calm_at`.
        calm_at: when all faults end.
    """

    def __init__(
        self,
        kernel: Kernel,
        dice: Dice,
        keepers: Keepers,
        make: Callable[[str, str], HostModel],
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

    def spawn(self, host_id: str, avoid: Collection[str] = ()) -> None:
        """Start a host, or fail to; it is there by its name at once, and answers when it is up."""
        life = self.life
        assert life is not None
        delay = self._dice.between(0.05, 0.6, "spawn", host_id)
        nodes = [node for node in NODES if node not in avoid]
        if not nodes:
            self._kernel.after(delay, lambda: life.host_gone(host_id, "no node of the cluster takes work"))
            return
        host = self._make(host_id, nodes[int(self._dice.unit("node", host_id) * len(nodes))])
        host.up_at = self._kernel.now + delay
        self.hosts[host_id] = host
        if self._kernel.now < self._calm_at and self._dice.chance(self._spawn_failure, "spawn fails", host_id):
            self._kernel.after(delay, lambda: host.die(lambda: self._died(host_id, "it did not start")))
            return

        def ready() -> None:
            if not host.is_dead and not life.is_over:
                life.host_ready(host)

        self._kernel.after(delay, ready)

    def find(self, host_id: str) -> HostModel | None:
        """Return a host that an earlier life has started, if it is there."""
        host = self.hosts.get(host_id)
        return None if host is None or host.is_dead or host.is_zombie else host

    def kill(self, host_id: str) -> None:
        """End a host without asking it; nothing happens if it is gone."""
        host = self.hosts.get(host_id)
        if host is not None:
            delay = self._dice.between(0.005, 0.1, "kill", host_id)
            self._kernel.after(delay, lambda: host.die(lambda: self._died(host_id, "killed")))

    def sweep(self, run_id: str, pid: int) -> None:
        """End what a dead host has left of a run, and tell the life that asked."""
        life = self.life
        assert life is not None
        self._keepers.sweep(run_id, lambda gone: life.swept(run_id, pid, gone=gone))

    def end_orphans(self, owner: str) -> None:
        """End whatever there is of a run or turn that nobody may have told of; tried again by this life."""
        life = self.life
        assert life is not None

        def done(gone: bool) -> None:
            if not gone and not life.is_over:
                self._kernel.after(1.0, again)

        def again() -> None:
            if not life.is_over:
                self.end_orphans(owner)

        self._keepers.sweep(owner, done)

    def program_owners(self) -> list[str]:
        """Return the runs and turns of which programs run."""
        return list(dict.fromkeys(process.run_id for process in self._keepers.alive.values()))

    def alive(self) -> list[HostModel]:
        """Return the hosts that are there and not taken for dead; those at work if there are any."""
        found = [host for host in self.hosts.values() if self.find(host.id) is not None]
        return [host for host in found if host.bodies] or found

    def crash(self, host: HostModel) -> None:
        """Let a host die."""
        host.die(lambda: self._died(host.id, "it crashed"))

    def disown(self, host: HostModel, seconds: float) -> None:
        """Let a host be taken for dead while it acts on for some seconds."""
        host.is_zombie = True
        self._died(host.id, "it is taken for dead")

        def leave() -> None:
            # It finds out that its work was settled without it, and ends what it has itself.
            for process in list(self._keepers.alive.values()):
                if process.host_id == host.id:
                    self._keepers.end(process.pid)
            host.die()

        self._kernel.after(seconds, leave)

    def end_all(self) -> None:
        """End all hosts with their coordinator, at once and without a word."""
        for host in self.hosts.values():
            host.die()

    def _died(self, host_id: str, reason: str) -> None:
        life = self.life
        if life is not None:
            delay = self._dice.between(0.005, 0.05, "death", host_id)
            self._kernel.after(delay, lambda: life.host_gone(host_id, reason))
