"""The seam between the coordinator and whatever runs its hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from remit.core.messages import HostInventory
from remit.locks import Area
from remit.processes.gitlocks import Aftermath

__all__ = ["ClusterNode", "Engine", "HostLink", "Scheduler", "Swept", "TimerHandle"]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node of the cluster that hosts may run on."""

    id: str
    """Its id, stable for as long as it is up."""
    name: str
    """Name of its machine."""
    address: str = ""
    """Network address; may be empty."""

    def is_called(self, text: str) -> bool:
        """Tell whether a text names this node: its id or the beginning of it, its name or its address."""
        return text in (self.name, self.address) or (len(text) >= 4 and self.id.startswith(text))


@dataclass(frozen=True, slots=True)
class Swept:
    """What became of the programs of a run that nobody looked after any more."""

    gone: bool
    """Whether they are proven gone."""
    aftermath: Aftermath = field(default_factory=Aftermath)
    """Git locks that they had left."""


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

    @property
    def node(self) -> str:
        """Id of the node of the cluster that it runs on."""
        ...

    async def inventory(self, epoch: int) -> HostInventory:
        """Return what the host has; from then on it refuses what lives before `epoch` have sent.

        Raises:
            RemitError: it does not answer, or serves a later life.
        """
        ...

    def start(self, batch: bytes) -> None:
        """Send a `StartBatch`."""
        ...

    def control(self, orders: bytes) -> None:
        """Send control messages; heard also while the host's bodies block."""
        ...

    async def flush(self, orders: bytes) -> None:
        """Send orders to hand on spans that have ended; returns when that is done, or the host is gone."""
        ...


class Engine(Protocol):
    """Starts and ends agent hosts."""

    async def spawn(
        self,
        host_id: str,
        resources: Mapping[str, Any],
        on_gone: Callable[[str], None],
        *,
        avoid: Collection[str] = (),
    ) -> HostLink:
        """Start a host and return once it answers.

        Args:
            host_id: its id.
            resources: what the engine was asked for (`num_cpus`, `num_gpus`, `runtime_env`).
            on_gone: called once, from any thread, with the reason when it dies.
            avoid: ids of nodes of the cluster that it must not run on.

        Raises:
            CoordinatorUnavailable: the host could not be started.
        """
        ...

    async def find(self, host_id: str, on_gone: Callable[[str], None]) -> HostLink | None:
        """Return the link to a host that an earlier life has started, or None if it is not there.

        Args:
            host_id: its id.
            on_gone: as for `spawn`.
        """
        ...

    async def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the nodes of the cluster that are up."""
        ...

    async def kill(self, host_id: str) -> None:
        """End a host without asking it; `on_gone` follows."""
        ...

    def sweep(
        self,
        run_id: str,
        pid: int,
        start_time: float,
        machine: str,
        on_done: Callable[[Swept], None],
        claimed: Sequence[Area] = (),
    ) -> None:
        """End the programs of a run, or of a turn itself, that nobody looks after any more; background ones go on.

        Args:
            run_id: the run or turn that had started them.
            pid: process id of the one that is known; 0 for none.
            start_time: its start time, as it was reported.
            machine: where they ran; empty for this one.
            on_done: called once, from any thread: whether they are proven gone, and what they have left.
            claimed: areas that the run may write and that nobody else uses: there its git locks are taken away.
        """
        ...

    async def programs_gone(self, runs: Collection[str]) -> Mapping[str, frozenset[int]]:
        """Return which programs of these runs are proven gone: run -> process ids."""
        ...

    async def program_owners(self) -> frozenset[str]:
        """Return the runs, and the turns themselves, of which foreground programs run on this machine.

        Raises:
            RemitError: nobody says.
        """
        ...

    def vouch(self) -> None:
        """Say that the coordinator is there, to whoever ends the programs of those that are not. Returns at once."""
        ...

    def release_programs(self) -> None:
        """End what foreground programs are left: nobody stands behind them any more. Blocks, bounded."""
        ...

    def exit(self) -> None:
        """End the coordinator's own process for good, once all is closed."""
        ...

    def abort(self) -> None:
        """End the coordinator's own process at once; the next life folds what is on the disk."""
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
