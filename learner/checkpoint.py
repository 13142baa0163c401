"""Checkpoints: trained parameters and AdamW's moments in float32, independent of the number of ranks.

Parameters that are not trained are left out, because the job's model has them.

    policy-00000.safetensors ...    the tensors ``param/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME`` of one bucket
    policy.json                     AdamW's step count and the list of files
    value-*.safetensors, value.json the same for the value model, if there is one

`learner.pool.LearnerPool` makes the folder appear only when it is complete.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from learner.engine import Engine
from learner.weights import buckets, file_parts, full_elements
from volley.errors import JobError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Snapshot:
    """One rank's files of a checkpoint, in memory, so that training may go on while they are written."""

    def __init__(self) -> None:
        self._files: dict[str, list[Tensor]] = {}  # as `file_parts`

    def add(self, file: str, parts: list[Tensor]) -> None:
        self._files[file] = parts

    def write(self, folder: Path) -> str:
        """Write the files into ``folder``; returns why one could not be written, or ""."""
        return next(filter(None, (write_file(folder / file, parts) for file, parts in self._files.items())), "")


def write_file(file: Path, parts: list[Tensor]) -> str:
    """Write ``parts``, uint8 [bytes] each; returns why that failed, or "".

    The safetensors library would hold the interpreter's lock while it writes, and keep other threads from training.
    """
    try:
        with file.open("wb") as out:
            out.writelines(part.numpy().data for part in parts)
    except OSError as error:
        return f"{file.name}: {error}"
    return ""


def engine_files(
    engine: Engine, name: str, bucket_bytes: int, *, rank: int, ranks: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """This rank's share of the files of ``engine``'s state, with their parts, in memory of their own.

    Every rank must exhaust it, because each file is gathered from all.
    """
    steps = _adam_steps(engine)
    files = []
    for number, bucket in enumerate(buckets(_trained(engine), bucket_bytes)):
        files.append(f"{name}-{number:05d}.safetensors")
        mine = number % ranks == rank
        tensors = {}
        for parameter_name, parameter in bucket:
            for key, tensor in _whole(parameter, moments=steps > 0).items():
                if mine:
                    tensors[f"{key}/{parameter_name}"] = tensor.detach().to("cpu", copy=True).contiguous()
        if mine:
            yield files[-1], file_parts(tensors)
    if rank == 0:
        yield f"{name}.json", text_parts(json.dumps({"adam_steps": steps, "files": files}))


def text_parts(text: str) -> list[Tensor]:
    """``text`` as the only part of a file."""
    return [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)]


def state_bytes(engine: Engine) -> int:
    """The size of ``engine``'s state in a checkpoint: parameters and moments in float32."""
    return sum(4 * (1 + len(MOMENTS)) * full_elements(parameter) for _, parameter in _trained(engine))


def load_engine(engine: Engine, name: str, folder: Path, *, rank: int, ranks: int) -> None:
    """Load the files of `engine_files` of any number of ranks. Every rank must call it.

    Raises:
        JobError: the checkpoint belongs to another model.
    """
    about = json.loads((folder / f"{name}.json").read_text())
    parameters: dict[str, nn.Parameter] = dict(_trained(engine))
    _start_adam(engine, about["adam_steps"])
    seen = set()
    for file in about["files"]:
        with safe_open(folder / file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - `tensors` is not a mapping
                kind, parameter_name = key.split("/", 1)
                tensor = tensors.get_tensor(key)
                _check_shape(parameters.get(parameter_name), parameter_name, tensor, folder)
                _set(parameters[parameter_name], kind, tensor, rank=rank, ranks=ranks)
                seen.add(parameter_name)
    if missing := parameters.keys() - seen:
        raise JobError(f"checkpoint {folder} belongs to another model: it has no {min(missing)}")


def _trained(engine: Engine) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in engine.module.named_parameters() if each.requires_grad)


def _whole(parameter: nn.Parameter, *, moments: bool) -> Mapping[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out = {"param": safe_get_full_fp32_param(parameter)}
    if moments:
        out |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    return out


def _set(parameter: nn.Parameter, kind: str, whole: Tensor, *, rank: int, ranks: int) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    part = _part(whole, rank, ranks)
    if kind == "param":
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if rank == 0:
                parameter.copy_(whole)
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, kind)


def _part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Rank ``rank``'s shard: one of equal slices of the flat tensor, the last one padded with zeros."""
    size = -(-whole.numel() // ranks)
    mine = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(mine, (0, size - mine.numel()))


def _check_shape(parameter: nn.Parameter | None, name: str, tensor: Tensor, folder: Path) -> None:
    if parameter is None or full_elements(parameter) != tensor.numel():
        raise JobError(
            f"checkpoint {folder} belongs to another model: {name} has another size; use the model it was made with"
        )


def _adam_steps(engine: Engine) -> int:
    """Updates made by AdamW; it has no moments before the first."""
    states = [state for flat in engine.zero.fp32_partitioned_groups_flat if (state := engine.adam.state.get(flat))]
    return int(states[0]["step"]) if states else 0


def _start_adam(engine: Engine, steps: int) -> None:
    """Set AdamW's state as after ``steps`` updates, with moments of zero for `_set` to fill."""
    engine.adam.state.clear()
    if not steps:
        return
    for flat in engine.zero.fp32_partitioned_groups_flat:
        engine.adam.state[flat] = {
            "step": torch.tensor(float(steps), dtype=torch.float32, device=flat.device),
            **{key: torch.zeros_like(flat) for key in MOMENTS},
        }
