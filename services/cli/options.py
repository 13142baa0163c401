"""Options that several commands have, and what they mean."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from services.remote import Remote
    from services.run_folder import RunFolder

JobFile = Annotated[Path, typer.Argument(help="job file, YAML")]
RunId = Annotated[str, typer.Argument(help="id of a run", metavar="RUN")]
RunOrFolder = Annotated[str, typer.Argument(help="id of a run of the service, or a run folder here", metavar="RUN")]
Redis = Annotated[str | None, typer.Option(help="URL of a Redis to use instead of an embedded one")]
Ray = Annotated[str | None, typer.Option(help="address of a Ray cluster to use instead of a local head")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]
Overrides = Annotated[list[str], typer.Option("--set", help="override a key: learner.ranks=2", metavar="KEY=VALUE")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Server = Annotated[
    str | None,
    typer.Option(help="URL of the API [default: VOLLEY_SERVER, the configuration file, or the stack of volley up]"),
]
StackDir = Annotated[Path | None, typer.Option("--dir", help="folder of the stack [default: VOLLEY_HOME or ~/.volley]")]


def remote(server: str | None) -> "Remote":
    """The API that is meant."""
    from services.remote import Remote

    return Remote.find(server)


def local_folder(target: str) -> "RunFolder | None":
    """The run folder at ``target``, None where that is no folder: then it is the id of a run."""
    from services.run_folder import RunFolder

    path = Path(target)
    return RunFolder(path.resolve()) if path.is_dir() else None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
