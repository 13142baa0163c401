"""The command ``volley``. Commands import heavy modules themselves, so that ``volley --help`` is quick."""

from collections.abc import Callable

import typer

from services.cli import local, models, runs, stack, steer, token
from services.data import cli as data

EXIT_CODES = (
    "Exit codes: 0 success; 1 failure, the last line says why; 2 invalid usage; 3 no such run, token or checkpoint; "
    "4 conflict with the present state, such as a run that has ended; 130 interrupted."
)

app = typer.Typer(
    help="Reinforcement learning for language models that get k tries.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_commands: tuple[dict[str, Callable[..., None]], ...] = (
    {"run": local.run, "check": local.check, "doctor": local.doctor, "schema": local.schema},
    {"up": stack.up, "down": stack.down},
    {"submit": runs.submit, "ls": runs.ls, "show": runs.show, "logs": runs.logs, "rm": runs.rm},
    {"scale": steer.scale, "set": steer.set_, "pause": steer.pause, "resume": steer.resume, "stop": steer.stop},
    {"eval": models.eval_, "export": models.export, "reward-server": local.reward_server},
)
for _group in _commands:
    for _name, _command in _group.items():
        app.command(_name)(_command)
app.add_typer(token.app, name="token")
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point: a `VolleyError` is printed as one line and sets the exit code; typer turns Ctrl-C into 130."""
    from volley.errors import VolleyError

    try:
        app()
    except VolleyError as error:
        typer.secho(f"volley: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(getattr(error, "exit_code", 1)) from None
