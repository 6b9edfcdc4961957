"""From claims to areas: the one place where claims meet the file system.

Done once, at the edge, and never under the table: `..` and links are resolved,
what lies outside is refused, names are brought to one form. The result is a
guess about a tree that may change, so `still_holds` repeats it after a grant
(as HDFS checks a path again once it has the lock).

**What the key of an area is**

- the real path below the workspace, links resolved as far as the path exists;
- in Unicode form NFC, and case-folded where the volume ignores case. Where the
  file system tells two such names apart, they exclude each other needlessly,
  which is safe;
- a link on the way is read, a link at the end is claimed with its target;
- a file with several hard links, claimed by name, is claimed by its inode as
  well; a claim on a folder does not look for such files in it.

A glob speaks about real paths: it is not followed through links below its
literal part.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Final

from remit.locks.area import Area, AreaKind, includes, merge, pattern_of
from remit.locks.claims import Claim, Mode
from remit.locks.errors import InvalidClaim, OutsideWorkspace
from remit.locks.glob import expand_braces, parse_name

__all__ = ["MAX_GLOB_ALTERNATIVES", "MAX_GLOB_CHARACTERS", "MAX_GLOB_NAMES", "Workspace"]

MAX_GLOB_CHARACTERS: Final = 512
"""Comparing two globs takes the product of their lengths; this bounds it."""
MAX_GLOB_NAMES: Final = 32
"""Parts of one glob; deeper trees are claimed by folder."""
MAX_GLOB_ALTERNATIVES: Final = 64
"""Patterns that the braces of one glob may stand for."""
_MAX_LINKS: Final = 40  # as many as Linux follows before ELOOP


class Workspace:
    """The folder that claims are relative to.

    Args:
        root: an existing folder; links in it are resolved once, now.
        ignores_case: whether its volume takes `A` and `a` for one name; None to
            find out from the names that exist.

    Raises:
        InvalidClaim: the root is not a folder.
    """

    __slots__ = ("ignores_case", "root")

    def __init__(self, root: str | os.PathLike[str], *, ignores_case: bool | None = None) -> None:
        self.root = Path(os.path.realpath(root))
        # The empty text would be wherever this process happens to be.
        if not os.fspath(root) or not self.root.is_dir():
            raise InvalidClaim(f"workspace {os.fspath(root)!r} is not a folder")
        self.ignores_case = _ignores_case(self.root) if ignores_case is None else ignores_case

    def areas(self, claims: Iterable[Claim]) -> tuple[Area, ...]:
        """Return the areas that these claims are about, each place once.

        Args:
            claims: what one all-or-nothing request asks for.

        Raises:
            InvalidClaim: there is none, or one of them can never be.
            OutsideWorkspace: one leads out of the workspace, by `..` or a link.
        """
        found: list[Area] = []
        for claim in claims:
            _check_text(claim)
            found.extend(self._glob_areas(claim) if claim.is_glob else self._path_areas(claim))
        if not found:
            raise InvalidClaim("an empty claim; name at least one path, or exclusive()")
        return merge(found)

    def still_holds(self, claims: Iterable[Claim], areas: tuple[Area, ...]) -> bool:
        """Tell whether what was granted covers all that the claims lead to now.

        It may cover more: whoever had the claim before may have replaced a file that
        had other names by one that has none.

        Args:
            claims: what was asked for.
            areas: what `areas` made of it then.
        """
        try:
            return all(any(includes(granted, area) for granted in areas) for area in self.areas(claims))
        except InvalidClaim:
            return False

    def resolve(self, path: str | os.PathLike[str]) -> Path:
        """Return the real path of a place in the workspace, for use with the disk.

        Args:
            path: relative to the workspace, or absolute inside it.

        Raises:
            InvalidClaim: no file can have this path.
            OutsideWorkspace: it leads out of the workspace.
        """
        claim = Claim(Mode.READ, os.fsdecode(path))
        _check_text(claim)
        return self.root.joinpath(*self._walk(claim)[0])

    def _path_areas(self, claim: Claim) -> list[Area]:
        names, links = self._walk(claim)
        # Whoever goes through a link relies on it; who claims the link itself
        # may replace it.
        through = [self._area(claim.mode if at_end else Mode.READ, link) for link, at_end in links]
        inodes = _inode_areas(claim.mode, self.root, names)
        return [self._area(claim.mode, names), *through, *inodes]

    def _glob_areas(self, claim: Claim) -> list[Area]:
        areas: list[Area] = []
        for text in expand_braces(claim.text, limit=MAX_GLOB_ALTERNATIVES):
            if text.startswith("/"):
                raise OutsideWorkspace(f"glob {claim.text!r} begins at the root of the disk; make it relative")
            parts = [part for part in text.split("/") if part not in ("", ".")]
            if ".." in parts:
                raise InvalidClaim(f"glob {claim.text!r} holds '..'; write what it leads to")
            if not parts or len(parts) > MAX_GLOB_NAMES:
                raise InvalidClaim(f"glob {claim.text!r} must have 1 to {MAX_GLOB_NAMES} parts")
            areas.extend(self._resolved_glob(claim, parts))
        return areas

    def _resolved_glob(self, claim: Claim, parts: list[str]) -> list[Area]:
        """Return the area of one pattern, its literal folders resolved, and their links."""
        # The last part is never resolved: the glob is about that very name.
        folders = list(takewhile(lambda name: isinstance(name, str), map(parse_name, parts[:-1])))
        names, links = self._walk(Claim(claim.mode, "/".join(map(str, folders)))) if folders else ([], [])
        # A real name may hold pattern characters; they must stay plain.
        key = self._key([*map(_quoted, names), *parts[len(folders) :]])
        pattern_of(AreaKind.GLOB, key)  # refuses what cannot be parsed, here and not in the table
        area = Area(claim.mode, key, AreaKind.GLOB, "" if key == claim.text else claim.text)
        return [area, *(self._area(Mode.READ, link) for link, _ in links)]

    def _walk(self, claim: Claim) -> tuple[list[str], list[tuple[list[str], bool]]]:
        """Follow a path name by name.

        Returns:
            the names of the real path below the root, and each link that led
            there, with whether it is what the path itself names.
        """
        root = str(self.root)
        todo = _parts(self._relative(claim))
        names: list[str] = []
        links: list[tuple[list[str], bool]] = []
        while todo:
            part = todo.pop()
            if part == "..":
                if names:
                    names.pop()
                else:
                    # Out of the root, and perhaps in again.
                    outside = os.path.join(self.root.parent, *reversed(todo))
                    todo = _parts(self._inside(outside, claim))
                continue
            names.append(part)
            # Texts, not `Path`s: a claim is walked twice, and making paths was half of the time.
            target = _link_target(os.path.join(root, *names), claim)
            if target is None:
                continue
            links.append((list(names), not todo and not any(at_end for _, at_end in links)))
            if len(links) > _MAX_LINKS:
                raise InvalidClaim(f"{claim.text!r} goes through too many links, or round in a circle")
            names.pop()
            if target.startswith("/"):
                names, target = [], self._inside(target, claim)
            todo.extend(_parts(target))
        return names, links

    def _relative(self, claim: Claim) -> str:
        """Return the text relative to the root; an absolute one must lie inside."""
        return self._inside(claim.text, claim) if claim.text.startswith("/") else claim.text

    def _inside(self, absolute: str, claim: Claim) -> str:
        """Return an absolute path relative to the root, links below the root unresolved.

        Raises:
            OutsideWorkspace: it is not below the root.
        """
        root = str(self.root).rstrip("/") + "/"
        if f"{absolute}/".startswith(root):
            return absolute[len(root) :]  # a ".." in it is judged on the way
        # The caller may know the workspace by another name, through a link above it.
        folder, last = os.path.split(absolute.rstrip("/"))
        by_folder = os.path.normpath(os.path.join(os.path.realpath(folder), last))
        for candidate in (by_folder, os.path.realpath(absolute)):
            if f"{candidate}/".startswith(root):
                return candidate[len(root) :]
        raise OutsideWorkspace(f"{claim.text!r} leads out of the workspace {str(self.root)!r}")

    def _area(self, mode: Mode, names: list[str]) -> Area:
        key, shown = self._key(names), "/".join(names)
        return Area(mode, key, AreaKind.PATH, "" if shown == key else shown)

    def _key(self, names: list[str]) -> str:
        text = unicodedata.normalize("NFC", "/".join(names))
        # Folding may undo the normal form, so it is made again.
        return unicodedata.normalize("NFC", text.casefold()) if self.ignores_case else text


def _check_text(claim: Claim) -> None:
    """Refuse what no path can be, or what would only be there to cause harm."""
    text = claim.text
    if not text:
        raise InvalidClaim('an empty path claims nothing; use "." or exclusive() for the whole workspace')
    if "\0" in text:
        raise InvalidClaim(f"{text!r} holds a NUL character, which no path can")
    # A line break is possible in a name but breaks every list of paths that
    # people and programs make; so far it has always been a mistake.
    if "\n" in text or "\r" in text:
        raise InvalidClaim(f"{text!r} holds a line break")
    if claim.is_glob and len(text) > MAX_GLOB_CHARACTERS:
        raise InvalidClaim(f"a glob has at most {MAX_GLOB_CHARACTERS} characters, not {len(text)}")


def _link_target(path: str, claim: Claim) -> str | None:
    """Return where a link points to, or None if this is none or does not exist."""
    try:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None  # to be made later; from here on names are only names
    except OSError as error:
        raise InvalidClaim(f"{claim.text!r} cannot be looked at: {error.strerror}") from error


def _inode_areas(mode: Mode, root: Path, names: list[str]) -> list[Area]:
    """Return the inode of a file that has other names, which may lie anywhere."""
    try:
        found = os.lstat(os.path.join(root, *names))
    except OSError:
        return []  # no file, no other names
    if not stat.S_ISREG(found.st_mode) or found.st_nlink < 2:
        return []
    return [Area(mode, f"{found.st_dev}:{found.st_ino}", AreaKind.INODE, "/".join(names))]


def _parts(text: str) -> list[str]:
    """Return the names of a path, last first, without those that mean nothing."""
    return [part for part in reversed(text.split("/")) if part not in ("", ".")]


def _quoted(name: str) -> str:
    """Return a pattern that matches this name alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _ignores_case(root: Path) -> bool:
    """Find out from a name that exists whether its other case is the same file."""
    for name in os.listdir(root):
        if name.swapcase() != name:
            try:
                return os.path.samestat(os.lstat(root / name), os.lstat(root / name.swapcase()))
            except OSError:
                return False  # the other case does not exist: the volume tells them apart
    return False
