"""``volley serve``: a finished model behind an OpenAI-compatible server."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.models import Checkpoint, find_model
from services.cli.options import Server

if TYPE_CHECKING:
    from services.runs.serve import ServeSpec
    from services.store.folder import RunFolder


def serve(
    model: Annotated[str, typer.Argument(help="model folder, run folder, or id of a run", metavar="MODEL|RUN")],
    host: Annotated[
        str, typer.Option(help="address to listen on; other than on loopback, --token-file is required")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8092,
    token_file: Annotated[Path | None, typer.Option(help="file with the API key that clients must send")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="vLLM's parser for tool calls: hermes ...")] = None,
    checkpoint: Checkpoint = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="set a key of model, actors or gateway, such as actors.gpus=1", metavar="KEY=VALUE"),
    ] = [],  # noqa: B006
    server: Server = None,
) -> None:
    """Serve a model over OpenAI's API, for evaluation tools and for trying it by hand."""
    from reward_servers.http_gate import is_loopback
    from reward_servers.http_listener import listener_on, read_token
    from services.jobs.job_file import parse_overrides
    from services.runs.serve import check_model
    from services.runs.serve import serve as serve_model
    from services.signals import run_in_foreground
    from volley.errors import JobError

    if not is_loopback(host) and token_file is None:
        raise JobError(f"other machines can reach --host {host}: pass --token-file")
    token = read_token(token_file) if token_file else None
    with listener_on(host, port) as bound:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print; standard output is for the address
            path, folder = find_model(model, server, checkpoint)
            overrides = parse_overrides(set_)
            if tool_parser is not None:
                overrides["gateway.tool_parser"] = tool_parser
            spec = serve_spec(path, folder, overrides)
            length, notice = check_model(spec)
        if notice:
            typer.echo(f"note: {notice}", err=True)

        def on_ready(url: str) -> None:
            typer.echo(f"serving {path.name} (up to {length} tokens) at {url}; Ctrl-C ends it")

        with contextlib.suppress(KeyboardInterrupt):
            run_in_foreground(serve_model(spec, path.name, bound, host, token, on_ready))


def serve_spec(model: Path, folder: "RunFolder | None", overrides: dict[str, Any]) -> "ServeSpec":
    """What to serve: ``overrides``, and else the settings of the run in ``folder``. Raises `JobError`."""
    from pydantic import ValidationError

    from services.jobs.job_file import assign, explain
    from services.runs.serve import ServeSpec
    from services.store.folder import RunFolder
    from volley.errors import JobError

    tree: dict[str, Any] = {"model": {}}
    if folder is not None:
        _, job = RunFolder.open(folder.path)
        tree |= job.model_dump(mode="json", include={"actors", "gateway"})
        tree["model"] = {"dtype": job.model.dtype}
    for key, value in overrides.items():
        assign(tree, key.split("."), value)
    tree["model"]["path"] = str(model)
    try:
        return ServeSpec.model_validate(tree)
    except ValidationError as error:
        raise JobError(explain("serve", error)) from error
