"""What a local node keeps on disk: its directory, record, token, lock and marks of use.

    STATE_DIR/            0700, of this user
      node.json           the record of the node; present exactly while a node is up
      token               0600, Ray's authentication token
      node.log            what the start printed
      used                its time says when the node was last in use
      lock                flock: one start or stop at a time
      ray/                Ray's own directory (sockets, logs)

Ray makes its own directories writable by everybody, so the one around them
must keep others out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remit.coordinator.node_processes import ProcessIdentity
from remit.core.errors import CoordinatorUnavailable
from remit.processes.place import default_state_dir, unsafe_reason

__all__ = ["NodeRecord", "StateDir", "default_state_dir"]

_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One local node that was started.

    Attributes:
        address: `host:port` of its control service.
        pids: number and start time of each process the node ends with.
        started_unix_ms: wall time of the start.
        token_path: file with the authentication token.
        temp_dir: Ray's directory.
        log_path: what the start printed.
        ray_version: version of ray that runs.
        python: interpreter that runs it.
        python_version: version of that interpreter, `3.12.4`.
        boot_id: names the boot of the machine, so that no record outlives it; empty where unknown.
        side_pids: number and start time of the processes the node can do without.
        watch: the process that stops the node when it is idle.
    """

    address: str
    pids: tuple[ProcessIdentity, ...]
    started_unix_ms: int
    token_path: Path
    temp_dir: Path
    log_path: Path
    ray_version: str
    python: str
    python_version: str = ""
    boot_id: str = ""
    side_pids: tuple[ProcessIdentity, ...] = ()
    watch: ProcessIdentity | None = None

    def to_json(self) -> str:
        """Return the record as one JSON object."""
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @classmethod
    def from_json(cls, text: str) -> NodeRecord:
        """Return the record of a text made by `to_json`.

        Raises:
            ValueError: the text is no such record.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            known = {field.name for field in dataclasses.fields(cls)}
            data = {key: value for key, value in data.items() if key in known}
            for key in ("pids", "side_pids"):
                data[key] = tuple(ProcessIdentity(int(pid), float(start)) for pid, start in data[key])
            for key in ("token_path", "temp_dir", "log_path"):
                data[key] = Path(data[key])
            if data["watch"] is not None:
                data["watch"] = ProcessIdentity(int(data["watch"][0]), float(data["watch"][1]))
            return cls(**data)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"not a node record: {error}") from error


class StateDir:
    """The directory of one local node.

    Args:
        path: absolute path; need not exist.
    """

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """File of the record."""
        return self.path / "node.json"

    @property
    def token_path(self) -> Path:
        """File of the authentication token."""
        return self.path / "token"

    @property
    def log_path(self) -> Path:
        """File with what the last start printed."""
        return self.path / "node.log"

    @property
    def used_path(self) -> Path:
        """File whose time of change says when the node was last in use."""
        return self.path / "used"

    @property
    def temp_dir(self) -> Path:
        """Directory given to Ray."""
        return self.path / "ray"

    def check(self) -> bool:
        """Return whether the directory exists, after making sure that it is safe to use.

        Raises:
            CoordinatorUnavailable: it belongs to somebody else, is a symbolic
                link, or others may enter it.
        """
        try:
            reason = unsafe_reason(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable(str(error)) from error
        if reason is not None:
            raise self._unusable(reason)
        return True

    def create(self) -> None:
        """Make the directory, for this user alone.

        Raises:
            CoordinatorUnavailable: as `check`, or it cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise self._unusable(str(error)) from error
        # Looked at even when just made: the umask may have taken rights from us,
        # and between two calls somebody may have put another one in its place.
        self.check()

    @contextlib.contextmanager
    def lock(self, timeout_s: float, waiting: Callable[[float], None] | None = None) -> Generator[None]:
        """Hold the lock that one start or stop at a time takes.

        The kernel frees it when its holder dies, however it dies.

        Args:
            timeout_s: seconds to wait; 0 tries once.
            waiting: called at each look with the seconds waited so far.

        Raises:
            TimeoutError: somebody else holds it still.
        """
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            began = time.monotonic()
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - began
                    if waited >= timeout_s:
                        raise TimeoutError("another process is starting or stopping the local node") from None
                    if waiting is not None:
                        waiting(waited)
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    def load(self) -> NodeRecord | None:
        """Return the record, or None if there is none that can be read."""
        try:
            return NodeRecord.from_json(self.record_path.read_text())
        except (OSError, ValueError):
            return None

    def save(self, record: NodeRecord) -> None:
        """Write the record, all or nothing."""
        draft = self.record_path.with_suffix(".tmp")
        draft.write_text(record.to_json())
        draft.replace(self.record_path)

    def write_token(self) -> None:
        """Write a new secret token that only this user can read."""
        self.token_path.unlink(missing_ok=True)
        handle = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))

    def touch(self) -> None:
        """Note that the node is in use."""
        self.used_path.touch(mode=0o600)

    def used_ns(self) -> int:
        """Return when the node was last in use, in nanoseconds since 1970; 0 if never."""
        try:
            return self.used_path.stat().st_mtime_ns
        except OSError:
            return 0

    def clear(self) -> None:
        """Remove all that a node leaves, save the log of its start."""
        self.record_path.unlink(missing_ok=True)
        self.token_path.unlink(missing_ok=True)
        self.used_path.unlink(missing_ok=True)
        # Ray's processes are gone, so nothing writes here any more; what cannot
        # be removed is in nobody's way, since the next start has its own session.
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of what the start printed, without empty ones."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])

    def _unusable(self, reason: str) -> CoordinatorUnavailable:
        return CoordinatorUnavailable(
            f"the state directory {self.path} cannot be used: {reason}; or set REMIT_STATE_DIR to another one"
        )


def boot_id() -> str:
    """Return the name of this boot of the machine, or the empty text where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
