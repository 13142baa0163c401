"""Checks of a job's LoRA adapters that need no model in memory."""

from volley.errors import JobError
from volley.model import ModelSpec


def check_adapters(model: ModelSpec) -> None:
    """Raise `JobError` for target modules that match no weight matrix in the model's files.

    The learner makes the final check, because only it knows the types of the layers.
    """
    if model.lora is None or isinstance(model.lora.target_modules, str):
        return
    from safetensors import safe_open

    matrices = set()
    for file in model.folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            names = [name for name in tensors.keys() if name.endswith(".weight")]  # noqa: SIM118 - no mapping
            matrices |= {f".{name}" for name in names if len(tensors.get_slice(name).get_shape()) == 2}
    for target in model.lora.target_modules:
        if not any(name.endswith(f".{target}.weight") for name in matrices):
            ends = sorted({name.split(".")[-2] for name in matrices} - {"lm_head", "embed_tokens"})
            raise JobError(
                f"model.lora.target_modules: {model.folder} has no matrix {target!r}: choose from "
                f"[{', '.join(ends)}], or write all-linear"
            )
