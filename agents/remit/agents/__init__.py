"""Agents, and what their bodies hold: the run context and handles of runs."""

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
