"""Verbs about claims, approvals and sessions on real Ray, with right and with wrong input."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from remit.locks import ClaimState
from remit.testing.wait import wait_until
from tests.ray.test_cli import Shells

pytestmark = pytest.mark.slow

AGENTS = """
import time

from remit.agents import agent
from remit.locks import write


@agent
async def deaf(ctx):
    async with ctx.claim(write("x")):
        time.sleep(600)


@agent
async def parent(ctx):
    run = await ctx.delegate(deaf)
    await run.wait()
    await ctx.sleep(600)


@agent
async def claims(ctx):
    async with ctx.claim(write("x/y")):
        return "mine"


@agent
async def asks(ctx, action):
    answer = await ctx.approve(action, {"to": "prod"})
    return f"{answer.by} {answer.reason}"
"""
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def shells(ray_node: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Shells:
    found = Shells(tmp_path_factory.mktemp("claims"), ray_node)
    (found.workspace / "claim_agents.py").write_text(AGENTS)
    return found


def refused(done: subprocess.CompletedProcess[str], status: int, told: str) -> None:
    """Check that a command was refused in one sentence."""
    assert (done.returncode, told in done.stderr) == (status, True), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.field_report("G10")
def test_what_a_deaf_body_keeps_is_shown_and_freed_by_a_person_alone(shells: Shells) -> None:
    assert shells.run("run", "claim_agents:parent", "--name", "deaf", "--detach").returncode == 0
    turn = shells.turn_named("deaf", runs=2)

    def held() -> list[Any]:
        listed: list[Any] = document(shells.run("locks", "--json"))["claims"]
        return listed

    wait_until(lambda: [claim["state"] for claim in held()] == ["granted"], timeout_s=_PATIENCE_S)
    (claim,) = held()
    owner = claim["owner"]
    assert claim["wants"] == ["write x"]
    # It is held by somebody who lives: there is nothing to clear, whoever says yes.
    refused(shells.run("locks", "--clear", owner, "--yes"), 2, f"nothing is quarantined for {owner}")
    refused(shells.run("locks", "--clear", "run_none", "--yes"), 2, "no turn or run 'run_none'")
    # Its parent runs in the same host, which therefore may not be killed: nobody can say that it is over.
    cancelled = shells.run("cancel", owner, "--json")
    receipt = json.loads(cancelled.stdout)
    assert receipt["claims_quarantined"] == [f"write x of {owner}"], receipt
    assert receipt["unconfirmed"] == [owner]
    with shells.terminal("run", "claim_agents:claims", "--name", "next") as waiting:
        wait_until(lambda: len(held()) == 2, timeout_s=_PATIENCE_S)
        assert [claim["state"] for claim in held()] == ["quarantined", "queued"]
        tree = shells.run("tree", "--json")
        assert f"held by {owner}" in tree.stdout
        for words in ((), ("--json",)):
            asked = shells.run("locks", "--clear", owner, *words)  # nobody is there to answer
            assert (asked.returncode, "nothing was freed: nobody confirmed" in asked.stderr) == (2, True), asked
        assert held()[0]["state"] == "quarantined"
        freed = document(shells.run("locks", "--clear", owner[-8:], "--yes", "--json"))
        assert (freed["owner"], [claim["wants"] for claim in freed["freed"]]) == (owner, [["write x"]])
        assert waiting.wait() == 0, waiting.text
        assert "mine" in waiting.text
    refused(shells.run("locks", "--clear", owner, "--yes"), 2, "nothing is quarantined")
    assert shells.run("cancel", turn).returncode == 0
    assert shells.look(lambda records: [c for c in records.state.locks.claims() if c.state is ClaimState.GRANTED]) == []


@pytest.mark.requirement("A21")
def test_an_approval_is_answered_from_another_shell_once(shells: Shells) -> None:
    with shells.terminal("run", "claim_agents:asks", "action=deploy 1.2", "--name", "release") as first:
        listed: list[Any] = []

        def is_asked() -> bool:
            listed[:] = document(shells.run("approvals", "--json"))["approvals"]
            return bool(listed)

        wait_until(is_asked, timeout_s=_PATIENCE_S, message="the question")
        (record,) = listed
        assert (record["action"], record["details"]) == ("deploy 1.2", '{"to": "prod"}')
        refused(shells.run("approve", "nothing"), 2, "no approval 'nothing'")
        told = shells.run("approve", record["id"][-6:], "--reason", "as agreed")
        assert told.returncode == 0, told.stderr
        assert "approved" in told.stdout
        assert first.wait() == 0, first.text
        assert "as agreed" in first.text
    late = shells.run("deny", record["id"])
    assert late.returncode != 0
    assert "is not open any more: it was approved" in late.stderr
    with shells.terminal("run", "claim_agents:asks", "action=rm all", "--name", "removal") as second:
        wait_until(is_asked, timeout_s=_PATIENCE_S)
        denied = document(shells.run("deny", listed[0]["id"], "--reason", "never", "--json"))
        assert (denied["decision"], denied["reason"]) == ("denied", "never")
        assert second.wait() == 1, second.text
        assert "never" in second.text
    with shells.terminal("run", "claim_agents:asks", "action=wait", "--name", "stopped") as third:
        wait_until(is_asked, timeout_s=_PATIENCE_S)
        turn = shells.look(lambda records: records.find("stopped").id)
        assert shells.run("cancel", turn).returncode == 0
        assert third.wait() == 130
    late = shells.run("approve", listed[0]["id"])
    assert (late.returncode != 0, "it was cancelled" in late.stderr) == (True, True), late.stderr
    decisions = [item["decision"] for item in document(shells.run("approvals", "--all", "--json"))["approvals"]]
    assert decisions == ["approved", "denied", "cancelled"]


def test_sessions_are_listed_and_told_turn_by_turn(shells: Shells) -> None:
    for number in (1, 2):
        words = ("run", "shell_agents:quick", f"a={number}", "--session", "talk", "--name", f"turn {number}")
        assert shells.run(*words).returncode == 0
    failed = shells.run("run", "shell_agents:quick", "--session", "talk", "--name", "turn 3")
    assert failed.returncode == 2, failed.stderr  # an argument is missing
    sessions = {item["id"]: item for item in document(shells.run("sessions", "--json"))["sessions"]}
    assert (sessions["talk"]["turns"], sessions["talk"]["active"]) == (3, "")
    lines = shells.run("history", "talk").stdout.splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["turn 1", "turn 2", "turn 3"]
    refused(shells.run("history", "nobody"), 2, "no session 'nobody'")
    assert [turn["outcome"] for turn in document(shells.run("history", "talk", "--json"))["turns"]] == [
        "succeeded",
        "succeeded",
        "failed",
    ]
