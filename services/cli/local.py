"""Commands that need no service: run a job in the foreground, check a job file or the host, serve scorers."""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from services.cli.options import JobFile, Json, Overrides, Quiet, Ray, Redis, print_json

if TYPE_CHECKING:
    from services.jobs.job_file import Job
    from services.recording.display import Display
    from services.runs.context import Run
    from services.store.folder import RunFolder


def run(
    job_file: JobFile,
    out: Annotated[Path, typer.Option(help="folder in which the run folder is created")] = Path("runs"),
    set_: Overrides = [],  # noqa: B006  (typer reads the default and never changes it)
    redis: Redis = None,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a job on this machine until it ends; starts Redis and Ray if needed and writes a run folder."""
    own_ray_is_private(ray)
    from services.jobs.job_file import importable_from, load_job, parse_overrides, quoting_header
    from services.jobs.needs import actors_of
    from services.signals import interruptible
    from services.stack.ephemeral import importing_ahead

    job = load_job(job_file, parse_overrides(set_))
    importable_from(job_file.parent)
    with interruptible(), importing_ahead(actors_of(job), ray), _stdout_kept(as_json):
        from services.recording.display import Display
        from services.runs.run import prepare_here
        from services.store.folder import RunFolder

        display = Display(quiet=quiet, stderr=as_json)
        display.say(f"{job.kind} job {job.name}: checking {what_is_checked(job)}")
        with quoting_header(job_file, job):
            prepared = prepare_here(job)  # a job that cannot run leaves no folder
        warn_of_scorer(prepared, display)
        folder = RunFolder.create(out, job)
        folder.keep_import_from(job_file.parent)
        display.say(f"run folder {folder.path}")
        _run_here(prepared, folder, display, redis_url=redis, ray_address=ray)
    if as_json:
        _print_run(folder, job)


def resume_here(run_folder: Path, redis: str | None, ray: str | None, *, quiet: bool, as_json: bool) -> None:
    """Resume an interrupted run in its own folder, from its newest checkpoint or with the remaining prompts."""
    own_ray_is_private(ray)
    from services.jobs.job_file import importable_from
    from services.jobs.needs import actors_of
    from services.recording.display import Display
    from services.runs.checkpoints import newest_checkpoint
    from services.signals import interruptible
    from services.stack.ephemeral import importing_ahead
    from services.store.desired import read_desired
    from services.store.folder import RunFolder, RunHasEnded
    from volley.job import RLJob

    folder, job = RunFolder.open(run_folder)
    if folder.state == "done":
        raise RunHasEnded(f"{run_folder} is done: to go on, start a job from its model, {folder.model}")
    display = Display(quiet=quiet, stderr=as_json)
    if folder.is_live and read_desired(folder).paused:
        _go_on(folder, job, display, as_json)
        return
    importable_from(Path.cwd())
    if (where := folder.import_from()) is not None:
        importable_from(where)
    checkpoint = newest_checkpoint(folder) if isinstance(job, RLJob) else None
    with interruptible(), importing_ahead(actors_of(job), ray), _stdout_kept(as_json):
        _resume(folder, job, display, checkpoint=checkpoint, redis_url=redis, ray_address=ray)
    if as_json:
        _print_run(folder, job)


def _resume(folder: "RunFolder", job: "Job", display: "Display", *, checkpoint: Path | None, **options: Any) -> None:
    from services.runs.checkpoints import steps_of
    from services.runs.run import prepare_here
    from services.store.desired import change_in_folder, read_desired

    display.say(f"{job.kind} job {job.name}: checking {what_is_checked(job)}")
    prepared = prepare_here(job)
    desired = read_desired(folder)
    if desired.stopped or desired.paused:
        change_in_folder(folder, job, {"stopped": False, "paused": False})
    after = f" after step {steps_of(checkpoint)}" if checkpoint else ""
    display.say(f"resuming {job.name}{after}: {folder.path}")
    _run_here(prepared, folder, display, checkpoint=checkpoint, **options)


def _go_on(folder: "RunFolder", job: "Job", display: "Display", as_json: bool) -> None:
    """Lift the pause of a run that another process is running."""
    from services.store.desired import change_in_folder

    change_in_folder(folder, job, {"paused": False})
    display.say(f"{job.name} goes on: {folder.path}")
    if as_json:
        _print_run(folder, job)


def warn_of_scorer(run: "Run", display: "Display") -> None:
    """Call a scorer function once; if it fails, say so. It may fail for this answer only, so the run goes on."""
    from services.runs.trial import score_once
    from volley.errors import JobError

    try:
        score_once(run, "")
    except JobError as error:
        display.say(f"warning: {error}\nwarning: samples for which it fails leave their group; too many pause the run")


def own_ray_is_private(address: str | None) -> None:
    """Keep a Ray head that this run starts on loopback. Must be called before anything imports Ray."""
    from services.stack.ray import keep_to_loopback

    if not (address or os.environ.get("RAY_ADDRESS")):
        keep_to_loopback(os.environ)


def _stdout_kept(as_json: bool) -> contextlib.AbstractContextManager[None]:
    """With ``as_json``, keep standard output for the JSON: libraries and the user's own code may print."""
    from volley.processes import printing_to_stderr

    return printing_to_stderr() if as_json else contextlib.nullcontext()


def _print_run(folder: "RunFolder", job: "Job") -> None:
    from services.cli.sources import FolderRun, run_object

    print_json(run_object(FolderRun(folder, job).view()))


def _run_here(run: "Run", folder: "RunFolder", display: "Display", **options: Any) -> None:
    """Run `services.runs.run.run_alone` until its end or Ctrl-C; then print how to resume."""
    from services.runs.run import run_alone
    from services.signals import StopSignal, run_in_foreground

    stop_signal = StopSignal()
    try:
        result = run_in_foreground(run_alone(run, folder, display, stop_signal=stop_signal, **options), stop_signal)
    except KeyboardInterrupt:
        display.say(f"interrupted: {resume_hint(run.job, folder)}")
        raise
    display.say(f"{result.state} in {result.seconds:.0f} s")


def resume_hint(job: "Job", folder: "RunFolder") -> str:
    """Return how to continue a run that was interrupted."""
    from services.runs.checkpoints import complete_checkpoints, steps_of
    from volley.job import RLJob, SFTJob

    checkpoints = complete_checkpoints(folder)
    if not checkpoints and not isinstance(job, RLJob | SFTJob):
        return f"`volley resume {folder.path}` continues with the remaining prompts"
    if not checkpoints:
        return "there is no checkpoint to resume from: run the job again; checkpoint.every makes it write checkpoints"
    return f"`volley resume {folder.path}` continues after step {steps_of(checkpoints[-1])}, its newest checkpoint"


def check(
    job_file: JobFile,
    set_: Overrides = [],  # noqa: B006
    answer: Annotated[
        str, typer.Option(help="answer with which a scorer function is called once, or that a stub gives a program")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a job file and the files and code it names; call a scorer function or program once. Starts no service."""
    from services.jobs.job_file import importable_from, load_job, parse_overrides, quoting_header
    from services.jobs.needs import GIB, needs_of
    from services.runs.run import prepare_alone
    from services.runs.trial import notes_on, run_one_episode, score_once
    from services.signals import interruptible

    job = load_job(job_file, parse_overrides(set_))
    typer.echo(f"{job_file}: checking {what_is_checked(job)}", err=True)
    importable_from(job_file.parent)
    with interruptible(), _stdout_kept(as_json):
        with quoting_header(job_file, job):
            prepared = prepare_alone(job)
        notes, calls, memory = notes_on(job), score_once(prepared, answer), needs_of(job).memory_bytes
        episode = run_one_episode(prepared, answer)
    notes += episode.notes if episode else ()
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        about = {"file": str(job_file), "kind": job.kind, "name": job.name, "valid": True}
        found = {"calls": [asdict(call) for call in calls], "episode": asdict(episode) if episode else None}
        print_json({**about, "memory_bytes": memory, "notes": notes, **found})
        return
    for call in calls:
        typer.echo(f"{call.target} was called once: {call}")
    if episode:
        typer.echo(str(episode))
    typer.echo(f"the run needs about {memory / GIB:.1f} GiB of memory")
    typer.echo(f"{job_file}: {job.kind} job {job.name}: {what_is_checked(job)} are valid")


def what_is_checked(job: "Job") -> str:
    """What `volley check` looks at, in words."""
    rollout = getattr(job, "rollout", None)
    makes = {"program": "program", "tools": "tools"}.get(rollout.kind, "environment") if rollout else ""
    *parts, last = filter(None, ("its data", "tokenizer", makes, "scorer" if getattr(job, "scorer", None) else ""))
    return f"the job, {', '.join(parts)} and {last}"


def reward_server(
    host: Annotated[
        str, typer.Option(help="address to listen on; other than on loopback, --token-file is required")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8091,
    slots: Annotated[int, typer.Option(min=1, help="programs that run at once; at most one per core")] = 2,
    token_file: Annotated[Path | None, typer.Option(help="file with the token that clients must send")] = None,
    min_tier: Annotated[
        Literal["auto", "A", "B", "C", "none"], typer.Option(help="do not start if the host's isolation is weaker")
    ] = "auto",
    packages: Annotated[
        str, typer.Option(help="packages that programs may import besides the standard library, such as numpy,scipy")
    ] = "",
    known_as: Annotated[
        list[str], typer.Option(help="host name by which clients reach the server; repeat for more")
    ] = [],  # noqa: B006
) -> None:
    """Serve the scorers over HTTP, for any trainer: POST /v1/score."""
    from reward_servers.http import serve

    named = tuple(filter(None, (name.strip() for name in packages.split(","))))
    serve(host, port, slots, token_file, min_tier, named, tuple(known_as))


def schema() -> None:
    """Print the JSON Schema of a job file."""
    from volley.job import JOB

    typer.echo(json.dumps(JOB.json_schema(), indent=2))


def doctor(as_json: Json = False) -> None:
    """Check whether this host can execute runs, and say how to fix what is missing."""
    from services.cli.doctor import examine, report

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        report(findings)
    if any(finding.blocks for finding in findings):
        raise typer.Exit(1)
