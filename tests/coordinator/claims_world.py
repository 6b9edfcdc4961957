"""The world around the decider, with claims: bodies ask and give back by hand."""

from __future__ import annotations

from typing import Any

from remit.coordinator.decider import Decision
from remit.coordinator.state import NodeState
from remit.core.messages import AskClaim, ClaimAnswer, ClaimNotice, GiveUpClaim, RunRequest
from remit.locks import Area, ClaimState, Mode, conflict
from remit.processes.gitlocks import Aftermath
from tests.coordinator.decider_world import World


def wish(*texts: str) -> tuple[dict[str, Any], ...]:
    """Return areas as messages carry them: `w:src/a` writes, `r:src` reads."""
    return tuple(Area(Mode.WRITE if text[0] == "w" else Mode.READ, text[2:]).to_dict() for text in texts)


class ClaimWorld(World):
    """A world that checks the table after each decision and remembers notices about claims."""

    def __init__(self, **options: Any) -> None:
        self.notices: list[tuple[str, ClaimNotice]] = []
        self.swept: list[tuple[str, int]] = []
        self.next_claims: tuple[dict[str, Any], ...] = ()
        self.tokens: list[int] = []
        super().__init__(**options)

    def _take(self, decision: Decision) -> Decision:
        self.notices.extend(decision.effects.claims)
        self.swept.extend((run_id, process.pid) for run_id, process in decision.effects.sweep)
        for event, _ in decision.events:
            if event.kind == "claim_changed" and event.change["event"] == "granted":  # type: ignore[attr-defined]
                self.tokens.append(event.change["seq"])  # type: ignore[attr-defined]
        return super()._take(decision)

    def request(self, **options: Any) -> RunRequest:
        """Return a request of one run, with `next_claims` unless it says otherwise."""
        options.setdefault("claims", self.next_claims)
        return super().request(**options)

    def ask(self, node_id: str, *texts: str, claim_id: str = "", **options: Any) -> Decision:
        """Let a body ask for areas."""
        attempt = options.pop("attempt", self.node(node_id).attempt)
        name = claim_id or f"claim_{next(self._numbers)}"
        return self._take(self.decider.ask_claim(AskClaim(name, node_id, attempt, wish(*texts), **options), self.now))

    def claim(self, node_id: str, *texts: str, **options: Any) -> ClaimAnswer:
        """Let a body ask for areas that must be granted or queued."""
        decision = self.ask(node_id, *texts, **options)
        assert decision.claim is not None, decision.error
        return decision.claim

    def give_up(self, node_id: str, claim_id: str) -> Decision:
        """Let a body give a claim back."""
        return self._take(self.decider.give_up_claim(GiveUpClaim(claim_id, node_id), self.now))

    def process_swept(
        self, run_id: str, pid: int, *, gone: bool = True, aftermath: Aftermath | None = None
    ) -> Decision:
        """Say what became of a process of a dead host."""
        return self._take(self.decider.swept(run_id, pid, self.now, gone=gone, aftermath=aftermath))

    def clear(self, node_id: str) -> Decision:
        """Vouch that an ended node writes no more."""
        return self._take(self.decider.clear_claims(node_id, self.now))

    def owners(self, state: ClaimState) -> list[str]:
        """Return who has claims in a state, first come first."""
        return [view.owner for view in self.state.locks.claims() if view.state is state]

    @property
    def holders(self) -> list[str]:
        """Return who holds something."""
        return self.owners(ClaimState.GRANTED)

    @property
    def waiters(self) -> list[str]:
        """Return who stands in line."""
        return self.owners(ClaimState.QUEUED)

    def check_now(self) -> None:
        """Check the fold, the counts, and that nobody has a claim that it must not have."""
        super().check_now()
        assert self.tokens == sorted(set(self.tokens)), "fencing tokens do not grow"
        held: list[tuple[str, Area]] = []
        for view in self.state.locks.claims():
            node = self.state.nodes[view.owner]
            if view.state is not ClaimState.QUARANTINED:
                assert not node.is_ended, f"{view} after the end of its owner"
            if view.state is ClaimState.QUEUED:
                assert node.cause is None, f"{view} waits although its owner is cancelled"
                assert view.behind
            else:
                entry = self.state.locks.to_dict()["claims"]
                areas = next(claim for claim in entry if claim["ticket"] == view.ticket)["request"]["areas"]
                held.extend((view.owner, Area.from_dict(area)) for area in areas)
        for index, (owner, area) in enumerate(held):
            for other, other_area in held[index + 1 :]:
                if conflict(area, other_area) and owner != other:
                    assert self._in_line(owner, other), f"{owner} and {other} both hold {area.describe()}"
        for node in self.state.nodes.values():
            if node.claims and node.state in (NodeState.CLAIMING, NodeState.QUEUED):
                states = [view.state for view in self.state.locks.claims(node.id)]
                wanted = ClaimState.QUEUED if node.state is NodeState.CLAIMING else ClaimState.GRANTED
                assert wanted in states, f"{node.id} is {node.state} and its claims are {states}"

        self._check_that_no_waits_close_a_circle()

    def _check_that_no_waits_close_a_circle(self) -> None:
        """Invariant I5, of whoever no cancel has told to stop waiting."""
        waits: dict[str, set[str]] = {}
        for node in self.state.nodes.values():
            if node.is_ended or node.cause is not None:
                continue
            waiting = node.waiting_on if node.is_turn or node.state is NodeState.WAITING else ()
            waits[node.id] = {*waiting, *(node.live_children or ()), *(node.after if node.pending else ())}
        for view in self.state.locks.claims():
            if view.state is ClaimState.QUEUED and view.owner in waits:
                waits[view.owner] |= {*view.behind, *view.held_by}
        while True:
            free = [name for name, others in waits.items() if not others & waits.keys()]
            if not free:
                break
            for name in free:
                del waits[name]
        assert not waits, f"these wait for each other: {waits}"

    def _in_line(self, one: str, two: str) -> bool:
        nodes, ancestors = self.state.nodes, self.state.ancestors
        return nodes[one] in ancestors(nodes[two]) or nodes[two] in ancestors(nodes[one])
