"""Nothing is told before it is durable, and nothing is lost that waits for a slow disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from remit.coordinator.decider import Decider
from remit.coordinator.engine import ClusterNode, Swept
from remit.coordinator.service import CoordinatorService, ServiceOptions
from remit.coordinator.transaction import Settings
from remit.core.errors import InternalError, InvalidArgument, JournalError
from remit.core.messages import (
    CancelRequest,
    DelegateRequest,
    EndedNotice,
    FinishTurn,
    HostInventory,
    OpenClient,
    OpenTurn,
    PollReply,
    ReportBatch,
    ReportEnded,
    RunRequest,
    dumps,
    loads,
)
from remit.core.outcome import Outcome
from remit.journal import MemoryJournal
from remit.locks import Area
from remit.testing import ManualClock


class _Link:
    """A host that takes everything and says nothing."""

    pid = 1
    machine = "here"

    node = "node_1"

    async def inventory(self, epoch: int) -> HostInventory:
        raise AssertionError("no earlier life has started it")

    def start(self, batch: bytes) -> None: ...

    def control(self, orders: bytes) -> None: ...

    async def flush(self, orders: bytes) -> None: ...


class _Engine:
    """Hosts that answer at once."""

    async def spawn(
        self,
        host_id: str,
        resources: Mapping[str, Any],
        on_gone: Callable[[str], None],
        *,
        avoid: Collection[str] = (),
    ) -> _Link:
        return _Link()

    async def find(self, host_id: str, on_gone: Callable[[str], None]) -> None: ...

    async def nodes(self) -> tuple[ClusterNode, ...]:
        return ()

    async def programs_gone(self, runs: Collection[str]) -> Mapping[str, frozenset[int]]:
        return {}

    async def program_owners(self) -> frozenset[str]:
        return frozenset()

    def vouch(self) -> None: ...

    def release_programs(self) -> None: ...

    aborted = 0

    def abort(self) -> None:
        self.aborted += 1

    async def kill(self, host_id: str) -> None: ...

    def sweep(
        self,
        run_id: str,
        pid: int,
        start_time: float,
        machine: str,
        on_done: Callable[[Swept], None],
        claimed: Sequence[Area] = (),
    ) -> None: ...

    def exit(self) -> None: ...


class _Bench:
    """A service whose journal writes when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.journal = MemoryJournal(hold=True)
        self.clock = ManualClock()
        self.decider = Decider(settings=Settings(**settings))
        self.engine = _Engine()
        self.service = CoordinatorService(
            ServiceOptions("."),
            journal=self.journal,
            engine=self.engine,
            clock=self.clock,
            scheduler=self.clock,
            decider=self.decider,
        )

    def ask(self, method: str, message: object) -> asyncio.Task[Any]:
        """Send a request; the task ends with its answer."""

        async def answered() -> Any:
            word, value = loads(await self.service.call(method, dumps(message)))
            if word == "error":
                raise value
            return value

        return asyncio.get_running_loop().create_task(answered())

    async def settle(self) -> None:
        """Let everything happen that needs no disk."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def do(self, method: str, message: object) -> Any:
        """Send a request and write what it leads to."""
        task = self.ask(method, message)
        await self.settle()
        self.journal.release()
        return await task

    async def turn(self) -> str:
        """Begin, connect a client, and open a turn."""
        started = asyncio.get_running_loop().create_task(self.service.start())
        await self.settle()
        self.journal.release()
        await started
        await self.settle()
        self.journal.release()
        await self.do("open_client", OpenClient("client_1"))
        await self.do("open_turn", OpenTurn("turn_1", "client_1", "session"))
        return "turn_1"

    async def run(self) -> str:
        """Delegate a run that has been started; return the id of its host."""
        await self.turn()
        run = RunRequest("run_1", "a", "agent")
        request = DelegateRequest("turn_1", 0, "client_1", "env", b"", {"a": b""}, (run,))
        await self.do("delegate", request)
        await self.settle()
        self.journal.release()
        return self.decider.state.nodes["run_1"].host_id


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_loop
async def test_whoever_asks_about_an_end_hears_of_it_when_it_is_durable() -> None:
    bench = _Bench()
    turn = await bench.turn()
    finished = bench.ask("finish_turn", FinishTurn(turn))
    await bench.settle()
    assert bench.decider.state.nodes[turn].is_ended
    asked = bench.ask("subscribe", ("client_1", (turn,)))
    await bench.settle()
    assert not asked.done()
    bench.journal.release()
    await finished
    (notice,) = await asked
    assert isinstance(notice, EndedNotice)


@pytest.mark.requirement("B22")
@in_loop
async def test_an_end_that_the_disk_refuses_was_never_told() -> None:
    bench = _Bench()
    turn = await bench.turn()
    finished = bench.ask("finish_turn", FinishTurn(turn))
    asked = bench.ask("subscribe", ("client_1", (turn,)))
    await bench.settle()
    bench.journal.crash("the disk is full")
    with pytest.raises(JournalError):
        await asked
    with pytest.raises(JournalError):
        await finished


def _hole(*_: object) -> None:
    raise LookupError("a hole of ours")


@in_loop
async def test_a_decision_left_in_the_middle_ends_this_life_and_is_in_no_journal() -> None:
    bench = _Bench()
    turn = await bench.turn()
    records = bench.journal.reader().last_seq()
    with pytest.MonkeyPatch.context() as patch:
        # The turn is in the state, and nobody has heard of it but this process.
        patch.setattr("remit.coordinator.admission.start_turns", _hole)
        with pytest.raises(InternalError, match="a hole of ours"):
            await bench.ask("open_turn", OpenTurn("turn_2", "client_1", "other"))
    assert bench.decider.is_torn
    for method, message in (("finish_turn", FinishTurn(turn)), ("cancel", CancelRequest("req_1", turn))):
        with pytest.raises((JournalError, InternalError)):
            await bench.ask(method, message)
    bench.journal.release()
    assert bench.journal.reader().last_seq() == records
    assert bench.engine.aborted == 0, "whoever asked is answered first"
    async with asyncio.timeout(5):
        while not bench.engine.aborted:
            await asyncio.sleep(0.01)
    assert bench.engine.aborted == 1


@in_loop
async def test_who_ends_a_life_that_is_over_already_hears_that_it_has_ended() -> None:
    bench = _Bench()
    await bench.turn()
    bench.journal.crash("the disk is full")
    with pytest.raises(JournalError):
        await bench.ask("open_turn", OpenTurn("turn_2", "client_1", "other"))
    assert await bench.ask("shutdown", ("test", 1.0)) is True


@in_loop
async def test_a_hole_that_is_met_before_anything_has_changed_costs_its_request_alone() -> None:
    bench = _Bench()
    turn = await bench.turn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remit.coordinator.admission.check_session_budget", _hole)
        with pytest.raises(InternalError, match="a hole of ours"):
            await bench.ask("open_turn", OpenTurn("turn_2", "client_1", "other"))
    assert not bench.decider.is_torn
    await bench.do("finish_turn", FinishTurn(turn))
    assert bench.decider.state.nodes[turn].is_ended


@in_loop
async def test_a_decision_of_a_timer_left_in_the_middle_ends_this_life_too() -> None:
    bench = _Bench()
    await bench.turn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remit.coordinator.stopping._order_hosts", _hole)
        bench.service.host_gone("host_unheard_of", "nothing happens")
        before = bench.decider.is_torn
        bench.service._lose_client("client_1", "gone")
    assert (before, bench.decider.is_torn) == (False, True)
    with pytest.raises(JournalError):
        await bench.ask("open_turn", OpenTurn("turn_2", "client_1", "other"))


@in_loop
async def test_what_the_journal_does_not_take_ends_this_life() -> None:
    bench = _Bench()
    await bench.turn()
    request = OpenTurn("turn_2", "client_1", "other", approvals=({"action": object()},))
    with pytest.raises(InvalidArgument, match="not JSON"):
        await bench.ask("open_turn", request)
    with pytest.raises(JournalError):
        await bench.ask("cancel", CancelRequest("req_1", "turn_2"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("open_turn", OpenTurn("turn_2", "client_1", "other", deadline_s=float("inf"))),
        ("open_turn", OpenTurn("turn_2", "client_1", "other", deadline_s=-1.0)),
        ("open_turn", OpenTurn("turn_2", "client_1", "other", grace_s=-1.0)),
        ("open_turn", OpenTurn("turn_2", "client_1", "other", limits=5)),  # type: ignore[arg-type]
        ("cancel", CancelRequest("req_1", "turn_1", grace_s=float("nan"))),
        ("cancel", CancelRequest("req_1", "turn_1", grace_s=-1.0)),
        *(
            (
                "delegate",
                DelegateRequest(
                    "turn_1",
                    0,
                    "client_1",
                    "env",
                    b"",
                    {"a": b""},
                    (RunRequest("run_1", "a", "agent"), RunRequest("run_2", "a", "agent", **options)),
                ),
            )
            for options in (
                {"deadline_s": float("inf")},
                {"deadline_s": 0},
                {"attempt_timeout_s": -1},
                {"retries": -1},
                {"retry_delay_s": 1e12},
                {"grace_s": "x"},
                {"limits": 5},
            )
        ),
    ],
)
def test_a_client_that_sends_what_can_never_be_is_refused_with_nothing_half_done(method: str, message: object) -> None:
    async def main() -> None:
        bench = _Bench()
        turn = await bench.turn()
        asked = bench.ask(method, message)
        await bench.settle()
        bench.journal.release()
        with pytest.raises(InvalidArgument):
            await asked
        assert list(bench.decider.state.nodes) == [turn]
        assert not bench.decider.is_torn
        await bench.do("finish_turn", FinishTurn(turn))
        assert bench.decider.state.nodes[turn].is_ended

    asyncio.run(main())


@in_loop
async def test_a_report_that_is_sent_again_is_acknowledged_when_the_first_copy_is_durable() -> None:
    bench = _Bench()
    host = await bench.run()
    batch = ReportBatch(host, 1, (ReportEnded("run_1", 1, "returned"),))
    first = bench.ask("report", batch)
    again = bench.ask("report", batch)
    await bench.settle()
    assert not again.done()
    bench.journal.release()
    await asyncio.gather(first, again)
    assert bench.decider.state.nodes["run_1"].outcome is Outcome.SUCCEEDED


@in_loop
async def test_a_cancel_is_said_to_be_quiet_when_that_is_durable() -> None:
    bench = _Bench()
    turn = await bench.turn()
    await bench.do("cancel", CancelRequest("req_1", turn))
    finished = bench.ask("finish_turn", FinishTurn(turn, "cancelled"))
    await bench.settle()
    asked = bench.ask("cancel_status", ("req_1", 0.0))
    await bench.settle()
    assert not asked.done()
    bench.journal.release()
    await finished
    assert (await asked).quiet


@pytest.mark.requirement("D18")
@in_loop
async def test_a_turn_that_waits_for_the_disk_is_not_forgotten() -> None:
    bench = _Bench(keep_ended_turns=0)
    turn = await bench.turn()
    finished = bench.ask("finish_turn", FinishTurn(turn))
    await bench.settle()
    bench.clock.advance(1.0)  # the hour of the housekeeper, who forgets ended turns
    await bench.settle()
    bench.journal.release()
    await finished
    reply: PollReply = await bench.ask("poll", ("client_1", 0, 0.0, bench.journal.epoch))
    assert [notice.node_id for notice in reply.notices if isinstance(notice, EndedNotice)] == [turn]
