"""Claims that belong to a run as a whole: from the agent and the caller to areas.

A claim of an agent may hold fields, `write("{path}")`, which the run's arguments
fill. In a glob the filled text stands for itself: its wildcards are plain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

from remit.core.errors import InvalidArgument
from remit.locks import Area, Claim, InvalidClaim, Mode, Workspace

__all__ = ["RunWishes", "check_unmoved", "checked_claims", "wishes_of_run", "workspace_of"]

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@lru_cache(maxsize=16)
def workspace_of(root: str) -> Workspace:
    """Return the workspace of a folder; looked at once, since its volume does not change."""
    return Workspace(root)


def checked_claims(claims: object) -> tuple[Claim, ...]:
    """Return claims as a tuple; one alone will do.

    Raises:
        InvalidArgument: something else is among them.
    """
    found = (claims,) if isinstance(claims, Claim) else claims
    if not isinstance(found, (tuple, list)):
        raise InvalidArgument(f"claims must be read(...), write(...) or exclusive(), not {claims!r}")
    checked: list[Claim] = []
    for item in found:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(item, Claim):
            raise InvalidArgument(f"claims must hold read(...), write(...) or exclusive(), not {item!r}")
        # A claim that was not made by `read` and its like; types are not looked at where it was made.
        mode, text = cast("tuple[object, object]", (item.mode, item.text))
        if not isinstance(mode, Mode) or not isinstance(text, str):
            raise InvalidClaim(
                f"a claim is a mode and a text, not {mode!r} and {text!r}; make it with read() or write()"
            )
        checked.append(item)
    return tuple(checked)


class RunWishes(NamedTuple):
    """What a run must hold before it takes a slot, as messages carry it."""

    areas: tuple[Mapping[str, Any], ...] = ()
    """The places, as `Area.to_dict` writes them."""
    spelled: tuple[tuple[str, str, bool], ...] = ()
    """The claims behind them: mode, text, whether it is a glob."""


def wishes_of_run(
    of_agent: Iterable[Claim], of_options: Iterable[Claim], arguments: Mapping[str, Any], root: str
) -> RunWishes:
    """Return what a run must hold before it takes a slot.

    Args:
        of_agent: claims with fields.
        of_options: claims as they are.
        arguments: what fills the fields.
        root: the workspace's folder.

    Raises:
        InvalidArgument: a field that no argument fills.
        InvalidClaim, OutsideWorkspace: a claim that cannot be.
    """
    claims = [*(_filled(claim, arguments) for claim in of_agent), *of_options]
    areas = workspace_of(root).areas(claims)
    return RunWishes(
        tuple(area.to_dict() for area in areas),
        tuple((claim.mode.value, claim.text, claim.is_glob) for claim in claims),
    )


def check_unmoved(wishes: RunWishes, root: str) -> None:
    """Look again, right before a body begins, where its claims lead: links may have been changed since.

    Args:
        wishes: what was granted, and what had been asked for.
        root: the workspace's folder.

    Raises:
        InvalidClaim: they lead elsewhere by now, so what was granted is not what the body would use.
    """
    claims = [Claim(Mode(mode), text, is_glob) for mode, text, is_glob in wishes.spelled]
    areas = tuple(Area.from_dict(dict(area)) for area in wishes.areas)
    if not workspace_of(root).still_holds(claims, areas):
        told = " and ".join(claim.describe() for claim in claims)
        raise InvalidClaim(
            f"{told} leads somewhere else than when it was asked for: a link on the way was changed "
            "while the run waited; nothing of it was begun, delegate it again"
        )


def _filled(claim: Claim, arguments: Mapping[str, Any]) -> Claim:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in arguments:
            raise InvalidArgument(f"the claim {claim.describe()!r} needs the argument {name!r}, which is not given")
        text = str(arguments[name])
        return "".join(f"[{char}]" if char in "*?[{" else char for char in text) if claim.is_glob else text

    return replace(claim, text=_FIELD.sub(value, claim.text))
