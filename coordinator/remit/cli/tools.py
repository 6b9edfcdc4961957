"""`remit processes` and `remit kill`, and what `remit doctor` does with leftovers: programs that agents started."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remit.agents.tooldesk import scope_of
from remit.cli.lines import Line, duration
from remit.cli.output import print_json, print_lines
from remit.core.errors import InvalidArgument, NotFound, ProcdUnavailable
from remit.processes import JobView, Leftover, ProcessClient, StopAnswer, StopKind
from remit.processes.doctor import ignore_leftover, kill_leftover
from remit.processes.place import Place

__all__ = ["kill_process", "leftovers", "show_processes", "treat_leftover"]

_SHOWN_ARGV = 60


def show_processes(workspace: Path, *, everywhere: bool, ended: bool, as_json: bool) -> None:
    """List the programs of this machine that the agents of a workspace have started."""
    views = [view for view in _jobs(None if everywhere else scope_of(workspace)) if ended or view.state != "ended"]
    if as_json:
        print_json([_view_dict(view) for view in views])
        return
    where = "any workspace" if everywhere else str(workspace.resolve())
    print_lines([_line(view) for view in views] or [Line(f"no program of {where} is running on this machine")])


def _jobs(scope: str | None) -> list[JobView]:
    """Return the jobs of this machine; none where nobody keeps any."""
    client = ProcessClient(start=False)
    try:
        return client.list(scope=scope)
    except ProcdUnavailable:
        # No daemon: nothing was ever started, or `remit doctor` shows what was left.
        return []
    finally:
        client.close()


def _line(view: JobView) -> Line:
    command = " ".join(view.argv)
    if len(command) > _SHOWN_ARGV:
        command = command[: _SHOWN_ARGV - 3] + "..."
    owner = f"session {view.session}" if view.background else view.run or view.turn
    state, style = view.state, ""
    if view.result is not None:
        state = view.result.outcome.value
        style = "" if view.result.exit_code == 0 else "yellow"
    elif view.stopping:
        state, style = "stopping", "yellow"
    kind = "background" if view.background else "foreground"
    return Line(f"{view.job}  {state}  {kind}  pid {view.pid}  {duration(view.age_s)}  {owner}  {command}", style)


def _view_dict(view: JobView) -> dict[str, Any]:
    return {name: value for name, value in view.to_dict().items() if name not in ("scope", "key")}


def kill_process(workspace: Path, handle: str, *, grace_s: float, kill: bool, as_json: bool) -> int:
    """Stop one program of a workspace with everything that it has started; return the exit status."""
    scope = scope_of(workspace)
    view = _find(_jobs(scope), handle, workspace)
    client = ProcessClient(start=False)
    try:
        answer = client.stop(scope=scope, job=view.job, cause=None, grace_s=grace_s, kill=kill)
    finally:
        client.close()
    if as_json:
        print_json(answer.to_dict())
    else:
        print_lines([_stop_line(view, answer)])
    return 0 if answer.is_proven_gone else 1


def _find(views: list[JobView], handle: str, workspace: Path) -> JobView:
    if not handle:  # it is a part of every handle
        raise NotFound("the handle is empty; see `remit processes`")
    found = [view for view in views if view.job == handle] or [view for view in views if handle in view.job]
    if not found:
        raise NotFound(f"no program {handle!r} of {workspace.resolve()} on this machine; see `remit processes`")
    if len(found) > 1:
        names = ", ".join(view.job for view in found[:3])
        raise InvalidArgument(f"{handle!r} is part of {len(found)} handles: {names}; give more of it")
    return found[0]


def _stop_line(view: JobView, answer: StopAnswer) -> Line:
    result = answer.result
    match answer.kind:
        case StopKind.STOPPED if result is not None and result.survivors:
            left = ", ".join(map(str, result.survivors))
            return Line(f"{view.job} was told to stop; LEFT: {left}", "red")
        case StopKind.STOPPED:
            how = "needed SIGKILL" if result is not None and result.escalated else "ended on SIGTERM"
            count = len(result.signalled) if result is not None else 0
            return Line(f"{view.job} is stopped with everything below it: {count} processes, {how}", "green")
        case StopKind.NOT_RUNNING:
            return Line(f"{view.job} had ended already")
        case _:
            return Line(f"{view.job}: {answer.kind.value}; its end is not confirmed", "red")


def leftovers() -> list[Leftover]:
    """Return what no daemon answers for on this machine."""
    client = ProcessClient(start=False)
    try:
        return client.doctor()
    finally:
        client.close()


def treat_leftover(job: str, *, action: str) -> int:
    """Adopt, kill or ignore one leftover, say what became of it, and return the exit status.

    It is 1 if something of the leftover could not be ended, else 0.

    Raises:
        NotFound: there is no such leftover.
    """
    found = next((item for item in leftovers() if item.job == job), None)
    if found is None:
        raise NotFound(f"there is no leftover {job!r}; `remit doctor` lists them")
    left: tuple[int, ...] = ()
    if action == "adopt":
        client = ProcessClient()
        try:
            client.adopt()
        finally:
            client.close()
        text = f"{job} is looked after by the daemon again, or was swept where nothing could be kept"
    elif action == "kill":
        left = kill_leftover(Place(), job)
        text = f"{job} is gone" if not left else f"{job}: LEFT {', '.join(map(str, left))}"
    else:
        ignore_leftover(Place(), job)
        text = f"{job} is not shown again"
    sys.stdout.write(f"{text}\n")
    return int(bool(left))


def leftover_dict(leftover: Leftover) -> dict[str, Any]:
    """Return a leftover as a mapping for JSON."""
    return asdict(leftover)
