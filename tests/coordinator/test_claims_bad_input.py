"""What people get wrong with claims, and names that are hard on them: a typed error, or what was meant."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from remit.coordinator import Coordinator, Turn
from remit.core.errors import InvalidArgument, RemitError
from remit.locks import Claim, InvalidClaim, LeaseNotHeld, Mode, OutsideWorkspace, exclusive, read, write
from remit.testing.inprocess import open_inprocess


@asynccontextmanager
async def a_turn(folder: Path) -> AsyncGenerator[tuple[Coordinator, Turn]]:
    with open_inprocess(folder) as system:
        async with system.coordinator() as coordinator:
            async with coordinator.turn("t") as turn:
                yield coordinator, turn
            assert await coordinator.locks() == ()


def in_turn(folder: Path, story: Callable[[Coordinator, Turn], Awaitable[None]]) -> None:
    async def main() -> None:
        async with a_turn(folder) as (coordinator, turn):
            await story(coordinator, turn)

    asyncio.run(main())


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[RemitError], str]] = [
    ("text for a claim", ("src",), {}, InvalidArgument, "read\\(...\\), write\\(...\\)"),
    ("nothing for a claim", (None,), {}, InvalidArgument, "not None"),
    ("a tuple for a claim", ((write("a"),),), {}, InvalidArgument, "read\\(...\\), write\\(...\\)"),
    ("one of two", (write("a"), "b"), {}, InvalidArgument, "not 'b'"),
    ("another mode", (Claim(cast(Mode, "rw"), "a"),), {}, InvalidClaim, "'rw'"),
    ("a number for a path", (Claim(Mode.WRITE, cast(str, 5)),), {}, InvalidClaim, "5"),
    ("no claim", (), {}, InvalidClaim, "empty claim"),
    ("NUL", (write("a\0b"),), {}, InvalidClaim, "NUL"),
    ("line break", (write("a\nb"),), {}, InvalidClaim, "line break"),
    ("above", (write("../x"),), {}, OutsideWorkspace, "leads out"),
    ("by a link", (write("out/x"),), {}, OutsideWorkspace, "leads out"),
    ("elsewhere", (write("/etc/passwd"),), {}, OutsideWorkspace, "leads out"),
    ("foreign workspace", (write(tempfile.gettempdir()),), {}, OutsideWorkspace, "leads out"),
    ("round in a circle", (write("loop/x"),), {}, InvalidClaim, "too many links"),
    ("too long a name", (write("n" * 256),), {}, InvalidClaim, "File name too long"),
    ("too long a path", (write("/".join(["d" * 200] * 30)),), {}, InvalidClaim, "File name too long"),
    ("glob of the disk", (read(glob="/**"),), {}, OutsideWorkspace, "root of the disk"),
    ("glob of too many", (read(glob=f"{{{','.join(map(str, range(100)))}}}"),), {}, InvalidClaim, "64"),
    ("glob too long", (read(glob="*" * 600),), {}, InvalidClaim, "512"),
    ("glob above", (read(glob="../*"),), {}, InvalidClaim, r"'\.\.'"),
    ("text for seconds", (write("a"),), {"timeout_s": "5"}, InvalidArgument, "'5'"),
    ("no number of seconds", (write("a"),), {"timeout_s": float("nan")}, InvalidArgument, "nan"),
    ("endless seconds", (write("a"),), {"timeout_s": float("inf")}, InvalidArgument, "inf"),
    ("negative seconds", (write("a"),), {"timeout_s": -1}, InvalidArgument, "-1"),
    ("a truth for seconds", (write("a"),), {"timeout_s": True}, InvalidArgument, "True"),
]


@pytest.mark.parametrize(("args", "options", "kind", "told"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_claim_that_cannot_be_is_a_typed_error_and_holds_nothing(
    tmp_path: Path, args: tuple[Any, ...], options: dict[str, Any], kind: type[RemitError], told: str
) -> None:
    (tmp_path / "out").symlink_to("/")
    (tmp_path / "loop").symlink_to("loop")

    async def story(coordinator: Coordinator, turn: Turn) -> None:
        with pytest.raises(kind, match=told):
            async with turn.claim(*args, **options):
                raise AssertionError("granted")
        assert await coordinator.locks() == ()

    in_turn(tmp_path, story)


@pytest.mark.field_report("G2")
def test_a_lease_is_released_by_nobody_but_its_holder(tmp_path: Path) -> None:
    async def story(coordinator: Coordinator, turn: Turn) -> None:
        async with coordinator.turn("other", session="other") as other:
            async with turn.claim(write("src")) as lease:
                with pytest.raises(LeaseNotHeld, match=f"belongs to {turn.id}, not to {other.id}"):
                    await other.release(lease)
                await lease.check()
            with pytest.raises(LeaseNotHeld):
                await lease.check()
            await turn.release(lease)  # once more is no mistake

    in_turn(tmp_path, story)


NAMES = {
    "255 bytes": "n" * 255,
    "240 bytes": "m" * 240,
    "two bytes a letter": "ü" * 127,
    "four bytes a letter": "𝄞" * 63,
    "no UTF-8": os.fsdecode(b"s\xff"),
    "pattern": "[id].tsx",
    "space and quote": "a 'b' \"c\"",
    "dash": "-rf",
    "decomposed": "e\u0301",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_file_of_any_name_that_may_be_is_written(tmp_path: Path, name: str) -> None:
    async def story(coordinator: Coordinator, turn: Turn) -> None:
        async with turn.claim(write(name), write(f"new/{name}")):
            await turn.write_text(name, "one")
            await turn.write_text(name, "two")
            async with turn.open(f"new/{name}", "x") as file:
                file.write("three")
            with pytest.raises(FileExistsError):
                async with turn.open(f"new/{name}", "x"):
                    raise AssertionError
        assert [(tmp_path / name).read_text(), (tmp_path / "new" / name).read_text()] == ["two", "three"]

    in_turn(tmp_path, story)
    assert {path.name for path in tmp_path.iterdir()} - {".remit"} == {name, "new"}


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")

    async def story(coordinator: Coordinator, turn: Turn) -> None:
        async with turn.claim(exclusive()):
            for path in ("folder", ".", str(tmp_path)):
                with pytest.raises(IsADirectoryError):
                    await turn.write_text(path, "x")
            with pytest.raises(InvalidArgument, match="'pipe' is no regular file"):
                await turn.write_text("pipe", "x")

    in_turn(tmp_path, story)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".remit") == ["folder", "pipe"]


@pytest.mark.parametrize("path", [".remit", ".remit/journal.db", "./.remit/briefs/x", "way/journal.db"])
def test_the_state_of_the_workspace_is_nobodys_to_write(tmp_path: Path, path: str) -> None:
    (tmp_path / ".remit").mkdir(exist_ok=True)
    (tmp_path / "way").symlink_to(".remit")

    async def story(coordinator: Coordinator, turn: Turn) -> None:
        async with turn.claim(exclusive()):
            with pytest.raises(InvalidClaim, match=r"\.remit"):
                await turn.write_text(path, "x")
            await turn.write_text(".remit/output/mine/report", "as a run may")
            await turn.write_text("sub/.remit", "somebody else's")

    in_turn(tmp_path, story)


def test_a_text_that_cannot_be_encoded_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    async def story(coordinator: Coordinator, turn: Turn) -> None:
        async with turn.claim(write("a")):
            with pytest.raises(UnicodeEncodeError):
                await turn.write_text("a", "\udc80")
            with pytest.raises(LookupError):
                await turn.write_text("a", "x", encoding="nope")

    in_turn(tmp_path, story)
    assert (tmp_path / "a").read_text() == "old"
