"""What a package re-exports is public, complete, documented and cheap to import."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import remit

PACKAGES = sorted(
    found.name
    for part in remit.__path__
    for found in pkgutil.iter_modules([part], "remit.")
    if found.ispkg and (Path(part) / found.name.removeprefix("remit.") / "__init__.py").exists()
)

LIGHT_PACKAGES = [name for name in PACKAGES if name != "remit.cli"]
"""The command line brings its own libraries; everything else must not."""

HEAVY = ("ray", "pydantic", "typer", "rich", "yaml", "opentelemetry.sdk")


def tree_of(package: str) -> ast.Module:
    """Return the syntax tree of a package's __init__ file, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(), spec.origin)


def public_names() -> list[tuple[str, str]]:
    """Return every (package, name) that the packages re-export, read from the text of `__all__`."""
    return [
        (package, name)
        for package in PACKAGES
        for node in tree_of(package).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]


def sorting_key(name: str) -> tuple[int, list[int | str]]:
    """Order as ruff does: constants, classes, the rest; numbers in names by value."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    return kind, [part for part in parts if part != ""]


def test_packages_are_found() -> None:
    assert "remit.core" in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_init_only_re_exports(package: str) -> None:
    for number, node in enumerate(tree_of(package).body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                pass
            case ast.ImportFrom(module=module) if module is not None and (
                module == "__future__" or module.startswith("remit.")
            ):
                pass
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                pass
            case _ if is_part_of_a_late_import(node):
                pass
            case _:
                pytest.fail(f"{package}: line {node.lineno} is no re-export of one of our modules")


def is_part_of_a_late_import(node: ast.stmt) -> bool:
    """Tell whether a statement is one of those by which a package imports a name when it is asked for."""
    match node:
        case ast.ImportFrom(module="importlib" | "typing"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
            return all(isinstance(n, ast.ImportFrom) and (n.module or "").startswith("remit.") for n in body)
        case ast.Assign(targets=[ast.Name(id="_PLACES")]) | ast.FunctionDef(name="__getattr__"):
            return True
    return False


def imports_of(body: list[ast.stmt]) -> dict[str, str]:
    """Return each name that statements import from us, and the module that it comes from."""
    return {
        alias.asname or alias.name: node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("remit.")
        for alias in node.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_exactly_what_is_re_exported(package: str) -> None:
    body = tree_of(package).body
    late = [found for node in body if isinstance(node, ast.If) for found in imports_of(node.body).items()]
    module = importlib.import_module(package)
    assert set(module.__all__) == {*imports_of(body), *dict(late)}
    assert getattr(module, "_PLACES", {}) == dict(late), "what is imported late is found where type checkers find it"
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
    assert not [name for name in module.__all__ if name.startswith("_")]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_without_doubles(package: str) -> None:
    names: list[str] = importlib.import_module(package).__all__
    assert names == sorted(set(names), key=sorting_key)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_what_it_is_for(package: str) -> None:
    assert (importlib.import_module(package).__doc__ or "").strip()


def undocumented_parts(owner: type[Any]) -> list[str]:
    """Return the public methods, properties and fields of a class that have no docstring."""
    missing: list[str] = []
    for name, part in vars(owner).items():
        if name.startswith("_"):
            continue
        plain = part.__func__ if isinstance(part, classmethod | staticmethod) else part
        if (inspect.isfunction(plain) or isinstance(plain, property)) and not (plain.__doc__ or "").strip():
            missing.append(name)
    if dataclasses.is_dataclass(owner):
        missing.extend(undocumented_fields(owner))
    return missing


def undocumented_fields(owner: type[Any]) -> list[str]:
    """Return the public fields of a dataclass that no literal follows and no section of its docstring names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    followed = {
        node.target.id
        for node, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }
    text = owner.__doc__ or ""
    own = [
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return [
        name
        for name in own
        if not name.startswith("_") and name not in followed and not re.search(rf"^\s*{name}:", text, re.MULTILINE)
    ]


@pytest.mark.parametrize(("package", "name"), public_names())
def test_every_public_name_is_documented(package: str, name: str) -> None:
    public = getattr(importlib.import_module(package), name)
    if not (inspect.isclass(public) or inspect.isroutine(public)):
        return  # a constant or an alias of a type; its module tells
    assert (inspect.getdoc(public) or "").strip(), f"{name} has no docstring"
    if inspect.isclass(public):
        assert not undocumented_parts(public)


@pytest.mark.parametrize(("package", "name"), public_names())
def test_public_signatures_are_annotated_and_keyword_only_past_two(package: str, name: str) -> None:
    public = getattr(importlib.import_module(package), name)
    if not inspect.isfunction(public):
        return
    parameters = inspect.signature(public).parameters.values()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert len(positional) <= 2, positional


def test_import_is_cheap() -> None:
    """Nothing heavy comes in with the library; opening a coordinator may load it later."""
    script = f"""
import importlib, json, sys
brought = {{}}
for package in {LIGHT_PACKAGES!r}:
    importlib.import_module(package)
    for heavy in {HEAVY!r}:
        if heavy in sys.modules:
            brought.setdefault(heavy, package)
print(json.dumps(brought))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def modules() -> dict[str, Path]:
    """Return every module of the installed `remit`; mapping of dotted name to file."""
    found: dict[str, Path] = {}
    for part in map(Path, remit.__path__):
        for path in part.rglob("*.py"):
            names = path.relative_to(part.parent).with_suffix("").parts
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are carried out when a module is imported, at any depth."""
    for node in body:
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=body):
                yield from run_at_import(body)
            case _:
                inner = (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))
                yield from run_at_import([statement for block in inner for statement in block])
                for handler in getattr(node, "handlers", []):
                    yield from run_at_import(handler.body)


def needed_by(module: str, known: Mapping[str, Path]) -> set[str]:
    """Return our modules that are loaded before a module's own statements: what it imports, with their packages.

    Packages that the module itself is in are left out: they need not be complete.
    """
    needed: set[str] = set()
    for node in run_at_import(ast.parse(known[module].read_text()).body):
        if isinstance(node, ast.Import):
            # It would be used as `remit.package.module`, which is there also if somebody else has imported it.
            assert not [alias for alias in node.names if alias.name.startswith("remit.")], f"{module}: {node.lineno}"
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        targets = {f"{node.module}.{alias.name}" for alias in node.names}
        if f"{module}.".startswith(f"{node.module}."):
            assert targets <= known.keys(), f"{module} takes a name from a package that it is in"
        for name in (node.module, *targets):
            parts = name.split(".")
            on_the_way = {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
            needed |= {place for place in on_the_way if not f"{module}.".startswith(f"{place}.")}
    return needed & known.keys()


def test_no_module_waits_for_one_that_waits_for_it() -> None:
    """Then each can be imported first and alone: a module that works only after another one hides a circle."""
    known = modules()
    needs = {module: needed_by(module, known) for module in known}
    assert sum(map(len, needs.values())) > len(known)
    list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError, which names the circle


@pytest.mark.slow  # what they need is imported anew each time
def test_modules_that_no_other_imports_can_be_imported_alone() -> None:
    known = modules()
    others = {needed for module in known for needed in needed_by(module, known)}
    first = sorted(known.keys() - others - {"remit.__main__", "remit.coordinator.ray_engine"})
    script = f"""
import importlib, sys
broken = []
for name in {[name for name in first if not name.endswith("__main__")]!r}:
    for loaded in [module for module in sys.modules if module.startswith("remit.")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        broken.append(f"{{name}}: {{error!r}}")
print("\\n".join(broken))
"""
    assert len(first) > 10
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
