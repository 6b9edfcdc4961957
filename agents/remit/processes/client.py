"""What agents use: start, wait for, list and stop tool processes that belong to no worker.

Every call is a short conversation with the daemon of this node and user over a
connection that no other call uses meanwhile, so calls from many threads do not wait
for each other, and a caller that is killed leaves nothing half said.
"""

from __future__ import annotations

import base64
import builtins
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from remit.core.cause import Cause
from remit.core.clock import Clock, SystemClock
from remit.core.errors import (
    CommandNotStarted,
    NotFound,
    ProcdUnavailable,
    ProcessCallUnsupported,
    ProcessError,
    ProcessProtocolError,
)
from remit.processes.answers import (
    JobView,
    StartAnswer,
    StopAnswer,
    StopKind,
    StopSummary,
    decode_result,
)
from remit.processes.doctor import Leftover, find_leftovers
from remit.processes.frames import MAX_FRAME_BYTES, connect, encode, receive, send
from remit.processes.jobs import RESULT_NAME, SOCKET_NAME, JobResult, JobSpec, read_record
from remit.processes.leases import LEASE_S
from remit.processes.lines import Lines
from remit.processes.nodes import encode_own_node
from remit.processes.place import Place
from remit.processes.records import StopWish
from remit.processes.starting import ensure_daemon
from remit.processes.watches import Watch, Watches
from remit.processes.wire import decode_error, encode_wish

__all__ = ["ProcessClient"]

_TRIES = 4
"""How often a call is made when the daemon dies while it is under way."""
_STDIN_CHUNK_BYTES = 256 * 1024
_STDIN_POLL_S = 0.02
_CALL = 1
"""Number of the one call that a connection carries at a time."""
_SLACK_S = 30.0
"""How much later than promised an answer may come on a loaded machine."""


class ProcessClient:
    """The tool processes of this node and user. Thread-safe.

    Between calls it holds open nothing but watches and `kept` connections.

    Args:
        state_dir: directory of the node; None means `$REMIT_STATE_DIR`, else the default.
        start: start the daemon when there is none; else such a call raises.
        clock: for the time limits of waits; None means the system's.
        failpoint: called with a name at `start_sending`, `start_sent` and `start_answered`; for tests.
        kept: how many connections stay open between calls, until `close`; the daemon stays as long.

    Cancellation:
        The calls block. A thread that must stop waiting leaves the rest to the daemon:
        whatever was asked for goes on.
    """

    def __init__(
        self,
        *,
        state_dir: Path | None = None,
        start: bool = True,
        clock: Clock | None = None,
        failpoint: Callable[[str], None] | None = None,
        kept: int = 0,
    ) -> None:
        self._place = Place(state_dir)
        self._may_start = start
        self._clock = clock or SystemClock()
        self._failpoint = failpoint or _no_failpoint
        self._lines = Lines(self._place.socket, connect_s=_SLACK_S, kept=kept)
        self._watches = Watches(self._place, ensure=self._ensure)

    @property
    def state_dir(self) -> Path:
        """Return the directory of the node."""
        return self._place.state_dir

    def start(self, spec: JobSpec, *, env: Mapping[str, str], stdin: bytes | None = None) -> StartAnswer:
        """Start a program, or attach to the one that its key stands for. Blocks, some milliseconds as a rule.

        The same spec sent twice starts once. In a worker of Ray it is started for the worker's
        node: a foreground program ends some seconds after that node has gone. Environment and input travel in
        memory and are written nowhere.

        Args:
            spec: what is to run; its job id must be new for a new start.
            env: the whole environment of the program.
            stdin: data for standard input, for `spec.stdin == "data"`.

        Raises:
            ProcessKeyConflict: the key stands for another command; nothing was started.
            CommandNotStarted: it cannot be executed; the key is free again.
            InvalidArgument: a field of the spec is out of its range.
            ProcdUnavailable: no daemon; whether it runs is known to `stop` by key.
        """
        fields: dict[str, Any] = {
            "spec": spec.to_dict(),
            "env": dict(env),
            "stdin": None if stdin is None else base64.b64encode(stdin).decode("ascii"),
            "node": encode_own_node(),
        }
        try:
            frame = encode("start", id=_CALL, **fields)
        except ProcessProtocolError as error:
            program = spec.argv[0] if spec.argv else ""
            raise CommandNotStarted(
                f"cannot start {program!r}: arguments, environment and input are together above "
                f"{MAX_FRAME_BYTES} bytes; pass large values in files",
                program=program,
                errno=None,
            ) from error
        self._failpoint("start_sending")
        answer = self._ask_daemon("start", frame, _SLACK_S)
        self._failpoint("start_answered")
        return StartAnswer.from_dict(answer)

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobResult | None:
        """Wait for the end of a job, also one that ended long ago; None when the limit is over first.

        Args:
            job: its id.
            timeout_s: seconds, or None for no limit. Its expiry stops nothing.

        Raises:
            NotFound: no such job is known, or it was never started.
            ProcdUnavailable: no daemon, and no result on the disk.
        """
        until = math.inf if timeout_s is None else self._clock.monotonic() + timeout_s
        result = self._result_on_disk(job)
        if result is not None:
            return result
        left = None if timeout_s is None else max(0.0, until - self._clock.monotonic())
        answer = self._call("wait", _for_s=None if left is None else left + _SLACK_S, job=job, timeout_s=left)
        return decode_result(answer.get("result"))

    def watch(self, job: str, callback: Callable[[JobResult], None]) -> Watch:
        """Have a function called when a job has ended; in one thread for all watches of this client.

        A daemon that dies is found or started again. A job that nobody knows
        any more is reported as `keeper_lost`.

        Args:
            job: its id.
            callback: called once, soon also for a job that has ended already. Must not block.
        """
        return self._watches.add(job, callback)

    def stop(
        self,
        *,
        scope: str,
        job: str | None = None,
        key: str | None = None,
        cause: Cause | None = None,
        grace_s: float = 2.0,
        kill: bool = False,
        tombstone: bool = False,
        generation: int | None = None,
        limit_s: float | None = None,
    ) -> StopAnswer:
        """Stop one job with its whole tree, by id, else by key; blocks until proven gone or the limit.

        Args:
            scope: the workspace; ids and keys of others are as unknown ones.
            job: its id, or None.
            key: its key, or None.
            cause: why; kept in the result if it is the first.
            grace_s: seconds between SIGTERM and SIGKILL.
            kill: skip the grace.
            tombstone: if it is not known, refuse the start that may still come.
            generation: the highest that a tombstone refuses; None refuses all.
            limit_s: seconds to wait for the proof; None waits the grace and some seconds more.

        Raises:
            ProcdUnavailable: no daemon; nothing is known.
        """
        wish = StopWish(cause=None if cause is None else cause.to_dict(), grace_s=grace_s, kill=kill)
        try:
            answer = self._call(
                "stop",
                _for_s=_SLACK_S + (wish.limit_s if limit_s is None else limit_s),
                scope=scope,
                job=job,
                key=key,
                wish=encode_wish(wish),
                tombstone=tombstone,
                generation=generation,
                limit_s=limit_s,
            )
        except ProcessCallUnsupported:
            return StopAnswer(kind=StopKind.UNSUPPORTED, job=job or "")
        return StopAnswer.from_dict(answer)

    def stop_many(
        self,
        *,
        scope: str,
        runs: Collection[str],
        cause: Cause | None = None,
        grace_s: float = 2.0,
        kill: bool = False,
        foreground_only: bool = True,
        generation: int | None = None,
        limit_s: float | None = None,
    ) -> StopSummary:
        """Stop all that these runs started, in one message, and refuse what they start later.

        Args:
            scope: the workspace.
            runs: ids of runs, and of turns for what a turn started itself.
            cause: why; kept in each result if it is the first.
            grace_s: seconds between SIGTERM and SIGKILL.
            kill: skip the grace.
            foreground_only: spare background jobs; they are named in the answer.
            generation: the highest of later starts that is refused; None refuses all.
            limit_s: seconds to wait for the proof; None waits the grace and some seconds more.

        Raises:
            ProcessCallUnsupported: the daemon is too old for this; says nothing of the processes.
            ProcdUnavailable: no daemon; nothing is known.
        """
        wish = StopWish(cause=None if cause is None else cause.to_dict(), grace_s=grace_s, kill=kill)
        answer = self._call(
            "stop_many",
            _for_s=_SLACK_S + (wish.limit_s if limit_s is None else limit_s),
            scope=scope,
            runs=sorted(runs),
            wish=encode_wish(wish),
            foreground_only=foreground_only,
            generation=generation,
            limit_s=limit_s,
        )
        return StopSummary.from_dict(answer)

    def list(
        self,
        *,
        scope: str | None = None,
        session: str | None = None,
        turn: str | None = None,
        runs: Collection[str] | None = None,
    ) -> list[JobView]:
        """Return the jobs that match everything given, oldest first, those that ended lately among them.

        Raises:
            ProcdUnavailable: no daemon.
        """
        answer = self._call(
            "list", scope=scope, session=session, turn=turn, runs=None if runs is None else sorted(runs)
        )
        return [JobView.from_dict(item) for item in answer["jobs"]]

    def detach(self, job: str, *, scope: str | None = None) -> None:
        """Make a job the session's: no turn's cancel and no lease ends it any more.

        Raises:
            NotFound: no such job is known in the scope.
            ProcdUnavailable: no daemon.
        """
        self._call("detach", job=job, scope=scope)

    def write_stdin(self, job: str, data: bytes) -> None:
        """Write to the standard input of a job that was started with `stdin="pipe"`; waits for its reader.

        Raises:
            NotFound: no such job lives.
            ProcessError: its standard input is closed.
        """
        with self._keeper(job) as keeper:
            for at in range(0, len(data), _STDIN_CHUNK_BYTES):
                chunk = base64.b64encode(data[at : at + _STDIN_CHUNK_BYTES]).decode("ascii")
                while _ask(keeper, job, "write", data=chunk) == "stdin_full":
                    time.sleep(_STDIN_POLL_S)  # others write as well; there is no word for "room again"

    def close_stdin(self, job: str) -> None:
        """Close the standard input of a job, after all that was written. Harmless twice.

        Raises:
            NotFound: no such job lives.
        """
        with self._keeper(job) as keeper:
            _ask(keeper, job, "close_stdin")

    def renew(self, scope: str, *, holder: str, ttl_s: float = LEASE_S) -> None:
        """Vouch for the foreground jobs of a scope for some seconds more.

        Args:
            scope: the workspace.
            holder: who vouches, for people.
            ttl_s: seconds, at most an hour.

        Raises:
            ProcdUnavailable: no daemon.
        """
        self._call("renew", scope=scope, holder=holder, ttl_s=ttl_s)

    def release(self, scope: str, *, cause: Cause | None = None, grace_s: float = 2.0) -> StopSummary:
        """End the lease of a scope in good order: its foreground jobs stop, background ones go on.

        Raises:
            ProcdUnavailable: no daemon.
        """
        wish = StopWish(cause=None if cause is None else cause.to_dict(), grace_s=grace_s)
        answer = self._call("release", _for_s=_SLACK_S + wish.limit_s, scope=scope, wish=encode_wish(wish))
        return StopSummary.from_dict(answer)

    def adopt(self) -> int:
        """Have the daemon take over what an earlier one left; return how many jobs live.

        Raises:
            ProcdUnavailable: no daemon.
        """
        return int(self._call("adopt")["live"])

    def doctor(self) -> builtins.list[Leftover]:
        """Return what is left over on this node and belongs to nobody, with the run it came from.

        Starts no daemon and changes nothing.
        """
        return find_leftovers(self._place, known=self._known_jobs())

    def close(self) -> None:
        """End all watches; no callback is called after this. Jobs go on."""
        self._watches.close()
        self._lines.close()

    def _known_jobs(self) -> frozenset[str] | None:
        everything = dict.fromkeys(("scope", "session", "turn", "runs"))
        try:
            answer = self._converse("list", encode("list", id=_CALL, **everything), _SLACK_S)
        except (OSError, ProcessError):
            return None
        return frozenset(str(item["job"]) for item in answer["jobs"])

    def _ensure(self) -> None:
        if not self._may_start:
            raise ProcdUnavailable(
                f"no daemon of tool processes serves {self._place.root}; it starts with the first process",
                path=str(self._place.root),
            )
        ensure_daemon(self._place)

    def _call(self, op: str, *, _for_s: float | None = _SLACK_S, **fields: Any) -> dict[str, Any]:
        """Ask the daemon, after starting it if need be."""
        return self._ask_daemon(op, encode(op, id=_CALL, **fields), _for_s)

    def _ask_daemon(self, op: str, frame: bytes, limit_s: float | None) -> dict[str, Any]:
        """Send a call, again if the daemon dies meanwhile, since no call acts twice; return its answer."""
        broken: Exception | None = None
        for _ in range(_TRIES):
            try:
                return self._converse(op, frame, limit_s)
            except TimeoutError as error:
                raise ProcdUnavailable(
                    f"the daemon of tool processes did not answer {op!r} in time; see {self._place.log}",
                    path=str(self._place.log),
                ) from error
            except OSError as error:
                broken = error
                self._ensure()
        raise ProcdUnavailable(
            f"the daemon of tool processes ended {_TRIES} times while it was asked for {op!r}: {broken}; "
            f"see {self._place.log}",
            path=str(self._place.log),
        ) from broken

    def _converse(self, op: str, frame: bytes, limit_s: float | None) -> dict[str, Any]:
        def talk(connection: socket.socket) -> dict[str, Any]:
            connection.settimeout(_SLACK_S)
            connection.sendall(frame)
            if op == "start":
                self._failpoint("start_sent")
            connection.settimeout(limit_s)
            try:
                answer = receive(connection)
            except ProcessProtocolError as error:
                raise ConnectionResetError(str(error)) from error
            if answer is None:
                raise ConnectionResetError("the daemon closed the connection")
            return answer

        answer = self._lines.call(talk)
        if answer.get("op") == "error":
            raise decode_error(answer)
        if answer.get("kind") == "unsupported":
            raise ProcessCallUnsupported(
                f"the daemon of tool processes is too old for {op!r}; end its jobs, then start it again",
                version=answer.get("version"),
            )
        return answer

    def _result_on_disk(self, job: str) -> JobResult | None:
        try:
            return read_record(self._place.job(job) / RESULT_NAME, JobResult)
        except (OSError, ProcessProtocolError):
            return None

    def _keeper(self, job: str) -> socket.socket:
        try:
            return connect(self._place.job(job) / SOCKET_NAME)
        except OSError as error:
            raise NotFound(f"no process {job!r} lives on this node; `remit processes` lists them", job=job) from error


def _ask(keeper: socket.socket, job: str, op: str, **fields: Any) -> str:
    """Return the keeper's word on one request about standard input.

    Raises:
        NotFound: the job ended meanwhile.
        ProcessError: standard input is closed.
    """
    try:
        send(keeper, op, id=1, **fields)
        answer = receive(keeper)
    except (OSError, ProcessProtocolError):
        answer = None
    if answer is None:
        raise NotFound(f"process {job!r} ended meanwhile", job=job)
    kind = str(answer.get("kind"))
    if op == "write" and kind == "stdin_closed":
        raise ProcessError(f"standard input of process {job!r} is closed; nothing more can be written", job=job)
    if kind == "unsupported":
        raise ProcessCallUnsupported(f"the keeper of {job!r} is too old for {op!r}", version=answer.get("v"))
    if kind == "bad_request":
        raise ProcessProtocolError(f"the keeper of {job!r} does not take {op!r}: {kind}", version=answer.get("v"))
    return kind


def _no_failpoint(name: str) -> None:
    """Do nothing."""
