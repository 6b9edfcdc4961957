"""Which Ray node a program was started for, and when it ends because that node has gone: pure.

A coordinator's lease holds for tens of seconds, and a coordinator may live on another
machine. Whoever starts a program in a worker of Ray knows the node's own process, the
raylet; when that has gone, nobody on this machine waits for the program any more,
but for one who comes with a new node.

**Invariants**

1. A node is told by number and start time of its raylet; a later process of the same
   number is another node.
2. A job belongs to the node of the last one who started it or attached to it. One that
   came without a node, or was taken over from an earlier daemon, belongs to none, and
   only its lease counts.
3. The grace begins with the first look that does not find the node, and a job that
   gets another node meanwhile is spared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

from remit.processes.table import ProcessIdentity
from remit.processes.tree import identify

__all__ = ["LOOK_S", "NODE_GRACE_S", "Nodes", "encode_own_node", "own_node"]

NODE_GRACE_S = 10.0
"""How long a foreground program outlives its Ray node: time enough for a new node on the same machine to attach."""
LOOK_S = 1.0
"""How often the nodes are looked at, in seconds."""
_RAYLET_VARIABLE = "RAY_RAYLET_PID"


def own_node(environ: Mapping[str, str]) -> ProcessIdentity | None:
    """Return the raylet of the Ray node whose worker this process is; None for any other process.

    Args:
        environ: environment of this process.
    """
    text = environ.get(_RAYLET_VARIABLE, "")
    return identify(int(text)) if text.isdigit() else None


class Nodes:
    """The Ray nodes of the jobs of one daemon. Holds no clock: every call is given the time in monotonic seconds.

    Args:
        is_alive: tells whether exactly this process runs.
        grace_s: see `NODE_GRACE_S`.
    """

    __slots__ = ("_grace_s", "_is_alive", "_jobs", "_look_at", "_missed")

    def __init__(self, is_alive: Callable[[ProcessIdentity], bool], *, grace_s: float = NODE_GRACE_S) -> None:
        self._is_alive = is_alive
        self._grace_s = grace_s
        self._jobs: dict[str, ProcessIdentity] = {}
        self._missed: dict[ProcessIdentity, float] = {}
        self._look_at = -math.inf

    def serve(self, job: str, node: ProcessIdentity | None) -> None:
        """Note for which node a job was started, or attached to; None changes nothing."""
        if node is not None:
            self._jobs[job] = node

    def forget(self, job: str) -> None:
        """Note that a job has ended, or belongs to the session from now on."""
        self._jobs.pop(job, None)

    def next_look(self) -> float:
        """Return when `expire` is due; infinity when no job belongs to a node."""
        return self._look_at if self._jobs else math.inf

    def expire(self, now: float) -> tuple[str, ...]:
        """Look at the nodes, if that is due; take away and return the jobs whose node has been gone for the grace."""
        if now < self._look_at:
            return ()
        self._look_at = now + LOOK_S
        nodes = set(self._jobs.values())
        self._missed = {node: self._missed.get(node, now) for node in nodes if not self._is_alive(node)}
        over = {node for node, since in self._missed.items() if since + self._grace_s <= now}
        jobs = tuple(job for job, node in self._jobs.items() if node in over)
        for job in jobs:
            del self._jobs[job]
        return jobs


def encode_own_node() -> list[float] | None:
    """Return the node of this process as a start carries it."""
    node = own_node(os.environ)
    return None if node is None else [node.pid, node.started]
