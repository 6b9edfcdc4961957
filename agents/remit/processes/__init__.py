"""Command line programs: templates, output, whole process trees, and running them, alone or through the daemon."""

from remit.processes.answers import JobView, StartAnswer, StartKind, StopAnswer, StopKind, StopSummary
from remit.processes.client import ProcessClient
from remit.processes.command import CommandOutcome, CommandResult, run_command, run_command_blocking
from remit.processes.doctor import Leftover, LeftoverKind, ignore_leftover, kill_leftover
from remit.processes.jobs import JobOutcome, JobResult, JobSpec
from remit.processes.output import Captured, follow, read_capture
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
    "descendants",
    "follow",
    "ignore_leftover",
    "kill_leftover",
    "read_capture",
    "run_command",
    "run_command_blocking",
]
