"""What the daemon answers: closed sets of words, and values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from remit.core.errors import ProcessProtocolError
from remit.processes.jobs import JobResult

__all__ = ["JobView", "StartAnswer", "StartKind", "StopAnswer", "StopKind", "StopSummary"]


class StartKind(StrEnum):
    """What became of a start."""

    STARTED = "started"
    """The program runs; this call started it."""
    ATTACHED = "attached"
    """The program runs already under this key."""
    FINISHED = "finished"
    """It ran under this key and has ended; see the result."""
    TOMBSTONED = "tombstoned"
    """A stop came first; nothing was started, and nothing will be."""


class StopKind(StrEnum):
    """What became of a stop. Only `stopped` and `not_running` say that nothing runs."""

    STOPPED = "stopped"
    """It was running and has ended; the result says what is left, if anything."""
    NOT_RUNNING = "not_running"
    """It had ended before; not an error."""
    PROCESS_KEY_NOT_FOUND = "process_key_not_found"
    """No such id or key in this scope, also when its start failed while we waited."""
    START_PENDING = "start_pending"
    """Its start is still under way; the stop is noted and will be carried out, but is not confirmed."""
    UNCONFIRMED = "unconfirmed"
    """It was told to stop and its end was not proven in time."""
    UNSUPPORTED = "unsupported"
    """The daemon or the keeper is too old for this call; says nothing about the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAnswer:
    """Answer to a start."""

    kind: StartKind
    """What became of it."""
    job: str
    """Id of the job; of the one that was attached to, if so. The one asked for when a stop came first."""
    pid: int = 0
    """Number of the program; 0 when it does not run."""
    generation: int = 0
    """Highest generation that started or attached."""
    result: JobResult | None = None
    """How it ended, for `finished`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as a mapping for JSON."""
        return {
            "kind": self.kind.value,
            "job": self.job,
            "pid": self.pid,
            "generation": self.generation,
            "result": encode_result(self.result),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StartAnswer:
        """Return the answer that `to_dict` wrote.

        Raises:
            ProcessProtocolError: it does not hold.
        """
        try:
            return cls(
                kind=StartKind(data["kind"]),
                job=str(data["job"]),
                pid=int(data["pid"]),
                generation=int(data["generation"]),
                result=decode_result(data.get("result")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _broken("start", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAnswer:
    """Answer to a stop."""

    kind: StopKind
    """What became of it."""
    job: str = ""
    """Id of the job; empty when there is none."""
    result: JobResult | None = None
    """How it ended, for `stopped` and `not_running`."""

    @property
    def is_proven_gone(self) -> bool:
        """Tell whether nothing of the job is left, with proof."""
        return (
            self.kind in (StopKind.STOPPED, StopKind.NOT_RUNNING)
            and self.result is not None
            and self.result.is_proven_gone
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as a mapping for JSON."""
        return {"kind": self.kind.value, "job": self.job, "result": encode_result(self.result)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StopAnswer:
        """Return the answer that `to_dict` wrote.

        Raises:
            ProcessProtocolError: it does not hold.
        """
        try:
            return cls(kind=StopKind(data["kind"]), job=str(data["job"]), result=decode_result(data.get("result")))
        except (KeyError, TypeError, ValueError) as error:
            raise _broken("stop", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSummary:
    """What became of a stop of many jobs."""

    stopped: tuple[JobResult, ...] = ()
    """Results of those that were running and have ended."""
    unconfirmed: tuple[str, ...] = ()
    """Ids of those that were told to stop and whose end was not proven in time."""
    spared: tuple[str, ...] = ()
    """Ids of background jobs that were left alone."""

    @property
    def is_proven_gone(self) -> bool:
        """Tell whether nothing that was to stop is left, with proof."""
        return not self.unconfirmed and all(result.is_proven_gone for result in self.stopped)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Return the numbers of the processes that could not be ended."""
        return tuple(pid for result in self.stopped for pid in result.survivors)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a mapping for JSON."""
        return {
            "stopped": [result.to_dict() for result in self.stopped],
            "unconfirmed": list(self.unconfirmed),
            "spared": list(self.spared),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StopSummary:
        """Return the summary that `to_dict` wrote.

        Raises:
            ProcessProtocolError: it does not hold.
        """
        try:
            return cls(
                stopped=tuple(JobResult.from_dict(item) for item in data["stopped"]),
                unconfirmed=tuple(map(str, data["unconfirmed"])),
                spared=tuple(map(str, data["spared"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise _broken("stop_many", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job as lists show it. The environment and standard input are in none of this."""

    job: str
    """Id of the job."""
    scope: str
    """The workspace."""
    key: str
    """Idempotency key, or empty."""
    session: str
    """Session it belongs to."""
    turn: str
    """Turn it belongs to."""
    run: str
    """Run that started it; empty for a turn's own."""
    path: tuple[str, ...]
    """Turn and runs above that, topmost first."""
    argv: tuple[str, ...]
    """Program and arguments, as they were given."""
    state: str
    """`pending`, `running` or `ended`."""
    pid: int
    """Number of the program; 0 before it runs."""
    background: bool
    """Whether it belongs to the session: no turn's cancel and no lease ends it."""
    generation: int
    """Highest generation that started or attached."""
    stopping: bool
    """Whether a stop was asked for."""
    age_s: float
    """Seconds since it was asked for."""
    output_dir: str
    """Directory of its output."""
    note: str
    """Free text that was given with it."""
    result: JobResult | None
    """How it ended, once it has."""

    def to_dict(self) -> dict[str, Any]:
        """Return the view as a mapping for JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return {**data, "argv": list(self.argv), "path": list(self.path), "result": encode_result(self.result)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobView:
        """Return the view that `to_dict` wrote.

        Raises:
            ProcessProtocolError: it does not hold.
        """
        try:
            known: dict[str, Any] = {name: data[name] for name in cls.__slots__}
            known["argv"], known["path"] = tuple(known["argv"]), tuple(known["path"])
            known["result"] = decode_result(known["result"])
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise _broken("list", error) from error


def encode_result(result: JobResult | None) -> dict[str, Any] | None:
    """Return a result as a mapping for JSON, or None."""
    return None if result is None else result.to_dict()


def decode_result(data: Any) -> JobResult | None:
    """Return the result that `encode_result` wrote.

    Raises:
        ProcessProtocolError: it is no result.
    """
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ProcessProtocolError("a result is no JSON object", version=None)
    return JobResult.from_dict(data)  # pyright: ignore[reportUnknownArgumentType]


def _broken(what: str, error: Exception) -> ProcessProtocolError:
    return ProcessProtocolError(f"the daemon's answer to {what!r} does not hold: {error!r}", version=None)
