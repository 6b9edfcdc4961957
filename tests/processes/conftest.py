from collections.abc import Iterator

import pytest

from tests.processes.world import World


@pytest.fixture(scope="module")
def forge() -> Iterator[World]:
    """Start the process that forks keepers; one for all tests of a module."""
    world = World()
    yield world
    world.close()


@pytest.fixture
def world(forge: World) -> Iterator[World]:
    """Return the forge; what a test's jobs leave is ended after it."""
    yield forge
    forge.cull()
