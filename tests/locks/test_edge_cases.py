"""Edge cases of paths and owners that the other tests of claims do not show, one test each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remit.locks import (
    Area,
    AreaKind,
    Claim,
    ClaimRequest,
    Granted,
    InvalidClaim,
    LockTable,
    Mode,
    OutsideWorkspace,
    Queued,
    Refused,
    Workspace,
    conflict,
    exclusive,
    overlap,
    read,
    write,
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    (root / "src").mkdir(parents=True)
    return Workspace(root, ignores_case=False)


class Table:
    """A table that is asked in claims, as callers spell them."""

    def __init__(self, workspace: Workspace, parents: dict[str, str] | None = None) -> None:
        self.table = LockTable()
        self.workspace = workspace
        self.parents = parents or {}
        self.count = 0

    def ask(self, owner: str, *claims: Claim) -> Granted | Queued | Refused:
        self.count += 1
        ancestors: list[str] = []
        while (above := self.parents.get(ancestors[-1] if ancestors else owner)) is not None:
            ancestors.append(above)
        areas = self.workspace.areas(claims)
        return self.table.request(ClaimRequest(f"claim_{self.count}", owner, areas, tuple(ancestors)))

    def end(self, *owners: str) -> list[str]:
        return [event.owner for event in self.table.end(owners, at=0.0) if isinstance(event, Granted)]


@pytest.fixture
def table(workspace: Workspace) -> Table:
    return Table(workspace)


@pytest.mark.parametrize("claim", [write("."), write("./"), write(".//."), write(glob="**"), exclusive()])
def test_whole_workspace_meets_every_claim_however_it_is_spelled(workspace: Workspace, claim: Claim) -> None:
    (whole,) = workspace.areas([claim])
    for other in (read("src/deep/er"), write("a"), read(glob="*.md"), read(glob="**/x")):
        assert conflict(whole, workspace.areas([other])[0]), other


def test_root_of_the_disk_is_outside(workspace: Workspace) -> None:
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write("/")])


def test_place_claimed_twice_by_two_mounts_or_names_is_only_known_by_inode_where_it_is_a_file(
    workspace: Workspace,
) -> None:
    (workspace.root / "src/a").write_text("")
    os.link(workspace.root / "src/a", workspace.root / "b")
    both = workspace.areas([write("src/a"), write("b")])
    assert [area.kind for area in both].count(AreaKind.INODE) == 1
    (workspace.root / "b").unlink()
    assert [area.kind for area in workspace.areas([write("src/a")])] == [AreaKind.PATH]


def test_file_that_becomes_a_folder_stays_claimed_with_what_is_in_it(table: Table) -> None:
    (table.workspace.root / "thing").write_text("")
    assert isinstance(table.ask("one", write("thing")), Granted)
    (table.workspace.root / "thing").unlink()
    (table.workspace.root / "thing").mkdir()
    assert isinstance(table.ask("two", write("thing/inside")), Queued)


def test_shared_parents_that_are_made_on_the_way_need_no_claim(table: Table) -> None:
    assert isinstance(table.ask("one", write("new/a/file")), Granted)
    assert isinstance(table.ask("two", write("new/b/file")), Granted)


def test_rename_waits_for_either_end_and_holds_none_meanwhile(table: Table) -> None:
    assert isinstance(table.ask("reader", read("to")), Granted)
    assert isinstance(table.ask("mover", write("from"), write("to")), Queued)
    # Nobody is kept from an end that the mover only waits for, but by the order of the line.
    assert isinstance(table.ask("late", write("from")), Queued)
    assert isinstance(table.ask("other", write("elsewhere")), Granted)
    assert table.end("reader") == ["mover"]
    assert table.end("mover") == ["late"]


def test_claim_follows_the_path_and_not_the_file_that_was_there(table: Table) -> None:
    (table.workspace.root / "old").write_text("")
    assert isinstance(table.ask("one", write("old")), Granted)
    (table.workspace.root / "old").rename(table.workspace.root / "new")
    assert isinstance(table.ask("two", write("new")), Granted)
    assert isinstance(table.ask("three", write("old")), Queued)


def test_folder_is_not_removed_under_a_claim_of_somebody_else(table: Table) -> None:
    assert isinstance(table.ask("one", read("src/deep/file")), Granted)
    removal = table.ask("two", write("src"))
    assert isinstance(removal, Queued)
    assert table.end("one") == ["two"]


def test_git_folder_is_a_place_like_any_other_for_those_who_write_it(table: Table) -> None:
    (table.workspace.root / ".git").mkdir()
    assert isinstance(table.ask("committer", write("src"), write(".git")), Granted)
    assert isinstance(table.ask("stasher", write("docs"), write(".git/index")), Queued)
    assert isinstance(table.ask("editor", write("docs")), Queued), "behind the stasher, who came first"
    assert table.end("committer") == ["stasher"]
    assert table.end("stasher") == ["editor"]


def test_hot_file_hands_over_in_the_order_of_the_line_one_at_a_time(table: Table) -> None:
    assert isinstance(table.ask("run_0", write("AGENTS.md")), Granted)
    for number in range(1, 200):
        assert isinstance(table.ask(f"run_{number}", write("AGENTS.md")), Queued)
    for number in range(199):
        assert table.end(f"run_{number}") == [f"run_{number + 1}"]


def test_outputs_of_a_build_are_claimed_by_pattern_and_sources_stay_free(table: Table) -> None:
    assert isinstance(table.ask("build", read("src"), write(glob="lib/**/*.o"), write("build")), Granted)
    assert isinstance(table.ask("docs", write("docs/x.md")), Granted)
    assert isinstance(table.ask("notes", write(glob="lib/*.md")), Granted)
    assert isinstance(table.ask("clean", write("lib/main.o")), Queued)


def test_worktree_inside_is_a_folder_and_one_outside_is_refused(workspace: Workspace) -> None:
    (workspace.root / "worktrees/fix").mkdir(parents=True)
    assert [area.key for area in workspace.areas([write("worktrees/fix/src")])] == ["worktrees/fix/src"]
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write("../workspace-fix/src")])


def test_doubles_in_one_claim_are_one_and_writing_wins(table: Table) -> None:
    answer = table.ask("one", read("src"), write("src/a"), read("src/a"), write("src/a"))
    assert isinstance(answer, Granted)
    assert answer.request is not None
    assert [area.describe() for area in answer.request.areas] == ["read src", "write src/a"]


def test_child_that_claims_more_than_its_parent_holds_competes_for_the_rest(workspace: Workspace) -> None:
    table = Table(workspace, {"child": "parent"})
    assert isinstance(table.ask("parent", write("src")), Granted)
    assert isinstance(table.ask("stranger", write("docs")), Granted)
    assert isinstance(table.ask("child", write("src/a"), write("docs")), Queued)
    assert table.end("stranger") == ["child"]


def test_parent_and_child_that_end_in_one_step_leave_nothing_and_lend_nothing(workspace: Workspace) -> None:
    table = Table(workspace, {"child": "parent"})
    table.ask("parent", write("src"))
    table.ask("child", write("src/a"))
    assert isinstance(table.ask("next", write("src/a")), Queued)
    assert table.end("child", "parent") == ["next"]
    assert table.table.owners() == ("next",)


@pytest.mark.parametrize("text", ["a", "å", "ß", "İ", "ﬁ", "Å"])
def test_names_that_some_volume_may_take_for_one_are_one_where_it_says_so(tmp_path: Path, text: str) -> None:
    """Invariant I14: a normal form is its own, whatever folding and composing do to each other."""
    workspace = Workspace(tmp_path, ignores_case=True)
    (one,) = workspace.areas([write(text)])
    for spelled in (text, text.upper(), text.lower(), text.casefold(), one.key):
        (other,) = workspace.areas([write(spelled)])
        assert overlap(one, other), (text, spelled)


@pytest.mark.parametrize(
    "text", ["CON\0", "a\nb", "a\rb", "\0", "\n"], ids=["nul", "newline", "return", "only-nul", "only-newline"]
)
@pytest.mark.parametrize("make", [write, read])
def test_characters_that_break_lists_of_paths_are_refused_in_globs_too(
    workspace: Workspace, make: Callable[..., Claim], text: str
) -> None:
    for claim in (make(text), make(glob=text)):
        with pytest.raises(InvalidClaim):
            workspace.areas([claim])


def test_longest_globs_that_are_allowed_cost_little_against_each_other() -> None:
    workspace = Workspace(os.getcwd(), ignores_case=False)
    areas = [workspace.areas([write(glob="/".join(["*a*b*c*d*e*f?"] * 31) + f"/{n:02}*")])[0] for n in range(30)]
    table = LockTable()
    before = time.process_time()
    for number, area in enumerate(areas):
        answer = table.request(ClaimRequest(f"claim_{number}", f"run_{number}", (area,)))
        assert isinstance(answer, Granted), "no two of them share a last name"
    wide = table.request(ClaimRequest("claim_wide", "run_wide", (Area(Mode.WRITE, "**", AreaKind.GLOB),)))
    assert isinstance(wide, Queued)
    # Half a thousand comparisons of the largest kind; a bound for a machine that is busy.
    assert time.process_time() - before < 30
