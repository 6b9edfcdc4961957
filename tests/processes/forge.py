"""A small supervisor for tests: a process with one thread that forks keepers and holds their lifelines.

Commands come as JSON lines on standard input, answers go to standard output:

    {"do": "start", "spec": {...}, "env": {...}, "jobdir": ..., ...}   -> {"pid": ...}
    {"do": "say", "job": ..., "op": ..., ...}                          -> {}
    {"do": "drop", "job": ...}                                         -> {}
    {"do": "children"}                                                 -> {"zombies": n, "fds": n}

What keepers say goes to `lifeline.log` in the directory of the job. It waits for
its children, but with `ignore` as argument, when it ignores their ends.
"""

import base64
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from remit.processes import frames
from remit.processes.jobs import JobSpec
from remit.processes.keeper import ForkedKeeper, fork_keeper, run_keeper


def _failpoint(place: str | None, how: str) -> Any:
    def reached(word: str) -> None:
        if word == place:
            if how == "raise":
                raise RuntimeError(f"failpoint {word}")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    return reached


class Forge:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.lifelines: dict[str, socket.socket] = {}
        self.buffer = b""

    def run(self) -> None:
        self.selector.register(0, selectors.EVENT_READ, self._command)
        while True:
            for key, _ in self.selector.select(timeout=0.05):
                key.data()
            _reap()

    def _command(self) -> None:
        data = os.read(0, 65_536)
        if not data:
            os._exit(0)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(self._do(json.loads(line))).encode() + b"\n")

    def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do"):
            case "start":
                return self._start(**command)
            case "say":
                frames.send(self.lifelines[command.pop("job")], command.pop("op"), **command)
            case "drop":
                self._drop(command["job"])
            case "children":
                _reap()
                return {"fds": len(os.listdir("/proc/self/fd")), "lifelines": len(self.lifelines)}
        return {}

    def _start(
        self,
        spec: dict[str, Any],
        env: dict[str, str],
        jobdir: str,
        stdin: str | None,
        reattach_grace_s: float,
        containment: str,
        failpoint: str | None,
        how: str,
        early: dict[str, Any] | None,
        is_watched: bool,
    ) -> dict[str, Any]:
        loaded = JobSpec.from_dict(spec)
        hook = _failpoint(failpoint, how)
        options: dict[str, Any] = {
            "env": env,
            "jobdir": Path(jobdir),
            "stdin": None if stdin is None else base64.b64decode(stdin),
            "reattach_grace_s": reattach_grace_s,
            "containment": containment,
            "failpoint": hook,
            "is_watched": is_watched,
        }
        if early is None:
            keeper = fork_keeper(loaded, **options)
        else:
            # In the keeper's hands before the keeper is there.
            ours, theirs = socket.socketpair()
            if early["op"] == "go":
                ours.close()
            else:
                frames.send(ours, **early)
            pid = os.fork()
            if pid == 0:
                run_keeper(loaded, lifeline=theirs, **options)
            theirs.close()
            if early["op"] == "go":
                return {"pid": pid}
            keeper = ForkedKeeper(pid, ours)
        # A second keeper for the same job is one that comes late.
        name = loaded.job if loaded.job not in self.lifelines else f"{loaded.job} again"
        self.lifelines[name] = keeper.lifeline
        self.selector.register(
            keeper.lifeline, selectors.EVENT_READ, lambda: self._listen(name, Path(jobdir, "lifeline.log"))
        )
        return {"pid": keeper.pid}

    def _listen(self, job: str, log: Path) -> None:
        try:
            message = frames.receive(self.lifelines[job])
        except OSError:
            message = None
        with suppress(OSError):  # the test is over and its folder removed
            with log.open("a") as file:
                file.write(json.dumps(message) + "\n")
        if message is None:
            self._drop(job)

    def _drop(self, job: str) -> None:
        lifeline = self.lifelines.pop(job, None)
        if lifeline is not None:
            self.selector.unregister(lifeline)
            lifeline.close()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    if sys.argv[1:] == ["ignore"]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    Forge().run()
