"""A failing plan made small: leave things out for as long as the same rule is broken.

Source: delta debugging in its simplest form, one thing at a time, the largest first (Zeller and
Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from remit.testing.simulation.kernel import Weather
from remit.testing.simulation.plan import Plan, RunPlan, Step
from remit.testing.simulation.violation import Violation
from remit.testing.simulation.world import Simulation

__all__ = ["broken_rule", "history_of", "shrink"]

_T = TypeVar("_T")

_PLAIN_TURN: dict[str, Any] = {
    "deadline_s": None,
    "on_failure": "continue",
    "tokens": None,
    "session_tokens": None,
    "policy": "",
}


def broken_rule(plan: Plan) -> Violation | None:
    """Run a plan and return what does not hold, or None."""
    try:
        Simulation(plan).run()
    except Violation as violation:
        return violation
    return None


def history_of(plan: Plan) -> list[str]:
    """Run a plan and return its history as lines for people, what does not hold last."""
    lines: list[str] = []
    try:
        Simulation(plan, note=lambda at, line: lines.append(f"{at:9.3f} s  {line}")).run()
    except Violation as violation:
        lines.append(f"violated: {violation}")
    return lines


def shrink(plan: Plan, rule: str, *, tries: int = 400) -> Plan:
    """Return a smaller plan that breaks the same rule.

    Args:
        plan: one that breaks it.
        rule: name of the rule.
        tries: simulations at most; each takes some hundredths of a second.
    """
    left = tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(plan):
            if left <= 0:
                return plan
            left -= 1
            violation = broken_rule(candidate)
            if violation is not None and violation.rule == rule:
                plan, smaller = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with one thing less, the largest things first."""
    for index in range(len(plan.turns)):
        if len(plan.turns) > 1:
            yield replace(plan, turns=_without(plan.turns, index))
    for index in range(len(plan.faults)):
        yield replace(plan, faults=_without(plan.faults, index))
    for index in range(len(plan.cancels)):
        yield replace(plan, cancels=_without(plan.cancels, index))
    for index in range(len(plan.answers)):
        yield replace(plan, answers=_without(plan.answers, index))
    if plan.weather != Weather():
        yield replace(plan, weather=Weather())
    if plan.spawn_failure:
        yield replace(plan, spawn_failure=0.0)
    plain = Plan(plan.seed)
    for name in ("hosts_survive", "silence", "spool_loss", "keep_turns"):
        if getattr(plan, name) != getattr(plain, name):
            yield replace(plan, **{name: getattr(plain, name)})
    for index, turn in enumerate(plan.turns):
        for steps in _fewer(turn.steps):
            yield replace(plan, turns=_with(plan.turns, index, replace(turn, steps=steps)))
        for name, value in _PLAIN_TURN.items():
            if getattr(turn, name) != value:
                yield replace(plan, turns=_with(plan.turns, index, replace(turn, **{name: value})))


def _fewer(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield steps with one of them, or something in one of them, left out."""
    for index in range(len(steps)):
        yield _without(steps, index)
    for index, step in enumerate(steps):
        for run_index, run in enumerate(step.runs):
            if len(step.runs) > 1:
                yield _with(steps, index, replace(step, runs=_without(step.runs, run_index)))
            for plainer in _plainer(run):
                yield _with(steps, index, replace(step, runs=_with(step.runs, run_index, plainer)))


def _plainer(run: RunPlan) -> Iterator[RunPlan]:
    """Yield a run with less to it."""
    plain = RunPlan(run.name, run.steps, run.ends)
    if run != plain:
        yield plain
    for name in (
        *("retries", "attempt_timeout_s", "deadline_s", "claims", "after", "detached", "deaf", "unwind_s", "tokens"),
    ):
        if getattr(run, name) != getattr(plain, name):
            yield replace(run, **{name: getattr(plain, name)})
    for steps in _fewer(run.steps):
        yield replace(run, steps=steps)


def _without(items: tuple[_T, ...], index: int) -> tuple[_T, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])
