"""Which run starts next, on which host, and how many hosts are wanted.

**Rules**

1. Bodies whose wait is over come before new runs, or parents would starve.
2. A run starts when its pool has a free slot, no ancestor is at its
   `max_concurrent`, and a host bound to its code (or not bound yet) is ready.
3. A host is bound to one code environment by its first run, for good.
"""

from __future__ import annotations

from remit.coordinator.settling import fail_unstarted
from remit.coordinator.state import HostState, Node, Pool
from remit.coordinator.transaction import Transaction
from remit.core.events import HostDraining, HostRequested, RunResumed, RunStarted

__all__ = ["fail_hopeless", "host_has_room", "let_idle_hosts_go", "pump"]


MAX_SPAWN_FAILURES = 3
"""Hosts that failed to start in a row before the runs that need one fail too."""


def pump(tx: Transaction) -> None:
    """Start or resume whatever may go on now, and ask for hosts that are missing."""
    missing: dict[tuple[str, str, Pool], int] = {}
    for pool in Pool:
        _resume(tx, pool)
        _start_queued(tx, pool, missing)
    _ask_for_hosts(tx, missing)


def fail_hopeless(tx: Transaction) -> None:
    """Fail what waits for hosts that cannot be started, and say why; before failures stop what is beside them."""
    for key, (count, reason) in tx.state.spawn_failures.items():
        if count < MAX_SPAWN_FAILURES:
            continue
        waiting = [name for queue in tx.state.queues.values() for name in queue]
        parked = [name for limiter in _limiters(tx) for name in limiter.parked or ()]
        for node in [tx.state.nodes[name] for name in [*waiting, *parked, *tx.state.delayed]]:
            if node.resources_key == key and not node.is_ended:
                fail_unstarted(tx, node, f"no agent host could be started: {reason}")


def _limiters(tx: Transaction) -> list[Node]:
    """Return the nodes that have runs parked; one may have been pruned since it was noted."""
    return [tx.state.nodes[name] for name in tx.state.parking if name in tx.state.nodes]


def _limiter(tx: Transaction, node: Node) -> Node | None:
    """Return the nearest ancestor that allows no more runs at once, if there is one."""
    for ancestor in tx.state.ancestors(node):
        limits = ancestor.limits
        if limits is not None and limits.max_concurrent is not None and ancestor.below_used >= limits.max_concurrent:
            return ancestor
    return None


def _park(tx: Transaction, node: Node, limiter: Node) -> None:
    if limiter.parked is None:
        limiter.parked = {}
    limiter.parked[node.id] = None
    tx.state.parking[limiter.id] = None


def _unpark(tx: Transaction, pool: Pool) -> None:
    """Put parked runs back whose ancestor has room again, as many as it has room for."""
    for name in list(tx.state.parking):
        limiter = tx.state.nodes.get(name)
        if limiter is None or not limiter.parked:
            del tx.state.parking[name]
            continue
        assert limiter.limits is not None
        assert limiter.limits.max_concurrent is not None
        room = limiter.limits.max_concurrent - limiter.below_used
        if room <= 0:
            continue
        for run_id in list(limiter.parked):
            if room <= 0:
                break
            node = tx.state.nodes[run_id]
            if node.pool is pool:
                del limiter.parked[run_id]
                tx.state.queues[pool][run_id] = None
                room -= 1


def _resume(tx: Transaction, pool: Pool) -> None:
    state, capacity = tx.state, tx.settings.capacity(pool)
    for run_id in list(state.resuming[pool]):
        if state.used[pool] >= capacity:
            return
        node = state.nodes[run_id]
        if _limiter(tx, node) is not None:
            continue
        tx.emit(RunResumed(node_id=node.id, turn_id=node.turn_id, at=tx.now))
        tx.effects.resumes.setdefault(node.host_id, []).append(node.id)


def _start_queued(tx: Transaction, pool: Pool, missing: dict[tuple[str, str, Pool], int]) -> None:
    state, capacity = tx.state, tx.settings.capacity(pool)
    if state.parking:
        _unpark(tx, pool)
    queue = state.queues[pool]
    if state.used[pool] >= capacity or not (queue or state.delayed):
        return
    due = [name for name in state.delayed if state.nodes[name].pool is pool and state.nodes[name].retry_at <= tx.now]
    free = capacity - state.used[pool]
    for run_id in [*due, *queue]:
        if free <= 0:
            return
        node = state.nodes[run_id]
        key = (node.env_key, node.resources_key, pool)
        if key in missing and pool is Pool.SHARED:
            continue
        limiter = _limiter(tx, node)
        if limiter is not None:
            if run_id in queue:
                del queue[run_id]
                _park(tx, node, limiter)
            continue
        host = _pick_host(tx, node)
        if host is None:
            missing[key] = missing.get(key, 0) + 1
            if pool is Pool.DEDICATED:
                free -= 1
            continue
        free -= 1
        _start(tx, node, host)


def _start(tx: Transaction, node: Node, host: HostState) -> None:
    attempt = node.attempt + 1
    tx.emit(RunStarted(node_id=node.id, turn_id=node.turn_id, at=tx.now, attempt=attempt, host_id=host.id))
    tx.effects.starts.setdefault(host.id, []).append(node.id)
    if node.attempt_timeout_s is not None:
        tx.timers.add(tx.now + node.attempt_timeout_s, "attempt", node.id, attempt)


def host_has_room(host: HostState, node: Node) -> bool:
    """Tell whether a ready host may take this run."""
    if not host.ready or host.draining or host.resources_key != node.resources_key:
        return False
    if host.pool is None:
        return True
    if host.pool is not node.pool or host.env_key != node.env_key:
        return False
    return node.pool is Pool.SHARED or not host.runs


def _pick_host(tx: Transaction, node: Node) -> HostState | None:
    """Prefer a bound host with room, then bind a ready one, then the least loaded."""
    shared = node.pool is Pool.SHARED
    grow_at = tx.settings.grow_at if shared else 1
    best: HostState | None = None
    best_rank: tuple[int, int] = (3, 0)
    bound = 0
    for host in tx.state.hosts.values():
        if not host_has_room(host, node):
            continue
        bound += host.pool is not None
        load = len(host.runs)
        group = 1 if host.pool is None else 0 if load < grow_at else 2
        rank: tuple[int, int] = (group, load)
        if rank < best_rank:
            best, best_rank = host, rank
    if shared and best_rank[0] == 1 and bound >= tx.settings.max_shared_hosts:
        return _least_loaded(tx, node)
    return best


def _least_loaded(tx: Transaction, node: Node) -> HostState | None:
    candidates = [host for host in tx.state.hosts.values() if host.pool is not None and host_has_room(host, node)]
    return min(candidates, key=lambda host: len(host.runs), default=None)


def _ask_for_hosts(tx: Transaction, missing: dict[tuple[str, str, Pool], int]) -> None:
    """Request hosts for what could not be placed, for growth, and to keep some warm."""
    if tx.state.stopping:
        return
    wanted: dict[str, int] = {}
    hopeless = {key for key, (count, _) in tx.state.spawn_failures.items() if count >= MAX_SPAWN_FAILURES}
    for (_, resources_key, pool), count in missing.items():
        wanted[resources_key] = wanted.get(resources_key, 0) + (1 if pool is Pool.SHARED else count)
    wanted[""] = wanted.get("", 0) + tx.settings.warm_hosts + _growth(tx)
    starting = sum(not host.ready for host in tx.state.hosts.values())
    for resources_key, count in wanted.items():
        if resources_key in hopeless:
            continue
        spare = sum(
            host.resources_key == resources_key and host.pool is None and not host.draining
            for host in tx.state.hosts.values()
        )
        for _ in range(count - spare):
            if starting >= tx.settings.max_starting:
                return
            starting += 1
            host_id = tx.ids.host()
            tx.emit(HostRequested(node_id=host_id, turn_id="", at=tx.now, resources_key=resources_key))
            tx.effects.spawn.append(host_id)


def _growth(tx: Transaction) -> int:
    """Return how many shared hosts should be added because all of an environment are full."""
    loads: dict[str, list[int]] = {}
    for host in tx.state.hosts.values():
        if host.pool is Pool.SHARED and not host.draining and not host.resources_key:
            loads.setdefault(host.env_key, []).append(len(host.runs))
    return sum(len(load) < tx.settings.max_shared_hosts and min(load) >= tx.settings.grow_at for load in loads.values())


def let_idle_hosts_go(tx: Transaction) -> None:
    """Drop hosts that are bound to code and have had no runs for a while, and drained ones."""
    for host in list(tx.state.hosts.values()):
        if host.runs or host.killed or not host.ready:
            continue
        idle = tx.now - host.idle_since
        if host.draining:
            reason = "drained"
        elif host.pool is not None and idle >= tx.settings.idle_host_s:
            reason = f"idle for {idle:.0f} s"
        else:
            continue
        tx.emit(HostDraining(node_id=host.id, turn_id="", at=tx.now, reason=reason, kill=True))
        tx.effects.kill.append((host.id, reason))
