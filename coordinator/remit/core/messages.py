"""What clients, hosts and the coordinator say to each other.

Every request can be sent again: turns, runs and cancels carry ids that the sender
made, and the second copy changes nothing. Messages travel pickled, as bytes;
what belongs to users (arguments, results, agents) is pickled once at the edge and
passed through as bytes that nobody in between opens. The messages that come by the
thousand are named tuples: a frozen dataclass takes ten times as long to pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remit.core.cause import Cause, CauseKind
from remit.core.errors import RemitError
from remit.core.limits import Limits
from remit.core.outcome import Outcome
from remit.core.records import ApprovalRecord

__all__ = [
    "PROTOCOL",
    "AnswerApproval",
    "ApprovalNotice",
    "AskApproval",
    "AskClaim",
    "BodyTiming",
    "CancelAnswer",
    "CancelOrder",
    "CancelRequest",
    "CancelSummary",
    "ClaimAnswer",
    "ClaimCheck",
    "ClaimNotice",
    "ClientOpened",
    "DelegateRequest",
    "DrainAnswer",
    "DrainRequest",
    "EndedNotice",
    "FinishTurn",
    "FlushOrder",
    "GiveUpClaim",
    "HostInventory",
    "LiveAttempt",
    "NoteEffect",
    "NotePartial",
    "NoteSpend",
    "OpenClient",
    "OpenTurn",
    "OrderBatch",
    "PollReply",
    "ReportBatch",
    "ReportEnded",
    "ReportProcess",
    "ReportProgress",
    "ReportResume",
    "ReportSpend",
    "ReportWaiting",
    "ResumeOrder",
    "RunRequest",
    "StartBatch",
    "StartItem",
    "TurnCancelledNotice",
    "TurnStartedNotice",
    "WaitRefused",
    "WithdrawApproval",
    "dumps",
    "loads",
]


PROTOCOL = 5
"""Version of these messages; both ends must have the same."""


def dumps(message: object) -> bytes:
    """Return a message as bytes."""
    return pickle.dumps(message, protocol=5)


def loads(blob: bytes) -> Any:
    """Return the message that `dumps` wrote. Only for bytes from our own cluster."""
    return pickle.loads(blob)  # the cluster is one trust domain


@dataclass(frozen=True, slots=True)
class OpenClient:
    """A process says that it is there."""

    client_id: str
    surface: str = "python"
    grace_s: float = 10.0
    host_id: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class ClientOpened:
    """What a client needs to know of the coordinator."""

    epoch: int
    poll_s: float
    workspace: str
    max_result_bytes: int
    protocol: int = 0


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """Start a turn."""

    turn_id: str
    client_id: str
    session_id: str
    name: str = ""
    user: str = ""
    surface: str = "python"
    on_disconnect: str = "cancel"
    busy: str = "reject"
    deadline_s: float | None = None
    grace_s: float = 5.0
    limits: Limits | None = None
    trace: str = ""
    session_limits: Limits | None = None
    """Budget of the whole session, from this turn on; None leaves it as it is."""
    approvals: tuple[Mapping[str, Any], ...] = ()
    """Rules for approvals below this turn, as `ApprovalRule.to_dict` writes them; none: ask."""
    on_failure: str = "continue"
    """`stop`: the first run delegated by the turn itself that does not succeed cancels the others."""


class BodyTiming(NamedTuple):
    """When a body began, heard its cancel, observed it and ended, by one clock of its process.

    Seconds are counted on the monotonic clock from the beginning.
    """

    began_at: float
    """In seconds since 1970."""
    ended_s: float
    told_s: float | None = None
    """When its signal was set; None if it was not, or only after its end."""
    observed_s: float | None = None
    """When it first took notice; None where that is not known before its end."""
    where: str = "checkpoint"
    """What it was at then (`remit.telemetry.ObservedAt`)."""

    @property
    def ended_at(self) -> float:
        """The end, in seconds since 1970."""
        return self.began_at + self.ended_s

    @property
    def told_at(self) -> float:
        """When it was told, in seconds since 1970; its end if it never was."""
        return self.began_at + (self.ended_s if self.told_s is None else self.told_s)

    @property
    def observed_at(self) -> float:
        """When it observed that, in seconds since 1970; its end if that is not known."""
        return self.began_at + (self.ended_s if self.observed_s is None else self.observed_s)

    @property
    def observation_s(self) -> float:
        """Seconds from being told to observing it."""
        return max(0.0, self.observed_at - self.told_at)

    @property
    def cleanup_s(self) -> float:
        """Seconds from observing it to the end."""
        return max(0.0, self.ended_at - self.observed_at)


@dataclass(frozen=True, slots=True)
class FinishTurn:
    """A turn's body has ended.

    `report` is `returned`, `raised`, `cancelled`, or `follow` for a turn whose
    outcome follows its runs: any run that did not succeed makes it failed.
    """

    turn_id: str
    report: str = "returned"
    error_type: str = ""
    error: str = ""
    tokens: int = 0
    """All that its body has spent; see `NoteSpend`."""
    cost: float = 0.0
    timing: BodyTiming | None = None


class RunRequest(NamedTuple):
    """One run of a delegation."""

    run_id: str
    agent_key: str
    agent_name: str
    name: str = ""
    arguments: bytes = b""
    preview: str = ""
    pool: str = "shared"
    resources_key: str = ""
    after: tuple[str, ...] = ()
    deadline_s: float | None = None
    retries: int = 0
    retry_delay_s: float = 0.0
    attempt_timeout_s: float | None = None
    detached: bool = False
    grace_s: float | None = None
    limits: Limits | None = None
    claims: tuple[Mapping[str, Any], ...] = ()
    """Areas that it must hold before it takes a slot, as `Area.to_dict` writes them."""
    wishes: tuple[tuple[str, str, bool], ...] = ()
    """The claims behind them as they were spelled: mode, text, whether it is a glob."""
    approvals: tuple[Mapping[str, Any], ...] = ()
    """Rules for approvals of this run and below; they can only narrow what is allowed above."""


@dataclass(frozen=True, slots=True)
class DelegateRequest:
    """Several runs of one parent, taken on all together or not at all."""

    parent_id: str
    parent_attempt: int
    client_id: str
    env_key: str
    env: bytes
    agents: Mapping[str, bytes]
    runs: tuple[RunRequest, ...]
    trace: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop a turn, a run or a session's active turns."""

    request_id: str
    target: str
    kind: CauseKind = CauseKind.USER_INTERRUPT
    reason: str = ""
    actor: str = ""
    surface: str = "python"
    user: str = ""
    requester: str = ""
    """The run that asks, if one does: it may stop itself and what is below it, nothing else."""
    kill: bool = False
    grace_s: float | None = None
    dry_run: bool = False
    trace: str = ""
    """Carrier of the span that asks; the empty text where there is none."""


class AskClaim(NamedTuple):
    """A turn or run asks for areas; answered at once, granted or queued."""

    claim_id: str
    owner_id: str
    attempt: int
    areas: tuple[Mapping[str, Any], ...]
    """As `Area.to_dict` writes them."""
    timeout_s: float | None = None


class ClaimAnswer(NamedTuple):
    """A claim was granted, or stands in line: then a `ClaimNotice` follows."""

    claim_id: str
    token: int
    """Fencing token of the lease; 0 while it waits."""
    held_by: tuple[str, ...] = ()


class GiveUpClaim(NamedTuple):
    """A claim is not wanted any more, wherever it is: in line, granted, or not arrived yet."""

    claim_id: str
    owner_id: str


class ClaimCheck(NamedTuple):
    """A writer asks whether it may still write."""

    owner_id: str
    claim_id: str = ""
    token: int = 0
    area: Mapping[str, Any] | None = None
    """Asks for this area under any lease of the owner instead of for one lease."""
    in_clean_up: bool = False
    """For what has to be cleaned up after a cancel: that the writer is cancelled is no reason to refuse."""


class NoteWait(NamedTuple):
    """A turn's body waits for runs that it has not delegated itself, or has stopped waiting (`on` is empty)."""

    turn_id: str
    number: int
    """Grows with each word of one turn about its waits: an earlier one that comes later is out of date."""
    on: tuple[str, ...]
    """All that it waits for now, in all its tasks."""


class AskApproval(NamedTuple):
    """A body asks whether it may take an action; answered at once by a policy, or later by a person."""

    approval_id: str
    node_id: str
    attempt: int
    action: str
    details: str = ""
    """A bounded, redacted rendering."""
    timeout_s: float | None = None


class WithdrawApproval(NamedTuple):
    """Whoever asked does not wait for the answer any more."""

    approval_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class AnswerApproval:
    """Somebody answers a request for approval; sent twice, it is one answer."""

    request_id: str
    approval_id: str
    approve: bool
    by: str = ""
    surface: str = "python"
    reason: str = ""
    user: str = ""
    """Only what belongs to this user (or to nobody) is found."""


class NoteSpend(NamedTuple):
    """What a turn's own body has spent so far, in all: a lost or repeated copy does no harm."""

    turn_id: str
    tokens: int
    cost: float


class NotePartial(NamedTuple):
    """A turn's body hands over what there is so far."""

    turn_id: str
    preview: str
    payload: bytes


class NoteEffect(NamedTuple):
    """A body is about to do something outside (`ended` false), or its end is known."""

    node_id: str
    attempt: int
    effect_id: str
    what: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class CancelAnswer:
    """What is true when a cancel request returns; never that it has stopped."""

    request_id: str
    target: str
    accepted: bool
    live: int = 0
    already: Outcome | None = None
    cause: Cause | None = None
    message: str = ""
    nodes: tuple[str, ...] = ()
    trace: str = ""
    """Carrier of the span of what was asked for, to link to; the empty text where nothing is traced."""


@dataclass(frozen=True, slots=True)
class CancelSummary:
    """What a cancel did, once nothing below its target runs."""

    quiet: bool
    seconds_to_quiet: float | None
    runs: Mapping[str, int]
    processes_stopped: int
    processes_left: tuple[str, ...]
    effects_uncertain: int
    unconfirmed: tuple[str, ...]
    remaining: int
    claims_freed: int = 0
    """Leases of the target and of what is below it that have ended since the cancel."""
    claims_quarantined: tuple[str, ...] = ()
    """Those that have not, since their owner may still write: `write src/a.py of run_...`."""
    tokens: int = 0
    """Spent by the target and all below it, so far."""
    cost: float = 0.0
    git_locks_removed: tuple[str, ...] = ()
    """Git locks of killed programs that were taken away: their owner was proven gone."""
    git_locks_left: tuple[str, ...] = ()
    """Git locks that stay where programs were killed, each with why: a person has to look."""


class ReportEnded(NamedTuple):
    """A host says how an attempt's body ended."""

    run_id: str
    attempt: int
    report: str
    before_cancel: bool = True
    error_type: str = ""
    error: str = ""
    error_code: str = ""
    traceback: str = ""
    payload: bytes | None = None
    preview: str = ""
    timing: BodyTiming | None = None
    """Only where the attempt came with a trace."""


class ReportWaiting(NamedTuple):
    """A body waits for other runs and gives up its slot."""

    run_id: str
    attempt: int
    wait_id: int
    on: tuple[str, ...]
    what: str = "children"


class ReportResume(NamedTuple):
    """A body's wait is over and it wants its slot back."""

    run_id: str
    attempt: int


class ReportSpend(NamedTuple):
    """What the body of this attempt has spent so far, in all: a repeated copy does no harm."""

    run_id: str
    attempt: int
    tokens: int
    cost: float


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """A body hands over a partial result."""

    run_id: str
    attempt: int
    preview: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReportProcess:
    """A body started a tool process (`ended` false), or the process is over."""

    run_id: str
    attempt: int
    pid: int
    start_time: float
    machine: str
    program: str
    ended: bool = False
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    escalated: bool = False
    survivors: tuple[str, ...] = ()
    handle: str = ""
    background: bool = False
    goes_on: bool = False
    """With `ended`: it is not over, but in the background from now on."""
    git_locks_removed: tuple[str, ...] = ()
    """With `ended`: git locks that it had left when it was killed, and that were taken away."""
    git_locks_left: tuple[str, ...] = ()
    """With `ended`: git locks that stay where it was killed, each with why."""


Report = ReportEnded | ReportWaiting | ReportResume | ReportSpend | ReportProgress | ReportProcess


@dataclass(frozen=True, slots=True)
class ReportBatch:
    """What a host has to say, in order; `seq` makes a repeated batch harmless."""

    host_id: str
    seq: int
    items: tuple[Report, ...]


class StartItem(NamedTuple):
    """One attempt for a host to begin."""

    run_id: str
    attempt: int
    turn_id: str
    session_id: str
    path: tuple[str, ...]
    agent_key: str
    agent_name: str
    name: str
    depth: int
    arguments: bytes
    after: tuple[str, ...] = ()
    after_names: tuple[str, ...] = ()
    deadline_at: float | None = None
    trace: str = ""
    cause: Cause | None = None
    claims: tuple[Mapping[str, Any], ...] = ()
    """Areas that were granted to it before it took its slot."""
    wishes: tuple[tuple[str, str, bool], ...] = ()
    """The claims behind them, as in `RunRequest`."""
    lineage: int = 1


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Attempts for one host, all of one code environment."""

    env_key: str
    env: bytes
    agents: Mapping[str, bytes]
    items: tuple[StartItem, ...]
    epoch: int = 0
    """Life of the coordinator that sends it; a host that serves a later one refuses it."""


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """What a host must do about cancels: one order each, however many runs it hits."""

    target: str
    cause: Cause
    kill: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ResumeOrder:
    """A body whose wait is over may go on: it holds a slot again."""

    run_id: str


@dataclass(frozen=True, slots=True)
class WaitRefused:
    """A wait of this body could never end; `cycle` names why."""

    run_id: str
    wait_id: int
    cycle: str


@dataclass(frozen=True, slots=True)
class FlushOrder:
    """Hand on the spans that have ended: this host is about to be ended."""

    timeout_s: float


Order = CancelOrder | ResumeOrder | WaitRefused | FlushOrder


@dataclass(frozen=True, slots=True)
class OrderBatch:
    """Orders for one host; one of an earlier life of the coordinator is refused as a whole."""

    epoch: int
    orders: tuple[Order, ...]


class LiveAttempt(NamedTuple):
    """One attempt that a host has taken on and whose end no coordinator has acknowledged."""

    run_id: str
    attempt: int
    reported: bool = False
    """Its body has ended; the report is on its way, again and again until it is acknowledged."""
    waiting: ReportWaiting | None = None
    """The wait that its body is in, if it is in one."""
    resuming: bool = False
    """Its wait is over and it has asked for its slot."""


class HostInventory(NamedTuple):
    """What is really there on a host, as it says to a coordinator that was begun again."""

    host_id: str
    pid: int
    machine: str
    attempts: tuple[LiveAttempt, ...] = ()
    node: str = ""
    """The node of the cluster that it runs on."""


class DrainRequest(NamedTuple):
    """Move work away from a node of the cluster, or let it have work again (`undo`)."""

    node: str
    reason: str = ""
    undo: bool = False


class DrainAnswer(NamedTuple):
    """What is true when a drain request returns: nothing starts there any more."""

    node: str
    """Id of the node."""
    name: str
    """Its name, for people."""
    hosts: int
    """Agent hosts there that take no more runs."""
    runs: int
    """Attempts that were told to end; their runs go on elsewhere."""


class EndedNotice(NamedTuple):
    """A run or turn has its terminal event."""

    node_id: str
    outcome: Outcome
    cause: Cause | None = None
    error_type: str = ""
    error: str = ""
    error_code: str = ""
    traceback: str = ""
    payload: bytes | None = None
    unconfirmed: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TurnStartedNotice:
    """A turn is now the active one of its session."""

    node_id: str


@dataclass(frozen=True, slots=True)
class TurnCancelledNotice:
    """A cancel of this turn was accepted."""

    node_id: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class ClaimNotice:
    """A claim that stood in line is granted, or will never be."""

    node_id: str
    """Id of the claim."""
    token: int = 0
    """Fencing token of the lease; 0 if it was not granted."""
    error: RemitError | None = None
    """Why it was not granted."""


@dataclass(frozen=True, slots=True)
class ApprovalNotice:
    """A request for approval has its answer."""

    node_id: str
    """Id of the approval."""
    record: ApprovalRecord
    """With the decision in it."""


Notice = EndedNotice | TurnStartedNotice | TurnCancelledNotice | ClaimNotice | ApprovalNotice


@dataclass(frozen=True, slots=True)
class PollReply:
    """Answer of a long poll: notices since `ack`; send the new `seq` next time."""

    seq: int
    notices: tuple[Notice, ...] = field(default=())
