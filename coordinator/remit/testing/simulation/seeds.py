"""What a number means: the plan that a seed makes."""

from __future__ import annotations

import random
from dataclasses import replace

from remit.core.cause import CauseKind
from remit.testing.simulation.kernel import Weather
from remit.testing.simulation.plan import (
    ENDLESS_S,
    AnswerPlan,
    CancelPlan,
    FaultPlan,
    Plan,
    RunPlan,
    Step,
    TurnPlan,
)

__all__ = ["make_plan"]


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
        hosts_survive=chance.random() < 0.7,
        silence=chance.choice([0.0, 0.0, 0.0, 0.3]),
        spool_loss=chance.choice([0.0, 0.0, 0.3, 1.0]),
        keep_turns=chance.choice([0, 1, 200]),
        answers=tuple(_answer(chance, clients) for _ in range(chance.choice([0, 1, 2, 4]))),
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


def _answer(chance: random.Random, clients: int) -> AnswerPlan:
    return AnswerPlan(
        at=round(chance.uniform(0.2, 10.0), 3),
        pick=round(chance.random(), 3),
        approve=chance.random() < 0.6,
        client=chance.randrange(clients),
        late=chance.random() < 0.3,
    )


def _fault(chance: random.Random) -> FaultPlan:
    kinds = [
        *("coordinator", "coordinator", "coordinator", "host", "host", "zombie", "zombie"),
        *("client", "partition", "disk", "close", "drain", "drain", "late", "late"),
    ]
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
        on_failure=chance.choice(["continue", "continue", "stop"]),
        tokens=chance.choice([None, None, None, 10, 30]),
        session_tokens=chance.choice([None, None, None, None, 40]),
        policy=chance.choice(["", "", "", "approve", "ask", "deny"]),
    )


_AREAS = ["w:a", "r:a", "w:a/b", "r:a/c", "w:d", "w:"]
_VERBS = [
    *("delegate", "delegate", "work", "work", "wait", "gather"),
    *("claim", "release", "partial", "process", "process", "stop_child", "approve", "spend"),
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
            steps.append(Step(verb, seconds=chance.choice([0.0, 0.1, 0.5, 2.0, 6.0])))
        elif verb == "approve":
            steps.append(Step(verb, seconds=chance.choice([0.0, 1.0, 5.0])))
        elif verb == "spend":
            steps.append(Step(verb, amount=chance.choice([1, 5, 20])))
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
        tokens=chance.choice([None, None, None, 5, 20]),
    )
