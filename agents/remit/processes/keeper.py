"""The keeper: one process, one thread, one job at a time; whoever else dies, it ends its tree and says how.

**Invariants**

1. It survives its supervisor until its job has ended. It takes another job only
   from the one who gave it the first, and only when the kernel has proven that it
   has no child; else it dies after its job.
2. It has none of its parent's descriptors but the lifeline, and the program has
   none of its own.
3. It is a child of whoever forked it, who waits for it.
4. It executes nothing for a supervisor that has gone: what the next one finds when
   it looks is all that runs.

What is left behind when it is killed: behind a gate (`remit.processes.launch`) the
program dies with it where the system has that; else whoever takes in its orphans ends
it. The rest of the tree is found by `state.json` (mark, root, control group).
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from remit.processes.connections import Connection
from remit.processes.containment import Cgroup, Containment, become_subreaper, detect, make_cgroup, name_ahead
from remit.processes.desk import Desk
from remit.processes.draft import Draft
from remit.processes.jobs import SOCKET_NAME, JobSpec, boot_id
from remit.processes.keeping import Keeping
from remit.processes.launch import Waiting, fork_waiting
from remit.processes.table import ProcessIdentity
from remit.processes.tree import identify

__all__ = [
    "EXIT_BROKEN",
    "LOG_NAME",
    "REATTACH_GRACE_S",
    "ForkedKeeper",
    "ReadyKeeper",
    "fork_keeper",
    "get_ready",
    "keep",
    "log_failure",
    "run_keeper",
]

LOG_NAME = "keeper.log"
"""File of the job's directory for a traceback; there only if the keeper itself failed."""
REATTACH_GRACE_S = 20.0
"""How long a foreground job goes on without a supervisor, by default; below the 30 s of a lease."""

_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTSTP,
    signal.SIGXFSZ,
)
_MAX_GOODBYES = 100
"""How often the removal of the control group is tried."""
_GOODBYE_S = 0.005
_FLUSH_LIMIT_S = 1.0
"""How long the end waits for peers that do not read."""
EXIT_BROKEN = 70
"""Exit status of a keeper that failed itself; EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True, slots=True)
class ForkedKeeper:
    """A keeper that was just forked."""

    pid: int
    """Its number; a child of the caller, who waits for it."""
    lifeline: socket.socket
    """Connection to it: messages of `remit.processes.frames`, both ways; closed, the keeper waits for another."""


def fork_keeper(
    spec: JobSpec,
    *,
    env: Mapping[str, str],
    jobdir: Path,
    stdin: bytes | None = None,
    reattach_grace_s: float = REATTACH_GRACE_S,
    epoch: int = 0,
    containment: str | None = None,
    digest: str = "",
    is_watched: bool = False,
    failpoint: Callable[[str], None] | None = None,
) -> ForkedKeeper:
    """Fork a keeper, which starts the job at once; about two milliseconds.

    Call it from a process with one thread. Arguments as for `run_keeper`.

    Raises:
        OSError: no process or descriptor is left; nothing was started.
    """
    # What every keeper would find out for itself is found out once, in the parent.
    detect(containment)
    boot_id()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        run_keeper(
            spec,
            env=env,
            jobdir=jobdir,
            lifeline=theirs,
            stdin=stdin,
            reattach_grace_s=reattach_grace_s,
            epoch=epoch,
            containment=containment,
            digest=digest,
            is_watched=is_watched,
            failpoint=failpoint,
        )
    theirs.close()
    return ForkedKeeper(pid, ours)


def run_keeper(
    spec: JobSpec,
    *,
    env: Mapping[str, str],
    jobdir: Path,
    lifeline: socket.socket,
    stdin: bytes | None = None,
    reattach_grace_s: float = REATTACH_GRACE_S,
    epoch: int = 0,
    containment: str | None = None,
    digest: str = "",
    is_watched: bool = False,
    failpoint: Callable[[str], None] | None = None,
) -> NoReturn:
    """Be the keeper of a job until its end, then exit; for a freshly forked child with one thread.

    The first message on the lifeline is `started`, or `ended` if it could not be started.

    Args:
        spec: what is to be run; checked by the caller.
        env: the whole environment of the program; held in memory only.
        jobdir: directory of the job, made here for this user alone; state, result and socket come there.
        lifeline: see `ForkedKeeper.lifeline`, the other end.
        stdin: bytes for standard input if the spec says `data`; held in memory only.
        reattach_grace_s: seconds that a foreground job goes on when the lifeline has broken.
        epoch: of the supervisor that holds the lifeline.
        containment: switches as `remit.processes.containment.switched` takes them; None reads the environment.
        digest: fingerprint of the command, for the next daemon.
        is_watched: whether somebody takes in what this process leaves when it is killed, and ends it;
            else the program is made to die with it.
        failpoint: called with each word of `remit.processes.keeping.FAILPOINTS`, for tests.
    """
    try:
        ready = get_ready(lifeline, containment=containment, is_watched=is_watched)
        keep(
            ready,
            spec,
            env=env,
            jobdir=jobdir,
            stdin=stdin,
            reattach_grace_s=reattach_grace_s,
            epoch=epoch,
            digest=digest,
            failpoint=failpoint,
        )
        ready.dismiss()
        os._exit(0)
    except BaseException:  # the outermost edge of this process: nobody is left to raise to
        log_failure(jobdir)
        os._exit(EXIT_BROKEN)


@dataclass(slots=True)
class ReadyKeeper:
    """A keeper that has everything but its job; what it needs is there before anybody waits for it."""

    lifeline: socket.socket
    """See `ForkedKeeper.lifeline`, the other end."""
    containment: Containment
    """What is used."""
    cgroup: Cgroup | None
    """The group that will hold the tree."""
    is_gated: bool
    """Whether the program is to die with this process; else this process is in the group too."""
    waiting: Waiting | None
    """The child that waits at the gate; None without one, or when none could be forked, which is tried again."""
    wake: int
    """Descriptor that can be read when a child may have ended."""
    keeper: ProcessIdentity
    """This process."""
    draft: Draft | None = None
    """What becomes the directory of the next job, see `plan`."""

    def plan(self, above: Path) -> None:
        """Make the directory of the next job ahead.

        Args:
            above: the directory of the jobs' directories.
        """
        with suppress(OSError):  # tried again with the job, which is told what is wrong
            self.draft = Draft(above)

    def renew(self) -> None:
        """Be as ready for the next job as for the first."""
        if self.cgroup is not None and not self.is_gated:
            with suppress(OSError):  # as in `get_ready`
                self.cgroup.enter()

    def dismiss(self) -> None:
        """Leave nothing behind; for a keeper that gets no job any more."""
        if self.waiting is not None:
            self.waiting.dismiss()
        if self.draft is not None:
            self.draft.remove()
        if self.cgroup is None:
            return
        if not self.is_gated:
            with suppress(OSError):
                self.cgroup.leave()
        # The kernel may need a moment to see that a group is empty; one that stays harms nobody.
        for _ in range(_MAX_GOODBYES):
            if self.cgroup.remove():
                return
            time.sleep(_GOODBYE_S)


def get_ready(lifeline: socket.socket, *, containment: str | None = None, is_watched: bool = False) -> ReadyKeeper:
    """Leave the parent behind, and do all that does not depend on the job.

    Args:
        lifeline: as for `run_keeper`.
        containment: as for `run_keeper`.
        is_watched: as for `run_keeper`.
    """
    _settle_in(lifeline)
    wake = _wake_at_ends()
    found = detect(containment)
    found = replace(found, subreaper=found.subreaper and become_subreaper())
    cgroup = make_cgroup(name_ahead(os.getpid())) if found.cgroup else None
    # Without subreapers nobody can take in what we leave.
    is_gated = not (is_watched and found.subreaper)
    waiting = None
    if is_gated:
        with suppress(OSError):
            waiting = fork_waiting(cgroup)
    elif cgroup is not None:
        with suppress(OSError):  # not allowed here; the tree is found by the other ways
            cgroup.enter()
    keeper = identify(os.getpid()) or ProcessIdentity(os.getpid(), 0)
    return ReadyKeeper(lifeline, found, cgroup, is_gated, waiting, wake, keeper)


def keep(
    ready: ReadyKeeper,
    spec: JobSpec,
    *,
    env: Mapping[str, str],
    jobdir: Path,
    stdin: bytes | None = None,
    reattach_grace_s: float = REATTACH_GRACE_S,
    epoch: int = 0,
    digest: str = "",
    failpoint: Callable[[str], None] | None = None,
) -> bool:
    """Keep a job to its end; same arguments as for `run_keeper`.

    Returns:
        Whether this process may keep another job: nothing is left of this one, and the lifeline
        is still in the hands of the one who gave it.
    """
    desk = Desk(ready.lifeline)
    keeping = Keeping(
        spec,
        env=env,
        jobdir=jobdir,
        stdin=stdin,
        containment=ready.containment,
        keeper=ready.keeper,
        epoch=epoch,
        reattach_grace_s=reattach_grace_s,
        tell=desk.tell,
        failpoint=failpoint or _pass_by,
        digest=digest,
        cgroup=ready.cgroup,
        is_gated=ready.is_gated,
        waiting=ready.waiting,
    )
    ready.waiting = None
    draft, ready.draft = ready.draft, None
    _Loop(desk, keeping, ready.wake, draft=draft).run()
    desk.close(SOCKET_NAME, keep=ready.lifeline)
    keeping.close()
    return not ready.is_gated and keeping.has_left_nothing and desk.is_with_first and not desk.is_midway


class _Loop:
    """Wait for whatever comes first: a child's end, a message, a time."""

    def __init__(self, desk: Desk, keeping: Keeping, wake: int, *, draft: Draft | None) -> None:
        self._draft = draft
        self._desk = desk
        self._keeping = keeping
        self._is_idle = False
        self._wake = wake

    def run(self) -> None:
        """Keep the job to its end."""
        draft = self._keeping.record(self._draft)
        self._desk.listener = None if draft is None else draft.listener
        # After the record: whoever comes when the supervisor has gone has found it, or nothing will start.
        # And a stop that was sent right behind the start is here already: then nothing starts either.
        if self._desk.lifeline is not None:
            self._desk.read(self._desk.lifeline, self._keeping)
            if not self._desk.is_with_first:
                self._keeping.abandon()
                return
        self._keeping.start()
        pause: float | None = 0.0
        while True:
            child_ended = self._wait(pause)
            pause = self._keeping.tick(child_ended=child_ended)
            self._desk.close_broken(self._keeping)
            if self._keeping.is_done:
                break
        self._flush()

    def _wait(self, pause_s: float | None) -> bool:
        """Wait that long at most and serve what came; tell whether a child has ended."""
        actions = self._actions()
        poll = select.poll()
        for descriptor, (events, _) in actions.items():
            poll.register(descriptor, events)
        # Rounded up: a pause that is over a little too early would spin.
        ready = poll.poll(None if pause_s is None else int(pause_s * 1000 + 0.999))
        child_ended = False
        self._is_idle = not ready
        for descriptor, _ in ready:
            if descriptor == self._wake:
                child_ended = True
            actions[descriptor][1]()
        return child_ended

    def _actions(self) -> dict[int, tuple[int, Callable[[], object]]]:
        keeping, desk = self._keeping, self._desk
        found: dict[int, tuple[int, Callable[[], object]]] = {self._wake: (select.POLLIN, self._drain)}
        if desk.listener is not None:
            found[desk.listener.fileno()] = (select.POLLIN, desk.accept)
        if keeping.report is not None:
            found[keeping.report] = (select.POLLIN, keeping.read_report)
        if keeping.input is not None and not keeping.input.is_closed:
            # Without events a pipe still tells that its reader has gone.
            events = select.POLLOUT if keeping.input.wants_to_write else 0
            found[keeping.input.descriptor] = (events, self._feed)
        for connection in desk.connections:
            events = select.POLLIN | (select.POLLOUT if connection.wants_to_send else 0)
            found[connection.peer.fileno()] = (events, self._serving(connection))
        return found

    def _serving(self, connection: Connection) -> Callable[[], object]:
        def serve() -> None:
            connection.flush()
            self._desk.read(connection, self._keeping)

        return serve

    def _feed(self) -> None:
        pipe = self._keeping.input
        if pipe is None:
            return
        if pipe.wants_to_write:
            pipe.flush()
        else:
            pipe.close()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _flush(self) -> None:
        """Answer what was asked before the end, and let everybody read it, within a bound."""
        until = time.monotonic() + _FLUSH_LIMIT_S
        while time.monotonic() < until:
            is_waiting = any(connection.wants_to_send for connection in self._desk.connections)
            self._wait(0.05 if is_waiting else 0.0)
            if self._is_idle and not is_waiting:
                return


def _settle_in(lifeline: socket.socket) -> None:
    """Leave the parent behind: session, signals, descriptors."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if signum in _IGNORED:
            # A handler that does nothing: other than what is ignored, it is not there any more in the program.
            signal.signal(signum, _ignore)
        elif signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    # What the parent's objects would close when collected has other owners now; so nothing is collected.
    gc.freeze()
    _close_others(lifeline.fileno())


def _wake_at_ends() -> int:
    """Return a descriptor that can be read when a child has ended."""
    wake, alarm = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(alarm, False)
    # The handler does nothing; the byte in the pipe wakes the loop.
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    return wake


def _close_others(kept: int) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != kept:
            with suppress(OSError):  # the listing's own
                os.close(int(name))


def log_failure(jobdir: Path) -> None:
    """Write the current exception to the keeper's log in the directory of its job, if there is one."""
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(jobdir / LOG_NAME, flags, 0o600)
        os.write(descriptor, traceback.format_exc().encode("utf-8", "backslashreplace"))


def _ignore(signum: int, frame: object) -> None:
    """Do nothing when a signal comes."""


def _pass_by(place: str) -> None:
    """Do nothing at a failpoint."""
