"""What leaves the lock table survives a journal, a snapshot and a pickle."""

from __future__ import annotations

import json
import pickle

import pytest

from remit.core.errors import InvalidArgument, RemitError
from remit.core.errors import Refused as CoreRefused
from remit.locks import (
    Area,
    AreaKind,
    ClaimBusy,
    ClaimQuotaExceeded,
    ClaimRefused,
    ClaimRequest,
    ClaimTimeout,
    ClaimWithdrawn,
    DeadlockDetected,
    Forgotten,
    Granted,
    InvalidClaim,
    LeaseNotHeld,
    LockEvent,
    LockTable,
    Mode,
    OutsideWorkspace,
    PathNotClaimed,
    Quarantined,
    Queued,
    Refused,
    Released,
    WaitEdge,
    WaitKind,
    Withdrawn,
    WithdrawReason,
    event_from_dict,
    event_to_dict,
)

AREAS = (Area(Mode.WRITE, "a"), Area(Mode.READ, "docs/*.md", AreaKind.GLOB, "DOCS/*.md"))
REQUEST = ClaimRequest("claim_1", "run_1", AREAS, ("run_0", "turn_0"), 12.5, wait=False)
CYCLE = (
    WaitEdge("run_1", "run_2", WaitKind.CLAIM, "write a"),
    WaitEdge("run_2", "run_1", WaitKind.RUN),
)
EVENTS: list[LockEvent] = [
    Queued(7, REQUEST, (1, 2), (3,), ("turn_0",)),
    Granted(8, 7, "claim_1", "run_1", 13.0),
    Granted(9, 9, "claim_1", "run_1", 12.5, REQUEST, (3,)),
    Released(10, 7, "claim_1", "run_1", 14.0),
    Withdrawn(11, 0, "claim_2", "run_1", 14.0, WithdrawReason.TIMEOUT),
    Quarantined(12, 9, "claim_1", "run_1", 15.0, "host unreachable"),
    Forgotten(13, "run_1"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_survives_json(event: LockEvent) -> None:
    again = event_from_dict(json.loads(json.dumps(event_to_dict(event))))
    assert again == event
    assert type(again) is type(event)


def test_event_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError):
        event_from_dict({"event": "stolen", "seq": 1})


@pytest.mark.parametrize("edge", CYCLE)
def test_wait_survives_json(edge: WaitEdge) -> None:
    assert WaitEdge.from_dict(json.loads(json.dumps(edge.to_dict()))) == edge


def test_waits_are_told_in_words() -> None:
    edge = WaitEdge("turn_0", "run_1", WaitKind.CHILD)
    assert edge.describe() == "turn_0 waits for its child run_1"


@pytest.mark.parametrize(
    "error",
    [
        InvalidClaim("bad"),
        OutsideWorkspace("out"),
        ClaimRefused("no", claim_id="claim_1"),
        ClaimBusy("busy", claim_id="claim_1"),
        ClaimQuotaExceeded("many", claim_id="claim_1"),
        ClaimWithdrawn("late", claim_id="claim_1"),
        DeadlockDetected.from_cycle(CYCLE, claim_id="claim_1"),
        LeaseNotHeld("over", claim_id="claim_1"),
        PathNotClaimed("elsewhere", claim_id="claim_1"),
        ClaimTimeout("slow", claim_id="claim_1", waited_s=2.0, held_by=["run_2"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_survives_a_pickle_with_all_it_knows(error: RemitError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_errors_have_codes_of_their_own_and_known_bases() -> None:
    kinds: list[type[RemitError]] = [
        InvalidClaim,
        OutsideWorkspace,
        ClaimRefused,
        ClaimBusy,
        ClaimQuotaExceeded,
        ClaimWithdrawn,
        DeadlockDetected,
        LeaseNotHeld,
        PathNotClaimed,
        ClaimTimeout,
    ]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert issubclass(OutsideWorkspace, InvalidArgument)
    assert issubclass(DeadlockDetected, CoreRefused)
    assert not issubclass(ClaimTimeout, CoreRefused)


def test_journal_that_breaks_off_after_a_release_is_made_whole() -> None:
    table = LockTable()
    held = table.request(ClaimRequest("claim_1", "a", AREAS[:1]))
    waiting = table.request(ClaimRequest("claim_2", "b", AREAS[:1]))
    assert isinstance(held, Granted)
    assert isinstance(waiting, Queued)
    released, _ = table.release("claim_1", "a", at=1.0)
    folded = LockTable()
    for event in (held, waiting, released):
        folded.apply(event)
    assert [event.claim_id for event in folded.grant_ready(at=2.0)] == ["claim_2"]


def test_tokens_go_on_growing_after_a_snapshot() -> None:
    table = LockTable()
    first = table.request(ClaimRequest("claim_1", "a", AREAS[:1]))
    table.end(["a"], at=1.0)
    again = LockTable.from_dict(json.loads(json.dumps(table.to_dict())))
    second = again.request(ClaimRequest("claim_2", "b", AREAS[:1]))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.token > first.token


def test_fold_finds_the_same_waits_when_a_grant_follows_a_departure() -> None:
    # The claim that lost its place in line is looked up before the grant, not after.
    table, events = LockTable(), list[LockEvent]()

    def ask(number: int, owner: str, *keys: str) -> None:
        areas = tuple(Area(Mode.WRITE, key) for key in keys)
        answer = table.request(ClaimRequest(f"claim_{number}", owner, areas))
        assert not isinstance(answer, Refused)
        events.append(answer)

    ask(1, "a", "x")
    ask(2, "b", "x")
    ask(3, "c", "x", "z")
    ask(4, "d", "x", "z")
    events.extend(table.withdraw("claim_3", "c", at=1.0))
    ask(5, "a", "z")
    folded = LockTable()
    for event in events:
        folded.apply(event)
    assert folded.to_dict() == table.to_dict()
