"""Command line programs: templates, output, whole process trees, and running them."""

from remit.processes.command import CommandOutcome, CommandResult, run_command, run_command_blocking
from remit.processes.output import Captured, follow, read_capture
from remit.processes.table import ProcessIdentity
from remit.processes.template import CommandTemplate
from remit.processes.tree import descendants

__all__ = [
    "Captured",
    "CommandOutcome",
    "CommandResult",
    "CommandTemplate",
    "ProcessIdentity",
    "descendants",
    "follow",
    "read_capture",
    "run_command",
    "run_command_blocking",
]
