"""Records of jobs: keys, early stops and forgetting, as examples and as a state machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from remit.core.errors import InternalError
from remit.processes.jobs import JobOutcome, JobResult, JobSpec
from remit.processes.records import TOMBSTONE_S, ClaimKind, Records, RecordState, StopWish


def make_spec(
    job: str = "proc_1", *, scope: str = "w", key: str = "", run: str = "run_1", generation: int = 0
) -> JobSpec:
    return JobSpec(
        job=job, scope=scope, argv=("true",), output_dir="/o", key=key, run=run, turn="turn_1", generation=generation
    )


def make_result(job: str) -> JobResult:
    return JobResult(job=job, outcome=JobOutcome.EXITED, exit_code=0)


@pytest.mark.requirement("C16")
def test_same_key_and_fingerprint_attaches_and_another_fingerprint_is_refused() -> None:
    records = Records()
    assert records.claim(make_spec("proc_1", key="k"), "a", now=0).kind is ClaimKind.START
    again = records.claim(make_spec("proc_2", key="k", generation=4), "a", now=1)
    assert (again.kind, again.record and again.record.job) == (ClaimKind.ATTACHED, "proc_1")
    assert again.record is not None
    assert again.record.generation == 4
    assert records.claim(make_spec("proc_3", key="k"), "b", now=1).kind is ClaimKind.CONFLICT
    assert len(records) == 1


@pytest.mark.requirement("C16")
def test_what_has_ended_is_answered_with_its_result_and_not_run_again() -> None:
    records = Records()
    records.claim(make_spec("proc_1", key="k"), "a", now=0)
    records.publish("proc_1", pid=7)
    records.end("proc_1", make_result("proc_1"), now=1)
    claim = records.claim(make_spec("proc_2", key="k"), "a", now=2)
    assert claim.kind is ClaimKind.FINISHED
    assert claim.record is not None
    assert claim.record.result == make_result("proc_1")


def test_the_same_job_sent_twice_is_one_start_even_without_a_key() -> None:
    records = Records()
    assert records.claim(make_spec("proc_1"), "a", now=0).kind is ClaimKind.START
    assert records.claim(make_spec("proc_1"), "a", now=0).kind is ClaimKind.ATTACHED
    assert records.claim(make_spec("proc_2"), "a", now=0).kind is ClaimKind.START


@pytest.mark.requirement("C8")
def test_a_foreign_key_or_id_looks_like_an_unknown_one() -> None:
    records = Records()
    records.claim(make_spec("proc_1", scope="w", key="k"), "a", now=0)
    assert records.find("other", key="k") is None
    assert records.find("other", job="proc_1") is None
    assert records.find("w", key="nothing") is None
    assert records.claim(make_spec("proc_2", scope="other", key="k"), "a", now=0).kind is ClaimKind.START


@pytest.mark.requirement("C25")
@pytest.mark.parametrize("name", ["job", "key"])
def test_a_stop_that_came_first_refuses_the_start(name: str) -> None:
    records = Records()
    records.bury("w", now=0, job="proc_1" if name == "job" else "", key="k" if name == "key" else "")
    assert records.claim(make_spec("proc_1", key="k"), "a", now=1).kind is ClaimKind.TOMBSTONED
    assert len(records) == 0
    assert records.claim(make_spec("proc_2", key="other"), "a", now=1).kind is ClaimKind.START


@pytest.mark.requirement("C25")
def test_an_armed_run_starts_nothing_up_to_the_generation() -> None:
    records = Records()
    records.arm("w", ["run_1"], now=0, generation=3)
    assert records.claim(make_spec("proc_1", generation=3), "a", now=1).kind is ClaimKind.TOMBSTONED
    assert records.claim(make_spec("proc_1", run="run_2", generation=3), "a", now=1).kind is ClaimKind.START
    assert records.claim(make_spec("proc_2", generation=4), "a", now=1).kind is ClaimKind.START
    records.arm("w", ["run_1"], now=2)
    assert records.claim(make_spec("proc_3", generation=99), "a", now=3).kind is ClaimKind.TOMBSTONED


@pytest.mark.requirement("C18")
def test_a_failed_start_gives_the_key_back() -> None:
    records = Records()
    records.claim(make_spec("proc_1", key="k"), "a", now=0)
    records.release("proc_1")
    assert records.find("w", key="k") is None
    assert records.claim(make_spec("proc_2", key="k"), "b", now=0).kind is ClaimKind.START


@pytest.mark.requirement("C24")
def test_age_counts_from_the_end_and_what_lives_is_never_forgotten() -> None:
    records = Records()
    for job, key in (("proc_1", "k"), ("proc_2", "l"), ("proc_3", "m")):
        records.claim(make_spec(job, key=key), "a", now=0)
    records.publish("proc_2", pid=2)
    records.publish("proc_3", pid=3)
    records.end("proc_3", make_result("proc_3"), now=1_000_000)
    assert records.prune(1_000_000, retention_s=10) == ()
    assert [record.job for record in records.prune(1_000_010, retention_s=10)] == ["proc_3"]
    assert [record.job for record in records] == ["proc_1", "proc_2"]
    assert records.claim(make_spec("proc_4", key="m"), "z", now=1_000_011).kind is ClaimKind.START


def test_only_so_many_ended_ones_are_kept() -> None:
    records = Records()
    for number in range(5):
        job = f"proc_{number}"
        records.claim(make_spec(job), "a", now=0)
        records.publish(job, pid=number + 2)
        records.end(job, make_result(job), now=number)
    assert [record.job for record in records.prune(5, max_ended=2)] == ["proc_0", "proc_1", "proc_2"]


def test_the_first_cause_stays_and_a_shorter_grace_wins() -> None:
    records = Records()
    records.claim(make_spec("proc_1"), "a", now=0)
    records.wish_stop("proc_1", StopWish(cause={"kind": "user_interrupt"}, grace_s=5))
    wish = records.wish_stop("proc_1", StopWish(cause={"kind": "shutdown"}, grace_s=1)).wish
    assert wish == StopWish(cause={"kind": "user_interrupt"}, grace_s=1)
    wish = records.wish_stop("proc_1", StopWish(grace_s=9, kill=True)).wish
    assert wish == StopWish(cause={"kind": "user_interrupt"}, grace_s=1, kill=True)


def test_broken_order_is_refused() -> None:
    records = Records()
    records.claim(make_spec("proc_1"), "a", now=0)
    records.publish("proc_1", pid=2)
    with pytest.raises(InternalError, match="twice"):
        records.publish("proc_1", pid=3)
    with pytest.raises(InternalError, match="cannot be released"):
        records.release("proc_1")
    records.end("proc_1", make_result("proc_1"), now=1)
    with pytest.raises(InternalError, match="not live"):
        records.wish_stop("proc_1", StopWish())
    with pytest.raises(InternalError, match="not known"):
        records.end("proc_9", make_result("proc_9"), now=1)


@dataclass
class Known:
    """What the model knows of one job."""

    scope: str
    key: str
    run: str
    fingerprint: str
    state: RecordState = RecordState.PENDING
    ended_at: float = 0.0


@dataclass
class Model:
    """The same rules, written down as slowly and plainly as can be."""

    jobs: dict[str, Known] = field(default_factory=dict)
    stops: list[tuple[str, str, str, float, float]] = field(default_factory=list)

    def holder(self, scope: str, key: str) -> str | None:
        return next((job for job, known in self.jobs.items() if (known.scope, known.key) == (scope, key)), None)

    def is_refused(self, scope: str, key: str, run: str, generation: int, now: float) -> bool:
        """A later stop of the same name covers what any earlier one did, and is remembered for as long."""
        for name in ((scope, "key", key), (scope, "run", run)):
            mine = [stop for stop in self.stops if stop[:3] == name]
            if (
                mine
                and max(stop[4] for stop in mine) + TOMBSTONE_S > now
                and max(stop[3] for stop in mine) >= generation
            ):
                return True
        return False


SCOPES = st.sampled_from(["w", "v"])
KEYS = st.sampled_from(["k", "l/%?"])
RUNS = st.sampled_from(["run_1", "run_2"])
DIGESTS = st.sampled_from(["a", "b"])
GENERATIONS = st.integers(0, 2)


class RecordsMachine(RuleBasedStateMachine):
    """Every order of claims, ends, stops and forgetting keeps records and model equal."""

    pending = Bundle("pending")
    running = Bundle("running")

    @initialize()
    def begin(self) -> None:
        self.records = Records()
        self.model = Model()
        self.now = 0.0
        self.numbers = itertools.count()
        self.seen_results: dict[str, JobResult] = {}

    @rule(target=pending, scope=SCOPES, key=KEYS, run=RUNS, digest=DIGESTS, generation=GENERATIONS)
    def claim(self, scope: str, key: str, run: str, digest: str, generation: int) -> object:
        job = f"proc_{next(self.numbers)}"
        holder = self.model.holder(scope, key)
        known = self.model.jobs.get(holder or "")
        claim = self.records.claim(
            make_spec(job, scope=scope, key=key, run=run, generation=generation), digest, now=self.now
        )
        refused = self.model.is_refused(scope, key, run, generation, self.now)
        if known is not None and known.fingerprint != digest:
            assert claim.kind is ClaimKind.CONFLICT
        elif known is not None and known.state is RecordState.ENDED:
            assert claim.kind is ClaimKind.FINISHED
        elif refused:
            assert claim.kind is ClaimKind.TOMBSTONED
        elif known is not None:
            assert claim.kind is ClaimKind.ATTACHED
            assert claim.record is not None
            assert claim.record.job == holder
        else:
            assert claim.kind is ClaimKind.START
            self.model.jobs[job] = Known(scope, key, run, digest)
            return job
        return None

    @rule(target=running, job=consumes(pending))
    def publish(self, job: str | None) -> object:
        if job is None:
            return None
        self.records.publish(job, pid=99)
        self.model.jobs[job].state = RecordState.RUNNING
        return job

    @rule(job=consumes(pending))
    def fail(self, job: str | None) -> None:
        if job is not None:
            self.records.release(job)
            del self.model.jobs[job]

    @rule(job=consumes(running))
    def end(self, job: str | None) -> None:
        if job is not None:
            result = make_result(job)
            assert self.records.end(job, result, now=self.now).result == result
            other = JobResult(job=job, outcome=JobOutcome.CANCELLED)
            assert self.records.end(job, other, now=self.now + 5).result == result
            known = self.model.jobs[job]
            known.state, known.ended_at = RecordState.ENDED, self.now

    @rule(scope=SCOPES, key=KEYS, generation=st.none() | GENERATIONS)
    def bury(self, scope: str, key: str, generation: int | None) -> None:
        self.records.bury(scope, key=key, now=self.now, generation=generation)
        self.model.stops.append((scope, "key", key, float("inf") if generation is None else generation, self.now))

    @rule(scope=SCOPES, run=RUNS, generation=st.none() | GENERATIONS)
    def arm(self, scope: str, run: str, generation: int | None) -> None:
        self.records.arm(scope, [run], now=self.now, generation=generation)
        self.model.stops.append((scope, "run", run, float("inf") if generation is None else generation, self.now))

    @rule(seconds=st.sampled_from([1.0, 100.0, TOMBSTONE_S]), retention_s=st.sampled_from([50.0, 1_000.0]))
    def forget(self, seconds: float, retention_s: float) -> None:
        self.now += seconds
        gone = {record.job for record in self.records.prune(self.now, retention_s=retention_s)}
        expected = {
            job
            for job, known in self.model.jobs.items()
            if known.state is RecordState.ENDED and known.ended_at + retention_s <= self.now
        }
        assert gone == expected
        for job in gone:
            del self.model.jobs[job]
        # A name whose last stop is forgotten starts anew: what older ones covered is gone with it.
        last = {stop[:3]: stop[4] for stop in self.model.stops}
        self.model.stops = [stop for stop in self.model.stops if last[stop[:3]] + TOMBSTONE_S > self.now]

    @invariant()
    def both_know_the_same_jobs(self) -> None:
        if not hasattr(self, "records"):
            return
        assert {record.job: record.state for record in self.records} == {
            job: known.state for job, known in self.model.jobs.items()
        }

    @invariant()
    def a_key_finds_the_one_job_that_has_it(self) -> None:
        if not hasattr(self, "records"):
            return
        for scope, key in itertools.product(("w", "v"), ("k", "l/%?")):
            found = self.records.find(scope, key=key)
            assert (found.job if found else None) == self.model.holder(scope, key)
            assert sum((k.scope, k.key) == (scope, key) for k in self.model.jobs.values()) <= 1


RecordsMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestRecordsMachine = pytest.mark.requirement("C24")(RecordsMachine.TestCase)
