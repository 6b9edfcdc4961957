"""Coordinators: open one, hold a turn, delegate runs, and stop them all."""

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
