"""Daemons for tests: one in this thread without processes, and a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.procd.fakes import World


@pytest.fixture
def world() -> Iterator[World]:
    """Return a daemon in this thread whose keepers the test plays."""
    world = World()
    yield world
    world.close()
