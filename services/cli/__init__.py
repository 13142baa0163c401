"""The command ``volley``. Commands import heavy modules themselves, so that ``volley --help`` is quick."""

from collections.abc import Callable
from typing import Annotated

import typer

from services.cli import compare, data, env, local, model, models, plan, queue, runs, serve, stack, steer, sweep, token

EXIT_CODES = (
    "Exit codes: 0 success; 1 failure, the last line says why; 2 invalid usage; 3 no such run, process, checkpoint or "
    "token; 4 conflict with the present state, such as a run that has ended; 130 interrupted."
)

app = typer.Typer(
    help="Reinforcement learning for language models that get k tries.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"volley {importlib.metadata.version('volley-rl')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Reinforcement learning for language models that get k tries."""


_commands: tuple[dict[str, Callable[..., None]], ...] = (
    {"run": local.run, "check": local.check, "plan": plan.plan, "doctor": local.doctor, "schema": local.schema},
    {"up": stack.up, "down": stack.down},
    {"submit": runs.submit, "ls": runs.ls, "show": runs.show, "logs": runs.logs, "rm": runs.rm},
    {"compare": compare.compare, "sweep": sweep.sweep, "queue": queue.queue, "audit": queue.audit},
    {"scale": steer.scale, "set": steer.set_, "pause": steer.pause, "resume": steer.resume, "stop": steer.stop},
    {"eval": models.eval_, "export": models.export, "serve": serve.serve, "reward-server": local.reward_server},
)
for _group in _commands:
    for _name, _command in _group.items():
        app.command(_name)(_command)
app.add_typer(token.app, name="token")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.add_typer(env.app, name="env")


def entry() -> None:
    """Entry point of a process, which ends even if the user's code left a thread running."""
    from services.signals import leave_soon

    code = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        leave_soon(code)


def main() -> None:
    """Run the command: a `VolleyError` is printed as one line and sets the exit code; typer turns Ctrl-C into 130."""
    from volley.errors import VolleyError

    try:
        app()
    except VolleyError as error:
        _print_error(error)
        raise SystemExit(getattr(error, "exit_code", 1)) from None
    except ModuleNotFoundError as error:
        if (advice := missing_extra(error)) is None:
            raise
        _print_error(advice)
        raise SystemExit(1) from None


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install if the missing module comes with an extra of Volley's; None if it does not."""
    if "volley-rl[" in str(error):
        return str(error)
    import importlib.metadata
    import re

    package = (error.name or "").partition(".")[0]
    try:
        requirements = importlib.metadata.requires("volley-rl") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return None
    optional = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in requirements if "extra ==" in each}
    if package not in optional:
        return None
    return f"this command needs {package}, which is not installed: pip install 'volley-rl[cpu]', or [cuda] with GPUs"


def _print_error(message: object) -> None:
    typer.secho(f"volley: {message}", fg=typer.colors.RED, err=True)
