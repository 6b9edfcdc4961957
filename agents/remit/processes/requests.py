"""What clients ask of the daemon: read their messages, call what they ask for, word the answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from remit.core.clock import Clock
from remit.core.errors import InvalidArgument, NotFound, RemitError
from remit.processes.answers import JobView, StartAnswer, encode_result
from remit.processes.channel import Channel
from remit.processes.frames import refusal
from remit.processes.jobs import JobResult, JobSpec, fingerprint
from remit.processes.leases import LEASE_S, MAX_TTL_S
from remit.processes.records import Record, StopWish
from remit.processes.seams import Start
from remit.processes.stops import Stops
from remit.processes.supervisor import Supervisor
from remit.processes.table import ProcessIdentity
from remit.processes.wire import encode_error

__all__ = ["Requests"]

Message = dict[str, Any]
_Handler = Callable[[Channel, Message], None]


class Requests:
    """The daemon's side of the conversation with its clients.

    Args:
        supervisor: the jobs.
        stops: stops them.
        clock: monotonic seconds of the machine.
        adopt: takes over what an earlier daemon left; returns how many live.
        leases_changed: called after a coordinator renewed or released.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        stops: Stops,
        *,
        clock: Clock,
        adopt: Callable[[], int],
        leases_changed: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._records = supervisor.records
        self._stops = stops
        self._clock = clock
        self._adopt = adopt
        self._leases_changed = leases_changed
        self._waits: dict[Channel, dict[str, Callable[[], None]]] = {}
        self._handlers: dict[str, _Handler] = {
            "ping": self._ping,
            "start": self._start,
            "stop": self._stop,
            "stop_many": self._stop_many,
            "wait": self._wait,
            "watch": self._watch,
            "unwatch": self._unwatch,
            "list": self._list,
            "detach": self._detach,
            "renew": self._renew,
            "release": self._release,
            "adopt": self._take_over,
        }

    def take(self, peer: Channel, message: Message) -> None:
        """Carry out one request; a bad one is answered with an error and changes nothing."""
        refused = refusal(message, frozenset(self._handlers))
        if refused is not None:
            peer.send("answer", **refused)
            return
        try:
            self._handlers[str(message["op"])](peer, message)
        except RemitError as error:
            _fail(peer, message, error)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            _fail(peer, message, InvalidArgument(f"request {message.get('op')!r} does not hold: {error!r}"))

    def forget(self, peer: Channel) -> None:
        """Drop what a peer waits for. What it asked to be done goes on."""
        for call_off in self._waits.pop(peer, {}).values():
            call_off()

    def _ping(self, peer: Channel, message: Message) -> None:
        _reply(peer, message, live=self._supervisor.live_count)

    def _start(self, peer: Channel, message: Message) -> None:
        spec = JobSpec.from_dict(message["spec"])
        spec.check()
        _check_job_id(spec.job)
        env = _texts(message["env"])
        stdin = None if message.get("stdin") is None else base64.b64decode(message["stdin"], validate=True)
        node = None if message.get("node") is None else _identity(*message["node"])

        def answered(answer: StartAnswer | RemitError) -> None:
            if isinstance(answer, RemitError):
                _fail(peer, message, answer)
            else:
                _reply(peer, message, **answer.to_dict())

        self._supervisor.start(
            Start(
                spec=spec,
                node=node,
                fingerprint=fingerprint(spec, env=env, stdin=stdin),
                env=env,
                stdin=stdin,
                answered=answered,
                wanted=lambda: not peer.is_closed,
            )
        )

    def _stop(self, peer: Channel, message: Message) -> None:
        self._stops.stop(
            str(message["scope"]),
            job=str(message.get("job") or ""),
            key=str(message.get("key") or ""),
            wish=_wish(message),
            tombstone=bool(message.get("tombstone")),
            generation=_number_or_none(message, "generation", int),
            limit_s=_number_or_none(message, "limit_s", float),
            answered=lambda answer: _reply(peer, message, **answer.to_dict()),
        )

    def _stop_many(self, peer: Channel, message: Message) -> None:
        self._stops.stop_many(
            str(message["scope"]),
            runs=frozenset(map(str, message["runs"])),
            wish=_wish(message),
            foreground_only=bool(message["foreground_only"]),
            generation=_number_or_none(message, "generation", int),
            limit_s=_number_or_none(message, "limit_s", float),
            answered=lambda summary: _reply(peer, message, **summary.to_dict()),
        )

    def _wait(self, peer: Channel, message: Message) -> None:
        record = self._known(None, message)
        if record.result is not None:
            _reply(peer, message, result=record.result.to_dict())
            return

        def settled(ended: bool, result: JobResult | None) -> None:
            if ended and result is None:
                _fail(peer, message, _unknown(record.job))
            else:
                _reply(peer, message, result=encode_result(result))

        call_off = self._supervisor.when_ended(
            record.job,
            settled,
            limit_s=_number_or_none(message, "timeout_s", float),
        )
        self._waits.setdefault(peer, {})[f"wait {message.get('id')} {record.job}"] = call_off

    def _watch(self, peer: Channel, message: Message) -> None:
        job = str(message["job"])

        def ended(_: bool, result: JobResult | None) -> None:
            self._waits.get(peer, {}).pop(job, None)
            peer.send("ended", job=job, result=encode_result(result))

        record = self._records.get(job)
        if record is None or record.result is not None:
            ended(True, record.result if record else None)
            return
        waits = self._waits.setdefault(peer, {})
        if job not in waits:
            waits[job] = self._supervisor.when_ended(job, ended)

    def _unwatch(self, peer: Channel, message: Message) -> None:
        call_off = self._waits.get(peer, {}).pop(str(message["job"]), None)
        if call_off is not None:
            call_off()

    def _list(self, peer: Channel, message: Message) -> None:
        runs = message.get("runs")
        found = self._records.select(
            scope=message.get("scope"),
            session=message.get("session"),
            turn=message.get("turn"),
            runs=None if runs is None else frozenset(map(str, runs)),
        )
        now = self._clock.monotonic()
        _reply(peer, message, jobs=[_view(record, now).to_dict() for record in found])

    def _detach(self, peer: Channel, message: Message) -> None:
        record = self._known(message.get("scope"), message)
        if record.is_live:
            self._supervisor.detach(record, lambda: _reply(peer, message))
        else:
            _reply(peer, message)

    def _renew(self, peer: Channel, message: Message) -> None:
        ttl_s = float(message.get("ttl_s", LEASE_S))
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidArgument(f"ttl_s must be above 0 and at most {MAX_TTL_S:g} seconds, not {ttl_s!r}")
        lease = self._supervisor.leases.renew(
            str(message["scope"]), now=self._clock.monotonic(), holder=str(message["holder"]), ttl_s=ttl_s
        )
        self._leases_changed()
        _reply(peer, message, until=lease.until)

    def _release(self, peer: Channel, message: Message) -> None:
        self._stops.release(
            str(message["scope"]),
            wish=_wish(message),
            answered=lambda summary: _reply(peer, message, **summary.to_dict()),
        )
        self._leases_changed()

    def _take_over(self, peer: Channel, message: Message) -> None:
        _reply(peer, message, live=self._adopt())

    def _known(self, scope: str | None, message: Message) -> Record:
        job = str(message["job"])
        record = self._records.get(job) if scope is None else self._records.find(scope, job=job)
        if record is None:
            raise _unknown(job)
        return record


def _unknown(job: str) -> NotFound:
    return NotFound(f"no process {job!r} is known on this node; `remit processes` lists them", job=job)


def _wish(message: Message) -> StopWish:
    data = message["wish"]
    cause = data.get("cause")
    grace_s = float(data["grace_s"])
    if not 0 <= grace_s < MAX_TTL_S:
        raise InvalidArgument(f"grace_s must be seconds from 0 to {MAX_TTL_S:g}, not {grace_s!r}")
    return StopWish(cause=None if cause is None else dict(cause), grace_s=grace_s, kill=bool(data["kill"]))


def _number_or_none(message: Message, name: str, kind: Callable[[Any], Any]) -> Any:
    value = message.get(name)
    return None if value is None else kind(value)


def _identity(pid: Any, started: Any) -> ProcessIdentity:
    return ProcessIdentity(int(pid), float(started))


def _texts(data: dict[str, Any]) -> Mapping[str, str]:
    return {str(name): str(value) for name, value in data.items()}


def _check_job_id(job: str) -> None:
    # It becomes the name of a directory.
    if not job.startswith("proc_") or not job.replace("_", "").isalnum() or len(job) > _MAX_ID:
        raise InvalidArgument(f"job must be an id such as 'proc_0123456789', not {job!r}")


_MAX_ID = 64


def _view(record: Record, now: float) -> JobView:
    spec = record.spec
    return JobView(
        job=spec.job,
        scope=spec.scope,
        key=spec.key,
        session=spec.session,
        turn=spec.turn,
        run=spec.run,
        path=spec.path,
        argv=spec.argv,
        state=record.state.value,
        pid=record.pid,
        background=record.background,
        generation=record.generation,
        stopping=record.wish is not None,
        age_s=now - record.asked_at,
        output_dir=spec.output_dir,
        note=spec.note,
        result=record.result,
    )


def _reply(peer: Channel, message: Message, **fields: Any) -> None:
    peer.send("answer", id=message.get("id"), **fields)


def _fail(peer: Channel, message: Message, error: RemitError) -> None:
    peer.send("error", id=message.get("id"), **encode_error(error))
