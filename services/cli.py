"""The command ``volley``. Heavy modules are imported inside the commands: ``volley --help`` must be quick."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Reinforcement learning for language models that get k tries.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JobFile = Annotated[Path, typer.Argument(help="job file, YAML")]
RunPath = Annotated[Path, typer.Argument(help="run folder")]
Redis = Annotated[str | None, typer.Option(help="URL of a Redis to use instead of an embedded one")]
Ray = Annotated[str | None, typer.Option(help="address of a Ray cluster to use instead of a local head")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]
Overrides = Annotated[list[str], typer.Option("--set", help="override a key: learner.ranks=2", metavar="KEY=VALUE")]


@app.command()
def run(
    job_file: JobFile,
    out: Annotated[Path, typer.Option(help="folder that run folders are made in")] = Path("runs"),
    set_: Overrides = [],  # noqa: B006  (typer reads the default and never changes it)
    redis: Redis = None,
    ray: Ray = None,
    quiet: Quiet = False,
) -> None:
    """Run a job here: start what is missing, follow it to its end, leave a run folder."""
    from services.display import Display
    from services.foreground import run_in_foreground
    from services.job_file import importable_from, load_job, parse_overrides
    from services.run import prepare, run_alone
    from services.run_folder import RunFolder

    job = load_job(job_file, parse_overrides(set_))
    importable_from(job_file.parent)
    display = Display(quiet=quiet)
    prepared = prepare(job)  # a job that can not run leaves no folder
    folder = RunFolder.create(out, job)
    display.say(f"{job.kind} job {job.name}: {folder.path}")
    result = run_in_foreground(run_alone(job, folder, display, prepared=prepared, redis_url=redis, ray_address=ray))
    display.say(f"done in {result.seconds:.0f} s")


@app.command()
def resume(run_folder: RunPath, redis: Redis = None, ray: Ray = None, quiet: Quiet = False) -> None:
    """Go on with an interrupted rl run from its newest checkpoint, in the same run folder."""
    from services.checkpoints import newest_checkpoint, steps_of
    from services.display import Display
    from services.foreground import run_in_foreground
    from services.job_file import importable_from
    from services.run import prepare, run_alone
    from services.run_folder import RunFolder
    from volley.errors import JobError
    from volley.job import RLJob

    folder, job = RunFolder.open(run_folder)
    if not isinstance(job, RLJob):
        raise JobError(f"{run_folder}: only rl jobs are resumed, this is {job.kind}; run it again")
    importable_from(Path.cwd())
    checkpoint = newest_checkpoint(folder)
    prepared = prepare(job)
    display = Display(quiet=quiet)
    display.say(f"resuming {job.name} after step {steps_of(checkpoint)} of {job.steps}: {folder.path}")
    result = run_in_foreground(
        run_alone(job, folder, display, prepared=prepared, checkpoint=checkpoint, redis_url=redis, ray_address=ray)
    )
    display.say(f"done in {result.seconds:.0f} s")


@app.command("set")
def set_(
    run_folder: RunPath,
    changes: Annotated[list[str], typer.Argument(help="fields of the objective: k=4 center=true", metavar="KEY=VALUE")],
) -> None:
    """Change the objective of a live rl run, from its next step on."""
    from services.desired import change_in_folder
    from services.job_file import parse_overrides
    from services.run_folder import RunFolder
    from volley.errors import JobError
    from volley.job import RLJob

    folder, job = RunFolder.open(run_folder)
    if not isinstance(job, RLJob):
        raise JobError(f"{run_folder}: only rl jobs have an objective, this is {job.kind}")
    desired = change_in_folder(folder, job, {"objective": parse_overrides(changes)})
    typer.echo(f"objective of {job.name} from its next step on: {desired.objective}")


@app.command()
def check(job_file: JobFile, set_: Overrides = []) -> None:  # noqa: B006
    """Check a job file and all that it names, without starting anything."""
    from services.job_file import importable_from, load_job, parse_overrides
    from services.run import prepare

    job = load_job(job_file, parse_overrides(set_))
    importable_from(job_file.parent)
    prepare(job)
    typer.echo(f"{job_file}: {job.kind} job {job.name}: the job, its data, tokenizer and scorer are in order")


@app.command()
def reward_server(
    host: Annotated[str, typer.Option(help="anything but a loopback address needs --token-file")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8091,
    slots: Annotated[int, typer.Option(min=1, help="programs judged at once; no more than cores")] = 2,
    token_file: Annotated[Path | None, typer.Option(help="file that holds the token clients must send")] = None,
    min_tier: Annotated[
        Literal["auto", "A", "B", "C", "none"], typer.Option(help="refuse to start if the host isolates less")
    ] = "auto",
) -> None:
    """Serve the scorers over HTTP, for any trainer: POST /v1/score."""
    from reward_servers.http import serve
    from volley.errors import JobError

    if host not in ("127.0.0.1", "::1", "localhost") and token_file is None:
        raise JobError(f"--host {host} is reachable from outside: give --token-file")
    serve(host, port, slots, token_file, min_tier)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job file."""
    import json

    from volley.job import JOB

    typer.echo(json.dumps(JOB.json_schema(), indent=2))


@app.command()
def doctor() -> None:
    """Say what this host has and lacks for a run, with the fix."""
    from services.doctor import examine, report

    findings = examine()
    report(findings)
    if any(finding.blocks for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: a `VolleyError` is one clear line and exit code 1; Ctrl-C is 130, which typer sees to."""
    from volley.errors import VolleyError

    try:
        app()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
