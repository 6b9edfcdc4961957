"""`remit cancel`: what it means, what it answers, and when there is nothing to stop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remit.coordinator.life import journal_path
from remit.journal import SqliteJournal


@pytest.fixture
def running(command: Any) -> str:
    """Start a parent with two children in session `s1`; return the turn's id."""
    command("run", command.target("parent"), "--detach", "--session", "s1")
    assert command.agents.started.wait(20)
    turn: str = command.json("ps")["turns"][0]["id"]
    return turn


@pytest.mark.requirement("B5")
def test_the_answer_is_a_receipt_once_all_is_quiet(command: Any, running: str) -> None:
    result = command("cancel", running, "--reason", "wrong folder")
    assert result.exit_code == 0
    assert "runs told to stop" in result.stdout
    assert "user_interrupt through cli: wrong folder" in result.stdout
    assert "quiet      after" in result.stdout
    assert "cancelled" in result.stdout
    nodes = command.json("tree", running)["nodes"]
    assert {node["outcome"] for node in nodes} == {"cancelled"}
    assert {node["cause"]["origin"] for node in nodes} == {running}


def test_the_receipt_as_json(command: Any, running: str) -> None:
    receipt = command.json("cancel", running)
    assert (receipt["accepted"], receipt["quiet"], receipt["target"]) == (True, True, running)
    assert sum(receipt["runs"].values()) == receipt["live"]
    assert receipt["processes_left"] == []


@pytest.mark.field_report("I6")
def test_a_coordinator_that_is_being_restarted_is_waited_for(command: Any, running: str) -> None:
    command.system.crash_coordinator()
    again = threading.Timer(0.5, lambda: command.system.restart_coordinator(journal_of(command)))
    again.start()
    receipt = command.json("cancel", running)
    again.join()
    assert (receipt["accepted"], receipt["quiet"]) == (True, True)
    assert {node["outcome"] for node in command.json("tree", running)["nodes"]} == {"cancelled"}


def journal_of(command: Any) -> SqliteJournal:
    """Open the journal of a workspace again, as the next life does."""
    command.system.journal.close()
    return SqliteJournal.open(journal_path(command.workspace))


@pytest.mark.field_report("M1")
def test_a_session_can_be_named(command: Any, running: str) -> None:
    assert command.json("cancel", "s1")["accepted"]
    assert command.json("tree", running)["nodes"][0]["outcome"] == "cancelled"
    again = command("cancel", "s1")
    assert again.exit_code == 0
    assert "nothing to cancel" in again.stdout


@pytest.mark.field_report("M1")
def test_one_run_can_be_stopped_by_the_end_of_its_id_and_its_sibling_goes_on(command: Any) -> None:
    for _ in range(2):
        command("run", command.target("wait"), "--detach")
        assert command.agents.started.wait(20)
        command.agents.started.clear()
    first, second = (turn["id"] for turn in command.json("ps")["turns"])
    run = command.json("tree", first)["nodes"][1]["id"]
    assert command.json("cancel", run[-7:])["target"] == run
    assert command.json("tree", first)["nodes"][1]["outcome"] == "cancelled"
    assert command.json("tree", second)["nodes"][1]["outcome"] is None


@pytest.mark.requirement("B26")
@pytest.mark.requirement("A10")
@pytest.mark.field_report("E1")
def test_cancelling_what_has_ended_is_a_normal_answer_without_a_connection(command: Any) -> None:
    turn = command.json("run", command.target("add"), "a=1")["turn"]
    before = command.opened
    result = command("cancel", turn)
    assert result.exit_code == 0
    assert f"nothing to cancel: {turn} has ended: succeeded" in result.stdout
    assert command.json("cancel", turn)["accepted"] is False
    assert command.opened == before
    assert command.json("tree", turn)["nodes"][0]["outcome"] == "succeeded"


def test_a_dry_run_changes_nothing_and_names_what_would_stop(command: Any, running: str) -> None:
    result = command("cancel", running, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("would stop ")
    for node in command.json("tree", running)["nodes"]:
        assert node["outcome"] is None
        assert node["cause"] is None
    assert "cancel_requested" not in {record.kind for record in command.system.journal.reader().read()}


@pytest.mark.requirement("A15")
@pytest.mark.requirement("B6")
@pytest.mark.requirement("B18")
@pytest.mark.field_report("M2")
def test_what_is_not_quiet_in_time_is_said_and_the_exit_status_tells(command: Any) -> None:
    command("run", command.target("deaf"), "--detach")
    assert command.agents.started.wait(20)
    turn = command.json("ps")["turns"][0]["id"]
    result = command("cancel", turn, "--timeout", "0.1")
    assert result.exit_code == 1
    assert "NOT YET: 1 run still stopping" in result.stdout
    tree = command("tree", turn).stdout
    assert "cancelling, waiting for " in tree
    no_wait = command("cancel", turn, "--no-wait", "--kill")
    assert no_wait.exit_code == 0
    assert "quiet" not in no_wait.stdout


def test_an_unknown_target_is_a_usage_error(command: Any) -> None:
    result = command("cancel", "turn_none")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "(not_found)" in result.stderr
