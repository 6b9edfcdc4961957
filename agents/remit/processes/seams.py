"""What the supervisor of jobs needs of others, and what it is asked: forks, channels, starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any, Protocol

from remit.core.errors import RemitError
from remit.processes.answers import StartAnswer
from remit.processes.channel import Channel
from remit.processes.jobs import JobSpec
from remit.processes.table import ProcessIdentity

__all__ = ["Forks", "Open", "Start"]


class Forks(Protocol):
    """How keepers and sweepers come to life; both are returned with our end of a stream socket."""

    def keeper(
        self, spec: JobSpec, *, digest: str, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
    ) -> tuple[ProcessIdentity, socket]:
        """Have a keeper record the job and start the program.

        Raises:
            OSError: no memory, or no descriptor left.
        """
        ...

    def take_back(self, keeper: ProcessIdentity, connection: socket) -> None:
        """Take a keeper that is ready for another job; its connection is taken over."""
        ...

    def sweeper(self, spec: JobSpec, *, digest: str, jobdir: Path, keeper: int) -> tuple[int, socket]:
        """Fork a process that ends what a lost keeper left, writes the result and sends it.

        Args:
            spec: the job.
            digest: fingerprint of its command.
            jobdir: its directory; made, if the keeper was lost before it did that.
            keeper: number of the keeper that is gone, or 0.

        Raises:
            OSError: no memory, or no descriptor left.
        """
        ...

    def prepare(self) -> bool:
        """Do ahead one thing that the next start would have to wait for; tell whether there is more of it."""
        ...

    def trim(self) -> None:
        """Let go of what was done ahead and not needed for a while."""
        ...

    def close(self) -> None:
        """Let go of what was done ahead."""
        ...

    def reap(self) -> None:
        """Take the exit status of those that have ended, so that no zombie stays."""
        ...


class Open(Protocol):
    """Makes a channel of a socket."""

    def __call__(
        self,
        connection: socket,
        *,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
    ) -> Channel:
        """Return the channel."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One request to start. Holds the environment, so it is never logged nor written."""

    spec: JobSpec
    """What is to run."""
    fingerprint: str
    """Digest of the command."""
    env: Mapping[str, str] = field(repr=False)
    """Environment of the program."""
    stdin: bytes | None = field(repr=False)
    """Data for standard input."""
    node: ProcessIdentity | None
    """Raylet of the Ray node that it is started for; None if there is none."""
    answered: Callable[[StartAnswer | RemitError], None] = field(repr=False)
    """Called once."""
    wanted: Callable[[], bool] = field(repr=False)
    """Tells whether anybody still waits for the answer."""
