"""`remit approvals`, `approve`, `deny`, `sessions` and `history`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.coordinator import Limits
from remit.core import Outcome
from tests.cli.runner import invoke


@agent
async def ask(ctx: RunContext, action: str = "deploy prod") -> str:
    return (await ctx.approve(action, {"to": "prod"})).by


@agent
async def fail(ctx: RunContext) -> None:
    raise ValueError("no bread")


def until_asked(command: Any) -> dict[str, Any]:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        found = command.json("approvals")["approvals"]
        if found:
            record: dict[str, Any] = found[0]
            return record
        time.sleep(0.01)
    raise AssertionError("nobody asked")


async def story(command: Any, *answers: tuple[str, ...]) -> list[Any]:
    """Let a run ask; answer from other processes, as it were; return its outcome and what they printed."""
    async with command.system.coordinator() as coordinator, coordinator.turn("release", session="s1") as turn:
        run = await turn.delegate(ask)
        record = await asyncio.to_thread(until_asked, command)
        said: list[Any] = []
        for verb, *rest in answers:
            said.append(await asyncio.to_thread(command, verb, record["id"][-8:], *rest))
            await run.wait()
        return [await run.wait(), *said]


def test_what_waits_for_approval_is_listed_with_its_path(command: Any) -> None:
    assert command("approvals").stdout == f"nothing waits for approval in {command.workspace}\n"

    async def look() -> None:
        async with command.system.coordinator() as coordinator, coordinator.turn("release") as turn:
            run = await turn.delegate(ask)
            record = await asyncio.to_thread(until_asked, command)
            lines = (await asyncio.to_thread(command, "approvals")).stdout.splitlines()
            assert lines[0].startswith(f"{record['id']}  deploy prod  waits ")
            assert lines[1:] == [f"  asked by release > ask ({run.id})", '  {"to": "prod"}']
            tree = (await asyncio.to_thread(command, "tree")).stdout
            assert f"waiting for approval of deploy prod ({record['id']})" in tree
            await coordinator.deny(record["id"])

    asyncio.run(look())


@pytest.mark.parametrize(
    ("verb", "outcome", "word"), [("approve", Outcome.SUCCEEDED, "approved"), ("deny", Outcome.FAILED, "denied")]
)
def test_an_answer_from_another_shell_reaches_the_run(command: Any, verb: str, outcome: Outcome, word: str) -> None:
    ended, said = asyncio.run(story(command, (verb, "--reason", "as agreed")))
    assert said.exit_code == 0, said.output
    assert f"deploy prod  {word} by " in said.stdout
    assert said.stdout.splitlines()[0].endswith(": as agreed")
    assert ended is outcome
    (record,) = command.json("approvals", "--all")["approvals"]
    assert (record["decision"], record["surface"], record["reason"]) == (word, "cli", "as agreed")
    assert command.json("approvals")["approvals"] == []


@pytest.mark.requirement("B9")
@pytest.mark.field_report("H4")
def test_a_late_answer_is_refused_with_a_sentence(command: Any) -> None:
    _, first, late = asyncio.run(story(command, ("deny", "--reason", "no"), ("approve",)))
    assert first.exit_code == 0
    assert (late.exit_code, late.stdout) == (1, "")
    assert "is not open any more: it was denied by " in late.stderr
    assert late.stderr.endswith("nothing was changed (approval_settled)\n")
    assert command.json("approvals", "--all")["approvals"][0]["decision"] == "denied"


def test_an_approval_that_is_not_there_is_not_found(command: Any) -> None:
    for verb in ("approve", "deny"):
        result = command(verb, "approval_none")
        assert (result.exit_code, "remit approvals" in result.stderr) == (2, True)


def test_a_variable_that_was_never_filled_in_answers_nothing(command: Any) -> None:
    async def one() -> None:
        async with command.system.coordinator() as coordinator, coordinator.turn("t") as turn:
            run = await turn.delegate(ask)
            while not await coordinator.approvals():
                await asyncio.sleep(0.005)
            for verb in ("approve", "deny"):
                empty = await asyncio.to_thread(command, verb, "")
                assert (empty.exit_code, "the id is empty" in empty.stderr) == (2, True), empty.stderr
            assert len(await coordinator.approvals()) == 1
            await run.cancel()

    asyncio.run(one())


def test_a_part_of_an_id_that_means_several_is_refused_and_answers_are_one_document(command: Any) -> None:
    async def two() -> None:
        async with command.system.coordinator() as coordinator, coordinator.turn("t") as turn:
            runs = await turn.delegate_many(ask, [{}, {}])
            # Where the command looks: the coordinator knows of them before they are on the disk.
            while len((await asyncio.to_thread(command.json, "approvals"))["approvals"]) < 2:
                await asyncio.sleep(0.005)
            several = await asyncio.to_thread(command, "approve", "approval_")
            assert several.exit_code == 2
            assert "may mean 2 approvals" in several.stderr
            for record in await coordinator.approvals():
                document = await asyncio.to_thread(command.json, "approve", record.id)
                assert document["decision"] == "approved"
            await turn.gather(*runs)

    asyncio.run(two())


def test_an_answer_that_nobody_waits_for_is_refused(command: Any) -> None:
    async def leave() -> None:
        coordinator = command.system.coordinator()
        await asyncio.to_thread(coordinator.connect)
        turn = coordinator.turn("t", on_disconnect="continue")
        await turn.begin()
        await turn.delegate(ask)
        await asyncio.to_thread(until_asked, command)
        await asyncio.to_thread(coordinator.close)

    asyncio.run(leave())
    command.system.journal.close()
    assert command("approvals").stdout.startswith("no coordinator is at work here")
    result = command("approve", "approval_")
    assert result.exit_code == 2
    assert "nobody waits for this answer" in result.stderr


@pytest.mark.requirement("B30")
def test_sessions_and_history_tell_how_turns_ended(command: Any) -> None:
    assert command("sessions").stdout == f"no session in {command.workspace} yet\n"

    async def talk() -> str:
        async with command.system.coordinator() as coordinator:
            async with coordinator.turn("first", session="s1", session_limits=Limits(tokens=100)) as turn:
                turn.spend(tokens=7)
                await (await turn.delegate(fail)).wait()
            holder = coordinator.turn("second", session="s1")
            await holder.begin()
            await holder.delegate(ask)
            await asyncio.to_thread(until_asked, command)
            assert "at work" in (await asyncio.to_thread(command, "sessions")).stdout
            await coordinator.cancel("s1", "changed my mind")
            await holder.finish("cancelled")
            return str(holder.id)

    second = asyncio.run(talk())
    (line,) = command("sessions").stdout.splitlines()
    assert line.startswith("s1  2 turns, last cancelled, 7 of 100 tokens, begun ")
    lines = command("history", "s1").stdout.splitlines()
    assert lines[0].startswith("first  succeeded, ")
    assert "7 tokens" in lines[0]
    assert lines[1] == "  fail failed: no bread"
    assert lines[2].startswith("second  cancelled at step 1 of 1 (ask), user_interrupt through python: changed my mind")
    assert lines[2].endswith(second)
    document = command.json("history", "s1")
    assert [turn["complete"] for turn in document["turns"]] == [False, False]
    assert document["turns"][1]["steps"] == 1
    assert command.json("sessions")["sessions"][0]["max_tokens"] == 100
    unknown = command("history", "nobody's")
    assert (unknown.exit_code, "remit sessions" in unknown.stderr) == (2, True)


@pytest.mark.requirement("D1")
def test_a_detached_swarm_stops_at_its_first_failure_all_the_same(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "swarm.yaml"
    path.write_text(
        "version: 1\nname: stop\non_failure: stop\nagents:\n"
        f"  wait: {{python: '{command.target('wait')}'}}\n  fail: {{python: '{command.target('fail')}'}}\n"
        "runs:\n  - {name: long, agent: wait}\n  - {name: bad, agent: fail}\n"
    )
    result = command("run", str(path), "--detach")
    assert result.exit_code == 0, result.output
    limit = time.monotonic() + 30
    while command.json("ps")["turns"][0]["outcome"] is None:
        assert time.monotonic() < limit, command("tree").stdout
        time.sleep(0.01)
    outcomes = {node["name"]: node["outcome"] for node in command.json("tree")["nodes"]}
    assert outcomes == {"stop": "failed", "long": "cancelled", "bad": "failed"}


def test_run_says_what_is_answered_to_requests_for_approval(command: Any, tmp_path: Path) -> None:
    (Path.cwd() / "asking.py").write_text(
        "from remit.agents import agent\n\n\n@agent\nasync def ask(ctx):\n    return (await ctx.approve('a')).by\n"
    )
    assert command("run", "asking:ask", "--approvals", "auto").stdout.splitlines()[-2] == "policy"
    denied = command("run", "asking:ask", "--approvals", "deny", "--plain")
    assert denied.exit_code == 1
    assert "denied by policy" in denied.stdout
    wrong = command("run", "asking:ask", "--approvals", "maybe")
    assert (wrong.exit_code, "approvals must be one of" in wrong.stderr) == (2, True)
    del sys.modules["asking"]


def test_a_swarm_file_says_what_is_answered_and_the_command_line_has_the_last_word(
    command: Any, tmp_path: Path
) -> None:
    (Path.cwd() / "asking_swarm.py").write_text(
        "from remit.agents import agent\n\n\n@agent\nasync def ask(ctx, what):\n"
        "    return (await ctx.approve(what)).by\n"
    )
    path = tmp_path / "swarm.yaml"
    path.write_text(
        "approvals:\n  - {action: 'git push*', answer: deny, reason: not from here}\n"
        "  - {action: 'git *', answer: approve}\n"
        "agents:\n  ask: {python: 'asking_swarm:ask'}\nruns:\n"
        "  - {name: status, agent: ask, with: {what: git status}}\n"
        "  - {name: push, agent: ask, with: {what: git push origin}}\n"
        "  - {name: narrow, agent: ask, with: {what: git status}, approvals: deny}\n"
    )
    command("run", str(path), "--plain")
    nodes = {node["name"]: node for node in command.json("tree")["nodes"]}
    assert {name: node["outcome"] for name, node in nodes.items() if name in ("status", "push", "narrow")} == {
        "status": "succeeded",
        "push": "failed",
        "narrow": "failed",
    }
    assert "not from here" in nodes["push"]["error"]
    command("run", str(path), "--plain", "--approvals", "auto")
    outcomes = {node["name"]: node["outcome"] for node in command.json("tree")["nodes"]}
    # The word of a run narrows what the turn allows, whoever said that.
    assert (outcomes["push"], outcomes["narrow"]) == ("succeeded", "failed")
    del sys.modules["asking_swarm"]


def test_a_swarm_file_can_be_checked_without_being_run(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "swarm.yaml"
    path.write_text(
        f"agents:\n  add: {{python: '{command.target('add')}'}}\n  no: {{command: ['false']}}\n"
        "runs:\n  - {name: a, agent: add, each: [1, 2], with: {a: '{item}'}, approvals: auto}\n"
    )
    good = command("validate", str(path))
    assert (good.exit_code, good.stdout) == (0, f"{path} holds: 2 runs (2 of add)\nagent 'no' is used by no run\n")
    document = command.json("validate", str(path))
    assert (document["name"], document["runs"]) == ("swarm", ["a[1]", "a[2]"])
    path.write_text(path.read_text().replace("auto", "autos"))
    bad = command("validate", str(path))
    assert bad.exit_code == 2
    assert "swarm.yaml:5: runs[0].approvals: must be 'ask', 'auto', 'deny' or a list of rules" in bad.stderr
    for target, told in ((command.target("add"), "is no swarm file"), ("nothing.yaml", "cannot be read")):
        wrong = command("validate", target)
        assert (wrong.exit_code, told in wrong.stderr) == (2, True), wrong.stderr
    assert command.json("ps", "--all")["turns"] == []


def test_verbs_say_what_they_are_for() -> None:
    for verb in ("approvals", "approve", "deny", "sessions", "history"):
        text = invoke([verb, "--help"]).stdout
        assert "--json" in text
