"""Tool processes: started by a daemon that belongs to no worker, captured, stopped as whole trees."""

from remit.processes.answers import JobView, StartAnswer, StartKind, StopAnswer, StopKind, StopSummary
from remit.processes.client import ProcessClient
from remit.processes.doctor import Leftover, LeftoverKind, ignore_leftover, kill_leftover
from remit.processes.jobs import JobOutcome, JobResult, JobSpec, fingerprint
from remit.processes.output import Captured, follow, read_capture
from remit.processes.results import CommandOutcome, CommandResult, backgrounded_result, command_result
from remit.processes.table import ProcessIdentity
from remit.processes.template import CommandTemplate
from remit.processes.tree import descendants
from remit.processes.watches import Watch

__all__ = [
    "Captured",
    "CommandOutcome",
    "CommandResult",
    "CommandTemplate",
    "JobOutcome",
    "JobResult",
    "JobSpec",
    "JobView",
    "Leftover",
    "LeftoverKind",
    "ProcessClient",
    "ProcessIdentity",
    "StartAnswer",
    "StartKind",
    "StopAnswer",
    "StopKind",
    "StopSummary",
    "Watch",
    "backgrounded_result",
    "command_result",
    "descendants",
    "fingerprint",
    "follow",
    "ignore_leftover",
    "kill_leftover",
    "read_capture",
]
