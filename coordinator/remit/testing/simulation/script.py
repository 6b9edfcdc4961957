"""What drives a body of a simulation: a generator that yields what it waits for, and a signal.

Whoever drives it throws `Stopped` into the generator when its signal is set, at the wait that it is in,
as a task scope does with a task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from remit.core.cause import Cause
from remit.testing.simulation.kernel import Kernel

__all__ = ["Failed", "Script", "Scripted", "Stopped", "Wait"]

Wait = Callable[[Callable[[Any], None]], None]
"""Begins a wait and is given what to call, with the result, when it is over."""

Script = Generator[Wait, Any, None]


class Stopped(Exception):
    """The signal of this body is set."""


class Failed(Exception):
    """A step did not work; the body raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(str(error))
        self.error = error


class Scripted(ABC):
    """Something that does one step after the other until it ends or is stopped.

    Args:
        kernel: the clock.
        node_id: the turn or run that it is the body of.
        deaf: it does not listen to its signal.
    """

    def __init__(self, kernel: Kernel, node_id: str, *, deaf: bool) -> None:
        self.node_id = node_id
        self.cause: Cause | None = None
        """Why its signal is set; the first cause stays."""
        self.holds: dict[str, tuple[str, ...]] = {}
        """Claims that this body believes to hold, and their areas."""
        self.is_over = False
        self._kernel = kernel
        self._deaf = deaf
        self._woken: Callable[[Any], None] | None = None
        self._ticket = 0
        self._script: Generator[Wait, Any, str] = self.life()

    @abstractmethod
    def life(self) -> Generator[Wait, Any, str]:
        """Do everything, and return the word for how it ended."""

    @abstractmethod
    def ended(self, word: str, error: BaseException | None) -> None:
        """Say how this body ended: `returned`, `raised`, `cancelled`, `stray`."""

    def must_stop(self) -> bool:
        """Tell whether its signal is set and it listens to it."""
        return self.cause is not None and not self._deaf

    def begin(self) -> None:
        """Do everything up to the first wait."""
        self._advance(lambda: next(self._script))

    def stop(self, cause: Cause) -> None:
        """Set the signal; the first cause stays."""
        if self.cause is not None or self.is_over:
            return
        self.cause = cause
        if not self._deaf:
            self._ticket += 1
            # As a delivery: in a callback of its own, never inside a step.
            self._kernel.after(0.0, lambda: self._throw(self._ticket))

    def vanish(self) -> None:
        """Be gone, with the process that this body is in."""
        self.is_over = True
        self._ticket += 1
        self.holds.clear()
        self._script.close()

    def _throw(self, ticket: int) -> None:
        if not self.is_over and ticket == self._ticket:
            self._advance(lambda: self._script.throw(Stopped()))

    def _resume(self, ticket: int, value: Any) -> None:
        if not self.is_over and ticket == self._ticket:
            self._advance(lambda: self._script.send(value))

    def _advance(self, move: Callable[[], Wait]) -> None:
        error: BaseException | None = None
        word = ""
        try:
            begin = move()
        except StopIteration as done:
            word = str(done.value)
        except Failed as failed:
            word, error = "raised", failed.error
        else:
            self._ticket += 1
            ticket = self._ticket
            begin(partial(self._resume, ticket))
            return
        self.is_over = True
        self.ended(word, error)
        self.holds.clear()

    def pause(self, seconds: float) -> Wait:
        """Return a wait of that many seconds."""
        return lambda done: _ignore(self._kernel.after(seconds, lambda: done(None)))

    def wake(self, word: str = "") -> None:
        """Let a body look again at what it waits for; `refused` fails the wait."""
        woken, self._woken = self._woken, None
        if woken is not None:
            self._kernel.after(0.0, lambda: woken(word))

    def woken_up(self) -> Wait:
        """Return the wait for the next `wake`."""

        def begin(done: Callable[[Any], None]) -> None:
            self._woken = done

        return begin


def _ignore(value: object) -> None:
    """Drop a value that a wait has no use for."""
