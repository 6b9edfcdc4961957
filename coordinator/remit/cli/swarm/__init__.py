"""Swarm files: reading, checking, expanding."""

from remit.cli.swarm.load import load_swarm_file, parse_swarm
from remit.cli.swarm.model import SwarmFile
from remit.cli.swarm.plan import PlannedAgent, PlannedCommand, PlannedPython, PlannedRun, SwarmPlan, build_plan
from remit.cli.swarm.schema import json_schema

__all__ = [
    "PlannedAgent",
    "PlannedCommand",
    "PlannedPython",
    "PlannedRun",
    "SwarmFile",
    "SwarmPlan",
    "build_plan",
    "json_schema",
    "load_swarm_file",
    "parse_swarm",
]
