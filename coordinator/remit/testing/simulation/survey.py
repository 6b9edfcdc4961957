"""Asking what is really there, as a model of `remit.coordinator.survey`: all hosts at once, bounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from remit.coordinator.recovering import Survey
from remit.coordinator.state import WorkspaceState
from remit.core.messages import HostInventory
from remit.testing.simulation.dispatch import DispatchModel
from remit.testing.simulation.engine import EngineModel
from remit.testing.simulation.host import HostModel
from remit.testing.simulation.kernel import Dice, Kernel

__all__ = ["ASK_HOSTS_S", "Grounds", "take_survey"]

ASK_HOSTS_S = 2.0
"""Seconds that a host has to answer."""


class Grounds(Protocol):
    """Where the hosts are looked for."""

    kernel: Kernel
    dice: Dice
    silence: float
    """Probability that a host does not answer a coordinator that was begun again."""


class _Life(Protocol):
    """The life that asks."""

    state: WorkspaceState
    dispatch: DispatchModel
    is_over: bool

    def host_ready(self, host: HostModel) -> None:
        """A host answers that an earlier life has asked for."""
        ...


def take_survey(life: _Life, grounds: Grounds, engine: EngineModel, done: Callable[[Survey], None]) -> None:
    """Find the hosts of earlier lives and ask each what it has.

    Args:
        life: who asks; it is given the links.
        grounds: clock and chance.
        engine: where the hosts are.
        done: called once with what was found, within `ASK_HOSTS_S`.
    """
    inventories: dict[str, HostInventory] = {}
    asked: dict[str, HostModel] = {}
    coming: dict[str, HostModel] = {}
    epoch = life.dispatch.epoch
    for host_id, known in life.state.hosts.items():
        host = engine.find(host_id)
        if host is not None:
            (asked if known.ready or known.killed else coming)[host_id] = host
    is_done = False

    def finish() -> None:
        nonlocal is_done
        if is_done:
            return
        is_done = True
        life.dispatch.links.update(asked)
        done(
            Survey(
                hosts=dict(inventories),
                silent=frozenset(asked.keys() - inventories.keys()),
                coming=frozenset(coming),
                startable=frozenset(life.dispatch.briefed),
            )
        )
        for host in coming.values():
            due = max(grounds.kernel.now, host.up_at) + _delay(grounds, host.id, epoch, "there")
            grounds.kernel.at(due, partial(came_up, host))

    def came_up(host: HostModel) -> None:
        if not life.is_over and host.inventory(epoch) is not None:
            life.host_ready(host)

    def answer(host: HostModel) -> None:
        # What it says is what is there now; the answer takes a while to arrive.
        inventory = host.inventory(epoch)
        if inventory is not None:
            grounds.kernel.after(_delay(grounds, host.id, epoch, "back"), partial(arrived, inventory))

    def arrived(inventory: HostInventory) -> None:
        inventories[inventory.host_id] = inventory
        if len(inventories) == len(asked):
            finish()

    for host in asked.values():
        if not grounds.dice.chance(grounds.silence, "silent", host.id, epoch):
            due = max(grounds.kernel.now, host.up_at) + _delay(grounds, host.id, epoch, "there")
            grounds.kernel.at(due, partial(answer, host))
    if asked:
        grounds.kernel.after(ASK_HOSTS_S, finish)
    else:
        finish()


def _delay(grounds: Grounds, host_id: str, epoch: int, way: str) -> float:
    return grounds.dice.between(0.001, 0.1, "survey", way, host_id, epoch)
