"""The program that the audit's sub-agents run on files: prints what it finds as JSON.

    python audit_checks.py outline FILE...      one line of JSON for each Python file
    python audit_checks.py repeats FILE...      one JSON list of blocks that stand in several places

Standard library only; it reads and never writes or imports the files.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sys
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_LINES = 8
"""Lines of code that must be equal to count as repeated."""

MAX_FILE_BYTES = 1_000_000
"""Larger files are made by programs and tell nothing about who wrote the rest."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.BoolOp, ast.comprehension,
    ast.match_case,
)  # fmt: skip


def outline(path: str) -> dict[str, Any]:
    """Return what stands in one Python file: functions, imports, comments, doubtful places."""
    found: dict[str, Any] = {"path": path, "functions": [], "classes": 0, "imports": [], "doubts": []}
    try:
        source = read(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tree = ast.parse(source, path)
    except (SyntaxError, ValueError, OSError) as error:
        line = getattr(error, "lineno", None) or 1
        found["error"] = {"line": line, "text": str(getattr(error, "msg", None) or error)}
        return found
    found["doubts"] += [{"line": one.lineno, "what": f"{one.category.__name__}: {one.message}"} for one in caught]
    found["documented"] = ast.get_docstring(tree) is not None
    found["comments"] = count_comments(source)
    found["functions"] = [describe(function, owner) for function, owner in functions(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found["classes"] += 1
        found["imports"] += imported(node, path)
        found["doubts"] += [{"line": getattr(node, "lineno", 1), "what": what} for what in doubts(node)]
    return found


def read(path: str) -> str:
    """Return a source file's text by the encoding that it declares."""
    with tokenize.open(path) as file:
        return file.read()


def count_comments(source: str) -> int:
    """Return how many comments a text has."""
    try:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)
    except (tokenize.TokenError, SyntaxError):
        return 0


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[Function, str]]:
    """Yield all functions with the dotted name of what they stand in."""
    for node in ast.iter_child_nodes(tree):
        name = f"{owner}.{node.name}".lstrip(".") if isinstance(node, (ast.ClassDef, *FUNCTIONS)) else owner
        if isinstance(node, FUNCTIONS):
            yield node, owner
        yield from functions(node, name)


def describe(node: Function, owner: str) -> dict[str, Any]:
    """Return the measures of one function."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return {
        "name": f"{owner}.{node.name}".lstrip("."),
        "line": node.lineno,
        "lines": (node.end_lineno or node.lineno) - node.lineno + 1,
        "branches": sum(isinstance(inner, BRANCHES) for inner in ast.walk(node)),
        "parameters": len(named),
        "documented": ast.get_docstring(node) is not None,
        "annotated": node.returns is not None and all(argument.annotation for argument in named),
        "public": not any(part.startswith("_") for part in f"{owner}.{node.name}".lstrip(".").split(".")),
    }


def imported(node: ast.AST, path: str) -> list[str]:
    """Return the modules that one statement imports; relative ones by their path."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if not node.level:
        return [node.module or ""]
    folders = Path(path).parts[: -node.level]
    return [".".join([*folders, *(node.module or "").split(".")]).strip(".")]


def doubts(node: ast.AST) -> Iterator[str]:
    """Yield what a reviewer would ask about."""
    match node:
        case ast.ExceptHandler():
            yield from doubts_of_handler(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *(value for value in node.args.kw_defaults if value)]
            if any(isinstance(value, (ast.List, ast.Dict, ast.Set)) for value in defaults):
                yield f"`{node.name}` has a default that all calls share and may change"
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            yield f"`from {node.module} import *` hides where names come from"
        case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
            yield f"`{name}` runs a text as code"
        case ast.Call() if any(word.arg == "shell" and _is_true(word.value) for word in node.keywords):
            yield "`shell=True` lets a shell read the command"


def doubts_of_handler(node: ast.ExceptHandler) -> Iterator[str]:
    """Yield what is odd about an `except`."""
    kind = ast.unparse(node.type) if node.type else ""
    if not kind:
        yield "`except:` catches interrupts and exits as well"
    if kind in ("", "Exception", "BaseException") and all(isinstance(line, ast.Pass) for line in node.body):
        yield "an error of any kind is dropped without a word"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def repeats(paths: list[str]) -> list[dict[str, Any]]:
    """Return runs of equal lines that stand in more than one place, longest first."""
    texts = {path: list(code_lines(path)) for path in paths}
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, lines in texts.items():
        for start in range(len(lines) - BLOCK_LINES + 1):
            window = "\n".join(text for _, text in lines[start : start + BLOCK_LINES])
            places[hashlib.sha1(window.encode(), usedforsecurity=False).hexdigest()].append((path, start))
    found: list[dict[str, Any]] = []
    told: set[tuple[str, int]] = set()
    for spots in sorted((spots for spots in places.values() if len(spots) > 1), key=lambda spots: spots[0]):
        if any(spot in told for spot in spots):
            continue
        length = equal_length(texts, spots)
        told.update((path, start + offset) for path, start in spots for offset in range(length - BLOCK_LINES + 1))
        first, start = spots[0]
        found.append({
            "lines": length,
            "places": [f"{path}:{texts[path][start][0]}" for path, start in spots],
            "begins": texts[first][start][1],
        })  # fmt: skip
    return sorted(found, key=lambda block: -block["lines"] * (len(block["places"]) - 1))[:50]


def equal_length(texts: dict[str, list[tuple[int, str]]], spots: list[tuple[str, int]]) -> int:
    """Return for how many lines all spots go on alike."""
    length = BLOCK_LINES
    while True:
        following = [
            texts[path][start + length][1] if start + length < len(texts[path]) else None for path, start in spots
        ]
        if following[0] is None or len(set(following)) > 1:
            return length
        length += 1


def code_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that say something: no blanks, comments, brackets alone, imports."""
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            return
        text = Path(path).read_text("utf-8", "replace")
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if len(stripped) > 3 and not stripped.startswith(("#", "//", "*", "import ", "from ")):
            yield number, stripped


def main() -> None:
    what, paths = sys.argv[1], sys.argv[2:]
    if what == "outline":
        for path in paths:
            print(json.dumps(outline(path)))
    elif what == "repeats":
        print(json.dumps(repeats(paths)))
    else:
        sys.exit(f"audit_checks.py: {what!r} is neither 'outline' nor 'repeats'")


if __name__ == "__main__":
    main()
