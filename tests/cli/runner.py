"""The command in this process, for tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner, Result

from remit.cli.main import app

__all__ = ["Result", "invoke"]

# What typer makes of the functions' signatures is made once: that takes longer than most commands.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


def invoke(words: Sequence[str], **options: Any) -> Result:
    """Run `remit` with these words; its output is not a terminal. See `CliRunner.invoke` for the options."""
    return CliRunner().invoke(app, list(words), **options)
