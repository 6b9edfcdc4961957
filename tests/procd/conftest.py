"""Daemons for tests: one in this thread without processes, and a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.procd.fakes import World
from tests.procd.live import Node


@pytest.fixture
def world() -> Iterator[World]:
    """Return a daemon in this thread whose keepers the test plays."""
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """Start one real daemon for the tests of a module."""
    node = Node()
    yield node
    node.close()


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """Return the module's daemon under names of this test; what the test leaves running is ended after it."""
    shared_node.renew_names()
    yield shared_node
    shared_node.empty()
