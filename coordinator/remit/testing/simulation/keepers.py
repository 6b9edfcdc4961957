"""Tool processes and whoever ends them, as a model: they outlive their host until they are swept.

Keeps the rules of `remit.processes`: a program has a key, and whoever asks for the same
key of the same run while it lives gets that program; it is ended by the name of its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["MACHINE", "Keepers", "ToolProcess"]

MACHINE = "machine"
_SWEEP_FAILS = 0.1


@dataclass(slots=True)
class ToolProcess:
    """A foreground process that a body has started and that is still there."""

    pid: int
    run_id: str
    """The run, or the turn, that it belongs to."""
    key: str
    host_id: str
    """Where its body is; the empty text for a turn's."""
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
        self._sweeps = 0
        self.alive: dict[int, ToolProcess] = {}
        self.doubtful: set[str] = set()
        """Owners whose programs could not be ended when that was asked for last."""
        self.adopted = 0
        """Programs that a next attempt has found again by their keys."""

    def start(self, run_id: str, key: str, areas: tuple[str, ...], host_id: str = "") -> ToolProcess:
        """Start a process for an attempt, or find the one of that key that still runs."""
        for process in self.of(run_id):
            if process.key == key:
                self.adopted += 1
                process.host_id, process.areas = host_id, areas
                return process
        self._pids += 1
        process = ToolProcess(self._pids, run_id, key, host_id, areas)
        self.alive[process.pid] = process
        return process

    def end(self, pid: int) -> None:
        """Let a process end; harmless when it has."""
        self.alive.pop(pid, None)

    def end_all(self, owner: str) -> None:
        """End everything of a run or turn."""
        for process in self.of(owner):
            self.end(process.pid)

    def of(self, owner: str) -> list[ToolProcess]:
        """Return the processes of a run or turn that are still there."""
        return [process for process in self.alive.values() if process.run_id == owner]

    def sweep(self, owner: str, done: Callable[[bool], None]) -> None:
        """End what a dead host has left of an owner; `done` is told whether it is proven gone."""
        self._sweeps += 1
        number = self._sweeps

        def swept() -> None:
            calm = self._kernel.now >= self._calm_at
            gone = calm or not self._dice.chance(_SWEEP_FAILS, "sweep fails", owner, number)
            if gone:
                self.end_all(owner)
                self.doubtful.discard(owner)
            else:
                self.doubtful.add(owner)
            done(gone)

        self._kernel.after(self._dice.between(0.01, 0.5, "sweep", owner, number), swept)
