"""`cancel_everywhere`: what it finds, and what it leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from remit.agents import AgentDefinition
from remit.core import RunFailed
from remit.core.errors import InvalidArgument
from remit.testing import AwaitPoint, CancelIgnored, EverywhereOptions, cancel_everywhere
from tests.testing import everywhere_agents as agents


def test_an_agent_that_stops_as_it_should_passes_at_each_await() -> None:
    points = cancel_everywhere(agents.tidy, path="a.py")
    # Claim, delegate, wait, task group, sleep, clean-up, release: at the least.
    assert len(points) >= 6
    assert [point.number for point in points] == list(range(1, len(points) + 1))
    assert all(point.where.startswith("everywhere_agents.py:") for point in points)
    assert len({point.where for point in points}) >= 5
    assert not any(point.problems for point in points)


@pytest.mark.slow
def test_programs_of_an_agent_are_gone_wherever_it_is_cancelled() -> None:
    assert cancel_everywhere(agents.with_a_process)


def ignored(agent: AgentDefinition, options: EverywhereOptions | None = None) -> tuple[AwaitPoint, ...]:
    """Return the awaits at which an agent is found not to stop."""
    with pytest.raises(CancelIgnored) as caught:
        cancel_everywhere(agent, options)
    return caught.value.points


def test_a_swallowed_cancellation_is_found_with_its_place() -> None:
    (point,) = ignored(agents.swallows)
    assert point.number == 1
    assert "returned a value" in str(point)
    assert "everywhere_agents.py:" in point.where


def test_a_cancellation_turned_into_another_error_is_found() -> None:
    (point,) = ignored(agents.renames)
    assert "ValueError('something else')" in str(point)


def test_a_task_that_is_left_running_is_found() -> None:
    points = ignored(agents.leaves_a_task)
    assert "left 1 tasks running" in str(points[0])


def test_a_detached_run_that_goes_on_is_found() -> None:
    points = ignored(agents.leaves_a_run)
    assert any("its run sleeper still runs" in str(point) for point in points)


def test_an_agent_that_will_not_stop_is_found() -> None:
    options = EverywhereOptions(max_points=1, grace_s=0.1)
    (point,) = ignored(agents.will_not_stop, options)
    assert "did not stop within 0.1 s" in str(point)


def test_what_an_agent_raises_by_itself_comes_out() -> None:
    with pytest.raises(RunFailed, match="broken anyway"):
        cancel_everywhere(agents.fails)


def test_only_asynchronous_agents_are_taken() -> None:
    with pytest.raises(InvalidArgument, match="async def"):
        cancel_everywhere(agents.plain)


def test_it_may_be_called_where_a_loop_runs() -> None:
    async def inside() -> None:
        assert cancel_everywhere(agents.child)

    asyncio.run(inside())
