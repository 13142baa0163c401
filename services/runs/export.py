"""The model of a checkpoint as a Hugging Face folder, without starting a learner.

A checkpoint holds whole parameters, whatever the number of ranks was (see `learner.checkpoint`), so that one process
can load them into the model.
"""

import json
from pathlib import Path

from services.runs.checkpoints import complete_checkpoints, steps_of
from services.store.folder import RunFolder
from volley.errors import JobError
from volley.files import new_folder
from volley.job import EvalJob
from volley.model import ModelSpec

PREFIX = "param/lm."


class NoCheckpoint(JobError):
    """The run has no such checkpoint."""

    exit_code = 3


def find_checkpoint(folder: RunFolder, step: int | None) -> Path:
    """The run's checkpoint after ``step`` steps, or its newest one if ``step`` is None.

    Raises:
        NoCheckpoint: the run has no such checkpoint.
    """
    complete = complete_checkpoints(folder)
    found = complete if step is None else [each for each in complete if steps_of(each) == step]
    if not found:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        kept = ", ".join(str(steps_of(each)) for each in complete)
        raise NoCheckpoint(f"{folder.path} has {which}{f'; it has {kept}' if kept else ''}")
    return found[-1]


def export_checkpoint(folder: RunFolder, step: int | None, out: Path) -> Path:
    """Write the model of a run's checkpoint to ``out``, complete or not at all; returns the checkpoint.

    Raises:
        JobError: there is no such checkpoint, it belongs to another model, or the run trains no model.
        HostError: ``out`` exists already, or cannot be written.
    """
    _, job = RunFolder.open(folder.path)
    if isinstance(job, EvalJob):
        raise JobError(f"{folder.path}: an eval job trains no model")
    checkpoint = find_checkpoint(folder, step)
    with new_folder(out) as partial:
        _write(checkpoint, job.model, partial)
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
            for key in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                if not key.startswith(PREFIX):
                    continue
                parameter = missing.pop(key.removeprefix(PREFIX), None)
                tensor = tensors.get_tensor(key)
                if parameter is None or parameter.numel() != tensor.numel():
                    raise JobError(f"checkpoint {checkpoint} belongs to another model: {key} does not fit")
                with torch.no_grad():
                    parameter.copy_(tensor.view_as(parameter))
    if missing:
        raise JobError(f"checkpoint {checkpoint} belongs to another model: it lacks {min(missing)}")
    write_model(lm, {name: parameter.detach() for name, parameter in lm.named_parameters()}, model, out)
