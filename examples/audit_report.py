"""From what the audit's topics found to the text of `audit.md`: the summary first, then the places."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

LANGUAGES = {
    ".py": "Python", ".pyi": "Python", ".md": "Markdown", ".rst": "reStructuredText", ".js": "JavaScript",
    ".ts": "TypeScript", ".tsx": "TypeScript", ".go": "Go", ".rs": "Rust", ".c": "C", ".h": "C", ".cc": "C++",
    ".cpp": "C++", ".hpp": "C++", ".java": "Java", ".rb": "Ruby", ".sh": "Shell", ".toml": "TOML", ".yaml": "YAML",
    ".yml": "YAML", ".json": "JSON", ".html": "HTML", ".css": "CSS", ".sql": "SQL", ".txt": "Text",
}  # fmt: skip

LONG_FUNCTION = 60
"""Lines from which a function is worth splitting."""
LONG_FILE = 600
"""Lines from which a Python file is worth splitting."""
MANY_BRANCHES = 15
"""Branches from which a function is hard to test."""


def compose(name: str, day: str, found: dict[str, Any]) -> str:
    """Return the report.

    Args:
        name: of the workspace.
        day: when, for the title.
        found: results of the topics by name of their run.
    """
    files = found["inventory"]["files"]
    modules = found["python"]["modules"]
    functions = [{**one, "path": module["path"]} for module in modules for one in module["functions"]]
    marks, hygiene = (found[f"searches[{what}]"]["found"] for what in ("marks", "hygiene"))
    history, blocks = found["history"], found["repeats"]["blocks"]
    sections = [
        f"# Audit of {name}, {day}",
        summary(files, modules, functions, marks, hygiene, blocks, history),
        first_looks(files, modules, functions, hygiene, blocks, history),
        size(files),
        code(modules, functions),
        dependencies(modules),
        untested(modules),
        repeated(blocks),
        places("Marks", "Notes that people left for later.", marks),
        places("Text hygiene", "Markdown and data files are left out.", hygiene),
        past(history, files),
        noted(found),
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


# -- the top ----------------------------------------------------------------------------------------------------------


def summary(
    files: list[Any],
    modules: list[Any],
    functions: list[Any],
    marks: dict[str, Any],
    hygiene: dict[str, Any],
    blocks: list[Any],
    history: dict[str, Any],
) -> str:
    """Return the figures that say what kind of checkout this is."""
    lines = sum(entry["lines"] for entry in files)
    share = Counter[str]()
    for entry in files:
        share[language(entry["path"])] += entry["lines"]
    main = ", ".join(f"{label} {percent(count, lines)}" for label, count in share.most_common(3))
    said = [f"- **{many(len(files), 'file')}, {many(lines, 'line')}**: {main}."]
    if modules:
        broken = [module for module in modules if "error" in module]
        public = [one for one in functions if one["public"] and not is_test(one["path"])]
        tests = [one for one in functions if is_test(one["path"]) and one["name"].split(".")[-1].startswith("test")]
        said.append(
            f"- **Python**: {many(len(modules), 'module')}, {many(len(functions), 'function')}, "
            f"{many(len(tests), 'test')}; {many(len(broken), 'file')} with syntax errors."
        )
        documented = sum(one["documented"] for one in public)
        annotated = sum(one["annotated"] for one in public)
        said.append(
            f"- **Public functions** outside of tests ({len(public):,}): {percent(documented, len(public))} with a "
            f"docstring, {percent(annotated, len(public))} fully annotated."
        )
    said.append("- **Marks**: " + ", ".join(f"{one['count']:,} {label}" for label, one in marks.items()) + ".")
    odd = [f"{one['count']:,} {label}" for label, one in hygiene.items() if one["count"]]
    said.append("- **Text hygiene**: " + (", ".join(odd) if odd else "nothing found") + ".")
    said.append(f"- **Repeated code**: {many(len(blocks), 'block')} of eight lines or more in several places.")
    if history["commits"]:
        hottest = ", ".join(f"`{path}`" for path, _, _ in alive(history, files)[:3])
        said.append(
            f"- **History**: {many(history['commits'], 'commit')} by {many(len(history['authors']), 'author')}; "
            f"most often changed: {hottest or 'nothing that is still there'}; "
            f"{many(history['uncommitted'], 'file')} not committed."
        )
    return "## Summary\n\n" + "\n".join(said)


def first_looks(
    files: list[Any],
    modules: list[Any],
    functions: list[Any],
    hygiene: dict[str, Any],
    blocks: list[Any],
    history: dict[str, Any],
) -> str:
    """Return what to look at first, the gravest first."""
    broken = [(module["path"], module["error"]) for module in modules if "error" in module]
    said = [f"`{path}:{error['line']}` does not parse: {error['text'].rstrip('.')}." for path, error in broken[:5]]
    if len(broken) > 5:
        said.append(f"{len(broken) - 5:,} more files do not parse.")
    for label in ("private keys", "merge conflict marks", "debugger left in"):
        if hygiene[label]["count"]:
            where = ", ".join(f"`{place_of(line)}`" for line in hygiene[label]["places"][:5])
            said.append(f"{label.capitalize()}: {where}.")
    changed = {path: count for path, count, _ in history.get("changed", [])}
    hard = sorted(
        (one for one in functions if one["branches"] >= MANY_BRANCHES and not is_test(one["path"])),
        key=lambda one: -one["branches"] * (1 + changed.get(one["path"], 0)),
    )
    for one in hard[:3]:
        often = f", in a file that {many(changed[one['path']], 'commit')} touched" if one["path"] in changed else ""
        said.append(f"`{one['name']}` ({at(one)}) has {one['branches']} branches{often}.")
    long_ones = [one for one in functions if one["lines"] >= LONG_FUNCTION]
    if long_ones:
        longest = max(long_ones, key=lambda one: one["lines"])
        said.append(
            f"{many(len(long_ones), 'function')} of {LONG_FUNCTION} lines or more; the longest is "
            f"`{longest['name']}` ({at(longest)}, {longest['lines']} lines)."
        )
    bulky = [entry for entry in files if entry["path"].endswith(".py") and entry["lines"] >= LONG_FILE]
    if bulky:
        names = ", ".join(f"`{entry['path']}` ({entry['lines']:,})" for entry in largest(bulky, "lines", 5))
        said.append(f"Python files of {LONG_FILE} lines or more: {names}.")
    if blocks:
        said.append(f"The largest repeated block has {blocks[0]['lines']} lines: {spots(blocks[0])}.")
    return "## Where to look first\n\n" + (
        "\n".join(f"{number}. {text}" for number, text in enumerate(said, 1)) or "Nothing stands out."
    )


# -- sections ---------------------------------------------------------------------------------------------------------


def size(files: list[Any]) -> str:
    """Return languages and the largest files."""
    by_language: dict[str, list[Any]] = defaultdict(list)
    for entry in files:
        by_language[language(entry["path"])].append(entry)
    ordered = sorted(by_language.items(), key=lambda item: -sum(entry["lines"] for entry in item[1]))
    total = sum(entry["lines"] for entry in files)
    rows = [
        (label, len(group), sum(e["lines"] for e in group), percent(sum(e["lines"] for e in group), total))
        for label, group in ordered[:12]
    ]
    folders = Counter[str]()
    for entry in files:
        folders[entry["path"].split("/")[0] + "/" if "/" in entry["path"] else "(top)"] += entry["lines"]
    return (
        "## Size\n\n"
        + table(("language", "files", "lines", "share"), rows)
        + "\n\nBy folder: "
        + ", ".join(f"`{folder}` {count:,}" for folder, count in folders.most_common(10))
        + ".\n\nLargest files:\n\n"
        + table(
            ("file", "lines", "kB"),
            [(f"`{e['path']}`", e["lines"], round(e["bytes"] / 1000, 1)) for e in largest(files, "lines", 10)],
        )
    )


def code(modules: list[Any], functions: list[Any]) -> str:
    """Return the measures of Python functions and doubtful places."""
    if not modules:
        return ""
    parts = ["## Python"]
    parts.append("Longest functions:\n\n" + function_table(largest(functions, "lines", 10)))
    parts.append(
        "Most branches (`if`, loops, `except`, `and`/`or`):\n\n" + function_table(largest(functions, "branches", 10))
    )
    public = [one for one in functions if one["public"] and not is_test(one["path"])]
    for label, key in (("without a docstring", "documented"), ("not fully annotated", "annotated")):
        missing = [one for one in public if not one[key]]
        if missing:
            by_file = Counter(one["path"] for one in missing)
            listed = ", ".join(f"`{path}` ({count})" for path, count in by_file.most_common(10))
            parts.append(f"Public functions {label}, outside of tests: {len(missing):,}. Most of them in {listed}.")
    bare = [
        m["path"]
        for m in modules
        if "error" not in m and not m["documented"] and not is_test(m["path"]) and m["functions"]
    ]
    if bare:
        parts.append(
            f"Modules without a docstring: {len(bare):,}, such as " + ", ".join(f"`{p}`" for p in bare[:8]) + "."
        )
    doubts = [(module["path"], doubt) for module in modules for doubt in module["doubts"]]
    if doubts:
        listed = "\n".join(f"- `{path}:{doubt['line']}`: {doubt['what']}" for path, doubt in doubts[:25])
        more = f"\n- and {len(doubts) - 25:,} more" if len(doubts) > 25 else ""
        parts.append(f"Places to ask about ({len(doubts):,}):\n\n{listed}{more}")
    return "\n\n".join(parts)


def dependencies(modules: list[Any]) -> str:
    """Return which modules and libraries the rest leans on."""
    if not modules:
        return ""
    own = {dotted(module["path"]): module["path"] for module in modules}
    # A module may be named from any source root above it.
    known = {ending: path for name, path in own.items() for ending in endings(name)}
    roots = {name.split(".")[0] for name in known}
    inside, outside = Counter[str](), defaultdict[str, set[str]](set)
    for module in modules:
        for name in set(module["imports"]):
            if name in known:
                inside[known[name]] += known[name] != module["path"]
            elif name.split(".")[0] not in roots | sys.stdlib_module_names | {"", "__future__"}:
                outside[name.split(".")[0]].add(module["path"])
    libraries = sorted(outside.items(), key=lambda item: -len(item[1]))
    parts = ["## Imports"]
    if libraries:
        used = [
            (name, len(where), min(where, key=lambda path: (is_test(path), path))) for name, where in libraries[:20]
        ]
        listed = [(f"`{name}`", count, f"`{path}`") for name, count, path in used]
        parts.append(table(("library", "files", "for example"), listed))
    if inside:
        rows = [(f"`{path}`", count) for path, count in inside.most_common(10)]
        parts.append(
            "Modules that most others import; a change there reaches far:\n\n" + table(("module", "importers"), rows)
        )
    return "\n\n".join(parts)


def untested(modules: list[Any]) -> str:
    """Return modules that no test imports by name."""
    tests = [module for module in modules if is_test(module["path"])]
    if not tests:
        return "## Tests\n\nNo Python test was found." if modules else ""
    imports = {name for module in tests for name in module["imports"]}
    missing = [
        (sum(one["lines"] for one in module["functions"]), module["path"])
        for module in modules
        if module["functions"] and not is_test(module["path"]) and imports.isdisjoint(endings(dotted(module["path"])))
    ]
    lines = sum(count for count, _ in missing)
    rows = [(f"`{path}`", count) for count, path in sorted(missing, reverse=True)[:15]]
    if not missing:
        return ""
    which = f"{many(len(missing), 'module')} directly ({many(lines, 'line')} of functions)"
    return f"## Tests\n\nNo test imports these {which}; others may reach them:\n\n" + table(("module", "lines"), rows)


def repeated(blocks: list[Any]) -> str:
    """Return the blocks that stand in several places."""
    if not blocks:
        return ""
    rows = [(block["lines"], spots(block), f"`{cell(block['begins'])[:60]}`") for block in blocks[:15]]
    return "## Repeated code\n\n" + table(("lines", "places", "begins with"), rows)


def places(title: str, remark: str, found: dict[str, Any]) -> str:
    """Return counts of a search and the first places of each."""
    if not any(one["count"] for one in found.values()):
        return f"## {title}\n\nNothing found. {remark}"
    rows = [(label, one["count"], one["files"]) for label, one in found.items()]
    parts = [f"## {title}\n\n{remark}", table(("what", "lines", "files"), rows)]
    for label, one in found.items():
        if one["count"]:
            # What looks like a key is named by its place alone.
            shown = [
                f"- `{place_of(line)}`" + (f" {cell(line.split(':', 2)[2])[:110]}" if label.isupper() else "")
                for line in one["places"][:12]
            ]
            more = [f"- and {one['count'] - 12:,} more"] if one["count"] > 12 else []
            parts.append(f"{label}:\n\n" + "\n".join(shown + more))
    return "\n\n".join(parts)


def past(history: dict[str, Any], files: list[Any]) -> str:
    """Return what the history says about where the work goes on."""
    if not history["commits"]:
        return ""
    lines = {entry["path"]: entry["lines"] for entry in files}
    parts = ["## History"]
    parts.append(
        "Hot spots, files by how often they changed times their length:\n\n"
        + table(
            ("file", "commits", "lines changed", "lines now"),
            [(f"`{path}`", count, changed, lines[path]) for path, count, changed in alive(history, files)[:12]],
        )
    )
    rows = [(f"`{c['id']}`", c["day"], c["lines"], c["files"], cell(c["subject"])[:70]) for c in history["largest"]]
    parts.append("Largest commits:\n\n" + table(("commit", "day", "lines", "files", "subject"), rows))
    people = ", ".join(f"{cell(name)} ({count})" for count, name in history["authors"][:8])
    parts.append(
        f"Authors: {people}.\n\nBy month: " + ", ".join(f"{month} {count}" for month, count in history["months"]) + "."
    )
    parts.append(f"Branches: {len(history['branches'])}. Latest tags: {', '.join(history['tags']) or 'none'}.")
    return "\n\n".join(parts)


def noted(found: dict[str, Any]) -> str:
    """Return what could not be looked at."""
    notes = [note for one in found.values() for note in one["notes"]]
    return "## What was not looked at\n\n" + "\n".join(f"- {cell(note)[:300]}" for note in notes) if notes else ""


# -- small parts ------------------------------------------------------------------------------------------------------


def alive(history: dict[str, Any], files: list[Any]) -> list[Any]:
    """Return the changed files that are still there, hottest first."""
    lines = {entry["path"]: entry["lines"] for entry in files}
    return sorted((one for one in history["changed"] if one[0] in lines), key=lambda one: -one[1] * lines[one[0]])


def endings(name: str) -> list[str]:
    """Return a dotted name and what is left of it when its first parts are taken off."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers stand to the right."""
    listed = list(rows)
    number = [
        all(isinstance(row[place], (int, float)) for row in listed) and bool(listed) for place in range(len(heads))
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join("---:" if right else "---" for right in number) + "|"]
    lines += [
        "| " + " | ".join(f"{v:,}" if isinstance(v, (int, float)) else str(v) for v in row) + " |" for row in listed
    ]
    return "\n".join(lines)


def function_table(functions: Sequence[Any]) -> str:
    """Return a table of functions."""
    rows = [(f"`{one['name']}`", at(one), one["lines"], one["branches"], one["parameters"]) for one in functions]
    return table(("function", "place", "lines", "branches", "parameters"), rows)


def largest(entries: Sequence[Any], key: str, count: int) -> list[Any]:
    """Return the entries with the largest values."""
    return sorted(entries, key=lambda entry: -entry[key])[:count]


def language(path: str) -> str:
    """Return the language of a file by its suffix."""
    return LANGUAGES.get(PurePosixPath(path).suffix.lower(), "other")


def is_test(path: str) -> bool:
    """Tell whether a file holds tests or what they need."""
    parts = PurePosixPath(path).parts
    return parts[-1].startswith("test_") or parts[-1] == "conftest.py" or bool({"test", "tests"} & set(parts[:-1]))


def dotted(path: str) -> str:
    """Return the module name of a file, from the top of the checkout."""
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def at(one: dict[str, Any]) -> str:
    """Return file and line of a function."""
    return f"`{one['path']}:{one['line']}`"


def place_of(line: str) -> str:
    """Return file and line of what grep printed."""
    return ":".join(line.split(":", 2)[:2])


def spots(block: dict[str, Any]) -> str:
    """Return the places of a block, the first few."""
    shown = ", ".join(f"`{place}`" for place in block["places"][:3])
    return shown + (f" and {len(block['places']) - 3} more" if len(block["places"]) > 3 else "")


def many(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def percent(part: int, whole: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def cell(text: str) -> str:
    """Return a text that cannot break a table."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())
