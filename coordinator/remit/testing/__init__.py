"""For tests of agents, and of remit itself: the whole system in one process, time by hand."""

from remit.testing.clock import ManualClock
from remit.testing.inprocess import InProcess, InProcessHost, open_inprocess
from remit.testing.wait import await_until, wait_until

__all__ = ["InProcess", "InProcessHost", "ManualClock", "await_until", "open_inprocess", "wait_until"]
