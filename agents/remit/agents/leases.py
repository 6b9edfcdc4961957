"""Claims as bodies hold them: waiting for a lease, checking it, writing under it.

**Rules**

1. The signal is looked at before a claim queues and again after it is granted.
2. A wait that ends in any other way than by a grant gives the claim back, also
   one that is granted at that very instant.
3. While it waits, a run has no slot.
4. A write is checked with the coordinator right before it takes effect: a lease
   that is over cannot write, whatever its holder believes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

from remit.agents.client import ClientSession
from remit.agents.delegation import Delegator
from remit.agents.wishes import checked_claims, workspace_of
from remit.agents.writing import AtomicFile
from remit.core.delivery import LoopDelivery
from remit.core.errors import InvalidArgument, RemitError
from remit.core.messages import AskClaim, ClaimAnswer, ClaimCheck, ClaimNotice, GiveUpClaim, Notice
from remit.core.scope import shielded
from remit.core.wellformed import check_number
from remit.locks import Area, AreaKind, Claim, InvalidClaim, LeaseNotHeld, Mode, PathNotClaimed, Workspace, write
from remit.telemetry.names import ObservedAt
from remit.telemetry.watching import waiting_at

__all__ = ["ClaimHolder", "Lease"]

_RELEASE_S = 5.0
_MOVED_TRIES = 3
_STATE_FOLDER = ".remit"
_WRITE_MODES = ("w", "wb", "x", "xb")


class Lease:
    """A granted claim; ends when its `async with` block does, or with its turn or run."""

    __slots__ = ("_holder", "areas", "claim_id", "token")

    def __init__(self, holder: ClaimHolder, claim_id: str, token: int, areas: tuple[Area, ...]) -> None:
        self._holder = holder
        self.claim_id = claim_id
        """`claim_...`."""
        self.token = token
        """Fencing token: larger than that of every earlier grant in this workspace, also across restarts."""
        self.areas = areas
        """What it covers, normalised."""

    @property
    def holder_id(self) -> str:
        """The turn or run that holds it."""
        return self._holder.holder_id

    def belongs_to(self, holder: ClaimHolder) -> bool:
        """Tell whether this lease was granted to a turn or run context."""
        return self._holder is holder

    def __repr__(self) -> str:
        return f"<Lease {' and '.join(area.describe() for area in self.areas)} token={self.token}>"

    async def check(self) -> None:
        """Ask the coordinator whether this lease is held, for use right before an effect.

        Raises:
            LeaseNotHeld: it is over.
            TurnCancelled: its turn or run is being cancelled.

        Cancellation:
            Always a checkpoint; changes nothing.
        """
        await self._holder.check_lease(self)


class _Grant:
    """Waits for the notice about one claim."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._delivery = LoopDelivery.of_loop(loop)
        self.token: asyncio.Future[int] = loop.create_future()

    def notice(self, notice: Notice) -> None:
        """Take the coordinator's word (poll thread)."""
        if isinstance(notice, ClaimNotice):
            self._delivery.post(lambda: self._take(notice.token, notice.error))

    def lost_contact(self, error: RemitError) -> None:
        """Take note that no word will come (poll thread)."""
        self._delivery.post(lambda: self._take(0, error))

    def _take(self, token: int, error: RemitError | None) -> None:
        if self.token.done():
            return
        if error is None:
            self.token.set_result(token)
        else:
            self.token.set_exception(error)
            self.token.exception()  # seen: whoever waited may have been cancelled


class ClaimHolder(Delegator):
    """Something that may claim paths of the workspace: a turn or a run context."""

    _leases: dict[str, Lease] | None = None

    @property
    def holder_id(self) -> str:
        """The turn or run that claims are made for."""
        return self._node_id

    @asynccontextmanager
    async def claim(self, *claims: Claim, timeout_s: float | None = None) -> AsyncGenerator[Lease]:
        """Hold claims for the time of a block: `async with ctx.claim(write("src")) as lease`.

        All of them are granted, or none. A run may enter what a run above it holds.
        While it waits, a run gives up its slot; the wait counts against its deadline.

        Args:
            claims: `read(path)`, `write(path)`, `write(glob=...)`, `exclusive()`.
            timeout_s: seconds to wait, from 0; None for no limit but the deadline's.

        Yields:
            The lease.

        Raises:
            TurnCancelled: this turn or run was cancelled, before, while or right after it
                waited; nothing is held.
            ClaimTimeout: it was not granted in time; nothing is held.
            DeadlockDetected: waiting would close a cycle, which is spelled out.
            InvalidClaim, OutsideWorkspace: a claim that cannot be.
            ClaimRefused: too many claims at once.

        Cancellation:
            Always a checkpoint. Cancelled midway, nothing is held: what is granted at
            that instant is given back.

        Durability:
            The grant is on the disk when the block begins, the release when it ends.
        """
        lease = await self.acquire(claims, timeout_s)
        try:
            yield lease
        finally:
            await self.release(lease)

    async def acquire(self, claims: Sequence[Claim], timeout_s: float | None) -> Lease:
        """Wait for a lease, without a block around it; whoever asks has to `release` it.

        Raises:
            As `claim`.
        """
        check_number("timeout_s", timeout_s)
        self._signal.raise_if_set()
        claims = checked_claims(claims)
        workspace = workspace_of(self.workspace_root())
        for _ in range(_MOVED_TRIES):
            areas = workspace.areas(claims)
            lease = await self._acquire_areas(areas, timeout_s)
            if workspace.still_holds(claims, areas):
                if self._leases is None:
                    self._leases = {}
                self._leases[lease.claim_id] = lease
                return lease
            # A link on the way was changed while we waited: the lease is for the wrong place.
            await self.release(lease)
        raise InvalidClaim(f"{claims[0].describe()} leads somewhere else each time it is looked at; claim a folder")

    async def _acquire_areas(self, areas: tuple[Area, ...], timeout_s: float | None) -> Lease:
        session = self.session
        claim_id = session.ids.claim()
        grant = _Grant(asyncio.get_running_loop())
        packed = tuple(area.to_dict() for area in areas)
        request = AskClaim(claim_id, self._node_id, self._attempt, packed, timeout_s)
        session.track(claim_id, grant, pending=True)
        granted = False
        try:
            with waiting_at(ObservedAt.LOCK_WAIT, self._watch):
                answer: ClaimAnswer = await self._watched(session.request("claim", request))
            if not answer.token:
                session.confirm(claim_id)
            token = answer.token or await self._wait_for_grant(grant)
            self._signal.raise_if_set()
            granted = True
        finally:
            session.untrack(claim_id)
            if not granted:
                _give_back(session, GiveUpClaim(claim_id, self._node_id))
        return Lease(self, claim_id, token, areas)

    async def _wait_for_grant(self, grant: _Grant) -> int:
        """Wait in line, without a slot, and take a slot again."""
        with self._while_waiting((), what="claims") as ticket:
            token: int = await self._watched(_result_of(grant.token), ticket)
        await self._go_on()
        return token

    async def release(self, lease: Lease) -> None:
        """End a lease. Not a place to be cancelled at: it ends with its holder anyway.

        Raises:
            LeaseNotHeld: it is somebody else's.
        """
        if not lease.belongs_to(self):
            told = f"lease {lease.claim_id} belongs to {lease.holder_id}, not to {self._node_id}"
            raise LeaseNotHeld(told, claim_id=lease.claim_id)
        if self._leases is not None:
            self._leases.pop(lease.claim_id, None)
        request = GiveUpClaim(lease.claim_id, self._node_id)
        with suppress(RemitError):
            async with shielded(_RELEASE_S):
                await self.session.request("give_up_claim", request)

    async def check_lease(self, lease: Lease) -> None:
        """Ask whether a lease is held; see `Lease.check`."""
        self._signal.raise_if_set()
        await self._watched(self.session.request("check_claim", ClaimCheck(self._node_id, lease.claim_id, lease.token)))

    def _leased_areas(self) -> list[Area]:
        """Return the areas that are held here, as far as this process knows."""
        return [area for lease in (self._leases or {}).values() for area in lease.areas]

    def _leased_places(self) -> list[str]:
        """Return the paths that may be written here, relative to the workspace, as far as this process knows."""
        areas = self._leased_areas()
        return [a.label or a.key for a in areas if a.mode is Mode.WRITE and a.kind is AreaKind.PATH]

    async def _may_still_write(self, path: str) -> bool:
        """Ask whether a lease covers a path that is not lent; also for the clean-up after a cancel."""
        try:
            area = _area_of(workspace_of(self.workspace_root()), Path(path))
            await self.session.request("check_claim", ClaimCheck(self._node_id, area=area.to_dict(), in_clean_up=True))
        except RemitError:
            return False
        return True

    async def check_path(self, path: str | os.PathLike[str]) -> Path:
        """Return the real place of a path that this turn or run may write now.

        Raises:
            PathNotClaimed: no lease of it covers the path, or it is lent to a child just now.
            OutsideWorkspace: it leads out of the workspace.
            TurnCancelled: this turn or run was cancelled.
        """
        self._signal.raise_if_set()
        workspace = workspace_of(self.workspace_root())
        place = workspace.resolve(path)
        _check_not_ours(workspace, place)
        request = ClaimCheck(self._node_id, area=_area_of(workspace, place).to_dict())
        await self._watched(self.session.request("check_claim", request))
        return place

    async def write_text(self, path: str | os.PathLike[str], text: str, *, encoding: str = "utf-8") -> None:
        """Write a file as a whole, under a lease that covers it.

        The file is replaced atomically: readers see the old one or the new one.

        Args:
            path: relative to the workspace, or absolute inside it.
            text: the whole content.
            encoding: of the file.

        Raises:
            PathNotClaimed: no lease of this turn or run covers the path, or links were changed
                so that it leads elsewhere; nothing was written.
            OutsideWorkspace: it leads out of the workspace.
            TurnCancelled: this turn or run was cancelled; nothing was written.
            IsADirectoryError: a folder is there. InvalidArgument: something else that is no file.
            UnicodeEncodeError, LookupError: the encoding cannot hold the text, or is none.

        Durability:
            The content has reached the disk when it returns.
        """
        data = text.encode(encoding)  # before anything is opened: it may not be possible
        async with self.open(path, "wb") as file:
            file.write(data)

    @asynccontextmanager
    async def open(
        self, path: str | os.PathLike[str], mode: str = "w", *, encoding: str = "utf-8"
    ) -> AsyncGenerator[IO[Any]]:
        """Write a file under a lease that covers it; it takes its place when the block ends.

        The lease is checked before anything is written and again before the file takes
        its place. A block that raises leaves the old file as it was.

        Args:
            path: relative to the workspace, or absolute inside it.
            mode: `w`, `wb`, or `x`, `xb` for a file that must not exist.
            encoding: for the text modes.

        Yields:
            A file to write to.

        Raises:
            InvalidArgument: another mode; use the built-in `open` to read.
            FileExistsError: with `x`, if the file exists.
            As `write_text`.
        """
        if mode not in _WRITE_MODES:
            raise InvalidArgument(f"mode must be one of {', '.join(_WRITE_MODES)}, not {mode!r}; read with open()")
        place = await self.check_path(path)
        with AtomicFile(workspace_of(self.workspace_root()).root, place, mode, encoding) as target:
            yield target.file
            target.seal()
            if await self.check_path(path) != place:
                raise PathNotClaimed(f"{os.fspath(path)!r} leads somewhere else than when it was opened")
            target.put_in_place()


def _check_not_ours(workspace: Workspace, place: Path) -> None:
    """Refuse what the workspace's own state is kept in; what runs put out lies there too, and is theirs.

    Raises:
        InvalidClaim: it is the journal, or something else that only Remit may write.
    """
    names = place.relative_to(workspace.root).parts
    if workspace.ignores_case:
        names = tuple(name.casefold() for name in names)
    if names[:1] == (_STATE_FOLDER,) and (len(names) < 3 or names[1] != "output"):
        told = f"{os.path.join(*names)!r} is the state of this workspace, which nobody else may write"
        raise InvalidClaim(f"{told}; write beside {_STATE_FOLDER!r}")


def _area_of(workspace: Workspace, place: Path) -> Area:
    """Return what is written where a path is: itself; other areas are about links on the way."""
    return next(area for area in workspace.areas([write(place)]) if area.kind is AreaKind.PATH)


async def _result_of(future: asyncio.Future[int]) -> int:
    await asyncio.wait([future])
    return future.result()


def _give_back(session: ClientSession, request: GiveUpClaim) -> None:
    """Send word that a claim is not wanted; if it is lost, the claim ends with its owner."""
    with suppress(RemitError):
        session.submit("give_up_claim", request)
