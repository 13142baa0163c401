"""The model of a checkpoint as a Hugging Face folder, without starting a learner.

A checkpoint holds the whole parameters whatever the number of ranks was (see `learner.checkpoint`), so that one
process can put them into the model they are of.
"""

import json
import shutil
from pathlib import Path

from services.checkpoints import complete_checkpoints, steps_of
from services.run_folder import RunFolder
from volley.errors import HostError, JobError
from volley.job import EvalJob, ModelSpec

PREFIX = "param/lm."


class NoCheckpoint(JobError):
    """The run has no such checkpoint."""

    exit_code = 3


def find_checkpoint(folder: RunFolder, step: int | None) -> Path:
    """The run's checkpoint after ``step`` steps, or its newest; raises `NoCheckpoint` where there is none."""
    there = complete_checkpoints(folder)
    if step is not None:
        there = [each for each in there if steps_of(each) == step]
    if not there:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        kept = ", ".join(str(steps_of(each)) for each in complete_checkpoints(folder))
        raise NoCheckpoint(f"{folder.path} has {which}{f'; it has {kept}' if kept else ''}")
    return there[-1]


def export_checkpoint(folder: RunFolder, step: int | None, out: Path) -> Path:
    """Write the model of a run's checkpoint to ``out``, complete or not at all; returns the checkpoint.

    Raises:
        JobError: there is no such checkpoint, it is of another model, or the run has none to train.
        HostError: ``out`` exists, or can not be written.
    """
    _, job = RunFolder.open(folder.path)
    if isinstance(job, EvalJob):
        raise JobError(f"{folder.path}: an eval job trains no model")
    checkpoint = find_checkpoint(folder, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HostError(f"{out} is there already: choose another folder")
    aside = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(checkpoint, job.model, aside)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except OSError as error:
        raise HostError(f"{out} can not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return checkpoint


def _write(checkpoint: Path, model: ModelSpec, out: Path) -> None:
    import torch
    from safetensors import safe_open

    from learner.policy import load_trained
    from learner.weights import write_model

    lm = load_trained(model, seed=0)
    missing = {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}
    for file in json.loads((checkpoint / "policy.json").read_text())["files"]:
        with safe_open(checkpoint / file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                if not key.startswith(PREFIX):
                    continue
                parameter = missing.pop(key.removeprefix(PREFIX), None)
                tensor = tensors.get_tensor(key)
                if parameter is None or parameter.numel() != tensor.numel():
                    raise JobError(f"checkpoint {checkpoint} is of another model: {key} does not fit")
                with torch.no_grad():
                    parameter.copy_(tensor.view_as(parameter))
    if missing:
        raise JobError(f"checkpoint {checkpoint} is of another model: it has no {min(missing)}")
    write_model(lm, {name: parameter.detach() for name, parameter in lm.named_parameters()}, model, out)
