"""The daemon's loop: its socket, its clients, its timers; one thread, and never a wait but `select`.

Requests are frames (`remit.processes.frames`). Each may carry `id`, which its answer
repeats. Answers are `{"op": "answer", "id": ..., ...}`, or `{"op": "error", "id": ...,
"code": ..., "message": ..., "data": {...}}` for a typed error.

| `op` | fields |
|---|---|
| `ping` | |
| `start` | `spec`, `env`, `stdin` (base64 or null), `node` (number and start time of a raylet, or null) |
| `stop` | `scope`, `job`, `key`, `wish`, `tombstone`, `generation`, `limit_s` |
| `stop_many` | `scope`, `runs`, `wish`, `foreground_only`, `generation`, `limit_s` |
| `wait` | `job`, `timeout_s` |
| `watch`, `unwatch` | `job`; its end is said as `{"op": "ended", "job": ..., "result": ...}` |
| `list` | `scope`, `session`, `turn`, `runs`, each or null |
| `detach` | `scope` or null, `job` |
| `renew`, `release` | `scope`, and `holder`, `ttl_s`; `wish` |
| `adopt` | |
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from remit.core.clock import Clock
from remit.processes.adoption import adopt_all, is_alive
from remit.processes.channel import Channel
from remit.processes.early_stops import EarlyStops
from remit.processes.frames import peer_uid
from remit.processes.lease_file import LeaseFile
from remit.processes.leases import LEASE_S
from remit.processes.nodes import Nodes
from remit.processes.place import Place
from remit.processes.requests import Requests
from remit.processes.seams import Forks
from remit.processes.stops import Stops
from remit.processes.supervisor import Supervisor
from remit.processes.table import ProcessIdentity
from remit.processes.timers import Timers

__all__ = ["Server"]

TICK_S = 15.0
"""How often old records are pruned, in seconds."""
IDLE_S = 600.0
"""How long a daemon without jobs, leases and clients stays, in seconds."""
_LONGEST_SELECT_S = 60.0
_QUIET_S = 0.002
"""How long nothing must happen before something is done ahead."""


class Server:
    """One daemon: serves a listening socket until it is idle for long or told to end.

    Args:
        place: where jobs and leases are kept.
        listener: bound and listening; taken over.
        clock: monotonic seconds of the machine.
        forks: makes keepers and sweepers.
        log: takes one line for people.
        uid_of: tells whose a connection is; None where it cannot be known, which the rights of
            the directory must then answer for.
        idle_s: see `IDLE_S`.
        lease_s: how long a start vouches for its scope, in seconds.
        is_alive: tells whether exactly this process runs.
    """

    def __init__(
        self,
        place: Place,
        listener: socket.socket,
        *,
        clock: Clock,
        forks: Forks,
        log: Callable[[str], None],
        uid_of: Callable[[socket.socket], int | None] = peer_uid,
        idle_s: float = IDLE_S,
        lease_s: float = LEASE_S,
        is_alive: Callable[[ProcessIdentity], bool] = is_alive,
    ) -> None:
        self._place = place
        self._listener = listener
        self._clock = clock
        self._forks = forks
        self._log = log
        self._uid_of = uid_of
        self._idle_s = idle_s
        self._selector = selectors.DefaultSelector()
        self._timers = Timers()
        self._peers: set[Channel] = set()
        self._used_at = clock.monotonic()
        self._is_prepared = False
        self.supervisor = Supervisor(
            place,
            clock=clock,
            timers=self._timers,
            forks=forks,
            open_channel=self._open,
            log=log,
            lease_s=lease_s,
            nodes=Nodes(is_alive),
        )
        self._early_stops = EarlyStops(place.stops, self.supervisor.records, log=log)
        self._stops = Stops(self.supervisor, clock=clock, log=log, came_early=self._early_stops.note)
        self._lease_file = LeaseFile(place.leases, self.supervisor.leases)
        self._requests = Requests(
            self.supervisor, self._stops, clock=clock, adopt=self.adopt, leases_changed=self._lease_file.save
        )
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._tick()

    def adopt(self) -> int:
        """Take over what an earlier daemon left and this one does not know; return how many live."""
        self._lease_file.load(self._clock.monotonic())
        self._early_stops.load(self._clock.monotonic())
        count = adopt_all(self._place, self.supervisor, clock=self._clock, log=self._log)
        self._stops.expire()
        return count

    def run(self) -> None:
        """Serve until idle for long."""
        while not self.is_idle():
            self.step(_LONGEST_SELECT_S)

    def step(self, timeout_s: float) -> None:
        """Do what is due and what has come, after waiting at most that long for it."""
        for key, mask in self._selector.select(0) or self._wait(timeout_s):
            self._is_prepared = False
            # What an earlier event of the same round closed must not be called any more.
            if key.fileobj in self._selector.get_map():
                key.data(mask)
        self._forks.reap()
        self._stops.expire()
        self._timers.run(self._clock.monotonic())

    def _wait(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        leases, nodes = self.supervisor.leases, self.supervisor.nodes
        due = min(self._timers.next_at(), leases.next_end(), nodes.next_look())
        pause = max(0.0, min(timeout_s, due - self._clock.monotonic()))
        if self._is_prepared or self.supervisor.is_starting:
            return self._selector.select(pause)
        # Not at once: what is done ahead would hold up what is under way.
        found = self._selector.select(min(pause, _QUIET_S))
        if not found:
            self._is_prepared = not self._forks.prepare()
        return found

    def is_idle(self) -> bool:
        """Tell whether there has been nothing to do for long."""
        now = self._clock.monotonic()
        if self.supervisor.live_count or self._peers or self.supervisor.leases.all():
            self._used_at = now
        return now - self._used_at >= self._idle_s

    def close(self) -> None:
        """Let go of everything; keepers stay, and wait for the next daemon."""
        self.supervisor.close()
        self._forks.close()
        for peer in tuple(self._peers):
            peer.close()
        self._listener.close()
        self._selector.close()

    def _tick(self) -> None:
        self.supervisor.prune()
        self._early_stops.compact()
        self._forks.trim()
        self._timers.call_at(self._clock.monotonic() + TICK_S, self._tick)

    def _open(
        self,
        connection: socket.socket,
        *,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
    ) -> Channel:
        return Channel(self._selector, connection, on_message=on_message, on_close=on_close)

    def _accept(self, mask: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has gone, or no descriptor is left; it tries again
            return
        uid = self._uid_of(connection)
        if uid is not None and uid != os.geteuid():
            self._log(f"refused a connection of user {uid}")
            connection.close()
            return
        self._peers.add(self._open(connection, on_message=self._requests.take, on_close=self._gone))

    def _gone(self, peer: Channel) -> None:
        self._peers.discard(peer)
        self._requests.forget(peer)
