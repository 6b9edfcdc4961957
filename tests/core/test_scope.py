from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable

import pytest

from remit.core import CancelSignal, Cause, CauseKind, TurnCancelled
from remit.core.errors import InvalidArgument
from remit.core.scope import ScopeVerdict, TaskScope, current_scope, shielded

CAUSE = Cause(CauseKind.USER_INTERRUPT, origin="turn_1", reason="stop")


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


async def _started(body: Awaitable[object]) -> asyncio.Task[object]:
    async def run() -> object:
        return await body

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    return task


def test_a_set_signal_ends_the_body_with_turn_cancelled_and_leaves_no_count() -> None:
    async def body() -> None:
        signal = CancelSignal(name="run_1")

        async def work() -> None:
            with TaskScope(signal):
                await asyncio.sleep(60)

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled) as caught:
            await task
        assert caught.value.cause is CAUSE
        assert task.cancelling() == 0

    _run(body)


@pytest.mark.requirement("A4")
def test_a_signal_set_before_enter_strikes_at_the_first_wait() -> None:
    async def body() -> None:
        signal = CancelSignal()
        signal.set(CAUSE)
        reached: list[str] = []
        with pytest.raises(TurnCancelled):
            with TaskScope(signal):
                reached.append("before the wait")
                await asyncio.sleep(0.05)
                reached.append("after the wait")
        assert reached == ["before the wait"]

    _run(body)


def test_a_body_that_never_waits_is_caught_at_the_edge() -> None:
    async def body() -> None:
        signal = CancelSignal()
        with pytest.raises(TurnCancelled):
            with TaskScope(signal):
                signal.set(CAUSE)
        await asyncio.sleep(0)  # no cancel of ours is left for this wait

    _run(body)


def test_a_swallowed_cancel_comes_again_at_each_wait() -> None:
    async def body() -> None:
        signal = CancelSignal()
        swallowed = 0

        async def stubborn() -> None:
            nonlocal swallowed
            with TaskScope(signal):
                for _ in range(5):
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        swallowed += 1

        task = await _started(stubborn())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        assert swallowed == 5
        assert task.cancelling() == 0

    _run(body)


def test_a_foreign_cancel_propagates_untouched() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            with TaskScope(signal):
                await asyncio.sleep(60)

        task = await _started(work())
        task.cancel("somebody else")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not signal.is_set

    _run(body)


@pytest.mark.parametrize("ours_first", [True, False])
def test_when_both_cancel_the_foreign_one_wins(ours_first: bool) -> None:
    async def body() -> None:
        signal = CancelSignal()
        verdicts: list[ScopeVerdict] = []

        async def work() -> None:
            scope = TaskScope(signal)
            scope.enter()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                verdicts.append(scope.exit(error))
                raise

        task = await _started(work())
        loop = asyncio.get_running_loop()
        # Ours is delivered by a callback of the loop, so the order is the order of callbacks.
        if ours_first:
            signal.set(CAUSE)
            loop.call_soon(task.cancel)
        else:
            loop.call_soon(task.cancel)
            signal.set(CAUSE)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert verdicts[0].is_foreign
        assert not verdicts[0].is_ours

    _run(body)


def test_a_stray_cancelled_error_is_not_ours() -> None:
    async def body() -> None:
        with pytest.raises(asyncio.CancelledError):
            with TaskScope(CancelSignal()):
                raise asyncio.CancelledError

    _run(body)


def test_asyncio_timeout_keeps_its_meaning_inside_a_scope() -> None:
    async def body() -> None:
        with TaskScope(CancelSignal()):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)

    _run(body)


def test_our_cancel_inside_asyncio_timeout_is_ours() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            with TaskScope(signal):
                async with asyncio.timeout(60):
                    await asyncio.sleep(60)

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task

    _run(body)


def test_our_cancel_inside_a_task_group_ends_its_tasks() -> None:
    async def body() -> None:
        signal = CancelSignal()
        ended: list[int] = []

        async def member(number: int) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(number)

        async def work() -> None:
            with TaskScope(signal):
                async with asyncio.TaskGroup() as group:
                    for number in range(3):
                        group.create_task(member(number))

        task = await _started(work())
        await asyncio.sleep(0)
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        assert sorted(ended) == [0, 1, 2]

    _run(body)


@pytest.mark.requirement("B27")
def test_the_inner_scope_leaves_the_outer_untouched() -> None:
    async def body() -> None:
        outer = CancelSignal()
        inner = outer.child()
        with TaskScope(outer) as outer_scope:
            with pytest.raises(TurnCancelled):
                with TaskScope(inner):
                    inner.set(CAUSE)
                    await asyncio.sleep(60)
            assert current_scope() is outer_scope
            await asyncio.sleep(0)
        assert not outer.is_set
        assert current_scope() is None

    _run(body)


@pytest.mark.requirement("B27")
def test_the_context_is_restored_after_an_error() -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="boom"):
            with TaskScope(CancelSignal()):
                raise ValueError("boom")
        assert current_scope() is None

    _run(body)


@pytest.mark.requirement("B21")
def test_an_error_from_before_the_cancel_stays_what_it_is() -> None:
    async def body() -> None:
        signal = CancelSignal()
        with pytest.raises(ValueError, match="first"):
            with TaskScope(signal):
                try:
                    raise ValueError("first")
                finally:
                    signal.set(CAUSE)

    _run(body)


def test_one_signal_stops_many_scopes_set_from_another_thread() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            with TaskScope(signal):
                await asyncio.sleep(60)

        tasks = [await _started(work()) for _ in range(50)]
        setter = threading.Thread(target=signal.set, args=(CAUSE,))
        setter.start()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        setter.join()
        assert all(isinstance(result, TurnCancelled) for result in results)

    _run(body)


def test_a_signal_set_after_the_end_reaches_nobody() -> None:
    async def body() -> None:
        signal = CancelSignal()
        with TaskScope(signal):
            await asyncio.sleep(0)
        signal.set(CAUSE)
        await asyncio.sleep(0.01)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    _run(body)


def test_a_shield_lets_clean_up_finish() -> None:
    async def body() -> None:
        signal = CancelSignal()
        steps: list[str] = []

        async def work() -> None:
            with TaskScope(signal):
                try:
                    await asyncio.sleep(60)
                finally:
                    async with shielded(10):
                        await asyncio.sleep(0.02)
                        steps.append("cleaned")
                    try:
                        await asyncio.sleep(60)
                    finally:
                        steps.append("struck again")

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        assert steps == ["cleaned", "struck again"]

    _run(body)


def test_a_signal_set_inside_a_shield_waits_for_its_end() -> None:
    async def body() -> None:
        signal = CancelSignal()
        steps: list[str] = []
        with pytest.raises(TurnCancelled):
            with TaskScope(signal):
                async with shielded(10):
                    signal.set(CAUSE)
                    await asyncio.sleep(0.02)
                    steps.append("inside")
                await asyncio.sleep(60)
        assert steps == ["inside"]

    _run(body)


def test_a_shield_ends_at_its_deadline() -> None:
    async def body() -> None:
        signal = CancelSignal()
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            with TaskScope(signal):
                async with shielded(0.02):
                    await asyncio.sleep(60)

    _run(body)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_shield_without_a_deadline_is_refused(seconds: float) -> None:
    async def body() -> None:
        with pytest.raises(InvalidArgument):
            async with shielded(seconds):
                pass

    _run(body)


def test_a_foreign_cancel_lands_inside_a_shield() -> None:
    async def body() -> None:
        async def work() -> None:
            with TaskScope(CancelSignal()):
                async with shielded(10):
                    await asyncio.sleep(60)

        task = await _started(work())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _run(body)


def test_owns_cancellation_only_while_all_of_it_is_ours() -> None:
    async def body() -> None:
        signal = CancelSignal()
        seen: list[bool] = []

        async def work() -> None:
            with TaskScope(signal) as scope:
                assert not scope.owns_cancellation()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    seen.append(scope.owns_cancellation())
                    current = asyncio.current_task()
                    assert current is not None
                    current.cancel()
                    seen.append(scope.owns_cancellation())
                    raise

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [True, False]

    _run(body)


def test_ended_scopes_and_tasks_are_freed_without_the_cycle_collector() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            with TaskScope(signal):
                await asyncio.sleep(60)

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        freed = weakref.ref(task)
        gc.collect()
        del task
        await asyncio.sleep(0.02)
        gc.collect()
        assert freed() is None

    _run(body)


def test_those_that_obey_at_once_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    redeliver = TaskScope.redeliver

    def look(scope: TaskScope, *, is_eager: bool) -> None:
        looked.append(scope.signal.name)
        redeliver(scope, is_eager=is_eager)

    monkeypatch.setattr(TaskScope, "redeliver", look)

    async def body() -> None:
        turn = CancelSignal(name="turn")

        async def obey(number: int) -> None:
            with TaskScope(turn.child(f"obeys {number}")):
                await asyncio.sleep(60)

        async def linger() -> None:
            with TaskScope(turn.child("lingers")):
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(each) for each in (obey(1), linger(), obey(2), obey(3))]
        await asyncio.sleep(0)
        turn.set(CAUSE)
        await asyncio.wait(tasks)
        assert set(looked) == {"lingers"}

    _run(body)


def test_a_body_that_only_lets_others_run_is_struck_again() -> None:
    async def body() -> None:
        signal = CancelSignal()
        rounds = 0

        async def work() -> None:
            nonlocal rounds
            with TaskScope(signal):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    while rounds < 100_000:
                        await asyncio.sleep(0)
                        rounds += 1

        task = await _started(work())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        assert rounds < 10

    _run(body)


def test_a_foreign_cancel_from_before_enter_wins_over_ours() -> None:
    async def body() -> None:
        signal = CancelSignal()
        signal.set(CAUSE)

        async def work() -> None:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            with TaskScope(signal):
                await asyncio.sleep(60)

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(work())

    _run(body)


def test_a_foreign_cancel_that_was_over_before_enter_does_not_hide_ours() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            signal.set(CAUSE)
            with TaskScope(signal):
                await asyncio.sleep(60)

        with pytest.raises(TurnCancelled):
            await asyncio.create_task(work())

    _run(body)


def test_what_the_same_signal_stopped_first_is_ours_too() -> None:
    async def body() -> None:
        signal = CancelSignal()

        async def work() -> None:
            inner = asyncio.ensure_future(asyncio.sleep(60))
            await asyncio.sleep(0)
            # The inner task ends and sets the signal in the same round of the loop, ahead of delivery.
            inner.add_done_callback(lambda _: signal.set(CAUSE))
            with TaskScope(signal):
                inner.cancel()
                await inner

        with pytest.raises(TurnCancelled):
            await asyncio.create_task(work())

    _run(body)


@pytest.mark.requirement("B27")
def test_a_shield_in_an_inner_scope_holds_back_the_outer_one() -> None:
    async def body() -> None:
        outer = CancelSignal()
        steps: list[str] = []
        with pytest.raises(TurnCancelled):
            with TaskScope(outer):
                with TaskScope(outer.child()):
                    async with shielded(10):
                        outer.set(CAUSE)
                        await asyncio.sleep(0.02)
                        steps.append("cleaned")
                    await asyncio.sleep(60)
        assert steps == ["cleaned"]

    _run(body)


def test_clean_up_of_tasks_that_the_body_awaits_can_be_shielded() -> None:
    async def body() -> None:
        signal = CancelSignal()
        steps: list[float] = []

        async def tool(pause_s: float) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                async with shielded(10):
                    await asyncio.sleep(pause_s)
                    steps.append(pause_s)

        async def work() -> None:
            with TaskScope(signal):
                # They leave their shields in the order in which they took them.
                await asyncio.gather(tool(0.01), tool(0.03))

        task = await _started(work())
        await asyncio.sleep(0)
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await task
        # `gather` waits for none of its members once it is cancelled itself.
        await asyncio.sleep(0.05)
        assert steps == [0.01, 0.03]

    _run(body)


def test_a_scope_may_be_left_in_another_context() -> None:
    async def body() -> None:
        scope = TaskScope(CancelSignal())
        scope.enter()
        contextvars.Context().run(scope.exit, None)

    _run(body)


def test_one_that_cannot_be_cancelled_keeps_no_other_from_being_struck_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sulking(asyncio.Future[None]):
        sulks = False

        def cancel(self, msg: object = None) -> bool:
            if self.sulks:
                raise RuntimeError("not me")
            return super().cancel(msg)

    async def body() -> None:
        signal = CancelSignal()
        sulking = Sulking()

        async def sulk() -> None:
            with TaskScope(signal):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    sulking.sulks = True
                    await sulking

        async def swallow() -> None:
            with TaskScope(signal):
                for _ in range(5):
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        continue

        first, second = await _started(sulk()), await _started(swallow())
        signal.set(CAUSE)
        with pytest.raises(TurnCancelled):
            await second
        sulking.sulks = False
        with pytest.raises(TurnCancelled):
            await first
        assert "not me" in caplog.text

    _run(body)


def test_a_body_that_looks_before_its_call_comes_was_told_all_the_same() -> None:
    async def main() -> None:
        signal = CancelSignal()
        marked, go_on = threading.Event(), threading.Event()

        def hold(_: Cause) -> None:
            marked.set()
            go_on.wait(60.0)

        scope = TaskScope(signal)
        with signal.add_callback(hold):  # called before the scope's
            scope.enter()
            setting = threading.Thread(target=signal.set, args=(CAUSE,))
            setting.start()
            assert await asyncio.to_thread(marked.wait, 60.0)
            scope.exit(None)
            told = scope.told_at
            go_on.set()
            await asyncio.to_thread(setting.join)
        assert told is not None
        assert scope.told_at == told

    _run(main)


def test_a_body_that_is_over_before_the_signal_was_never_told() -> None:
    async def main() -> None:
        signal = CancelSignal()
        scope = TaskScope(signal)
        scope.enter()
        scope.exit(None)
        signal.set(CAUSE)
        assert scope.told_at is None

    _run(main)
