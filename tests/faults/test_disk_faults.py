"""The disk itself fails at every write and every fsync of the journal, once and for good.

The loop is that of SQLite's own tests (https://www.sqlite.org/testing.html, section 3);
the faults are below it, in the C library, so its own handling of them is under test too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that lets the disk fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    source = Path(__file__).with_name("disk_faults.c")
    library = tmp_path_factory.mktemp("shim") / "disk_faults.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the shim cannot be compiled: {done.stderr}")
    return library


@pytest.mark.requirement("F14")
@pytest.mark.parametrize("existing", ["new", "existing"])
@pytest.mark.parametrize("mode", ["once", "forever"])
@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_disk_that_fails_breaks_no_promise_and_leaves_nothing_half_done(
    operation: str, mode: str, existing: str, shim: Path, tmp_path: Path, project_root: Path
) -> None:
    # In memory where there is such a place: hundreds of real fsyncs would show nothing more.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="remit-", dir=memory if memory.is_dir() else tmp_path) as folder:
        found = run_child(Path(folder), operation, mode, existing, shim, project_root)
    # Some faults hit what may fail, such as the folding of the log at the end.
    assert found["faults"] >= found["told"] >= 4
    for sentence in found["sentences"]:
        assert "'PATH'" in sentence
        assert sentence.partition("; ")[2], "it says what to do"


def run_child(folder: Path, operation: str, mode: str, existing: str, shim: Path, root: Path) -> dict[str, Any]:
    """Let the disk of another process fail; return what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.disk_child", str(folder), operation, mode, existing],
        cwd=root,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
