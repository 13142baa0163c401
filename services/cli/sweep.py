"""``volley sweep``: run several settings of a job with several seeds, and compare them."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import Json, Overrides, Quiet, Ray, Redis, Server, print_json

if TYPE_CHECKING:
    from services.recording.display import Display
    from services.sweeps.plan import Found, Runner
    from services.sweeps.results import Results
    from services.sweeps.spec import Sweep

TEXT_WIDTH = 80  # of the table in the sweep's folder


def sweep(
    sweep_file: Annotated[Path, typer.Argument(help="sweep file, YAML")],
    check: Annotated[
        bool, typer.Option("--check", help="check every setting as volley check does, say what is left; start nothing")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="make runs that failed again")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="let the service make the runs, not this machine")] = False,
    out: Annotated[Path, typer.Option(help="folder in which the sweep's folder is created")] = Path("runs"),
    set_: Overrides = [],  # noqa: B006
    redis: Redis = None,
    ray: Ray = None,
    server: Server = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a job with several settings and seeds; print means with 95% intervals. Repeat the command to continue."""
    from services.cli.local import own_ray_is_private
    from services.jobs.job_file import importable_from, parse_overrides
    from services.recording.display import Display
    from services.store.folder import RunFolder
    from services.sweeps.spec import load_sweep

    own_ray_is_private(ray)
    swept = load_sweep(sweep_file, parse_overrides(set_))
    importable_from(swept.base.parent)
    display = Display(quiet=quiet, stderr=as_json)
    folder = (out / swept.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    in_service = submit or server is not None
    display.say(f"sweep {swept.name}: {'in the service' if in_service else folder}")
    with RunFolder(folder).in_use():
        if check:
            _check_settings(swept, display)
        place = _service(swept, server) if in_service else _here(swept, folder, redis, ray)
        try:
            found, results = _conduct(swept, place, display, at_most=0 if check else None, retry=retry)
        except KeyboardInterrupt:
            goes_on = "; the runs that it submitted go on in the service" if in_service else ""
            typer.echo(f"volley: interrupted: repeat the command to continue{goes_on}", err=True)
            raise
        _present(swept, found, results, folder, as_json=as_json)
    failed = {each.name: found[each.name] for each in swept.members if _failed(found.get(each.name))}
    for name, run in failed.items():
        display.say(f"failed: {name}: {run.problem}")
    if failed:
        display.say("--retry makes failed runs again, from their newest checkpoints")
        raise typer.Exit(1)


def _failed(run: "Found | None") -> bool:
    return run is not None and run.state == "failed"


def _check_settings(swept: "Sweep", display: "Display") -> None:
    """Check the data, model and scorer of each setting; its seeds differ in nothing that is checked."""
    from services.jobs.job_file import quoting_header
    from services.jobs.needs import GIB, needs_at_once, needs_of
    from services.runs.run import prepare_alone
    from volley.errors import JobError

    for group, (member, *_) in swept.groups.items():
        try:
            with quoting_header(swept.base, member.job):
                prepare_alone(member.job)
        except JobError as error:
            raise JobError(f"{swept.file}: {group}: {error}") from error
    needs = needs_at_once([needs_of(each.job) for each in swept.members], swept.spec.at_once)
    display.say(f"{len(swept.groups)} settings are valid; the runs need about {needs.memory_bytes / GIB:.1f} GiB")


def _conduct(
    swept: "Sweep",
    place: "contextlib.AbstractAsyncContextManager[Runner]",
    display: "Display",
    *,
    at_most: int | None,
    retry: bool,
) -> "tuple[dict[str, Found], Results]":
    """Make the runs that are missing, then read what all have measured."""
    from services.signals import run_in_foreground
    from services.sweeps.conduct import SweepStop, conduct
    from services.sweeps.results import gather

    stop = SweepStop()

    async def work() -> "tuple[dict[str, Found], Results]":
        async with place as runner:
            found = await conduct(swept, runner, display, stop, retry=retry, at_most=at_most)
            return found, await gather(swept, found, runner)

    return run_in_foreground(work(), stop)


@contextlib.asynccontextmanager
async def _here(swept: "Sweep", folder: Path, redis: str | None, ray: str | None) -> "AsyncIterator[Runner]":
    from services.sweeps.local import LocalRunner

    spec = swept.spec
    yield LocalRunner(
        folder,
        swept.base.parent,
        at_once=spec.at_once,
        keep_checkpoints=spec.keep_checkpoints,
        redis_url=redis,
        ray_address=ray,
    )


@contextlib.asynccontextmanager
async def _service(swept: "Sweep", server: str | None) -> "AsyncIterator[Runner]":
    from services.sweeps.service import ServiceRunner
    from volley.client import AsyncClient

    async with AsyncClient(server) as client:
        yield ServiceRunner(client, swept)


def _present(swept: "Sweep", found: "Mapping[str, Found]", results: "Results", folder: Path, *, as_json: bool) -> None:
    """Print the table, or JSON, and write both and the figure to the sweep's folder, if any run is done."""
    from services.recording.terminal import make_console, text_console
    from services.sweeps.report import as_object, draw, tables

    report = swept.spec.report
    summary = as_object(swept, found, results)
    (folder / "results.json").write_text(json.dumps(summary, indent=2) + "\n")
    if as_json:
        print_json(summary)
    if not results.groups:
        return
    with (folder / "table.txt").open("w") as file:
        for table in tables(results, report, TEXT_WIDTH):
            text_console(file, TEXT_WIDTH).print(table, crop=False)
    figures = draw(swept, results, folder / "figure")
    if as_json:
        return
    console = make_console()
    for table in tables(results, report, console.width):
        console.print()
        console.print(table, crop=False)
    console.print(f"\nmeans and 95% intervals over seeds; {figures[0]}", soft_wrap=True)
