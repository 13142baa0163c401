"""Options that several commands share, and helpers to use them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.complete import complete_run, complete_run_id

if TYPE_CHECKING:
    from services.cli.sources import ServiceRun
    from services.store.folder import RunFolder
    from volley.client import Client

JobFile = Annotated[Path, typer.Argument(help="job file, YAML")]
RunId = Annotated[
    str, typer.Argument(help="id of a run, or its beginning", metavar="RUN", autocompletion=complete_run_id)
]
RunOrFolder = Annotated[
    str,
    typer.Argument(
        help="id of a run of the service, or its beginning, or a run folder on this machine",
        metavar="RUN",
        autocompletion=complete_run,
    ),
]
Redis = Annotated[
    str | None,
    typer.Option(
        envvar="VOLLEY_REDIS",
        help="URL of a Redis server to use instead of an embedded one; put one with a password into the variable",
    ),
]
Ray = Annotated[str | None, typer.Option(help="address of a Ray cluster to use instead of a local head")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="override a key of the job, such as learner.ranks=2", metavar="KEY=VALUE")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Server = Annotated[
    str | None,
    typer.Option(help="URL of the API [default: VOLLEY_SERVER, the configuration file, or the stack of volley up]"),
]
StackDir = Annotated[Path | None, typer.Option("--dir", help="folder of the stack [default: VOLLEY_HOME or ~/.volley]")]


def remote(server: str | None) -> "Client":
    """Return a client for ``server`` or the configured server."""
    from volley.client import Client

    return Client(server)


@contextlib.contextmanager
def service_run(run: str, server: str | None) -> "Iterator[ServiceRun]":
    """The run of the service whose id is, or begins with, ``run``. Raises `JobError` if that must be a folder."""
    from services.cli.sources import ServiceRun
    from volley.errors import JobError

    if "/" in run:
        raise JobError(f"there is no folder {run}: name one that exists, or the id of a run, which has no /")
    with remote(server) as client:
        yield ServiceRun(client.run(run))


def local_folder(target: str) -> "RunFolder | None":
    """Return the run folder at ``target``, or None if that is not a folder and so must be the id of a run."""
    from services.store.folder import RunFolder

    path = Path(target)
    return RunFolder(path.resolve()) if path.is_dir() else None


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
