"""Which git locks may be taken away after a kill, and how they and their users are found."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remit.processes import JobOutcome, JobResult, gitplaces
from remit.processes.aftermath import was_killed
from remit.processes.gitlocks import GitLock, GitUser, KilledTree, why_it_stays
from remit.processes.gitplaces import find_git_dirs, find_locks, git_users, may_have_git, take_away
from remit.testing.wait import wait_until

LOCK = GitLock(path="/w/.git/index.lock", git_dir="/w/.git", made_at=100.0, uid=7, identity=(1, 2, 3, 4))
TREE = KilledTree(started_at=90.0, is_empty=True)
HERE = GitUser(pid=4, name="git", git_dirs=("/w/.git",))


def stays(
    lock: GitLock = LOCK, tree: KilledTree | None = TREE, users: tuple[GitUser, ...] = (), *, is_claimed: bool = True
) -> str:
    return why_it_stays(lock, tree, users, is_claimed=is_claimed, uid=7)


# -- the rule ---------------------------------------------------------------------------


def test_a_lock_of_a_tree_that_is_proven_gone_may_go_where_we_hold_the_claim() -> None:
    assert stays() == ""
    # The time of a file is that of the kernel's last tick, so it may seem made before its maker began.
    assert stays(replace(LOCK, made_at=89.99)) == ""


@pytest.mark.parametrize(
    ("lock", "tree", "users", "is_claimed", "text"),
    [
        (LOCK, TREE, (), False, "without a claim"),
        (LOCK, None, (), True, "nobody knows whose"),
        (LOCK, KilledTree(started_at=0.0, is_empty=True), (), True, "nobody knows whose"),
        (LOCK, KilledTree(started_at=90.0, is_empty=False), (), True, "may be left"),
        (replace(LOCK, made_at=89.0), TREE, (), True, "older than the program"),
        (replace(LOCK, uid=8), TREE, (), True, "belongs to user 8"),
        (LOCK, TREE, (HERE,), True, r"git \(4\) is at work there"),
        (LOCK, TREE, (replace(HERE, git_dirs=None),), True, r"git \(4\) may be at work there"),
        (LOCK, TREE, (GitUser(pid=5, name="idea", locks=(LOCK.path,)),), True, r"idea \(5\) has it open"),
    ],
)
def test_each_doubt_alone_keeps_a_lock(
    lock: GitLock, tree: KilledTree | None, users: tuple[GitUser, ...], is_claimed: bool, text: str
) -> None:
    import re

    assert re.search(text, stays(lock, tree, users, is_claimed=is_claimed))


def test_a_git_elsewhere_is_no_doubt_and_one_in_a_worktree_is_for_what_is_shared_alone() -> None:
    assert stays(users=(GitUser(pid=4, name="git", git_dirs=("/other/.git", "/w/.git/index")),)) == ""
    sibling = GitUser(pid=4, name="git", git_dirs=("/w/.git/worktrees/a",), shared=("/w/.git",))
    other = "/w/.git/worktrees/b"
    assert stays(replace(LOCK, path=f"{other}/index.lock", git_dir=other), users=(sibling,)) == ""
    assert "at work" in stays(replace(LOCK, path="/w/.git/config.lock"), users=(sibling,))
    assert "at work" in stays(replace(LOCK, path=f"{other}/index.lock", git_dir=other), users=(HERE,))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"exit_code": 1}, False),
        ({"signal": signal.SIGTERM}, False),
        ({"signal": signal.SIGTERM, "signalled": (4, 5)}, False),
        ({"signal": signal.SIGKILL}, True),
        ({"signal": signal.SIGSEGV}, True),
        ({"exit_code": 137}, True),
        ({"signal": signal.SIGTERM, "escalated": (5,)}, True),
        ({"survivors": (5,)}, True),
        ({"outcome": JobOutcome.KEEPER_LOST}, True),
    ],
)
def test_a_place_is_looked_at_where_something_had_no_time_to_clean_up(fields: dict[str, Any], expected: bool) -> None:
    """Git takes its locks away on SIGTERM itself: what obeys costs nothing more."""
    result = JobResult(**{"job": "proc_1", "outcome": JobOutcome.CANCELLED, **fields})
    assert was_killed(result) is expected


# -- the disk ---------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    identity = ["-c", "user.name=ann", "-c", "user.email=ann@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a").write_text("1")
    git(folder, "add", "a")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def touched(path: Path, text: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_all_kinds_of_locks_are_found_in_worktrees_and_submodules_too(repository: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q", "-b", "main")
    git(inner, "commit", "-q", "--allow-empty", "-m", "one")
    git(repository, "submodule", "--quiet", "add", str(inner), "sub")
    git(repository, "worktree", "add", "-q", "tree")
    data = repository / ".git"
    top = ["index.lock", "HEAD.lock", "config.lock", "packed-refs.lock", "shallow.lock"]
    deep = ["refs/heads/main.lock", "refs/remotes/origin/x.lock", "objects/info/commit-graph.lock"]
    expected = {touched(data / name): str(data) for name in [*top, *deep]}
    touched(data / "refs/remotes/origin/HEAD", "ref: refs/remotes/origin/main\n")
    for own in (data / "worktrees/tree", data / "modules/sub"):
        expected[touched(own / "index.lock")] = str(own)
    expected[touched(data / "worktrees/tree/locked", "initializing\n")] = str(data)
    # None of git's: what people have locked, what hooks and logs are called, and links.
    git(repository, "worktree", "add", "-q", "kept")
    git(repository, "worktree", "lock", "--reason", "on a stick", "kept")
    touched(data / "hooks/x.lock")
    touched(data / "objects/ab/cd.lock")
    (data / "link.lock").symlink_to("index")
    for place in ("sub", "tree", "tree/deep/er", ".", "a"):
        assert find_git_dirs([str(repository / place)])
    dirs = find_git_dirs([str(repository / "tree")])
    assert dirs == (str(data / "worktrees/tree"), str(data))
    assert {lock.path: lock.git_dir for lock in find_locks(dirs)} == expected
    assert find_git_dirs([str(repository / "sub/x")]) == (str(data / "modules/sub"),)


def test_without_git_there_is_nothing_to_look_for(tmp_path: Path, repository: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    assert not may_have_git(str(plain))
    assert may_have_git(str(repository / "not/there"))
    assert may_have_git(str(repository / ".git/refs"))
    assert find_git_dirs([str(plain), "/"]) == ()
    touched(plain / ".git", "gitdir: ../nowhere\n")
    assert find_locks(find_git_dirs([str(plain)])) == ()
    touched(plain / ".git", "no such thing")
    assert find_git_dirs([str(plain)]) == ()


def test_a_repository_without_end_is_left_in_time(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gitplaces, "MAX_FOLDERS", 3)
    for number in range(10):
        touched(repository / f".git/refs/heads/{number}/x.lock")
    assert len(find_locks([str(repository / ".git")])) <= 3


def test_only_the_lock_that_was_found_is_taken_away(repository: Path) -> None:
    path = Path(touched(repository / ".git/index.lock"))
    (found,) = find_locks([str(repository / ".git")])
    path.unlink()
    assert not take_away(found)
    path.write_text("somebody else's")
    assert not take_away(found)
    assert path.exists()
    (now,) = find_locks([str(repository / ".git")])
    assert take_away(now)
    assert not path.exists()


# -- who lives --------------------------------------------------------------------------


@pytest.fixture
def committing(repository: Path) -> Generator[subprocess.Popen[bytes]]:
    """A living `git commit` that holds the index in its hook, started from elsewhere."""
    hook = repository / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\ntouch ready\nexec sleep 600\n")
    hook.chmod(0o755)
    (repository / "a").write_text("2")
    command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "two"]
    with subprocess.Popen(command, cwd="/", start_new_session=True) as process:
        wait_until((repository / "ready").exists)
        yield process
        os.killpg(process.pid, 9)


def test_a_living_git_is_seen_though_it_has_its_lock_not_open(
    repository: Path, committing: subprocess.Popen[bytes]
) -> None:
    locks = find_locks([str(repository / ".git")])
    assert [Path(lock.path).name for lock in locks] == ["index.lock"]
    users = {user.pid: user for user in git_users(locks)}
    assert users[committing.pid].git_dirs == (str(repository / ".git"),)
    assert "at work there" in why_it_stays(
        locks[0], KilledTree(started_at=1.0, is_empty=True), tuple(users.values()), is_claimed=True, uid=os.geteuid()
    )


def test_whoever_has_a_lock_open_is_seen_whatever_its_name(repository: Path) -> None:
    with open(touched(repository / ".git/config.lock"), "w"):
        (lock,) = find_locks([str(repository / ".git")])
        assert lock.path in {path for user in git_users([lock]) if user.pid == os.getpid() for path in user.locks}
    assert all(user.pid != os.getpid() for user in git_users([lock]))


@pytest.mark.parametrize("how", ["--git-dir", "--git-dir=", "GIT_DIR"])
def test_a_git_that_works_on_a_repository_from_afar_is_seen(repository: Path, how: str) -> None:
    data = str(repository / ".git")
    words = {"--git-dir": ["--git-dir", data], "--git-dir=": [f"--git-dir={data}"]}.get(how, [])
    environment = {**os.environ, **({"GIT_DIR": data} if how == "GIT_DIR" else {})}
    command = ["git", *words, "cat-file", "--batch"]
    with subprocess.Popen(command, cwd="/", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"HEAD\n")
        process.stdin.flush()
        process.stdout.readline()  # it is at work
        touched(repository / ".git/index.lock")
        (user,) = [user for user in git_users(find_locks([data])) if user.pid == process.pid]
        assert user.git_dirs == (data,)
        process.stdin.close()


def test_where_processes_cannot_be_looked_at_nobody_is_excluded(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lock,) = find_locks([str(repository / ".git")]) or find_locks([touched(repository / ".git/index.lock")[:-11]])
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd")
    (user,) = git_users([lock])
    assert user.git_dirs is None
