import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.core.errors import InvalidArgument
from remit.processes.output import Captured, follow, open_output, read_capture


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_small_output_is_shown_whole(tmp_path: Path) -> None:
    captured = read_capture(_write(tmp_path / "out", "grüße\n".encode()))
    assert captured.text == str(captured) == "grüße\n"
    assert (captured.total_bytes, captured.omitted_bytes, captured.truncated) == (8, 0, False)


def test_a_missing_file_reads_as_empty(tmp_path: Path) -> None:
    captured = read_capture(tmp_path / "none")
    assert captured == Captured(text="", total_bytes=0, omitted_bytes=0, path=tmp_path / "none")


@pytest.mark.requirement("C35")
def test_a_large_output_shows_head_and_tail_and_says_what_lies_between(tmp_path: Path) -> None:
    lines = b"".join(b"line %06d\n" % number for number in range(10_000))
    captured = read_capture(_write(tmp_path / "out", lines))
    assert captured.total_bytes == len(lines)
    assert captured.truncated
    assert captured.retained_bytes == len(lines) - captured.omitted_bytes
    assert captured.text.startswith("line 000000\n")
    assert captured.text.endswith("line 009999\n")
    assert f"\n[... {captured.omitted_bytes} of {len(lines)} bytes left out ...]\n" in captured.text
    assert 32_000 < len(captured.text.encode()) <= 32_768


@pytest.mark.requirement("C35")
def test_a_long_line_is_cut_and_counted(tmp_path: Path) -> None:
    captured = read_capture(_write(tmp_path / "out", b"short\n" + b"x" * 1000 + b"\nlast\n"), max_line_bytes=100)
    assert captured.text == f"short\n{'x' * 100} [... 900 bytes of this line left out]\nlast\n"
    assert captured.omitted_bytes == 900
    assert not read_capture(tmp_path / "out", max_line_bytes=None).truncated


def test_cuts_fall_between_characters_wherever_they_land(tmp_path: Path) -> None:
    for shift in range(4):
        data = b"a" * shift + "𝄞é€".encode() * 200
        text = read_capture(_write(tmp_path / "out", data), head_bytes=100, tail_bytes=200).text
        assert "\N{REPLACEMENT CHARACTER}" not in text
        assert set(text.split("[")[0].strip()) <= set("a𝄞é€")


def test_only_bytes_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    captured = read_capture(_write(tmp_path / "out", b"ok \xff\xfe " + "é".encode() + b" \xe2\x82"))
    assert captured.text == "ok �� é �"
    assert captured.total_bytes == 11


@settings(max_examples=50)
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)), max_size=40).map(b"".join),
    st.integers(0, 300),
    st.integers(128, 400),
)
def test_any_output_becomes_valid_text_within_its_limits(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, head_bytes: int, tail_bytes: int
) -> None:
    path = _write(tmp_path_factory.getbasetemp() / "any_output", data)
    captured = read_capture(path, head_bytes=head_bytes, tail_bytes=tail_bytes, max_line_bytes=None)
    assert len(captured.text.encode()) <= head_bytes + tail_bytes
    assert captured.total_bytes == len(data)
    assert 0 <= captured.omitted_bytes <= len(data)
    if not captured.truncated:
        assert captured.text == data.decode("utf-8", "replace")


def test_an_output_of_bad_bytes_alone_stays_within_the_limit(tmp_path: Path) -> None:
    captured = read_capture(_write(tmp_path / "out", b"\xff" * 32_768))
    assert len(captured.text.encode()) <= 32_768
    assert captured.truncated


def test_an_output_may_begin_inside_the_file(tmp_path: Path) -> None:
    captured = read_capture(_write(tmp_path / "out", b"older\nnewer\n"), offset=6)
    assert (captured.text, captured.total_bytes) == ("newer\n", 6)


@pytest.mark.parametrize("sizes", [{"head_bytes": -1}, {"tail_bytes": 10}, {"max_line_bytes": 0}, {"offset": -1}])
def test_sizes_out_of_range_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        read_capture(tmp_path / "out", **sizes)


def test_output_files_are_private_appended_to_and_no_links(tmp_path: Path) -> None:
    _write(tmp_path / "out", b"before ")
    for name in ("out", "new"):
        descriptor = open_output(tmp_path / name)
        os.write(descriptor, b"after")
        os.close(descriptor)
    assert (tmp_path / "out").read_bytes() == b"before after"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(OSError, match="link"):
        open_output(tmp_path / "link")


def _script(*steps: Callable[[], object]) -> tuple[Callable[[], bool], Callable[[], object]]:
    """Return `stopped` and `poll` for a writer that does one step at each poll, then stops."""
    left = list(steps)

    def poll() -> None:
        left.pop(0)()

    return lambda: not left, poll


def test_follow_waits_for_the_file_and_yields_what_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "out"
    stopped, poll = _script(
        lambda: None,  # not there yet
        lambda: path.write_bytes(b"one "),
        lambda: None,  # nothing new
        lambda: path.write_bytes(b"one two "),
    )
    assert list(follow(path, stopped=stopped, poll=poll)) == ["one ", "two "]


def test_follow_reads_what_was_written_just_before_the_stop(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", b"a")
    stopped, poll = _script(lambda: path.write_bytes(b"ab"))
    assert list(follow(path, stopped=stopped, poll=poll)) == ["a", "b"]


def test_follow_never_splits_a_character(tmp_path: Path) -> None:
    path = tmp_path / "out"
    data = "é€𝄞".encode()
    steps = [lambda end=end: path.write_bytes(data[:end]) for end in range(1, len(data) + 1)]
    stopped, poll = _script(*steps)
    assert list(follow(path, stopped=stopped, poll=poll)) == ["é", "€", "𝄞"]


def test_follow_shows_a_character_that_never_got_whole_as_replaced(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", b"a\xe2\x82")
    assert "".join(follow(path, stopped=lambda: True)) == "a�"


def test_follow_yields_large_output_in_pieces(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", b"x" * 200_000)
    pieces = list(follow(path, stopped=lambda: True, offset=1))
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == 199_999
