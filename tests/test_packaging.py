"""Guards of the layout: three source roots, one namespace, one wheel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import remit

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("coordinator", "agents", "locks")

checkout = pytest.mark.checkout


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_packages() -> set[str]:
    """Return every package folder of the sources, as a path below its root (`remit/core`)."""
    return {
        path.parent.relative_to(ROOT / root).as_posix()
        for root in SOURCE_ROOTS
        for path in (ROOT / root).rglob("*.py")
        if "__pycache__" not in path.parts and path.parent != ROOT / root / "remit"
    }


def files_below(*roots: Path) -> dict[str, bytes]:
    """Return every file of the package below some roots; mapping of its path there to its content."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for root in roots
        for path in (root / "remit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def name_of(requirement: str) -> str:
    """Return the distribution's name in a requirement, lower case."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found.group(0).lower()


@checkout
def test_namespace_has_no_init_file() -> None:
    assert not [root for root in SOURCE_ROOTS if (ROOT / root / "remit" / "__init__.py").exists()]


@checkout
def test_source_roots_are_not_packages() -> None:
    assert not [root for root in SOURCE_ROOTS if (ROOT / root / "__init__.py").exists()]


def test_namespace_has_one_part_when_installed_and_three_in_a_checkout() -> None:
    parts = list(remit.__path__)
    if any("site-packages" in part for part in parts):
        assert len(parts) == 1, parts
    else:
        assert len(parts) == 3, parts


def test_installed_files_are_those_of_the_sources_and_no_others() -> None:
    """So what the fast tests prove of the sources holds for what is installed, and they need not run again there."""
    parts = [Path(part).parent for part in remit.__path__]
    sources = [ROOT / root for root in SOURCE_ROOTS]
    if len(parts) == 1:
        given = os.environ.get("REMIT_SOURCES")
        if given is None:
            pytest.skip("REMIT_SOURCES does not name the checkout that this was built from")
        sources = [Path(given) / root for root in SOURCE_ROOTS]
    wanted, found = files_below(*sources), files_below(*parts)
    assert len(wanted) > 100
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []


def test_short_folder_names_never_become_import_names() -> None:
    """Folders of those names belong to users and to other distributions."""
    script = """
import importlib, json, pkgutil, sys
import remit
for found in pkgutil.iter_modules(remit.__path__, "remit."):
    if found.ispkg:
        importlib.import_module(found.name)
print(json.dumps(sorted({"coordinator", "agents", "locks"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert not {"coordinator", "agents", "locks"} & set(sys.modules)


def test_every_package_is_marked_as_typed() -> None:
    missing = [
        str(package)
        for part in remit.__path__
        for package in Path(part).iterdir()
        if (package / "__init__.py").exists() and not (package / "py.typed").exists()
    ]
    assert not missing


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the wheel and return the names in it."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@checkout
def test_wheel_holds_remit_and_its_metadata_alone(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    version = project()["project"]["version"]
    assert tops == {"remit", f"remit-{version}.dist-info"}


@checkout
def test_wheel_holds_every_package_of_the_sources(wheel_names: list[str]) -> None:
    shipped = {name.rsplit("/", 1)[0] for name in wheel_names if name.endswith(".py")}
    assert source_packages() <= shipped


@checkout
def test_wheel_holds_the_typing_mark_of_every_package(wheel_names: list[str]) -> None:
    tops = {"/".join(package.split("/")[:2]) for package in source_packages()}
    assert {f"{package}/py.typed" for package in tops} <= set(wheel_names)


@checkout
def test_wheel_carries_the_license(wheel_names: list[str]) -> None:
    assert any(name.endswith("/LICENSE") for name in wheel_names)


@checkout
def test_tested_versions_are_the_same_for_uv_and_pip() -> None:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert pinned == project()["tool"]["uv"]["constraint-dependencies"]


@checkout
def test_tested_versions_name_no_place_and_no_hash() -> None:
    for line in project()["tool"]["uv"]["constraint-dependencies"]:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


@checkout
def test_every_direct_dependency_has_a_tested_version() -> None:
    whole = project()
    asked = [
        *whole["project"]["dependencies"],
        *(name for extra in whole["project"]["optional-dependencies"].values() for name in extra),
        *(name for group in whole["dependency-groups"].values() for name in group),
    ]
    pinned = {name_of(line) for line in whole["tool"]["uv"]["constraint-dependencies"]}
    assert {name_of(name) for name in asked} <= pinned


@checkout
def test_every_runtime_dependency_is_justified() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    missing = [name_of(name) for name in project()["project"]["dependencies"] if f"| `{name_of(name)}` |" not in text]
    assert not missing


@checkout
def test_python_floor_stands_in_one_place() -> None:
    """Tools read `requires-python`; a second number would sooner or later differ."""
    tools = project()["tool"]
    assert "target-version" not in tools["ruff"]
    assert "python_version" not in tools["mypy"]
    assert "pythonVersion" not in tools["pyright"]


@checkout
def test_classifiers_agree_with_the_python_range() -> None:
    """The classifiers are for people who search; they follow the range."""
    whole = project()["project"]
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", whole["requires-python"])
    assert found is not None
    low, high = (int(number) for number in found.groups())
    named = [line.rsplit("3.", 1)[1] for line in whole["classifiers"] if "Python :: 3." in line]
    assert [int(number) for number in named] == list(range(low, high))


def test_command_is_installed_under_its_name() -> None:
    points = [point for point in importlib.metadata.entry_points(group="console_scripts") if point.name == "remit"]
    if points:  # absent when the sources are on PYTHONPATH only
        assert {point.value for point in points} == {"remit.cli.entry:main"}
