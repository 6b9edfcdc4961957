"""Who wins when an exit and a stop meet; with a tree made by hand, so that the order is ours."""

import signal
from pathlib import Path
from typing import Any

import pytest

from remit.core import Cause, CauseKind
from remit.processes.containment import switched
from remit.processes.jobs import RESULT_NAME, ExitStatus, JobOutcome, JobResult, JobSpec, StopCause, read_record
from remit.processes.keeping import Keeping
from remit.processes.table import ProcessIdentity

CAUSE = Cause(CauseKind.USER_INTERRUPT, origin="turn_1").to_dict()


class Tree:
    """One process; it ends when it is told to, by a test or by a signal."""

    def __init__(self, *, status_on_term: ExitStatus) -> None:
        self.status: ExitStatus | None = None
        self.denied: set[int] = set()
        self.is_empty = False
        self.has_ended = False
        self.ends_with = ExitStatus(exit_code=5)
        self.status_on_term = status_on_term
        self.sent: list[int] = []

    def has_root_exited(self) -> bool:
        return self.has_ended

    def look(self) -> frozenset[int]:
        if self.has_ended:
            self.status = self.ends_with
            self.is_empty = True
        return frozenset() if self.is_empty else frozenset({7})

    def everybody(self) -> frozenset[int]:
        return frozenset() if self.has_ended else frozenset({7})

    def send(self, *signums: int) -> None:
        self.sent += signums
        self.ends_with = self.status_on_term
        self.has_ended = True

    def kill(self, round_number: int) -> None:
        self.sent.append(signal.SIGKILL)
        self.ends_with = ExitStatus(signal=signal.SIGKILL)
        self.has_ended = True

    @property
    def remembered(self) -> tuple[ProcessIdentity, ...]:
        return ()

    def close(self) -> None:
        """Hold nothing."""


def keep(folder: Path, tree: Tree, told: list[str]) -> Keeping:
    def tell(word: str, fields: dict[str, Any]) -> None:
        # The file is there before anybody is told.
        assert word != "ended" or read_record(folder / RESULT_NAME, JobResult) is not None
        told.append(word)

    keeping = Keeping(
        JobSpec(job="proc_1", scope="s", argv=("true",), output_dir=str(folder)),
        env={},
        jobdir=folder,
        stdin=None,
        containment=switched("-cgroup"),
        keeper=ProcessIdentity(1, 1.0),
        epoch=0,
        reattach_grace_s=1.0,
        tell=tell,
        failpoint=lambda place: None,
    )
    keeping._reach = tree
    return keeping


def end(keeping: Keeping) -> JobResult:
    for _ in range(100):
        keeping.tick(child_ended=True)
        if keeping.is_done:
            assert keeping.result is not None
            return keeping.result
    raise AssertionError("the job has no end")


@pytest.mark.requirement("P4", "A10", "B17")
def test_an_exit_that_is_there_when_the_stop_begins_wins(tmp_path: Path) -> None:
    tree, told = Tree(status_on_term=ExitStatus()), list[str]()
    keeping = keep(tmp_path, tree, told)
    keeping.tick(child_ended=False)
    keeping.stop(StopCause.CANCELLED, CAUSE, grace_s=0.0)
    tree.has_ended = True
    result = end(keeping)
    assert (result.outcome, result.exit_code, result.cause) == (JobOutcome.EXITED, 5, None)
    assert (tree.sent, told) == ([], ["ended"])


@pytest.mark.requirement("P3", "P4", "B17", "E14")
def test_a_stop_that_comes_first_wins_whatever_the_program_then_says(tmp_path: Path) -> None:
    tree, told = Tree(status_on_term=ExitStatus(exit_code=0)), list[str]()
    keeping = keep(tmp_path, tree, told)
    keeping.stop(StopCause.CANCELLED, CAUSE, grace_s=2.0)
    keeping.stop(StopCause.TIMED_OUT, None, grace_s=2.0)
    result = end(keeping)
    assert (result.outcome, result.exit_code, result.cause) == (JobOutcome.CANCELLED, 0, CAUSE)
    assert (tree.sent, told) == ([signal.SIGTERM, signal.SIGCONT], ["ended"])


@pytest.mark.requirement("P3", "B16")
def test_a_time_limit_that_comes_first_is_no_cancel(tmp_path: Path) -> None:
    tree = Tree(status_on_term=ExitStatus(signal=signal.SIGTERM))
    keeping = keep(tmp_path, tree, [])
    keeping.stop(StopCause.TIMED_OUT, None, grace_s=2.0)
    keeping.stop(StopCause.CANCELLED, CAUSE, grace_s=0.0)
    result = end(keeping)
    assert (result.outcome, result.cause) == (JobOutcome.TIMED_OUT, None)


@pytest.mark.requirement("P5", "P6")
def test_a_stop_after_the_end_changes_and_signals_nothing(tmp_path: Path) -> None:
    tree, told = Tree(status_on_term=ExitStatus()), list[str]()
    keeping = keep(tmp_path, tree, told)
    tree.has_ended = True
    result = end(keeping)
    keeping.stop(StopCause.CANCELLED, CAUSE, grace_s=0.0)
    keeping.tick(child_ended=True)
    assert (keeping.result, tree.sent, told) == (result, [], ["ended"])
