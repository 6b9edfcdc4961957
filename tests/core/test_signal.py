from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import tracemalloc
import weakref

import pytest

from remit.core import CancelSignal, Cause, CauseKind, TurnCancelled
from remit.core.errors import InvalidArgument
from remit.core.signal import bind_reference

FIRST = Cause(CauseKind.USER_INTERRUPT, origin="turn_1", reason="first")
SECOND = Cause(CauseKind.DEADLINE, origin="run_2", reason="second")


def test_first_cause_wins_and_never_changes() -> None:
    signal = CancelSignal()
    assert signal.set(FIRST)
    assert not signal.set(SECOND)
    assert signal.cause is FIRST


@pytest.mark.requirement("B33")
def test_a_signal_has_no_way_to_be_cleared() -> None:
    names = {name for name in dir(CancelSignal) if not name.startswith("_")}
    assert not names & {"clear", "reset", "unset"}
    with pytest.raises(AttributeError):
        setattr(CancelSignal(), "is_set", False)  # noqa: B010 - a plain assignment is refused by the type checker already


@pytest.mark.requirement("F8")
def test_setting_reaches_every_descendant_with_the_same_cause_object() -> None:
    root = CancelSignal()
    nodes = [root]
    for depth in range(1, 5_000):
        nodes.append(nodes[depth - 1].child(f"run_{depth}"))
    root.set(FIRST)
    assert all(node.cause is FIRST for node in nodes)


@pytest.mark.requirement("F8")
def test_setting_a_child_leaves_parent_and_siblings_live() -> None:
    parent = CancelSignal()
    child, sibling = parent.child(), parent.child()
    child.set(FIRST)
    assert child.is_set
    assert not parent.is_set
    assert not sibling.is_set


@pytest.mark.requirement("F8")
def test_a_child_of_a_set_signal_is_born_set() -> None:
    parent = CancelSignal()
    parent.set(FIRST)
    assert parent.child().cause is FIRST


@pytest.mark.requirement("B12")
@pytest.mark.parametrize("which", ["own", "inherited", "grandparent"])
def test_the_combined_signal_hears_own_inherited_and_grandparent(which: str) -> None:
    grandparent = CancelSignal()
    parent = grandparent.child()
    own = parent.child()
    {"own": own, "inherited": parent, "grandparent": grandparent}[which].set(FIRST)
    assert own.cause is FIRST


@pytest.mark.requirement("B28")
def test_any_accepts_absent_members_and_never_touches_the_others() -> None:
    one, two = CancelSignal(), CancelSignal()
    combined = CancelSignal.any(None, one, None, two)
    combined.set(FIRST)
    assert not one.is_set
    assert not two.is_set
    assert not CancelSignal.any(None).is_set
    assert not CancelSignal.any().is_set


@pytest.mark.requirement("B27")
def test_any_is_set_by_whichever_member_comes_first() -> None:
    outer, inner = CancelSignal(), CancelSignal()
    combined = CancelSignal.any(outer, inner)
    inner.set(FIRST)
    outer.set(SECOND)
    assert combined.cause is FIRST
    assert CancelSignal.any(CancelSignal(), outer).cause is SECOND


def test_raise_if_set_names_the_node_and_the_cause() -> None:
    signal = CancelSignal(name="run_7")
    signal.raise_if_set()
    signal.set(FIRST)
    with pytest.raises(TurnCancelled) as caught:
        signal.raise_if_set()
    assert caught.value.cause is FIRST
    assert caught.value.node_id == "run_7"
    assert not isinstance(caught.value, Exception)


def test_callbacks_run_once_outside_the_lock_and_may_register_more() -> None:
    signal = CancelSignal()
    heard: list[str] = []

    def register_more(_: Cause) -> None:
        signal.add_callback(lambda _: heard.append("at once"))
        heard.append("then")

    signal.add_callback(register_more)
    signal.set(FIRST)
    signal.set(SECOND)
    assert heard == ["at once", "then"]


@pytest.mark.requirement("B41")
def test_a_failing_callback_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    signal = CancelSignal()
    heard: list[Cause] = []

    def fail(_: Cause) -> None:
        raise RuntimeError("observer")

    signal.add_callback(fail)
    signal.add_callback(heard.append)
    assert signal.set(FIRST)
    assert heard == [FIRST]
    assert "callback" in caplog.text


def test_a_closed_callback_never_runs_and_close_says_so() -> None:
    signal = CancelSignal()
    heard: list[Cause] = []
    registration = signal.add_callback(heard.append)
    assert registration.close()
    assert not registration.close()
    signal.set(FIRST)
    assert heard == []


def test_when_set_returns_in_one_thread_all_threads_see_the_whole_subtree() -> None:
    root = CancelSignal()
    leaves = [root.child().child() for _ in range(200)]
    barrier = threading.Barrier(4)
    wrong: list[int] = []

    def set_and_look(number: int) -> None:
        barrier.wait()
        root.set(Cause(CauseKind.USER_INTERRUPT, origin=str(number)))
        if any(leaf.cause is not root.cause for leaf in leaves):
            wrong.append(number)

    threads = [threading.Thread(target=set_and_look, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.requirement("F9")
def test_no_child_escapes_a_parent_that_is_set_meanwhile() -> None:
    root = CancelSignal()
    children: list[CancelSignal] = []
    barrier = threading.Barrier(5)

    def spawn() -> None:
        barrier.wait()
        children.extend(root.child() for _ in range(500))

    threads = [threading.Thread(target=spawn) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait()
    root.set(FIRST)
    for thread in threads:
        thread.join()
    assert all(child.cause is FIRST for child in children)


async def _wait(signal: CancelSignal) -> Cause:
    return await signal.wait_set()


def test_an_awaited_wait_is_woken_from_another_thread() -> None:
    async def main() -> None:
        signal = CancelSignal()
        waits = [asyncio.ensure_future(_wait(signal)) for _ in range(3)]
        await asyncio.sleep(0)
        setter = threading.Thread(target=signal.set, args=(FIRST,))
        setter.start()
        assert await asyncio.gather(*waits) == [FIRST] * 3
        setter.join()

    asyncio.run(main())


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def main() -> None:
        signal = CancelSignal()
        wait = asyncio.ensure_future(_wait(signal))
        await asyncio.sleep(0)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert not signal.is_set
        signal.set(FIRST)
        assert await signal.wait_set() is FIRST

    asyncio.run(main())


def test_the_blocking_wait_returns_the_cause_or_none() -> None:
    signal = CancelSignal()
    assert signal.wait_blocking(0.01) is None
    setter = threading.Thread(target=signal.set, args=(FIRST,))
    setter.start()
    assert signal.wait_blocking(10) is FIRST
    setter.join()
    assert signal.wait_blocking(0) is FIRST


@pytest.mark.requirement("E13")
def test_copies_by_pickle_are_one_signal_within_a_process() -> None:
    signal = CancelSignal(name="run_1")
    copy = pickle.loads(pickle.dumps(signal))
    assert copy is signal
    copy.set(FIRST)
    assert signal.is_set


@pytest.mark.requirement("E13")
def test_a_copy_in_another_process_knows_what_was_set_and_answers_to_its_id() -> None:
    unset, was_set = CancelSignal(name="run_1"), CancelSignal(name="run_2")
    was_set.set(FIRST)
    script = (
        "import pickle, sys\n"
        "a, b = pickle.loads(sys.stdin.buffer.read())\n"
        "print(a.is_set, b.cause.reason, a.reference_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps((unset, was_set)), capture_output=True, check=True
    )
    assert done.stdout.decode().split() == ["False", "first", unset.reference_id]


def test_a_reference_bound_twice_is_refused() -> None:
    one, two = CancelSignal(), CancelSignal()
    bind_reference("signal_test_bound", one)
    bind_reference("signal_test_bound", one)
    with pytest.raises(InvalidArgument):
        bind_reference("signal_test_bound", two)


def test_dropped_children_leave_a_living_parent_as_small_as_before() -> None:
    parent = CancelSignal()
    kept = parent.child()

    def churn() -> None:
        for _ in range(100_000):
            parent.child()

    churn()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        churn()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * 1024
    parent.set(FIRST)
    assert kept.is_set


def test_dropped_combinations_and_closed_waits_leave_their_members_as_small() -> None:
    member = CancelSignal()

    def churn() -> None:
        for _ in range(20_000):
            CancelSignal.any(member, CancelSignal())
            member.add_callback(lambda _: None).close()

    churn()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        churn()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * 1024


def test_a_child_keeps_its_parent_alive_and_not_the_other_way() -> None:
    parent = CancelSignal()
    child = parent.child()
    parent_ref, child_ref = weakref.ref(parent), weakref.ref(child)
    del parent
    gc.collect()
    assert parent_ref() is not None
    del child
    gc.collect()
    assert child_ref() is None
    assert parent_ref() is None
