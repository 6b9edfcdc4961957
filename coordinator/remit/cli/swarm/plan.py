"""From a swarm file to the runs it stands for: checked between each other, expanded, in order.

**Invariants**

1. Nothing is planned of a file with a mistake anywhere in it.
2. Each run stands behind all the runs it comes after.
3. The plan is plain data and knows nothing of who carries it out.
"""

from __future__ import annotations

import graphlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from remit.cli.swarm.expand import MAX_ITEMS, find_items, first_items
from remit.cli.swarm.model import (
    AFTER_FIELD,
    AgentSpec,
    FieldPath,
    Finding,
    Isolation,
    OnFailure,
    RunSpec,
    SwarmFile,
    known_names,
    parse_claim,
    suggestion,
)
from remit.core.approvals import ApprovalRule
from remit.core.errors import InvalidArgument, SwarmFileError
from remit.core.limits import Limits
from remit.locks import Claim, Workspace
from remit.processes.template import CommandTemplate

__all__ = ["Parts", "PlannedAgent", "PlannedCommand", "PlannedPython", "PlannedRun", "SwarmPlan", "build_plan"]

MAX_NAME_CHARS = 100
"""Longest name of an agent or run; longer ones do not fit the views."""

MAX_DEPENDENCIES = 1_000_000
"""Most pairs of a run and one it comes after; two repeated runs multiply."""

_MAX_LABEL_CHARS = 200
_FIELD = re.compile(r"\{\{(?P<literal>\w+(?:\.\w+)*)\}\}|\{(?P<field>\w+(?:\.\w+)*)\}")
"""A field, or the same with doubled braces. Other braces, such as those of JSON, are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCommand:
    """An agent that is a command line program."""

    name: str
    """Name in the file."""
    description: str
    """For people; may be empty."""
    command: str | tuple[str, ...]
    """Template of the argument list; one text with `shell`."""
    shell: bool
    """Whether /bin/sh reads the command."""
    cwd: str | None
    """Folder relative to the workspace; None for the workspace itself."""
    env: Mapping[str, str]
    """Variables on top of the inherited ones."""
    timeout_s: float | None
    """Seconds until the command is stopped; None for no limit."""
    grace_s: float | None
    """Seconds between asking and killing; None for the usual."""
    ok_exit_codes: tuple[int, ...]
    """Statuses that are a success."""
    reads_after: bool
    """Whether the template has the field {after}, which whoever carries out the plan fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPython:
    """An agent that is a Python function."""

    name: str
    """Name in the file."""
    description: str
    """For people; may be empty."""
    reference: str
    """`module:function`; not imported yet."""
    isolation: Isolation | None
    """None for what the function itself asks for."""


PlannedAgent = PlannedCommand | PlannedPython
"""An agent of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan."""

    name: str
    """Unique in the plan: the name in the file or, of a repeated run, `name[item]` or `name[0]`."""
    group: str
    """Name in the file."""
    agent: str
    """Name of the agent."""
    description: str
    """For people; may be empty."""
    arguments: Mapping[str, JsonValue]
    """What the agent is given, JSON values; {after} of a command is not among them."""
    after: tuple[str, ...]
    """Names of the runs that must have succeeded first. Repeated runs share one tuple."""
    deadline_s: float | None
    """Seconds from delegation to the last moment; None for no limit of its own."""
    attempt_timeout_s: float | None
    """Seconds one attempt may take; None for no limit."""
    retries: int
    """Further attempts after a failed one."""
    detached: bool
    """Whether it goes on when the swarm is cancelled."""
    claims: tuple[Claim, ...] = ()
    """What it holds from before it takes a slot until it has ended."""
    limits: Limits | None
    """Limits for what lies below it."""
    approvals: tuple[ApprovalRule, ...] = ()
    """What is answered to requests for approval of it and of what lies below it; empty for nothing of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPlan:
    """What a swarm file comes to in one workspace."""

    name: str
    """Name of the turn."""
    description: str
    """For people; may be empty."""
    deadline_s: float | None
    """Seconds until everything is stopped; None for no limit."""
    limits: Limits | None
    """Limits of the turn."""
    approvals: tuple[ApprovalRule, ...] = ()
    """What is answered to requests for approval; empty if the file does not say."""
    on_failure: OnFailure
    """What a failed run means for the others."""
    agents: tuple[PlannedAgent, ...]
    """All agents of the file, used or not, in its order."""
    runs: tuple[PlannedRun, ...]
    """Each behind what it comes after."""
    notes: tuple[str, ...]
    """What the user should know although it is no mistake, one sentence each."""


def build_plan(model: SwarmFile, workspace: Path) -> SwarmPlan:
    """Expand a swarm file in a workspace.

    Runs the commands of `lines`, and nothing else.

    Args:
        model: a checked swarm file.
        workspace: existing folder.

    Raises:
        InvalidArgument: the workspace is no folder.
        SwarmFileError: an `each` cannot be expanded, what it finds does not fit
            the agent, or the file does not hold.
    """
    if not workspace.is_dir():
        raise InvalidArgument(
            f"the workspace {str(workspace)!r} is not a folder; name an existing one", workspace=str(workspace)
        )
    problems = [f"{model.describe(path)}: {text}" for path, text in Parts.of(model).findings()]
    if problems:  # a model that was not made by the loader
        raise SwarmFileError(problems[0], problems=tuple(problems))
    runs, notes = _Planner(model, workspace).plan()
    used = {run.agent for run in model.runs}
    notes += [f"agent {name!r} is used by no run" for name in model.agents if name not in used]
    return SwarmPlan(
        name=model.name or "swarm",
        description=model.description or "",
        deadline_s=model.deadline_s,
        limits=model.limits.limits() if model.limits else None,
        approvals=tuple(spec.rule() for spec in model.approvals or ()),
        on_failure=model.on_failure,
        agents=tuple(_planned_agent(name, spec) for name, spec in model.agents.items()),
        runs=tuple(runs),
        notes=tuple(notes),
    )


def _planned_agent(name: str, spec: AgentSpec) -> PlannedAgent:
    description = spec.description or ""
    if spec.python is not None:
        return PlannedPython(name=name, description=description, reference=spec.python, isolation=spec.isolation)
    template = spec.template()
    assert template is not None
    assert spec.command is not None
    return PlannedCommand(
        name=name,
        description=description,
        command=spec.command,
        shell=bool(spec.shell),
        cwd=spec.cwd,
        env=dict(spec.env or {}),
        timeout_s=spec.timeout_s,
        grace_s=spec.grace_s,
        ok_exit_codes=spec.ok_exit_codes or (0,),
        reads_after=AFTER_FIELD in template.fields,
    )


class _Planner:
    """Expand the runs of one file, dependencies first."""

    def __init__(self, model: SwarmFile, workspace: Path) -> None:
        self._model = model
        self._workspace = workspace
        self._paths = Workspace(workspace)
        self._templates = {name: spec.template() for name, spec in model.agents.items()}
        self._names: dict[str, tuple[str, ...]] = {}
        self._notes: list[str] = []
        self._dependencies = 0

    def plan(self) -> tuple[list[PlannedRun], list[str]]:
        """Return the runs in order, and notes."""
        places = {run.name: position for position, run in enumerate(self._model.runs)}
        graph = {run.name: run.after or () for run in self._model.runs}
        runs: list[PlannedRun] = []
        for name in graphlib.TopologicalSorter(graph).static_order():
            runs += self._expand(self._model.runs[places[name]], ("runs", places[name]))
            if len(runs) > MAX_ITEMS:
                raise self._problem(("runs",), f"come to more than {MAX_ITEMS:,} runs")
        return runs, self._notes

    def _expand(self, run: RunSpec, path: FieldPath) -> list[PlannedRun]:
        items = self._items(run, path)
        after = tuple(name for group in dict.fromkeys(run.after or ()) for name in self._names[group])
        names = (run.name,) if run.each is None else _item_names(run.name, items)
        self._names[run.name] = names
        self._dependencies += len(after) * len(names)
        if self._dependencies > MAX_DEPENDENCIES:
            text = f"makes more than {MAX_DEPENDENCIES:,} dependencies; put one run between the two repeated ones"
            raise self._problem((*path, "after"), text)
        return [
            self._run(
                run,
                path,
                name=name,
                arguments=self._arguments(run, path, item),
                claims=self._claims(run, path, item),
                after=after,
            )
            for name, item in zip(names, items, strict=True)
        ]

    def _items(self, run: RunSpec, path: FieldPath) -> list[JsonValue]:
        if run.each is None:
            return [None]
        try:
            found = find_items(run.each, self._workspace)
            items = first_items(run.each, found)
        except SwarmFileError as error:
            raise self._problem((*path, "each", vars(error)["field"]), vars(error)["text"]) from error
        if not items:
            self._notes.append(f"run {run.name!r} has nothing to do: its 'each' found nothing, and counts as done")
        elif len(items) < len(found):
            self._notes.append(f"run {run.name!r} takes {len(items):,} of {len(found):,} items, as 'limit' says")
        return items

    def _run(
        self,
        run: RunSpec,
        path: FieldPath,
        *,
        name: str,
        arguments: dict[str, JsonValue],
        claims: tuple[Claim, ...],
        after: tuple[str, ...],
    ) -> PlannedRun:
        agent = self._model.agents[run.agent]
        return PlannedRun(
            name=name,
            group=run.name,
            agent=run.agent,
            description=run.description or "",
            arguments=arguments,
            after=after,
            deadline_s=run.deadline_s if run.deadline_s is not None else agent.deadline_s,
            attempt_timeout_s=run.attempt_timeout_s,
            retries=run.retries if run.retries is not None else agent.retries or 0,
            detached=run.detached,
            claims=claims,
            limits=run.limits.limits() if run.limits else None,
            approvals=tuple(spec.rule() for spec in run.approvals or ()),
        )

    def _arguments(self, run: RunSpec, path: FieldPath, item: JsonValue) -> dict[str, JsonValue]:
        """Return what one run is given, the item filled in and fitting the agent."""
        scope = {run.item: item} if run.each is not None else {}
        try:
            arguments = {name: _filled(value, scope) for name, value in run.arguments.items()}
            template = self._templates[run.agent]
            return arguments if template is None else _command_arguments(template, arguments, scope)
        except InvalidArgument as error:
            given = f" (with {run.item} = {_text(item)[:_MAX_LABEL_CHARS]})" if scope else ""
            raise self._problem((*path, "with"), error.message + given) from error

    def _claims(self, run: RunSpec, path: FieldPath, item: JsonValue) -> tuple[Claim, ...]:
        """Return what one run holds, the item filled in."""
        scope = {run.item: item} if run.each is not None else {}
        try:
            claims = tuple(_filled_claim(parse_claim(text), scope) for text in run.claims or ())
            if claims:  # looked at again when the run is delegated; here the place can be named
                self._paths.areas(claims)
            return claims
        except InvalidArgument as error:
            raise self._problem((*path, "claims"), error.message) from error

    def _problem(self, path: FieldPath, text: str) -> SwarmFileError:
        told = f"{self._model.describe(path)}: {text}"
        return SwarmFileError(told, problems=(told,))


def _command_arguments(
    template: CommandTemplate, arguments: Mapping[str, JsonValue], scope: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the values of a command's fields; the item fills the field of its own name.

    Raises:
        InvalidArgument: the command line cannot be made of them.
    """
    values = {name: value for name, value in scope.items() if name in template.fields} | dict(arguments)
    # A command sees texts only, and `True` is Python's spelling, not that of the file.
    values = {name: _text(value) if isinstance(value, bool) else value for name, value in values.items()}
    # A trial: whoever carries out the plan fills {after} in the same way.
    template.render(values | ({AFTER_FIELD: AFTER_FIELD} if AFTER_FIELD in template.fields else {}))
    return values


def _filled(value: JsonValue, scope: Mapping[str, JsonValue]) -> JsonValue:
    """Return a value of `with` with the item filled into its texts, however deep.

    A text that is nothing but one field becomes the item itself, type and all.
    """
    if isinstance(value, dict):
        return {key: _filled(below, scope) for key, below in value.items()}
    if isinstance(value, list):
        return [_filled(below, scope) for below in value]
    if not isinstance(value, str):
        return value
    whole = _FIELD.fullmatch(value)
    if whole and whole["field"]:
        return _looked_up(whole["field"], scope)
    return _FIELD.sub(
        lambda m: "{" + m["literal"] + "}" if m["literal"] else _text(_looked_up(m["field"], scope)), value
    )


def _filled_claim(claim: Claim, scope: Mapping[str, JsonValue]) -> Claim:
    """Return a claim with the item filled in; in a pattern its wildcards stand for themselves."""

    def fill(match: re.Match[str]) -> str:
        if match["literal"]:
            return "{" + match["literal"] + "}"
        text = _text(_looked_up(match["field"], scope))
        return "".join(f"[{char}]" if char in "*?[{" else char for char in text) if claim.is_glob else text

    return replace(claim, text=_FIELD.sub(fill, claim.text))


def _looked_up(field: str, scope: Mapping[str, JsonValue]) -> JsonValue:
    name, *keys = field.split(".")
    value = scope[name]
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise InvalidArgument(f"the item has no {key!r}, which {{{field}}} asks for")
        value = value[key]
    return value


def _text(value: JsonValue) -> str:
    """Return a value as it stands in a text: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _item_names(name: str, items: Sequence[JsonValue]) -> tuple[str, ...]:
    """Return the names of a repeated run: by item if that is readable and tells them apart, else by number."""
    labels = [_text(item) if isinstance(item, str | int | float) else "" for item in items]
    readable = all(label and len(label) <= _MAX_LABEL_CHARS and label.isprintable() for label in labels)
    if not readable or len(set(labels)) < len(labels):
        labels = [str(position) for position in range(len(items))]
    return tuple(f"{name}[{label}]" for label in labels)


def _unknown_fields(value: JsonValue, path: FieldPath, item: str | None) -> Iterator[Finding]:
    """Yield fields in the texts of `with` that stand for nothing."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _unknown_fields(below, (*path, key), item)
    elif isinstance(value, list):
        for position, below in enumerate(value):
            yield from _unknown_fields(below, (*path, position), item)
    elif isinstance(value, str):
        for match in _FIELD.finditer(value):
            field = match["field"]
            if field and field.split(".")[0] != item:
                known = f"the item is {{{item}}}" if item else "the run has no 'each'"
                yield Finding(path, f"nothing fills {{{field}}}: {known}; write {{{{{field}}}}} for the text itself")


@dataclass(frozen=True, slots=True)
class Parts:
    """Agents and runs, some of which may not have been readable.

    References are checked even so, to show all mistakes of a file at once.
    """

    agents: Mapping[str, AgentSpec | None] | None
    """By name; None where the agent itself has mistakes, or for all where there are no agents to speak of."""
    runs: Sequence[RunSpec | None]
    """In file order; None where the run itself has mistakes."""
    run_names: Sequence[str | None]
    """In file order, those of unreadable runs too; None where there is no name."""

    @classmethod
    def of(cls, swarm: SwarmFile) -> Parts:
        """Return the parts of a whole file."""
        return cls(swarm.agents, swarm.runs, [run.name for run in swarm.runs])

    def findings(self) -> Iterator[Finding]:
        """Yield what does not hold within and between the parts."""
        for name, agent in (self.agents or {}).items():
            if problem := _bad_name(name):
                yield Finding(("agents", name), problem)
            if agent is not None:
                yield from (Finding(("agents", name, *path), text) for path, text in agent.findings())
        names = {name: None for name in self.run_names if name is not None}
        for position, run in enumerate(self.runs):
            if run is not None:
                for path, text in (*run.findings(), *self._references(run, names)):
                    yield Finding(("runs", position, *path), text)
        yield from self._name_findings()
        yield from self._cycle_findings()

    def _name_findings(self) -> Iterator[Finding]:
        first: dict[str, int] = {}
        for position, name in enumerate(self.run_names):
            if name is None:
                continue
            if problem := _bad_name(name):
                yield Finding(("runs", position, "name"), problem)
            if first.setdefault(name, position) != position:
                yield Finding(("runs", position, "name"), f"{name!r} is the name of runs[{first[name]}] already")

    def _references(self, run: RunSpec, names: Mapping[str, None]) -> Iterator[Finding]:
        if self.agents is not None and run.agent not in self.agents:
            known = f"agents are {known_names(self.agents)}{suggestion(run.agent, self.agents)}"
            yield Finding(("agent",), f"no agent named {run.agent!r}; {known}")
        for after in dict.fromkeys(run.after or ()):
            if after not in names:
                known = f"runs are {known_names(names)}{suggestion(after, names)}"
                yield Finding(("after",), f"no run named {after!r}; {known}")
        yield from _unknown_fields(run.arguments, ("with",), run.item if run.each else None)
        yield from _unknown_fields(list(run.claims or ()), ("claims",), run.item if run.each else None)
        agent = (self.agents or {}).get(run.agent)
        if agent is not None:
            yield from _argument_findings(run, agent)

    def _cycle_findings(self) -> Iterator[Finding]:
        places: dict[str, int] = {}
        graph: dict[str, tuple[str, ...]] = {}
        for position, run in enumerate(self.runs):
            if run is not None and run.name not in graph:
                graph[run.name] = run.after or ()
                places[run.name] = position
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            # The sorter lists what comes first; a file says `after`, so turn it round.
            cycle = list(reversed(cast("list[str]", error.args[1])))
            shown = " -> ".join(cycle)
            yield Finding(("runs", places[cycle[0]], "after"), f"these runs wait for each other: {shown}")


def _argument_findings(run: RunSpec, agent: AgentSpec) -> Iterator[Finding]:
    """Yield where `with` does not fit what the agent takes."""
    if agent.python is not None:
        for name in run.arguments:
            if not name.isidentifier():
                yield Finding(("with", name), f"must be the name of an argument of {agent.python}, not {name!r}")
        return
    try:
        template = agent.template()
    except InvalidArgument:  # told where the agent stands
        return
    if template is None:
        return
    fields = template.fields - {AFTER_FIELD}
    for name, value in run.arguments.items():
        if name == AFTER_FIELD:
            yield Finding(("with", name), "is filled by remit itself, from the runs this one comes after")
        elif name not in fields:
            known = f"its fields are {known_names(sorted(fields))}{suggestion(name, fields)}"
            yield Finding(("with", name), f"the command of agent {run.agent!r} has no field {{{name}}}; {known}")
        elif not isinstance(value, str | int | float):
            yield Finding(("with", name), "must be a text, number or truth value, for it goes into a command")
    given = {*run.arguments, *([run.item] if run.each else [])}
    for name in sorted(fields - given):
        yield Finding((), f"'with' gives no {name!r}, which the command of agent {run.agent!r} needs")
    if AFTER_FIELD in template.fields and not run.after:
        yield Finding((), f"the command of agent {run.agent!r} reads {{after}}, and this run comes after nothing")


def _bad_name(name: str) -> str:
    """Return why a text is no name of an agent or run, or the empty text."""
    if (
        name
        and name == name.strip()
        and len(name) <= MAX_NAME_CHARS
        and name.isprintable()
        and not set(name) & set("[]")
    ):
        return ""
    return f"a name has 1 to {MAX_NAME_CHARS} printable characters, no brackets and no blank at either end"
