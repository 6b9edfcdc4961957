"""Where the `remit` command begins: verbs that are typed again and again take a short way.

Typer, and pydantic below it, take several tenths of a second of a processor to read any
command line: more than `remit ps` and `remit tree` need for ten thousand runs. So plain calls
of these two are read here. Everything else, help and mistakes too, is for `remit.cli.main`,
which knows the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remit.cli.exits import reported

__all__ = ["PlainCall", "main", "plain_call"]


@dataclass(slots=True)
class PlainCall:
    """One of the short verbs with what it was given."""

    verb: str
    target: str | None = None
    workspace: Path = Path()
    everything: bool = False
    as_json: bool = False

    def carry_out(self) -> None:
        """Do what was asked for."""
        from remit.cli.looking import show_tree, show_turns

        with reported():
            if self.verb == "ps":
                show_turns(self.workspace, everything=self.everything, as_json=self.as_json)
            else:
                show_tree(self.workspace, self.target, as_json=self.as_json)


def plain_call(words: Sequence[str]) -> PlainCall | None:
    """Return what a command line asks for, or None if it takes more than this to read it."""
    if not words or words[0] not in ("ps", "tree"):
        return None
    call = PlainCall(words[0])
    rest = iter(words[1:])
    for word in rest:
        if word == "--json":
            call.as_json = True
        elif word in ("-w", "--workspace"):
            folder = next(rest, None)
            if folder is None:
                return None
            call.workspace = Path(folder)
        elif word in ("-a", "--all") and call.verb == "ps":
            call.everything = True
        elif call.verb == "tree" and call.target is None and not word.startswith("-"):
            call.target = word
        else:
            return None
    return call


def main() -> None:
    """Run the command line."""
    call = plain_call(sys.argv[1:])
    if call is not None:
        call.carry_out()
        return
    from remit.cli.main import main as whole

    whole()
