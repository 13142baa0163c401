"""``volley compare``: the newest evaluations and key metrics of several runs, side by side."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from services.cli.complete import complete_run
from services.cli.options import Json, Server, print_json

METRICS = ("reward_mean", "entropy", "kl_k1", "loss", "length_mean", "samples_per_second", "seconds_step")
Runs = Annotated[
    list[str],
    typer.Argument(help="ids, beginnings of ids, or run folders", metavar="RUN...", autocompletion=complete_run),
]


def compare(runs: Runs, server: Server = None, as_json: Json = False) -> None:
    """Compare runs: pass@k of the newest evaluation of each, and metrics of its newest step."""
    from services.cli.sources import open_run, run_object

    compared = []
    with contextlib.ExitStack() as stack:
        for run in runs:
            source = stack.enter_context(open_run(run, server))
            view, evaluations = source.view(), source.evaluations()
            metrics = source.newest_metrics(view["observed"]["step"])
            compared.append(run_object(view, evaluation=evaluations[-1] if evaluations else None, metrics=metrics))
    if as_json:
        print_json(compared)
    else:
        _print(compared)


def _print(compared: Sequence[Mapping[str, Any]]) -> None:
    """Print a legend, and a table with one column per run; intervals only where the terminal has room for them."""
    from services.cli.tables import state_text
    from services.recording.terminal import TableRow, TerminalTable, make_console

    console = make_console()
    numbers = [str(number) for number in range(1, len(compared) + 1)]
    legend = [
        TableRow((number, run["id"], run["kind"], run["objective"], state_text(run["state"])))
        for number, run in zip(numbers, compared, strict=True)
    ]
    console.print(TerminalTable(("", "run", "kind", "objective", "state"), legend, ("state", "kind")), crop=False)
    console.print()
    for intervals in (True, False):
        rows = [TableRow(cells) for cells in _rows(compared, intervals=intervals)]
        table = TerminalTable(("", *numbers), rows)
        if table.width <= console.width:
            break
    console.print(table, crop=False)


def _rows(compared: Sequence[Mapping[str, Any]], *, intervals: bool) -> Iterable[tuple[str, ...]]:
    """The table's rows: a name, then one cell per run, empty where a run lacks the figure."""
    yield "step", *(f"{run['step']}/{run['steps']}" for run in compared)
    estimates = [_estimates(run["evaluation"]) for run in compared]
    if any(estimates):
        yield "evaluated version", *(str(run["evaluation"]["version"]) if run["evaluation"] else "" for run in compared)
    for k in sorted({k for each in estimates for k in each}):
        yield f"pass@{k}", *(_interval(each.get(k), intervals=intervals) for each in estimates)
    names = {name for run in compared for name in run["metrics"]}
    trained = sorted((name for name in names if name.startswith("pass_at_")), key=lambda name: int(name.split("_")[-1]))
    for name in (*METRICS[:1], *trained, *METRICS[1:]):
        if name in names:
            yield name, *(f"{run['metrics'][name]:.4g}" if name in run["metrics"] else "" for run in compared)


def _estimates(evaluation: Mapping[str, Any] | None) -> dict[int, Mapping[str, float]]:
    return {each["k"]: each for each in evaluation["estimates"]} if evaluation else {}


def _interval(estimate: Mapping[str, float] | None, *, intervals: bool) -> str:
    if estimate is None:
        return ""
    band = f" ({estimate['low']:.2f}-{estimate['high']:.2f})" if intervals else ""
    return f"{estimate['mean']:.3f}{band}"
