"""`remit validate`: check a swarm file as `remit run` would, and start nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from remit.cli.job import Job, load_job
from remit.cli.lines import Line
from remit.cli.output import print_json, print_lines
from remit.coordinator.workspace import resolve_workspace
from remit.core.errors import InvalidArgument

__all__ = ["validate"]


def validate(target: str, *, workspace: Path, as_json: bool) -> None:
    """Print what a swarm file comes to.

    Runs the commands of `lines` and imports Python agents, as their mistakes are mistakes of the file; no agent.

    Raises:
        UsageError: anything about it does not hold.
    """
    if ":" in target and not Path(target).exists():
        raise InvalidArgument(f"{target!r} is no swarm file; only those can be checked without running them")
    job = load_job(target, workspace=resolve_workspace(workspace), arguments="", pairs=(), name="")
    if as_json:
        print_json(_as_dict(target, job))
    else:
        print_lines([Line(f"{target} holds: {_counted(job)}", "green"), *map(Line, job.notes)])


def _as_dict(target: str, job: Job) -> dict[str, Any]:
    names = [option.name for option in job.options]
    return {"file": target, "name": job.name, "runs": names, "notes": list(job.notes)}


def _counted(job: Job) -> str:
    agents = Counter(agent.name for agent in job.agents)
    shown = ", ".join(f"{count} of {name}" for name, count in agents.items())
    return f"{len(job.options)} {'run' if len(job.options) == 1 else 'runs'} ({shown})" if shown else "no runs"
