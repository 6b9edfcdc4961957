"""`remit locks --clear`: what cannot be proven gone is freed on a person's word, and on nothing less."""

from __future__ import annotations

from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.locks import write
from remit.testing import wait_until
from tests.cli.runner import Result, invoke


@agent(claims=write("src"))
async def holder(ctx: RunContext) -> None:
    await ctx.process(["sleep", "600"])


@pytest.fixture
def quarantined(command: Any) -> tuple[Any, str]:
    """Leave a run behind whose program is not proven gone; return the command and the run's id."""
    command.agents.holder = holder
    command("run", command.target("holder"), "--detach")
    wait_until(lambda: any(node["processes"] for node in command.json("tree")["nodes"]), timeout_s=30.0)
    run = command.json("tree")["nodes"][1]
    command.system.engine.sweeps_succeed = False
    command.system.engine.hosts[run["host_id"]].kill()
    wait_until(lambda: command.json("tree")["nodes"][1]["outcome"] == "lost", timeout_s=30.0)
    return command, run["id"]


def answered(command: Any, text: str, *words: str) -> Result:
    return invoke(["locks", "-w", str(command.workspace), *words], obj=command.open, input=text)


def test_it_is_freed_once_somebody_has_said_yes(quarantined: tuple[Any, str]) -> None:
    command, run = quarantined
    (claim,) = command.json("locks")["claims"]
    assert (claim["owner"], claim["state"]) == (run, "quarantined")
    refused = answered(command, "n\n", "--clear", run)
    assert refused.exit_code == 2
    assert "nobody confirmed" in refused.stderr
    assert command.json("locks")["claims"] == [claim]
    silent = answered(command, "", "--clear", run)
    assert silent.exit_code == 2
    done = answered(command, "y\n", "--clear", run[-8:])
    assert done.exit_code == 0, done.output
    assert f"write src  of {run}: not proven gone: sleep" in done.stdout
    assert f"freed: write src of {run}" in done.stdout
    assert command("locks").stdout.startswith("nothing is claimed")


def test_scripts_say_yes_beforehand_and_get_json(quarantined: tuple[Any, str]) -> None:
    command, run = quarantined
    assert command("locks", "--clear", run, "--json").exit_code == 2
    done = command.json("locks", "--clear", run, "--yes")
    assert (done["owner"], [claim["wants"] for claim in done["freed"]]) == (run, [["write src"]])
    again = command("locks", "--clear", run, "--yes")
    assert again.exit_code != 0
    assert "nothing is quarantined" in again.stderr
    assert "no turn or run" in command("locks", "--clear", "run_nobody", "--yes").stderr
