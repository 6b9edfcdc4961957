"""The `remit` command. Each verb imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remit.cli.exits import reported, show_any_text

if TYPE_CHECKING:
    from remit.cli.connect import Opener
    from remit.cli.running import Finished

__all__ = ["app", "main"]

app = typer.Typer(
    name="remit",
    help="Delegate work to swarms of agents on Ray, and make stop mean stop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Workspace = Annotated[
    Path, typer.Option("--workspace", "-w", help="Folder that the work is about; its journal is in .remit/ below it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Address = Annotated[
    str | None, typer.Option("--address", help="Ray cluster as host:port; else RAY_ADDRESS, else the local node.")
]
HERE = Path()


@app.command()
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A swarm file (.yaml), or module:function.")],
    pairs: Annotated[list[str] | None, typer.Argument(help="Arguments for module:function as key=value.")] = None,
    arguments: Annotated[str, typer.Option("--args", help="Arguments for module:function as a JSON mapping.")] = "",
    workspace: Workspace = HERE,
    name: Annotated[str, typer.Option("--name", help="Name of the turn.")] = "",
    session: Annotated[str | None, typer.Option("--session", help="Conversation that the turn belongs to.")] = None,
    busy: Annotated[
        str, typer.Option("--busy", help="If the session is busy: reject, queue, or interrupt what runs.")
    ] = "reject",
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds for the whole turn.")] = None,
    approvals: Annotated[
        str | None,
        typer.Option(
            "--approvals",
            help="Requests for approval: ask (remit approvals), auto, or deny. By default what the file says, or ask.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Hand the turn over and return at once.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live tree.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Run a swarm file, or one agent, and show its tree until it has ended.

    Ctrl-C stops everything and keeps showing the tree until it is quiet; a second
    one kills what is left. Exit status: 0 succeeded, 1 failed, 124 timed out,
    130 cancelled, 2 usage.
    """
    from remit.cli.connect import opener

    with reported():
        status = _run(
            opener(context),
            target,
            pairs=pairs or [],
            arguments=arguments,
            workspace=workspace,
            name=name,
            session=session,
            busy=busy,
            deadline_s=deadline_s,
            approvals=approvals,
            detach=detach,
            plain=plain,
            address=address,
            as_json=as_json,
        )
    raise typer.Exit(status)


def _run(
    open_coordinator: Opener,
    target: str,
    *,
    pairs: list[str],
    arguments: str,
    workspace: Path,
    name: str,
    session: str | None,
    busy: str,
    deadline_s: float | None,
    approvals: str | None,
    detach: bool,
    plain: bool,
    address: str | None,
    as_json: bool,
) -> int:
    import asyncio

    from remit.cli.connect import connected
    from remit.cli.display import choose_display
    from remit.cli.job import load_job
    from remit.cli.running import run_turn
    from remit.coordinator.workspace import resolve_workspace

    root = resolve_workspace(workspace)
    job = load_job(target, workspace=root, arguments=arguments, pairs=pairs, name=name)
    coordinator = open_coordinator(root, address=address, start=True)
    with connected(coordinator):
        request = coordinator.turn_request(
            job.name,
            session=session,
            user="",
            deadline_s=deadline_s if deadline_s is not None else job.deadline_s,
            grace_s=5.0,
            on_disconnect="continue" if detach else "cancel",
            busy=busy,
            limits=job.limits,
            approvals=approvals if approvals is not None else job.approvals or "ask",
            on_failure="stop" if job.stop_on_failure else "continue",
        )
        display = choose_display(plain=plain, as_json=as_json)
        try:
            for note in job.notes:
                display.say(note)
            finished = asyncio.run(run_turn(coordinator, job, request, display, detach=detach))
        finally:
            display.close()
    return _report(finished, shows_result=job.shows_result, as_json=as_json)


def _report(finished: Finished, *, shows_result: bool, as_json: bool) -> int:
    """Print what became of a turn; return the exit status."""
    from remit.cli.exits import of_outcome
    from remit.cli.output import print_json, print_lines
    from remit.cli.report import finished_dict, finished_lines

    if as_json:
        print_json(finished_dict(finished, shows_result=shows_result))
    else:
        print_lines(finished_lines(finished, shows_result=shows_result))
    return 0 if finished.outcome is None else of_outcome(finished.outcome)


@app.command()
def ps(
    workspace: Workspace = HERE,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended turns too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the turns of a workspace: those at work, and the latest ones that have ended."""
    from remit.cli.looking import show_turns

    with reported():
        show_turns(workspace, everything=everything, as_json=as_json)


@app.command()
def tree(
    target: Annotated[str | None, typer.Argument(help="Turn or run; the latest turn by default.")] = None,
    workspace: Workspace = HERE,
    as_json: AsJson = False,
) -> None:
    """Show a turn with everything below it: states, what each run waits for, how long."""
    from remit.cli.looking import show_tree

    with reported():
        show_tree(workspace, target, as_json=as_json)


@app.command()
def trace(
    target: Annotated[
        str | None, typer.Argument(metavar="TURN", help="Turn, or a run of it; the latest turn by default.")
    ] = None,
    workspace: Workspace = HERE,
    only_cancels: Annotated[
        bool, typer.Option("--cancel", help="Only the way of each cancel, with the times of every hop.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page that stands alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw where the time of a turn went, and the way that each cancel took; needs no server."""
    from remit.cli.tracing import show_trace

    with reported():
        show_trace(workspace, target, only_cancels=only_cancels, as_json=as_json, html=html)


@app.command()
def locks(
    context: typer.Context,
    workspace: Workspace = HERE,
    clear: Annotated[
        str | None, typer.Option("--clear", metavar="RUN", help="Free what is quarantined for this turn or run.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """List claims on paths: who holds what since when, who waits for what behind whom.

    A claim is quarantined while its owner is gone but may still write. --clear
    frees it on your word that it does not.
    """
    with reported():
        if clear is not None:
            from remit.cli.clearing import clear_quarantined
            from remit.cli.connect import opener

            clear_quarantined(opener(context), workspace, clear, yes=yes, address=address, as_json=as_json)
            return
        from remit.cli.looking import show_locks

        show_locks(workspace, as_json=as_json)


@app.command()
def cancel(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Turn, run (a unique part of the id will do) or session.")],
    workspace: Workspace = HERE,
    reason: Annotated[str, typer.Option("--reason", help="Why, for people.")] = "",
    kill: Annotated[bool, typer.Option("--kill", help="Skip the grace.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would stop.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until nothing below runs any more.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Longest wait, in seconds.")] = 30.0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Stop a turn or run with everything below it, and print the receipt."""
    from remit.cli.connect import opener
    from remit.cli.stopping import cancel_target

    with reported():
        status = cancel_target(
            opener(context),
            workspace,
            target,
            reason=reason,
            kill=kill,
            dry_run=dry_run,
            wait_s=timeout_s if wait else 0.0,
            address=address,
            as_json=as_json,
        )
    raise typer.Exit(status)


@app.command()
def approvals(
    workspace: Workspace = HERE,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Answered, expired and cancelled ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what waits for approval: the action, who asks with the path to it, since when."""
    from remit.cli.conversing import show_approvals

    with reported():
        show_approvals(workspace, everything=everything, as_json=as_json)


@app.command()
def approve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="ID", help="Approval, or a unique part of its id.")],
    workspace: Workspace = HERE,
    reason: Annotated[str, typer.Option("--reason", help="Why, for people.")] = "",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Say yes to a request for approval. The first answer counts; exit with 1 if this one is late."""
    _answer(context, target, workspace, reason, approve=True, address=address, as_json=as_json)


@app.command()
def deny(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="ID", help="Approval, or a unique part of its id.")],
    workspace: Workspace = HERE,
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever asked.")] = "",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Say no to a request for approval. The first answer counts; exit with 1 if this one is late."""
    _answer(context, target, workspace, reason, approve=False, address=address, as_json=as_json)


def _answer(
    context: typer.Context,
    target: str,
    workspace: Path,
    reason: str,
    *,
    approve: bool,
    address: str | None,
    as_json: bool,
) -> None:
    from remit.cli.connect import opener
    from remit.cli.conversing import answer

    with reported():
        answer(opener(context), workspace, target, approve=approve, reason=reason, address=address, as_json=as_json)


@app.command()
def sessions(workspace: Workspace = HERE, as_json: AsJson = False) -> None:
    """List sessions: how many turns each has had, which is at work, what was spent."""
    from remit.cli.conversing import show_sessions

    with reported():
        show_sessions(workspace, as_json=as_json)


@app.command()
def history(
    session: Annotated[str, typer.Argument(help="Session, as `remit sessions` lists it.")],
    workspace: Workspace = HERE,
    as_json: AsJson = False,
) -> None:
    """List the turns of a session: how each ended, at which step, and what did not succeed."""
    from remit.cli.conversing import show_history

    with reported():
        show_history(workspace, session, as_json=as_json)


@app.command()
def drain(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="Node of the cluster: id (the beginning will do), name or address.")],
    workspace: Workspace = HERE,
    reason: Annotated[str, typer.Option("--reason", help="Why, for people.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let the node have work again.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Move a workspace's work away from a node of the cluster; runs go on elsewhere, none ends by it."""
    from remit.cli.connect import opener
    from remit.cli.draining import drain as drain_node

    with reported():
        drain_node(opener(context), workspace, node, reason=reason, undo=undo, address=address, as_json=as_json)


@app.command()
def result(
    target: Annotated[str, typer.Argument(metavar="RUN", help="Run, or a unique part of its id.")],
    workspace: Workspace = HERE,
    as_json: AsJson = False,
) -> None:
    """Print what a run returned, or how it ended. The exit status says the outcome."""
    from remit.cli.looking import show_result

    with reported():
        status = show_result(workspace, target, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def logs(
    target: Annotated[str, typer.Argument(metavar="RUN", help="Run, or a turn for all its runs.")],
    workspace: Workspace = HERE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only what programs wrote to standard error.")] = False,
) -> None:
    """Print what a run has printed and what its programs have written."""
    from remit.cli.logs import follow_logs, print_logs

    with reported():
        if follow:
            follow_logs(workspace, target, stderr=stderr)
        elif not print_logs(workspace, target, stderr=stderr):
            typer.echo("remit: nothing was written", err=True)


@app.command()
def gc(
    older_than: Annotated[str, typer.Option("--older-than", help="Least age of an end: 7d, 12h, 30m or 90s.")],
    workspace: Workspace = HERE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what ended long ago from the journal, with its results and output files; never what is live."""
    from remit.cli.retaining import collect_old

    with reported():
        collect_old(workspace, older_than, dry_run=dry_run, as_json=as_json)


@app.command()
def journal(
    workspace: Workspace = HERE,
    use: Annotated[
        str | None, typer.Option("--use", metavar="URL", help="Keep it in this database: postgresql://user@host/name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the journal of a workspace is and what is in it, or put it into PostgreSQL before anything has run."""
    from remit.cli.retaining import show_journal, use_database

    with reported():
        if use is not None:
            use_database(workspace, use)
        show_journal(workspace, as_json=as_json)


@app.command()
def up() -> None:
    """Start the local Ray node, or say that it is up."""
    from remit.cli.node import start_node

    with reported():
        start_node()


@app.command()
def down(
    workspace: Workspace = HERE,
    force: Annotated[bool, typer.Option("--force", help="Even if turns of the workspace are at work.")] = False,
) -> None:
    """Stop the local Ray node with everything on it."""
    from remit.cli.node import stop_node

    with reported():
        stop_node(workspace, force=force)


@app.command()
def processes(
    workspace: Workspace = HERE,
    everywhere: Annotated[bool, typer.Option("--everywhere", help="Of all workspaces on this machine.")] = False,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the programs that agents have started on this machine: of turns, and of sessions (background)."""
    from remit.cli.tools import show_processes

    with reported():
        show_processes(workspace, everywhere=everywhere, ended=ended, as_json=as_json)


@app.command()
def kill(
    handle: Annotated[str, typer.Argument(help="Handle from `remit processes`, or a unique part of it.")],
    workspace: Workspace = HERE,
    grace_s: Annotated[float, typer.Option("--grace", min=0.0, help="Seconds between SIGTERM and SIGKILL.")] = 2.0,
    now: Annotated[bool, typer.Option("--now", help="SIGKILL at once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop one program with everything it has started, also one in the background.

    The exit status is 0 only if nothing of it is left, with proof.
    """
    from remit.cli.tools import kill_process

    with reported():
        status = kill_process(workspace, handle, grace_s=grace_s, kill=now, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def doctor(
    workspace: Workspace = HERE,
    adopt: Annotated[str, typer.Option("--adopt", metavar="HANDLE", help="Look after a leftover again.")] = "",
    end: Annotated[str, typer.Option("--kill", metavar="HANDLE", help="End a leftover.")] = "",
    ignore: Annotated[str, typer.Option("--ignore", metavar="HANDLE", help="Show a leftover no more.")] = "",
    as_json: AsJson = False,
) -> None:
    """Examine the local node, this workspace and what programs have left over; exit with 1 if something is wrong.

    A leftover is a program, or what remains of one, that no daemon answers for.
    """
    from remit.cli.node import examine
    from remit.cli.tools import treat_leftover

    status = 0
    with reported():
        for job, action in ((adopt, "adopt"), (end, "kill"), (ignore, "ignore")):
            if job:
                status = max(status, treat_leftover(job, action=action))
        if not (adopt or end or ignore):
            status = examine(workspace, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def validate(
    target: Annotated[str, typer.Argument(metavar="FILE", help="A swarm file (.yaml).")],
    workspace: Workspace = HERE,
    as_json: AsJson = False,
) -> None:
    """Check a swarm file as `remit run` would, and start nothing but the commands of its `lines`.

    Exit status: 0 if it holds, 2 if not; every mistake is named by file, line and field.
    """
    from remit.cli.validating import validate as check

    with reported():
        check(target, workspace=workspace, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of swarm files, for editors."""
    from remit.cli.output import print_json
    from remit.cli.swarm import json_schema

    with reported():
        print_json(json_schema())


def main() -> None:
    """Run the command line."""
    show_any_text()
    app()
