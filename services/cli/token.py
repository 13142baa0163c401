"""``volley token``: create, list and remove the tokens of the API."""

from typing import Annotated, Literal

import typer

from services.cli.options import Json, Server, print_json, remote

app = typer.Typer(help="Tokens of the API.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name of the token, such as its owner's")]


@app.command()
def create(
    name: Name,
    scope: Annotated[Literal["read", "operate", "admin"], typer.Option(help="what it allows")] = "read",
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It cannot be shown again: the server stores only a hash of it."""
    with remote(server) as client:
        created = client.create_token(name, scope).model_dump(mode="json")
    if as_json:
        print_json(created)
    else:
        typer.echo(created["token"])


@app.command("ls")
def ls(server: Server = None, as_json: Json = False) -> None:
    """List the names and scopes of all tokens, never the tokens themselves."""
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
