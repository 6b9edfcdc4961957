"""Claims become areas: one test for each way in which a path can mislead."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.locks import (
    Area,
    AreaKind,
    Claim,
    InvalidClaim,
    Mode,
    OutsideWorkspace,
    Workspace,
    conflict,
    exclusive,
    overlap,
    read,
    write,
)
from remit.locks.workspace import MAX_GLOB_CHARACTERS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "ws"
    (root / "src").mkdir(parents=True)
    (root / "src/a.py").write_text("a")
    return root


@pytest.fixture
def workspace(root: Path) -> Workspace:
    return Workspace(root, ignores_case=False)


def keys(workspace: Workspace, *claims: Claim) -> list[str]:
    return [area.describe() for area in workspace.areas(claims)]


@pytest.mark.parametrize(
    "text",
    ["src/a.py", "./src/a.py", "src//a.py", "src/./a.py", "src/a.py/", "src/../src/a.py", "src/new/../a.py"],
)
def test_spellings_of_one_path_are_one_area(workspace: Workspace, text: str) -> None:
    assert keys(workspace, write(text)) == ["write src/a.py"]


def test_absolute_path_inside_is_made_relative(workspace: Workspace, root: Path) -> None:
    assert keys(workspace, write(root / "src/a.py")) == ["write src/a.py"]
    assert keys(workspace, write(root)) == ["write ."]
    assert keys(workspace, write(f"{root}/src/../src/a.py")) == ["write src/a.py"]


@pytest.mark.parametrize("claim", [exclusive(), write("."), write("./"), write("src/.."), read("src/../.")])
def test_whole_workspace_is_the_empty_key(workspace: Workspace, claim: Claim) -> None:
    assert workspace.areas([claim])[0].key == ""


def test_root_by_glob_covers_every_path(workspace: Workspace) -> None:
    (area,) = workspace.areas([write(glob="**")])
    assert overlap(area, Area(Mode.READ, "src/a.py"))


@pytest.mark.parametrize("text", ["..", "../x", "src/../../x", "/", "/etc/passwd", "src/../../ws2/x"])
def test_path_outside_is_refused(workspace: Workspace, text: str) -> None:
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write(text)])


def test_folder_whose_name_begins_alike_is_outside(workspace: Workspace, root: Path) -> None:
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write(f"{root}2/x")])


def test_path_out_of_the_workspace_and_in_again_is_inside(workspace: Workspace) -> None:
    assert keys(workspace, write("../ws/src/a.py")) == ["write src/a.py"]


def test_workspace_known_by_a_link_accepts_paths_by_either_name(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    workspace = Workspace(tmp_path / "link", ignores_case=False)
    assert workspace.root == root
    for name in (root, tmp_path / "link"):
        assert keys(workspace, write(name / "src/a.py")) == ["write src/a.py"]
        assert keys(workspace, write(name)) == ["write ."]


def test_link_is_claimed_with_its_target(workspace: Workspace, root: Path) -> None:
    (root / "current").symlink_to("src/a.py")
    assert keys(workspace, write("current")) == ["write src/a.py", "write current"]


def test_link_on_the_way_is_only_read(workspace: Workspace, root: Path) -> None:
    (root / "code").symlink_to("src")
    assert keys(workspace, write("code/a.py")) == ["write src/a.py", "read code"]
    one, two = workspace.areas([write("code/a.py")]), workspace.areas([write("code/b.py")])
    assert not any(conflict(a, b) for a in one for b in two)


def test_two_names_of_one_file_conflict(workspace: Workspace, root: Path) -> None:
    (root / "code").symlink_to("src")
    (root / "chain").symlink_to("code")
    one, two = workspace.areas([write("chain/a.py")]), workspace.areas([read("src/a.py")])
    assert any(conflict(a, b) for a in one for b in two)


def test_dots_after_a_link_are_taken_from_its_target(workspace: Workspace, root: Path) -> None:
    (root / "deep/er").mkdir(parents=True)
    (root / "code").symlink_to("deep/er")
    assert keys(workspace, write("code/../x"))[0] == "write deep/x"


def test_link_to_an_absolute_place_inside_is_followed(workspace: Workspace, root: Path) -> None:
    (root / "code").symlink_to(root / "src")
    assert keys(workspace, write("code/a.py"))[0] == "write src/a.py"


@pytest.mark.parametrize("target", ["..", "../other", "/etc", "/"])
def test_link_that_leads_outside_is_refused(workspace: Workspace, root: Path, target: str) -> None:
    (root / "out").symlink_to(target)
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write("out/x")])
    with pytest.raises(OutsideWorkspace):
        workspace.areas([write("out")])


def test_circle_of_links_is_refused(workspace: Workspace, root: Path) -> None:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    with pytest.raises(InvalidClaim, match="circle"):
        workspace.areas([write("one/x")])


def test_path_that_does_not_exist_is_taken_as_written(workspace: Workspace) -> None:
    assert keys(workspace, write("new/folder/x.py")) == ["write new/folder/x.py"]


def test_path_below_a_file_is_taken_as_written(workspace: Workspace) -> None:
    assert keys(workspace, write("src/a.py/x")) == ["write src/a.py/x"]


def test_broken_link_is_claimed_with_what_it_would_make(workspace: Workspace, root: Path) -> None:
    (root / "later").symlink_to("src/later.py")
    assert keys(workspace, write("later")) == ["write src/later.py", "write later"]


def test_link_that_changed_after_the_grant_is_noticed(workspace: Workspace, root: Path) -> None:
    (root / "docs").mkdir()
    (root / "current").symlink_to("src")
    claims = [write("current/x")]
    granted = workspace.areas(claims)
    assert workspace.still_holds(claims, granted)
    (root / "current").unlink()
    (root / "current").symlink_to("docs")
    assert not workspace.still_holds(claims, granted)
    (root / "current").unlink()
    (root / "current").symlink_to("/etc")
    assert not workspace.still_holds(claims, granted)


def test_hard_links_of_one_file_conflict(workspace: Workspace, root: Path) -> None:
    os.link(root / "src/a.py", root / "same.py")
    one, two = workspace.areas([write("src/a.py")]), workspace.areas([write("same.py")])
    assert [area.kind for area in one] == [AreaKind.PATH, AreaKind.INODE]
    assert any(conflict(a, b) for a in one for b in two)


def test_unicode_forms_of_one_name_are_one_area(workspace: Workspace) -> None:
    one, two = workspace.areas([write("n\u00e9")]), workspace.areas([write("ne\u0301")])
    assert one == two


def test_case_matters_only_where_the_volume_says_so(root: Path) -> None:
    plain, folding = Workspace(root, ignores_case=False), Workspace(root, ignores_case=True)
    assert plain.areas([write("A")]) != plain.areas([write("a")])
    assert folding.areas([write("A")]) == folding.areas([write("a")])
    assert folding.areas([write("Read.ME")])[0].describe() == "write Read.ME"
    (by_glob,) = folding.areas([write(glob="*.MD")])
    assert overlap(by_glob, folding.areas([write("readme.md")])[0])


def test_case_of_this_volume_is_found_out(root: Path) -> None:
    assert Workspace(root).ignores_case == (root / "SRC").exists()


def test_empty_folder_is_taken_to_tell_case_apart(tmp_path: Path) -> None:
    assert not Workspace(tmp_path).ignores_case


def test_name_that_is_no_utf8_is_claimed_and_survives_json(workspace: Workspace, root: Path) -> None:
    name = os.fsdecode(b"\xff.py")
    (area,) = workspace.areas([write(name)])
    assert area.key == name
    assert Area.from_dict(json.loads(json.dumps(area.to_dict()))) == area


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "a\rb"])
def test_characters_that_no_sane_path_has_are_refused(workspace: Workspace, text: str) -> None:
    for claim in (write(text), write(glob=text)):
        with pytest.raises(InvalidClaim):
            workspace.areas([claim])


def test_empty_text_is_refused_and_names_the_way_to_lock_everything(workspace: Workspace) -> None:
    with pytest.raises(InvalidClaim, match="exclusive"):
        write("")
    with pytest.raises(InvalidClaim, match="exclusive"):
        read(glob="")
    with pytest.raises(InvalidClaim, match="exclusive"):
        workspace.areas([Claim(Mode.WRITE, "")])


def test_no_claims_at_all_are_refused(workspace: Workspace) -> None:
    with pytest.raises(InvalidClaim, match="empty claim"):
        workspace.areas([])


def test_path_and_glob_are_never_mixed_up() -> None:
    with pytest.raises(InvalidClaim):
        write("a", glob="b")
    with pytest.raises(InvalidClaim):
        read()
    assert write("app/[id]/page.tsx").is_glob is False


def test_real_name_with_pattern_characters_is_a_file(workspace: Workspace, root: Path) -> None:
    (root / "app/[id]").mkdir(parents=True)
    (area,) = workspace.areas([write("app/[id]/page.tsx")])
    assert (area.kind, area.key) == (AreaKind.PATH, "app/[id]/page.tsx")


def test_folder_of_a_glob_is_resolved(workspace: Workspace, root: Path) -> None:
    (root / "code").symlink_to("src")
    area, link = workspace.areas([write(glob="code/*.py")])
    assert (area.key, area.describe()) == ("src/*.py", "write glob code/*.py")
    assert link == Area(Mode.READ, "code")


def test_folder_of_a_glob_with_pattern_characters_in_its_real_name_stays_plain(
    workspace: Workspace, root: Path
) -> None:
    (root / "[x]").mkdir()
    (root / "plain").symlink_to("[x]")
    area = workspace.areas([write(glob="plain/*.py")])[0]
    assert overlap(area, Area(Mode.READ, "[x]/a.py"))
    assert not overlap(area, Area(Mode.READ, "x/a.py"))


def test_glob_without_a_slash_is_about_the_top_level(workspace: Workspace) -> None:
    (area,) = workspace.areas([write(glob="*.py")])
    assert overlap(area, Area(Mode.READ, "setup.py"))
    assert not overlap(area, Area(Mode.READ, "src/a.py"))


def test_glob_without_wildcards_is_that_very_name(workspace: Workspace) -> None:
    (area,) = workspace.areas([write(glob="src/a.py")])
    assert overlap(area, Area(Mode.READ, "src/a.py"))
    assert not overlap(area, Area(Mode.READ, "src/a.py/below"))


def test_braces_become_several_areas_of_one_claim(workspace: Workspace) -> None:
    assert [area.key for area in workspace.areas([write(glob="docs/*.{md,txt}")])] == ["docs/*.md", "docs/*.txt"]


@pytest.mark.parametrize(
    "text",
    ["/etc/*", "src/../*", "x" * (MAX_GLOB_CHARACTERS + 1), "/".join(["*"] * 40), "{a,b}" * 10, "[z-a]", ".", "./"],
)
def test_glob_that_can_not_be_is_refused(workspace: Workspace, text: str) -> None:
    with pytest.raises(InvalidClaim):
        workspace.areas([write(glob=text)])


def test_rename_is_both_ends_in_one_request(workspace: Workspace) -> None:
    assert keys(workspace, write("src/a.py"), write("src/b.py")) == ["write src/a.py", "write src/b.py"]


def test_doubles_are_merged_and_writing_wins(workspace: Workspace) -> None:
    assert keys(workspace, read("src"), write("src"), write("src/a.py")) == ["write src"]


def test_workspace_that_is_no_folder_is_refused(root: Path) -> None:
    with pytest.raises(InvalidClaim, match="not a folder"):
        Workspace(root / "src/a.py")


def test_resolve_gives_the_real_path_inside(workspace: Workspace, root: Path) -> None:
    (root / "code").symlink_to("src")
    assert workspace.resolve("code/a.py") == root / "src/a.py"
    with pytest.raises(OutsideWorkspace):
        workspace.resolve("../x")


def test_claim_is_described_as_people_write_it() -> None:
    assert write("a b").describe() == "write a b"
    assert read(glob="*.py").describe() == "read glob *.py"
    assert exclusive().describe() == "write ."


NAME = st.text(st.characters(exclude_characters="/\0\r\n"), min_size=1, max_size=4)


@given(st.lists(NAME, min_size=1, max_size=4), st.booleans())
def test_normal_form_of_a_normal_form_is_itself(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], fold: bool
) -> None:
    workspace = Workspace(tmp_path_factory.getbasetemp(), ignores_case=fold)
    try:
        area = workspace.areas([write("/".join(names))])[0]
    except OutsideWorkspace:
        return
    if area.key:
        assert workspace.areas([write(area.key)])[0] == area
