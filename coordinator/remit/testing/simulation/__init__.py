"""Everything of remit that decides, in one process with a simulated network, disk and clock, from one seed.

See docs/simulator.md. `python -m remit.testing.simulation --seeds 2000` looks for holes.
"""

from remit.testing.simulation.plan import Plan
from remit.testing.simulation.seeds import make_plan
from remit.testing.simulation.violation import Violation
from remit.testing.simulation.world import Simulation, Summary

__all__ = ["Plan", "Simulation", "Summary", "Violation", "make_plan"]
