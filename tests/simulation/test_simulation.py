"""The simulator: what it proves of the decider, and that it would see a hole."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from remit.core.cause import CauseKind
from remit.testing.simulation import Simulation, Violation, make_plan
from remit.testing.simulation import plan as plans
from remit.testing.simulation.__main__ import main
from remit.testing.simulation.kernel import Weather
from remit.testing.simulation.plan import Plan, RunPlan, Step, TurnPlan, all_runs, as_code
from remit.testing.simulation.shrink import broken_rule, history_of, shrink
from tests.simulation import mutants
from tests.simulation.mutants import MUTANTS, SHOWN_FROM, SHY_MUTANTS, Mutant

SEEDS = 2_000
"""Seeds that hold, and within which each mutant is caught."""


def first_broken(seeds: range) -> tuple[int, Violation] | None:
    """Return the first seed that does not hold, and why."""
    for seed in seeds:
        violation = broken_rule(make_plan(seed))
        if violation is not None:
            return seed, violation
    return None


def _marks(mutant: Mutant) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if mutant in SHY_MUTANTS else []


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(2))
def test_fifty_histories_with_everything_breaking_hold(block: int) -> None:
    assert first_broken(range(block * 25, block * 25 + 25)) is None


@pytest.mark.requirement("B22")
@pytest.mark.requirement("D14")
@pytest.mark.requirement("D15")
@pytest.mark.requirement("F8")
@pytest.mark.requirement("F9")
@pytest.mark.requirement("F14")
@pytest.mark.field_report("A7")
@pytest.mark.field_report("B8")
@pytest.mark.field_report("J5")
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(8))
def test_two_thousand_histories_with_everything_breaking_hold(block: int) -> None:
    each = SEEDS // 8
    assert first_broken(range(block * each, block * each + each)) is None


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.__name__, marks=_marks(m)) for m in MUTANTS])
def test_a_hole_in_the_decider_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    begin = SHOWN_FROM.get(mutant, 0)
    assert (first_broken(range(begin, SEEDS)) or first_broken(range(begin))) is not None


def test_a_seed_means_one_history_whatever_the_process() -> None:
    code = "from remit.testing.simulation import make_plan\n"
    code += "from remit.testing.simulation.shrink import history_of\n"
    code += "print('\\n'.join(line for seed in (2, 7, 8) for line in history_of(make_plan(seed))))\n"
    here = [line for seed in (2, 7, 8) for line in history_of(make_plan(seed))]
    # Sets of texts have another order there.
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert there.stdout.splitlines() == here


def test_seeds_reach_what_they_are_meant_to_reach() -> None:
    missing = {
        "run_waiting",
        "run_resumed",
        "attempt_expired",
        "attempt_ended",
        "run_escalated",
        "kill_requested",
        "effect_uncertain",
        "delegation_refused",
        "coordinator_stopping",
        "turn_settling",
        "cancel_quiet",
        "outcome=lost",
        "outcome=timed_out",
        "cause=deadline",
        "cause=parent_lost",
        "queued",
        "withdrawn",
        "quarantined",
        "the journal failed",
        "taken for dead",
        "attempt_moved",
        "report=moved",
        "approves",
        "decision=approved",
        "decision=denied",
        "decision=expired",
        "decision=cancelled",
        "cause=budget",
        "spent",
        *(
            f"fault: {kind}"
            for kind in ("coordinator", "late", "host", "zombie", "client", "partition", "disk", "close", "drain")
        ),
    }
    for seed in range(SEEDS):
        text = "\n".join(history_of(make_plan(seed)))
        missing = {word for word in missing if word not in text}
        if not missing:
            return
    pytest.fail(f"no seed leads to {missing}")


def test_a_coordinator_has_several_lives() -> None:
    assert any(Simulation(make_plan(seed)).run().lives >= 3 for seed in range(SEEDS))


def test_a_failure_is_made_small_and_still_breaks_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.admission_open_below_a_cancel(monkeypatch)
    found = first_broken(range(SEEDS))
    assert found is not None
    seed, violation = found
    plan = make_plan(seed)
    small = shrink(plan, violation.rule, tries=60)
    again = broken_rule(small)
    assert again is not None
    assert again.rule == violation.rule
    assert len(list(all_runs(small))) < len(list(all_runs(plan)))
    assert len(small.faults) <= 1


def test_the_history_of_a_failure_ends_with_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.a_slot_not_freed(monkeypatch)
    lines = history_of(make_plan(0))
    assert lines[-1].startswith("violated: no slot is held by what is over")
    assert any("run_accepted" in line for line in lines)


def test_a_plan_made_by_hand_is_run_like_any_other() -> None:
    child = RunPlan("0.0", steps=(Step("work", seconds=1.0),), deadline_s=0.5)
    turn = TurnPlan("0", at=0.0, client=0, session="s", steps=(Step("delegate", runs=(child,)), Step("wait")))
    plan = Plan(seed=1, turns=(turn,))
    summary = Simulation(plan).run()
    assert (summary.runs, summary.cancels, summary.lives) == (1, 1, 1)
    assert any("outcome=timed_out" in line for line in history_of(plan))
    survived = Simulation(replace(plan, hosts_survive=True)).run()
    assert survived.runs == 1


def test_a_plan_can_be_written_down_and_made_again() -> None:
    names = {**vars(plans), "CauseKind": CauseKind, "Weather": Weather}
    for seed in range(20):
        plan = make_plan(seed)
        assert eval(as_code(plan), names) == plan


class TestCommandLine:
    def test_seeds_that_hold_are_counted(self) -> None:
        lines: list[str] = []
        assert main(["--seeds", "3", "--first", "5"], lines.append) == 0
        assert lines[-1].startswith("seeds 5 to 7 hold: ")

    def test_several_processes_give_the_same_answer(self) -> None:
        alone: list[str] = []
        together: list[str] = []
        assert main(["--seeds", "4"], alone.append) == 0
        assert main(["--seeds", "4", "--jobs", "2"], together.append) == 0
        assert alone[-1].rpartition(",")[0] == together[-1].rpartition(",")[0]

    def test_a_failure_names_its_seed_and_shows_a_small_history(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mutants.a_terminal_event_written_twice(monkeypatch)
        lines: list[str] = []
        assert main(["--seeds", "5"], lines.append) == 1
        text = "\n".join(lines)
        assert "seed 0 does not hold: one end" in text
        assert "violated: one end" in text
        assert "python -m remit.testing.simulation --first 0" in text

    def test_one_history_can_be_shown(self) -> None:
        lines: list[str] = []
        assert main(["--show", "--first", "3"], lines.append) == 0
        assert "coordinator_started" in "\n".join(lines)

    @pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--jobs", "0"]])
    def test_numbers_that_cannot_be_are_refused(self, arguments: list[str]) -> None:
        lines: list[str] = []
        assert main(arguments, lines.append) == 2
        assert lines
