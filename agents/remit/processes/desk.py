"""The keeper's desk: who is connected, what they ask, who waits for the end.

What is understood, and answered, is listed in `remit.processes.frames`.
"""

from __future__ import annotations

import base64
import math
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from remit.core.cause import Cause
from remit.processes import frames
from remit.processes.connections import Connection
from remit.processes.jobs import JobOutcome, JobResult, StopCause
from remit.processes.keeping import Keeping

__all__ = ["OPERATIONS", "Desk"]

OPERATIONS = frozenset({"status", "stop", "wait", "detach", "attach", "write", "close_stdin"})
"""What a keeper serves."""


class Desk:
    """Connections of one keeper.

    Args:
        lifeline: whose end means that the supervisor is gone; None for a keeper that starts without.
    """

    def __init__(self, lifeline: socket.socket | None) -> None:
        self.lifeline = None if lifeline is None else Connection(lifeline)
        self._first = self.lifeline
        self.listener: socket.socket | None = None
        self.connections: list[Connection] = [] if self.lifeline is None else [self.lifeline]
        self._waiting: list[tuple[Connection, Any, str]] = []

    def accept(self) -> None:
        """Take who has come; other users are turned away."""
        if self.listener is None:
            return
        with suppress(OSError):  # gone before it was taken
            peer, _ = self.listener.accept()
            if frames.peer_uid(peer) in (None, os.getuid()):
                self.connections.append(Connection(peer))
            else:
                peer.close()

    def tell(self, op: str, fields: dict[str, Any]) -> None:
        """Tell whoever holds the lifeline; at the end, whoever waits as well."""
        if self.lifeline is not None:
            self.lifeline.send(op, **fields)
        if op != "ended":
            return
        is_stopped = fields["result"]["outcome"] not in (JobOutcome.EXITED, JobOutcome.NOT_STARTED)
        for connection, number, asked in self._waiting:
            kind = "ended" if asked == "wait" else "stopped" if is_stopped else "not_running"
            _answer(connection, number, kind, **fields)
        self._waiting.clear()

    def read(self, connection: Connection, keeping: Keeping) -> None:
        """Serve what a peer has sent; note when it was the lifeline and is gone."""
        for message in connection.read():
            self._serve(connection, message, keeping)
        if connection.is_closed:
            self._forget(connection, keeping)

    def close_broken(self, keeping: Keeping) -> None:
        """Drop the connections that broke while something was sent."""
        for connection in [connection for connection in self.connections if connection.is_closed]:
            self._forget(connection, keeping)

    @property
    def is_with_first(self) -> bool:
        """Tell whether the first supervisor, if there was one, still holds the lifeline."""
        return self.lifeline is self._first and (self._first is None or not self._first.is_closed)

    @property
    def is_midway(self) -> bool:
        """Tell whether something was said in part only on the lifeline."""
        return self.lifeline is None or self.lifeline.is_midway

    def close(self, name: str, *, keep: socket.socket | None = None) -> None:
        """Close everything but one connection, and remove the socket."""
        for connection in self.connections:
            if connection.peer is not keep:
                connection.close()
        if self.listener is not None:
            self.listener.close()
            Path(name).unlink(missing_ok=True)

    def _forget(self, connection: Connection, keeping: Keeping) -> None:
        self.connections.remove(connection)
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not connection]
        if connection is self.lifeline:
            self.lifeline = None
            keeping.lose_lifeline()

    def _serve(self, connection: Connection, message: dict[str, Any], keeping: Keeping) -> None:
        refused = frames.refusal(message, OPERATIONS)
        if refused is not None:
            connection.send("answer", **refused)
            return
        number = message.get("id")
        try:
            self._dispatch(connection, number, message, keeping)
        except (ValueError, TypeError, LookupError) as error:
            _answer(connection, number, "bad_request", error=f"{message['op']}: {error!r}")

    def _dispatch(self, connection: Connection, number: Any, message: dict[str, Any], keeping: Keeping) -> None:
        match message["op"]:
            case "status":
                _answer(connection, number, "status", state=keeping.state.to_dict())
            case "stop":
                self._stop(connection, number, message, keeping)
            case "wait":
                self._wait(connection, number, "wait", keeping.result)
            case "detach":
                keeping.detach()
                _answer(connection, number, "detached", state=keeping.state.to_dict())
            case "attach":
                self._attach(connection, number, int(message["epoch"]), keeping)
            case "write":
                data = base64.b64decode(message["data"], validate=True)
                if keeping.input is None:
                    _answer(connection, number, "stdin_closed")
                else:
                    keeping.input.write(data, lambda kind: _answer(connection, number, kind))
            case _:  # close_stdin: `refusal` let nothing else pass
                if keeping.input is None:
                    _answer(connection, number, "stdin_closed")
                else:
                    keeping.input.end(lambda kind: _answer(connection, number, kind))

    def _stop(self, connection: Connection, number: Any, message: dict[str, Any], keeping: Keeping) -> None:
        data = message.get("cause")
        cause = None if data is None else Cause.from_dict(data).to_dict()
        grace_s = float(message.get("grace_s", keeping.spec.grace_s))
        if not (grace_s >= 0 and math.isfinite(grace_s)):
            raise ValueError(f"grace_s is {grace_s!r}; give seconds from 0")
        # Waiting first: a job that has not begun ends within the call.
        self._wait(connection, number, "stop", keeping.result)
        keeping.stop(StopCause.CANCELLED, cause, grace_s=0.0 if message.get("kill") else grace_s)

    def _wait(self, connection: Connection, number: Any, asked: str, result: JobResult | None) -> None:
        if result is None:
            self._waiting.append((connection, number, asked))
        else:
            _answer(connection, number, "ended" if asked == "wait" else "not_running", result=result.to_dict())

    def _attach(self, connection: Connection, number: Any, epoch: int, keeping: Keeping) -> None:
        if not keeping.adopt(epoch):
            _answer(connection, number, "stale_epoch", epoch=keeping.state.epoch)
            return
        older, self.lifeline = self.lifeline, connection
        if older is not None and older is not connection:
            older.close()
        _answer(connection, number, "attached", state=keeping.state.to_dict())
        if keeping.result is not None:
            connection.send("ended", result=keeping.result.to_dict())


def _answer(connection: Connection, number: Any, kind: str, **fields: Any) -> None:
    connection.send("answer", id=number, kind=kind, **fields)
