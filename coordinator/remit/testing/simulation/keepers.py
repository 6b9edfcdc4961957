"""Tool processes and whoever ends them, as a model: they outlive their host until they are swept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["Keepers", "ToolProcess"]

MACHINE = "machine"
_SWEEP_FAILS = 0.1


@dataclass(slots=True)
class ToolProcess:
    """A process that a body has started and that is still there."""

    pid: int
    run_id: str
    attempt: int
    areas: tuple[str, ...]
    """What its run may write, and so this process may."""


class Keepers:
    """All tool processes of a simulation.

    Args:
        kernel: the clock.
        dice: how long sweeps take and whether they work.
        calm_at: from when on they always do.
    """

    def __init__(self, kernel: Kernel, dice: Dice, calm_at: float) -> None:
        self._kernel = kernel
        self._dice = dice
        self._calm_at = calm_at
        self._pids = 100
        self.alive: dict[int, ToolProcess] = {}

    def start(self, run_id: str, attempt: int, areas: tuple[str, ...]) -> ToolProcess:
        """Start a process for an attempt."""
        self._pids += 1
        process = ToolProcess(self._pids, run_id, attempt, areas)
        self.alive[process.pid] = process
        return process

    def end(self, pid: int) -> None:
        """Let a process end; harmless when it has."""
        self.alive.pop(pid, None)

    def of(self, run_id: str) -> list[ToolProcess]:
        """Return the processes of a run that are still there."""
        return [process for process in self.alive.values() if process.run_id == run_id]

    def sweep(self, pid: int, done: Callable[[bool], None]) -> None:
        """End what a dead host has left; `done` is told whether it is proven gone."""

        def swept() -> None:
            calm = self._kernel.now >= self._calm_at
            gone = calm or not self._dice.chance(_SWEEP_FAILS, "sweep fails", pid)
            if gone:
                self.end(pid)
            done(gone)

        self._kernel.after(self._dice.between(0.01, 0.5, "sweep", pid), swept)
