"""Asking what is there: at once, within a bound, and whatever the answer, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from remit.coordinator.state import HostState, Node, ProcessState, WorkspaceState
from remit.coordinator.survey import take_survey
from remit.core.errors import CoordinatorUnavailable
from remit.core.messages import HostInventory
from remit.testing.inprocess import InProcessEngine
from tests.agents.world import in_loop


class Hosts:
    """Hosts by what they do: answer, refuse, or never say anything."""

    def __init__(self, **manners: str) -> None:
        self.manners = manners
        self.asked: list[tuple[str, int]] = []
        self.given_up: list[str] = []
        self.told: dict[str, Callable[[str], None]] = {}

    async def find(self, host_id: str, on_gone: Callable[[str], None]) -> object:
        manner = self.manners.get(host_id)
        if manner is None:
            return None
        self.told[host_id] = on_gone
        hosts = self

        class Link:
            async def inventory(self, epoch: int) -> HostInventory:
                hosts.asked.append((host_id, epoch))
                if manner == "mute":
                    try:
                        await asyncio.Event().wait()
                    finally:
                        hosts.given_up.append(host_id)
                if manner == "refuses":
                    raise CoordinatorUnavailable("no")
                return HostInventory(host_id, 7, "here")

        return Link()


def state_with(*hosts: str) -> WorkspaceState:
    state = WorkspaceState()
    state.hosts = {name: HostState(name, ready=name != "young") for name in hosts}
    node = Node("run_1", "turn_1", "turn_1", 0.0)
    node.depth = 1
    node.processes = {77: ProcessState(77, 1.0, "here", "sleep")}
    state.nodes[node.id] = node
    return state


async def survey(hosts: Hosts, state: WorkspaceState, witness: object = None) -> tuple[object, Collection[str]]:
    engine: InProcessEngine = hosts  # type: ignore[assignment]
    found, links = await take_survey(
        state,
        engine,
        epoch=3,
        bound_s=0.05,
        startable=("run_1",),
        on_gone=lambda host_id: lambda reason: None,
        witness=witness,  # type: ignore[arg-type]
    )
    assert (set(found.hosts), found.silent, found.startable) == (
        {"good"},
        frozenset({"mute", "refuses"}),
        frozenset({"run_1"}),
    )
    assert found.coming == state.hosts.keys() & {"young"}
    return found.programs_gone, links.keys()


@in_loop
async def test_each_host_is_asked_once_and_the_mute_hold_nobody_up() -> None:
    hosts = Hosts(good="answers", mute="mute", refuses="refuses")
    gone, links = await survey(hosts, state_with("good", "mute", "refuses", "lost"))
    assert sorted(hosts.asked) == [("good", 3), ("mute", 3), ("refuses", 3)]
    assert (set(links), set(hosts.told), gone) == ({"good", "mute", "refuses"},) * 2 + ({},)


@in_loop
async def test_nobody_waits_for_a_host_that_has_not_come_up() -> None:
    hosts = Hosts(good="answers", mute="mute", refuses="refuses", young="mute")
    _, links = await survey(hosts, state_with("good", "mute", "refuses", "young"))
    assert "young" not in dict(hosts.asked)
    assert {"young"} < set(links) & set(hosts.told), "whoever begins this life hears of its death"


@in_loop
async def test_hosts_and_the_witness_are_asked_at_the_same_time() -> None:
    hosts = Hosts(good="answers", mute="mute", refuses="refuses")
    asked = asyncio.Event()

    async def saw(runs: Collection[Node]) -> Mapping[str, frozenset[int]]:
        if not hosts.given_up:
            asked.set()
        return {}

    await survey(hosts, state_with("good", "mute", "refuses"), saw)
    assert asked.is_set()


@in_loop
async def test_a_witness_is_asked_about_programs_and_its_silence_proves_nothing() -> None:
    hosts = Hosts(good="answers", mute="mute", refuses="refuses")
    state = state_with("good", "mute", "refuses")

    async def saw(runs: Collection[Node]) -> Mapping[str, frozenset[int]]:
        return {run.id: frozenset(run.processes or ()) for run in runs}

    async def mute(runs: Collection[Node]) -> Mapping[str, frozenset[int]]:
        await asyncio.Event().wait()
        raise AssertionError

    assert (await survey(hosts, state, saw))[0] == {"run_1": frozenset({77})}
    assert (await survey(hosts, state, mute))[0] == {}
