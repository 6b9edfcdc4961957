"""The engine contract in one process; tests/ray holds real Ray to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from remit.coordinator import Coordinator
from remit.testing import open_inprocess
from tests.contracts.engine_contract import EngineContract


@asynccontextmanager
async def in_process(workspace: Path) -> AsyncGenerator[Coordinator]:
    with open_inprocess(workspace, poll_s=0.1) as system:
        async with system.coordinator() as coordinator:
            yield coordinator


class TestInProcess(EngineContract):
    def opened(self, workspace: Path) -> AbstractAsyncContextManager[Coordinator]:
        return in_process(workspace)
