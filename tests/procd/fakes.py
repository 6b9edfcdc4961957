"""A daemon without processes: the real server in this thread, keepers played by the test, time by hand."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remit.processes.draft import make_directory
from remit.processes.frames import FrameReader, encode
from remit.processes.jobs import RESULT_NAME, JobOutcome, JobPhase, JobResult, JobSpec, JobState, boot_id, write_record
from remit.processes.place import Place
from remit.processes.server import Server
from remit.processes.table import ProcessIdentity
from remit.testing import ManualClock

NOBODY = ProcessIdentity(2**22 + 5, 1.0)
"""A process number above the system's highest."""


@dataclass
class FakeKeeper:
    """The keeper's end of a lifeline, in the hands of the test."""

    spec: JobSpec
    jobdir: Path
    env: Mapping[str, str]
    stdin: bytes | None
    socket: socket.socket
    is_sweeper: bool = False
    reader: FrameReader = field(default_factory=FrameReader)

    def state(self, *, background: bool = False) -> JobState:
        """Return the state that a keeper with a running program would tell."""
        return JobState(
            job=self.spec.job,
            phase=JobPhase.RUNNING,
            boot=boot_id(),
            token=self.spec.job,
            keeper=NOBODY,
            root=ProcessIdentity(4321, 2.0),
            background=background,
        )

    def say(self, op: str, **fields: Any) -> None:
        """Send one message."""
        self.socket.sendall(encode(op, **fields))

    def started(self) -> None:
        """Say that the program runs."""
        self.say("started", state=self.state().to_dict())

    def ended(self, outcome: JobOutcome = JobOutcome.EXITED, **fields: Any) -> JobResult:
        """Write the result and say it, as a keeper does."""
        result = JobResult(job=self.spec.job, outcome=outcome, **fields)
        write_record(self.jobdir / RESULT_NAME, result)
        self.say("ended", result=result.to_dict())
        return result

    def heard(self) -> list[dict[str, Any]]:
        """Return what came since the last call."""
        self.socket.setblocking(False)
        messages: list[dict[str, Any]] = []
        try:
            while data := self.socket.recv(65_536):
                messages += self.reader.feed(data)
        except BlockingIOError:
            pass
        finally:
            self.socket.setblocking(True)
        return messages

    def die(self) -> None:
        """Close the lifeline without a word, as a kill does."""
        self.socket.close()


class FakeForks:
    """Hands each keeper to the test."""

    def __init__(self) -> None:
        self.keepers: list[FakeKeeper] = []
        self.error: OSError | None = None
        self.taken_back: list[tuple[ProcessIdentity, socket.socket]] = []

    def keeper(
        self, spec: JobSpec, *, digest: str, env: Mapping[str, str], jobdir: Path, stdin: bytes | None
    ) -> tuple[ProcessIdentity, socket.socket]:
        """Fork nothing, but record the job."""
        if self.error is not None:
            raise self.error
        make_directory(jobdir, spec, digest=digest)
        ours, theirs = socket.socketpair()
        self.keepers.append(FakeKeeper(spec, jobdir, env, stdin, theirs))
        return NOBODY, ours

    def take_back(self, keeper: ProcessIdentity, connection: socket.socket) -> None:
        """Keep what comes back."""
        self.taken_back.append((keeper, connection))

    def sweeper(self, spec: JobSpec, *, digest: str, jobdir: Path, keeper: int) -> tuple[int, socket.socket]:
        """Fork nothing."""
        if self.error is not None:
            raise self.error
        ours, theirs = socket.socketpair()
        self.keepers.append(FakeKeeper(spec, jobdir, {}, None, theirs, is_sweeper=True))
        return NOBODY.pid, ours

    def reap(self) -> None:
        """Nothing was forked."""

    def prepare(self) -> bool:
        """Nothing is forked ahead."""
        return False

    def trim(self) -> None:
        """Nothing was forked ahead."""

    def close(self) -> None:
        """Nothing was forked ahead."""

    def __getitem__(self, job: str) -> FakeKeeper:
        return next(keeper for keeper in reversed(self.keepers) if keeper.spec.job == job)


class Peer:
    """A client's connection, in the thread of the server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reader = FrameReader()
        self._ids = itertools.count(1)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(world.place.socket))
        self.got: list[dict[str, Any]] = []

    def ask(self, op: str, **fields: Any) -> int:
        """Send a request and let the server serve it; return its id."""
        number = next(self._ids)
        self.socket.sendall(encode(op, id=number, **fields))
        self._world.settle()
        return number

    def answer(self, number: int) -> dict[str, Any] | None:
        """Return the answer to a request, or None if there is none yet."""
        self._world.settle()
        self.read()
        return next((message for message in self.got if message.get("id") == number), None)

    def read(self) -> bool:
        """Take in what has come; return False at the server's end."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(65_536):
                self.got += self._reader.feed(data)
            return False
        except BlockingIOError:
            return True
        except ConnectionResetError:  # closed with something of ours unread
            return False
        finally:
            self.socket.setblocking(True)

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask, and return the answer, which must be there at once."""
        answer = self.answer(self.ask(op, **fields))
        assert answer is not None, f"{op} was not answered"
        return answer


class World:
    """One daemon with everything around it."""

    def __init__(self, *, uid_of: Callable[[socket.socket], int | None] | None = None) -> None:
        # Short, for the socket's path.
        self.directory = Path(tempfile.mkdtemp(prefix="rp", dir="/tmp"))
        self.place = Place(self.directory)
        self.clock = ManualClock(1_000.0)
        self.forks = FakeForks()
        self.raylets: set[ProcessIdentity] = set()
        self.lines: list[str] = []
        self.peers: list[Peer] = []
        self.numbers = itertools.count(1)
        self.place.create()
        self.uid_of = uid_of or (lambda _: os.geteuid())
        self.server = self.open()

    def open(self) -> Server:
        """Start a daemon on the same directory."""
        self.place.socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.place.socket))
        listener.listen()
        server = Server(
            self.place,
            listener,
            clock=self.clock,
            forks=self.forks,
            log=self.lines.append,
            uid_of=self.uid_of,
            is_alive=self.raylets.__contains__,
        )
        server.adopt()
        return server

    def settle(self) -> None:
        """Let the server do all it can without waiting."""
        for _ in range(6):
            self.server.step(0)

    def advance(self, seconds: float) -> None:
        """Move time, and let the server notice."""
        self.clock.advance(seconds)
        self.settle()

    def peer(self) -> Peer:
        """Return a new client connection."""
        peer = Peer(self)
        self.peers.append(peer)
        return peer

    def spec(self, **fields: Any) -> JobSpec:
        """Return a spec with a new job id."""
        defaults: dict[str, Any] = {
            "job": f"proc_{next(self.numbers)}",
            "scope": "w",
            "argv": ("make", "all"),
            "output_dir": str(self.directory / "out"),
            "session": "s",
            "turn": "turn_1",
            "run": "run_1",
        }
        return JobSpec(**{**defaults, **fields})

    def begin(self, peer: Peer, spec: JobSpec, env: Mapping[str, str] | None = None) -> int:
        """Send a start; return the request's id."""
        return peer.ask("start", spec=spec.to_dict(), env=dict(env or {}), stdin=None)

    def run(self, **fields: Any) -> FakeKeeper:
        """Start a job whose keeper says that it runs."""
        spec = self.spec(**fields)
        peer = self.peer()
        number = self.begin(peer, spec)
        keeper = self.forks[spec.job]
        keeper.started()
        answer = peer.answer(number)
        assert answer is not None
        assert answer["kind"] == "started"
        return keeper

    def restart(self) -> None:
        """Let the daemon die as a kill does, and start the next."""
        self.server.close()
        self.server = self.open()

    def close(self) -> None:
        """End everything."""
        self.server.close()
        for peer in self.peers:
            peer.socket.close()
        for keeper in self.forks.keepers:
            keeper.socket.close()
        shutil.rmtree(self.directory)


def wish(**fields: Any) -> dict[str, Any]:
    """Return a stop as it travels."""
    return {"cause": None, "grace_s": 2.0, "kill": False, **fields}
