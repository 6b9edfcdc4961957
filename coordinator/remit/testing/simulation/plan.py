"""What a seed means: who does what and when, what breaks, how bad the network is.

A plan is plain data. Running it again gives the same history; leaving something out
gives a smaller one that is just as good (see `shrink`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import cast

from remit.core.cause import CauseKind
from remit.testing.simulation.kernel import Weather

__all__ = ["AnswerPlan", "CancelPlan", "FaultPlan", "Plan", "RunPlan", "Step", "TurnPlan", "all_runs", "as_code"]

STORM_S = 20.0
"""Seconds in which cancels and faults happen; afterwards all is calm."""

ENDLESS_S = 1e9
"""Work of this length never ends by itself."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a body does.

    `work` (seconds), `delegate` (runs), `wait` (for all children), `gather` (the same, the first
    failure cancels the others), `claim` (areas, held until `release` or the end), `release`,
    `partial`, `process` (seconds), `stop_child`, `approve` (seconds until it expires, 0 for never),
    `spend` (amount).
    """

    verb: str
    seconds: float = 0.0
    runs: tuple[RunPlan, ...] = ()
    areas: tuple[str, ...] = ()
    """`w:a/b` writes, `r:a` reads."""
    amount: int = 0
    """Tokens."""


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
    tokens: int | None = None
    """Its budget."""


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
    on_failure: str = "continue"
    tokens: int | None = None
    """Its budget."""
    session_tokens: int | None = None
    """The budget that it gives its session."""
    policy: str = ""
    """What a rule of its says to every request for approval; the empty text for no rule."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """An answer to a request for approval that is open at that time, or was."""

    at: float
    pick: float
    approve: bool = True
    client: int = 0
    late: bool = False
    """It is meant for one that has its answer, if there is such a thing."""


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

    `coordinator` (crashes, is back after seconds; below a pick of 0.6 with its next orders, below 0.3
    with its next orders to stop), `late` (the same, but these orders have left and arrive in the next life),
    `host` (one dies), `zombie` (one is taken for dead and acts on for seconds), `client` (is silent
    for good), `partition` (a client is cut off for seconds), `disk` (the next write fails, and every
    one for seconds), `close` (the coordinator is closed properly and started again), `drain` (a node
    of the cluster takes no work for seconds).
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
    """Whether hosts outlive their coordinator: then the next one asks them what they have."""
    silence: float = 0.0
    """Probability that such a host does not answer."""
    spool_loss: float = 0.0
    """Probability that what it takes to begin a run does not outlive a coordinator."""
    keep_turns: int = 200
    """Ended turns that the coordinator keeps in memory."""
    answers: tuple[AnswerPlan, ...] = ()

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
