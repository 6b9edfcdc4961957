"""Patterns are compared by what they match, exactly; I14 of the invariants of the lock table."""

from __future__ import annotations

import fnmatch
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.locks import Area, AreaKind, InvalidClaim, Mode, conflict, includes, overlap
from remit.locks.area import merge, pattern_of
from remit.locks.glob import Wild, expand_braces, names_meet, parse_name


def glob(key: str, mode: Mode = Mode.WRITE) -> Area:
    return Area(mode, key, AreaKind.GLOB)


def path(key: str, mode: Mode = Mode.WRITE) -> Area:
    return Area(mode, key)


def matches(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Match by definition: one recursion, one name at a time."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return matches(pattern[1:], names) or (bool(names) and matches(pattern, names[1:]))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and matches(pattern[1:], names[1:])


NAMES = ["".join(chars) for size in (1, 2) for chars in itertools.product("ab", repeat=size)]
PLACES = [names for depth in range(5) for names in itertools.product(NAMES[:3], repeat=depth)]
PARTS = ["a", "b", "aa", "*", "a*", "*b", "?", "[ab]", "[!a]", "**"]
KEYS = ["/".join(parts) for depth in (1, 2, 3) for parts in itertools.product(PARTS, repeat=depth)]


def places_of(area: Area) -> frozenset[tuple[str, ...]]:
    names = tuple(area.key.split("/")) if area.key else ()
    if area.kind is AreaKind.PATH:
        names = (*names, "**")
    return frozenset(place for place in PLACES if matches(names, place))


ANY_AREA = st.one_of(
    st.sampled_from(KEYS).map(glob),
    st.sampled_from(["", *("/".join(place) for place in PLACES if len(place) in (1, 2))]).map(path),
)


@given(ANY_AREA, ANY_AREA)
def test_overlap_never_misses_a_common_path_and_is_symmetric(one: Area, two: Area) -> None:
    """Invariant I14."""
    assert overlap(one, two) == overlap(two, one)
    assert overlap(one, one)
    assert overlap(one, two) or not places_of(one) & places_of(two)


@given(st.sampled_from(KEYS), st.sampled_from(KEYS))
def test_overlap_of_short_globs_is_exact(one: str, two: str) -> None:
    # Names of up to two characters and paths of up to four names hold a witness
    # of every overlap of two of these patterns, but for doubled `**`.
    if one.count("**") + two.count("**") < 2:
        names = ["".join(chars) for size in (1, 2, 3) for chars in itertools.product("abc", repeat=size)]
        parts = [part for part in names if any(fnmatch.fnmatchcase(part, piece) for piece in (*PARTS[:-1],))]
        shared = any(
            matches(tuple(one.split("/")), place) and matches(tuple(two.split("/")), place)
            for depth in range(4)
            for place in itertools.product(_useful(parts, one, two), repeat=depth)
        )
        assert overlap(glob(one), glob(two)) == shared


def _useful(names: list[str], one: str, two: str) -> list[str]:
    """Keep one name for each set of parts that it matches: others would tell nothing new."""
    parts = [part for part in (*one.split("/"), *two.split("/")) if part != "**"]
    found = {tuple(fnmatch.fnmatchcase(name, part) for part in parts): name for name in names}
    return list(found.values())


@given(ANY_AREA, ANY_AREA)
def test_what_is_included_is_a_subset(one: Area, two: Area) -> None:
    assert includes(one, one)
    if includes(one, two):
        assert places_of(two) <= places_of(one)
        assert overlap(one, two)


@given(ANY_AREA, ANY_AREA, ANY_AREA)
def test_overlap_grows_with_the_area(one: Area, two: Area, three: Area) -> None:
    if includes(one, two) and overlap(two, three):
        assert overlap(one, three)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("src/*.py", "src/a*"),
        ("src/**/test_*", "src/api/**"),
        ("a/*/c", "a/b/*"),
        ("src/[ab].py", "src/?.py"),
        ("**", "x"),
        ("**/a/**", "b/*/c/a"),
        ("*a*b*", "*b*a*"),
    ],
)
def test_globs_that_share_a_path_overlap(one: str, two: str) -> None:
    assert overlap(glob(one), glob(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("*.md", "docs/a.md"),
        ("src/*.py", "src/*.md"),
        ("[a-c]*", "[d-f]*"),
        ("[!a]", "a"),
        ("a/*", "a/b/c"),
        ("?", "??"),
        ("**/a", "**/b"),
    ],
)
def test_globs_that_share_no_path_do_not_overlap(one: str, two: str) -> None:
    assert not overlap(glob(one), glob(two))


def test_folder_overlaps_a_glob_that_reaches_into_it() -> None:
    assert overlap(path("src"), glob("**/*.py"))
    assert overlap(path("src/a.py"), glob("src/*.py"))
    assert not overlap(path("docs"), glob("src/**"))


def test_path_with_pattern_characters_is_a_path() -> None:
    page = path("app/[id]/page.tsx")
    assert overlap(page, page)
    assert not overlap(page, path("app/i/page.tsx"))
    assert overlap(page, glob("app/*/page.tsx"))
    assert not overlap(page, glob("app/[id]/page.tsx"))


def test_readers_do_not_conflict() -> None:
    assert not conflict(path("a", Mode.READ), path("a", Mode.READ))
    assert conflict(path("a", Mode.READ), path("a"))


def test_name_next_to_a_folder_is_not_below_it() -> None:
    assert not overlap(path("src"), path("src2"))
    assert not overlap(path("src"), path("src.py"))


def test_inode_meets_itself_alone() -> None:
    inode = Area(Mode.WRITE, "1:2", AreaKind.INODE)
    assert overlap(inode, inode)
    assert not overlap(inode, path(""))
    assert not overlap(inode, glob("**"))
    assert includes(inode, inode)
    assert not includes(path(""), inode)


@pytest.mark.parametrize("text", ["[", "a[", "[]", "[!]", "[^]", "a[b"])
def test_unclosed_class_is_plain_text(text: str) -> None:
    assert parse_name(text) == text


def test_class_of_one_character_is_plain_text() -> None:
    assert parse_name("[[]id]") == "[id]"
    assert pattern_of(AreaKind.GLOB, "app/[[]id]/*").anchor == ("app", "[id]")


def test_closing_bracket_in_first_place_is_a_member() -> None:
    assert names_meet(parse_name("[]a]"), "]")
    assert not names_meet(parse_name("[!]a]"), "]")


def test_dash_at_the_end_is_a_member() -> None:
    assert names_meet(parse_name("[a-]"), "-")
    assert names_meet(parse_name("[a-]"), "a")
    assert not names_meet(parse_name("[a-]"), "b")


def test_class_without_a_character_is_refused() -> None:
    with pytest.raises(InvalidClaim, match="no character"):
        parse_name("[z-a]")


def test_stars_within_a_name_do_not_cross_folders() -> None:
    assert not overlap(glob("a**b"), path("a/b"))
    assert overlap(glob("a**b"), path("axb"))


def test_runs_of_stars_are_one() -> None:
    star = parse_name("***")
    assert isinstance(star, Wild)
    assert len(star.tokens) == 1


def test_dotfiles_are_matched() -> None:
    assert overlap(glob("*"), path(".env"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("{a,b}", ["a", "b"]),
        ("x{a,b}{c,d}", ["xac", "xad", "xbc", "xbd"]),
        ("{a,b{c,d}}", ["a", "bc", "bd"]),
        ("{a}", ["{a}"]),
        ("{a,b", ["{a,b"]),
        ("{{a,b}}", ["{a}", "{b}"]),
        ("{,a}b", ["b", "ab"]),
    ],
)
def test_braces_expand_as_in_a_shell(text: str, expected: list[str]) -> None:
    assert expand_braces(text, limit=10) == expected


def test_braces_that_explode_are_refused() -> None:
    with pytest.raises(InvalidClaim, match="more than 64"):
        expand_braces("{a,b}" * 30, limit=64)


def test_worst_pattern_is_compared_in_bounded_time() -> None:
    # Backtracking would need longer than the universe has.
    assert not overlap(glob("*a" * 120 + "b"), glob("*a" * 120 + "c"))
    assert overlap(glob("/".join(["**", "*a"] * 15)), glob("/".join(["**", "a*"] * 15)))


def test_merge_drops_doubles_and_lets_writing_win() -> None:
    areas = [
        path("a", Mode.READ),
        path("a/b"),
        path("a"),
        path("a/c", Mode.READ),
        glob("a/*"),
        glob("b/*"),
        glob("b/*"),
    ]
    assert merge(areas) == (path("a"), glob("b/*"))


def test_merge_keeps_a_read_folder_beside_a_written_file() -> None:
    areas = (path("a", Mode.READ), path("a/b"))
    assert merge(areas) == areas


def test_area_survives_json() -> None:
    for area in (path("a"), glob("*.py", Mode.READ), Area(Mode.READ, "1:2", AreaKind.INODE, "a.py")):
        again = Area.from_dict(area.to_dict())
        assert (again, again.label) == (area, area.label)


def test_area_is_described_as_people_write_it() -> None:
    assert path("").describe() == "write ."
    assert glob("*.py", Mode.READ).describe() == "read glob *.py"
