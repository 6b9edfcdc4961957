"""Run through the life of a job without a job, so that the first real one finds everything warm.

After a fork each page that is written to is copied by the kernel, and in Python
whatever is used is written to, its count of references at least. A keeper that
was forked ahead takes these copies while nobody waits. Nothing is executed, and
no file is made: program and directories of this job lie below a file.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from remit.processes import frames
from remit.processes.containment import Containment
from remit.processes.descent import below
from remit.processes.draft import Draft
from remit.processes.jobs import JobSpec, JobState
from remit.processes.keeping import Keeping
from remit.processes.launch import spawn
from remit.processes.table import ProcessIdentity, SystemTable
from remit.processes.tree import identify

__all__ = ["rehearse"]

_NOWHERE = f"{os.devnull}/rehearsal"
"""A path that cannot be made: its parent is no directory."""


def rehearse(*, rounds: int = 1) -> None:
    """Read an order, fail to start it, and tell; leaves nothing behind.

    Args:
        rounds: how often.
    """
    for _ in range(rounds):
        _rehearse_once()


def _rehearse_once() -> None:
    spec = JobSpec(job="proc_rehearsal", scope="rehearsal", argv=("true",), output_dir=_NOWHERE)
    reader = frames.FrameReader()
    (order,) = reader.feed(
        frames.encode("keep", spec=spec.to_dict(), env={"PATH": "/bin"}, jobdir=_NOWHERE, stdin=None)
    )
    told: list[bytes] = []

    def tell(op: str, fields: dict[str, Any]) -> None:
        told.append(frames.encode(op, **fields))

    keeping = Keeping(
        JobSpec.from_dict(order["spec"]),
        env=order["env"],
        jobdir=Path(order["jobdir"]),
        stdin=None,
        containment=Containment(cgroup=False),
        keeper=identify(os.getpid()) or ProcessIdentity(os.getpid(), 0),
        epoch=0,
        reattach_grace_s=0.0,
        tell=tell,
        failpoint=lambda place: None,
    )
    tell("started", {"state": keeping.state.to_dict()})
    JobState.from_dict(json.loads(json.dumps(keeping.state.to_dict())))
    keeping.start()
    keeping.tick(child_ended=False)
    with contextlib.suppress(OSError):
        Draft(Path(_NOWHERE))
    for pid in (os.getpid(), 0):
        below(pid, table=SystemTable())
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    spawn(
        JobSpec(job=spec.job, scope=spec.scope, argv=(_NOWHERE,), output_dir=_NOWHERE), {}, (nothing, nothing, nothing)
    )
    os.close(nothing)
