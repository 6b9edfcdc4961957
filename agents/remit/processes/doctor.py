"""What is left over on a node: processes and directories that no living daemon answers for.

Nothing here is changed by looking. Three things can be done with a leftover:
`ProcessClient.adopt` lets the daemon take over what still can be, `kill` ends
it, `ignore` keeps it from being shown again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from remit.core.errors import NotFound, ProcessProtocolError
from remit.processes.adoption import is_alive, sweep_job
from remit.processes.draft import is_draft
from remit.processes.jobs import RESULT_NAME, SPEC_NAME, STATE_NAME, JobResult, JobSpec, JobState, boot_id, read_record
from remit.processes.place import Place
from remit.processes.table import SystemTable

__all__ = ["Leftover", "LeftoverKind", "find_leftovers", "ignore_leftover", "kill_leftover"]

_IGNORED_NAME = "ignored"


class LeftoverKind(StrEnum):
    """What is left over: a closed set."""

    ORPHAN = "orphan"
    """A keeper and its program live, and no daemon answers for them; `adopt` takes them over."""
    LOST = "lost"
    """The keeper is gone without a result; processes of its tree may live. `adopt` or `kill` sweeps."""
    SURVIVOR = "survivor"
    """The job has ended and processes of it could not be ended."""
    BROKEN = "broken"
    """A directory that cannot be read; `kill` removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One thing that is left over."""

    job: str
    """Id of the job; the name of its directory."""
    kind: LeftoverKind
    """What it is."""
    pids: tuple[int, ...] = ()
    """Processes of it that live, as far as they are known."""
    scope: str = ""
    """The workspace; empty if that cannot be read."""
    session: str = ""
    """Session it belongs to."""
    turn: str = ""
    """Turn it belongs to."""
    run: str = ""
    """Run that started it."""
    argv: tuple[str, ...] = ()
    """Program and arguments."""
    background: bool = False
    """Whether it belongs to the session."""
    path: str = ""
    """Its directory."""
    detail: str = ""
    """One sentence for people: what is wrong."""


def find_leftovers(place: Place, *, known: frozenset[str] | None) -> list[Leftover]:
    """Return what is left over, oldest first; ignored ones are left out.

    Args:
        place: where to look.
        known: ids of the jobs that the living daemon answers for; None when there is no daemon.
    """
    return [leftover for jobdir in _jobdirs(place) if (leftover := _look(jobdir, known or frozenset())) is not None]


def kill_leftover(place: Place, job: str) -> tuple[int, ...]:
    """End what is left of a job that no daemon answers for; return the processes that could not be ended.

    Only what is proven to belong to it is signalled: by number and start time,
    or by the mark in its environment. Blocks for up to some seconds. A directory
    that cannot be read is removed.

    Raises:
        NotFound: there is no such job.
    """
    jobdir = _existing(place, job)
    try:
        spec = read_record(jobdir / SPEC_NAME, JobSpec)
    except (OSError, ProcessProtocolError):
        spec = None
    if spec is None:
        shutil.rmtree(jobdir, ignore_errors=True)
        return ()
    return sweep_job(spec, jobdir).survivors


def ignore_leftover(place: Place, job: str) -> None:
    """Do not show a leftover any more.

    Raises:
        NotFound: there is no such job.
    """
    (_existing(place, job) / _IGNORED_NAME).touch(mode=0o600)


def _jobdirs(place: Place) -> Iterator[Path]:
    try:
        found = sorted(place.jobs.iterdir())
    except FileNotFoundError:
        return
    yield from (path for path in found if not is_draft(path) and not (path / _IGNORED_NAME).exists())


def _existing(place: Place, job: str) -> Path:
    jobdir = place.job(job)
    is_name = job not in ("", ".", "..") and "/" not in job
    if not is_name or not jobdir.is_dir() or jobdir.is_symlink():
        raise NotFound(f"no process {job!r} is left over on this node; `remit doctor` lists them", job=job)
    return jobdir


def _look(jobdir: Path, known: frozenset[str]) -> Leftover | None:
    try:
        spec = read_record(jobdir / SPEC_NAME, JobSpec)
        state = read_record(jobdir / STATE_NAME, JobState)
        result = read_record(jobdir / RESULT_NAME, JobResult)
    except (OSError, ProcessProtocolError) as error:
        return Leftover(job=jobdir.name, kind=LeftoverKind.BROKEN, path=str(jobdir), detail=str(error))
    if spec is None:
        detail = "it says nothing of what ran there"
        return Leftover(job=jobdir.name, kind=LeftoverKind.BROKEN, path=str(jobdir), detail=detail)
    if result is not None:
        living = tuple(pid for pid in result.survivors if _may_be(pid, state))
        detail = "could not be ended; end them by hand"
        return _leftover(jobdir, spec, LeftoverKind.SURVIVOR, living, detail) if living else None
    if jobdir.name in known or (state is not None and state.boot != boot_id()):
        return None
    if state is not None and is_alive(state.keeper):
        # Its record names the program a moment after that began, and what that has left lives on without it.
        pids = (state.root.pid,) if state.root is not None and is_alive(state.root) else _marked(state)
        return _leftover(jobdir, spec, LeftoverKind.ORPHAN, pids, "no daemon answers for it")
    return _leftover(jobdir, spec, LeftoverKind.LOST, _marked(state), "its keeper was killed; nobody swept after it")


def _leftover(jobdir: Path, spec: JobSpec, kind: LeftoverKind, pids: tuple[int, ...], detail: str) -> Leftover:
    return Leftover(
        job=spec.job,
        kind=kind,
        pids=pids,
        scope=spec.scope,
        session=spec.session,
        turn=spec.turn,
        run=spec.run,
        argv=spec.argv,
        background=spec.background,
        path=str(jobdir),
        detail=detail,
    )


def _may_be(pid: int, state: JobState | None) -> bool:
    """Tell whether a number may still be the survivor's: it lives, and began after its keeper."""
    entry = SystemTable().entry(pid)
    if entry is None or entry.is_dead or state is None or state.boot != boot_id():
        return False
    return entry.identity.started >= state.keeper.started


def _marked(state: JobState | None) -> tuple[int, ...]:
    if state is None:
        return ()
    table = SystemTable()
    found = (entry for entry in table.entries().values() if entry.identity.started >= state.keeper.started)
    return tuple(sorted(entry.pid for entry in found if not entry.is_dead and table.has_mark(entry.pid, state.token)))
