"""The import map in docs/architecture.md tells the truth about the sources."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("coordinator", "agents", "locks")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name and the place that imports it."""

    module: str
    """Module that holds the statement."""
    target: str
    """Dotted name that is imported."""
    where: str
    """File and line, for messages."""


def source_files() -> list[tuple[str, Path]]:
    """Return every module of the sources as (dotted name, file)."""
    found: list[tuple[str, Path]] = []
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = list(path.relative_to(ROOT / root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Yield every import of a file, at any depth, and those spelled as a call with a literal name."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        match node:
            case ast.Import(names=names):
                yield from (Import(module, alias.name, where) for alias in names)
            case ast.ImportFrom(module=target, names=names, level=0) if target is not None:
                # `from remit import core` names a package in the alias.
                whole = target == "remit"
                yield from (Import(module, f"remit.{alias.name}" if whole else target, where) for alias in names)
            case ast.ImportFrom():
                yield Import(module, "(relative import)", where)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield Import(module, target, where)
            case _:
                pass


def table(heading: str) -> dict[str, tuple[str, ...]]:
    """Return the table under a header row of the import map; mapping of first column to names in the second."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Import map", 1)[1].split("\n## ", 1)[0]
    rows: dict[str, tuple[str, ...]] = {}
    inside = False
    for line in section.splitlines():
        if line.startswith(f"| {heading} |"):
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and "---" not in line:
            first, second = (cell.strip() for cell in line.strip("|").split("|", 1))
            rows[first.strip("`")] = tuple(re.findall(r"`([^`]+)`", second))
    assert rows, f"no table with the heading {heading!r} in docs/architecture.md"
    return rows


def package_of(name: str) -> str:
    """Return the first two parts of a dotted name: the package below `remit`."""
    return ".".join(name.split(".")[:2])


def is_below(name: str, places: tuple[str, ...]) -> bool:
    """Tell whether a dotted name is one of the places or lies in one."""
    return any(name == place or name.startswith(place + ".") for place in places)


@functools.cache
def all_imports() -> tuple[Import, ...]:
    """Return every import of the sources; read once, and not before a test asks."""
    return tuple(found for module, path in source_files() for found in imports_of(module, path))


def test_sources_are_found() -> None:
    assert len(source_files()) > 5
    assert len(all_imports()) > 10


def test_every_package_has_a_row_in_the_import_map() -> None:
    packages = {package_of(module) for module, _ in source_files()}
    assert packages <= set(table("package")) | {"remit.__main__"}


def test_packages_import_only_what_the_map_allows() -> None:
    allowed = table("package")
    wrong = [
        f"{found.where}: {package_of(found.module)} may not import {found.target}"
        for found in all_imports()
        if found.target.startswith("remit.")
        and package_of(found.module) != package_of(found.target)
        # `python -m remit` is the command line and nothing else.
        and package_of(found.target) not in allowed.get(package_of(found.module), ("remit.cli",))
    ]
    assert not wrong, "\n".join(wrong)


def test_libraries_are_imported_only_where_the_map_allows() -> None:
    libraries = table("library")
    wrong: list[str] = []
    for found in all_imports():
        top = found.target.split(".")[0]
        if top in libraries:
            if not is_below(found.module, libraries[top]):
                wrong.append(f"{found.where}: {top} may be imported only in {', '.join(libraries[top])}")
        elif top not in sys.stdlib_module_names and top != "remit":
            wrong.append(f"{found.where}: {found.target} has no row in docs/architecture.md")
    assert not wrong, "\n".join(wrong)


def test_import_map_has_no_cycle() -> None:
    allowed = table("package")
    done: list[str] = []
    left = dict(allowed)
    while left:
        ready = [package for package, needs in left.items() if set(needs) <= set(done)]
        assert ready, f"cycle among {', '.join(left)}"
        done.extend(ready)
        for package in ready:
            del left[package]


@pytest.mark.parametrize(
    "text",
    [
        "import ray",
        "def f():\n    import ray",
        "if TYPE_CHECKING:\n    from ray.actor import ActorHandle",
        "import importlib\nimportlib.import_module('ray.util')",
    ],
)
def test_reader_sees_an_import_in_every_form(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(text)
    assert any(found.target.split(".")[0] == "ray" for found in imports_of("remit.core.module", path))
