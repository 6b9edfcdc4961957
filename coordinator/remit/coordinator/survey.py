"""Asking what is really there, before a life of the coordinator decides anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from remit.coordinator.engine import Engine, HostLink
from remit.coordinator.recovering import Survey
from remit.coordinator.state import HostState, Node, WorkspaceState
from remit.core.messages import HostInventory

__all__ = ["ProgramWitness", "take_survey"]

logger = logging.getLogger("remit.coordinator")


class ProgramWitness(Protocol):
    """Somebody outside of the hosts who knows what became of the programs of runs."""

    async def __call__(self, runs: Collection[Node]) -> Mapping[str, frozenset[int]]:
        """Return which programs are proven gone: run -> process ids.

        Args:
            runs: runs that have not ended and had programs.
        """
        ...


async def take_survey(
    state: WorkspaceState,
    engine: Engine,
    *,
    epoch: int,
    bound_s: float,
    startable: Collection[str],
    on_gone: Callable[[str], Callable[[str], None]],
    witness: ProgramWitness | None = None,
) -> tuple[Survey, dict[str, HostLink]]:
    """Find the hosts of the lives before and ask each what it has, all at once, and the witness meanwhile.

    Args:
        state: folded from the journal; nothing in it is changed.
        engine: where the hosts are.
        epoch: number of this life, which the hosts serve from their answer on.
        bound_s: seconds that a host has to answer.
        startable: runs whose agent and arguments are at hand.
        on_gone: makes, for a host id, what is called when that host dies.
        witness: who knows of programs; nobody by default.

    Returns:
        What was found, and the links to all hosts that are there.
    """
    links: dict[str, HostLink] = {}
    inventories: dict[str, HostInventory] = {}
    coming: set[str] = set()

    async def ask(host: HostState) -> None:
        link = await engine.find(host.id, on_gone(host.id))
        if link is None:
            return
        links[host.id] = link
        if not host.ready and not host.killed:
            # It has never been sent anything, and to come up takes it longer than to answer.
            coming.add(host.id)
            return
        try:
            inventories[host.id] = await asyncio.wait_for(link.inventory(epoch), bound_s)
        except Exception as error:  # any way a host can fail to answer: it is asked no more, and killed
            logger.warning("host %s does not say what it has: %r", host.id, error)

    hosts = asyncio.gather(*(ask(host) for host in state.hosts.values()))
    gone, _ = await asyncio.gather(_ask_witness(state, witness, bound_s), hosts)
    survey = Survey(
        hosts=inventories,
        silent=frozenset(links.keys() - inventories.keys() - coming),
        coming=frozenset(coming),
        startable=frozenset(startable),
        programs_gone=gone,
    )
    return survey, links


async def _ask_witness(
    state: WorkspaceState, witness: ProgramWitness | None, bound_s: float
) -> Mapping[str, frozenset[int]]:
    runs = [n for n in state.nodes.values() if (n.processes or n.old_processes) and not n.is_ended]
    if witness is None or not runs:
        return {}
    try:
        return await asyncio.wait_for(witness(runs), bound_s)
    except Exception as error:  # whatever keeps it from answering, nothing is proven then
        logger.warning("nobody says what became of programs: %r", error)
        return {}
