"""The engine contract on real Ray."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from remit.coordinator import Coordinator
from tests.contracts.engine_contract import EngineContract
from tests.ray.conftest import OpenCoordinator


class TestOnRay(EngineContract):
    @pytest.fixture(autouse=True)
    def _open(self, open_coordinator: OpenCoordinator) -> None:
        self._open_coordinator = open_coordinator

    def opened(self, workspace: Path) -> AbstractAsyncContextManager[Coordinator]:
        return self._open_coordinator(workspace)
