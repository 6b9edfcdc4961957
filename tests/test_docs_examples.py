"""Examples in docstrings, documents and examples/ do not lie.

Every Python block in a document compiles, and every name that it imports from
`remit` exists. A block whose first line after the fence says `python run` is
executed as well, in a process and a folder of its own; `python run ray` marks
one that needs Ray.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import remit

ROOT = Path(__file__).resolve().parent.parent

RUN_LIMIT_S = 120
"""Limit of one executed block, in seconds; it may have to start a Ray node."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    where: str
    """File and line of the first line of code."""
    words: tuple[str, ...]
    """What stands after the fence: the language, then our own words."""
    code: str
    """The text between the fences."""


def blocks() -> list[Block]:
    """Return all fenced blocks of README.md and docs/."""
    found: list[Block] = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if not path.exists():  # the documents stay behind when the installed package is tested
            continue
        text = path.read_text()
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(f"{path.relative_to(ROOT)}:{line}", tuple(match[1].split()), match[2]))
    return found


PYTHON = [block for block in blocks() if block.words[:1] == ("python",)]


def missing_names(tree: ast.Module) -> list[str]:
    """Return what a piece of code imports from `remit` and would not find there."""
    missing: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "remit":
            module = importlib.import_module(node.module or "")
            missing.extend(f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "remit"]
            missing.extend(name for name in names if importlib.util.find_spec(name) is None)
    return missing


@pytest.mark.checkout
@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in PYTHON])
def test_python_in_documents_compiles_and_finds_its_names(block: Block) -> None:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(block.code, block.where, "exec", flags=flags)
    assert isinstance(tree, ast.Module)
    assert not missing_names(tree)


def executed() -> list[object]:
    """Return the blocks to execute, those on Ray marked as such."""
    return [
        pytest.param(block, id=block.where, marks=[pytest.mark.ray] if "ray" in block.words else [])
        for block in PYTHON
        if "run" in block.words
    ]


@pytest.mark.checkout
@pytest.mark.parametrize("block", executed())
def test_python_in_documents_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.code)
    # The folder of the sources may be on PYTHONPATH; a relative entry would not survive the change of folder.
    path = os.pathsep.join(str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path} if os.environ.get("PYTHONPATH") else None,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_compiles_and_finds_its_names(path: Path) -> None:
    assert not missing_names(ast.parse(path.read_text(), str(path)))


def modules_with_examples() -> list[str]:
    """Return the modules of `remit` whose text holds a `>>>` example."""
    names: list[str] = []
    for found in pkgutil.walk_packages(remit.__path__, "remit."):
        spec = importlib.util.find_spec(found.name)
        if spec is not None and spec.origin is not None and ">>> " in Path(spec.origin).read_text():
            names.append(found.name)
    return names


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_hold(name: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert result.failed == 0
    assert result.attempted > 0
