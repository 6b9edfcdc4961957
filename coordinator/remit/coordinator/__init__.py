"""Coordinators: open one, hold a turn, delegate runs, and stop them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remit.agents.runs import CancelReceipt, Run, RunOptions
    from remit.coordinator.api import Coordinator
    from remit.coordinator.turn import Turn
    from remit.coordinator.views import NodeView, TreeView
    from remit.core.approvals import ApprovalRule
    from remit.core.limits import Limits
    from remit.core.records import ApprovalRecord, SessionView, TurnRecord

__all__ = [
    "ApprovalRecord",
    "ApprovalRule",
    "CancelReceipt",
    "Coordinator",
    "Limits",
    "NodeView",
    "Run",
    "RunOptions",
    "SessionView",
    "TreeView",
    "Turn",
    "TurnRecord",
]

_PLACES = {
    "ApprovalRecord": "remit.core.records",
    "ApprovalRule": "remit.core.approvals",
    "CancelReceipt": "remit.agents.runs",
    "Coordinator": "remit.coordinator.api",
    "Limits": "remit.core.limits",
    "NodeView": "remit.coordinator.views",
    "Run": "remit.agents.runs",
    "RunOptions": "remit.agents.runs",
    "SessionView": "remit.core.records",
    "TreeView": "remit.coordinator.views",
    "Turn": "remit.coordinator.turn",
    "TurnRecord": "remit.core.records",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is: whoever only folds a journal needs no client, no agents and no programs."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return found
