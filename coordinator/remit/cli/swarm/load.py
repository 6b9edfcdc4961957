"""From the text of a swarm file to its model, with every mistake told by file, line and field.

**Invariants**

1. Whatever the text is, only `SwarmFileError` comes out.
2. The text is data: no tag makes an object, no alias makes the file grow beyond
   a bound, and plain words mean what YAML 1.2 says (`no` is a word, `012` is 12).
3. All mistakes are told at once, in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import yaml
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from remit.cli.swarm.model import (
    AgentSpec,
    ApprovalSpec,
    EachSpec,
    FieldPath,
    Finding,
    LimitsSpec,
    RunSpec,
    SwarmFile,
    suggestion,
)
from remit.cli.swarm.plan import Parts
from remit.core.errors import SwarmFileError

__all__ = ["MAX_FILE_BYTES", "load_swarm_file", "parse_swarm"]

MAX_FILE_BYTES = 1024 * 1024
"""Largest file that is read; a swarm that needs more should use `each`."""

_MAX_VALUES = 200_000
"""Most values a file may hold once its aliases are written out."""
_MAX_DEPTH = 64
_MAX_FINDINGS = 100
"""Most mistakes that are looked for; nobody reads more, and suggestions take time."""
_MAX_SHOWN_CHARS = 60

_LOADER: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Only its parser is used; libyaml's is ten times as fast where PyYAML was built with it."""

# Source: https://yaml.org/spec/1.2.2/#51-character-set
_NOT_ALLOWED = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_Model = TypeVar("_Model", bound=BaseModel)

# The core schema, without .inf and .nan, which no JSON value can be.
# Source: https://yaml.org/spec/1.2.2/#1032-tag-resolution
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LOSES_ZERO = re.compile(r"[-+]?[0-9]*\.[0-9]+0")
_TAG = "tag:yaml.org,2002:"

_WRITTEN_TEXT: tuple[tuple[str, ...], ...] = (
    ("agents", "*", "command", "*"),
    ("agents", "*", "env", "*"),
    ("runs", "*", "each", "lines", "*"),
)
"""Places whose plain numbers and truth values are taken as the text they are written as."""


def load_swarm_file(path: Path) -> SwarmFile:
    """Read and check a swarm file.

    Args:
        path: the file; messages name it as given here.

    Raises:
        SwarmFileError: the file cannot be read or does not hold. `problems` is
            a tuple of texts, one a mistake, each with file, line and field.
    """
    label = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise _refusal([f"{label}: is a folder, not a swarm file"]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise _refusal([f"{label}: cannot be read: {reason}"]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise _refusal([f"{label}: is larger than {MAX_FILE_BYTES:,} bytes; use 'each' instead of writing out runs"])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refusal([f"{label}:{line}: is not UTF-8 text; save the file in that encoding"]) from error
    return parse_swarm(text, label=label)


def parse_swarm(text: str, *, label: str = "swarm.yaml") -> SwarmFile:
    """Check the text of a swarm file.

    Args:
        text: YAML.
        label: what messages call the file; without its ending, the swarm's name if it has none.

    Raises:
        SwarmFileError: as for `load_swarm_file`.
    """
    reader = _Reader()
    try:
        root = reader.read(text)
    except _Unreadable as error:
        place = f"{label}:{error.line}" if error.line else label
        raise _refusal([f"{place}: {error.text}"]) from error
    document = _Document(label, root)
    whole = _plain(root, _WRITTEN_TEXT)
    if not isinstance(whole, dict):
        raise _refusal([f"{document.describe(())}: must be a mapping with 'agents' and 'runs'"])
    data = {key: value for key, value in whole.items() if not key.startswith("x-")}
    data.setdefault("name", Path(label).stem or "swarm")
    swarm, findings = _validate(data, document)
    refused = {finding.path for finding in reader.findings}  # one mistake, one sentence
    findings = [finding for finding in findings if finding.path not in refused]
    findings += [*reader.findings, *_lossy_numbers(document)]
    if swarm is None or findings:
        raise _refusal(document.in_order(findings))
    swarm.attach(document)
    return swarm


def _refusal(problems: list[str]) -> SwarmFileError:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return SwarmFileError(problems[0] + more, problems=tuple(problems))


class _Unreadable(Exception):
    """The text is no YAML that can be gone on with."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.line = line


class _Entry(NamedTuple):
    """A child, and the line of its key or of the item itself."""

    line: int
    node: _Node


_Plain = str | int | float | bool | None


@dataclass(slots=True)
class _Scalar:
    """One value without parts."""

    line: int
    value: _Plain
    written: str = ""
    """The value as it stands in the file."""
    size: int = 1
    depth: int = 1


@dataclass(slots=True)
class _Mapping:
    """A mapping. Aliases share nodes, so a tree of them stays small."""

    line: int
    entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    size: int = 1
    """Values in it, itself included, with aliases written out."""
    depth: int = 1
    """Levels in it, itself included."""


@dataclass(slots=True)
class _List:
    """A list; `size` and `depth` as those of a mapping."""

    line: int
    items: list[_Entry] = field(default_factory=list[_Entry])
    size: int = 1
    depth: int = 1


_Node = _Scalar | _Mapping | _List


@dataclass(slots=True)
class _Frame:
    """A mapping or list that is still open."""

    node: _Mapping | _List
    anchor: str | None
    path: FieldPath
    key: str | None = None
    key_line: int = 0
    repeated: bool = False
    merged: list[_Mapping] = field(default_factory=list[_Mapping])

    @property
    def wants_key(self) -> bool:
        """Whether the next value is a key."""
        return isinstance(self.node, _Mapping) and self.key is None


class _Reader:
    """Build nodes from the events of the YAML parser, without recursion.

    Composing by events bounds depth and aliases before anything is built and
    keeps the line of each key, which PyYAML's own constructors drop.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._anchors: dict[str, _Node | None] = {}
        self._open: list[_Frame] = []
        self._root: _Node | None = None

    def read(self, text: str) -> _Node:
        """Return the one document of a text."""
        if odd := _NOT_ALLOWED.search(text):
            line = text.count("\n", 0, odd.start()) + 1
            raise _Unreadable(f"holds a character that YAML does not allow (U+{ord(odd[0]):04X})", line)
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            raise _Unreadable(*_syntax_problem(error, text)) from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # escapes and directives out of range
            raise _Unreadable(f"is not valid YAML: {error}") from error
        if self._root is None:
            raise _Unreadable("is empty; a swarm file has 'agents' and 'runs'")
        return self._root

    def _take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 0
        match event:
            case yaml.AliasEvent():
                self._add(self._alias(event.anchor, line), line)
            case yaml.ScalarEvent():
                if self._open and self._open[-1].wants_key:
                    self._set_key(event.value, line)
                else:
                    node = self._scalar(event, line)
                    self._remember(event.anchor, node)
                    self._add(node, line)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._start(_Mapping(line) if isinstance(event, yaml.MappingStartEvent) else _List(line), event.anchor)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._end()
            case yaml.DocumentStartEvent() if self._root is not None:
                raise _Unreadable("holds more than one document; a swarm file is one", line)
            case _:
                pass

    def _start(self, node: _Mapping | _List, anchor: str | None) -> None:
        if self._open and self._open[-1].wants_key:
            raise _Unreadable("has a list or mapping as a key; keys are plain words", node.line)
        if len(self._open) == _MAX_DEPTH:
            raise _Unreadable(f"is nested deeper than {_MAX_DEPTH} levels", node.line)
        if anchor:
            self._anchors[anchor] = None  # open: an alias to it would contain itself
        self._open.append(_Frame(node, anchor, self._path()))

    def _end(self) -> None:
        frame = self._open.pop()
        node = frame.node
        if isinstance(node, _Mapping):
            for other in frame.merged:
                for key, entry in other.entries.items():
                    node.entries.setdefault(key, entry)
        children = [entry.node for entry in (node.entries.values() if isinstance(node, _Mapping) else node.items)]
        node.size = 1 + sum(child.size for child in children)
        node.depth = 1 + max((child.depth for child in children), default=0)
        if node.size > _MAX_VALUES:
            raise _Unreadable(f"grows to more than {_MAX_VALUES:,} values; use 'each' instead", node.line)
        if node.depth > _MAX_DEPTH:  # by aliases of aliases
            raise _Unreadable(f"is nested deeper than {_MAX_DEPTH} levels", node.line)
        self._remember(frame.anchor, node)
        self._add(node, node.line)

    def _path(self) -> FieldPath:
        """Return the place of the value that comes next."""
        if not self._open:
            return ()
        frame = self._open[-1]
        return (*frame.path, len(frame.node.items) if isinstance(frame.node, _List) else frame.key or "")

    def _remember(self, anchor: str | None, node: _Node) -> None:
        if anchor:
            self._anchors[anchor] = node

    def _alias(self, anchor: str | None, line: int) -> _Node:
        if anchor is None or anchor not in self._anchors:
            raise _Unreadable(f"refers to *{anchor}, and nothing above is marked &{anchor}", line)
        node = self._anchors[anchor]
        if node is None:
            raise _Unreadable(f"*{anchor} stands inside &{anchor} and would contain itself", line)
        return node

    def _set_key(self, key: str, line: int) -> None:
        frame = self._open[-1]
        assert isinstance(frame.node, _Mapping)
        if not _is_text(key):
            raise _Unreadable("has half of a surrogate pair in a key, which is no character", line)
        frame.key, frame.key_line = key, line
        first = frame.node.entries.get(key)
        frame.repeated = first is not None
        if first is not None:
            told = f"stands here twice, first on line {first.line} and again on line {line}"
            self.findings.append(Finding((*frame.path, key), told))

    def _add(self, node: _Node, line: int) -> None:
        """Give a finished value to what is open."""
        if not self._open:
            self._root = node
            return
        frame = self._open[-1]
        if isinstance(frame.node, _List):
            frame.node.items.append(_Entry(line, node))
        elif frame.key is None:
            raise _Unreadable("has an alias as a key; keys are plain words", line)
        elif frame.key == "<<":
            self._merge(frame, node)
        elif not frame.repeated:
            frame.node.entries[frame.key] = _Entry(frame.key_line, node)
        frame.key = None

    def _merge(self, frame: _Frame, node: _Node) -> None:
        """Take the entries of `<<`: a mapping, or a list of them, of which the first wins."""
        nodes = [entry.node for entry in node.items] if isinstance(node, _List) else [node]
        mappings = [one for one in nodes if isinstance(one, _Mapping)]
        if len(mappings) < len(nodes):
            self.findings.append(Finding(frame.path, "'<<' takes a mapping, or a list of mappings"))
        frame.merged += mappings

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> _Scalar:
        text = event.value
        tag = (event.tag or "").removeprefix(_TAG)
        problem = ""
        try:
            if not _is_text(text):
                problem = "holds half of a surrogate pair, which is no character"
            elif event.implicit[0] or tag in _KINDS:
                value = _resolved(text)
                if event.implicit[0] or isinstance(value, _KINDS[tag]):
                    return _Scalar(line, value, text)
            elif tag in ("", "!", "str"):
                return _Scalar(line, text, text)
        except (ValueError, OverflowError):
            problem = "is a number out of range; write it in quotes if it is text"
        self.findings.append(Finding(self._path(), problem or f"cannot have the tag {event.tag!r} here"))
        return _Scalar(line, "")


_KINDS: dict[str, type | tuple[type, ...]] = {"null": type(None), "bool": bool, "int": int, "float": (int, float)}
"""Tags that a value may carry if it is of that kind anyway."""


def _is_text(text: str) -> bool:
    """Tell whether a text is made of whole characters; escapes can make half ones."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _resolved(text: str) -> _Plain:
    """Return what a plain word means.

    Raises:
        OverflowError: a number without end.
        ValueError: more digits than Python reads.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise OverflowError(text)
        return value
    return text


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> tuple[str, int]:
    """Return one sentence on broken YAML, and its line."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"is not valid YAML: {error.problem or error}", 0
    source = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return "is indented with a tab; YAML takes spaces only", mark.line + 1
    context = f" ({error.context})" if error.context else ""
    return (
        f"is not valid YAML: {error.problem or 'cannot be read'}{context}, at column {mark.column + 1}",
        mark.line + 1,
    )


def _plain(node: _Node, texts: tuple[tuple[str, ...], ...] = ()) -> JsonValue:
    """Return a node as plain data; at the given places, scalars as they are written."""
    match node:
        case _Mapping():
            return {key: _plain(entry.node, _below(texts, key)) for key, entry in node.entries.items()}
        case _List():
            return [_plain(entry.node, _below(texts, "*")) for entry in node.items]
        case _Scalar():
            return node.written if () in texts and isinstance(node.value, int | float) else node.value


def _below(texts: tuple[tuple[str, ...], ...], key: str) -> tuple[tuple[str, ...], ...]:
    return tuple(place[1:] for place in texts if place and place[0] in ("*", key))


@dataclass(frozen=True, slots=True)
class _Document:
    """A file's name and nodes: tells lines."""

    label: str
    root: _Node

    def find(self, path: FieldPath) -> tuple[FieldPath, int, _Node]:
        """Return the part of a path that is there, its line, and its node."""
        node, line = self.root, self.root.line
        found: list[str | int] = []
        for part in path:
            entry: _Entry | None = None
            if isinstance(node, _Mapping) and isinstance(part, str):
                entry = node.entries.get(part)
            elif isinstance(node, _List) and isinstance(part, int) and part < len(node.items):
                entry = node.items[part]
            if entry is not None:  # parts that are not in the file are the model's own names
                line, node = entry
                found.append(part)
        return tuple(found), line, node

    def describe(self, path: FieldPath) -> str:
        """Return file, line and field of a place."""
        found, line, _ = self.find(path)
        shown = "".join(f"[{part}]" if isinstance(part, int) else f".{_shown_key(part)}" for part in found)
        return f"{self.label}:{line}" + (f": {shown.removeprefix('.')}" if shown else "")

    def in_order(self, findings: Iterable[Finding]) -> list[str]:
        """Return findings as texts in the order of the file, each once."""
        ordered = sorted(findings, key=lambda finding: self.find(finding.path)[1])
        return list(dict.fromkeys(f"{self.describe(path)}: {text}" for path, text in ordered))


def _shown_key(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]+", key) else repr(key)


def _validate(data: dict[str, JsonValue], document: _Document) -> tuple[SwarmFile | None, list[Finding]]:
    """Return the model, or None where its shape does not hold, and all that is wrong."""
    try:
        swarm = SwarmFile.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)[:_MAX_FINDINGS]
        found = [_shape_finding(detail, document) for detail in details]
        return None, [*found, *islice(_readable_parts(data).findings(), _MAX_FINDINGS)]
    return swarm, list(islice(Parts.of(swarm).findings(), _MAX_FINDINGS))


def _readable_parts(data: Mapping[str, JsonValue]) -> Parts:
    """Return the agents and runs that do hold, and the names of all."""
    agents, runs = data.get("agents"), data.get("runs")
    items = runs if isinstance(runs, list) else []
    names = [run.get("name") if isinstance(run, dict) else None for run in items]
    return Parts(
        agents={name: _attempt(AgentSpec, value) for name, value in agents.items()}
        if isinstance(agents, dict)
        else None,
        runs=[_attempt(RunSpec, run) for run in items],
        run_names=[name if isinstance(name, str) else None for name in names],
    )


def _attempt(kind: type[_Model], value: object) -> _Model | None:
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def _shape_finding(detail: ErrorDetails, document: _Document) -> Finding:
    """Say in our words what pydantic found."""
    location, value = detail["loc"], detail["input"]
    # Bounds of seconds are floats; people write whole numbers.
    context = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in detail.get("ctx", {}).items()
    }
    if detail["type"] == "missing":
        return Finding(location[:-1], f"the required field {str(location[-1])!r} is missing")
    if detail["type"] == "extra_forbidden":
        key = str(location[-1])
        fields = _fields_at(document.find(location)[0])
        return Finding(location, f"no such field; fields are {', '.join(fields)}{suggestion(key, fields)}")
    if "at" in context:
        at, items = cast("int", context["at"]), cast("list[object]", value)
        return Finding((*location, at), f"{detail['msg']}, not {_kind(items[at])}")
    known = cast("list[str]", re.findall(r"'([^']*)'", str(context.get("expected", ""))))
    template = _WORDING.get(detail["type"])
    text = template.format(**context) if template else detail["msg"][:1].lower() + detail["msg"][1:]
    said = f", not {_kind(value)}" if detail["type"] not in _SAYS_ALL else ""
    return Finding(location, text + said + (suggestion(str(value), known) if known else ""))


_SAYS_ALL = frozenset({"too_short", "string_too_short"})
_WORDING = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "enum": "must be {expected}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "model_type": "must be a mapping of fields",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
}
"""Pydantic's kinds of mistakes in the words of people who write YAML."""


def _fields_at(path: FieldPath) -> list[str]:
    """Return the fields that may stand beside the last part of a path."""
    match path:
        case (_,):
            kind: type[BaseModel] = SwarmFile
        case (*_, "limits", _):
            kind = LimitsSpec
        case (*_, "approvals", _, _):
            kind = ApprovalSpec
        case (*_, "each", _):
            kind = EachSpec
        case ("agents", *_):
            kind = AgentSpec
        case _:
            kind = RunSpec
    return [field.alias or name for name, field in kind.model_fields.items()]


def _kind(value: object) -> str:
    """Return what a value is, in words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {str(value)[:_MAX_SHOWN_CHARS]}"
        case str():
            return repr(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
        case list():
            return "a list"
        case _:
            return "a mapping"


def _lossy_numbers(document: _Document) -> Iterator[Finding]:
    """Yield values such as 3.10, which as numbers are not what they look like."""
    _, _, runs = document.find(("runs",))
    for position in range(len(runs.items) if isinstance(runs, _List) else 0):
        for name in ("with", "each"):
            path: FieldPath = ("runs", position, name)
            found, _, node = document.find(path)
            if found == path:
                yield from _lossy_below(node, path)


def _lossy_below(node: _Node, path: FieldPath) -> Iterator[Finding]:
    match node:
        case _Mapping():
            for key, entry in node.entries.items():
                yield from _lossy_below(entry.node, (*path, key))
        case _List():
            for position, entry in enumerate(node.items):
                yield from _lossy_below(entry.node, (*path, position))
        case _Scalar():
            if isinstance(node.value, float) and _LOSES_ZERO.fullmatch(node.written):
                read = f"{node.written} is read as the number {node.value}"
                yield Finding(path, f"{read}; write it in quotes if it is text, or without the last zero")
