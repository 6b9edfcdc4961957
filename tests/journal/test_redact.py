from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.core.errors import InvalidArgument
from remit.journal.redact import REDACTED, mask_text, preview, redact

SECRETS = [
    "sk-proj-abcDEF0123456789_xyz",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0123456789_abcdefghij",
    "glpat-0123456789abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefghij",
    "hf_abcdefghijklmnopqrstuvwx",
    "AIzaSyA0123456789abcdefghijklmnopqrstuvw",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=10)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=5),
    max_leaves=30,
)


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "secrets",
        "API_KEY",
        "x-api-key",
        "apikey",
        "accesstoken",
        "Authorization",
        "dbPassword",
        "PASSWD",
        "client_secret",
        "AWSSecretKey",
        "privateKey",
        "Set-Cookie",
        "session.token",
    ],
)
def test_values_under_telling_keys_go_whole(key: str) -> None:
    for value in ("x", 1234, ["x"], {"y": "x"}):
        assert redact({"a": [{key: value}]}) == {"a": [{key: REDACTED}]}
        assert preview({key: value}) == {key: REDACTED}


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "max_tokens": 4096,
        "tokens": 12,
        "token_count": 3,
        "total_tokens_used": 7,
        "has_token": True,
        "token": None,
        "author": "Ann",
        "monkey": "see",
        "path": "src/tokenizer.py",
        "": "x",
    }.items(),
)
def test_counts_and_innocent_keys_stay(key: str, value: object) -> None:
    assert redact({key: value}) == preview({key: value}) == {key: value}


def test_keys_can_be_chosen() -> None:
    assert redact({"pin": 1, "token": "t"}, keys={"pin"}) == {"pin": REDACTED, "token": "t"}


@pytest.mark.parametrize("secret", SECRETS)
@given(before=st.sampled_from(["", "see ", "x=", '"', "(", "\n"]), after=st.sampled_from(["", " ", '"', ", then", ")"]))
def test_what_looks_like_a_key_is_masked_wherever_it_stands(secret: str, before: str, after: str) -> None:
    text = f"{before}{secret}{after}"
    for shown in (mask_text(text), redact({"a": [text]}), preview([text]), redact({text: 1})):
        assert secret not in json.dumps(shown)
        assert REDACTED in json.dumps(shown)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer [redacted]"),
        ("curl -H 'authorization: basic dXNlcg=='", "curl -H 'authorization: basic [redacted]'"),
        ("password=hunter2, next", "password=[redacted], next"),
        ('{"password": "two words"}', '{"password": "[redacted]"}'),
        ('{\\"api_key\\": \\"abc\\"}', '{\\"api_key\\": \\"[redacted]\\"}'),
        ("DB_PASSWORD='a b' run", "DB_PASSWORD='[redacted]' run"),
        ("https://user:pass@host/x?token=abc&y=1", "https://[redacted]@host/x?token=[redacted]&y=1"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----!", "[redacted]!"),
        ("-----BEGIN PRIVATE KEY-----\nMII", "[redacted]"),
        ("the bearer of bad news, a basic understanding", "the bearer of bad news, a basic understanding"),
        ("used 512 tokens; tokens: 512; ask-me sk-1", "used 512 tokens; tokens: 512; ask-me sk-1"),
    ],
)
def test_secrets_in_running_text_are_masked_and_the_rest_stays(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


def test_the_value_of_a_telling_option_is_hidden_in_a_command_line() -> None:
    argv = ["tool", "--api-key", "abc", "--token=def", "--verbose", "src"]
    hidden = ["tool", "--api-key", REDACTED, f"--token={REDACTED}", "--verbose", "src"]
    assert redact(argv) == preview(argv) == hidden


@given(values)
def test_redaction_gives_what_json_can_keep_and_changes_nothing_twice(value: Any) -> None:
    once = redact(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert redact(once) == once


def test_cycles_and_depth_and_masses_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.journal.redact._MAX_VALUES", 1000)
    cycle: list[Any] = [1]
    cycle += [cycle, cycle]
    shared: list[Any] = ["x"]
    for _ in range(30):
        shared = [shared, shared]
    for value in (cycle, shared, list(range(1500)), {n: n for n in range(1500)}):
        assert "[cut]" in json.dumps(redact(value))
        assert len(json.dumps(preview(value), separators=(",", ":"))) <= 4096


class Odd:
    def __repr__(self) -> str:
        raise ValueError("no")


class Talkative:
    def __repr__(self) -> str:
        return "password='x1'" + "y" * 10_000


def test_values_that_json_lacks_are_told_by_their_repr_or_size() -> None:
    for value in (Odd(), Talkative(), {Odd(): Odd()}, 10**6000, -(10**6000), float("inf"), b"abc"):
        for shown in (redact(value), preview(value)):
            assert "x1" not in json.dumps(shown, allow_nan=False)
        assert len(json.dumps(preview(value))) <= 4096
    assert preview(b"abc") == "<3 bytes>"
    assert preview(Odd()) == "<Odd, whose repr raised ValueError>"


@given(values, st.integers(64, 400))
def test_a_preview_is_never_larger_than_asked(value: Any, max_bytes: int) -> None:
    shown = preview(value, max_bytes=max_bytes)
    assert len(json.dumps(shown, separators=(",", ":"), allow_nan=False)) <= max_bytes


@given(st.text(min_size=200, max_size=3000), st.integers(64, 150))
def test_a_preview_of_a_long_text_says_that_it_was_cut(text: str, max_bytes: int) -> None:
    shown = preview(text, max_bytes=max_bytes)
    assert shown.endswith(" characters]")
    assert len(json.dumps(shown)) <= max_bytes


def test_a_preview_says_how_much_was_left_out() -> None:
    assert preview(list(range(1000)), max_bytes=100)[-1].endswith(" more]")
    assert preview({str(n): n for n in range(1000)}, max_bytes=200)["[more]"] > 900
    assert preview({"a": "x" * 9000, "b": [1, 2]})["b"] == [1, 2]


def test_a_small_value_is_shown_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "text"], "b": {"c": {}, "d": []}}
    assert preview(value) == value


def test_a_secret_that_the_cut_goes_through_is_not_shown_by_half() -> None:
    for shift in range(0, 1200, 7):
        text = "a " * (shift // 2) + SECRETS[0] + " b" * 2000
        assert "sk-proj" not in preview(text, max_bytes=256)


def test_a_preview_needs_some_room() -> None:
    with pytest.raises(InvalidArgument):
        preview(1, max_bytes=63)
