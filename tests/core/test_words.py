"""Causes, outcomes, ids, limits, errors and events: values that travel and are kept."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from remit.core import errors, events
from remit.core.cause import STOPS_FOREGROUND, Cause, CauseKind
from remit.core.clock import SystemClock
from remit.core.ids import IdFactory
from remit.core.limits import Limits
from remit.core.outcome import Outcome

CAUSE = Cause(
    CauseKind.BUDGET,
    origin="turn_1",
    actor="ada",
    surface="cli",
    request_id="req_1",
    at_unix_ms=17,
    reason="enough",
)


def _all_errors(base: type[BaseException]) -> list[type[BaseException]]:
    found = [base]
    for sub in base.__subclasses__():
        found.extend(_all_errors(sub))
    return found


def _sample(cls: Any) -> Any:
    if issubclass(cls, errors.TurnCancelled):
        return cls(CAUSE, node_id="run_1")
    if issubclass(cls, errors.RunEnded):
        return cls("said", run_id="run_1", cause=CAUSE, partial={"a": 1}, error_type="ValueError", traceback="...")
    if issubclass(cls, errors.WaitCycle):
        return cls("said", cycle=("run_1", "run_2", "run_1"))
    return cls("said", where="here", number=7)


def _own_errors() -> list[type[BaseException]]:
    # Errors of other packages continue the tree; their own tests know how to make them.
    return [cls for cls in _all_errors(errors.RemitError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", [*_own_errors(), errors.TurnCancelled], ids=lambda c: c.__name__)
def test_every_error_survives_pickling_with_its_attributes(cls: type[BaseException]) -> None:
    error = _sample(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [cls.__dict__.get("code") for cls in _all_errors(errors.RemitError) if cls.__module__ == errors.__name__]
    assert None not in codes
    assert len(codes) == len(set(codes))


@pytest.mark.requirement("A21")
def test_one_cancelled_exception_unwinds_and_the_other_is_ordinary() -> None:
    assert not issubclass(errors.TurnCancelled, Exception)
    assert issubclass(errors.RunCancelled, Exception)
    assert not issubclass(errors.RunCancelled, errors.TurnCancelled)


def test_a_cancelled_turn_says_who_and_why_wherever_it_is_shown() -> None:
    error = errors.TurnCancelled(Cause(CauseKind.DEADLINE, origin="run_1"), node_id="run_2")
    again = pickle.loads(pickle.dumps(error))
    assert str(error) == error.message == str(again) == "run_2 was cancelled: deadline"
    assert repr(again) == "TurnCancelled('run_2 was cancelled: deadline')"
    assert str(errors.TurnCancelled()) == "this turn was cancelled"


def test_a_cause_survives_json_and_pickling() -> None:
    assert Cause.from_dict(CAUSE.to_dict()) == CAUSE
    assert pickle.loads(pickle.dumps(CAUSE)) == CAUSE


def test_only_a_move_and_an_attempt_timeout_spare_foreground_processes() -> None:
    spared = set(CauseKind) - STOPS_FOREGROUND
    assert spared == {CauseKind.ATTEMPT_TIMEOUT, CauseKind.WORKER_MOVED}
    assert CAUSE.stops_foreground


def test_ids_sort_by_the_time_they_were_made() -> None:
    now = 1_700_000_000_000
    clock = iter(range(now, now + 1000))
    ids = IdFactory(lambda: next(clock), random.Random(1).getrandbits)
    made = [ids.run() for _ in range(500)]
    assert made == sorted(made)
    assert len(set(made)) == 500
    assert all(text.startswith("run_") and text.isascii() for text in made)


def test_two_factories_do_not_agree_although_user_code_seeds_random() -> None:
    random.seed(1)
    first = IdFactory(lambda: 1).run()
    random.seed(1)
    assert IdFactory(lambda: 1).run() != first


@pytest.mark.parametrize("name", [name for name in Limits.__slots__ if name != "cost"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_a_limit_that_can_never_work_is_refused(name: str, value: object) -> None:
    make: Any = Limits
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), float("inf"), True, "3"])
def test_a_budget_that_can_never_work_is_refused(value: object) -> None:
    make: Any = Limits
    with pytest.raises(ValueError, match="cost"):
        make(cost=value)
    assert make(cost=0.5).cost == 0.5


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)


def _events() -> list[events.Event]:
    def common(node: str) -> dict[str, Any]:
        return {"node_id": node, "turn_id": "turn_1", "at": 1.5}

    return [
        events.RunAccepted(**common("run_1"), parent_id="turn_1", agent="a", after=("run_0",), deadline_at=9.0),
        events.RunEnded(**common("run_1"), outcome=Outcome.TIMED_OUT, cause=CAUSE, unconfirmed=True),
        events.RunEnded(**common("run_1")),
        events.CancelRequested(**common("turn_1"), cause=CAUSE, request_id="req_1", live=3),
        events.TurnStarted(**common("turn_1")),
        events.RunWaiting(**common("run_1"), on=("run_2", "run_3")),
    ]


@pytest.mark.parametrize("event", _events(), ids=lambda e: e.kind)
def test_an_event_is_the_same_after_the_journal(event: events.Event) -> None:
    data = events.encode_event(event)
    assert events.decode_event(event.kind, event.node_id, event.turn_id, data) == event


def test_an_event_of_a_newer_version_is_refused() -> None:
    with pytest.raises(errors.JournalError, match="run_teleported"):
        events.decode_event("run_teleported", "run_1", "turn_1", {"at": 1.0})


def test_the_kinds_of_events_are_unique() -> None:
    found: list[Any] = [getattr(events, name) for name in events.__all__]
    kinds = [vars(cls)["kind"] for cls in found if isinstance(cls, type) and cls is not events.Event]
    assert len(kinds) > 20
    assert len(set(kinds)) == len(kinds)
