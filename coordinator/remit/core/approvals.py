"""Policies for approvals, as data: rules by action, decided without asking anybody.

**Rules**

1. The first rule of a node whose pattern matches the action is that node's word.
2. Of the words of all nodes from the turn down to whoever asks, the strictest
   counts: `deny` before `ask` before `approve`. A run can only narrow what its
   ancestors allow.
3. Nobody's word is `ask`.
4. A rule that does not hold denies: nothing is approved by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from remit.core.errors import InvalidArgument

__all__ = ["ApprovalRule", "PolicyWord", "Verdict", "policy_rules", "verdict"]

PolicyWord = str
"""`approve`, `deny` or `ask`."""

_WORDS = ("deny", "ask", "approve")  # the strictest first
_SHORT = {"auto": "approve", "ask": "ask", "deny": "deny"}
_KEYS = frozenset({"action", "answer", "reason"})


@dataclass(frozen=True, slots=True)
class ApprovalRule:
    """What is answered to requests for approval of actions like this."""

    action: str
    """Pattern for the whole action, as in shells (`*`, `?`, `[...]`), case matters: `shell:git *`."""
    answer: PolicyWord
    """`approve`, `deny`, or `ask` a person."""
    reason: str = ""
    """Told to whoever asked; may be empty."""

    def __post_init__(self) -> None:
        """Refuse what can never hold.

        Raises:
            InvalidArgument: an empty pattern, or another word.
        """
        wrong = _mistake(self.to_dict())
        if wrong:
            raise InvalidArgument(f"approval rule: {wrong}")

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as a mapping for messages and the journal."""
        data = {"action": self.action, "answer": self.answer}
        return {**data, "reason": self.reason} if self.reason else data


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policies on the way say about one action."""

    word: PolicyWord
    """`approve`, `deny` or `ask`."""
    reason: str = ""
    """Which rule said so."""


def policy_rules(policy: str | Sequence[ApprovalRule]) -> tuple[Mapping[str, Any], ...]:
    """Return a policy as messages carry it.

    Args:
        policy: `ask` (everything), `auto` (approve everything), `deny` (everything), or
            rules, of which the first that matches counts.

    Raises:
        InvalidArgument: another word, or something else among the rules.
    """
    if isinstance(policy, str):
        if policy not in _SHORT:
            raise InvalidArgument(f"approvals must be one of {', '.join(_SHORT)} or rules, not {policy!r}")
        return (ApprovalRule("*", _SHORT[policy]).to_dict(),)
    if not isinstance(policy, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"approvals must be one of {', '.join(_SHORT)} or rules, not {policy!r}")
    found: list[Mapping[str, Any]] = []
    for rule in policy:
        # Untyped callers: a mapping or a text here would be taken for something else later.
        if not isinstance(rule, ApprovalRule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"approvals must hold ApprovalRule(...), not {rule!r}")
        found.append(rule.to_dict())
    return tuple(found)


def verdict(policies: Iterable[tuple[str, Sequence[Mapping[str, Any]]]], action: str) -> Verdict:
    """Return what the policies on the way from the turn to whoever asks say; never raises.

    Args:
        policies: (whose, rules) for each node that has rules.
        action: what is to be done.
    """
    found: Verdict | None = None
    for whose, rules in policies:
        said = _word_of(whose, rules, action)
        if said is not None and (found is None or _WORDS.index(said.word) < _WORDS.index(found.word)):
            found = said
    return found or Verdict("ask")


def _word_of(whose: str, rules: Sequence[Mapping[str, Any]], action: str) -> Verdict | None:
    """Return the word of one node, or None if none of its rules is about this action."""
    for number, rule in enumerate(rules, 1):
        try:
            wrong = _mistake(rule)
            if wrong:
                return Verdict("deny", f"rule {number} of {whose} does not hold: {wrong}")
            if fnmatchcase(action, rule["action"]):
                return Verdict(rule["answer"], rule.get("reason") or f"rule {number} of {whose}: {rule['action']}")
        except Exception as error:  # fails closed: whatever is wrong with a rule approves nothing
            return Verdict("deny", f"rule {number} of {whose} could not be applied: {error!r}")
    return None


def _mistake(rule: Mapping[str, Any]) -> str:
    """Say what is wrong with a rule, or the empty text."""
    unknown = sorted(set(rule) - _KEYS)
    if unknown:
        return f"unknown field {unknown[0]!r}"
    if not isinstance(rule.get("action"), str) or not rule["action"]:
        return f"action must be a pattern, not {rule.get('action')!r}"
    if rule.get("answer") not in _WORDS:
        return f"answer must be approve, deny or ask, not {rule.get('answer')!r}"
    if not isinstance(rule.get("reason", ""), str):
        return "reason must be a text"
    return ""
