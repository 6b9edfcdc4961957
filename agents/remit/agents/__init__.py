"""Agents, and what their bodies hold: the run context and handles of runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remit.agents.command import CommandAgent
    from remit.agents.context import RunContext
    from remit.agents.definition import AgentDefinition, agent
    from remit.agents.leases import Lease
    from remit.agents.participant import Approval, Effect
    from remit.agents.runs import CancelReceipt, Run, RunOptions
    from remit.agents.sync_context import SyncRunContext
    from remit.agents.sync_delegation import SyncRun

__all__ = [
    "AgentDefinition",
    "Approval",
    "CancelReceipt",
    "CommandAgent",
    "Effect",
    "Lease",
    "Run",
    "RunContext",
    "RunOptions",
    "SyncRun",
    "SyncRunContext",
    "agent",
]

_PLACES = {
    "AgentDefinition": "remit.agents.definition",
    "Approval": "remit.agents.participant",
    "CancelReceipt": "remit.agents.runs",
    "CommandAgent": "remit.agents.command",
    "Effect": "remit.agents.participant",
    "Lease": "remit.agents.leases",
    "Run": "remit.agents.runs",
    "RunContext": "remit.agents.context",
    "RunOptions": "remit.agents.runs",
    "SyncRun": "remit.agents.sync_delegation",
    "SyncRunContext": "remit.agents.sync_context",
    "agent": "remit.agents.definition",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is: whoever only reads results of agents needs no client and no programs."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return found
