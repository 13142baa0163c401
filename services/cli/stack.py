"""``volley up`` and ``volley down``: start and stop the service on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import Json, Redis, StackDir, print_json
from volley.ports import DEFAULT_PORT


def _allowed_hosts(hosts: list[str]) -> list[str]:
    from volley.webhooks import allowed_host

    try:
        return [allowed_host(host) for host in hosts]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


TrackingHosts = Annotated[
    list[str], typer.Option(help="host that may get the driver's MLflow credentials; repeat for more")
]
WebhookHosts = Annotated[
    list[str], typer.Option(help="host that runs may notify; repeat for more", callback=_allowed_hosts)
]
HubToken = Annotated[bool, typer.Option("--hub-token", help="let every job download with your Hugging Face token")]


def up(
    context: typer.Context,
    folder: StackDir = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; other than on loopback, every request needs a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = DEFAULT_PORT,
    redis: Redis = None,
    ray: Annotated[
        str | None, typer.Option(help="URL of a Ray cluster's job server to use instead of a local head", metavar="URL")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs that Ray schedules on [default: the machine's, at least 4]")
    ] = None,
    object_store_mb: Annotated[int | None, typer.Option(min=80, help="size of Ray's object store in MiB")] = None,
    runs: Annotated[Path | None, typer.Option(help="folder for the run folders [default: DIR/runs]")] = None,
    import_from: Annotated[list[Path], typer.Option(help="folder with code that jobs may name; repeat for more")] = [],  # noqa: B006
    allow_code: Annotated[list[str], typer.Option(help="package or module that jobs may name; repeat for more")] = [],  # noqa: B006
    tracking_host: TrackingHosts = [],  # noqa: B006
    webhook_host: WebhookHosts = [],  # noqa: B006
    known_as: Annotated[list[str], typer.Option(help="further host name of the service; repeat for more")] = [],  # noqa: B006
    require_token: Annotated[
        bool,
        typer.Option("--require-token", help="also for requests from this machine; DIR/admin.token is the first token"),
    ] = False,
    hub_token: HubToken = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="do not go into the background; for containers and systemd")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the service on this machine: Redis, Ray, API and dashboard, kept up in the background.

    If the service is already up, this does nothing; options that differ from those it was started with are rejected.
    """
    from services.stack.control import bring_up, stay_up
    from services.stack.folder import StackFolder
    from services.stack.keeper import UpSettings, default_cpus

    where = StackFolder.at(folder)
    settings = UpSettings(
        folder=where.path,
        host=host,
        port=port,
        redis=redis,
        ray=ray,
        cpus=cpus or default_cpus(),
        object_store_mb=object_store_mb,
        runs=(runs or where.runs).absolute(),
        import_from=tuple(path.absolute() for path in import_from),
        allow_code=tuple(allow_code),
        tracking_host=tuple(tracking_host),
        webhook_host=tuple(webhook_host),
        known_as=tuple(known_as),
        require_token=require_token,
        hub_token=hub_token,
    )
    if foreground:
        stay_up(settings)
        return
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    state, started = bring_up(settings, given)
    if as_json:
        print_json({"server": state.server, "keeper": state.keeper, "folder": str(where.path), "started": started})
    else:
        typer.echo(f"{'up' if started else 'already up'}: {state.server}  (state and logs in {where.path})")


def down(folder: StackDir = None, as_json: Json = False) -> None:
    """Stop what `volley up` started. Runs write a checkpoint first and continue from it at the next `volley up`."""
    from services.stack.control import bring_down
    from services.stack.folder import StackFolder

    where = StackFolder.at(folder)
    ended = bring_down(where)
    if as_json:
        print_json({"ended": ended, "folder": str(where.path)})
    else:
        typer.echo("down" if ended else f"no service is up in {where.path}")
