"""Commands for the runs of a service."""

import time
from typing import Annotated

import typer

from services.cli.complete import complete_process
from services.cli.options import JobFile, Json, Overrides, RunId, RunOrFolder, Server, print_json, remote, service_run

MAX_PRIORITY = 10  # `volley.state.MAX_PRIORITY`, without importing pydantic for `--help`
Follow = Annotated[bool, typer.Option("--follow", "-f", help="watch it until it ends; Ctrl-C ends only the view")]
Tags = Annotated[list[str], typer.Option("--tag", help="only runs with this tag", metavar="KEY=VALUE")]


def submit(
    job_file: JobFile,
    set_: Overrides = [],  # noqa: B006
    tag: Annotated[list[str], typer.Option(help="tag to find the run by", metavar="KEY=VALUE")] = [],  # noqa: B006
    key: Annotated[str | None, typer.Option(help="idempotency key: repeating it creates no second run")] = None,
    priority: Annotated[
        int, typer.Option(min=-MAX_PRIORITY, max=MAX_PRIORITY, help="a higher one starts first, see `volley queue`")
    ] = 0,
    follow: Follow = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Submit a job to the service; relative paths in the job file are relative to its folder."""
    from services.cli.follow import follow_run
    from services.cli.sources import ServiceRun, run_object
    from services.jobs.job_file import load_job, parse_overrides

    job = load_job(job_file, parse_overrides(set_))
    with remote(server) as client:
        run = ServiceRun(client.submit(job, tags=_tags(tag), key=key, priority=priority))
        if follow:
            if not as_json:
                typer.echo(run.run_id)
            raise typer.Exit(follow_run(run, as_json=as_json))
        view = run.view()
        if as_json:
            print_json(run_object(view))
        else:
            typer.echo(f"{run.run_id}: {view['state']}  {run.run.url}")


def ls(
    state: Annotated[str | None, typer.Option(help="only runs in this state")] = None,
    kind: Annotated[str | None, typer.Option(help="only rl, sft, rft or eval")] = None,
    name: Annotated[str | None, typer.Option(help="only runs whose name contains this")] = None,
    tag: Tags = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, help="most runs to list")] = 50,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from services.cli import tables

    with remote(server) as client:
        summaries = client.runs(limit, state=state, kind=kind, name=name, tags=_tags(tag))
    found = [each.model_dump(mode="json") for each in summaries]
    if as_json:
        print_json(found)
    else:
        tables.runs(found, time.time())


def show(run: RunOrFolder, follow: Follow = False, server: Server = None, as_json: Json = False) -> None:
    """Show a run: state, workers, what it waits for, evaluations, newest metrics."""
    from services.cli import tables
    from services.cli.follow import follow_run
    from services.cli.sources import open_run, run_object

    with open_run(run, server) as source:
        if follow:
            raise typer.Exit(follow_run(source, as_json=as_json))
        view = source.view()
        ledger, evaluations = source.ledger(), source.evaluations()
        metrics = source.newest_metrics(view["observed"]["step"])
        if as_json:
            print_json(run_object(view, ledger=ledger, evaluations=evaluations, metrics=metrics))
        else:
            tables.run(view, ledger, evaluations, metrics, time.time())


def logs(
    run: RunOrFolder,
    process: Annotated[
        str | None,
        typer.Argument(help="such as driver, actor-0, learner-0 [default: list them]", autocompletion=complete_process),
    ] = None,
    tail: Annotated[int, typer.Option(min=1, max=1 << 20, help="number of bytes from the end")] = 16384,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing as it grows, until Ctrl-C")] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Print the log of one process of a run."""
    from services.cli import tables
    from services.cli.follow import follow_log
    from services.cli.sources import open_run

    with open_run(run, server) as source:
        if process is None:
            found = source.processes()
            if as_json:
                print_json(found)
            else:
                tables.processes(found)
        elif follow:
            follow_log(source, process, tail, as_json=as_json)
        elif as_json:
            print_json({"process": process, "text": source.log_piece(process, tail).text})
        else:
            typer.echo(source.log_piece(process, tail).text, nl=False)


def rm(
    run: RunId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Remove a run that has ended from the service. Its run folder stays."""
    with service_run(run, server) as found:
        if not yes:
            typer.confirm(f"remove run {found.run_id} from {found.run.client.server}?", abort=True)
        found.run.delete()
    if as_json:
        print_json({"id": found.run_id, "removed": True})
    else:
        typer.echo(f"{found.run_id}: removed; its run folder stays")


def _tags(pairs: list[str]) -> dict[str, str]:
    from volley.errors import JobError

    tags = dict(pair.partition("=")[::2] for pair in pairs)
    if wrong := [pair for pair in pairs if "=" not in pair or pair.startswith("=")]:
        raise JobError(f"--tag {wrong[0]!r}: write key=value")
    return tags
