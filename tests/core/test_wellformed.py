"""Messages and numbers are held against their types before anything is decided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remit.core import messages, wellformed
from remit.core.cause import CauseKind
from remit.core.errors import InvalidArgument
from remit.core.limits import Limits
from remit.core.messages import CancelRequest, DelegateRequest, OpenTurn, ReportBatch, ReportEnded, RunRequest
from remit.core.wellformed import MAX_SECONDS, check_message, check_number, shown

INF, NAN = float("inf"), float("nan")


def turn(**options: object) -> OpenTurn:
    return OpenTurn("turn_1", "client_1", "s", **options)  # type: ignore[arg-type]


def run(**options: object) -> DelegateRequest:
    made = RunRequest("run_1", "key", "agent", **options)  # type: ignore[arg-type]
    return DelegateRequest("turn_1", 0, "client_1", "env", b"", {"key": b""}, (made,))


@pytest.mark.parametrize(
    "message",
    [
        turn(deadline_s=INF),
        turn(deadline_s=NAN),
        turn(deadline_s="60"),
        turn(deadline_s=True),
        turn(deadline_s=10**400),
        turn(limits=5),
        turn(limits={"max_depth": 1}),
        turn(name=None),
        turn(approvals=({1: "x"},)),
        run(after="run_0"),
        run(after=("run_0", 7)),
        run(after=["run_0"]),
        run(retries=1.5),
        run(retries=True),
        run(arguments="text"),
        run(wishes=(("write", "a"),)),
        run(wishes=(("write", "a", 1),)),
        CancelRequest("req_1", "turn_1", kind="user_interrupt"),  # type: ignore[arg-type]
        CancelRequest("req_1", "turn_1", grace_s=NAN),
        ReportBatch("host_1", 1, (ReportEnded("run_1", "1", "returned"),)),  # type: ignore[arg-type]
        ReportBatch("host_1", 1, (object(),)),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_of_its_type_is_refused(message: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^\w+ must be .*, not .*"):
        check_message(message)


@pytest.mark.parametrize(
    "message",
    [
        turn(deadline_s=60, grace_s=0, limits=Limits(max_depth=2), approvals=({"action": "*"},)),
        run(after=("run_0",), deadline_s=0.5, retries=2, wishes=(("write", "a", False),), claims=({"path": "a"},)),
        CancelRequest("req_1", "turn_1", also=("run_1",), kind=CauseKind.BUDGET, grace_s=1),
        ReportBatch("host_1", 1, (ReportEnded("run_1", 1, "returned", payload=b"x"),)),
        None,
        ("client_1", 3, 2.0),
        "run_1",
    ],
)
def test_what_is_of_its_type_passes(message: object) -> None:
    check_message(message)


def test_every_message_has_types_that_can_be_checked() -> None:
    kinds = [getattr(messages, name) for name in messages.__all__]
    classes = [kind for kind in kinds if isinstance(kind, type)]
    assert len(classes) > 30
    for kind in classes:
        assert wellformed._fields(kind), kind


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: check_number("x_s", -1), "x_s must be a number, not negative and at most 1e+09, not -1"),
        (lambda: check_number("x_s", 0, above_zero=True), "x_s must be a number, more than 0 and at most 1e+09"),
        (
            lambda: check_number("n", 1.0, whole=True),
            "n must be a whole number, not negative and at most",
        ),
        (lambda: check_number("n", NAN, negative=True), "n must be a number and at most 1e+09, not nan"),
        (lambda: check_number("n", "3", negative=True), "n must be a number and at most 1e+09, not '3'"),
        (
            lambda: check_number("x_s", MAX_SECONDS * 2),
            "x_s must be a number, not negative and at most 1e+09",
        ),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(check: Callable[[], None], text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check()
    assert str(raised.value).startswith(text)


def test_numbers_in_range_and_none_at_all_pass() -> None:
    for value in (None, 0, 0.5, 10, MAX_SECONDS):
        check_number("x_s", value)
    check_number("x_s", -5.0, negative=True)
    check_number("n", 3, whole=True, above_zero=True)


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [("short", "'short'"), ("x" * 100, "'" + "x" * 76 + "..."), (Broken(), "a Broken"), (10**5000, "a int")],
    ids=["short", "long", "broken", "digits"],
)
def test_a_value_is_shown_short_whatever_it_is(value: object, text: str) -> None:
    assert shown(value) == text
