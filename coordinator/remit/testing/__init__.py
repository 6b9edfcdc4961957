"""For tests of agents, and of remit itself: the whole system in one process, time by hand."""

from remit.testing.clock import ManualClock
from remit.testing.everywhere import AwaitPoint, CancelIgnored, EverywhereOptions, cancel_everywhere
from remit.testing.inprocess import InProcess, InProcessHost, open_inprocess
from remit.testing.wait import await_until, wait_until

__all__ = [
    "AwaitPoint",
    "CancelIgnored",
    "EverywhereOptions",
    "InProcess",
    "InProcessHost",
    "ManualClock",
    "await_until",
    "cancel_everywhere",
    "open_inprocess",
    "wait_until",
]
