"""What an earlier daemon left: living keepers are taken over, results read, lost trees swept.

**Invariants**

1. A keeper is told by number and start time, within one boot of the machine;
   nothing else is ever signalled.
2. A job whose directory cannot be read is left as it is, for `doctor`, and
   stops nobody from starting.
3. A key that an earlier daemon gave to a job stays that job's.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from remit.core.clock import Clock
from remit.core.errors import ProcessProtocolError, RemitError
from remit.processes.containment import Cgroup, remove_unused_groups
from remit.processes.draft import DIGEST_FIELD, is_draft, make_directory, remove_left_drafts
from remit.processes.frames import connect, send
from remit.processes.jobs import (
    RESULT_NAME,
    SOCKET_NAME,
    SPEC_NAME,
    STATE_NAME,
    JobOutcome,
    JobResult,
    JobSpec,
    JobState,
    boot_id,
    read_record,
    write_record,
)
from remit.processes.output import STDERR_NAME, STDOUT_NAME
from remit.processes.place import Place
from remit.processes.supervisor import Supervisor
from remit.processes.sweep import sweep
from remit.processes.table import ProcessIdentity, SystemTable

__all__ = ["adopt_all", "is_alive", "sweep_job"]

_POLL_S = 0.005
_CONNECT_S = 1.0
_GROUP_LIMIT_S = 5.0


def adopt_all(place: Place, supervisor: Supervisor, *, clock: Clock, log: Callable[[str], None]) -> int:
    """Take over every job that the supervisor does not know yet; return how many live now."""
    remove_left_drafts(place.jobs)
    for jobdir in sorted(place.jobs.iterdir()):
        if is_draft(jobdir) or supervisor.records.get(jobdir.name) is not None:
            continue
        try:
            _adopt(jobdir, supervisor, clock)
        except (OSError, RemitError) as error:
            log(f"cannot take over {jobdir.name}: {error}; `remit doctor` shows it")
    for record in supervisor.records:
        # Whoever vouched for them may be gone, or not know of this daemon yet: a whole lease, and no more.
        if record.is_live and not record.background and supervisor.leases.get(record.spec.scope) is None:
            supervisor.leases.renew(record.spec.scope, now=clock.monotonic(), ttl_s=supervisor.lease_s)
    return supervisor.live_count


def _adopt(jobdir: Path, supervisor: Supervisor, clock: Clock) -> None:
    spec = read_record(jobdir / SPEC_NAME, JobSpec)
    if spec is None or spec.job != jobdir.name:
        raise ProcessProtocolError(f"{jobdir} holds no job of that name", version=None)
    digest = _digest(jobdir)
    result = _result_or_none(jobdir)
    state = None if result is not None else _state(jobdir)
    if state is not None and state.boot != boot_id():
        result = _lost(spec, state, error="the machine was started again meanwhile")
        write_record(jobdir / RESULT_NAME, result)
    if result is None and state is not None and is_alive(state.keeper):
        connection = _attach(jobdir, state)
        if connection is not None:
            supervisor.adopt(spec, digest, state, connection)
            return
    # It may have ended while we tried.
    result = result or _result_or_none(jobdir)
    if result is not None:
        age_s = max(0.0, time.time() - result.ended_at)
        supervisor.adopt_ended(spec, digest, result, ended_at=clock.monotonic() - age_s)
    else:
        supervisor.adopt_lost(spec, digest)


def _digest(jobdir: Path) -> str:
    try:
        return str(json.loads((jobdir / SPEC_NAME).read_bytes())[DIGEST_FIELD])
    except (OSError, ValueError, LookupError):
        return ""  # equal to no fingerprint: the key is refused to everybody, and nothing runs twice


def _result_or_none(jobdir: Path) -> JobResult | None:
    try:
        return read_record(jobdir / RESULT_NAME, JobResult)
    except ProcessProtocolError:  # garbage is no result
        return None


def _state(jobdir: Path) -> JobState | None:
    try:
        return read_record(jobdir / STATE_NAME, JobState)
    except (OSError, ProcessProtocolError):
        return None


def is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether exactly this process still runs."""
    entry = SystemTable().entry(identity.pid)
    return entry is not None and entry.identity == identity and not entry.is_dead


def _attach(jobdir: Path, state: JobState) -> socket.socket | None:
    """Return a connection that the keeper was asked to take as its lifeline; None if it does not listen."""
    try:
        connection = connect(jobdir / SOCKET_NAME, timeout_s=_CONNECT_S)
    except OSError:
        return None
    try:
        # Its answer comes like all that it says later: a stopped keeper must not hold us up.
        send(connection, "attach", epoch=state.epoch + 1)
    except OSError:
        connection.close()
        return None
    return connection


def sweep_job(spec: JobSpec, jobdir: Path, *, digest: str = "", ended: tuple[int, ...] = ()) -> JobResult:
    """End what a lost keeper left, write the result, and return it; blocks for up to some seconds.

    It is found by its control group, by parent, group and session of the program,
    and by the mark in its environment.

    Args:
        spec: the job.
        jobdir: its directory; made, if its keeper was lost before it had recorded the job.
        digest: fingerprint of the command, for that case.
        ended: processes of it that the caller has ended already.

    Raises:
        OSError: the result cannot be written; what was to be ended has been ended.
    """
    if not jobdir.exists():
        # Nothing of it ran, and nothing will: nothing runs before its record is made.
        make_directory(jobdir, spec, digest=digest)
    state = _state(jobdir)
    remove_unused_groups()
    remove_left_drafts(jobdir.parent)
    if state is None:
        result = _lost(spec, None, error="its keeper was gone before it said anything")
    elif state.boot != boot_id():
        result = _lost(spec, state, error="the machine was started again meanwhile")
    else:
        SystemTable().send(state.keeper, signal.SIGKILL)
        leader = state.root or state.keeper
        # The control group first, where there is one: nothing can have left it unseen.
        grouped, stuck = _empty_group(state.cgroup)
        report = sweep(leader.pid, leader.started, token=state.token, grace_s=0.0, known=state.seen)
        result = _lost(
            spec,
            state,
            error="its keeper was killed",
            signalled=tuple(sorted({*ended, *grouped, *report.stopped})),
            escalated=tuple(sorted({*ended, *grouped, *(report.stopped if report.escalated else ())})),
            survivors=tuple(sorted({*stuck, *report.survivors})),
            denied=report.denied,
        )
    write_record(jobdir / RESULT_NAME, result)
    return result


def _empty_group(path: str) -> tuple[set[int], tuple[int, ...]]:
    """End everything in a control group, and the group; return whom it held, and whom it still holds."""
    seen: set[int] = set()
    if not path:
        return seen, ()
    group, table = Cgroup(Path(path)), SystemTable()
    until = time.monotonic() + _GROUP_LIMIT_S
    while (pids := group.pids()) and time.monotonic() < until:
        seen.update(pids)
        group.kill()
        entries = [entry for pid in pids if (entry := table.entry(pid)) is not None]
        # Still in the group after its start time was read, so the two belong together.
        left = group.pids()
        for entry in entries:
            if entry.pid in left:
                table.send(entry.identity, signal.SIGKILL)
        time.sleep(_POLL_S)
    group.remove()
    return seen - set(pids), pids


def _lost(
    spec: JobSpec,
    state: JobState | None,
    *,
    error: str,
    signalled: tuple[int, ...] = (),
    escalated: tuple[int, ...] = (),
    survivors: tuple[int, ...] = (),
    denied: tuple[int, ...] = (),
) -> JobResult:
    started_at = state.started_at if state is not None else 0.0
    now = time.time()
    return JobResult(
        job=spec.job,
        outcome=JobOutcome.KEEPER_LOST,
        signalled=signalled,
        escalated=escalated,
        survivors=survivors,
        denied=denied,
        containment=state.containment if state is not None else "",
        started_at=started_at,
        ended_at=now,
        duration_s=max(0.0, now - started_at) if started_at else 0.0,
        stdout_bytes=_size(Path(spec.output_dir) / STDOUT_NAME),
        stderr_bytes=_size(Path(spec.output_dir) / STDERR_NAME),
        error=error,
        backgrounded=state.background if state is not None else spec.background,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
