"""A repository whose git commands stop midway, holding their locks, until they are killed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["ENVIRONMENT", "Repository"]

ENVIRONMENT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
_NAMED = ["git", "-c", "user.name=ann", "-c", "user.email=ann@example.org"]


class Repository:
    """One with a commit, and a change that is not committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / ".git"
        folder.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")
        (folder / "a").write_text("1")
        self.git("add", "a")
        self.git("commit", "-q", "-m", "one")
        (folder / "a").write_text("2")

    def git(self, *words: str) -> str:
        """Run git to its end; it must work."""
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(
            [*_NAMED, *words], cwd=self.folder, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    def commit(self, folder: Path | None = None) -> list[str]:
        """Return a command that commits here, wherever it is started; it holds the index while its hook runs."""
        return [_NAMED[0], "-C", str(folder or self.folder), *_NAMED[1:], "commit", "-qam", "next"]

    @property
    def ready(self) -> Path:
        """Made by a hook that holds its git."""
        return self.data / "is-held"

    def hold(self, hook: str) -> None:
        """Let a hook hold its git for ever."""
        path = self.data / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho > '{self.ready}'\nexec sleep 600\n")
        path.chmod(0o755)

    def let_go(self) -> None:
        """Let git run through from here on."""
        for path in (self.data / "hooks").iterdir():
            path.unlink()
        self.ready.unlink(missing_ok=True)

    def locks(self) -> list[str]:
        """Return the git locks that are there, relative to the data folder."""
        found = [*self.data.rglob("*.lock"), *self.data.glob("worktrees/*/locked")]
        return sorted(str(path.relative_to(self.data)) for path in found)

    def commits(self) -> int:
        """Return how many commits there are."""
        return int(self.git("rev-list", "--count", "HEAD"))
