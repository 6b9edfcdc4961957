"""What a simulation reports when something that must hold does not."""

from __future__ import annotations

__all__ = ["Violation", "require"]


class Violation(AssertionError):
    """An invariant does not hold.

    Args:
        rule: its name, one of those in docs/simulator.md.
        message: what was seen.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message

    def __str__(self) -> str:
        """Return rule and message in one line."""
        return f"{self.rule}: {self.message}"


def require(condition: object, rule: str, message: str) -> None:
    """Raise `Violation` unless the condition is true."""
    if not condition:
        raise Violation(rule, message)
