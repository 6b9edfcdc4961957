"""The system in one process, as those see it who test with it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.core.errors import CoordinatorUnavailable
from remit.core.messages import dumps
from remit.testing import open_inprocess, wait_until


@agent
async def one(ctx: RunContext) -> int:
    return 1


def test_a_link_that_hangs_up_ends_what_is_parked_on_it_and_on_no_other(tmp_path: Path) -> None:
    with open_inprocess(tmp_path) as system:
        system.shut("turns")
        link, other = system.link(), system.link()
        parked, waiting = (way.submit("turns", dumps(None)) for way in (link, other))
        link.hang_up()
        for ended in (parked, link.submit("turns", dumps(None))):
            with pytest.raises(CoordinatorUnavailable, match="the link is cut"):
                ended.result(10.0)
        assert not waiting.done()
        system.let_through("turns")
        waiting.result(10.0)


def test_its_end_waits_for_no_poll_of_a_host(tmp_path: Path) -> None:
    with open_inprocess(tmp_path, poll_s=30.0) as system:

        async def story() -> None:
            async with system.coordinator() as coordinator, coordinator.turn("t") as turn:
                assert await (await turn.delegate(one)).result() == 1

        asyncio.run(story())
        # Nobody answers one from here on.
        system.shut("poll")
        polls = system.calls.count("poll")
        host = next(iter(system.engine.hosts.values()))
        host.host._connect()  # as for a body that delegates
        wait_until(lambda: system.calls.count("poll") > polls)
        began = time.monotonic()
    assert time.monotonic() - began < 15.0, "half of a poll's time"
