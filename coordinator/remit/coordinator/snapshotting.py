"""When the coordinator keeps a snapshot of its state in the journal.

After as many records as recovery may fold in about half a second, or twice
the nodes that a snapshot holds: then snapshots cost less than the records they
save. Earlier where nothing is live, since that disturbs nobody.
"""

from __future__ import annotations

import asyncio
import logging

from remit.coordinator.snapshot import encode, freeze
from remit.coordinator.state import WorkspaceState
from remit.core.errors import JournalError
from remit.journal import Journal

__all__ = ["Snapshots"]

logger = logging.getLogger("remit.coordinator")

_RECORDS = 10_000
_RECORDS_A_NODE = 2
_RECORDS_AT_REST = 1_000


class Snapshots:
    """Keeps the journal's tail short. Belongs to the coordinator's event loop.

    Args:
        journal: where they go.
        state: the decider's.
        tail: records that the journal holds behind its latest snapshot.
    """

    def __init__(self, journal: Journal, state: WorkspaceState, *, tail: int = 0) -> None:
        self._journal = journal
        self._state = state
        self._tail = tail
        self._task: asyncio.Task[None] | None = None

    def count(self, records: int) -> None:
        """Take note of records that were handed to the journal."""
        self._tail += records

    def consider(self) -> None:
        """Begin a snapshot if one is due and none is under way."""
        state = self._state
        at_rest = not (state.live_runs or state.live_turns)
        due = _RECORDS_AT_REST if at_rest else max(_RECORDS, _RECORDS_A_NODE * len(state.nodes))
        if self._tail >= due and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self.take())

    async def take(self) -> None:
        """Keep the state as it is now. What fails is logged: the journal is whole without it.

        Durability: on return it is on the disk, unless the journal has failed.
        """
        # The state, and its place in the journal, in one step of the loop.
        frozen = freeze(self._state)
        place = self._journal.append(())
        before, self._tail = self._tail, 0
        try:
            seq = await asyncio.wrap_future(place)
            data = await asyncio.to_thread(encode, frozen)
            await asyncio.wrap_future(self._journal.save_snapshot(seq, data))
        except JournalError as error:
            self._tail += before
            logger.warning("no snapshot was kept: %s", error)

    async def finish(self, timeout_s: float) -> None:
        """Wait for a snapshot under way, and keep a last one if there is anything new; bounded.

        Args:
            timeout_s: longest wait, in seconds.
        """
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)
        if self._tail >= _RECORDS_AT_REST:
            self._task = asyncio.get_running_loop().create_task(self.take())
            await asyncio.wait([self._task], timeout=timeout_s)
