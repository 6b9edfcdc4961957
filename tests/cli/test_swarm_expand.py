import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from remit.cli.swarm import expand as expand_module
from remit.cli.swarm.expand import expand
from remit.cli.swarm.model import EachSpec
from remit.core.errors import SwarmFileError
from remit.testing import wait_until


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a workspace with files of all kinds."""
    root = tmp_path / "workspace"
    for name in (
        "a.py",
        "b.txt",
        "src/c.py",
        "src/deep/er/d.py",
        "src/deep/d_test.py",
        "src/.hidden/e.py",
        "src/.f.py",
        "node_modules/x/g.py",
        ".venv/h.py",
        ".git/i.py",
        ".remit/j.py",
        ".github/k.py",
        "docs/l.md",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def found(root: Path, **fields: object) -> list[object]:
    return list(expand(EachSpec.model_validate(fields), root))


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("*.py", ["a.py"]),
        ("./*.py", ["a.py"]),
        ("**/*.py", ["a.py", "src/c.py", "src/deep/d_test.py", "src/deep/er/d.py"]),
        ("src/**/*.py", ["src/c.py", "src/deep/d_test.py", "src/deep/er/d.py"]),
        ("src/**", ["src/c.py", "src/deep/d_test.py", "src/deep/er/d.py"]),
        ("**/**/er/**/*.py", ["src/deep/er/d.py"]),
        ("src/*/d_*.py", ["src/deep/d_test.py"]),
        ("?.py", ["a.py"]),
        ("[!b].*", ["a.py"]),
        ("src/c.py", ["src/c.py"]),
        ("src/.*.py", ["src/.f.py"]),
        ("src/.hidden/*", ["src/.hidden/e.py"]),
        (".*/*.py", [".github/k.py"]),
        (".git/*", [".git/i.py"]),
        ("node_modules/**/*.py", ["node_modules/x/g.py"]),
        ("src", []),
        ("*/", ["docs", "src"]),
        ("src/**/", ["src/deep", "src/deep/er"]),
        ("nothing/*", []),
        (["*.txt", "*.py", "a.*"], ["a.py", "b.txt"]),
    ],
)
def test_a_glob_finds_files_sorted_and_once(tree: Path, glob: object, files: list[str]) -> None:
    assert found(tree, glob=glob) == files


@pytest.mark.parametrize(
    ("exclude", "files"),
    [
        ("*_test.py", ["a.py", "src/c.py", "src/deep/er/d.py"]),
        ("deep", ["a.py", "src/c.py"]),
        ("deep/", ["a.py", "src/c.py"]),
        ("src/deep", ["a.py", "src/c.py"]),
        ("src/**", ["a.py"]),
        ("src/**/*.py", ["a.py"]),
        ("./a.py", ["src/c.py", "src/deep/d_test.py", "src/deep/er/d.py"]),
        (["src", "a.py"], []),
    ],
)
def test_what_is_excluded_is_left_out_with_all_below(tree: Path, exclude: object, files: list[str]) -> None:
    assert found(tree, glob="**/*.py", exclude=exclude) == files


def test_no_link_leads_out_of_the_workspace_or_round_in_circles(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("")
    (tree / "out").symlink_to(outside)
    (tree / "secret.py").symlink_to(outside / "secret.py")
    (tree / "src" / "round").symlink_to(tree)
    (tree / "docs" / "same.py").symlink_to(tree / "a.py")
    (tree / "gone.py").symlink_to(tree / "nowhere.py")
    assert found(tree, glob="**/*.py") == ["a.py", "docs/same.py", "src/c.py", "src/deep/d_test.py", "src/deep/er/d.py"]
    assert found(tree, glob="out/*.py") == []
    assert found(tree, glob="src/round/*.py") == ["src/round/a.py"]


def test_a_name_that_is_no_text_is_told_and_can_be_excluded(tree: Path) -> None:
    try:
        (Path(os.fsdecode(os.fsencode(tree) + b"/odd\xff.py"))).write_text("")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(SwarmFileError, match="is not UTF-8; rename it"):
        found(tree, glob="*.py")
    assert found(tree, glob="*.py", exclude="odd*") == ["a.py"]


def test_a_folder_that_cannot_be_looked_into_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def guarded(path: str) -> object:
        if path.endswith("docs"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", guarded)  # rights would not stop the superuser
        with pytest.raises(SwarmFileError, match="cannot look into 'docs': Permission denied; 'exclude' can leave it"):
            found(tree, glob="**/*.py")
        assert found(tree, glob="*.py", exclude="docs") == ["a.py"]


def test_a_list_stays_as_it_is(tmp_path: Path) -> None:
    values = ["b", "a", "b", 3, None, {"k": [1]}]
    assert found(tmp_path, list=values) == values
    assert found(tmp_path, list=values, limit=2) == ["b", "a"]
    assert found(tmp_path, list=[]) == []


def test_a_limit_takes_the_first_of_the_sorted(tree: Path) -> None:
    assert found(tree, glob="**/*.py", limit=2) == ["a.py", "src/c.py"]


def test_more_items_than_anybody_can_want_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_module, "MAX_ITEMS", 3)
    assert len(found(tmp_path, list=[1, 2, 3])) == 3
    assert len(found(tmp_path, list=[1, 2, 3, 4], limit=3)) == 3
    with pytest.raises(SwarmFileError, match=r"each\.list: stands for 4 items and may for 3; set 'limit'"):
        found(tmp_path, list=[1, 2, 3, 4])


def is_running(pid: int) -> bool:
    """Tell whether a process runs; an ended one that its new parent has not collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(root: Path, script: str, *arguments: str, limit: int | None = None) -> list[object]:
    argv = [sys.executable, "-c", script, *arguments]
    return found(root, lines=argv, **({} if limit is None else {"limit": limit}))


def test_lines_are_what_a_command_prints_in_the_workspace(tree: Path) -> None:
    assert lines(tree, "import os; print(*sorted(os.listdir('docs')), 'x y', '', ' z ', sep='\\n')") == [
        "l.md",
        "x y",
        " z ",
    ]
    assert lines(tree, "import sys; sys.stdout.buffer.write(b'a\\r\\nb')") == ["a", "b"]
    assert lines(tree, "print(1); print(2)", limit=1) == ["1"]
    assert lines(tree, "pass") == []


def test_no_shell_reads_the_command_of_lines_and_its_input_is_empty(tree: Path) -> None:
    script = "import sys; print(sys.argv[1]); print(repr(sys.stdin.read()))"
    assert lines(tree, script, "$(echo hi); {x}") == ["$(echo hi); {x}", "''"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; print('out'); sys.exit('no such\\n  branch')", "ended with status 1: no such branch"),
        ("import sys; sys.exit(3)", "ended with status 3$"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "printed what is not UTF-8 text"),
    ],
)
def test_a_command_that_fails_is_told_with_what_it_said(tree: Path, script: str, told: str) -> None:
    with pytest.raises(SwarmFileError, match=r"each\.lines: .*" + told):
        lines(tree, script)


def test_a_command_that_is_not_there_is_told(tree: Path) -> None:
    with pytest.raises(SwarmFileError, match=r"each\.lines: 'no-such-program-here' cannot be started: No such file"):
        found(tree, lines=["no-such-program-here"])


def test_a_command_that_prints_without_end_is_stopped(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_module, "_MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(SwarmFileError, match="printed more than 1,000 bytes and was stopped"):
        lines(tree, "while True: print('y' * 100, flush=True)")


def test_a_command_that_does_not_end_is_stopped_with_all_it_started(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expand_module, "LINES_TIMEOUT_S", 1.0)
    # The command itself ends; what it started holds its output open.
    with pytest.raises(SwarmFileError, match="did not end within 1 seconds and was stopped"):
        found(tree, lines=["/bin/sh", "-c", "sleep 600 & echo $$ $! > pids"])
    pids = [int(pid) for pid in (tree / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), message="the command or what it started is left")


def test_a_command_that_only_closes_its_output_is_waited_for_and_stopped(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expand_module, "LINES_TIMEOUT_S", 0.5)
    with pytest.raises(SwarmFileError, match="did not end within"):
        lines(tree, "import os, time; os.close(1); os.close(2); time.sleep(600)")


def test_an_interrupt_while_a_command_runs_leaves_nothing_behind(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], program: str) -> tuple[bytes, bytes, int]:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(expand_module, "_outputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lines(tree, "import time; time.sleep(600)")
    assert started[0].returncode == -9
