"""`remit drain`: what moves, and what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from remit.coordinator.engine import ClusterNode
from remit.testing import wait_until


@pytest.mark.field_report("I1")
def test_runs_move_and_the_command_says_how_many(command: Any) -> None:
    command("run", command.target("wait"), "--detach")
    assert command.agents.started.wait(20)
    command.agents.started.clear()
    command.system.engine.cluster.append(ClusterNode("node_2", "there"))
    result = command("drain", "here", "--reason", "repairs")
    assert (result.exit_code, result.output.count("1 runs go on elsewhere")) == (0, 1)
    assert command.agents.started.wait(20)
    turn = command.json("ps")["turns"][0]["id"]
    wait_until(lambda: command.json("tree", turn)["nodes"][1]["attempt"] == 2)
    again = command.json("drain", "node_1")
    assert (again["runs"], again["name"], again["undo"]) == (0, "here", False)
    assert "takes work again" in command("drain", "--undo", "here").stdout
    command("cancel", turn)


def test_the_only_node_is_not_drained_and_unknown_ones_are_named(command: Any) -> None:
    alone = command("drain", "here")
    assert alone.exit_code != 0
    assert "no other node" in alone.output
    unknown = command("drain", "elsewhere")
    assert unknown.exit_code == 2
    assert "'elsewhere' is no node of this cluster" in unknown.output
    assert "node_1 (here)" in unknown.output


def test_where_nothing_runs_there_is_nothing_to_move(command: Any) -> None:
    command.system.close()
    result = command("drain", "here")
    assert result.exit_code != 0
    assert "nothing runs that could be moved" in result.output
