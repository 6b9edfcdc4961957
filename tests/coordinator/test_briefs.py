"""What is kept to begin runs: found again by the next life, gone with its runs, never in the way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from remit.coordinator import briefs
from remit.coordinator.briefs import Briefs, BriefSpool
from remit.core.messages import DelegateRequest, RunRequest


def delegation(*names: str, size: int = 10) -> DelegateRequest:
    runs = tuple(RunRequest(name, "key", "agent", arguments=name.encode() * size) for name in names)
    return DelegateRequest("turn_1", 0, "client_1", "env", b"environment", {"key": b"agent"}, runs)


def begin(folder: Path, epoch: int, *wanted: str) -> tuple[BriefSpool, list[str]]:
    spool, found = BriefSpool.open(folder, epoch, wanted)
    return spool, names(found)


def names(found: Iterable[Briefs]) -> list[str]:
    return [name for each in found for name in each.run_ids]


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_the_next_life_finds_what_it_wants_and_nothing_else(tmp_path: Path) -> None:
    spool, found = begin(tmp_path / "briefs", 1)
    assert found == []
    request = delegation("run_1", "run_2", "run_3")
    spool.keep(request, request.runs)
    other = delegation("run_4")
    spool.keep(other, other.runs)
    spool.close()
    for epoch in (2, 3):
        spool, kept = BriefSpool.open(tmp_path / "briefs", epoch, {"run_1", "run_3"})
        assert names(kept) == ["run_1", "run_3"]
        assert (kept[0].delegation.env, kept[0].delegation.runs[1].arguments) == (b"environment", b"run_3" * 10)
        spool.close()
    _, found = begin(tmp_path / "briefs", 4)
    assert (found, files(tmp_path / "briefs")) == ([], {})


def test_what_it_holds_is_the_owners_alone_and_goes_with_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "briefs"
    spool, _ = begin(folder, 1)
    request = delegation("run_1", "run_2")
    spool.keep(request, request.runs)
    (path,) = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    spool.drop("run_1")
    spool.drop("run_1")
    spool.drop("run_unknown")
    spool.tidy()
    assert path.stat().st_size > 0
    spool.drop("run_2")
    spool.tidy()
    assert path.stat().st_size == 0
    spool.keep(request, request.runs[:1])
    spool.close()
    spool, found = begin(folder, 2, "run_1", "run_2")
    assert found == ["run_1"]
    spool.close()


def test_segments_go_when_their_last_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(briefs, "_SEGMENT_BYTES", 1_000)
    folder = tmp_path / "briefs"
    spool, _ = begin(folder, 1)
    for number in range(6):
        request = delegation(f"run_{number}", size=200)
        spool.keep(request, request.runs)
    assert len(files(folder)) == 6
    for number in (0, 2, 4):
        spool.drop(f"run_{number}")
    assert len(files(folder)) == 3
    spool.drop("run_5")
    request = delegation("run_6", size=200)
    spool.keep(request, request.runs)
    assert len(files(folder)) == 3
    spool.close()


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_what_is_damaged_is_left_out(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "briefs"
    spool, _ = begin(folder, 1)
    for name in ("run_1", "run_2"):
        request = delegation(name)
        spool.keep(request, request.runs)
    spool.close()
    (path,) = folder.iterdir()
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 5)
    else:
        data = bytearray(path.read_bytes())
        data[-40:-1] = b"\xff" * 39
        path.write_bytes(data)
    spool, found = begin(folder, 2, "run_1", "run_2")
    assert found == ["run_1"]
    spool.close()


def test_a_disk_that_takes_nothing_refuses_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "briefs").write_text("a file where the folder should be")
    spool, found = begin(tmp_path / "briefs", 1, "run_1")
    request = delegation("run_1")
    spool.keep(request, request.runs)
    spool.drop("run_1")
    spool.close()
    assert found == []
    assert len(caplog.records) == 1
    assert "cannot be kept" in caplog.text
