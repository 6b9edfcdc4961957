"""`remit run`: what it shows, what it returns, and what a Ctrl-C does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remit.agents.client import ClientSession
from remit.coordinator import CancelReceipt
from remit.coordinator.transaction import Settings
from remit.testing.wait import wait_until


def strike(command: Any, number: int, *, after: threading.Event) -> threading.Thread:
    """Send a signal to this process once an agent has got somewhere."""

    def send() -> None:
        assert after.wait(20)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def swarm(folder: Path, text: str) -> str:
    path = folder / "swarm.yaml"
    path.write_text(text)
    return str(path)


COUNT = """
version: 1
name: count
agents:
  echo: {command: [echo, "{word}"]}
  no: {command: ["false"]}
runs:
"""


def test_the_result_of_one_agent_is_printed(command: Any) -> None:
    result = command("run", command.target("add"), "a=2", "b=40")
    assert result.exit_code == 0, result.output
    assert "\n42\n" in result.stdout
    assert "succeeded" in result.stdout.splitlines()[-1]


def test_arguments_may_be_one_json_mapping(command: Any) -> None:
    document = command.json("run", command.target("add"), "--args", '{"a": 1}')
    assert document["result"] == 2
    assert document["outcome"] == "succeeded"
    assert [node["kind"] for node in document["tree"]["nodes"]] == ["turn", "run"]


def test_json_is_the_only_thing_on_stdout(command: Any) -> None:
    result = command("run", command.target("talk"), "--json")
    assert json.loads(result.stdout)["outcome"] == "succeeded"


def test_a_swarm_is_one_turn_and_what_comes_after_waits(command: Any, tmp_path: Path) -> None:
    file = swarm(
        tmp_path,
        COUNT
        + "  - {name: say, agent: echo, each: [a, b, c], with: {word: '{item}'}}\n"
        + "  - {name: last, agent: echo, after: say, with: {word: end}}\n",
    )
    document = command.json("run", file)
    assert document["outcome"] == "succeeded"
    nodes = {node["name"]: node for node in document["tree"]["nodes"]}
    assert set(nodes) == {"count", "say[a]", "say[b]", "say[c]", "last"}
    assert nodes["last"]["started_at"] >= max(nodes[f"say[{word}]"]["ended_at"] for word in "abc")
    assert command.system.calls.count("delegate") == 1, "one batch, all or nothing"


def test_a_failed_run_is_listed_with_its_reason_and_what_it_blocked_says_so(command: Any, tmp_path: Path) -> None:
    file = swarm(
        tmp_path,
        COUNT + "  - {name: bad, agent: 'no'}\n  - {name: last, agent: echo, after: bad, with: {word: end}}\n",
    )
    result = command("run", file)
    assert result.exit_code == 1
    assert "bad" in result.stdout
    assert "exit status 1" in result.stdout or "status 1" in result.stdout, result.stdout
    assert "remit logs run_" in result.stdout
    assert "blocked" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("(1 blocked, 1 failed)"), result.stdout


def test_on_failure_stop_cancels_what_still_runs(command: Any, tmp_path: Path) -> None:
    file = swarm(
        tmp_path,
        "version: 1\nname: stop\non_failure: stop\nagents:\n"
        f"  wait: {{python: '{command.target('wait')}'}}\n  fail: {{python: '{command.target('fail')}'}}\n"
        "runs:\n  - {name: long, agent: wait}\n  - {name: bad, agent: fail}\n",
    )
    document = command.json("run", file, status=1)
    runs = {run["name"]: run["outcome"] for run in document["runs"]}
    assert runs == {"long": "cancelled", "bad": "failed"}
    causes = {node["name"]: node["cause"] for node in document["tree"]["nodes"]}
    assert causes["long"]["kind"] == "parent_failed"
    assert "bad did not succeed" in causes["long"]["reason"]


def test_a_deadline_exits_as_timeout_does(command: Any) -> None:
    result = command("run", command.target("hurry"), "--deadline", "0.2")
    assert result.exit_code == 124, result.output
    assert "timed_out" in result.stdout


@pytest.mark.requirement("A21")
@pytest.mark.field_report("M13")
@pytest.mark.field_report("D8")
def test_ctrl_c_cancels_the_whole_tree_and_ends_with_a_receipt(command: Any) -> None:
    thread = strike(command, signal.SIGINT, after=command.agents.started)
    result = command("run", command.target("parent"), "--json")
    thread.join()
    assert result.exit_code == 130, result.output
    document = json.loads(result.stdout)
    assert document["outcome"] == "cancelled"
    receipt = document["receipt"]
    assert receipt["accepted"]
    assert receipt["quiet"]
    assert receipt["cause"]["kind"] == "user_interrupt"
    assert (receipt["cause"]["surface"], receipt["cause"]["reason"]) == ("cli", "Ctrl-C")
    assert {node["cause"]["request_id"] for node in document["tree"]["nodes"]} == {receipt["request_id"]}
    assert "once more kills" in result.stderr


def test_the_receipt_after_ctrl_c_is_told_in_words(command: Any) -> None:
    thread = strike(command, signal.SIGINT, after=command.agents.started)
    result = command("run", command.target("wait"))
    thread.join()
    assert result.exit_code == 130, result.output
    assert "accepted: 1 run told to stop" in result.stdout
    assert "user_interrupt through cli: Ctrl-C" in result.stdout
    assert "quiet      after" in result.stdout
    assert "0 stopped, 0 left" in result.stdout


def test_sigterm_stops_as_one_ctrl_c_does(command: Any) -> None:
    thread = strike(command, signal.SIGTERM, after=command.agents.started)
    document = command.json("run", command.target("wait"), status=130)
    thread.join()
    assert document["receipt"]["cause"]["reason"] == "SIGTERM"


def test_a_second_ctrl_c_kills_what_will_not_stop(command: Any) -> None:
    first = strike(command, signal.SIGINT, after=command.agents.started)
    second = strike(command, signal.SIGINT, after=command.agents.stopping)
    result = command("run", command.target("deaf"))
    first.join()
    second.join()
    assert result.exit_code == 130, result.output
    assert "Ctrl-C: killing what is left" in result.stdout
    kills = [r.data for r in command.system.journal.reader().read(kinds=["cancel_requested"])]
    assert len(kills) == 2


@pytest.mark.requirement("D20")
@pytest.mark.requirement("B5")
@pytest.mark.field_report("M9")
def test_a_cancel_from_a_second_shell_is_no_error_in_either(command: Any) -> None:
    receipts: list[CancelReceipt] = []

    async def other_shell() -> None:
        async with command.system.coordinator(surface="cli") as coordinator:
            (turn,) = await coordinator.turns()
            receipt = await coordinator.cancel(turn.id, "wrong folder")
            receipts.append(await receipt.quiet())

    def in_between() -> None:
        assert command.agents.started.wait(20)
        asyncio.run(other_shell())

    thread = threading.Thread(target=in_between)
    thread.start()
    result = command("run", command.target("parent"))
    thread.join()
    assert result.exit_code == 130, result.output
    assert "user_interrupt through cli: wrong folder" in result.stdout.splitlines()[-1]
    assert "(3 cancelled)" in result.stdout.splitlines()[-1]
    assert "Traceback" not in result.output
    assert (receipts[0].is_quiet, dict(receipts[0].runs)) == (True, {"cancelled": 3})


def test_a_detached_run_goes_on_and_says_how_to_look(command: Any) -> None:
    result = command("run", command.target("wait"), "--detach")
    assert result.exit_code == 0, result.output
    turn = result.stdout.split()[0]
    assert f"remit tree {turn}" in result.stdout
    assert f"remit cancel {turn}" in result.stdout
    assert command.agents.started.wait(20)
    assert command.json("tree", turn)["nodes"][1]["outcome"] is None
    assert command("cancel", turn).exit_code == 0


def test_a_busy_session_is_refused_and_the_running_turn_left_alone(command: Any) -> None:
    command("run", command.target("wait"), "--session", "s1", "--detach")
    result = command("run", command.target("add"), "a=1", "--session", "s1")
    assert result.exit_code == 1
    assert "(session_busy)" in result.stderr
    assert command.json("ps")["turns"][0]["outcome"] is None


@pytest.mark.requirement("C1")
def test_a_newer_turn_may_interrupt_its_session(command: Any) -> None:
    command("run", command.target("wait"), "--session", "s1", "--detach")
    assert command.agents.started.wait(20)
    assert command("run", command.target("add"), "a=1", "--session", "s1", "--busy", "interrupt").exit_code == 0
    first = command.json("ps")["turns"][0]
    assert (first["outcome"], first["cause"]["kind"]) == ("cancelled", "user_interrupt")


def test_a_result_that_is_too_large_is_a_clear_failure(make_command: Callable[..., Any]) -> None:
    command = make_command(settings=Settings(max_result_bytes=1000))
    result = command("run", command.target("large"))
    assert result.exit_code == 1
    assert "too large" in result.stdout or "bytes" in result.stdout, result.stdout
    assert "Traceback" not in result.stdout


def test_contact_that_is_lost_for_good_is_said_and_ends_the_command(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = ClientSession.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "give_up_s", 0.2)
    links: list[Any] = []
    link = command.system.link

    def remembered() -> Any:
        links.append(link())
        return links[-1]

    def cut() -> None:
        wait_until(lambda: "finish_turn" in command.system.calls)
        links[0].is_cut = True

    monkeypatch.setattr(command.system, "link", remembered)
    thread = threading.Thread(target=cut)
    thread.start()
    result = command("run", command.target("wait"))
    thread.join()
    assert result.exit_code == 1
    assert "contact was lost: the coordinator has not answered" in result.stdout
    assert "Traceback" not in result.output
