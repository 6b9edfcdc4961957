"""Agents made of command line programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from remit.agents.context import RunContext
from remit.agents.definition import Isolation
from remit.agents.wishes import checked_claims
from remit.core.errors import CommandFailed, CommandTimedOut, InvalidArgument, TurnCancelled
from remit.core.limits import Limits
from remit.core.wellformed import check_number
from remit.locks import Claim
from remit.processes import CommandResult, CommandTemplate

__all__ = ["CommandAgent"]

_SHOWN_ERROR = 400


class CommandAgent:
    """An agent that runs a program, given as a template of its arguments.

        lint = CommandAgent(["ruff", "check", "{path}"], ok_exit_codes=(0, 1))
        run = await turn.delegate(lint, path="src/a.py")
        result = await run.result()          # a CommandResult

    Each item of the template becomes exactly one argument, whatever the fields
    hold; no shell reads them unless `shell=True`. The program gets a session of its
    own, null standard input, and its output goes to files. On a cancel its whole
    tree gets SIGTERM, the grace, then SIGKILL. It belongs to no worker: an attempt
    that timed out or was moved leaves it running, and the next one takes it over
    (see `RunContext.process`).

    A run that comes `after` others may use the field `{after}`: the path of a JSON
    file with their results by name.

    Args:
        argv: program and arguments; texts with fields such as `{path}`. With
            `shell=True` one text.
        name: shown in trees; the program's name by default.
        shell: give the text to `/bin/sh`; fields are quoted.
        cwd: working directory; the caller's by default.
        env: environment variables added to the caller's.
        timeout_s: seconds until the program is stopped and the run has timed out.
        grace_s: seconds between SIGTERM and SIGKILL.
        ok_exit_codes: statuses that count as success.
        isolation: `shared` by default; `actor` for a host of its own.
        limits: for runs below; a command has none.
        claims: paths that a run holds from before it takes a slot until the program is
            gone; `write("{path}")` is filled from its arguments.

    Raises:
        InvalidArgument: the template or a number does not hold.
    """

    def __init__(
        self,
        argv: Sequence[str] | str,
        *,
        name: str | None = None,
        shell: bool = False,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        grace_s: float = 2.0,
        ok_exit_codes: Collection[int] = (0,),
        isolation: Isolation = "shared",
        limits: Limits | None = None,
        claims: Claim | Sequence[Claim] = (),
    ) -> None:
        self.template = CommandTemplate(argv, shell=shell)
        if isolation not in ("shared", "actor"):
            raise InvalidArgument(f"isolation must be 'shared' or 'actor', not {isolation!r}")
        check_number("timeout_s", timeout_s, above_zero=True)
        check_number("grace_s", grace_s)
        self.name = name or _program_name(self.template)
        self.cwd = None if cwd is None else str(cwd)
        self.env = dict(env or {})
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.ok_exit_codes = frozenset(ok_exit_codes)
        self.isolation: Isolation = isolation
        self.limits = limits
        self.claims = checked_claims(claims)
        self.resources_key = ""

    def __repr__(self) -> str:
        return f"CommandAgent({list(self.template.argv)!r}, name={self.name!r})"

    def argument_check(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that refuses arguments which do not fill the template exactly.

        It raises `InvalidArgument`, naming the field.
        """

        def check(arguments: Mapping[str, Any]) -> None:
            given = dict(arguments)
            if "after" in self.template.fields:
                given.setdefault("after", "after.json")
            self.template.render(given)

        return check

    async def run_command_agent(self, ctx: RunContext, **arguments: Any) -> CommandResult:
        """Run the program as the body of a run (called by the host).

        Raises:
            CommandFailed: a status that is not one of `ok_exit_codes`, or a foreign signal.
            CommandTimedOut: `timeout_s` passed.
            TurnCancelled: the run was cancelled.
        """
        if "after" in self.template.fields and "after" not in arguments:
            arguments["after"] = str(await self._write_after(ctx))
        try:
            result = await ctx.process(
                self.template.render(arguments),
                env=self.env,
                cwd=self.cwd,
                timeout_s=self.timeout_s,
                grace_s=self.grace_s,
            )
        except (TurnCancelled, asyncio.CancelledError):
            ctx.keep_cut_short()
            raise
        if result.timed_out:
            ctx.partial(result)
            raise CommandTimedOut(
                f"{self.name} did not end within its {self.timeout_s:g} s and was stopped",
                exit_code=result.exit_code,
            )
        if result.exit_code not in self.ok_exit_codes:
            ctx.partial(result)
            raise CommandFailed(_failure_text(self.name, result), exit_code=result.exit_code)
        return result

    async def _write_after(self, ctx: RunContext) -> Path:
        """Write the results of what this run came after, for the program to read."""
        found: dict[str, Any] = {}
        for name, run in ctx.after.items():
            found[name] = _plain(await run.result())
        path = ctx.output_dir / "after.json"
        path.write_text(json.dumps(found, default=repr, indent=1), encoding="utf-8")
        return path


def _plain(value: Any) -> Any:
    """Return a result as JSON data; a command's is its status and output."""
    if isinstance(value, CommandResult):
        return {
            "exit_code": value.exit_code,
            "stdout": str(value.stdout),
            "stderr": str(value.stderr),
            "duration_s": round(value.duration_s, 3),
        }
    return value


def _program_name(template: CommandTemplate) -> str:
    if template.shell:
        words = template.argv[0].split()
        return Path(words[0]).name if words else "sh"
    return Path(template.argv[0]).name


def _failure_text(name: str, result: CommandResult) -> str:
    how = (
        f"was ended by signal {result.signal}" if result.signal is not None else f"ended with status {result.exit_code}"
    )
    said = (str(result.stderr).strip() or str(result.stdout).strip()).splitlines()
    tail = said[-1][:_SHOWN_ERROR] if said else ""
    return f"{name} {how}" + (f": {tail}" if tail else "")
