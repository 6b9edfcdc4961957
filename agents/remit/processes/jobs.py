"""One job: what is to be run, how far it is, and how it ended; as values, and as files of its directory.

**Invariants**

1. The environment and the data for standard input are in none of these values,
   so they reach neither a disk nor a log.
2. A file is whole or absent: it is written beside its place and renamed.
3. What a newer version wrote is refused, not guessed; unknown fields of the
   same version are passed over.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from remit.core.errors import InvalidArgument, ProcessProtocolError
from remit.processes.table import MARK_VARIABLE, ProcessIdentity

__all__ = [
    "OUTPUT_CAP_BYTES",
    "RESULT_NAME",
    "SOCKET_NAME",
    "SPEC_NAME",
    "STATE_NAME",
    "VERSION",
    "ExitStatus",
    "JobOutcome",
    "JobPhase",
    "JobResult",
    "JobSpec",
    "JobState",
    "StopCause",
    "boot_id",
    "fingerprint",
    "make_durable",
    "read_record",
    "write_record",
]

VERSION = 1
"""Version of every file and message of jobs."""

SPEC_NAME = "spec.json"
"""What is to be run, and as `digest` its fingerprint; written once, by the keeper."""
STATE_NAME = "state.json"
"""How far it is; written by the keeper alone, first before anything of the program runs."""
RESULT_NAME = "result.json"
"""How it ended; written once, by the keeper, or by `procd` when the keeper is gone."""
SOCKET_NAME = "ctl.sock"
"""Socket of the keeper; there while it lives."""

OUTPUT_CAP_BYTES = 64 * 1024 * 1024
"""How much of one stream is kept on the disk, by default."""

VOLATILE_VARIABLES = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "TRACEPARENT", "TRACESTATE", MARK_VARIABLE})
"""Variables that differ between two attempts of the same run and mean nothing to the program's work."""
_VOLATILE_PREFIXES = ("REMIT_", "RAY_")


class JobPhase(StrEnum):
    """How far a job is."""

    STARTING = "starting"
    """The keeper is there, the program is not executed yet."""
    RUNNING = "running"
    """The program is executed and its end is not yet known."""
    STOPPING = "stopping"
    """The program has ended or is being stopped; what is left of its tree is ended."""
    ENDED = "ended"
    """The result is written."""


class JobOutcome(StrEnum):
    """How a job ended; says nothing of the exit status."""

    EXITED = "exited"
    """The program ended by itself; its end was there before the first signal of a stop."""
    CANCELLED = "cancelled"
    """It was stopped, see `JobResult.cause`."""
    TIMED_OUT = "timed_out"
    """Its own time limit passed and it was stopped."""
    KEEPER_LOST = "keeper_lost"
    """Its keeper was killed; the tree was swept, the exit status is not known."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than its cap where the middle of a file cannot be given back, and was stopped."""
    NOT_STARTED = "not_started"
    """It could not be executed; see `JobResult.error`."""


class StopCause(StrEnum):
    """Why a keeper stops its job; the first one is kept."""

    CANCELLED = "cancelled"
    """Somebody asked."""
    TIMED_OUT = "timed_out"
    """The job's own time limit."""
    SUPERVISOR_LOST = "supervisor_lost"
    """Nobody took the lifeline over in time."""
    OUTPUT_LIMIT = "output_limit"
    """The cap of the output, see `JobOutcome.OUTPUT_LIMIT`."""

    @property
    def outcome(self) -> JobOutcome:
        """Return the outcome of a job that was stopped for this."""
        return JobOutcome.CANCELLED if self is StopCause.SUPERVISOR_LOST else JobOutcome(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended; both None when nobody can know."""

    exit_code: int | None = None
    """Status that it gave to exit, from 0."""
    signal: int | None = None
    """Number of the signal that ended it."""


class _Record:
    """A frozen dataclass that can be written as a JSON object and read back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object: the fields, and `v`, the version."""
        data: dict[str, Any] = {"v": VERSION}
        for name in _names_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, ProcessIdentity):
                value = [value.pid, value.started]
            elif isinstance(value, tuple):
                items: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]  # of a getattr
                value = [[one.pid, one.started] if isinstance(one, ProcessIdentity) else one for one in items]
            data[name] = value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the value that `to_dict` wrote.

        Raises:
            ProcessProtocolError: it is of another version, or does not hold.
        """
        if data.get("v") != VERSION:
            raise ProcessProtocolError(
                f"{cls.__name__} of version {data.get('v')!r} cannot be read, this is version {VERSION}; "
                "end the jobs of the other version, then start again",
                version=data.get("v"),
            )
        known = {name: data[name] for name in _names_of(cls) if name in data}
        try:
            return cls(**cls._decoded(known))
        except (TypeError, ValueError, LookupError) as error:
            raise ProcessProtocolError(f"{cls.__name__} does not hold: {error}", version=VERSION) from error

    @classmethod
    def _decoded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the types that JSON does not have."""
        return data


_NAMES: dict[type[_Record], tuple[str, ...]] = {}


def _names_of(kind: type[_Record]) -> tuple[str, ...]:
    """Return the names of a record's fields; looked up once, as this is done some times in each start."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # it is a dataclass
    return _NAMES[kind]


_RecordT = TypeVar("_RecordT", bound=_Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(_Record):
    """What is to be run, for whom, and how it may end."""

    job: str
    """Id of the job, `proc_...`."""
    scope: str
    """Identity of the workspace; keys mean nothing outside it."""
    argv: tuple[str, ...]
    """Program and arguments."""
    output_dir: str
    """Directory for its output, absolute."""
    key: str = ""
    """Idempotency key within the scope; empty for none."""
    session: str = ""
    """Session it belongs to."""
    turn: str = ""
    """Turn it belongs to."""
    run: str = ""
    """Run that started it; empty for a turn's own."""
    path: tuple[str, ...] = ()
    """Turn and runs above that, topmost first; each of them may list and stop it."""
    attempt: int = 1
    """Attempt of the run, from 1."""
    generation: int = 0
    """Grows with each start of the same key."""
    cwd: str | None = None
    """Working directory, absolute; None for that of the daemon (`/`)."""
    stdin: str = "null"
    """`null`, `pipe` (written later) or `data` (given with the start)."""
    umask: int = 0o022
    """Rights that files of the program do not get: that of the one who asked, not of the daemon."""
    output_cap: int = OUTPUT_CAP_BYTES
    """Bytes of each stream that stay on the disk."""
    timeout_s: float | None = None
    """Seconds from the start until `on_timeout`; None for no limit."""
    on_timeout: str = "stop"
    """`stop`, or `background`: the program goes on and belongs to the session."""
    background: bool = False
    """Whether it belongs to the session from the start: no lease and no turn's cancel ends it."""
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL, where a stop does not say."""
    note: str = ""
    """Free text for people."""

    def check(self) -> None:
        """Refuse what can never be run.

        Raises:
            InvalidArgument: a field is out of its range.
        """
        if not self.argv or not self.argv[0]:
            raise InvalidArgument("argv is empty; give the program and its arguments")
        if any("\0" in text for text in (*self.argv, self.cwd or "", self.output_dir)):
            raise InvalidArgument(f"argv or cwd of {self.argv[0]!r} holds a NUL character; remove it")
        if self.stdin not in ("null", "pipe", "data"):
            raise InvalidArgument(f"stdin {self.stdin!r} is none of 'null', 'pipe', 'data'")
        if self.on_timeout not in ("stop", "background"):
            raise InvalidArgument(f"on_timeout {self.on_timeout!r} is none of 'stop', 'background'")
        if self.timeout_s is not None and not (self.timeout_s >= 0 and math.isfinite(self.timeout_s)):
            raise InvalidArgument(f"timeout_s is {self.timeout_s!r}; give seconds from 0, or None")
        if not (self.grace_s >= 0 and math.isfinite(self.grace_s)):
            raise InvalidArgument(f"grace_s is {self.grace_s!r}; give seconds from 0")
        if not 0 <= self.umask <= 0o777:
            raise InvalidArgument(f"umask is {self.umask!r}; give a number from 0 to 0o777")
        if self.output_cap < 65_536:
            raise InvalidArgument(f"output_cap is {self.output_cap}; give at least 65536 bytes")
        if not os.path.isabs(self.output_dir) or (self.cwd is not None and not os.path.isabs(self.cwd)):
            raise InvalidArgument("output_dir and cwd must be absolute: the daemon has a directory of its own")

    @classmethod
    def _decoded(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "argv": tuple(data["argv"]), "path": tuple(data.get("path", ()))}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState(_Record):
    """How far a job is, and by what its processes are known."""

    job: str
    """Id of the job."""
    phase: JobPhase
    """How far it is."""
    boot: str
    """Names the boot of the machine; the identities mean nothing after another one."""
    token: str
    """Text that every process of the tree carries in its environment, see `MARK_VARIABLE`."""
    keeper: ProcessIdentity
    """The keeper."""
    root: ProcessIdentity | None = None
    """The program that was started; None before its start."""
    epoch: int = 0
    """Which supervisor holds the lifeline; a smaller one is refused."""
    background: bool = False
    """Whether it belongs to the session by now."""
    containment: str = ""
    """What holds the tree together, strongest first, such as `subreaper+pidfd`."""
    cgroup: str = ""
    """Path of the control group of the tree, or empty."""
    started_at: float = 0.0
    """Wall time of the start in seconds since 1970, for show."""
    started_monotonic: float = 0.0
    """The same on the machine's monotonic clock, for deadlines."""
    left: tuple[int, ...] = ()
    """After the end: processes that could not be ended and are still watched."""
    seen: tuple[ProcessIdentity, ...] = ()
    """Without subreapers: the tree as it was seen last, for whoever sweeps after the keeper."""

    @classmethod
    def _decoded(cls, data: dict[str, Any]) -> dict[str, Any]:
        root = data.get("root")
        return {
            **data,
            "phase": JobPhase(data["phase"]),
            "keeper": _identity(data["keeper"]),
            "root": None if root is None else _identity(root),
            "left": tuple(data.get("left", ())),
            "seen": tuple(_identity(pair) for pair in data.get("seen", ())),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(_Record):
    """How a job ended. There is exactly one for each job that was accepted."""

    job: str
    """Id of the job."""
    outcome: JobOutcome
    """How it ended."""
    exit_code: int | None = None
    """Status that the program gave to exit, from 0; None if a signal ended it or nobody knows."""
    signal: int | None = None
    """Number of the signal that ended it."""
    cause: dict[str, Any] | None = None
    """The cause that was given with the stop, see `remit.core.Cause.to_dict`."""
    signalled: tuple[int, ...] = ()
    """Numbers of the processes that a stop or the end of the program signalled."""
    escalated: tuple[int, ...] = ()
    """Those of them that needed SIGKILL."""
    survivors: tuple[int, ...] = ()
    """Processes that are still there; empty is the proof that nothing is left."""
    denied: tuple[int, ...] = ()
    """Processes that belong to somebody else by now and could not be signalled."""
    containment: str = ""
    """What held the tree together, see `JobState.containment`."""
    started_at: float = 0.0
    """Wall time of the start, seconds since 1970."""
    ended_at: float = 0.0
    """Wall time of the end, seconds since 1970."""
    duration_s: float = 0.0
    """Seconds between the two, on the monotonic clock."""
    stdout_bytes: int = 0
    """Bytes written to standard output, kept or not."""
    stderr_bytes: int = 0
    """Bytes written to standard error, kept or not."""
    truncated: bool = False
    """Whether a stream went over the cap and lost its middle on the disk."""
    error: str = ""
    """For `not_started`: one sentence, what and why."""
    errno: int | None = None
    """For `not_started`: the system's number of the error."""
    backgrounded: bool = False
    """Whether it belonged to the session at its end."""

    @property
    def is_proven_gone(self) -> bool:
        """Tell whether nothing of the tree was left when this was written."""
        return not self.survivors

    @classmethod
    def _decoded(cls, data: dict[str, Any]) -> dict[str, Any]:
        lists = {name: tuple(data.get(name, ())) for name in ("signalled", "escalated", "survivors", "denied")}
        return {**data, **lists, "outcome": JobOutcome(data["outcome"])}


def fingerprint(spec: JobSpec, *, env: Mapping[str, str], stdin: bytes | None = None) -> str:
    """Return what a second start with the same key must be equal in, as a hexadecimal SHA-256.

    Covers program and arguments, working directory, standard input and the
    environment but for what differs between attempts (`VOLATILE_VARIABLES`, and
    all names that begin with `REMIT_` or `RAY_`).
    """
    lasting = {
        name: value
        for name, value in env.items()
        if name not in VOLATILE_VARIABLES and not name.startswith(_VOLATILE_PREFIXES)
    }
    digest = hashlib.sha256()
    for part in _texts(spec, lasting):
        data = part.encode("utf-8", "surrogateescape")
        # Lengths first, so that no two lists of texts give the same bytes.
        digest.update(len(data).to_bytes(8, "big") + data)
    digest.update(stdin or b"")
    return digest.hexdigest()


def _texts(spec: JobSpec, env: Mapping[str, str]) -> Iterable[str]:
    yield from (str(len(spec.argv)), *spec.argv, spec.cwd or "", spec.stdin, str(len(env)))
    for name in sorted(env):
        yield from (name, env[name])


def write_record(path: Path, record: _Record, *, durable: bool = False) -> None:
    """Write a record as a file of its owner alone, whole or not at all.

    Args:
        path: where; an older file is replaced.
        record: what.
        durable: wait as `make_durable` does.

    Durability: without `durable` it survives the death of every process, and not that of the machine.

    Raises:
        OSError: no space, or no right; what was there before is still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    data = json.dumps(record.to_dict(), separators=(",", ":")).encode()
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
        os.rename(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
    if durable:
        make_durable(path)


def make_durable(path: Path) -> None:
    """Wait until a file, and its place in its directory, are on the disk.

    Raises:
        OSError: the disk failed, or the file is gone.
    """
    for place, flags in ((path, 0), (path.parent, os.O_DIRECTORY)):
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_record(path: Path, kind: type[_RecordT]) -> _RecordT | None:
    """Return the record of a file, or None when there is no such file.

    Raises:
        ProcessProtocolError: it is no such record; the message names the file.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ProcessProtocolError(f"{path} is no JSON: {error}; it belongs to no living job", version=None) from error
    if not isinstance(found, dict):
        raise ProcessProtocolError(f"{path} holds no JSON object; it belongs to no living job", version=None)
    try:
        return kind.from_dict(cast(dict[str, Any], found))
    except ProcessProtocolError as error:
        raise ProcessProtocolError(f"{path}: {error}", version=VERSION) from error


@functools.cache
def boot_id() -> str:
    """Return a text that names this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: the time of the boot does as well
        import psutil

        return f"boot-{psutil.boot_time():.0f}"


def _identity(pair: Any) -> ProcessIdentity:
    pid, started = pair
    return ProcessIdentity(int(pid), float(started))
