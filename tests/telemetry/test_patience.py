"""Spans wait for a cancel to become quiet, and not for long."""

from __future__ import annotations

from typing import Any

from remit.core import Cause, CauseKind, Outcome
from remit.core.events import CancelQuiet, CancelRequested, Event, TurnAccepted, TurnEnded
from remit.telemetry.patience import Patience
from remit.telemetry.recorder import Recorder
from remit.testing import wait_until
from tests.telemetry.world import Kept

CAUSE = Cause(CauseKind.USER_INTERRUPT, "turn_1", request_id="req_1")


def event(kind: type[Event], at: float = 1.0, **values: Any) -> tuple[Event, None]:
    return kind(node_id="turn_1", turn_id="turn_1", at=at, **values), None


def requested(request_id: str) -> tuple[Event, None]:
    return event(CancelRequested, request_id=request_id, cause=CAUSE)


def quiet(request_id: str) -> tuple[Event, None]:
    return event(CancelQuiet, request_id=request_id)


def test_they_wait_until_every_cancel_is_quiet() -> None:
    patience = Patience(2.0)
    patience.look([event(TurnAccepted)], 10.0)
    assert patience.left_s(10.0) == 0
    patience.look([event(TurnAccepted), requested("req_1")], 10.0)
    patience.look([requested("req_2")], 11.0)
    assert patience.left_s(11.0) == 2.0
    patience.look([quiet("req_2")], 11.5)
    assert patience.left_s(11.5) == 0.5
    patience.look([quiet("req_1"), quiet("req_9")], 11.5)
    assert patience.left_s(11.5) == 0


def test_they_wait_for_a_bounded_time_and_nothing_is_kept_of_what_never_becomes_quiet() -> None:
    patience = Patience(2.0)
    for number in range(5):
        patience.look([requested(f"req_{number}")], 10.0 * number)
    assert patience.left_s(41.0) == 1.0
    assert patience.left_s(42.0) == 0
    patience.look([requested("req_9")], 50.0)
    assert len(patience._under_way) == 1  # pyright: ignore[reportPrivateUsage]


class Batches(Kept):
    """Remembers which records came together."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[list[str]] = []

    def export(self, batch: Any) -> None:
        super().export(batch)
        self.together.append([record.name for record in batch.logs])


def test_whoever_flushes_does_not_wait_for_the_cancel() -> None:
    kept = Batches()
    recorder = Recorder([kept], pause_s=600.0)
    recorder.events([event(TurnAccepted), requested("req_1")])
    assert recorder.flush(30.0)
    assert kept.together == [["remit.cancel.requested"]]
    recorder.close(30.0)


def test_spans_of_a_cancel_are_made_at_once_when_it_is_quiet() -> None:
    kept = Batches()
    recorder = Recorder([kept], pause_s=0.001)
    ended = event(TurnEnded, 2.0, outcome=Outcome.CANCELLED, cause=CAUSE)
    recorder.events([event(TurnAccepted), requested("req_1"), ended, quiet("req_1")])
    wait_until(lambda: bool(kept.together), timeout_s=30.0)
    assert kept.together == [["remit.cancel.requested", "remit.cancel.quiet"]]
    assert [span.name for span in kept.spans] == ["invoke_workflow turn", "cancel.request"]
    recorder.close(30.0)
