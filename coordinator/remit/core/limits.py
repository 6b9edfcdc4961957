"""Limits: how deep, how wide, how many at once, how large."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Limits", "is_amount"]


def is_amount(value: object, *, above_zero: bool = False) -> bool:
    """Tell whether a value is a finite number, not negative: no NaN, no infinity, no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        if not math.isfinite(value):
            return False
    except OverflowError:  # a whole number beyond what a float can be
        return False
    return value > 0 if above_zero else value >= 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a workspace, a turn or a run; `None` means "as the level above".

    A run's limits hold for what lies below it and can only narrow what an
    ancestor allows.
    """

    max_depth: int | None = None
    """Levels of delegation below the turn, from 1; a workspace defaults to 3."""
    max_children: int | None = None
    """Runs that one node may delegate over its whole life; unlimited by default."""
    max_concurrent: int | None = None
    """Runs below this node that may hold a slot at the same time."""
    max_shared: int | None = None
    """Workspace only: shared-isolation runs with a slot at once; 256 by default."""
    max_dedicated: int | None = None
    """Workspace only: runs with a Ray actor to themselves at once; 2 x CPUs by default."""
    max_result_bytes: int | None = None
    """Size of one pickled result or argument set, in bytes; 16 MiB by default."""
    tokens: int | None = None
    """Turn, run or session: tokens for it and all below it; it is cancelled (`budget`) once they are spent."""
    cost: float | None = None
    """The same in money, in whatever currency `ctx.spend` is told; a number more than 0."""

    def __post_init__(self) -> None:
        """Refuse numbers that can never work.

        Raises:
            ValueError: a limit is below 1, or `cost` is not a finite number more than 0.
        """
        if self.cost is not None and not is_amount(self.cost, above_zero=True):
            raise ValueError(f"limit cost must be a finite number more than 0, not {self.cost!r}")
        for name in self.__slots__:
            if name == "cost":
                continue
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"limit {name} must be a whole number from 1, not {value!r}")
