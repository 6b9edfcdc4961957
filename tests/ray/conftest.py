"""One local Ray node for all tests of a session, in a state folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from remit.coordinator import Coordinator
from remit.coordinator.node import LocalNode

OpenCoordinator = Callable[..., AbstractAsyncContextManager[Coordinator]]


@pytest.fixture(scope="session")
def ray_node() -> Iterator[dict[str, str]]:
    """Start a node and return the environment in which commands and drivers find it."""
    # Not `tmp_path`: its names are too long for the paths of sockets.
    state_dir = Path(tempfile.mkdtemp(prefix="remit-", dir="/tmp"))
    node = LocalNode(state_dir)
    added = {"REMIT_STATE_DIR": str(state_dir)}
    before = {name: os.environ.get(name) for name in (*added, "RAY_ADDRESS")}
    os.environ.update(added)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        record = node.ensure(timeout_s=150.0)
        added |= node.environment(record)
        yield {**os.environ, **added}
    finally:
        node.stop(grace_s=5.0)
        # The daemon of programs is not Ray's: it would stay until it has had nothing to do for long.
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((state_dir / "procd" / "life").read_text()), signal.SIGTERM)
        shutil.rmtree(state_dir, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="session")
def ray_connection(ray_node: dict[str, str]) -> Iterator[None]:
    """Keep this process connected for all tests: connecting again costs a tenth of a second each."""
    from remit.coordinator import ray_engine

    os.environ.update({name: value for name, value in ray_node.items() if name.startswith("RAY_")})
    record = LocalNode(Path(ray_node["REMIT_STATE_DIR"])).status()
    assert record is not None
    ray_engine.connect(record.address)
    yield
    ray_engine.disconnect()


@pytest.fixture
def open_coordinator(ray_connection: None, tmp_path: Path) -> OpenCoordinator:
    """Return a way to open this test's workspace; its coordinator is shut down at the end of the block."""

    @asynccontextmanager
    async def opened(workspace: Path = tmp_path, *, grace_s: float = 10.0) -> AsyncGenerator[Coordinator]:
        async with Coordinator.open(workspace, grace_s=grace_s) as coordinator:
            try:
                yield coordinator
            finally:
                # Its hosts would go on using memory until the end of the session.
                await asyncio.wait_for(coordinator.shutdown("test", timeout_s=10.0), 30.0)

    return opened
