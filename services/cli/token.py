"""``volley token``: who may use the API, with which scope."""

from typing import Annotated, Literal

import typer

from services.cli.options import Json, Server, print_json, remote

app = typer.Typer(help="Tokens of the API.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="whose it is")]


@app.command()
def create(
    name: Name,
    scope: Annotated[Literal["read", "operate", "admin"], typer.Option(help="what it allows")] = "read",
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. This is the only time: the server keeps a hash of it."""
    with remote(server) as api:
        made = api.create_token(name, scope)
    if as_json:
        print_json(made)
    else:
        typer.echo(made["token"])


@app.command("ls")
def ls(server: Server = None, as_json: Json = False) -> None:
    """List tokens: names and scopes, never the tokens."""
    from services.cli import tables

    with remote(server) as api:
        found = api.tokens()
    if as_json:
        print_json(found)
    else:
        tables.tokens(found)


@app.command("rm")
def rm(name: Name, server: Server = None) -> None:
    """Remove a token; whoever holds it is locked out at once."""
    with remote(server) as api:
        api.delete_token(name)
    typer.echo(f"{name}: removed")
