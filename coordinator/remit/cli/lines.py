"""A tree of turns and runs as lines of text, fitted to a height."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remit.coordinator.views import NodeView, TreeView
from remit.core.outcome import Outcome
from remit.core.texts import one_line

__all__ = ["Line", "duration", "node_line", "summary", "tree_lines", "word_counts"]

_MARKS = {
    "succeeded": "+",
    "failed": "x",
    "cancelled": "-",
    "timed_out": "t",
    "lost": "?",
    "blocked": "|",
    "running": ">",
    "settling": ">",
    "waiting": "~",
    "claiming": "~",
    "resuming": "~",
    "cancelling": "!",
}
_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "timed_out": "red",
    "lost": "red",
    "cancelled": "yellow",
    "blocked": "yellow",
    "cancelling": "bold yellow",
    "running": "cyan",
    "settling": "cyan",
    "waiting": "blue",
    "claiming": "blue",
}
_WIDE = 6
"""Children of one node that are shown one by one if there are more than fit."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line and how it looks in a terminal."""

    text: str
    style: str = ""

    def __post_init__(self) -> None:
        # Names, reasons and errors are anybody's: none may break the line, or command the terminal.
        object.__setattr__(self, "text", one_line(self.text))


def duration(seconds: float) -> str:
    """Return a time span for people: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _word(node: NodeView) -> str:
    """Return the state in the word that people look for: the outcome once there is one."""
    if node.state == "blocked":
        return "blocked"
    if node.kind == "turn" and node.state == "settling":
        # Its caller has nothing more to delegate; for whoever looks, it runs.
        return "running"
    return node.outcome.value if node.outcome is not None else node.state


def node_line(node: NodeView, now: float, *, indent: int = 0) -> Line:
    """Return one node as a line: mark, name, state, what it waits for, how long."""
    word = _word(node)
    label = node.name or node.agent or node.id
    if node.agent and node.name and node.agent != node.name:
        label = f"{label} ({node.agent})"
    end = node.ended_at if node.ended_at is not None else now
    begun = node.started_at if node.ended_at is not None and node.started_at is not None else node.since
    parts = [f"{'  ' * indent}{_MARKS.get(word, '.')} {label}  {word}"]
    if node.waiting_for:
        parts.append(f"waiting for {node.waiting_for}")
    parts.append(duration(end - begun))
    if node.attempt > 1:
        parts.append(f"attempt {node.attempt}")
    if node.detached:
        parts.append("detached")
    if node.unconfirmed:
        parts.append("NOT CONFIRMED")
    if node.tokens:
        parts.append(f"{node.tokens} tokens")
    if node.cost:
        parts.append(f"cost {node.cost:g}")
    parts.extend(_why(node))
    parts.append(node.id)
    return Line(", ".join(parts), _STYLES.get(word, ""))


def _why(node: NodeView) -> list[str]:
    if node.state == "blocked" and node.cause is not None:
        return [node.cause.reason]
    if node.outcome in (Outcome.FAILED, Outcome.LOST) and node.error:
        kind = f"{node.error_type}: " if node.error_type else ""
        return [(kind + node.error).splitlines()[0][:160]]
    if node.cause is not None and node.cause.origin == node.id:
        return [node.cause.describe()[:160]]
    return []


def tree_lines(tree: TreeView, *, max_lines: int | None = None) -> list[Line]:
    """Return a tree as lines, parents before children.

    Args:
        tree: what to show.
        max_lines: most lines; what is over is told in numbers, live runs last of all.
    """
    below: dict[str, list[NodeView]] = {}
    for node in tree.nodes[1:]:
        below.setdefault(node.parent_id, []).append(node)
    crowded = max_lines is not None and len(tree.nodes) > max_lines
    lines: list[Line] = []
    _grow(lines, tree.root, below, tree.now, 0, crowded=crowded)
    if max_lines is not None and len(lines) > max_lines:
        hidden = len(lines) - max_lines + 1
        lines = [*lines[: max_lines - 1], Line(f"... {hidden} more lines; `remit tree {tree.root.id}` shows all")]
    return lines


def _grow(
    lines: list[Line],
    node: NodeView,
    below: dict[str, list[NodeView]],
    now: float,
    indent: int,
    *,
    crowded: bool,
) -> None:
    lines.append(node_line(node, now, indent=indent))
    children = below.get(node.id, [])
    if crowded and len(children) > _WIDE:
        shown = _most_telling(children)
        counted = [child for child in children if child not in shown]
        children = shown
        for child in children:
            _grow(lines, child, below, now, indent + 1, crowded=crowded)
        lines.append(Line(f"{'  ' * (indent + 1)}... {summary(counted)}"))
        return
    for child in children:
        _grow(lines, child, below, now, indent + 1, crowded=crowded)


def _most_telling(nodes: list[NodeView]) -> list[NodeView]:
    """Return the few that people want to see: what failed, what is being stopped, what runs."""
    order = ("failed", "timed_out", "lost", "cancelling", "running", "waiting", "settling")
    ranked = sorted(nodes, key=lambda n: order.index(_word(n)) if _word(n) in order else len(order))
    chosen = {node.id for node in ranked[:_WIDE]}
    return [node for node in nodes if node.id in chosen]


def summary(nodes: Iterable[NodeView]) -> str:
    """Return how many nodes are in which state: `12 succeeded, 3 running`."""
    return word_counts(_word(node) for node in nodes)


def word_counts(words: Iterable[str]) -> str:
    """Return how often each word comes: `12 succeeded, 3 running`."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "nothing"
