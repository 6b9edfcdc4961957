"""Time, chance and the network of a simulation: one heap of events, one seed.

**Invariants**

1. Nothing happens but by an event of the kernel, one after the other, in the order of
   their times; events of one instant come in the order in which they were made.
2. Chance is a function of the seed and a name, not of how often it was asked before. So
   a plan that is made smaller leaves the fate of most messages as it was.
3. After `Network.calm_at` nothing is lost, doubled or slow any more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

__all__ = ["Dice", "Event", "Kernel", "Network", "Weather"]

START_S = 1_000.0
"""Simulated time at the beginning, in seconds since 1970: small, so that histories read well."""

_SCALE = 2.0**-64


class Dice:
    """Numbers that depend on the seed and on a name, and on nothing else.

    Args:
        seed: of the whole simulation.
    """

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(16, "little", signed=True)

    def unit(self, *name: object) -> float:
        """Return a number from 0 up to 1, always the same one for a name."""
        text = "/".join(map(str, name))
        digest = blake2b(text.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") * _SCALE

    def chance(self, probability: float, *name: object) -> bool:
        """Tell whether something with this probability happens."""
        return probability > 0 and self.unit(*name) < probability

    def between(self, low: float, high: float, *name: object) -> float:
        """Return a number from a range."""
        return low + (high - low) * self.unit(*name)


@dataclass(order=True, slots=True)
class Event:
    """Something that will happen unless it is called off."""

    when: float
    order: int
    act: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""
        self.act = None


class Kernel:
    """The clock and what is due."""

    def __init__(self) -> None:
        self.now = START_S
        self.happened = 0
        """Events so far."""
        self._heap: list[Event] = []
        self._order = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> Event:
        """Do something at a time; at once, after all that is due, if it has passed."""
        event = Event(max(when, self.now), next(self._order), act)
        heapq.heappush(self._heap, event)
        return event

    def after(self, seconds: float, act: Callable[[], None]) -> Event:
        """Do something later."""
        return self.at(self.now + seconds, act)

    def run(self, until: float, is_over: Callable[[], bool] | None = None) -> None:
        """Let everything happen up to a time, or until it is over.

        Args:
            until: simulated time, in seconds since 1970.
            is_over: asked after each event.
        """
        while self._heap and self._heap[0].when <= until:
            event = heapq.heappop(self._heap)
            act, event.act = event.act, None
            if act is None:
                continue
            self.now = event.when
            self.happened += 1
            act()
            if is_over is not None and is_over():
                return
        self.now = max(self.now, until)


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is, as probabilities for each message."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    slow_s: float = 1.0
    """Longest delay of a slow message, in seconds."""


class Network:
    """Carries messages between the endpoints of a simulation.

    What holds for all: between two endpoints messages may overtake each other.
    `exact` ones (the calls that begin work on a host) arrive once and in order if their
    receiver lives, as calls of a Ray actor without retries do. Those of another life of
    their sender keep an order of their own.

    Args:
        kernel: the clock.
        dice: decides the fate of each message.
        weather: until `calm_at`.
        calm_at: when all faults end.
    """

    def __init__(self, kernel: Kernel, dice: Dice, weather: Weather, calm_at: float) -> None:
        self._kernel = kernel
        self._dice = dice
        self._weather = weather
        self._calm_at = calm_at
        self._counts: dict[tuple[str, str, str], int] = {}
        self._exact: dict[tuple[str, str, int], float] = {}
        self._held_up: dict[str, tuple[float, float, float]] = {}
        self._cut: dict[str, float] = {}
        self.dropped_orders: set[str] = set()
        """Endpoints that an order to was lost on the way."""

    def cut(self, endpoint: str, seconds: float) -> None:
        """Let nothing through from or to an endpoint for a time."""
        self._cut[endpoint] = max(self._cut.get(endpoint, 0.0), self._kernel.now + seconds)

    def is_cut(self, endpoint: str) -> bool:
        """Tell whether an endpoint is cut off now."""
        return self._cut.get(endpoint, 0.0) > self._kernel.now

    def hold_up(self, source: str, at_least_s: float, at_most_s: float) -> None:
        """Let everything that an endpoint sends at this very instant be under way for so many seconds more."""
        self._held_up[source] = (self._kernel.now, at_least_s, at_most_s)

    def send(
        self, source: str, target: str, kind: str, deliver: Callable[[], None], *, exact: bool = False, life: int = 0
    ) -> None:
        """Carry a message; `deliver` is called when it arrives, never, or twice.

        Args:
            source: endpoint that sends.
            target: endpoint that it is for.
            kind: what it is, which decides its fate with its number.
            deliver: called when it arrives.
            exact: whether it arrives once and in order.
            life: of the sender.
        """
        key = (source, target, kind)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        name = (*key, number)
        calm = self._kernel.now >= self._calm_at
        delay = self._dice.between(0.001, 0.015, "delay", *name)
        if not calm and self._dice.chance(self._weather.slow, "slow", *name):
            delay += self._dice.between(0.05, self._weather.slow_s, "slow by", *name)
        held_at, at_least_s, at_most_s = self._held_up.get(source, (-1.0, 0.0, 0.0))
        if held_at == self._kernel.now:
            delay += self._dice.between(at_least_s, at_most_s, "held up", *name)
        if exact:
            stream = (source, target, life)
            arrival = max(self._kernel.now + delay, self._exact.get(stream, 0.0))
            self._exact[stream] = arrival
            self._kernel.at(arrival, deliver)
            return
        lost = not calm and self._dice.chance(self._weather.loss, "lost", *name)
        if lost or self.is_cut(source) or self.is_cut(target):
            if kind == "order":
                self.dropped_orders.add(target)
            return
        self._kernel.after(delay, deliver)
        if not calm and self._dice.chance(self._weather.duplicate, "twice", *name):
            self._kernel.after(delay + self._dice.between(0.0, 1.0, "twice after", *name), deliver)
