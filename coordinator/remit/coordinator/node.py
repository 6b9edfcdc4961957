"""The local Ray node: found, started in the background, shared by all commands of a user, stopped.

**Invariants**

1. At most one node a state directory: starts and stops hold its lock.
2. The record exists exactly while a node is up; whoever ends the node removes it.
3. A start that does not succeed leaves no process, whatever ended it: an
   exception is cleaned up here, a `kill -9` by the watching process.
4. Nothing listens beyond loopback, and who connects needs the token.

Ray is never imported here: that takes two seconds, and most commands find the
node up.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from remit.coordinator.node_address import probe, resolve_address
from remit.coordinator.node_launch import Launcher, RayLauncher, child_environment, socket_path_excess
from remit.coordinator.node_processes import (
    NODE_MARK,
    NodeProcess,
    ProcessIdentity,
    find_processes,
    identify,
    is_alive,
    stop_processes,
)
from remit.coordinator.node_state import NodeRecord, StateDir, boot_id, default_state_dir
from remit.core.errors import CoordinatorUnavailable, InvalidArgument

__all__ = ["LocalNode", "NodeRecord", "probe", "resolve_address"]

_DEFAULT_IDLE_S = 900.0
_IN_USE_S = 60.0
"""A node touched this recently has users; coordinators touch at least twice as often while busy."""
_CONNECT_S = 2.0
_POLL_S = 0.05
_REPORT_EVERY_S = 5.0


def _silent(line: str) -> None:
    """Report nothing."""


class LocalNode:
    """The local node of one state directory. Methods may be called from any process and thread.

    Args:
        state_dir: None for `$REMIT_STATE_DIR`, else `/tmp/remit-<uid>`.
        launcher: what is started; None for Ray.
        idle_s: seconds without use after which a node that is started here
            stops; None for `$REMIT_NODE_IDLE_S`, else 900; `inf` for never.

    Raises:
        InvalidArgument: `idle_s` is not a positive number.
    """

    __slots__ = ("_idle_s", "_launcher", "_state")

    def __init__(
        self,
        state_dir: Path | None = None,
        launcher: Launcher | None = None,
        *,
        idle_s: float | None = None,
    ) -> None:
        self._state = StateDir(state_dir.absolute() if state_dir is not None else default_state_dir())
        self._launcher: Launcher = launcher if launcher is not None else RayLauncher()
        self._idle_s = _checked_idle_s(idle_s)

    @property
    def state(self) -> StateDir:
        """The directory of this node."""
        return self._state

    def status(self) -> NodeRecord | None:
        """Return the record of the node that is up, or None; takes about a millisecond.

        Up means: each process it ends with is the very one that was started, and
        its port accepts connections.

        Raises:
            CoordinatorUnavailable: the state directory is not safe to use.
        """
        if not self._state.check():
            return None
        record = self._state.load()
        if record is None or record.boot_id != boot_id():
            return None
        if not record.pids or not all(is_alive(process) for process in record.pids):
            return None
        host, _, port = record.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError):
            return None
        return record

    def ensure(self, progress: Callable[[str], None] = _silent, timeout_s: float = 120.0) -> NodeRecord:
        """Return the node that is up, or start one; two starters agree on one.

        Counts as use. Remains of a node that has died are removed first.

        Args:
            progress: called with lines for people: what is happening, and for how many seconds.
            timeout_s: seconds for all of it; a start takes 12 to 20 on two cores.

        Raises:
            CoordinatorUnavailable: it did not start (with the last lines of its
                log), or a node of another interpreter is in use.

        Cancellation: an exception in between (Ctrl-C, or one that `progress`
            raises) stops what was started and passes on.
        """
        self._state.create()
        began = time.monotonic()
        reporter = _Reporter(progress, began)
        try:
            with self._state.lock(
                timeout_s, lambda _: reporter.say("another process is starting or stopping the local Ray node")
            ):
                recent = time.time_ns() - self._state.used_ns() < _IN_USE_S * 1e9
                self._state.touch()
                record = self.status()
                if record is not None:
                    misfit = self._misfit(record)
                    if not misfit:
                        return record
                    if recent:
                        raise CoordinatorUnavailable(
                            f"the local Ray node is in use and {misfit}; wait for it to be idle, run `remit down`,"
                            " or set REMIT_STATE_DIR to another directory for a second node"
                        )
                    reporter.say(f"the local Ray node {misfit} and is idle: stopping it")
                self._stop_all(grace_s=5.0)
                return self._start(reporter, began + timeout_s)
        except TimeoutError as error:
            raise CoordinatorUnavailable(
                f"no local Ray node after {timeout_s:.0f} s: {error}; run `remit doctor`"
            ) from error

    def stop(self, grace_s: float = 10.0) -> list[str]:
        """Stop the node with all that descends from it, and remove what it leaves on disk.

        Processes that agents have started end too, unless they have left the
        node's tree.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL.

        Returns:
            What was stopped, `name (pid)`; empty if nothing was there.

        Raises:
            CoordinatorUnavailable: something would not end, even by SIGKILL, or
                another process has been starting the node for over a minute.
        """
        if not self._state.check():
            return []
        try:
            with self._state.lock(timeout_s=60.0 + grace_s):
                return self._stop_all(grace_s)
        except TimeoutError as error:
            raise CoordinatorUnavailable(f"the local Ray node was not stopped: {error}") from error

    def stop_unless_used(self, used_ns: int, grace_s: float = 10.0) -> bool:
        """Stop the node if nobody has used it since `used_ns`; return whether it was stopped.

        Returns False at once while another process starts or stops it.

        Args:
            used_ns: what `state.used_ns()` said.
            grace_s: as in `stop`.

        Raises:
            CoordinatorUnavailable: as `stop`.
        """
        if not self._state.check():
            return False
        try:
            with self._state.lock(timeout_s=0.0):
                # Looked at under the lock: `ensure` touches under it too, so no
                # node is stopped that somebody was just handed.
                if self._state.used_ns() != used_ns:
                    return False
                self._stop_all(grace_s)
                return True
        except TimeoutError:
            return False

    def touch(self) -> None:
        """Note that the node is in use; coordinators do so every half minute while busy."""
        try:
            self._state.touch()
        except OSError:
            # No node was started here (the directory is missing): nobody to tell.
            pass

    def environment(self, record: NodeRecord) -> dict[str, str]:
        """Return what must be in the environment before ray is imported to connect to this node."""
        variables = self._launcher.environment(record.token_path)
        if os.environ.get("RAY_AUTH_TOKEN"):
            # Ray would take that one before any file.
            variables["RAY_AUTH_TOKEN"] = record.token_path.read_text()
        return variables

    def processes(self) -> list[NodeProcess]:
        """Return all living processes of the node, recorded or not, without the caller."""
        found = find_processes(self._state.path, self._state.temp_dir, self._launcher.is_essential)
        record = self._state.load()
        if record is not None and record.boot_id == boot_id():
            known = {process.identity for process in found}
            recorded = [(process, "node") for process in (*record.pids, *record.side_pids)]
            found += [
                NodeProcess(identity, name)
                for identity, name in recorded
                if identity not in known and identity.pid != os.getpid() and is_alive(identity)
            ]
        return found

    def _misfit(self, record: NodeRecord) -> str:
        """Say why code of this interpreter cannot run on a node, or return the empty text."""
        if (record.ray_version, record.python_version) != (self._launcher.version, platform.python_version()):
            return (
                f"runs ray {record.ray_version} on Python {record.python_version}, not ray"
                f" {self._launcher.version} on Python {platform.python_version()}"
            )
        # Its workers import from where it was started; names of one interpreter differ (python, python3).
        if os.path.dirname(record.python) != os.path.dirname(sys.executable):
            return f"belongs to another environment ({record.python}, not {sys.executable})"
        return ""

    def _stop_all(self, grace_s: float) -> list[str]:
        seen, left = stop_processes(self.processes, grace_s)
        if left:
            names = ", ".join(f"{process.name} ({process.identity.pid})" for process in left)
            raise CoordinatorUnavailable(
                f"the local Ray node does not end: {names} still there after SIGKILL; end them by hand"
            )
        self._state.clear()
        return [f"{process.name} ({process.identity.pid})" for process in seen]

    def _start(self, reporter: _Reporter, deadline: float) -> NodeRecord:
        self._check_launch()
        self._state.temp_dir.mkdir(mode=0o700, exist_ok=True)
        self._state.write_token()
        self._state.touch()
        try:
            reporter.say(
                f"starting a local Ray node in the background; it serves later commands too and stops after"
                f" {self._idle_s / 60:.3g} idle minutes"
            )
            # First the watch, then the node: so there is no moment in which the
            # death of this process leaves a node that nobody will stop.
            watch = self._start_watch()
            self._launch(reporter, deadline)
            record = self._record(watch)
            self._state.save(record)
            if self.status() is None:
                raise self._failure("it ended right after its start")
            reporter.say(f"the local Ray node is up at {record.address}")
            return record
        except BaseException:
            # Ctrl-C too: no start may outlive the one who asked for it.
            self._stop_all(grace_s=2.0)
            raise

    def _check_launch(self) -> None:
        if not self._launcher.version:
            raise CoordinatorUnavailable("ray is not installed in this environment; run `pip install ray`")
        excess = socket_path_excess(self._state.temp_dir, self._launcher)
        if excess:
            raise CoordinatorUnavailable(
                f"the state directory {self._state.path} is {excess} bytes too long for the paths of sockets;"
                " set REMIT_STATE_DIR to a shorter one"
            )

    def _start_watch(self) -> ProcessIdentity:
        """Start the process that stops the node when it is idle, or when its start was killed."""
        # By file and not by name: importing the package would make it a large process.
        script = Path(__file__).with_name("node_watch.py")
        done = subprocess.run(
            [sys.executable, "-P", str(script), str(self._state.path), repr(self._idle_s)],
            env={**child_environment(), NODE_MARK: str(self._state.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            cwd="/",
        )
        identity = identify(int(done.stdout)) if done.returncode == 0 else None
        if identity is None:
            raise CoordinatorUnavailable(f"the process that watches the local node did not start: {done.stderr}")
        return identity

    def _launch(self, reporter: _Reporter, deadline: float) -> None:
        """Run the start command to its end."""
        with self._state.log_path.open("wb") as log:
            starter = subprocess.Popen(
                self._launcher.command(self._state.temp_dir),
                env={
                    **child_environment(),
                    **self._launcher.environment(self._state.token_path),
                    NODE_MARK: str(self._state.path),
                    "REMIT_STATE_DIR": str(self._state.path),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Workers start where the node did; that must be nobody's project.
                cwd=self._state.temp_dir,
                # Ctrl-C in the terminal goes to its whole process group.
                start_new_session=True,
            )
        try:
            while (status := starter.poll()) is None:
                if time.monotonic() >= deadline:
                    raise self._failure("it was not up in time")
                reporter.say(self._launcher.stage(self._state.temp_dir))
                try:
                    starter.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    pass
        except BaseException:
            starter.kill()
            starter.wait()
            raise
        if status != 0:
            raise self._failure(f"its start ended with status {status}")

    def _record(self, watch: ProcessIdentity) -> NodeRecord:
        """Describe the node that has just been started."""
        state = self._state
        processes = find_processes(state.path, state.temp_dir, self._launcher.is_essential)
        essential = tuple(process.identity for process in processes if process.essential)
        try:
            address = (state.temp_dir / "ray_current_cluster").read_text().strip()
        except OSError as error:
            raise self._failure("it noted no address") from error
        if not essential:
            raise self._failure("none of its processes is left")
        return NodeRecord(
            address=address,
            pids=essential,
            started_unix_ms=time.time_ns() // 1_000_000,
            token_path=state.token_path,
            temp_dir=state.temp_dir,
            log_path=state.log_path,
            ray_version=self._launcher.version,
            python=sys.executable,
            python_version=platform.python_version(),
            boot_id=boot_id(),
            side_pids=tuple(process.identity for process in processes if not process.essential),
            watch=watch,
        )

    def _failure(self, reason: str) -> CoordinatorUnavailable:
        """Describe a start that did not succeed, with what it printed last."""
        tail = self._state.log_tail()
        path = self._state.log_path
        printed = f"last lines of {path}:\n{tail}" if tail else f"it printed nothing to {path}"
        return CoordinatorUnavailable(
            f"the local Ray node did not start: {reason}; run `remit doctor`, or start Ray yourself and set"
            f" RAY_ADDRESS; {printed}"
        )


class _Reporter:
    """Pass lines on to a person when they say something new, or every few seconds."""

    __slots__ = ("_began", "_last", "_last_at", "_progress")

    def __init__(self, progress: Callable[[str], None], began: float) -> None:
        self._progress = progress
        self._began = began
        self._last = ""
        self._last_at = began

    def say(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last or now - self._last_at >= _REPORT_EVERY_S:
            self._last, self._last_at = text, now
            self._progress(f"{text} ({now - self._began:.0f} s)")


def _checked_idle_s(idle_s: float | None) -> float:
    """Return the idle time to use, in seconds."""
    value: float | str = idle_s if idle_s is not None else os.environ.get("REMIT_NODE_IDLE_S", "") or _DEFAULT_IDLE_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgument(f"REMIT_NODE_IDLE_S must be a positive number of seconds, not {value!r}")
    return seconds
