"""The shape of a swarm file, and what can be said of it without looking at the workspace.

**Invariants**

1. Nothing is converted behind the writer's back: `"5"` is no number, `1` is no
   truth value, and a field nobody knows is refused.
2. A finding names a path in the file, so that whoever has the file can name
   the line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from remit.core.approvals import ApprovalRule
from remit.core.errors import InvalidArgument
from remit.core.limits import Limits
from remit.locks import Claim, exclusive, read, write
from remit.processes.template import CommandTemplate

__all__ = [
    "AFTER_FIELD",
    "AgentSpec",
    "ApprovalSpec",
    "EachSpec",
    "FieldPath",
    "Finding",
    "Isolation",
    "LimitsSpec",
    "OnFailure",
    "RunSpec",
    "Source",
    "SwarmFile",
    "known_names",
    "parse_claim",
    "suggestion",
]

AFTER_FIELD = "after"
"""Reserved field of commands: path of a JSON file with the results a run comes after."""

MAX_SECONDS = 366 * 24 * 3600
"""Longest span; anything above is a slip, and very large ones overflow the timers."""

_Item = TypeVar("_Item")

_SHOWN_NAMES = 10
_MAX_COMPARED = 1000
_COMMAND_ONLY = ("shell", "cwd", "env", "timeout_s", "grace_s", "ok_exit_codes")

FieldPath = tuple[str | int, ...]
"""Place in a file: keys and list positions from the top, such as `("runs", 1, "agent")`."""


class Finding(NamedTuple):
    """One thing that does not hold."""

    path: FieldPath
    """Where."""
    text: str
    """What, and what to do; without the place."""


class Source(Protocol):
    """Where a model was read from."""

    def describe(self, path: FieldPath) -> str:
        """Return file, line and field of a place, such as `audit.yaml:12: runs[1].agent`."""
        ...


class OnFailure(StrEnum):
    """What one failed run means for the runs that do not come after it."""

    CONTINUE = "continue"
    STOP = "stop"


class Isolation(StrEnum):
    """Whether a Python agent shares its Ray actor with others."""

    SHARED = "shared"
    ACTOR = "actor"


class PolicyAnswer(StrEnum):
    """What is answered to requests for approval of an action."""

    APPROVE = "approve"
    DENY = "deny"
    ASK = "ask"


_POLICIES = {"ask": PolicyAnswer.ASK, "auto": PolicyAnswer.APPROVE, "deny": PolicyAnswer.DENY}
"""Short forms of a policy: what is answered to everything."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known word, or the empty text."""
    close = difflib.get_close_matches(word, list(islice(known, _MAX_COMPARED)), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def known_names(names: Iterable[str]) -> str:
    """Return names for a message, shortened if there are many."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - _SHOWN_NAMES:,} more" if len(listed) > _SHOWN_NAMES else ""
    return (", ".join(listed[:_SHOWN_NAMES]) + more) if listed else "none"


def _texts(value: object) -> tuple[str, ...]:
    """Accept one text or a list of texts; name the position of what is neither."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise PydanticCustomError("texts", "must be a text or a list of texts that is not empty")
    for position, item in enumerate(cast("list[object]", items)):
        if not isinstance(item, str):
            raise PydanticCustomError("texts", "must be text", {"at": position})
    return tuple(cast("list[str]", items))


def _argv(value: object) -> tuple[str, ...]:
    """Accept a list of texts only: one text would have to be split by guessing."""
    if isinstance(value, str):
        raise PydanticCustomError("argv", "must be a list, one item an argument, such as [git, ls-files]")
    return _texts(value)


def _command(value: object) -> str | tuple[str, ...]:
    """Accept an argument list, or one text (which only holds with `shell: true`)."""
    return value if isinstance(value, str) else _texts(value)


def _not_empty(value: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Refuse an empty tuple; `min_length` would count only the items that hold."""
    if not value:
        raise PydanticCustomError("too_short", "must not be empty")
    return value


_TEXT_LIST: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TEXT_OR_LIST: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXT_LIST]}
_Texts = Annotated[tuple[str, ...], PlainValidator(_texts), WithJsonSchema(_TEXT_OR_LIST)]
_Argv = Annotated[tuple[str, ...], PlainValidator(_argv), WithJsonSchema(_TEXT_LIST)]
_Command = Annotated[str | tuple[str, ...], PlainValidator(_command), WithJsonSchema(_TEXT_OR_LIST)]
_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_Grace = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
_Count = Annotated[int, Field(ge=1)]
_Retries = Annotated[int, Field(ge=0, le=1000)]
_ExitCode = Annotated[int, Field(ge=0, le=255)]


def parse_claim(text: str) -> Claim:
    """Return the claim that a text such as `write src/{item}` makes, its fields not filled in.

    Raises:
        InvalidArgument: it is not of one of the forms.
    """
    mode, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if mode == "exclusive" and not rest:
        return exclusive()
    if mode not in ("read", "write") or not rest:
        raise InvalidArgument(
            f"must be 'write PATH', 'read PATH', 'write glob PATTERN', 'read glob PATTERN' or 'exclusive', not {text!r}"
        )
    make = read if mode == "read" else write
    word, _, pattern = rest.partition(" ")
    return make(glob=pattern.strip()) if word == "glob" and pattern.strip() else make(rest)


class _Spec(BaseModel):
    model_config = ConfigDict(
        allow_inf_nan=False, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class LimitsSpec(_Spec):
    """How deep, how wide and how many at once. What is left out is as on the level above."""

    max_depth: _Count | None = None
    """Levels of delegation below, from 1."""
    max_children: _Count | None = None
    """Runs that may be delegated here over the whole life."""
    max_concurrent: _Count | None = None
    """Runs below that may be at work at the same time."""
    tokens: _Count | None = None
    """Tokens that may be spent here and below; once they are, all of it is cancelled."""
    cost: Annotated[float, Field(gt=0, strict=False)] | None = None
    """The same in money."""

    def limits(self) -> Limits:
        """Return the same as the rest of the program knows it."""
        return Limits(
            max_depth=self.max_depth,
            max_children=self.max_children,
            max_concurrent=self.max_concurrent,
            tokens=self.tokens,
            cost=self.cost,
        )


class ApprovalSpec(_Spec):
    """What is answered to requests for approval of actions like this, without asking anybody."""

    action: Annotated[str, Field(min_length=1)]
    """Pattern for the whole action, as in shells (*, ?, [...]): `git push*`. Case matters."""
    answer: Annotated[PolicyAnswer, Field(strict=False)]
    """`approve`, `deny`, or `ask` a person. The first rule whose pattern matches counts."""
    reason: str | None = None
    """Told to whoever asked."""

    def rule(self) -> ApprovalRule:
        """Return the same as the rest of the program knows it."""
        return ApprovalRule(self.action, self.answer.value, self.reason or "")


def _policy(value: object) -> object:
    """Accept the short forms: one word is a rule for everything."""
    if isinstance(value, list):
        return cast("list[object]", value)
    if isinstance(value, str) and value in _POLICIES:
        return [{"action": "*", "answer": _POLICIES[value]}]
    words = " or ".join(map(repr, _POLICIES))
    raise PydanticCustomError("policy", "must be 'ask', 'auto', 'deny' or a list of rules", {"expected": words})


_Approvals = Annotated[
    tuple[ApprovalSpec, ...], Field(strict=False), BeforeValidator(_policy), AfterValidator(_not_empty)
]


class AgentSpec(_Spec):
    """One agent: a command line program (`command`) or a Python function (`python`)."""

    description: str | None = None
    """What the agent does, for people."""
    command: _Command | None = None
    """Program and arguments, one item an argument, with {fields} that a run's `with` fills.
    {after} is the path of a JSON file with the results the run comes after.
    Literal braces are written {{ and }}. With `shell: true`, one text for /bin/sh."""
    shell: bool | None = None
    """Run `command`, which is then one text, by /bin/sh. Values are quoted. Off by default."""
    cwd: str | None = None
    """Folder the command runs in, relative to the workspace, which is the default."""
    env: dict[str, str] | None = None
    """Environment variables the command gets on top of the inherited ones."""
    timeout_s: _Seconds | None = None
    """Seconds the command may take before it is stopped; unlimited by default."""
    grace_s: _Grace | None = None
    """Seconds between asking the command to end and killing it."""
    ok_exit_codes: Annotated[tuple[_ExitCode, ...], Field(strict=False), AfterValidator(_not_empty)] | None = None
    """Exit statuses that count as success; 0 alone by default."""
    python: str | None = None
    """Where the function is, as `module:function`. It gets `with` as keyword arguments."""
    isolation: Annotated[Isolation, Field(strict=False)] | None = None
    """Python only: `shared` puts many runs in one Ray actor, `actor` gives each its own."""
    deadline_s: _Seconds | None = None
    """Seconds a run of this agent may take in all, unless the run says otherwise."""
    retries: _Retries | None = None
    """Further attempts after a failed one, unless the run says otherwise; 0 by default."""

    def template(self) -> CommandTemplate | None:
        """Return the command's template; None for a Python agent.

        Raises:
            InvalidArgument: the template does not hold.
        """
        if self.command is None:
            return None
        return CommandTemplate(self.command, shell=bool(self.shell))

    def findings(self) -> Iterator[Finding]:
        """Yield what does not hold about this agent alone, by paths within it."""
        if self.command is None and self.python is None:
            yield Finding((), "needs either 'command' or 'python'")
        elif self.command is not None and self.python is not None:
            yield Finding(("python",), "'command' and 'python' exclude each other; make two agents of it")
        elif self.python is not None:
            yield from self._python_findings(self.python)
        else:
            yield from self._command_findings()

    def _python_findings(self, reference: str) -> Iterator[Finding]:
        module, colon, function = reference.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
            guess = ":".join(reference.rsplit(".", 1)) if not colon and "." in reference else "package.module:function"
            yield Finding(("python",), f"must be 'module:function', such as {guess!r}, not {reference!r}")
        for name in _COMMAND_ONLY:
            if getattr(self, name) is not None:
                yield Finding((name,), "is for agents with 'command'; this one has 'python'")

    def _command_findings(self) -> Iterator[Finding]:
        if self.isolation is not None:
            yield Finding(("isolation",), "is for agents with 'python'; this one has 'command'")
        if isinstance(self.command, str) and not self.shell:
            yield Finding(
                ("command",), "must be a list, one item an argument; for a text that a shell reads, add 'shell: true'"
            )
        else:
            try:
                self.template()
            except InvalidArgument as error:
                yield Finding(("command",), error.message)
        if self.cwd is not None and (outside := _not_inside(self.cwd)):
            yield Finding(("cwd",), outside)
        for name, value in (self.env or {}).items():
            if not name or "=" in name or "\0" in name + value:
                yield Finding(("env", name), "is no environment variable: no '=' in the name, no NUL anywhere")


class EachSpec(_Spec):
    """What a run is repeated for: one of `glob`, `list` and `lines`."""

    glob: _Texts | None = None
    """Files of the workspace, by one pattern or several: * and ? stay within a folder, ** goes
    down. A pattern that ends in / finds folders. Hidden ones and node_modules only if named."""
    exclude: _Texts | None = None
    """Patterns of what `glob` leaves out; one without / holds in every folder."""
    items: list[JsonValue] | None = Field(default=None, alias="list")
    """Any values."""
    lines: _Argv | None = None
    """Program and arguments, run in the workspace without a shell: one item a line it prints."""
    limit: _Count | None = None
    """At most so many items, the first ones."""
    item_name: str | None = Field(default=None, alias="as")
    """Name of the item in `with`, `item` by default. May stand beside `each` instead."""

    def findings(self) -> Iterator[Finding]:
        """Yield what does not hold about this alone, by paths within it."""
        forms = {"glob": self.glob, "list": self.items, "lines": self.lines}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            yield Finding((), f"needs exactly one of 'glob', 'list' and 'lines'; it has {known_names(given)}")
        if self.exclude is not None and self.glob is None:
            yield Finding(("exclude",), "goes with 'glob' only")
        for field, patterns in (("glob", self.glob), ("exclude", self.exclude)):
            for pattern in patterns or ():
                if problem := _bad_pattern(pattern):
                    yield Finding((field,), problem)
        if self.lines is not None and (not self.lines[0].strip() or "\0" in "".join(self.lines)):
            yield Finding(("lines",), "must begin with a program's name and hold no NUL")


def _each(value: object) -> object:
    """Accept the short forms: one text is a glob, a list is a list."""
    if isinstance(value, str):
        return {"glob": value}
    return {"list": cast("list[object]", value)} if isinstance(value, list) else value


class RunSpec(_Spec):
    """One run, or with `each` one run an item."""

    name: str
    """Name of the run, unique in the file; others come `after` it by this name."""
    agent: str
    """Name of the agent that does it."""
    description: str | None = None
    """What it is for, for people."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue], alias="with")
    """What the agent is given: a command's fields, a function's keyword arguments. In texts,
    {item} is the item of `each` ({item.key} a part of it); {{item}} stands for {item} itself."""
    each: Annotated[EachSpec, BeforeValidator(_each)] | None = None
    """Repeat the run for each of these; a text is short for `glob`, a list for `list`."""
    item_name: str | None = Field(default=None, alias="as")
    """Name of the item in `with`; `item` by default."""
    after: _Texts | None = None
    """Runs that must have succeeded first, by name; all of a repeated run's. Their results are given to this one."""
    deadline_s: _Seconds | None = None
    """Seconds from delegation until the run is stopped for good, waiting and retries included."""
    attempt_timeout_s: _Seconds | None = None
    """Seconds one attempt may take; then the next one begins, if `retries` are left."""
    retries: _Retries | None = None
    """Further attempts after a failed one; 0 by default."""
    claims: _Texts | None = None
    """Paths it holds from before it takes a slot until it has ended: `write PATH`, `read PATH`,
    `write glob PATTERN`, `read glob PATTERN`, or `exclusive` for the whole workspace. {item} as in `with`."""
    limits: LimitsSpec | None = None
    """Limits for what this run delegates itself."""
    approvals: _Approvals | None = None
    """What is answered to its requests for approval and to those of what it delegates: `ask`, `auto`, `deny`,
    or rules. It may narrow what the swarm's `approvals` allow, never widen it."""
    detached: bool = False
    """Go on when the swarm is cancelled."""

    @property
    def item(self) -> str:
        """Name of the item in `with`."""
        return self.item_name or (self.each.item_name if self.each else None) or "item"

    def findings(self) -> Iterator[Finding]:
        """Yield what does not hold about this run alone, by paths within it."""
        inner = self.each.item_name if self.each else None
        if self.item_name is not None and self.each is None:
            yield Finding(("as",), "names the item of 'each', and this run has no 'each'")
        elif self.item_name is not None and inner not in (None, self.item_name):
            yield Finding(("as",), f"says {self.item_name!r}, and 'as' in 'each' says {inner!r}; keep one")
        if not self.item.isidentifier() or self.item == AFTER_FIELD:
            place: FieldPath = ("as",) if self.item_name is not None else ("each", "as")
            yield Finding(place, f"must be a plain name other than {AFTER_FIELD!r}, not {self.item!r}")
        if self.each is not None:
            yield from (Finding(("each", *path), text) for path, text in self.each.findings())
        for position, text in enumerate(self.claims or ()):
            try:
                parse_claim(text)
            except InvalidArgument as error:
                yield Finding(("claims", position), error.message)


class SwarmFile(_Spec):
    """A swarm: agents, and the runs they do."""

    version: int = Field(default=1, ge=1, le=1)
    """Version of this format; 1."""
    name: str | None = None
    """Name of the turn; the file's name by default."""
    description: str | None = None
    """What the swarm is for, for people."""
    deadline_s: _Seconds | None = None
    """Seconds until everything is stopped; unlimited by default."""
    limits: LimitsSpec | None = None
    """Limits for the whole swarm."""
    approvals: _Approvals | None = None
    """What is answered to requests for approval: `ask` (people, the default), `auto` (approve everything), `deny`, or
    rules. `remit run --approvals` takes its place."""
    on_failure: Annotated[OnFailure, Field(strict=False)] = OnFailure.CONTINUE
    """`stop` cancels all the rest when a run fails; `continue` only blocks what comes after it."""
    agents: dict[str, AgentSpec] = Field(min_length=1)
    """Agents by name."""
    runs: Annotated[tuple[RunSpec, ...], Field(strict=False), AfterValidator(_not_empty)]
    """What is to be done. Order in the file means nothing; `after` does."""

    _source: Source | None = PrivateAttr(default=None)

    def attach(self, source: Source) -> None:
        """Remember where the model was read from, for messages."""
        self._source = source

    def describe(self, path: FieldPath) -> str:
        """Return file, line and field of a place as far as they are known."""
        return self._source.describe(path) if self._source else ".".join(map(str, path))


def _not_inside(path: str) -> str:
    """Return why a path cannot lie in the workspace, or the empty text."""
    if not path or "\0" in path:
        return "must be a path"
    if path.startswith(("/", "~/")) or ".." in PurePosixPath(path).parts:
        return f"must be relative to the workspace and stay inside it, not {path!r}"
    return ""


def _bad_pattern(pattern: str) -> str:
    """Return why a text is no usable pattern, or the empty text."""
    if set(pattern) & set("{}"):
        return f"braces are not expanded in {pattern!r}; write a list of patterns"
    return _not_inside(pattern)
