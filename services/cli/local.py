"""Commands that need no service: run a job in the foreground, look at a job file, at the host."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from services.cli.options import JobFile, Json, Overrides, Quiet, Ray, Redis, print_json

if TYPE_CHECKING:
    from services.display import Display
    from services.job_file import Job
    from services.run_folder import RunFolder


def run(
    job_file: JobFile,
    out: Annotated[Path, typer.Option(help="folder that run folders are made in")] = Path("runs"),
    set_: Overrides = [],  # noqa: B006  (typer reads the default and never changes it)
    redis: Redis = None,
    ray: Ray = None,
    quiet: Quiet = False,
) -> None:
    """Run a job here: start what is missing, follow it to its end, leave a run folder."""
    _own_ray_is_private(ray)
    from services.display import Display
    from services.job_file import importable_from, load_job, parse_overrides, telling_where_from
    from services.run import prepare_alone
    from services.run_folder import RunFolder

    job = load_job(job_file, parse_overrides(set_))
    importable_from(job_file.parent)
    display = Display(quiet=quiet)
    with telling_where_from(job_file, job):
        prepared = prepare_alone(job)  # a job that can not run leaves no folder
    folder = RunFolder.create(out, job)
    folder.keep_import_from(job_file.parent)
    display.say(f"{job.kind} job {job.name}: {folder.path}")
    _run_here(job, folder, display, prepared=prepared, redis_url=redis, ray_address=ray)


def resume_here(run_folder: Path, redis: str | None, ray: str | None, *, quiet: bool) -> None:
    """Go on with an interrupted run in the same folder: from its newest checkpoint, or with what is left to do."""
    _own_ray_is_private(ray)
    from services.checkpoints import newest_checkpoint, steps_of
    from services.desired import change_in_folder, read_desired
    from services.display import Display
    from services.job_file import importable_from
    from services.run import prepare_alone
    from services.run_folder import RunFolder
    from volley.job import RLJob

    folder, job = RunFolder.open(run_folder)
    importable_from(Path.cwd())
    if (where := folder.import_from()) is not None:
        importable_from(where)
    checkpoint = newest_checkpoint(folder) if isinstance(job, RLJob) else None
    prepared = prepare_alone(job)
    desired = read_desired(folder)
    if desired.stopped or desired.paused:
        change_in_folder(folder, job, {"stopped": False, "paused": False})
    display = Display(quiet=quiet)
    after = f" after step {steps_of(checkpoint)}" if checkpoint else ""
    display.say(f"resuming {job.name}{after}: {folder.path}")
    _run_here(job, folder, display, prepared=prepared, checkpoint=checkpoint, redis_url=redis, ray_address=ray)


def _own_ray_is_private(address: str | None) -> None:
    """Before anything imports Ray: a head of the run's own is no other machine's business."""
    from services.local_ray import keep_to_loopback

    if not (address or os.environ.get("RAY_ADDRESS")):
        keep_to_loopback(os.environ)


def _run_here(job: "Job", folder: "RunFolder", display: "Display", **how: Any) -> None:
    """`services.run.run_alone` until its end, or until Ctrl-C: then say how to go on."""
    from services.foreground import Ending, run_in_foreground
    from services.run import run_alone

    ending = Ending()
    try:
        result = run_in_foreground(run_alone(job, folder, display, ending=ending, **how), ending)
    except KeyboardInterrupt:
        display.say(f"interrupted: {way_on(job, folder)}")
        raise
    display.say(f"{result.state} in {result.seconds:.0f} s")


def way_on(job: "Job", folder: "RunFolder") -> str:
    """What can be done with a run that was interrupted."""
    from services.checkpoints import complete_checkpoints, steps_of
    from volley.job import RLJob, SFTJob

    there = complete_checkpoints(folder)
    if not there and not isinstance(job, RLJob | SFTJob):
        return f"`volley resume {folder.path}` goes on with the prompts left"
    if not there:
        return "there is no checkpoint to resume from, run it again; checkpoint.every in the job has them written"
    return f"`volley resume {folder.path}` goes on after step {steps_of(there[-1])}, its newest checkpoint"


def check(job_file: JobFile, set_: Overrides = []) -> None:  # noqa: B006
    """Check a job file and all that it names, without starting anything."""
    from services.job_file import importable_from, load_job, parse_overrides, telling_where_from
    from services.run import prepare_alone

    job = load_job(job_file, parse_overrides(set_))
    importable_from(job_file.parent)
    with telling_where_from(job_file, job):
        prepare_alone(job)
    parts = "tokenizer" if job.kind == "sft" else "tokenizer and scorer"
    typer.echo(f"{job_file}: {job.kind} job {job.name}: the job, its data, {parts} are in order")


def reward_server(
    host: Annotated[str, typer.Option(help="anything but a loopback address needs --token-file")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8091,
    slots: Annotated[int, typer.Option(min=1, help="programs judged at once; no more than cores")] = 2,
    token_file: Annotated[Path | None, typer.Option(help="file that holds the token clients must send")] = None,
    min_tier: Annotated[
        Literal["auto", "A", "B", "C", "none"], typer.Option(help="refuse to start if the host isolates less")
    ] = "auto",
    packages: Annotated[
        str, typer.Option(help="what programs may import beside the standard library, such as numpy,scipy")
    ] = "",
) -> None:
    """Serve the scorers over HTTP, for any trainer: POST /v1/score."""
    from reward_servers.http import serve
    from volley.errors import JobError

    if host not in ("127.0.0.1", "::1", "localhost") and token_file is None:
        raise JobError(f"--host {host} is reachable from outside: give --token-file")
    named = tuple(filter(None, (name.strip() for name in packages.split(","))))
    serve(host, port, slots, token_file, min_tier, named)


def schema() -> None:
    """Print the JSON Schema of a job file."""
    from volley.job import JOB

    typer.echo(json.dumps(JOB.json_schema(), indent=2))


def doctor(as_json: Json = False) -> None:
    """Say what this host has and lacks for a run, with the fix."""
    from dataclasses import asdict

    from services.doctor import examine, report

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        report(findings)
    if any(finding.blocks for finding in findings):
        raise typer.Exit(1)
