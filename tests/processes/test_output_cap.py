"""Output above its cap: the program goes on, head and tail stay, the disk is spared."""

import os
import sys
from pathlib import Path

import pytest

from remit.processes.capping import FAST_S, SLOW_S, CappedFile, OutputGuard, keep, punch
from remit.processes.jobs import JobOutcome
from remit.processes.output import read_capture
from tests.processes.world import World, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holes are punched on Linux alone")

CAP = 1024 * 1024


def kept_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.requirement("C35")
def test_a_hundred_megabytes_at_once_take_no_more_than_the_cap(world: World) -> None:
    count = 100_000_000
    job = world.sh(f"echo first; yes | head -c {count}; echo last", output_cap=CAP)
    result = job.result()
    assert (result.outcome, result.exit_code, result.truncated) == (JobOutcome.EXITED, 0, True)
    assert result.stdout_bytes == count + 11
    path = Path(job.spec.output_dir, "stdout")
    assert path.stat().st_size == count + 11
    assert kept_bytes(path) <= CAP + 131_072
    shown = read_capture(path)
    assert shown.truncated
    assert shown.text.startswith("first\ny\n")
    assert shown.text.endswith("y\nlast\n")


@pytest.mark.requirement("C35")
def test_where_nothing_can_be_given_back_the_program_is_stopped(world: World) -> None:
    job = world.sh("yes & wait", output_cap=CAP, containment="-holes", grace_s=0.0)
    result = job.result()
    assert (result.outcome, result.survivors) == (JobOutcome.OUTPUT_LIMIT, ())
    assert result.stdout_bytes > CAP
    assert marked(job) == []


def open_file(tmp_path: Path, *, before: int = 0) -> CappedFile:
    path = tmp_path / "stdout"
    path.write_bytes(b"p" * before)
    return CappedFile.open(path, cap=CAP)


@pytest.mark.parametrize("before", [0, 1, 70_000, 3 * CAP])
def test_head_and_tail_are_what_was_written_whatever_was_there_before(before: int, tmp_path: Path) -> None:
    file = open_file(tmp_path, before=before)
    written = b""
    try:
        for number in range(100):
            part = bytes([number]) * 100_000
            os.write(file.descriptor, part)
            written += part
            assert file.trim(punch)
        assert file.size() == len(written)
        data = (tmp_path / "stdout").read_bytes()[before:]
        assert data[: CAP // 2] == written[: CAP // 2]
        assert data[-(CAP // 4) :] == written[-(CAP // 4) :]
        assert kept_bytes(tmp_path / "stdout") <= before + CAP + 2 * 65_536 + 100_000
        assert (tmp_path / "stdout").read_bytes()[:before] == b"p" * before
    finally:
        os.close(file.descriptor)


def test_a_file_within_its_cap_is_left_alone(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    try:
        os.write(file.descriptor, b"x" * CAP)
        assert file.trim(keep)
        assert file.punched_to == 0
        os.write(file.descriptor, b"x" * 200_000)
        assert not file.trim(keep)
    finally:
        os.close(file.descriptor)


def test_a_file_that_its_program_cut_is_counted_anew(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    try:
        os.write(file.descriptor, b"x" * 3 * CAP)
        assert file.trim(punch)
        assert file.punched_to
        os.truncate(tmp_path / "stdout", 0)
        assert file.trim(punch)
        assert (file.size(), file.punched_to) == (0, 0)
    finally:
        os.close(file.descriptor)


def test_a_growing_file_is_looked_at_more_often(tmp_path: Path) -> None:
    files = (open_file(tmp_path), CappedFile.open(tmp_path / "stderr", cap=CAP))
    guard = OutputGuard(files)
    try:
        assert guard.look() == SLOW_S
        os.write(files[1].descriptor, b"x" * 100_000)
        assert guard.look() == FAST_S
        assert guard.look() == SLOW_S
        assert (guard.is_over, guard.is_truncated, guard.sizes()) == (False, False, (0, 100_000))
    finally:
        for file in files:
            os.close(file.descriptor)
