"""The command ``volley``. Heavy modules are imported inside the commands: ``volley --help`` must be quick."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Reinforcement learning for language models that get k tries.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JobFile = Annotated[Path, typer.Argument(help="job file, YAML")]
Overrides = Annotated[list[str], typer.Option("--set", help="override a key: learner.ranks=2", metavar="KEY=VALUE")]


@app.command()
def run(
    job_file: JobFile,
    out: Annotated[Path, typer.Option(help="folder that run folders are made in")] = Path("runs"),
    set_: Overrides = [],  # noqa: B006  (typer reads the default and never changes it)
    redis: Annotated[str | None, typer.Option(help="URL of a Redis to use instead of an embedded one")] = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster to use instead of a local head")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
) -> None:
    """Run a job here: start what is missing, follow it to its end, leave a run folder."""
    from services.display import Display
    from services.foreground import run_in_foreground
    from services.job_file import load_job, parse_overrides
    from services.run import prepare, run_alone
    from services.run_folder import RunFolder

    job = load_job(job_file, parse_overrides(set_))
    display = Display(quiet=quiet)
    prepared = prepare(job)  # a job that can not run leaves no folder
    folder = RunFolder.create(out, job)
    display.say(f"{job.kind} job {job.name}: {folder.path}")
    result = run_in_foreground(run_alone(job, folder, display, prepared=prepared, redis_url=redis, ray_address=ray))
    display.say(f"done in {result.seconds:.0f} s")


@app.command()
def check(job_file: JobFile, set_: Overrides = []) -> None:  # noqa: B006
    """Check a job file and all that it names, without starting anything."""
    from services.job_file import load_job, parse_overrides
    from services.run import prepare

    job = load_job(job_file, parse_overrides(set_))
    prepare(job)
    typer.echo(f"{job_file}: a {job.kind} job that can run")


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
    """Entry point: a `VolleyError` is one clear line and exit code 1; Ctrl-C is 130."""
    from volley.errors import VolleyError

    try:
        app()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        typer.secho("volley: stopped", err=True)
        raise SystemExit(130) from None
