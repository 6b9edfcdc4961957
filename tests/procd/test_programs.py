"""The programs of a workspace as its coordinator sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from remit.agents.tooldesk import scope_of
from remit.coordinator.programs import Programs
from remit.locks import Area, Mode
from remit.processes.gitplaces import find_locks, git_users
from tests.agents.git_world import Repository
from tests.procd.live import LIMIT_S, Node, is_running, wait_for


@pytest.mark.requirement("A18", "B29")
def test_what_a_dead_owner_left_in_the_foreground_ends_and_the_background_goes_on(node: Node, tmp_path: Path) -> None:
    scope = scope_of(tmp_path)
    tree = node.tree(scope=scope)
    behind = node.run("sleep", "1000", scope=scope, background=True)
    foreign = node.run("sleep", "1000")
    assert Programs(tmp_path, state_dir=node.directory).end(node.run_id).gone
    wait_for(lambda: {one.pid for one in node.processes()} == {behind.pid, foreign.pid}, "the wrong ones live")
    result = node.client.wait(tree.job, timeout_s=LIMIT_S)
    assert result is not None
    assert result.cause is not None
    assert (result.outcome, result.cause["kind"], result.cause["origin"]) == ("cancelled", "parent_lost", node.run_id)
    views = {view.job: view.state for view in node.client.list(scope=scope)}
    assert views[behind.job] == "running"


def test_owners_are_those_whose_foreground_programs_of_this_workspace_run(node: Node, tmp_path: Path) -> None:
    scope = scope_of(tmp_path)
    programs = Programs(tmp_path, state_dir=node.directory)
    mine = node.run("sleep", "1000", scope=scope)
    node.run("sleep", "1000", scope=scope, run="", turn="turn_9")
    node.run("sleep", "1000", scope=scope, run="run_behind", background=True)
    node.run("sleep", "1000", scope=scope, run="", turn="")
    node.run("sleep", "1000", run="run_foreign")
    assert programs.owners() == {node.run_id, "turn_9"}
    node.client.stop(scope=scope, job=mine.job)
    assert programs.owners() == {"turn_9"}


@pytest.mark.requirement("C33")
def test_only_the_machine_that_holds_a_program_proves_its_end(node: Node, tmp_path: Path) -> None:
    """A daemon that knows nothing of a run says nothing of it; neither does one whose program still runs."""
    scope = scope_of(tmp_path)
    answer = node.run("sleep", "1000", scope=scope)
    elsewhere = Node()
    try:
        here = Programs(tmp_path, state_dir=node.directory)
        there = Programs(tmp_path, state_dir=elsewhere.directory)
        assert (here.gone([node.run_id]), there.gone([node.run_id])) == ({}, {})
        assert elsewhere.client.stop(scope=scope, job=answer.job).is_proven_gone is False
        assert is_running(answer.pid)
        node.client.stop(scope=scope, job=answer.job)
        assert here.gone([node.run_id]) == {node.run_id: frozenset({answer.pid})}
        assert there.gone([node.run_id]) == {}
    finally:
        elsewhere.close()


@pytest.mark.field_report("G14")
@pytest.mark.parametrize("is_claimed", [True, False])
def test_git_locks_of_a_program_whose_host_died_go_where_its_run_holds_the_claim(
    node: Node, tmp_path: Path, is_claimed: bool
) -> None:
    repository = Repository(tmp_path)
    repository.hold("pre-commit")
    commit = "git -c user.name=a -c user.email=a@b commit -qam x & "
    script = f"cd {tmp_path}; {commit} while [ ! -e .git/is-held ]; do sleep 0.01; done; kill -9 $!; kill -9 $$"
    node.run("sh", "-c", script, scope=scope_of(tmp_path))
    wait_for(lambda: repository.ready.exists() and not living_gits(repository), "git was not killed")
    assert repository.locks() == ["index.lock"]
    claimed = [Area(Mode.WRITE, ".git")] if is_claimed else [Area(Mode.WRITE, "src"), Area(Mode.READ, ".git")]
    swept = Programs(tmp_path, state_dir=node.directory).end(node.run_id, claimed)
    assert swept.gone
    lock = str(repository.data / "index.lock")
    if is_claimed:
        assert (swept.aftermath.removed, swept.aftermath.left, repository.locks()) == ((lock,), (), [])
    else:
        assert swept.aftermath.removed == ()
        assert [text.partition(": ")[0] for text in swept.aftermath.left] == [lock]


def living_gits(repository: Repository) -> bool:
    return any(user.git_dirs for user in git_users(find_locks([str(repository.data)])))


def test_where_nothing_was_ever_started_no_daemon_is(tmp_path: Path) -> None:
    programs = Programs(tmp_path, state_dir=tmp_path / "state")
    assert programs.end("run_1").gone
    assert programs.gone(["run_1"]) == {}
    assert programs.owners() == frozenset()
    programs.vouch()
    programs.release()
    assert not (tmp_path / "state").exists()
