"""Who gets what, when, and behind whom: the rules of the lock table, one at a time."""

from __future__ import annotations

import itertools

import pytest

from remit.core.errors import InternalError
from remit.locks import (
    Area,
    AreaKind,
    ClaimBusy,
    ClaimQuotaExceeded,
    ClaimRequest,
    ClaimState,
    ClaimWithdrawn,
    DeadlockDetected,
    Forgotten,
    Granted,
    InvalidClaim,
    LeaseNotHeld,
    LockEvent,
    LockTable,
    Mode,
    PathNotClaimed,
    Quarantined,
    Queued,
    Refused,
    Released,
    WaitKind,
    Withdrawn,
    WithdrawReason,
)


class Owners:
    """A table with short calls: claim ids are made from owner and number."""

    def __init__(self, **parents: str) -> None:
        self.table = LockTable()
        self.parents = parents
        self.waits: set[tuple[str, str]] = set()
        self.numbers = itertools.count(1)
        self.now = 100.0

    def ancestors(self, owner: str) -> tuple[str, ...]:
        parent = self.parents.get(owner)
        return (parent, *self.ancestors(parent)) if parent else ()

    def waiters_of(self, owner: str) -> list[str]:
        parent = self.parents.get(owner)
        return [*([parent] if parent else []), *(one for one, two in self.waits if two == owner)]

    def ask(self, owner: str, *areas: Area, wait: bool = True, claim_id: str = "") -> Granted | Queued | Refused:
        claim_id = claim_id or f"claim_{owner}_{next(self.numbers)}"
        request = ClaimRequest(claim_id, owner, areas, self.ancestors(owner), self.now, wait)
        return self.table.request(request, waiters_of=self.waiters_of)

    def take(self, owner: str, *areas: Area) -> str:
        answer = self.ask(owner, *areas)
        assert isinstance(answer, Granted), answer
        return answer.claim_id

    def line_up(self, owner: str, *areas: Area) -> str:
        answer = self.ask(owner, *areas)
        assert isinstance(answer, Queued), answer
        return answer.request.claim_id

    def release(self, claim_id: str) -> list[str]:
        """Release a claim and return the owners that were granted in consequence."""
        view = self.table.claim(claim_id)
        assert view is not None
        return granted(self.table.release(claim_id, view.owner, at=self.now))

    def cycle(self, answer: Granted | Queued | Refused) -> list[tuple[str, str, WaitKind]]:
        assert isinstance(answer, Refused), answer
        error = answer.error()
        assert isinstance(error, DeadlockDetected)
        return [(edge.waiter, edge.awaited, edge.kind) for edge in error.cycle]


def granted(events: tuple[LockEvent, ...]) -> list[str]:
    return [event.owner for event in events if isinstance(event, Granted)]


def writes(key: str) -> Area:
    return Area(Mode.WRITE, key)


def reads(key: str) -> Area:
    return Area(Mode.READ, key)


def writes_glob(key: str) -> Area:
    return Area(Mode.WRITE, key, AreaKind.GLOB)


@pytest.mark.field_report("G14")
def test_what_is_kept_for_an_owner_that_is_gone_is_its_own_where_nobody_else_has_a_claim() -> None:
    owners = Owners(child="lost")
    owners.take("lost", writes("a"), writes("b"), reads("c"))
    assert owners.table.kept_for("lost") == (writes("a"), writes("b"))
    owners.take("child", reads("b/deep"))
    owners.line_up("waiting", writes("a"))
    assert owners.table.kept_for("lost") == (writes("a"),)
    owners.table.end(["lost"], at=1.0, quarantine="its programs may live")
    assert owners.table.kept_for("lost") == (writes("a"),)
    assert owners.table.kept_for("waiting") == owners.table.kept_for("nobody") == ()


# Sharing, order, all or nothing.


def test_disjoint_claims_never_wait() -> None:
    owners = Owners()
    for owner, area in {"a": writes("src/a"), "b": writes("src/b"), "c": writes_glob("docs/*.md")}.items():
        owners.take(owner, area)


def test_readers_share_and_a_writer_waits_for_all_of_them() -> None:
    owners = Owners()
    first, second = owners.take("a", reads("x")), owners.take("b", reads("x"))
    owners.line_up("w", writes("x"))
    assert owners.release(first) == []
    assert owners.release(second) == ["w"]


@pytest.mark.requirement("F12")
def test_stream_of_readers_does_not_starve_a_writer() -> None:
    owners = Owners()
    current = owners.take("r0", reads("x"))
    writer = owners.line_up("w", writes("x"))
    for number in range(1, 4):
        owners.line_up(f"r{number}", reads("x"))
    assert owners.release(current) == ["w"]
    assert owners.release(writer) == ["r1", "r2", "r3"]


@pytest.mark.requirement("F12")
def test_wide_claim_is_not_starved_by_narrow_ones_and_lets_strangers_pass() -> None:
    owners = Owners()
    holder = owners.take("a", writes("src/a"))
    everything = owners.line_up("x", writes("src"))
    owners.line_up("b", writes("src/b"))
    owners.take("c", writes("docs"))
    assert owners.release(holder) == ["x"]
    assert owners.release(everything) == ["b"]


def test_whole_workspace_waits_for_every_holder_and_then_blocks_all() -> None:
    owners = Owners()
    held = [owners.take(f"h{number}", writes(f"d{number}/f")) for number in range(5)]
    everything = owners.line_up("x", writes(""))
    owners.line_up("late", reads("elsewhere"))
    assert [owners.release(claim) for claim in held] == [[], [], [], [], ["x"]]
    assert owners.release(everything) == ["late"]


@pytest.mark.requirement("F13")
def test_several_claims_are_all_or_nothing() -> None:
    owners = Owners()
    one, two = owners.take("a", writes("x")), owners.take("b", writes("y"))
    both = owners.line_up("c", writes("x"), writes("y"))
    assert owners.release(one) == []
    with pytest.raises(PathNotClaimed):
        owners.table.check("c", writes("x"))
    assert owners.release(two) == ["c"]
    assert owners.table.check("c", writes("x")) == owners.table.check("c", writes("y"))
    assert owners.release(both) == []


@pytest.mark.requirement("F13")
def test_claim_in_another_order_of_paths_cannot_deadlock() -> None:
    owners = Owners()
    first = owners.take("a", writes("x"), writes("y"))
    owners.line_up("b", writes("y"), writes("x"))
    assert owners.release(first) == ["b"]


def test_overlapping_areas_of_one_claim_do_not_block_each_other() -> None:
    owners = Owners()
    claim = owners.take("a", reads("x"), writes("x"), writes("x/y"), writes_glob("x/*"), writes_glob("x/*"))
    assert owners.table.claims("a")[0].wants == ("write x",)
    owners.release(claim)
    assert owners.table.to_dict()["claims"] == []


def test_request_that_must_not_wait_is_refused_and_leaves_nothing() -> None:
    owners = Owners()
    owners.take("a", writes("x"))
    before = owners.table.to_dict()
    answer = owners.ask("b", writes("x"), wait=False)
    assert isinstance(answer, Refused)
    assert isinstance(answer.error(), ClaimBusy)
    assert answer.held_by == ("a",)
    assert owners.table.to_dict() == before


# Lending.


def test_child_enters_what_its_parent_holds_and_strangers_do_not() -> None:
    owners = Owners(child="parent", grandchild="child")
    owners.take("parent", writes("src"))
    owners.take("grandchild", writes("src/a"))
    owners.line_up("stranger", reads("src/b"))


def test_siblings_under_one_lender_take_turns() -> None:
    owners = Owners(c1="parent", c2="parent", c3="parent")
    owners.take("parent", writes("src"))
    first = owners.take("c1", writes("src/a"))
    owners.take("c2", writes("src/b"))
    owners.line_up("c3", writes("src/a"))
    assert owners.release(first) == ["c3"]


def test_child_passes_those_who_wait_for_its_parent() -> None:
    owners = Owners(child="parent")
    held = owners.take("parent", writes("src"))
    owners.line_up("stranger", writes("src"))
    inner = owners.take("child", writes("src/a"))
    assert owners.release(held) == [], "the stranger waits for the child as well"
    assert owners.release(inner) == ["stranger"]


def test_child_passes_those_who_wait_for_its_parent_even_outside_of_what_it_holds() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("y"))
    owners.line_up("stranger", writes("y"), writes("z"))
    owners.take("child", writes("z"))


def test_parent_waits_for_its_child_to_be_done() -> None:
    owners = Owners(child="parent")
    inner = owners.take("child", writes("src/a"))
    owners.line_up("parent", writes("src"))
    assert owners.release(inner) == ["parent"]


def test_child_behind_its_parents_queued_claim_is_woken() -> None:
    # The parent's claim waits for the child's, not the other way round.
    owners = Owners(child="parent")
    stranger = owners.take("stranger", writes("x"))
    owners.line_up("parent", writes("x"))
    inner = owners.line_up("child", writes("x"))
    assert owners.release(stranger) == ["child"]
    assert owners.release(inner) == ["parent"]


def test_claim_inside_ones_own_is_granted_whatever_is_queued() -> None:
    owners = Owners(child="parent", other="parent")
    outer = owners.take("parent", writes("src"))
    owners.line_up("stranger", writes("src/a"))
    inner = owners.take("parent", reads("src/a"))
    assert owners.release(outer) == []
    assert owners.release(inner) == ["stranger"]


def test_claim_inside_ones_own_passes_a_child_that_only_waits() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("src"))
    owners.take("stranger", writes("docs"))
    owners.line_up("child", writes("src/a"), writes("docs"))
    owners.take("parent", writes("src/a"))


def test_claim_inside_ones_own_waits_where_a_descendant_holds() -> None:
    # The second child's claim stands in front of the first one's; that must not
    # hide that the first one holds.
    owners = Owners(c1="parent", c2="parent")
    owners.take("parent", writes("src"))
    first = owners.take("c1", writes("src/a"))
    second = owners.line_up("c2", writes("src/a"))
    owners.line_up("parent", writes("src/a"))
    assert owners.release(first) == ["c2"]
    assert owners.release(second) == ["parent"]


def test_detached_child_is_a_stranger() -> None:
    owners = Owners()
    owners.take("parent", writes("src"))
    owners.line_up("detached", reads("src/a"))


def test_long_line_behind_a_sibling_with_claims_of_its_own_is_kept() -> None:
    # `b` may enter what it holds itself; `c` may not, though it stands behind `b`.
    owners = Owners()
    held = owners.take("b", writes("x/a"))
    stranger = owners.take("s", writes("x/b"))
    asked = owners.line_up("b", writes("x"))
    owners.line_up("c", writes("x"))
    assert owners.release(stranger) == ["b"]
    assert owners.release(asked) == [], "b still holds x/a"
    assert owners.release(held) == ["c"]


def test_stranger_at_the_end_of_a_line_of_siblings_waits_for_their_parent_too() -> None:
    # None of the siblings waits for the parent, so none of them can stand for it.
    owners = Owners(c0="parent", c1="parent", c2="parent")
    outer = owners.take("parent", writes("hot"))
    line = [owners.take("c0", writes("hot")), owners.line_up("c1", writes("hot")), owners.line_up("c2", writes("hot"))]
    owners.line_up("stranger", writes("hot"))
    assert [owners.release(claim) for claim in line] == [["c1"], ["c2"], []]
    assert owners.release(outer) == ["stranger"]


# Upgrades and cycles.


def test_single_reader_becomes_a_writer_past_the_writers_that_wait_for_it() -> None:
    owners = Owners()
    held = owners.take("r", reads("x"))
    owners.line_up("w", writes("x"))
    upgraded = owners.take("r", writes("x"))
    assert owners.release(held) == []
    assert owners.release(upgraded) == ["w"]


def test_second_of_two_readers_that_want_to_write_is_refused() -> None:
    owners = Owners()
    one, two = owners.take("a", reads("x")), owners.take("b", reads("x"))
    owners.line_up("a", writes("x"))
    answer = owners.ask("b", writes("x"))
    assert owners.cycle(answer) == [("b", "a", WaitKind.CLAIM), ("a", "b", WaitKind.CLAIM)]
    assert owners.release(two) == ["a"]
    assert owners.release(one) == []


@pytest.mark.field_report("E13")
def test_cycle_of_claims_is_refused_and_spelled_out() -> None:
    owners = Owners()
    owners.take("run_a", writes("x"))
    owners.take("run_b", writes("y"))
    owners.line_up("run_a", writes("y"))
    before = owners.table.to_dict()
    answer = owners.ask("run_b", writes("x"))
    assert isinstance(answer, Refused)
    assert str(answer.error()) == (
        "this claim would wait for ever: run_b wants write x, which waits for run_a; "
        "run_a wants write y, which waits for run_b"
    )
    assert owners.table.to_dict() == before, "nothing is left of the refused request"


@pytest.mark.field_report("E13")
def test_cycle_over_claims_and_a_parent_that_waits_is_refused() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("src"))
    owners.take("stranger", writes("docs"))
    owners.line_up("stranger", writes("src"))
    assert owners.cycle(owners.ask("child", writes("docs"))) == [
        ("child", "stranger", WaitKind.CLAIM),
        ("stranger", "parent", WaitKind.CLAIM),
        ("parent", "child", WaitKind.CHILD),
    ]


def test_cycle_over_the_parent_of_a_waiter_is_refused_without_being_told_of_it() -> None:
    table = LockTable()
    table.request(ClaimRequest("claim_1", "parent", (writes("x"),)))
    table.request(ClaimRequest("claim_2", "a", (writes("y"),)))
    table.request(ClaimRequest("claim_3", "child", (writes("y"),), ("parent",)))
    answer = table.request(ClaimRequest("claim_4", "a", (writes("x"),)))
    assert isinstance(answer, Refused)
    assert [edge.kind for edge in answer.cycle] == [WaitKind.CLAIM, WaitKind.CHILD, WaitKind.CLAIM]


def test_cycle_over_an_awaited_run_is_refused() -> None:
    owners = Owners()
    owners.take("b", writes("x"))
    owners.waits.add(("b", "a"))
    assert owners.cycle(owners.ask("a", reads("x"))) == [("a", "b", WaitKind.CLAIM), ("b", "a", WaitKind.RUN)]


def test_cycle_over_the_parent_of_an_awaiting_run_is_refused() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("x"))
    owners.waits.add(("child", "a"))
    kinds = [kind for _, _, kind in owners.cycle(owners.ask("a", reads("x")))]
    assert kinds == [WaitKind.CLAIM, WaitKind.RUN, WaitKind.RUN]


@pytest.mark.field_report("E13")
def test_wait_for_a_run_that_would_close_a_cycle_is_found() -> None:
    owners = Owners()
    owners.take("a", writes("x"))
    owners.line_up("b", writes("x"))
    cycle = owners.table.find_cycle("a", "b")
    assert [edge.describe() for edge in cycle] == [
        "a waits for b to end",
        "b wants write x, which waits for a",
    ]
    assert owners.table.find_cycle("b", "c") == ()


def test_waiting_for_ones_own_child_never_closes_a_cycle() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("y"))
    owners.take("h", writes("z"))
    owners.line_up("stranger", writes("y"), writes("z"))
    owners.line_up("child", writes("z"))
    assert owners.table.find_cycle("parent", "child", waiters_of=owners.waiters_of) == ()


def test_conversion_that_forms_a_cycle_over_another_claim_of_the_owner_is_found() -> None:
    # `b` waits for one claim of `a` while `a` gets in line for another.
    owners = Owners()
    owners.take("a", writes("p"))
    owners.take("b", reads("q"))
    owners.take("c", reads("q"))
    owners.line_up("b", writes("p"))
    assert isinstance(owners.ask("a", writes("q")), Refused)


def test_cycle_that_only_the_order_of_the_line_would_make_is_avoided_by_passing() -> None:
    owners = Owners()
    held = owners.take("a", writes("x"))
    owners.line_up("b", writes("x"), writes("y"))
    passing = owners.take("a", writes("y"))
    assert owners.release(held) == []
    assert owners.release(passing) == ["b"]


# Leaving.


@pytest.mark.field_report("G2")
@pytest.mark.field_report("G10")
def test_waiter_that_leaves_the_middle_of_the_line_does_not_disturb_it() -> None:
    owners = Owners()
    held = owners.take("a", writes("x"))
    second = owners.line_up("b", writes("x"))
    middle = owners.line_up("c", writes("x"))
    owners.line_up("d", writes("x"))
    assert granted(owners.table.withdraw(middle, "c", at=1.0)) == []
    view = owners.table.claims("d")[0]
    assert (view.behind, view.held_by) == (("b",), ("a",))
    assert owners.release(held) == ["b"]
    assert owners.release(second) == ["d"]


def test_wide_waiter_that_leaves_sets_free_those_it_alone_held_back() -> None:
    owners = Owners()
    owners.take("a", writes("src/a"))
    wide = owners.line_up("x", writes("src"))
    owners.line_up("b", writes("src/b"))
    owners.line_up("c", writes("src/a"))
    assert granted(owners.table.withdraw(wide, "x", at=1.0)) == ["b"]
    assert owners.table.claims("c")[0].behind == ("a",)


def test_cancelled_subtree_leaves_the_line_in_one_step_and_keeps_what_it_holds() -> None:
    owners = Owners(c1="parent", c2="parent")
    stranger = owners.take("stranger", writes("x"))
    kept = owners.take("c1", writes("y"))
    for owner in ("c1", "c2", "late"):
        owners.line_up(owner, writes("x"))
    events = owners.table.withdraw_waiting(["c1", "c2", "parent"], at=2.0)
    assert [type(event) for event in events] == [Withdrawn, Withdrawn]
    assert [view.claim_id for view in owners.table.claims("c1")] == [kept]
    assert owners.release(stranger) == ["late"]


def test_request_that_its_withdrawal_overtook_is_refused() -> None:
    owners = Owners()
    owners.table.withdraw("claim_early", "a", at=1.0)
    answer = owners.ask("a", writes("x"), claim_id="claim_early")
    assert isinstance(answer, Refused)
    assert isinstance(answer.error(), ClaimWithdrawn)
    assert owners.table.claims() == ()


def test_withdrawal_of_a_granted_claim_releases_it_for_good() -> None:
    owners = Owners()
    claim = owners.take("a", writes("x"))
    owners.line_up("b", writes("x"))
    assert granted(owners.table.withdraw(claim, "a", at=1.0, reason=WithdrawReason.TIMEOUT)) == ["b"]
    assert isinstance(owners.ask("a", writes("x"), claim_id=claim), Refused)


def test_memory_of_withdrawals_ends_with_the_owner() -> None:
    owners = Owners()
    owners.table.withdraw("claim_early", "a", at=1.0)
    assert [type(event) for event in owners.table.end(["a"], at=2.0)] == [Forgotten]
    assert owners.table.to_dict()["withdrawn"] == {}


@pytest.mark.requirement("F12")
def test_end_of_an_owner_frees_all_it_held_and_waited_for() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("x"))
    owners.take("child", writes("x/a"))
    owners.take("other", writes("y"))
    owners.line_up("child", writes("y"))
    owners.line_up("next", writes("x"))
    events = owners.table.end(["child", "parent"], at=3.0)
    assert [type(event) for event in events] == [Released, Withdrawn, Released, Granted]
    assert {view.owner for view in owners.table.claims()} == {"other", "next"}
    assert owners.table.end(["child", "parent"], at=3.0) == ()


def test_claim_of_an_owner_that_may_still_write_is_kept_until_it_is_cleared() -> None:
    owners = Owners()
    claim = owners.take("gone", writes("x"))
    owners.take("other", writes("y"))
    owners.line_up("gone", writes("y"))
    waiting = owners.line_up("next", writes("x"))
    events = owners.table.end(["gone"], at=5.0, quarantine="host unreachable")
    assert [type(event) for event in events] == [Quarantined, Withdrawn]
    view = owners.table.claim(claim)
    assert view is not None
    assert (view.state, view.note, view.since) == (ClaimState.QUARANTINED, "host unreachable", 5.0)
    assert not owners.table.holds(claim, view.token), "nobody may write under it any more"
    for attempt in (owners.table.release, owners.table.withdraw):
        with pytest.raises(LeaseNotHeld):
            attempt(claim, "gone", at=6.0)
    assert owners.table.end(["gone"], at=6.0) == ()
    assert granted(owners.table.clear("gone", at=7.0)) == ["next"]
    assert [view.claim_id for view in owners.table.claims("next")] == [waiting]


# Ids, bad input, limits.


def test_same_request_twice_is_one_claim() -> None:
    owners = Owners()
    first = owners.ask("a", writes("x"), claim_id="claim_1")
    again = owners.ask("a", writes("x"), claim_id="claim_1")
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert (again.seq, again.token) == (first.seq, first.token)
    assert len(owners.table.claims()) == 1
    queued = owners.ask("b", writes("x"), claim_id="claim_2")
    assert owners.ask("b", writes("x"), claim_id="claim_2") == queued


def test_id_of_another_owner_is_refused() -> None:
    owners = Owners()
    owners.ask("a", writes("x"), claim_id="claim_1")
    answer = owners.ask("b", writes("y"), claim_id="claim_1")
    assert isinstance(answer, Refused)
    assert isinstance(answer.error(), InvalidClaim)


def test_request_for_nothing_is_refused() -> None:
    answer = Owners().ask("a")
    assert isinstance(answer, Refused)
    assert isinstance(answer.error(), InvalidClaim)


def test_owner_above_its_quota_is_refused_and_others_are_not() -> None:
    owners = Owners()
    owners.table = LockTable(max_claims_per_owner=2)
    owners.take("a", writes("x"))
    owners.take("a", writes("y"))
    answer = owners.ask("a", writes("z"))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error(), ClaimQuotaExceeded)
    owners.take("b", writes("z"))


@pytest.mark.field_report("G2")
def test_release_of_a_foreign_lease_is_refused() -> None:
    owners = Owners()
    claim = owners.take("a", writes("x"))
    waiting = owners.line_up("b", writes("x"))
    for claim_id, owner in ((claim, "b"), (waiting, "b"), (waiting, "a")):
        with pytest.raises(LeaseNotHeld):
            owners.table.release(claim_id, owner, at=1.0)
    with pytest.raises(LeaseNotHeld):
        owners.table.withdraw(claim, "b", at=1.0)
    assert owners.table.statistics().held == 1


def test_release_of_a_claim_that_is_over_changes_nothing() -> None:
    assert Owners().table.release("claim_unknown", "a", at=1.0) == ()


def test_events_with_a_gap_are_refused() -> None:
    table = LockTable()
    with pytest.raises(InternalError, match="missing"):
        table.apply(Released(5, 1, "claim_1", "a", 0.0))
    with pytest.raises(InternalError, match="no live claim"):
        table.apply(Released(1, 1, "claim_1", "a", 0.0))


# Fencing and the write guard.


@pytest.mark.requirement("F12")
def test_tokens_grow_from_grant_to_grant_of_a_path() -> None:
    owners = Owners()
    tokens: list[int] = []
    claim = owners.take("a", writes("x"))
    for owner in ("b", "c", "d"):
        following = owners.line_up(owner, writes("x"))
        tokens.append(owners.table.check(owners.table.claims()[0].owner, writes("x")))
        owners.release(claim)
        claim = following
    assert tokens == sorted(set(tokens))


def test_lease_that_was_taken_away_is_not_held_under_its_old_token() -> None:
    owners = Owners()
    answer = owners.ask("a", writes("x"))
    assert isinstance(answer, Granted)
    assert owners.table.holds(answer.claim_id, answer.token)
    owners.table.end(["a"], at=1.0)
    owners.take("b", writes("x"))
    assert not owners.table.holds(answer.claim_id, answer.token)
    with pytest.raises(PathNotClaimed):
        owners.table.check("a", writes("x"))


def test_writer_may_write_only_what_it_has_claimed_and_not_lent() -> None:
    owners = Owners(child="parent")
    owners.take("parent", writes("src"), reads("docs"))
    assert owners.table.check("parent", writes("src/a")) > 0
    assert owners.table.check("parent", reads("docs/a")) > 0
    for area in (writes("docs/a"), writes("lib"), writes("")):
        with pytest.raises(PathNotClaimed, match="holds no claim"):
            owners.table.check("parent", area)
    inner = owners.take("child", writes("src/a"))
    with pytest.raises(PathNotClaimed, match="lent to child"):
        owners.table.check("parent", writes("src/a"))
    assert owners.table.check("parent", writes("src/b")) > 0
    owners.release(inner)
    assert owners.table.check("parent", writes("src/a")) > 0


# Views.


@pytest.mark.field_report("G10")
def test_views_show_holders_and_waiters_in_order() -> None:
    owners = Owners()
    owners.take("a", writes("x"))
    owners.now = 107.0
    owners.line_up("b", writes("x"))
    owners.line_up("c", reads("x/y"))
    first, second, third = owners.table.claims()
    assert (first.owner, first.state, first.since, first.wants) == ("a", ClaimState.GRANTED, 100.0, ("write x",))
    assert (second.owner, second.state, second.since) == ("b", ClaimState.QUEUED, 107.0)
    assert (second.behind, second.held_by) == (("a",), ("a",))
    assert (third.behind, third.held_by) == (("b",), ("a",))
    assert third.to_dict()["held_by"] == ["a"]
    assert owners.table.claim("claim_unknown") is None


def test_statistics_count_what_is_there() -> None:
    owners = Owners()
    owners.take("a", writes("x"))
    owners.line_up("b", writes("x"))
    owners.take("c", writes("y"))
    owners.table.end(["c"], at=1.0, quarantine="left over")
    counts = owners.table.statistics()
    assert (counts.held, counts.waiting, counts.quarantined, counts.owners) == (1, 1, 1, 3)
    assert counts.last_seq == 4


# Size.


def test_long_line_on_one_file_keeps_one_edge_for_each_waiter() -> None:
    owners = Owners(**{f"c{number}": "parent" for number in range(300)})
    owners.take("parent", writes("src"))
    for number in range(300):
        owners.ask(f"c{number}", writes("src/hot"))
    edges = [len(claim["waits"]) for claim in owners.table.to_dict()["claims"]]
    assert max(edges) == 1


def test_thousands_of_waiters_on_one_file_leave_it_in_one_step() -> None:
    owners = Owners()
    held = owners.take("holder", writes("hot"))
    for number in range(3_000):
        owners.line_up(f"w{number}", writes("hot"))
    last = owners.line_up("last", writes("hot"))
    owners.table.withdraw_waiting([f"w{number}" for number in range(3_000)], at=1.0)
    view = owners.table.claim(last)
    assert view is not None
    assert view.behind == ("holder",)
    assert owners.release(held) == ["last"]
