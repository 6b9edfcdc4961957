"""Deaths of the coordinator at moments that are bad for somebody: before an effect, and while it tidies up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from remit.agents import RunContext, agent
from remit.coordinator import Coordinator
from remit.coordinator.engine import ClusterNode
from remit.coordinator.folding import fold_journal
from remit.coordinator.life import Life, LoopScheduler
from remit.coordinator.service import ServiceOptions
from remit.coordinator.transaction import Settings
from remit.core import Outcome, RunFailed, TurnCancelled
from remit.core.errors import JournalBusy, JournalFenced
from remit.core.messages import dumps
from remit.journal import SqliteJournal, SqliteJournalReader
from remit.testing import InProcess, await_until, open_inprocess
from remit.testing.inprocess import InProcessLink
from tests.agents import bodies
from tests.agents.bodies import Stage
from tests.agents.world import World, in_loop, world
from tests.coordinator import conversation_bodies as talk
from tests.coordinator.decider_world import same


@agent
async def where(ctx: RunContext) -> int:
    """Tell which attempt this is, once the gate is open."""
    stage = Stage(ctx.workspace)
    stage.note(f"attempt {ctx.attempt}")
    await stage.pass_gate("go")
    return ctx.attempt


async def died(w: World) -> None:
    """Wait until the coordinator has died at its failpoint, and begin the next life."""
    await await_until(w.system.died.is_set, timeout_s=30.0, message="the failpoint")
    await asyncio.to_thread(w.system.restart_coordinator)


def attempts(w: World) -> list[int]:
    return [event.attempt for event in w.events("run_started")]  # type: ignore[attr-defined]


def terminal(w: World) -> list[str]:
    return sorted(event.node_id for event in w.events() if event.terminal)


# -- approvals -------------------------------------------------------------------------


@pytest.mark.requirement("F14")
@pytest.mark.parametrize("decision", ["approve", "deny"])
@in_loop
async def test_an_answer_that_is_on_the_disk_is_heard_by_who_asked(decision: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(talk.ask)
        await await_until(lambda: w.events("approval_requested"))
        (record,) = await w.coordinator.approvals()
        w.system.die_after("approval_answered")
        answering = asyncio.ensure_future(getattr(w.coordinator, decision)(record.id, "so be it", by="ada"))
        await died(w)
        # Whoever answers asks again and is told the answer of the journal, which is its own.
        assert (await answering).by == "ada"
        if decision == "approve":
            assert await run.result() == "ada"
        else:
            with pytest.raises(RunFailed, match="so be it"):
                await run.result()
        assert len(w.events("approval_answered")) == 1


@in_loop
async def test_a_question_that_is_on_the_disk_is_asked_once_and_can_be_answered(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        w.system.die_after("approval_requested")
        run = await turn.delegate(talk.ask)
        await died(w)
        (record,) = await w.coordinator.approvals()
        await w.coordinator.approve(record.id, by="ada")
        assert await run.result() == "ada"
        assert len(w.events("approval_requested")) == 1


# -- moving ----------------------------------------------------------------------------


@pytest.mark.field_report("I1")
@pytest.mark.parametrize("kind", ["node_draining", "attempt_moved", "attempt_ended", "host_draining"])
@in_loop
async def test_a_move_goes_on_from_where_it_was_and_happens_once(kind: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(where)
        await w.stage.until_noted("attempt 1")
        w.system.engine.cluster.append(ClusterNode("node_2", "there", "10.0.0.2"))
        w.system.die_after(kind)
        draining = asyncio.ensure_future(w.coordinator.drain("here", "repairs"))
        await died(w)
        assert (await draining).name == "here"
        await w.stage.until_noted("attempt 2")
        w.stage.open_gate("go")
        assert await run.result() == 2
        assert attempts(w) == [1, 2]
        hosts = {host.id: host.node for host in w.system.engine.hosts.values()}
        assert hosts[(await w.coordinator.run(run.id)).host_id] == "node_2"


# -- sessions --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["turn_accepted", "turn_settling", "turn_ended", "turn_started"])
@in_loop
async def test_the_next_turn_of_a_session_begins_once_the_one_before_is_over(kind: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        order: list[str] = []

        async def hold(name: str, gate: str) -> None:
            async with w.coordinator.turn(name, session="s", busy="queue") as turn:
                order.append(f"{name} began")
                assert await (await turn.delegate(bodies.wait_at, gate=gate, value=1)).result() == 1
            order.append(f"{name} over")

        first = asyncio.ensure_future(hold("first", "one"))
        await await_until(lambda: order)
        second = asyncio.ensure_future(hold("second", "two"))
        if kind != "turn_accepted":
            await await_until(lambda: len(w.events("turn_accepted")) == 2)
        w.system.die_after(kind)
        w.stage.open_gate("one")
        w.stage.open_gate("two")
        await died(w)
        await asyncio.gather(first, second)
        assert order == ["first began", "first over", "second began", "second over"] or order == [
            *("first began", "second began", "first over", "second over"),
        ]
        assert len(w.events("turn_started")) == len(w.events("turn_ended")) == 2


@in_loop
async def test_a_turn_that_interrupts_begins_when_what_it_interrupts_is_quiet(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        told: list[object] = []

        async def first() -> None:
            try:
                async with w.coordinator.turn("first", session="s") as turn:
                    await (await turn.delegate(bodies.nap)).result()
            except TurnCancelled as error:
                told.append(error.cause.kind if error.cause else None)

        async def second() -> object:
            value: object = None
            async with w.coordinator.turn("second", session="s", busy="interrupt") as turn:
                value = await (await turn.delegate(bodies.give, value=5)).result()
            return value

        holding = asyncio.ensure_future(first())
        await await_until(lambda: w.events("run_started"))
        w.system.die_after("cancel_requested")
        interrupting = asyncio.ensure_future(second())
        await died(w)
        assert await interrupting == 5
        await holding
        assert [str(kind) for kind in told] == ["user_interrupt"]
        assert len(terminal(w)) == len(set(terminal(w))) == 4


# -- two at once -----------------------------------------------------------------------


def _options(workspace: Path) -> ServiceOptions:
    return ServiceOptions(workspace=str(workspace))


@pytest.mark.requirement("D24")
@in_loop
async def test_of_two_coordinators_that_begin_at_once_one_serves_and_the_other_is_told(tmp_path: Path) -> None:
    with open_inprocess(tmp_path / "elsewhere_") as system:

        async def begin() -> Life:
            return await Life.begin(
                _options(tmp_path), engine=system.engine, settings=Settings(), scheduler=LoopScheduler()
            )

        found = await asyncio.gather(*(begin() for _ in range(4)), return_exceptions=True)
        lives = [life for life in found if isinstance(life, Life)]
        assert len(lives) == 1
        assert {type(other) for other in found if other not in lives} == {JournalBusy}
        await lives[0].service.close("test", 0.0)
    with closing(SqliteJournalReader.open(tmp_path / ".remit" / "journal.db")) as reader:
        assert [record.kind for record in reader.read(kinds=("coordinator_started",))] == ["coordinator_started"]


@pytest.mark.requirement("D24")
@in_loop
async def test_a_coordinator_that_was_taken_over_changes_nothing_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal.open(path)
    with open_inprocess(tmp_path, journal=journal) as system:
        async with system.coordinator() as coordinator:
            holding = asyncio.ensure_future(_take_over(system, coordinator, path, journal))
            with pytest.raises(JournalFenced):
                await holding
        assert system.engine.aborted == 1


async def _take_over(system: InProcess, coordinator: Coordinator, path: Path, journal: SqliteJournal) -> None:
    """Let another coordinator take the journal over, and delegate to the one that has lost it."""
    async with coordinator.turn("t") as turn:
        # It has lost its lock and does not know it, as on a machine that was asleep.
        journal._ownership.release()
        with closing(SqliteJournal.open(path)) as successor, closing(successor.reader()) as reader:
            before = reader.last_seq()
            try:
                await turn.delegate(bodies.give, value=1)
            finally:
                assert reader.last_seq() == before


# -- clients ---------------------------------------------------------------------------


@pytest.mark.field_report("J5")
@in_loop
async def test_a_client_that_an_old_hello_has_made_known_to_the_next_life_misses_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.coordinator.turn("t") as turn:
        run = await turn.delegate(where)
        await w.stage.until_noted("attempt 1")
        session = w.coordinator.session
        link = session.link
        assert isinstance(link, InProcessLink)
        link.is_cut = True
        await asyncio.to_thread(w.system.restart_coordinator)
        # A copy of its hello to the life before was still under way.
        await asyncio.to_thread(w.system.link().call_blocking, "open_client", dumps(session._open_request), 10.0)
        w.stage.open_gate("go")
        await await_until(lambda: w.events("run_ended"))
        link.is_cut = False
        assert await run.result() == 1


# -- while it tidies up ----------------------------------------------------------------

_TIDYING = """
import os, signal, sys
from pathlib import Path
from remit.journal import JournalRecord, SqliteJournal
from remit.journal.retention import old_turns, remove_turns
path, point, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
armed = False
def failpoint(name):
    if armed and name == point:
        os.kill(os.getpid(), signal.SIGKILL)
journal = SqliteJournal.open(path, failpoint=failpoint)
def record(kind, node, turn, terminal=False):
    return JournalRecord(kind, node, turn, 1, {}, terminal)
for n in range(60):
    journal.append([record("part", f"turn_{n}", f"turn_{n}"), record("end", f"turn_{n}", f"turn_{n}", True)]).result()
seq = journal.append([record("part", "turn_live", "turn_live")]).result()
journal.save_snapshot(seq, b"first").result()
if what == "snapshot":
    armed = True
    journal.save_snapshot(seq, b"second").result()
else:
    left = int(point)
    def each(turn):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    remove_turns(path, old_turns(path, ended_before_unix_ms=2, keep=()), ended_before_unix_ms=2, each=each)
os._exit(3)
"""


def _die_tidying(path: Path, point: str, what: str) -> None:
    child = subprocess.run([sys.executable, "-c", _TIDYING, str(path), point, what], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("point", ["before_insert", "before_commit", "after_commit"])
def test_a_snapshot_is_there_whole_or_the_one_before_it_is(point: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    _die_tidying(path, point, "snapshot")
    with closing(SqliteJournal.open(path)) as journal, closing(journal.reader()) as reader:
        found = reader.snapshot()
        assert found is not None
        assert found.data == (b"second" if point == "after_commit" else b"first")
        assert len(list(reader.read())) == 121


@pytest.mark.parametrize("point", [1, 20, 21, 60])
def test_turns_that_are_taken_out_are_whole_or_gone_and_the_rest_goes_next_time(point: int, tmp_path: Path) -> None:
    from remit.journal.retention import old_turns, remove_turns

    path = tmp_path / "journal.db"
    _die_tidying(path, str(point), "retention")
    with closing(SqliteJournal.open(path)) as journal, closing(journal.reader()) as reader:
        turns = [record.turn_id for record in reader.read()]
        assert "turn_live" in turns
        assert {turns.count(name) for name in set(turns) - {"turn_live"}} <= {2}
        assert len(set(turns)) == 61 - (point - 1) // 20 * 20
        left = old_turns(path, ended_before_unix_ms=2, keep=())
        remove_turns(path, left, ended_before_unix_ms=2, each=lambda turn: None)
        assert [record.turn_id for record in reader.read()] == ["turn_live"]
        assert reader.base() == 121


@in_loop
async def test_the_state_is_that_of_the_journal_after_all_of_this(tmp_path: Path) -> None:
    """Four deaths in one history, each at another point."""
    async with world(tmp_path) as w:
        for kind in ("run_accepted", "run_started", "run_ended", "turn_ended"):
            w.system.die_after(kind)

            async def work() -> None:
                async with w.coordinator.turn("t") as turn:
                    runs = await turn.delegate_many(bodies.give, [{"value": n} for n in range(3)])
                    assert await turn.gather(*runs) == [0, 1, 2]

            working = asyncio.ensure_future(work())
            await died(w)
            await working
        state = w.system.life.service._decider.state
        with closing(w.system.journal.reader()) as reader:
            assert same(state, fold_journal(reader).state) == ""
        outcomes = {node.outcome for node in state.nodes.values()}
        assert outcomes == {Outcome.SUCCEEDED}
