"""Showing a turn while it runs: a live tree in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from remit.cli.lines import Line, node_line, tree_lines
from remit.coordinator.views import TreeView

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "SilentDisplay", "choose_display"]


class Display(Protocol):
    """What `remit run` tells people while it waits."""

    def show(self, tree: TreeView) -> None:
        """Show how things stand."""
        ...

    def say(self, text: str) -> None:
        """Say something once."""
        ...

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        ...


class SilentDisplay:
    """Says nothing but what is said once, on stderr; for `--json`."""

    def show(self, tree: TreeView) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Say something once."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing to give back."""


class PlainDisplay:
    """A line for each change of state; for pipes and logs."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str]] = {}

    def show(self, tree: TreeView) -> None:
        """Print what has changed since the last time."""
        for node in tree.nodes:
            now = (node.state if node.outcome is None else node.outcome.value, node.waiting_for)
            if self._seen.get(node.id) != now:
                self._seen[node.id] = now
                self.say(node_line(node, tree.now, indent=node.depth).text)

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing to give back."""


class LiveDisplay:
    """The whole tree, drawn again and again in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, tree: TreeView) -> None:
        """Draw the tree, fitted to the terminal."""
        self._live.update(_text(tree_lines(tree, max_lines=max(4, self._console.height - 3))), refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the tree."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last picture and give the terminal back."""
        self._live.stop()


def _text(lines: list[Line]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(lines):
        text.append(("\n" if number else "") + line.text, style=line.style)
    return text


def choose_display(*, plain: bool, as_json: bool) -> Display:
    """Return the display that fits where the output goes."""
    if as_json:
        return SilentDisplay()
    return PlainDisplay() if plain or not sys.stdout.isatty() else LiveDisplay()
