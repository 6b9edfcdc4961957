"""Keepers for tests: started through a forge, a process of its own, and looked at from outside."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from remit.processes import frames
from remit.processes.containment import Cgroup
from remit.processes.jobs import RESULT_NAME, SOCKET_NAME, STATE_NAME, JobResult, JobSpec, JobState, read_record
from remit.testing import wait_until
from remit.testing.zoo import READY, ZOO, living

LIMIT_S = 40.0
"""Far above what anything takes on an idle machine."""

FALLBACKS = ("", "-subreaper", "-pidfd", "-cgroup", "-subreaper,-pidfd,-cgroup")
"""Everything, each strengthening switched off, and none."""


class Job:
    """One job of a keeper, seen from outside."""

    def __init__(self, forge: "World", spec: JobSpec, folder: Path) -> None:
        self.forge = forge
        self.spec = spec
        self.dir = folder
        self.pid = 0

    @property
    def tag(self) -> str:
        return self.spec.job

    @property
    def state(self) -> JobState:
        found = read_record(self.dir / STATE_NAME, JobState)
        assert found is not None
        return found

    def output(self, name: str = "stdout") -> bytes:
        try:
            return Path(self.spec.output_dir, name).read_bytes()
        except FileNotFoundError:
            return b""

    def result(self) -> JobResult:
        """Wait for the result's file."""
        wait_until(lambda: (self.dir / RESULT_NAME).exists(), timeout_s=LIMIT_S, message=f"result of {self.spec.argv}")
        found = read_record(self.dir / RESULT_NAME, JobResult)
        assert found is not None
        return found

    def heard(self) -> list[dict[str, Any] | None]:
        """Return what came over the lifeline; None at its end."""
        try:
            lines = (self.dir / "lifeline.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [cast("dict[str, Any] | None", json.loads(line)) for line in lines]

    def words(self) -> list[str]:
        return ["end" if message is None else str(message["op"]) for message in self.heard()]

    def wait_ready(self, text: bytes = READY) -> "Job":
        wait_until(
            lambda: text in self.output() or (self.dir / RESULT_NAME).exists(),
            timeout_s=LIMIT_S,
            message=f"{self.spec.argv[-3:]} never got ready",
        )
        assert text in self.output(), (self.output("stderr"), self.log())
        return self

    def wait_running(self) -> "Job":
        wait_until(lambda: "started" in self.words(), timeout_s=LIMIT_S, message="never started")
        return self

    def wait_gone(self) -> None:
        """Wait until the keeper itself has ended."""
        wait_until(lambda: not os.path.exists(f"/proc/{self.pid}"), timeout_s=LIMIT_S, message="the keeper stays")

    def log(self) -> str:
        path = self.dir / "keeper.log"
        return path.read_text() if path.exists() else ""

    @contextmanager
    def talk(self) -> Iterator["Talk"]:
        """Connect to the keeper as anybody may."""
        with frames.connect(self.dir / SOCKET_NAME, timeout_s=LIMIT_S) as connection:
            yield Talk(connection)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        with self.talk() as talk:
            return talk.ask(op, **fields)

    def stop(self, *, grace_s: float = 0.0, **fields: Any) -> JobResult:
        answer = self.ask("stop", grace_s=grace_s, **fields)
        assert answer["kind"] in ("stopped", "not_running"), answer
        return JobResult.from_dict(answer["result"])


class Talk:
    """One connection to a keeper."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._number = 0

    def send(self, op: str, **fields: Any) -> int:
        self._number += 1
        frames.send(self.connection, op, id=self._number, **fields)
        return self._number

    def receive(self) -> dict[str, Any]:
        message = frames.receive(self.connection)
        assert message is not None
        return message

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        number = self.send(op, **fields)
        while (message := self.receive()).get("id") != number:
            pass
        return message


class World:
    """A forge and the jobs that were started through it."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = (), folder: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rk", dir=folder))
        forge = Path(__file__).with_name("forge.py")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(forge), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.jobs: list[Job] = []

    def tell(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        return cast("dict[str, Any]", json.loads(self.process.stdout.readline()))

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        reattach_grace_s: float = 20.0,
        containment: str = "",
        failpoint: str | None = None,
        how: str = "kill",
        early: dict[str, Any] | None = None,
        job: str | None = None,
        output_dir: str | None = None,
        is_watched: bool = False,
        again: bool = False,
        **fields: Any,
    ) -> Job:
        name = job or f"proc_{uuid.uuid4().hex}"
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=again)
        spec = JobSpec(
            job=name,
            scope="scope",
            argv=tuple(argv),
            output_dir=output_dir or str(folder / "output"),
            run="run_of_" + name,
            stdin=fields.pop("stdin_kind", "null" if stdin is None else "data"),
            **fields,
        )
        started = Job(self, spec, folder)
        self.jobs.append(started)
        answer = self.tell(
            "start",
            spec=spec.to_dict(),
            env=dict(os.environ) if env is None else env,
            jobdir=str(folder),
            stdin=None if stdin is None else base64.b64encode(stdin).decode(),
            reattach_grace_s=reattach_grace_s,
            containment=containment,
            failpoint=failpoint,
            how=how,
            early=early,
            is_watched=is_watched,
        )
        started.pid = answer["pid"]
        return started

    def creature(self, name: str, *, size: int = 0, **options: Any) -> Job:
        """Start a creature of the zoo; the job is its tag."""
        job = f"proc_{uuid.uuid4().hex}"
        return self.start(ZOO[name].argv(job, size=size), job=job, **options)

    def sh(self, script: str, **options: Any) -> Job:
        """Start a shell script; its processes carry the tag as well."""
        name = f"proc_{uuid.uuid4().hex}"
        return self.start(["sh", "-c", script, name], job=name, **options)

    def cull(self) -> None:
        """End whatever the jobs so far have left."""
        for job in self.jobs:
            with suppress(ProcessLookupError):
                if job.pid and (job.dir / SOCKET_NAME).exists():
                    os.kill(job.pid, signal.SIGKILL)
        wait_until(self._is_clean, timeout_s=LIMIT_S, message="something cannot be ended")
        for job in self.jobs:
            shutil.rmtree(job.dir, ignore_errors=True)
        self.jobs.clear()

    def _is_clean(self) -> bool:
        """Kill what is left of the jobs and remove their control groups; tell whether nothing was there."""
        left = [pid for pids in (marked_many(self.jobs).values() if self.jobs else ()) for pid in pids]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        states = [read_record(job.dir / STATE_NAME, JobState) for job in self.jobs]
        groups = [Cgroup(Path(state.cgroup)) for state in states if state is not None and state.cgroup]
        are_removed = [group.remove() for group in groups]
        return all(are_removed) and not left

    def close(self) -> None:
        self.cull()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self.process.wait(LIMIT_S)
        shutil.rmtree(self.folder)


def _texts() -> Iterator[tuple[int, bytes]]:
    """Yield every process with a living thread, and its command line and environment."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            parts = [*living(int(name), "cmdline"), *living(int(name), "environ")]
            yield int(name), b"\0".join(parts)


def marked(job: Job) -> list[int]:
    """Return the living processes that carry a job's mark or tag: an observer of its own."""
    return marked_many([job])[job.tag]


def marked_many(jobs: Sequence[Job]) -> dict[str, list[int]]:
    """Return the living processes of each job by its tag, in one look."""
    texts = list(_texts())
    keepers = {job.pid for job in jobs}
    return {job.tag: [pid for pid, text in texts if job.tag.encode() in text and pid not in keepers] for job in jobs}
