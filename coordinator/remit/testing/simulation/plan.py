"""What a seed means: who does what and when, what breaks, how bad the network is.

A plan is plain data. Running it again gives the same history; leaving something out
gives a smaller one that is just as good (see `shrink`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import cast

from remit.core.cause import CauseKind
from remit.testing.simulation.kernel import Weather

__all__ = ["CancelPlan", "FaultPlan", "Plan", "RunPlan", "Step", "TurnPlan", "all_runs", "as_code", "make_plan"]

STORM_S = 20.0
"""Seconds in which cancels and faults happen; afterwards all is calm."""

ENDLESS_S = 1e9
"""Work of this length never ends by itself."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a body does.

    `work` (seconds), `delegate` (runs), `wait` (for all children), `gather` (the same, the first
    failure cancels the others), `claim` (areas, held until `release` or the end), `release`,
    `partial`, `process` (seconds), `stop_child`.
    """

    verb: str
    seconds: float = 0.0
    runs: tuple[RunPlan, ...] = ()
    areas: tuple[str, ...] = ()
    """`w:a/b` writes, `r:a` reads."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One delegated run and what its body does."""

    name: str
    """Place in the tree, `0.2.1`; the run's id is made of it."""
    steps: tuple[Step, ...] = ()
    ends: tuple[str, ...] = ("returned",)
    """How the first, second ... attempt ends: `returned`, `raised`, `stray`, `stale_host`."""
    unwind_s: float = 0.0
    """Seconds of clean-up when its signal is set."""
    deaf: bool = False
    """It does not listen to its signal."""
    pool: str = "shared"
    detached: bool = False
    deadline_s: float | None = None
    attempt_timeout_s: float | None = None
    retries: int = 0
    retry_delay_s: float = 0.0
    grace_s: float | None = None
    max_concurrent: int | None = None
    after: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn of a client."""

    name: str
    at: float
    client: int
    session: str
    steps: tuple[Step, ...] = ()
    end: str = "returned"
    busy: str = "queue"
    on_disconnect: str = "cancel"
    deadline_s: float | None = None
    grace_s: float = 3.0
    max_concurrent: int | None = None
    unwind_s: float = 0.0
    deaf: bool = False


@dataclass(frozen=True, slots=True)
class CancelPlan:
    """A cancel of whatever lives at that time."""

    at: float
    pick: float
    """Which live node, as a share of all of them, oldest first."""
    kind: CauseKind = CauseKind.USER_INTERRUPT
    kill: bool = False
    grace_s: float | None = None
    client: int = 0
    again: bool = False
    """It is meant for something that is being cancelled already, if there is such a thing."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Something that breaks.

    `coordinator` (crashes, is back after seconds), `host` (one dies), `zombie` (one is taken for
    dead and acts on for seconds), `client` (is silent for good), `partition` (a client is cut off for
    seconds), `disk` (the next write fails, and every one for seconds), `close` (the coordinator is
    closed properly and started again).
    """

    at: float
    kind: str
    pick: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a simulation does."""

    seed: int
    turns: tuple[TurnPlan, ...] = ()
    cancels: tuple[CancelPlan, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    weather: Weather = field(default_factory=Weather)
    clients: int = 1
    max_shared: int = 4
    max_dedicated: int = 2
    grow_at: int = 3
    spawn_failure: float = 0.0
    """Probability that a host does not start."""
    hosts_survive: bool = False
    """Whether hosts outlive their coordinator until the next one ends them."""

    @property
    def is_finite(self) -> bool:
        """Tell whether every body ends by itself."""
        steps = [step for turn in self.turns for step in turn.steps]
        steps += [step for run in all_runs(self) for step in run.steps]
        return all(step.seconds < ENDLESS_S for step in steps)


def all_runs(plan: Plan) -> Iterator[RunPlan]:
    """Yield every run that a plan could delegate."""
    waiting = [run for turn in plan.turns for step in turn.steps for run in step.runs]
    while waiting:
        run = waiting.pop()
        yield run
        waiting.extend(below for step in run.steps for below in step.runs)


def as_code(value: object) -> str:
    """Return a plan, or a part of one, as the Python expression that makes it; defaults are left out."""
    if isinstance(value, tuple):
        items = [as_code(item) for item in cast("tuple[object, ...]", value)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, CauseKind):
        return str(f"CauseKind.{value.name}")
    if not is_dataclass(value):
        return repr(value)
    given: list[str] = []
    for each in fields(value):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        found = getattr(value, each.name)
        if found != default:
            given.append(f"{each.name}={as_code(found)}")
    return f"{type(value).__name__}({', '.join(given)})"


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: any whole number.
    """
    chance = random.Random(seed)
    clients = chance.choice([1, 1, 2])
    turns = tuple(_turn(chance, index, clients) for index in range(chance.choice([1, 2, 2, 3])))
    return Plan(
        seed=seed,
        turns=turns,
        cancels=tuple(_cancel(chance, clients) for _ in range(chance.choice([0, 1, 1, 2, 4]))),
        faults=tuple(_fault(chance) for _ in range(chance.choice([0, 1, 1, 2, 3]))),
        weather=_weather(chance),
        clients=clients,
        max_shared=chance.choice([1, 2, 4, 16]),
        max_dedicated=chance.choice([1, 2]),
        grow_at=chance.choice([1, 3]),
        spawn_failure=chance.choice([0.0, 0.0, 0.0, 0.2]),
        hosts_survive=chance.random() < 0.3,
    )


def _weather(chance: random.Random) -> Weather:
    kind = chance.choice(["fine", "slow", "lossy", "bad"])
    if kind == "fine":
        return Weather()
    if kind == "slow":
        return Weather(slow=0.2, slow_s=2.0)
    if kind == "lossy":
        return Weather(loss=0.1, duplicate=0.1)
    return Weather(loss=0.1, duplicate=0.2, slow=0.2, slow_s=1.0)


def _cancel(chance: random.Random, clients: int) -> CancelPlan:
    return CancelPlan(
        at=round(chance.uniform(0.0, 10.0), 3),
        pick=round(chance.random(), 3),
        kind=chance.choice(list(CauseKind)),
        kill=chance.random() < 0.3,
        grace_s=chance.choice([None, None, 0.0, 0.5]),
        client=chance.randrange(clients),
        again=chance.random() < 0.3,
    )


def _fault(chance: random.Random) -> FaultPlan:
    kinds = ["coordinator", "coordinator", "host", "host", "zombie", "zombie", "client", "partition", "disk", "close"]
    return FaultPlan(
        at=round(chance.uniform(1.0, 10.0), 3),
        kind=chance.choice(kinds),
        pick=round(chance.random(), 3),
        seconds=chance.choice([0.0, 0.5, 3.0, 8.0, 8.0]),
    )


def _turn(chance: random.Random, index: int, clients: int) -> TurnPlan:
    name = str(index)
    return TurnPlan(
        name=name,
        at=round(chance.uniform(0.0, 4.0), 3),
        client=chance.randrange(clients),
        session=f"session {chance.randrange(2)}",
        steps=_steps(chance, name, depth=0),
        end=chance.choice(["returned", "returned", "returned", "raised"]),
        busy=chance.choice(["reject", "queue", "queue", "interrupt"]),
        on_disconnect=chance.choice(["cancel", "cancel", "continue"]),
        deadline_s=chance.choice([None, None, None, 2.0, 6.0]),
        grace_s=chance.choice([0.5, 3.0]),
        max_concurrent=chance.choice([None, None, None, 1, 2]),
        unwind_s=chance.choice([0.0, 0.0, 0.3, 8.0]),
        deaf=chance.random() < 0.1,
    )


_AREAS = ["w:a", "r:a", "w:a/b", "r:a/c", "w:d", "w:"]
_VERBS = [
    *("delegate", "delegate", "work", "work", "wait", "gather"),
    *("claim", "release", "partial", "process", "stop_child"),
]


def _steps(chance: random.Random, name: str, *, depth: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    delegated = 0
    for _ in range(chance.choice([1, 2, 3, 4]) + 2 * (depth == 0)):
        verb = chance.choice(_VERBS)
        if verb == "delegate" or (depth == 0 and not steps):
            # Deeper than the limit now and then, for the refusal.
            if depth >= 3 and chance.random() < 0.8:
                continue
            count = chance.choice([1, 1, 2, 3] if depth else [1, 2, 3, 5])
            names = [f"{name}.{delegated + i}" for i in range(count)]
            delegated += count
            steps.append(Step("delegate", runs=tuple(_run(chance, n, names, depth=depth + 1) for n in names)))
        elif verb == "claim":
            steps.append(Step("claim", areas=tuple(chance.sample(_AREAS, chance.choice([1, 1, 2])))))
        elif verb in ("work", "process"):
            steps.append(Step(verb, seconds=chance.choice([0.0, 0.1, 0.5, 2.0])))
        elif delegated or verb in ("release", "partial"):
            steps.append(Step(verb))
    if depth and chance.random() < 0.04:
        steps.append(Step("work", seconds=ENDLESS_S))
    return tuple(steps)


def _run(chance: random.Random, name: str, siblings: list[str], *, depth: int) -> RunPlan:
    ends = ["returned", "returned", "returned", "raised", "stray", "stale_host"]
    plan = RunPlan(
        name=name,
        steps=_steps(chance, name, depth=depth),
        ends=(chance.choice(ends), chance.choice(ends[:-1])),
        unwind_s=chance.choice([0.0, 0.0, 0.2, 1.0, 8.0]),
        deaf=chance.random() < 0.1,
    )
    earlier = siblings[: siblings.index(name)]
    if earlier and chance.random() < 0.2:
        plan = replace(plan, after=(chance.choice(earlier),))
    if chance.random() < 0.4:
        return plan
    return replace(
        plan,
        pool=chance.choice(["shared", "shared", "actor"]),
        detached=chance.random() < 0.2,
        deadline_s=chance.choice([None, None, 0.5, 3.0]),
        attempt_timeout_s=chance.choice([None, None, 0.5]),
        retries=chance.choice([0, 1, 1, 2]),
        retry_delay_s=chance.choice([0.0, 0.0, 1.0]),
        grace_s=chance.choice([None, 0.0, 0.5]),
        max_concurrent=chance.choice([None, None, 1]),
        claims=(chance.choice(_AREAS),) if chance.random() < 0.3 else (),
    )
