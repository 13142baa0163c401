"""``volley up`` and ``volley down``: the stack of this machine."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import Json, StackDir, print_json


def up(
    context: typer.Context,
    folder: StackDir = None,
    host: Annotated[
        str, typer.Option(help="anything but a loopback address needs a token for every request")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of API and dashboard; 0: a free one")] = 8265,
    redis: Annotated[str | None, typer.Option(help="URL of a Redis to use instead of an embedded one")] = None,
    ray: Annotated[
        str | None, typer.Option(help="URL of a cluster's job server to use instead of a local head", metavar="URL")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs Ray deals out [default: the machine's, at least 8]")
    ] = None,
    object_store_mb: Annotated[int | None, typer.Option(min=80, help="shared memory of Ray's object store")] = None,
    runs: Annotated[Path | None, typer.Option(help="folder that run folders are made in [default: DIR/runs]")] = None,
    import_from: Annotated[
        list[Path], typer.Option(help="folder that jobs may name code from; repeat it for more")
    ] = [],  # noqa: B006
    allow_code: Annotated[
        list[str], typer.Option(help="package or module that jobs may name; repeat it for more")
    ] = [],  # noqa: B006
    known_as: Annotated[
        list[str],
        typer.Option(help="host name the service is reached by, beside the loopback ones; repeat it for more"),
    ] = [],  # noqa: B006
    require_token: Annotated[
        bool, typer.Option("--require-token", help="of processes of this machine too; DIR/admin.token is the first")
    ] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="stay here, for a container or systemd")] = False,
    as_json: Json = False,
) -> None:
    """Bring up the service on this machine: Redis, Ray, API and dashboard, kept up in the background.

    Where it is up already nothing happens, but that options it was not started with are refused.
    """
    from services.stack_control import bring_up, stay_up
    from services.stack_state import StackFolder
    from services.stack_up import UpSettings, default_cpus

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
        known_as=tuple(known_as),
        require_token=require_token,
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
    """End what `volley up` started. Runs write a checkpoint first, and go on from it at the next `volley up`."""
    from services.stack_control import bring_down
    from services.stack_state import StackFolder

    where = StackFolder.at(folder)
    ended = bring_down(where)
    if as_json:
        print_json({"ended": ended, "folder": str(where.path)})
    else:
        typer.echo("down" if ended else f"nothing is up in {where.path}")
