"""One live claim in the table, and who stands behind whom."""

from __future__ import annotations

from enum import StrEnum

from remit.locks.area import Area, includes
from remit.locks.claims import Mode
from remit.locks.events import ClaimRequest
from remit.locks.trie import Node

__all__ = ["ClaimState", "Entry"]


class ClaimState(StrEnum):
    """The states of a live claim; one that is over is not in the table."""

    QUEUED = "queued"
    """Stands in line and holds nothing."""
    GRANTED = "granted"
    """Leased to its owner."""
    QUARANTINED = "quarantined"
    """Its owner is gone but may still write; waits to be cleared."""


class Entry:
    """One live claim. The table alone changes it."""

    __slots__ = (
        "ahead_of",
        "blocks",
        "lenders",
        "lineage",
        "nodes",
        "note",
        "owner",
        "request",
        "since",
        "state",
        "ticket",
        "token",
        "waits",
    )

    def __init__(self, ticket: int, request: ClaimRequest, ahead_of: tuple[int, ...], lenders: tuple[str, ...]) -> None:
        self.ticket = ticket
        self.request = request
        self.owner = request.owner
        self.lineage = (request.owner, *request.ancestors)
        self.state = ClaimState.QUEUED
        self.token = 0
        """Fencing token; 0 until granted."""
        self.since = request.at
        """When it came into its present state, in seconds since 1970."""
        self.note = ""
        """Why it is quarantined."""
        self.ahead_of = frozenset(ahead_of)
        """Tickets of older claims that wait for this one."""
        self.lenders = lenders
        """Of its lineage, those whose claims it may enter, as known when it was queued."""
        self.waits: dict[int, Entry] = {}
        """Claims it waits for, by ticket; the mirror of their `blocks`."""
        self.blocks: dict[int, Entry] = {}
        """Claims that wait for it, by ticket."""
        self.nodes: tuple[Node[Entry], ...] = ()
        """Where its areas hang in the trie."""

    @property
    def areas(self) -> tuple[Area, ...]:
        """What it covers."""
        return self.request.areas

    @property
    def is_queued(self) -> bool:
        """Whether it stands in line."""
        return self.state is ClaimState.QUEUED

    def is_behind(self, other: Entry) -> bool:
        """Tell whether this queued claim has to wait for another that conflicts with it.

        The answer is the same for as long as both are in the table, whatever
        else comes and goes: edges can be left out and found again.
        """
        if other.owner in self.lineage:
            return False  # what an ancestor holds is lent, what one asks for is asked later
        if other.ticket < self.ticket:
            return other.ticket not in self.ahead_of
        return self.ticket in other.ahead_of

    def shadows(self, areas: tuple[Area, ...]) -> bool:
        """Tell whether everything that conflicts with these areas conflicts with this claim."""
        return all(any(own.mode is Mode.WRITE and includes(own, area) for own in self.areas) for area in areas)
