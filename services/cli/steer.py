"""Commands that change a live run: one of the service, named by its id, or one of `volley run`, named by its folder."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.options import Json, Quiet, Ray, Redis, RunOrFolder, Server, local_folder, print_json, service_run


def scale(
    run: RunOrFolder,
    actors: Annotated[int | None, typer.Option(min=0, help="0 pauses generation")] = None,
    reward_workers: Annotated[int | None, typer.Option(min=1)] = None,
    environment_workers: Annotated[int | None, typer.Option(min=1)] = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Change the number of actors, reward workers and environment workers of a live run."""
    from volley.client.changes import worker_counts
    from volley.errors import JobError

    if actors is None and reward_workers is None and environment_workers is None:
        raise JobError("nothing to scale: pass --actors N, --reward-workers N or --environment-workers N")
    _change(run, worker_counts(actors, reward_workers, environment_workers), server, as_json)


def set_(
    run: RunOrFolder,
    changes: Annotated[
        list[str],
        typer.Argument(
            help="such as actors=2 max_lag=1 learning_rate=1e-6; k=4 is short for objective.k=4, and "
            "'weights={1: 0.5, 8: 0.5}' for objective.weights",
            metavar="KEY=VALUE",
        ),
    ],
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Change a live run: objective, learning rate, max_lag, workers. `null` reverts a key to the job's value."""
    from services.jobs.job_file import parse_overrides
    from volley.client.changes import desired_changes

    _change(run, desired_changes(parse_overrides(changes, option="", example="k=4")), server, as_json)


def pause(run: RunOrFolder, server: Server = None, as_json: Json = False) -> None:
    """Start no new groups; those in flight are finished and trained on."""
    _change(run, {"paused": True}, server, as_json)


def resume(
    run: RunOrFolder,
    redis: Redis = None,
    ray: Ray = None,
    quiet: Quiet = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Resume a run that is paused, stopped or failed. A run folder is resumed on this machine, from its checkpoint."""
    if local_folder(run) is not None:
        from services.cli.local import resume_here

        resume_here(Path(run), redis, ray, quiet=quiet, as_json=as_json)
        return
    with service_run(run, server) as found:
        _print_view(found.run.resume().model_dump(mode="json"), as_json)


def stop(run: RunOrFolder, server: Server = None, as_json: Json = False) -> None:
    """Make a run write a checkpoint and end; `volley resume` continues from there."""
    if (folder := local_folder(run)) is not None:
        from services.store.folder import RunHasEnded
        from volley.state import ENDED

        if folder.state in ENDED:
            raise RunHasEnded(f"{run} is {folder.state}: there is nothing to stop")
        _change(run, {"stopped": True}, server, as_json)
        return
    with service_run(run, server) as found:
        _print_view(found.run.stop().model_dump(mode="json"), as_json)


def _change(run: str, changes: dict[str, Any], server: str | None, as_json: bool) -> None:
    folder = local_folder(run)
    if folder is None:
        with service_run(run, server) as found:
            _print_view(found.run.change(changes).model_dump(mode="json"), as_json)
        return
    from services.cli.sources import FolderRun, run_object
    from services.store.desired import change_in_folder
    from services.store.folder import RunFolder

    opened, job = RunFolder.open(folder.path)
    desired = change_in_folder(opened, job, changes).model_dump(mode="json")
    if as_json:
        print_json(run_object(FolderRun(opened, job).view()))
    else:
        typer.echo(f"{job.name}: {_words(desired)}; if the run is live, it applies this within seconds")


def _print_view(view: dict[str, Any], as_json: bool) -> None:
    from services.cli.sources import run_object

    if as_json:
        print_json(run_object(view))
    else:
        typer.echo(f"{view['record']['id']}: {view['state']}; desired: {_words(view['desired'])}")


def _words(desired: dict[str, Any]) -> str:
    """The changes as `volley set` takes them."""
    from volley.state import Desired

    unchanged = Desired().model_dump()
    fields = {
        key: value
        for key, value in desired.items()
        if key not in ("revision", "objective") and value != unchanged.get(key)
    }
    fields |= {f"objective.{key}": value for key, value in desired["objective"].items()}
    changed = [f"{key}={_value(value)}" for key, value in fields.items() if value is not None and value is not False]
    return f"{' '.join(changed) or 'as in the job'} (revision {desired['revision']})"


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
