"""Chaos on two Ray nodes: hundreds of runs while everything that serves them is killed at random, from a seed.

`REMIT_CHAOS_S` (seconds, 120 by default) says how long, `REMIT_CHAOS_SEED` which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from remit.agents.tooldesk import scope_of
from remit.cli.records import opened
from remit.coordinator import Coordinator
from remit.core.errors import RemitError
from remit.core.events import RunAccepted, TurnAccepted, decode_event
from remit.core.messages import dumps
from remit.processes import ProcessClient
from remit.testing import await_until
from tests.ray.chaos_load import MARK
from tests.ray.test_recovery_on_ray import second_node

CHAOS_S = float(os.environ.get("REMIT_CHAOS_S", "120"))
SEED = int(os.environ.get("REMIT_CHAOS_SEED", "1"))
RUNS = 300 if CHAOS_S >= 120 else 0
"""How many runs there are at least: where the deaths left too little time, more come after them."""
CLIENTS = 3
SETTLE_S = 60.0
KINDS = {"host": (4, 6), "coordinator": (3, 12), "daemon": (2, 6), "client": (2, 6)}
"""What is killed: how often compared with the others, and how many programs are started in between."""


def _watched_shell(home: Path) -> Any:
    """Return a coordinator actor's class that can compare its state with its journal.

    Each life notes what its beginning has taken, in seconds: from the start of its
    process to the first call, and from there until it served.
    """
    from remit.coordinator.ray_engine import CoordinatorShell

    class WatchedShell(CoordinatorShell):
        _is_noted = False

        async def _begin(self) -> Any:
            called = time.time()
            life = await super()._begin()
            if self._is_noted:
                return life
            self._is_noted = True
            born = psutil.Process().create_time()
            hosts = len(life.service._decider.state.hosts)
            with (home / "lives").open("a") as file:
                file.write(
                    f"life {life.journal.epoch}: {called - born:.2f} s to its first call, "
                    f"{time.time() - called:.2f} s to serve, {hosts} hosts\n"
                )
            return life

        async def call(self, method: str, blob: bytes) -> bytes:
            if method != "compare":
                return await super().call(method, blob)
            from remit.coordinator.life import fold
            from tests.coordinator.decider_world import same

            life = self._life or await self._begin()
            await life.service._all_durable()
            while life.service._commits:
                await life.service._all_durable()
            # No await from here on, so nothing is decided between the two.
            reader = life.journal.reader()
            try:
                return dumps(("ok", same(life.service._decider.state, fold(reader))))
            finally:
                reader.close()

    return WatchedShell


class Clients:
    """Processes that hold turns; one that was killed is followed by another."""

    def __init__(self, workspace: Path, home: Path, environment: dict[str, str], chance: random.Random) -> None:
        argv = [sys.executable, "-m", "tests.ray.chaos_load", str(workspace), str(home)]
        self._parent = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._chance = chance
        self._pids: list[int] = []

    def begin(self) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{self._chance.randrange(10**6)}\n")
        self._pids.append(int(self._parent.stdout.readline()))

    def replace(self, pid: int) -> None:
        self._pids.remove(pid)
        self.begin()

    def living(self) -> list[int]:
        return [pid for pid in self._pids if psutil.pid_exists(pid)]

    def end(self) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._parent.kill()
        self._parent.communicate()


class Killer:
    """Kills what serves the runs, at times and in an order that a seed chooses.

    A kind is mostly spared until some programs were started after its last death: on a
    slow machine there would be nothing but deaths otherwise. Now and then it is not.
    """

    def __init__(self, chance: random.Random, clients: Clients, state_dir: Path, home: Path) -> None:
        self._chance = chance
        self._clients = clients
        self.state_dir = state_dir
        self._home = home
        self._began = time.monotonic()
        self._spared: dict[str, int] = {}
        self.history: list[str] = []
        self.killed: Counter[str] = Counter()

    def strike(self, kind: str = "") -> None:
        """Kill one process of a kind that is chosen first, or of one that is named."""
        regardless = bool(kind) or self._chance.random() < 0.15
        kind = kind or self._chance.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
        place = self._chance.random()
        started = len(_read(self._home, "started").splitlines())
        victims = self._victims(kind)
        if not victims or (started < self._spared.get(kind, 1) and not regardless):
            return
        self._spared[kind] = started + KINDS[kind][1]
        pid = victims[int(place * len(victims))]
        at = f"{time.monotonic() - self._began:6.1f} s, {time.time():.3f}"
        self.history.append(f"{at}, {started} programs: {kind} {pid}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed[kind] += 1
        if kind == "client":
            self._clients.replace(pid)

    def pause_s(self) -> float:
        """Return how long to wait for the next; now and then two come at once."""
        return 0.0 if self._chance.random() < 0.15 else self._chance.uniform(0.5, 3.0)

    def _victims(self, kind: str) -> list[int]:
        if kind == "client":
            return sorted(self._clients.living())
        if kind == "daemon":
            life = self.state_dir / "procd" / "life"
            text = life.read_text().strip() if life.exists() else ""
            return [int(text)] if text and psutil.pid_exists(int(text)) else []
        name = "WatchedShell" if kind == "coordinator" else "HostShell"
        return sorted(self._actors(name))

    def _actors(self, name: str) -> Iterator[int]:
        """Yield the actors of our own cluster: their log is in our folder."""
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or ())
            if title.startswith("ray::") and name in title:
                try:
                    if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{self.state_dir}/"):
                        yield process.pid
                except OSError:
                    continue


def _accepted(workspace: Path) -> int:
    with opened(workspace) as records:
        return 0 if records.reader is None else sum(1 for _ in records.reader.read(kinds=("run_accepted",)))


def _left(home: Path) -> list[str]:
    """Return the living programs that the load has started, and what these have forked."""
    return [
        f"{process.pid} {' '.join(process.info['cmdline'] or ())[:80]}"
        for process in psutil.process_iter(["environ", "cmdline", "status"])
        if (process.info["environ"] or {}).get(MARK) == str(home) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _programs(workspace: Path) -> str:
    """Return what the daemon of programs knows of those that are not proven gone, for people."""
    try:
        with closing(ProcessClient()) as client:
            views = client.list(scope=scope_of(workspace))
    except RemitError as error:
        return f"nobody says: {error}"
    left = [view for view in views if view.result is None or not view.result.is_proven_gone]
    return "\n".join(f"{view.run} pid {view.pid} {psutil.pid_exists(view.pid)}: {view}" for view in left)


def _warnings(state_dir: Path) -> str:
    """Return what coordinators had to say about programs and hosts."""
    words = ("could not be", "does not say", "did not come up", "out of reach")
    lines = [
        f"{path.name}: {line}"
        for path in sorted(state_dir.glob("ray/session_*/logs/*"))
        if path.is_file() and path.suffix in (".err", ".out", ".log")
        for line in path.read_text(errors="replace").splitlines()
        if any(word in line for word in words) and "remit" in line
    ]
    return "\n".join(lines[-40:])


def _read(home: Path, name: str) -> str:
    return (home / name).read_text() if (home / name).exists() else ""


@contextmanager
def _told_on_failure(killer: Killer, workspace: Path, home: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {SEED}; killed: {dict(killer.killed)}; {_accepted(workspace)} runs")
        error.add_note("\n".join(killer.history))
        error.add_note(f"-- programs that are not proven gone\n{_programs(workspace)}")
        error.add_note(f"-- warnings\n{_warnings(killer.state_dir)}")
        for note in ("errors", "lost_contact", "overlaps", "lives", *(stacks.name for stacks in home.glob("stacks.*"))):
            text = _read(home, note)
            if text:
                error.add_note(f"-- {note}\n{text}")
        raise


def _check_journal(workspace: Path) -> None:
    """One terminal event for each that was accepted, and one start for each attempt."""
    with opened(workspace) as records:
        assert records.reader is not None
        rows = list(records.reader.read())
        assert records.state.locks.claims() == ()
    events = [decode_event(row.kind, row.node_id, row.turn_id, row.data) for row in rows]
    accepted = Counter(event.node_id for event in events if isinstance(event, RunAccepted | TurnAccepted))
    assert Counter(event.node_id for event in events if event.terminal) == accepted
    assert sum(name.startswith("run_") for name in accepted) >= RUNS
    starts = Counter((event.node_id, event.attempt) for event in events if event.kind == "run_started")  # type: ignore[attr-defined]
    assert set(starts.values()) == {1}


@pytest.mark.soak
@pytest.mark.timeout(CHAOS_S + 300.0)
@pytest.mark.field_report("J1")
def test_whatever_is_killed_every_run_ends_once_and_nothing_is_left(
    ray_connection: None, ray_node: dict[str, str], tmp_path: Path
) -> None:
    from remit.coordinator import ray_engine
    from remit.coordinator.node import LocalNode

    state_dir = Path(ray_node["REMIT_STATE_DIR"])
    record = LocalNode(state_dir).status()
    assert record is not None
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    chance = random.Random(SEED)

    async def chaos(killer: Killer) -> None:
        until = time.monotonic() + CHAOS_S
        while time.monotonic() < until:
            await asyncio.sleep(killer.pause_s())
            await asyncio.to_thread(killer.strike)
        # The last to die have nobody after them whose restart would mend what is left undone.
        for kind in ("host", "daemon", "host"):
            await asyncio.to_thread(killer.strike, kind)
        try:
            while await asyncio.to_thread(_accepted, workspace) < RUNS:
                assert time.monotonic() < until + SETTLE_S, "too few runs were accepted"
                await asyncio.sleep(0.5)
        finally:
            (home / "over").touch()

    async def settled(coordinator: Coordinator) -> bool:
        found = await coordinator.statistics()
        return not (found["live_runs"] or found["live_turns"])

    async def main(killer: Killer, clients: Clients) -> None:
        await await_until(lambda: sum(n["Alive"] for n in ray_engine.ray.nodes()) == 2, timeout_s=150.0)
        ray_engine.find_coordinator(str(workspace.resolve()), shell=_watched_shell(home))
        for _ in range(CLIENTS):
            clients.begin()
        await chaos(killer)
        try:
            await await_until(lambda: not clients.living(), timeout_s=SETTLE_S, message="clients hang")
        finally:
            for pid in clients.living():
                os.kill(pid, signal.SIGUSR1)
        async with Coordinator.open(workspace) as coordinator:
            try:
                limit = time.monotonic() + SETTLE_S
                while not await settled(coordinator):
                    assert time.monotonic() < limit, f"still live: {await _live(coordinator)}"
                    await asyncio.sleep(0.2)
                # A run whose host died has ended; the proof that its programs are gone may take longer.
                while (left := await asyncio.to_thread(_left, home)) or await coordinator.locks():
                    assert time.monotonic() < limit, f"left: {left}, {await coordinator.locks()}"
                    await asyncio.sleep(0.2)
                assert await coordinator.session.request("compare", None) == ""
                assert set((await coordinator.statistics())["slots_used"].values()) == {0}
            finally:
                await asyncio.wait_for(coordinator.shutdown("test", timeout_s=10.0), 30.0)
        assert _read(home, "errors") == ""
        assert _read(home, "overlaps") == ""
        started = Counter(_read(home, "started").splitlines())
        assert [key for key, times in started.items() if times > 1] == [], "programs started more than once for a key"
        _check_journal(workspace)

    clients = Clients(workspace, home, ray_node, chance)
    killer = Killer(chance, clients, state_dir, home)
    with second_node(ray_node, record.address, tmp_path / "node.log"), _told_on_failure(killer, workspace, home):
        try:
            asyncio.run(main(killer, clients))
        finally:
            clients.end()
    assert killer.killed.keys() == KINDS.keys()


async def _live(coordinator: Coordinator) -> list[str]:
    return [f"{view.id} {view.state} {view.waiting_for}" for view in await coordinator.runs() if view.outcome is None]
