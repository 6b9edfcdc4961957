"""A PostgreSQL server of the tests' own, where one is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Server", "binaries"]


def binaries() -> Path | None:
    """Return the folder of the newest installed server's programs, or None."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if debian:
        return debian[-1].parent
    found = shutil.which("initdb")
    return None if found is None else Path(found).parent


class Server:
    """One server on a Unix socket, in a folder of its own; each journal gets a schema."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="remit-pg-", dir="/tmp"))
        self._number = 0
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            # The server refuses to run as the superuser.
            owner = pwd.getpwnam("postgres")
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            self._user = {"user": owner.pw_uid, "group": owner.pw_gid}
        self._run("initdb", "-D", str(self._data), "-U", "remit", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *words],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            # To a file: the server keeps what it inherits open for as long as it lives.
            stdout=(self._folder / "out").open("wb") if not self._user else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
            **self._user,
        )
        if done.returncode:
            pytest.fail(f"{program} ended with {done.returncode}: {self.log()}", pytrace=False)

    def log(self) -> str:
        """Return what the server has said."""
        path = self._folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def start(self) -> None:
        """Start it and wait until it answers."""
        # No fsync: what is tested is that we wait for the commit, not the disk of this machine.
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off -c max_connections=50"
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._folder / "log"), "-o", options, "-w", "start")

    def kill(self) -> None:
        """Stop it without a word to anybody, as a crash would; what was committed is recovered."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def url(self, schema: str = "") -> str:
        """Return the URL of a journal; of a new one by default."""
        self._number += 1
        return f"postgresql://remit@/postgres?host={self._folder}#{schema or f'journal_{self._number}'}"

    def remove(self) -> None:
        """Stop it and remove all it had."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
