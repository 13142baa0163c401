"""``volley token``: create, limit, list and remove the tokens of the API."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from services.cli.options import Json, Server, print_json, remote

if TYPE_CHECKING:
    from volley.state import Limits

app = typer.Typer(help="Tokens of the API.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name of the token, such as its owner's")]


Runs = Annotated[int | None, typer.Option(min=0, help="most runs at once [default: any number]")]
Cpus = Annotated[float | None, typer.Option(min=0, help="most CPUs that these runs reserve")]
Gpus = Annotated[float | None, typer.Option(min=0, help="most GPUs that these runs reserve")]
Priority = Annotated[int, typer.Option(min=-10, max=10, help="highest priority that it may give a run")]


@app.command()
def create(
    name: Name,
    scope: Annotated[Literal["read", "operate", "admin"], typer.Option(help="what it allows")] = "read",
    runs: Runs = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    priority: Priority = 0,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It cannot be shown again: the server stores only a hash of it."""
    limits = _limits({"runs": runs, "cpus": cpus, "gpus": gpus, "priority": priority})
    with remote(server) as client:
        created = client.create_token(name, scope, limits).model_dump(mode="json")
    if as_json:
        print_json(created)
    else:
        typer.echo(created["token"])


@app.command()
def limit(
    name: Name,
    runs: Runs = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    priority: Annotated[int | None, typer.Option(min=-10, max=10, help="highest priority that it may give")] = None,
    lift: Annotated[list[str], typer.Option(help="limit to remove: runs, cpus or gpus; repeat for more")] = [],  # noqa: B006
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Change a token's limits; those not given stay. Runs that hold more keep it until they end."""
    from services.cli import tables

    given = {"runs": runs, "cpus": cpus, "gpus": gpus, "priority": priority}
    changes = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(lift) - {"runs", "cpus", "gpus"}):
        raise typer.BadParameter(f"--lift {unknown[0]}: write runs, cpus or gpus")
    if both := sorted(changes.keys() & set(lift)):
        raise typer.BadParameter(f"either --{both[0]} or --lift {both[0]}")
    with remote(server) as client:
        before = {each.name: each.limits for each in client.tokens()}
        kept = before[name].model_dump() if name in before else {}
        limits = _limits({**kept, **dict.fromkeys(lift), **changes})
        found = client.limit_token(name, limits).model_dump(mode="json")
    if as_json:
        print_json(found)
    else:
        tables.tokens([found])


@app.command("ls")
def ls(server: Server = None, as_json: Json = False) -> None:
    """List the names, scopes and limits of all tokens, never the tokens themselves."""
    from services.cli import tables

    with remote(server) as client:
        found = [each.model_dump(mode="json") for each in client.tokens()]
    if as_json:
        print_json(found)
    else:
        tables.tokens(found)


@app.command("rm")
def rm(name: Name, server: Server = None, as_json: Json = False) -> None:
    """Remove a token; the server rejects it within two seconds."""
    with remote(server) as client:
        client.delete_token(name)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        typer.echo(f"{name}: removed")


def _limits(values: dict[str, float | None]) -> "Limits":
    """Return the limits. Raises `typer.BadParameter` for one that is not a number in its range, such as nan."""
    from volley.state import Limits

    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise typer.BadParameter(f"--{wrong['loc'][0]}: {wrong['msg']}, got {wrong['input']}") from error
