"""Texts of others: whatever they hold, an end can be told and shown."""

from __future__ import annotations

import pytest

from remit.core.texts import clean_text, error_text, error_trace, one_line


class Mute(Exception):
    """Raises when it is asked what it says."""

    def __str__(self) -> str:
        raise SystemExit("not even this ends the host")


class Odd(Exception):
    """Says something that is no text."""

    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "no"),
        (ValueError("x" * 5000), "x" * 4096),
        (ValueError("caf\u00e9"), "caf\u00e9"),
        (OSError("cannot read 'a\udcff'"), "cannot read 'a\\udcff'"),
        (Mute(), "<Mute, whose text raised SystemExit>"),
        (Odd(), "<Odd, whose text raised TypeError>"),
    ],
)
def test_an_exception_says_something_whatever_it_is(error: BaseException, text: str) -> None:
    assert error_text(error) == text


@pytest.mark.parametrize("error", [ValueError("a\udcff"), Mute(), Odd(), ExceptionGroup("several", [Mute()])])
def test_a_traceback_can_always_be_written_down(error: BaseException) -> None:
    trace = error_trace(error, 10_000)
    assert type(error).__name__ in trace
    trace.encode()
    assert len(error_trace(error, 10)) <= 10 or trace.startswith("<the traceback")


def test_a_text_keeps_what_can_be_encoded() -> None:
    assert clean_text("na\u00efve \U0001f600") == "na\u00efve \U0001f600"
    assert clean_text("a\ud800b") == "a\\ud800b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, caf\u00e9, \u00a0, \U0001f600", "plain, caf\u00e9, \u00a0, \U0001f600"),
        ("two\nlines\t", "two\\nlines\\t"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b31m\x85", "\\x9b31m\\x85"),
        ("abc\u202etxt.exe", "abc\\u202etxt.exe"),
        ("a\udcff", "a\\udcff"),
    ],
)
def test_one_line_breaks_no_line_and_commands_no_terminal(text: str, shown: str) -> None:
    assert one_line(text) == shown
