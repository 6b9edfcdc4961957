"""Who is below a process, read from the kernel's own lists of children.

A look at all of `/proc` costs with everything that runs on the machine; these
lists cost with one's own tree alone, which counts when hundreds of trees are
stopped at once.

Source: proc_tid_children(5). Where the kernel has no such files, the whole
table is read instead.
"""

from __future__ import annotations

import functools
import os

from remit.processes.table import ProcessEntry, SystemTable, read_or_empty

__all__ = ["below", "children"]


def children(pid: int, *, table: SystemTable, threads: int = 0) -> tuple[ProcessEntry, ...]:
    """Return the direct children of a process, dead ones that nobody waited for included.

    Args:
        pid: the parent. Exact for this process itself and for those that do not change meanwhile.
        table: reads what is known of each.
        threads: how many the parent had a moment ago; 0 if that is not known.
    """
    pids = _listed(pid, threads=threads)
    if pids is None:
        return tuple(entry for entry in table.entries().values() if entry.parent == pid)
    entries = (table.entry(child) for child in pids)
    # Asked for its parent: a number that was used again between the two reads belongs to somebody else's child.
    return tuple(entry for entry in entries if entry is not None and entry.parent == pid)


def own_children() -> list[int]:
    """Return the numbers of the children of this process, dead ones that nobody waited for included.

    For a process whose one thread is the only one to wait for them: then none of the numbers can change its owner.
    """
    pids = _listed(os.getpid(), threads=1)
    if pids is None:
        return [entry.pid for entry in children(os.getpid(), table=SystemTable())]
    return pids


def below(pid: int, *, table: SystemTable) -> dict[int, ProcessEntry]:
    """Return the living processes below one, by number, however deep; itself not among them."""
    root = table.entry(pid)
    found: dict[int, ProcessEntry] = {}
    todo = [] if root is None else [root]
    while todo:
        parent = todo.pop()
        listed = children(parent.pid, table=table, threads=parent.threads)
        added = [entry for entry in listed if entry.pid not in found]
        if not added:
            continue
        # The same parent before and after: then what was read between is its own.
        now = table.entry(parent.pid)
        if now is None or now.identity != parent.identity:
            continue
        found.update((entry.pid, entry) for entry in added)
        todo += added
    return {entry.pid: entry for entry in found.values() if not entry.is_dead}


def _listed(pid: int, *, threads: int = 0) -> list[int] | None:
    """Return the numbers of the children of all threads; None where there are no such lists."""
    if not _has_lists():
        return None
    pids: list[int] = []
    try:
        # A thread that comes between is seen by the next look, as a child that comes between is.
        names = [str(pid)] if threads == 1 else os.listdir(f"/proc/{pid}/task")
    except OSError:  # gone
        return pids
    for thread in names:
        pids += [int(word) for word in read_or_empty(f"/proc/{pid}/task/{thread}/children", is_list=True).split()]
    return pids


@functools.cache
def _has_lists() -> bool:
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
