"""The lock table against a naive list: random trees, claims, cancels, ends, joins and restarts.

The model keeps a plain list of claims. It knows which concrete paths an area
holds by listing them, finds conflicts by comparing every pair, and searches the
whole graph of waits each time. Whatever the table leaves out for speed (edges,
subtrees, older claims), the model looks at.

The invariants I1 to I18 of docs/claims.md have to hold at every step;
each is named where it is checked (I14, I16 and I17 beside globs, leases and the decider).
"""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from remit.locks import (
    Area,
    AreaKind,
    ClaimRequest,
    ClaimState,
    Granted,
    LockEvent,
    LockTable,
    Mode,
    PathNotClaimed,
    Quarantined,
    Queued,
    RefusalReason,
    Refused,
    Released,
    Withdrawn,
    event_from_dict,
    event_to_dict,
    includes,
    overlap,
)
from remit.locks.entry import Entry
from remit.locks.ledger import Ledger
from remit.locks.trie import Node
from remit.locks.waits import nobody

PARENTS = {"a": "t1", "b": "t1", "a1": "a", "a2": "a", "c": "t2"}
OWNERS = ("t1", "a", "b", "a1", "a2", "t2", "c", "u")
PATHS = ("", "a", "b", "a/a", "a/b", "b/a", "a/a/b")
GLOBS = ("**", "*", "a/*", "*/b", "**/b", "a/**/b", "?/[ab]", "[!a]/*", "b/b")
UNIVERSE = [names for depth in range(6) for names in itertools.product("ab", repeat=depth)]


def ancestors(owner: str) -> tuple[str, ...]:
    found: list[str] = []
    while owner in PARENTS:
        owner = PARENTS[owner]
        found.append(owner)
    return tuple(found)


def matches(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return matches(pattern[1:], names) or (bool(names) and matches(pattern, names[1:]))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and matches(pattern[1:], names[1:])


def held_paths(area: Area) -> frozenset[tuple[str, ...]]:
    names = tuple(area.key.split("/")) if area.key else ()
    if area.kind is AreaKind.PATH:
        return frozenset(path for path in UNIVERSE if path[: len(names)] == names)
    return frozenset(path for path in UNIVERSE if matches(names, path))


AREAS = [Area(mode, key) for mode in Mode for key in PATHS]
AREAS += [Area(mode, key, AreaKind.GLOB) for mode in Mode for key in GLOBS]
HOT = [Area(mode, key) for mode in (Mode.WRITE, Mode.WRITE, Mode.READ) for key in ("a", "a/a", "b")]
HELD = {(area.kind, area.key): held_paths(area) for area in AREAS}
CONFLICTS = {
    (one, two): Mode.WRITE in (one.mode, two.mode) and bool(HELD[one.kind, one.key] & HELD[two.kind, two.key])
    for one in AREAS
    for two in AREAS
}


@dataclass(eq=False)
class Known:
    """One live claim of the model."""

    ticket: int
    claim_id: str
    owner: str
    areas: tuple[Area, ...]
    state: ClaimState
    overtook: set[int] = field(default_factory=set)
    token: int = 0

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.owner, *ancestors(self.owner))


def conflicting(one: Iterable[Area], two: Iterable[Area]) -> bool:
    return any(CONFLICTS[pair] for pair in itertools.product(one, two))


class Model:
    """A list of claims and the rules, without any cleverness."""

    def __init__(self) -> None:
        self.claims: list[Known] = []
        self.joins: set[tuple[str, str]] = set()

    def behind(self, one: Known, two: Known) -> bool:
        if one is two or two.owner in one.lineage or not conflicting(one.areas, two.areas):
            return False
        return two.ticket not in one.overtook if two.ticket < one.ticket else one.ticket in two.overtook

    def queued(self) -> list[Known]:
        return [claim for claim in self.claims if claim.state is ClaimState.QUEUED]

    def waits(self) -> set[tuple[str, str]]:
        pairs = {(one.owner, two.owner) for one in self.queued() for two in self.claims if self.behind(one, two)}
        return pairs | {(parent, child) for child, parent in PARENTS.items()} | self.joins

    def all_who_wait_for(self, owner: str) -> set[str]:
        edges, found = self.waits(), {owner}
        while more := {waiter for waiter, awaited in edges if awaited in found} - found:
            found |= more
        return found

    def waiters_of(self, owner: str) -> set[str]:
        parent = {PARENTS[owner]} if owner in PARENTS else set[str]()
        return parent | {waiter for waiter, awaited in self.joins if awaited == owner}

    def has_cycle(self) -> bool:
        edges = self.waits()
        nodes = {node for edge in edges for node in edge}
        while nodes:
            leaves = {node for node in nodes if not any(w == node and a in nodes for w, a in edges)}
            if not leaves:
                return True
            nodes -= leaves
        return False

    def judge(self, new: Known) -> tuple[str, set[int]]:
        """Return refused, granted or queued, and the tickets that the claim overtakes."""
        waiting = self.all_who_wait_for(new.owner)
        met = [claim for claim in self.claims if conflicting(new.areas, claim.areas)]
        strangers = [claim for claim in met if claim.owner not in new.lineage]
        if any(claim.owner in waiting and claim.state is not ClaimState.QUEUED for claim in strangers):
            return "refused", set()
        overtaken = {
            claim.ticket
            for claim in met
            if claim.state is ClaimState.QUEUED and claim.owner != new.owner and claim.owner in waiting
        }
        blockers = [claim for claim in strangers if claim.ticket not in overtaken]
        if self.is_inside(new.owner, new) and all(claim.state is ClaimState.QUEUED for claim in blockers):
            blockers = []
        return ("queued" if blockers else "granted"), overtaken

    def is_inside(self, holder: str, new: Known) -> bool:
        held = [
            area
            for claim in self.claims
            if claim.owner == holder and claim.state is not ClaimState.QUEUED
            for area in claim.areas
        ]
        return bool(held) and all(any(includes(own, area) for own in held) for area in new.areas)

    def grantable(self) -> list[Known]:
        return [one for one in self.queued() if not any(self.behind(one, two) for two in self.claims)]


class TableMachine(RuleBasedStateMachine):
    """Drive a table and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LockTable()
        self.model = Model()
        self.events: list[LockEvent] = []
        self.quarantined: set[str] = set()
        self.count = 0
        self.last_token = 0

    def ledger(self) -> Ledger:
        return self.table._ledger

    def alive(self, owner: str) -> bool:
        return not self.quarantined & {owner, *ancestors(owner)}

    def drop(self, dropped: list[Known], events: tuple[LockEvent, ...]) -> None:
        """Take claims from the model and expect the table to have granted the same others."""
        for claim in dropped:
            self.model.claims.remove(claim)
        ready = self.model.grantable()
        grants = [event for event in events if isinstance(event, Granted)]
        assert [event.ticket for event in grants] == [claim.ticket for claim in ready]
        left = {event.claim_id for event in events if isinstance(event, Released | Withdrawn)}
        assert left == {claim.claim_id for claim in dropped}
        for claim, event in zip(ready, grants, strict=True):
            self.note_grant(claim, event)
        self.events.extend(events)

    def note_grant(self, claim: Known, event: Granted) -> None:
        assert event.token > self.last_token, "I9"
        self.last_token = claim.token = event.token
        claim.state = ClaimState.GRANTED

    @rule(
        owner=st.sampled_from(OWNERS),
        areas=st.lists(st.sampled_from(AREAS), min_size=1, max_size=2),
        wait=st.sampled_from([True, True, True, False]),
    )
    def request_anything(self, owner: str, areas: list[Area], wait: bool) -> None:
        self.request(owner, areas, wait)

    def request(self, owner: str, areas: list[Area], wait: bool) -> None:
        if not self.alive(owner):
            return
        self.count += 1
        claim_id = f"claim_{self.count}"
        new = Known(0, claim_id, owner, tuple(areas), ClaimState.QUEUED)
        verdict, overtaken = self.model.judge(new)
        asked = ClaimRequest(claim_id, owner, tuple(areas), ancestors(owner), wait=wait)
        before = self.ledger().seq
        answer = self.table.request(asked, waiters_of=self.model.waiters_of if self.model.joins else nobody)
        if isinstance(answer, Refused):
            assert self.ledger().seq == before, "a refusal changes nothing"
            assert (answer.reason is RefusalReason.DEADLOCK) == (verdict == "refused"), "I5: no false abort"
            assert answer.reason is RefusalReason.DEADLOCK or (verdict == "queued" and not wait)
            if answer.cycle:
                ends = [(edge.waiter, edge.awaited) for edge in answer.cycle]
                assert ends[0][0] == owner == ends[-1][1]
                assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))
                assert set(ends[1:]) <= self.model.waits(), "every wait of the cycle is real"
            return
        self.events.append(answer)
        assert isinstance(answer, Granted) == (verdict == "granted")
        new.ticket, new.overtook = answer.seq, overtaken
        assert set(answer.ahead_of) == overtaken
        if isinstance(answer, Granted):
            self.note_grant(new, answer)
        self.model.claims.append(new)
        self.check_reentry(new)
        assert self.table.request(asked) == answer or isinstance(answer, Granted), "the same id is the same request"

    @rule(owner=st.sampled_from(OWNERS), areas=st.lists(st.sampled_from(HOT), min_size=1, max_size=2))
    def request_a_hot_path(self, owner: str, areas: list[Area]) -> None:
        self.request(owner, areas, wait=True)

    @rule(
        owner=st.sampled_from(("t1", "a", "a1", "a2")),
        areas=st.lists(st.sampled_from(HOT), min_size=1, max_size=2),
    )
    def request_in_one_family(self, owner: str, areas: list[Area]) -> None:
        self.request(owner, areas, wait=True)

    def check_reentry(self, new: Known) -> None:
        others = [claim for claim in self.model.claims if claim is not new]
        below_hold = any(
            new.owner in claim.lineage[1:] and claim.state is not ClaimState.QUEUED
            for claim in others
            if conflicting(claim.areas, new.areas)
        )
        inside = Model.is_inside(self.model_without(new), new.owner, new)
        assert not inside or below_hold or new.state is ClaimState.GRANTED, "I10"
        if new.state is ClaimState.QUEUED:
            for lender in ancestors(new.owner):
                if Model.is_inside(self.model_without(new), lender, new):
                    blockers = [claim for claim in others if self.model.behind(new, claim)]
                    assert all(lender in claim.lineage for claim in blockers), "I12"

    def model_without(self, new: Known) -> Model:
        model = Model()
        model.claims = [claim for claim in self.model.claims if claim is not new]
        return model

    def pick(self, data: st.DataObject, states: set[ClaimState]) -> Known | None:
        claims = [claim for claim in self.model.claims if claim.state in states]
        return data.draw(st.sampled_from(claims)) if claims else None

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim = self.pick(data, {ClaimState.GRANTED})
        if claim is not None:
            assert self.table.holds(claim.claim_id, claim.token)
            self.drop([claim], self.table.release(claim.claim_id, claim.owner, at=0.0))
            assert self.table.release(claim.claim_id, claim.owner, at=0.0) == ()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        claim = self.pick(data, {ClaimState.QUEUED, ClaimState.GRANTED})
        if claim is not None:
            self.drop([claim], self.table.withdraw(claim.claim_id, claim.owner, at=0.0))
            self.refuses_for_good(claim)

    def refuses_for_good(self, claim: Known) -> None:
        assert self.table.withdraw(claim.claim_id, claim.owner, at=0.0) == (), "I7: idempotent"
        again = self.table.request(ClaimRequest(claim.claim_id, claim.owner, claim.areas))
        assert isinstance(again, Refused), "I7: never granted"
        assert again.reason is RefusalReason.WITHDRAWN

    @rule(owner=st.sampled_from(OWNERS))
    def withdraw_before_it_arrives(self, owner: str) -> None:
        self.count += 1
        early = Known(0, f"claim_{self.count}", owner, (AREAS[0],), ClaimState.QUEUED)
        self.events.extend(self.table.withdraw(early.claim_id, owner, at=0.0))
        self.refuses_for_good(early)

    @rule(root=st.sampled_from(OWNERS))
    def cancel_subtree(self, root: str) -> None:
        below = [owner for owner in OWNERS if root in (owner, *ancestors(owner))]
        gone = [claim for claim in self.model.queued() if claim.owner in below]
        self.drop(gone, self.table.withdraw_waiting(below, at=0.0))

    @rule(root=st.sampled_from(OWNERS), unproven=st.booleans())
    def end_subtree(self, root: str, unproven: bool) -> None:
        below = [owner for owner in OWNERS if root in (owner, *ancestors(owner))]
        self.model.joins = {join for join in self.model.joins if not set(join) & set(below)}
        ended = [claim for claim in self.model.claims if claim.owner in below]
        kept = [claim for claim in ended if claim.state is ClaimState.QUARANTINED]
        if unproven:
            kept += [claim for claim in ended if claim.state is ClaimState.GRANTED]
        events = self.table.end(below, at=0.0, quarantine="processes left" if unproven else "")
        new = {claim.claim_id for claim in kept if claim.state is ClaimState.GRANTED}
        assert new == {event.claim_id for event in events if isinstance(event, Quarantined)}
        for claim in kept:
            claim.state = ClaimState.QUARANTINED
            self.quarantined.add(claim.owner)
        self.drop([claim for claim in ended if claim not in kept], events)
        left = {claim.owner for claim in self.model.claims if claim.state is not ClaimState.QUARANTINED}
        assert not left & set(below), "I11"

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(owner)
        self.drop([c for c in self.model.claims if c.owner == owner], self.table.clear(owner, at=0.0))

    @rule(waiter=st.sampled_from(OWNERS), awaited=st.sampled_from(OWNERS))
    def join(self, waiter: str, awaited: str) -> None:
        if not (self.alive(waiter) and self.alive(awaited)):
            return
        cycle = self.table.find_cycle(waiter, awaited, ancestors=ancestors(waiter), waiters_of=self.model.waiters_of)
        assert bool(cycle) == (awaited in self.model.all_who_wait_for(waiter))
        assert not (cycle and waiter in ancestors(awaited)), "waiting for a child is never refused"
        if not cycle:
            self.model.joins.add((waiter, awaited))

    @precondition(lambda self: self.model.joins)
    @rule(data=st.data())
    def stop_joining(self, data: st.DataObject) -> None:
        self.model.joins.discard(data.draw(st.sampled_from(sorted(self.model.joins))))

    @rule(owner=st.sampled_from(OWNERS), area=st.sampled_from(AREAS))
    def use(self, owner: str, area: Area) -> None:
        covers = any(
            includes(own, area)
            for claim in self.model.claims
            if claim.owner == owner and claim.state is ClaimState.GRANTED
            for own in claim.areas
        )
        lent = any(
            owner in claim.lineage[1:] and claim.state is not ClaimState.QUEUED and conflicting(claim.areas, [area])
            for claim in self.model.claims
        )
        if covers and not lent:
            assert self.table.check(owner, area) > 0, "I18"
        else:
            with pytest.raises(PathNotClaimed):
                self.table.check(owner, area)

    @rule()
    def restart_from_the_journal(self) -> None:
        journal = json.loads(json.dumps([event_to_dict(event) for event in self.events]))
        folded = LockTable()
        for data in journal:
            folded.apply(event_from_dict(data))
            folded.apply(event_from_dict(data))
        assert folded.to_dict() == self.table.to_dict(), "I15"
        assert folded.grant_ready(at=0.0) == ()
        self.table = folded

    @rule()
    def restart_from_a_snapshot(self) -> None:
        data = self.table.to_dict()
        self.table = LockTable.from_dict(json.loads(json.dumps(data)))
        assert self.table.to_dict() == data, "I15"

    @invariant()
    def table_and_model_hold_the_same(self) -> None:
        seen = {view.ticket: (view.claim_id, view.owner, view.state) for view in self.table.claims()}
        assert seen == {c.ticket: (c.claim_id, c.owner, c.state) for c in self.model.claims}, "I2, I7, I8"
        assert not self.model.grantable(), "I3, I4: whoever can be granted is"

    @invariant()
    def holders_of_a_path_form_a_line(self) -> None:
        held = [claim for claim in self.model.claims if claim.state is not ClaimState.QUEUED]
        for one, two in itertools.combinations(held, 2):
            if conflicting(one.areas, two.areas):
                assert one.owner in two.lineage or two.owner in one.lineage, "I1"

    @invariant()
    def waits_have_no_cycle(self) -> None:
        assert not self.model.has_cycle(), "I5"

    @invariant()
    def edges_are_real_mirrored_and_complete(self) -> None:
        known = {claim.ticket: claim for claim in self.model.claims}
        entries = self.ledger().by_ticket
        for ticket, entry in entries.items():
            assert all(other.blocks.get(ticket) is entry for other in entry.waits.values()), "I4"
            assert all(other.waits.get(ticket) is entry for other in entry.blocks.values()), "I4"
            assert bool(entry.waits) == entry.is_queued, "I4"
            for other in entry.waits:
                assert self.model.behind(known[ticket], known[other])
            for two in known.values():
                if entry.is_queued and self.model.behind(known[ticket], two):
                    self.check_covered(entry, two, known)

    def check_covered(self, entry: Entry, two: Known, known: dict[int, Known]) -> None:
        between = [other for other in entry.waits.values() if other.is_queued]
        through = any(self.model.behind(known[other.ticket], two) for other in between)
        assert two.ticket in entry.waits or through, "a wait was lost"

    @invariant()
    def trie_counts_what_hangs_in_it(self) -> None:
        total = sum(count_items(root) for root in self.ledger().trie.roots())
        assert total == sum(len(entry.areas) for entry in self.ledger().by_ticket.values()), "I13"
        assert self.ledger().trie.is_empty == (not self.model.claims), "I13"

    def teardown(self) -> None:
        """Let everybody finish, leaf by leaf: all that waits is granted, and nothing is left."""
        for owner in sorted(self.quarantined):
            self.drop([c for c in self.model.claims if c.owner == owner], self.table.clear(owner, at=0.0))
        while held := [claim for claim in self.model.claims if claim.state is ClaimState.GRANTED]:
            self.drop([held[0]], self.table.release(held[0].claim_id, held[0].owner, at=0.0))
        assert not self.model.claims, "I6"
        self.events.extend(self.table.end(OWNERS, at=0.0))
        assert self.table.to_dict() == {"seq": self.ledger().seq, "claims": [], "withdrawn": {}}, "I6, I13"
        assert all(not isinstance(event, Queued) or event.behind for event in self.events)


def count_items(node: Node[Entry]) -> int:
    """Count the areas at a node and below, and check the counts on the way."""
    assert node.parent is None or not node.is_bare
    globs = [area for area, _ in (node.globs or {}).values()]
    writers = len(node.writers_here or ()) + sum(area.mode is Mode.WRITE for area in globs)
    total = len(node.writers_here or ()) + len(node.readers_here or ()) + len(globs)
    for child in (node.children or {}).values():
        assert child.parent is node
        writers += child.writers
        total += count_items(child)
    assert node.writers == writers, "I13"
    return total


def test_areas_of_the_model_overlap_as_their_paths_do() -> None:
    for one, two in itertools.product(AREAS, AREAS):
        assert overlap(one, two) == bool(HELD[one.kind, one.key] & HELD[two.kind, two.key]), (one, two)


def run_machine(*, examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(TableMachine, settings=chosen)


@pytest.mark.requirement("F12")
@pytest.mark.requirement("F13")
@pytest.mark.field_report("E13")
def test_table_agrees_with_a_naive_list() -> None:
    run_machine(examples=80, steps=50)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_table_agrees_with_a_naive_list_over_tens_of_thousands_of_steps() -> None:
    run_machine(examples=400, steps=60)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_table_agrees_with_a_naive_list_over_a_million_steps() -> None:
    run_machine(examples=20_000, steps=60)
