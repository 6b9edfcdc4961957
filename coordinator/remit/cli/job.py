"""What `remit run` is asked to do: a swarm file, or one agent with arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from remit.agents import CommandAgent, RunOptions
from remit.agents.definition import AgentDefinition, Isolation, load_agent
from remit.core.approvals import ApprovalRule
from remit.core.errors import InvalidArgument, RemitError, UnknownAgent
from remit.core.limits import Limits

__all__ = ["Job", "load_job"]


@dataclass(slots=True)
class Job:
    """A turn to be: its runs, checked and ready to delegate."""

    name: str
    """Name of the turn."""
    agents: list[Any] = field(default_factory=list[Any])
    """One agent a run."""
    arguments: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """One mapping a run."""
    options: list[RunOptions] = field(default_factory=list[RunOptions])
    """One set of options a run."""
    deadline_s: float | None = None
    """Seconds for the whole turn, or None."""
    limits: Limits | None = None
    """Limits of the turn, or None."""
    approvals: tuple[ApprovalRule, ...] = ()
    """What the file says is answered to requests for approval; empty if it does not."""
    stop_on_failure: bool = False
    """Whether the first run that does not succeed stops the others."""
    notes: Sequence[str] = ()
    """Lines for people about the plan."""
    shows_result: bool = False
    """Whether the one run's result is printed at the end."""


def load_job(target: str, *, workspace: str, arguments: str, pairs: Sequence[str], name: str) -> Job:
    """Read and check what is to be run; nothing is started.

    Args:
        target: path of a swarm file, or `module:function`.
        workspace: folder that globs and commands are about.
        arguments: JSON mapping for `module:function`.
        pairs: `key=value` texts for the same; values are JSON where they parse as such.
        name: name of the turn; from the target by default.

    Raises:
        UsageError: anything about it does not hold.
    """
    path = Path(target)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if arguments or pairs:
            raise InvalidArgument("arguments are for module:function; a swarm file has its own under `with`")
        return _swarm_job(path, workspace, name)
    if ":" not in target:
        raise InvalidArgument(
            f"{target!r} is neither a file nor module:function; give a swarm file (.yaml) or an agent to run"
        )
    # As `python -m` does: what lies in the current folder can be imported.
    _import_from(Path.cwd())
    agent = _load(target)
    given = {**_json_mapping(arguments), **dict(_pair(text) for text in pairs)}
    return Job(
        name or target,
        agents=[agent],
        arguments=[given],
        options=[RunOptions(name=agent.name)],
        shows_result=True,
    )


def _load(place: str) -> AgentDefinition:
    """Import an agent; whatever its module does wrong on the way is the caller's to mend.

    Raises:
        UnknownAgent: there is none at that place, or its module cannot be imported.
    """
    try:
        return load_agent(place)
    except RemitError:
        raise
    except Exception as error:  # importing runs user code: anything may come out
        raise UnknownAgent(f"cannot import the module of agent {place!r}: {type(error).__name__}: {error}") from error


def _import_from(folder: Path) -> None:
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)


def _json_mapping(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--args is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f'--args must be a JSON mapping such as \'{{"path": "a.py"}}\', not {text[:60]!r}')
    return cast("dict[str, Any]", value)


def _pair(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise InvalidArgument(f"{text!r} is not of the form key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _swarm_job(path: Path, workspace: str, name: str) -> Job:
    from remit.cli.swarm import build_plan, load_swarm_file

    plan = build_plan(load_swarm_file(path), Path(workspace))
    _import_from(path.resolve().parent)
    agents = {planned.name: _agent(planned, workspace) for planned in plan.agents}
    job = Job(
        name or plan.name or path.stem,
        deadline_s=plan.deadline_s,
        limits=plan.limits,
        approvals=plan.approvals,
        stop_on_failure=plan.on_failure == "stop",
        notes=plan.notes,
    )
    for run in plan.runs:
        job.agents.append(agents[run.agent])
        job.arguments.append(run.arguments)
        job.options.append(
            RunOptions(
                name=run.name,
                after=run.after,
                deadline_s=run.deadline_s,
                attempt_timeout_s=run.attempt_timeout_s,
                retries=run.retries,
                detached=run.detached,
                claims=run.claims,
                limits=run.limits,
                approvals=run.approvals,
            )
        )
    return job


def _agent(planned: Any, workspace: str) -> Any:
    """Return the agent that a planned one stands for."""
    from remit.agents.definition import agent_of
    from remit.cli.swarm import PlannedPython

    if isinstance(planned, PlannedPython):
        found = _load(planned.reference)
        if planned.isolation is not None and planned.isolation != found.isolation:
            isolation: Isolation = "actor" if planned.isolation == "actor" else "shared"
            return agent_of(found.fn, name=found.name, isolation=isolation, limits=found.limits, claims=found.claims)
        return found
    folder = Path(workspace) / planned.cwd if planned.cwd else Path(workspace)
    return CommandAgent(
        planned.command,
        name=planned.name,
        shell=planned.shell,
        cwd=folder,
        env=planned.env,
        timeout_s=planned.timeout_s,
        grace_s=2.0 if planned.grace_s is None else planned.grace_s,
        ok_exit_codes=planned.ok_exit_codes,
    )
