"""``volley env``: virtual environments for programs whose packages do not fit Volley's."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import JobFile, Json, StackDir, print_json

app = typer.Typer(help="Virtual environments for programs with packages of their own.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name of the environment")]


@app.command()
def create(
    name: Name,
    requirements: Annotated[
        list[str] | None, typer.Option("--with", help="package to install, such as 'verifiers==0.4.*'; repeat for more")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="file of requirements, as pip reads it")] = None,
    python: Annotated[
        str | None, typer.Option(help="interpreter; with uv also a version [default: the one that runs Volley]")
    ] = None,
    folder: StackDir = None,
    as_json: Json = False,
) -> None:
    """Make a virtual environment in the folder `envs` of VOLLEY_HOME or ~/.volley; print what to write in a job."""
    from environments.outside import venvs

    made = venvs.create(_folder(folder), name, requirements or [], file, python)
    if as_json:
        print_json({"name": made.name, "python": made.for_job})
    else:
        typer.echo(f"in a job: rollout: {{python: {made.for_job}, ...}}")


@app.command()
def data(
    file: JobFile,
    count: Annotated[int, typer.Option(min=1, help="most rows to write")] = 100_000,
    out: Annotated[
        Path | None, typer.Option(help="file to write; must not exist [default: the job's data.path]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the tasks of a job's environment as the job's data, JSON lines."""
    from environments.outside.rows import write_rows
    from services.jobs.job_file import importable_from, load_job

    importable_from(file.parent)
    job = load_job(file)
    path, rows = write_rows(getattr(job, "rollout", None), out or job.data.path, count)
    if as_json:
        print_json({"path": str(path), "rows": rows})
    else:
        typer.echo(f"{path}: {rows} rows")


@app.command("ls")
def ls(folder: StackDir = None, as_json: Json = False) -> None:
    """List the environments: names, interpreters, requirements."""
    from environments.outside import venvs
    from services.cli import tables

    found = venvs.find(_folder(folder))
    if as_json:
        print_json(
            [{"name": each.name, "python": each.for_job, "requirements": list(each.requirements)} for each in found]
        )
    else:
        tables.environments([(each.name, each.for_job, shlex.join(each.requirements)) for each in found])


@app.command("rm")
def rm(name: Name, folder: StackDir = None, as_json: Json = False) -> None:
    """Delete an environment."""
    from environments.outside import venvs

    venvs.remove(_folder(folder), name)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        typer.echo(f"{name}: removed")


def _folder(given: Path | None) -> Path:
    from services.stack.folder import StackFolder

    return StackFolder.at(given).path / "envs"
