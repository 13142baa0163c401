"""Commands for the models that runs train: export one, evaluate one."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.local import what_is_checked
from services.cli.options import Json, Quiet, Ray, Redis, RunOrFolder, Server, local_folder, print_json, service_run

if TYPE_CHECKING:
    from services.jobs.job_file import Job
    from services.store.folder import RunFolder

Checkpoint = Annotated[int | None, typer.Option(min=0, help="step of the checkpoint [default: the newest]")]


def export(
    run: RunOrFolder,
    out: Annotated[Path, typer.Option(help="new folder for the model")],
    checkpoint: Checkpoint = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Export a run's checkpoint as a model folder in Hugging Face format."""
    from services.runs.checkpoints import steps_of
    from services.runs.export import export_checkpoint

    folder = _folder(run, server)
    _hush()
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; standard output is for the result
        used = export_checkpoint(folder, checkpoint, out.absolute())
    if as_json:
        print_json({"model": str(out.absolute()), "checkpoint": steps_of(used)})
    else:
        typer.echo(f"{out}: the model after step {steps_of(used)}")


def eval_(
    model: Annotated[str, typer.Argument(help="model folder, run folder, or id of a run", metavar="MODEL|RUN")],
    data: Annotated[Path | None, typer.Option(help="prompts, JSONL [default: the run's held-out data]")] = None,
    scorer: Annotated[
        str | None, typer.Option(help="kind of scorer, or YAML such as '{kind: math}' [default: the run's]")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="samples per prompt")] = 64,
    ks: Annotated[
        str | None, typer.Option("--k", help="values of k to estimate pass@k for, such as 1,8 [default: 1, 2, 4 ... n]")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="use only the first N prompts", metavar="N")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="render the prompts of --data with the model's chat template")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest sample, in tokens [default: the run's, or 1024]")
    ] = None,
    checkpoint: Checkpoint = None,
    out: Annotated[Path, typer.Option(help="folder in which the run folder is created")] = Path("runs"),
    set_: Annotated[
        list[str], typer.Option("--set", help="set a key of the eval job, such as actors.count=2", metavar="KEY=VALUE")
    ] = [],  # noqa: B006
    server: Server = None,
    redis: Redis = None,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Sample n answers per prompt from a model on this machine, and print pass@k with confidence intervals."""
    from services.jobs.job_file import importable_from, parse_overrides
    from services.recording.display import Display
    from services.runs.run import prepare, run_alone
    from services.signals import run_in_foreground
    from services.store.folder import RunFolder
    from volley.errors import JobError

    if chat and data is None:
        raise JobError("--chat applies to the prompts of --data: pass --data, or --set data.chat={}")
    is_model = any((Path(model) / file).exists() for file in ("config.json", "adapter_config.json"))
    folder = None if is_model else _folder(model, server)
    given = {
        "data": None if data is None else {"path": str(data.absolute()), **({"chat": {}} if chat else {})},
        "scorer": _scorer(scorer),
        "sampling": {"n": n, **({} if max_tokens is None else {"max_tokens": max_tokens})},
        "ks": _ks(ks, n),
        "prompts": prompts,
    }
    display = Display(quiet=quiet, stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        path, given["version"] = _model_path(Path(model), folder, checkpoint)
        job = eval_job(path, folder, given, parse_overrides(set_))
        importable_from(Path.cwd())
        if folder is not None and (where := folder.import_from()) is not None:
            importable_from(where)
        display.say(f"{job.name}: checking {what_is_checked(job)}")
        prepared = prepare(job)
        created = RunFolder.create(out, job)
        run_in_foreground(run_alone(prepared, created, display, redis_url=redis, ray_address=ray))
    row = created.read("evaluations")[-1]
    if as_json:
        print_json({**row, "folder": str(created.path)})
    elif not quiet:
        typer.echo(f"{_figures(row)}\n{created.path}")


def _figures(evaluation: dict[str, Any]) -> str:
    """A line per estimate, with its interval."""
    named = [(f"pass@{each['k']}", each) for each in evaluation["estimates"]]
    if evaluation["weighted"] is not None:
        named.append(("weighted", evaluation["weighted"]))
    return "\n".join(f"{name:<9} {e['mean']:.4f}  {e['low']:.4f}-{e['high']:.4f}" for name, e in named)


def eval_job(model: Path, folder: "RunFolder | None", given: dict[str, Any], overrides: dict[str, Any]) -> "Job":
    """Build the eval job from ``overrides``, ``given``, the run's own job and the defaults, in this order.

    Raises:
        JobError: neither ``given`` nor the run has data or a scorer, or the job is invalid.
    """
    from pydantic import ValidationError

    from services.jobs.job_file import assign, explain
    from volley.errors import JobError
    from volley.job import JOB

    tree: dict[str, Any] = {"kind": "eval", "name": f"eval-{model.name}"[:64]}
    if folder is not None:
        tree |= _defaults_from(folder)
    tree["model"] = {**tree.get("model", {}), "path": str(model)}
    for key, value in given.items():
        if value is not None:
            tree[key] = {**tree.get(key, {}), **value} if key == "sampling" else value
    if any(int(k) > tree.get("sampling", {}).get("n", 0) for k in tree.get("weights", ())):
        del tree["weights"]  # the run's own, which these samples do not reach
    for key in ("data", "scorer"):
        if key not in tree:
            raise JobError(f"{model} is not a run with {key}: pass --{key}")
    for key, value in overrides.items():
        assign(tree, key.split("."), value)
    try:
        return JOB.validate_python(tree)
    except ValidationError as error:
        raise JobError(explain("eval", error)) from error


def _defaults_from(folder: "RunFolder") -> dict[str, Any]:
    """Return the keys of an eval job that the job of the run in ``folder`` determines."""
    from services.store.folder import RunFolder
    from volley.job import RLJob, SFTJob

    _, job = RunFolder.open(folder.path)
    tree: dict[str, Any] = {"name": f"eval-{job.name}"[:64], "model": {"dtype": job.model.dtype}}
    if not isinstance(job, SFTJob):
        tree |= job.model_dump(mode="json", include={"scorer", "data", "actors", "reward_workers", "seed"})
        tree["sampling"] = {"max_tokens": job.sampling.max_tokens}
    if isinstance(job, RLJob) and job.evaluated_terms:
        tree["weights"] = dict(job.evaluated_terms)
    if isinstance(job, RLJob) and job.turns is not None:
        tree["turns"] = job.turns.model_dump(mode="json")
    if not isinstance(job, SFTJob) and job.rollout is not None:
        tree |= job.model_dump(mode="json", include={"rollout", "environment_workers", "gateway"})
    if isinstance(job, RLJob) and job.evaluation is not None:
        plan = job.evaluation.model_dump(mode="json")
        tree |= {"data": plan["data"], "sampling": plan["sampling"]}
    return tree


def _model_path(given: Path, folder: "RunFolder | None", checkpoint: int | None) -> tuple[Path, int | None]:
    """Return the model's folder and the steps it was trained for; a checkpoint is first exported into the run folder.

    Steps are None if ``given`` is a model folder, which does not say.
    """
    from services.runs.checkpoints import steps_of
    from services.runs.export import export_checkpoint, find_checkpoint

    if folder is None:
        return given.resolve(), None
    if checkpoint is None and (folder.model / "config.json").exists():
        rows = folder.read("metrics")
        return folder.model, rows[-1]["step"] + 1 if rows else None
    step = steps_of(find_checkpoint(folder, checkpoint))
    out = folder.path / "exports" / f"step-{step}"
    if not out.exists():
        export_checkpoint(folder, step, out)
    return out, step


def find_model(model: str, server: str | None, checkpoint: int | None) -> tuple[Path, "RunFolder | None"]:
    """The model's folder, and the folder of the run that made it if ``model`` names a run.

    Raises:
        JobError: there is no such model or run; or the run has no model yet.
    """
    is_model = any((Path(model) / file).exists() for file in ("config.json", "adapter_config.json"))
    folder = None if is_model else _folder(model, server)
    if folder is not None:
        _hush()
    return _model_path(Path(model), folder, checkpoint)[0], folder


def _hush() -> None:
    """Stop the libraries that load a model from showing progress bars and looking for an accelerator."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _folder(run: str, server: str | None) -> "RunFolder":
    """Return the run's folder, which must be visible on this machine."""
    from services.store.folder import RunFolder
    from volley.errors import HostError, JobError

    here = local_folder(run)
    if here is not None:
        if not (here.path / "job.yaml").exists():
            raise JobError(f"{run} is neither a model folder (no config.json) nor a run folder (no job.yaml)")
        return here
    with service_run(run, server) as found:
        path = Path(found.view()["record"]["folder"])
    if not path.is_dir():
        raise HostError(f"run {run} is in {path}, which this machine cannot see: run this command on one that can")
    return RunFolder(path)


def _scorer(text: str | None) -> object:
    import yaml

    from volley.errors import JobError

    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"--scorer {text!r} is not YAML") from error
    return {"kind": value} if isinstance(value, str) else value


def _ks(text: str | None, n: int) -> list[int]:
    """Return the values of k in ``text`` for which n samples suffice, and say which are left out.

    Raises:
        JobError: none of them, or no number, is in 1..n.
    """
    from volley.errors import JobError

    if text is None:
        return [1 << power for power in range(n.bit_length())]
    try:
        ks = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise JobError(f"--k {text!r}: write numbers, such as 1,8,64") from error
    left_out = [k for k in ks if k > n]
    advice = f"k = {', '.join(map(str, left_out))} needs more than n = {n} samples per prompt: pass -n {max(ks)}"
    if left_out == ks:
        raise JobError(f"--k {text}: {advice}")
    if left_out:
        typer.echo(f"note: left out, because {advice}", err=True)
    return [k for k in ks if k <= n]
