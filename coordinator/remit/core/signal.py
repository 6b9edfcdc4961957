"""The cancellation signal: sticky, level-triggered, inherited downwards only.

    turn = CancelSignal(name="turn_1")
    run = turn.child(name="run_1")
    turn.set(cause)          # now run.is_set, and run.cause is cause

**Invariants**

1. A signal goes from unset to set once. Its cause is the first one and never
   changes; the same `Cause` object is seen all the way down.
2. Setting goes from a signal to its children and to combinations it is a
   member of, never the other way.
3. A set signal has no unset descendant: marking a subtree, and linking a new
   child, are each one step under `SIGNALS_LOCK` (see `links`).
4. Callbacks run without that lock, at most once each.
5. A signal keeps what is above it alive, never what is below it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from remit.core.cause import Cause
from remit.core.delivery import LoopDelivery
from remit.core.errors import InvalidArgument, TurnCancelled
from remit.core.links import SIGNALS_LOCK, Links, WeakLinks

if TYPE_CHECKING:
    import asyncio

__all__ = ["CancelSignal", "Registration", "bind_reference"]

_log = logging.getLogger(__name__)


@final
class CancelSignal:
    """Says that work should stop, and why; seen by everything that waits.

    All methods may be called from any thread, from a signal handler and from a
    finalizer. Pickling one yields a reference: in the same process it resolves
    to this very signal; in another process to the signal of the same
    `reference_id` there, or to a new one that is set exactly if this one was
    set when it was pickled. **A later `set` does not cross processes by
    itself**: somebody has to deliver it and set the signal over there. Links
    to parents do not travel either.

    Args:
        name: id of the turn or run that this signal stops; for messages.
    """

    __slots__ = ("__weakref__", "_above", "_below", "_callbacks", "_cause", "_name", "_reference_id")

    def __init__(self, *, name: str = "") -> None:
        self._name = name
        self._cause: Cause | None = None
        self._above: tuple[CancelSignal, ...] = ()
        self._below: WeakLinks[CancelSignal] | None = None
        self._callbacks: Links[Registration] | None = None
        self._reference_id = ""

    @classmethod
    def any(cls, *signals: CancelSignal | None, name: str = "") -> CancelSignal:
        """Return a signal that is set as soon as one of the members is.

        Setting the combination never touches its members.

        Args:
            signals: the members; `None` stands for one that is not there. Without
                any member the result is a plain unset signal.
            name: id for messages.
        """
        signal = CancelSignal(name=name)
        signal._follow(tuple(member for member in signals if member is not None))
        return signal

    def child(self, name: str = "") -> CancelSignal:
        """Return a signal that is set when this one is; born set if this one already is.

        Setting the child never touches its parent.

        Args:
            name: id of the run that the child stops; for messages.
        """
        signal = CancelSignal(name=name)
        signal._follow((self,))
        return signal

    def _follow(self, above: tuple[CancelSignal, ...]) -> None:
        """Link a new signal below others, or set it if one of them is set."""
        with SIGNALS_LOCK:
            for parent in above:
                if parent._cause is not None:
                    # Nothing more can happen to it, so it needs no link upwards.
                    self._cause = parent._cause
                    return
            self._above = above
            for parent in above:
                below = parent._below
                if below is None:
                    below = parent._below = WeakLinks()
                below.follow(self)

    @property
    def name(self) -> str:
        """Id of the turn or run that this signal stops; may be empty."""
        return self._name

    @property
    def is_set(self) -> bool:
        """Whether work under this signal should stop."""
        return self._cause is not None

    @property
    def cause(self) -> Cause | None:
        """Why, or None while the signal is not set."""
        return self._cause

    @property
    def reference_id(self) -> str:
        """Id under which copies of this signal find each other; made when first asked for."""
        with SIGNALS_LOCK:
            if not self._reference_id:
                # From the system: no seed and no fork can make two signals agree.
                self._reference_id = f"signal_{os.urandom(12).hex()}"
                _references[self._reference_id] = self
            return self._reference_id

    def bind(self, reference_id: str) -> None:
        """Give this signal the `reference_id` of one in another process; see `bind_reference`."""
        with SIGNALS_LOCK:
            if _references.get(reference_id, self) is not self:
                raise InvalidArgument(f"another signal is bound to {reference_id!r} in this process")
            if self._reference_id not in ("", reference_id):
                raise InvalidArgument(f"the signal is already bound to {self._reference_id!r}")
            self._reference_id = reference_id
            _references[reference_id] = self

    def set(self, cause: Cause) -> bool:
        """Set this signal and all below it; the first cause wins.

        When the call returns, whoever set it, every descendant is marked.
        Callbacks have run by the time the call that set the signal returns.

        Args:
            cause: why; kept as the same object on every descendant.

        Returns:
            Whether this call set the signal. `False`: it was set before.
        """
        with SIGNALS_LOCK:
            if self._cause is not None:
                return False
            marked, due = self._mark_subtree(cause)
        _run_all(due, cause)
        # Kept until here, so that no signal is freed under the lock.
        del marked
        return True

    def _mark_subtree(self, cause: Cause) -> tuple[list[CancelSignal], list[Registration]]:
        """Mark this signal and all below it; the caller holds the lock.

        Goes level by level over one growing list: no depth is too deep for it.

        Returns:
            What was visited, to be kept alive until the lock is free, and the
            callbacks that are due, those nearer to the top first.
        """
        reached: list[CancelSignal] = [self]
        due: list[Registration] = []
        for signal in reached:
            if signal._cause is not None:
                continue
            signal._cause = cause
            if signal._callbacks is not None:
                due.extend(signal._callbacks.members())
                signal._callbacks = None
            if signal._below is not None:
                reached.extend(signal._below.living())
                signal._below = None
        return reached, due

    def raise_if_set(self) -> None:
        """Raise if the signal is set; the checkpoint of plain functions.

        Raises:
            TurnCancelled: the signal is set.
        """
        if self._cause is not None:
            raise TurnCancelled(self._cause, node_id=self._name)

    def add_callback(self, fn: Callable[[Cause], None]) -> Registration:
        """Call a function once when the signal is set, or now if it is set already.

        It runs in the thread that sets the signal and should be short; it must
        not wait for other threads. What it raises is logged and goes no
        further. The signal keeps the function alive until it has run, has been
        closed, or the signal itself is gone.

        Args:
            fn: called with the cause.
        """
        with SIGNALS_LOCK:
            cause = self._cause
            if cause is None:
                if self._callbacks is None:
                    self._callbacks = Links(_is_closed)
                registration = Registration(fn, self._callbacks)
                self._callbacks.add(registration)
                return registration
        registration = Registration(fn, None)
        _run_all([registration], cause)
        return registration

    async def wait_set(self) -> Cause:
        """Wait until the signal is set, and return why.

        Cancellation:
            Always a checkpoint. A cancelled wait leaves nothing behind, and the
            signal as it was.
        """
        import asyncio  # not above: each keeper of a tool process is a fork of what its daemon imports

        if self._cause is not None:
            await asyncio.sleep(0)
            return self._cause
        loop = asyncio.get_running_loop()
        delivery = LoopDelivery.of_loop(loop)
        is_told: asyncio.Future[Cause] = loop.create_future()

        def tell(cause: Cause) -> None:
            delivery.post(lambda: None if is_told.done() else is_told.set_result(cause))

        with self.add_callback(tell):
            return await is_told

    def wait_blocking(self, timeout_s: float | None = None) -> Cause | None:
        """Wait in this thread until the signal is set, and return why.

        Args:
            timeout_s: longest wait in seconds; `None` waits without end.

        Returns:
            The cause, or None when the time is up.
        """
        limit_s = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        # A bare lock and not an Event: the callback may run in a signal handler that
        # interrupts this very wait, and must then need no lock of ours.
        gate = threading.Lock()
        gate.acquire()
        with self.add_callback(lambda _: gate.release()):
            gate.acquire(timeout=limit_s)
        return self._cause

    def __repr__(self) -> str:
        state = f"set: {self._cause.describe()}" if self._cause is not None else "unset"
        return f"<CancelSignal {self._name or hex(id(self))} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference: id, name, and the cause at this moment."""
        return _resolve_reference, (self.reference_id, self._name, self._cause)


@final
class Registration:
    """One callback on one signal. Works as a context manager that closes it.

    It need not be kept: the signal holds the callback.
    """

    __slots__ = ("_fn", "_links")

    def __init__(self, fn: Callable[[Cause], None], links: Links[Registration] | None) -> None:
        self._fn: Callable[[Cause], None] | None = fn
        # Weak, so that a dropped signal is freed at once and not by the cycle collector.
        self._links = None if links is None else weakref.ref(links)

    @property
    def is_closed(self) -> bool:
        """Whether the callback has run, is running, or was closed."""
        return self._fn is None

    def close(self) -> bool:
        """Withdraw the callback; may be called any number of times.

        Returns:
            True if the callback will now never run; False if it has run, is
            running in another thread at this moment, or was closed before.
        """
        if self.is_closed:  # for ever, so it takes no lock to see
            return False
        with SIGNALS_LOCK:
            if self._fn is None:
                return False
            self._fn = None
            links = None if self._links is None else self._links()
            if links is not None:
                links.discard(self)
            return True

    def run(self, cause: Cause) -> None:
        """Call the function, unless it was called or closed before."""
        with SIGNALS_LOCK:
            fn, self._fn = self._fn, None
        if fn is not None:
            fn(cause)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_closed(registration: Registration) -> bool:
    return registration.is_closed


def _run_all(due: list[Registration], cause: Cause) -> None:
    """Run callbacks; one that fails keeps no other one from running."""
    interrupt: BaseException | None = None
    for registration in due:
        try:
            registration.run(cause)
        except (KeyboardInterrupt, SystemExit) as error:
            # Not the callback's fault: goes on, after the others have been told.
            interrupt = error
        except BaseException:
            # Includes CancelledError and TurnCancelled, which here have no task to unwind.
            _log.exception("a callback of a cancellation signal failed")
    if interrupt is not None:
        raise interrupt


_references: weakref.WeakValueDictionary[str, CancelSignal] = weakref.WeakValueDictionary()


def bind_reference(reference_id: str, signal: CancelSignal) -> None:
    """Make a local signal the one that references with this id resolve to.

    For whoever receives work from another process: the signal it will set
    there stands for the one the sender holds. The binding keeps nothing alive.

    Args:
        reference_id: `CancelSignal.reference_id` of the sender's signal.
        signal: the signal of this process.

    Raises:
        InvalidArgument: another living signal is bound to the id, or the
            signal has another id.
    """
    signal.bind(reference_id)


def _resolve_reference(reference_id: str, name: str, cause: Cause | None) -> CancelSignal:
    """Return the local signal of a pickled reference, at least as set as it was then."""
    with SIGNALS_LOCK:
        signal = _references.get(reference_id)
        if signal is None:
            signal = CancelSignal(name=name)
            bind_reference(reference_id, signal)
    if cause is not None:
        signal.set(cause)
    return signal
