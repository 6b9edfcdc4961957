import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest

from remit.agents import RunContext, RunOptions, agent
from remit.agents.client import ClientSession
from remit.core.errors import CoordinatorUnavailable, NotFound, RemitError
from remit.core.messages import PROTOCOL, ClientOpened, Notice, dumps, loads
from remit.testing.inprocess import open_inprocess


@agent
async def seven(ctx: RunContext) -> int:
    return 7


@agent
async def add_one(ctx: RunContext) -> int:
    value: int = await ctx.after["seven"].result()
    return value + 1


def test_several_runs_of_one_host_read_the_result_of_the_run_they_come_after(tmp_path: Path) -> None:
    results: list[int] = []

    async def main() -> None:
        with open_inprocess(tmp_path) as system:
            async with system.coordinator() as coordinator, coordinator.turn("t") as turn:
                options = [RunOptions(name="seven"), *[RunOptions(after=("seven",)) for _ in range(8)]]
                request, runs = turn.prepare([seven, *[add_one] * 8], [{}] * 9, options)
                await turn.send(request, runs)
                async with asyncio.timeout(20):
                    results.extend(await turn.gather(*runs))

    asyncio.run(main())
    assert results == [7] + [8] * 8


class Watching:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lost: list[RemitError] = []

    def notice(self, notice: Notice) -> None:
        raise AssertionError(notice)

    def lost_contact(self, error: RemitError) -> None:
        self.lost.append(error)


class NobodyThere:
    """A link on which every request fails."""

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        failed: Future[bytes] = Future()
        failed.set_exception(CoordinatorUnavailable("nobody answers"))
        return failed

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        raise CoordinatorUnavailable("nobody answers")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_that_watch_a_node_hear_that_it_is_out_of_reach(count: int) -> None:
    session = ClientSession(NobodyThere())
    watching = [Watching() for _ in range(count)]
    for one in watching[:-1]:
        session.track("run_1", one)
    session.watch("run_1", watching[-1])
    assert [len(one.lost) for one in watching] == [1] * count


class SlowHello(NobodyThere):
    """A link that answers the hello when told to, and remembers what was sent in which order."""

    def __init__(self) -> None:
        self.hello: Future[bytes] = Future()
        self.sent: list[str] = []

    def submit(self, method: str, blob: bytes) -> Future[bytes]:
        self.sent.append(method)
        if method == "open_client":
            return self.hello
        return super().submit(method, blob)


@pytest.mark.parametrize("arrives", [True, False])
def test_nothing_is_sent_before_the_hello_is_answered(arrives: bool) -> None:
    link = SlowHello()
    session = ClientSession(link, surface="host")
    session.open_soon()
    try:
        first = session.submit("claim", None)
        second = session.submit("delegate", None)
        assert link.sent == ["open_client"]
        assert not first.done()
        if arrives:
            link.hello.set_result(dumps(("ok", ClientOpened(1, 0.01, "/w", 1, PROTOCOL))))
            assert session.opened.workspace == "/w"
        else:
            link.hello.set_exception(CoordinatorUnavailable("lost on the way"))
        assert link.sent[:3] == ["open_client", "claim", "delegate"]
        for answered in (first, second):
            assert isinstance(answered.exception(10), CoordinatorUnavailable)
        assert isinstance(session.submit("third", None).exception(10), CoordinatorUnavailable)
    finally:
        session.close(say_goodbye=False)


def test_what_the_coordinator_cannot_know_yet_is_not_lost_when_it_forgets_the_client() -> None:
    session = ClientSession(NobodyThere())
    waiting = Watching()
    session.track("claim_1", waiting, pending=True)
    answers = {"open_client": ClientOpened(1, 0.01, "", 1, PROTOCOL), "subscribe": ()}
    session.request_blocking = lambda method, message, timeout_s=1.0: answers[method]  # type: ignore[method-assign]
    session._open_again()
    assert waiting.lost == []
    # Once it does know, it is asked what was missed; here nobody answers that.
    session.confirm("claim_1")
    assert len(waiting.lost) == 1


class AnsweredLate(NobodyThere):
    """A link to a coordinator that does not know a run yet, and says so late."""

    def __init__(self) -> None:
        self.before_the_last_answer: Callable[[], None] = lambda: None
        self.asked: list[tuple[str, ...]] = []

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        if method == "open_client":
            return dumps(("ok", ClientOpened(1, 0.01, "/w", 1, PROTOCOL)))
        self.asked.append(loads(blob)[1])
        if len(self.asked) == 2:  # for all at once, then for this one alone
            self.before_the_last_answer()
        return dumps(("error", NotFound("there is no run_1")))


def test_a_run_whose_request_is_answered_while_it_is_asked_about_is_not_lost() -> None:
    link = AnsweredLate()
    session = ClientSession(link)
    run = Watching()
    with ExitStack() as request:
        request.enter_context(session.asking_for(["run_1"]))
        session.track("run_1", run)
        # The coordinator looked before the request came, and the request was answered first.
        link.before_the_last_answer = request.close
        session._open_again()
    assert link.asked == [("run_1",)] * 2
    assert run.lost == []
    assert session.tracked() == [run]


def test_a_run_that_was_taken_on_and_is_not_known_any_more_is_lost() -> None:
    session = ClientSession(AnsweredLate())
    run = Watching()
    with session.asking_for(["run_1"]):
        session.track("run_1", run)
    session._open_again()
    assert [str(error) for error in run.lost] == ["run_1 is not known any more"]


class Restarting(NobodyThere):
    """A link to a coordinator that is away for some calls, or for good."""

    def __init__(self, away: int, *, for_good: bool = False) -> None:
        self.away = away
        self.for_good = for_good
        self.calls: list[str] = []

    def call_blocking(self, method: str, blob: bytes, timeout_s: float) -> bytes:
        self.calls.append(method)
        if method != "open_client" or len(self.calls) <= self.away:
            raise CoordinatorUnavailable("it is being restarted", for_good=self.for_good)
        return dumps(("ok", ClientOpened(1, 0.01, "/w", 1, PROTOCOL)))


def test_who_connects_while_the_coordinator_is_being_restarted_waits_for_it() -> None:
    link = Restarting(away=2)
    session = ClientSession(link)
    session.open()
    try:
        assert session.opened.workspace == "/w"
        assert link.calls[:3] == ["open_client"] * 3
    finally:
        session.close(say_goodbye=False)


@pytest.mark.parametrize(("for_good", "give_up_s"), [(True, 30.0), (False, 0.0)])
def test_who_connects_to_a_coordinator_that_does_not_come_back_is_told(for_good: bool, give_up_s: float) -> None:
    link = Restarting(away=1000, for_good=for_good)
    session = ClientSession(link, give_up_s=give_up_s)
    with pytest.raises(CoordinatorUnavailable, match="being restarted"):
        session.open()
    assert link.calls == ["open_client"]
