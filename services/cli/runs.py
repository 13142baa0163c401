"""Commands for the runs of a service."""

import time
from typing import Annotated, Any

import typer

from services.cli.options import JobFile, Json, Overrides, RunId, Server, print_json, remote

Follow = Annotated[bool, typer.Option("--follow", "-f", help="watch it until it ends; Ctrl-C ends only the view")]
Tags = Annotated[list[str], typer.Option("--tag", help="only runs with this tag", metavar="KEY=VALUE")]


def submit(
    job_file: JobFile,
    set_: Overrides = [],  # noqa: B006
    tag: Annotated[list[str], typer.Option(help="tag to find the run by", metavar="KEY=VALUE")] = [],  # noqa: B006
    key: Annotated[str | None, typer.Option(help="idempotency key: repeating it creates no second run")] = None,
    follow: Follow = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Submit a job to the service; relative paths in the job file are relative to its folder."""
    from services.cli.follow import follow_run
    from services.jobs.job_file import load_job, parse_overrides

    job = load_job(job_file, parse_overrides(set_))
    with remote(server) as api:
        view = api.create(job.model_dump(mode="json"), _tags(tag), key)
        run_id = view["record"]["id"]
        if as_json and not follow:
            print_json(view)
        elif not as_json:
            typer.echo(f"{run_id}: {view['state']}  {api.server}/#/runs/{run_id}" if not follow else run_id)
        if follow:
            raise typer.Exit(follow_run(api, run_id, as_json=as_json))


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

    with remote(server) as api:
        found = api.runs(limit, state=state, kind=kind, name=name, tag=tag)
    if as_json:
        print_json(found)
    else:
        tables.runs(found, time.time())


def show(run: RunId, follow: Follow = False, server: Server = None, as_json: Json = False) -> None:
    """Show a run: state, workers, what it waits for, evaluations, newest metrics."""
    from services.cli import tables
    from services.cli.follow import follow_run

    with remote(server) as api:
        if follow:
            raise typer.Exit(follow_run(api, run, as_json=as_json))
        view: dict[str, Any] = api.run(run)
        view["ledger"] = api.ledger(run)
        view["evaluations"] = api.evaluations(run)
        if as_json:
            print_json(view)
            return
        tables.run(view, api.metrics(run, ",".join(tables.HEADLINES), points=5000), time.time())


def logs(
    run: RunId,
    process: Annotated[
        str | None, typer.Argument(help="such as driver, actor-0, learner-0 [default: list them]")
    ] = None,
    tail: Annotated[int, typer.Option(min=1, max=1 << 20, help="number of bytes from the end")] = 16384,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing as it grows, until Ctrl-C")] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Print the log of one process of a run."""
    from services.cli import tables
    from services.cli.follow import follow_log

    with remote(server) as api:
        if process is None:
            found = api.processes(run)
            if as_json:
                print_json(found)
            else:
                tables.processes(found)
        elif follow:
            follow_log(api, run, process, tail)
        elif as_json:
            print_json({"process": process, "text": api.log(run, process, tail)})
        else:
            typer.echo(api.log(run, process, tail), nl=False)


def rm(
    run: RunId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    server: Server = None,
) -> None:
    """Remove a run that has ended from the service. Its run folder stays."""
    with remote(server) as api:
        if not yes:
            typer.confirm(f"remove run {run} from {api.server}?", abort=True)
        api.delete(run)
    typer.echo(f"{run}: removed; its run folder stays")


def _tags(pairs: list[str]) -> dict[str, str]:
    from volley.errors import JobError

    tags = dict(pair.partition("=")[::2] for pair in pairs)
    if wrong := [pair for pair in pairs if "=" not in pair or pair.startswith("=")]:
        raise JobError(f"--tag {wrong[0]!r}: write key=value")
    return tags
