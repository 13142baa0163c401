"""Which implementation of attention the ranks use."""

from learner.config import LearnerConfig

FLASH = "flash_attention_2"


def implementation(config: LearnerConfig) -> str | None:
    """What the job asks for, or flash attention where it is installed, as transformers names it.

    By default that is so on GPUs, in bfloat16, with a row per sample, for models that transformers runs with it. None
    lets transformers choose, which takes PyTorch's own kernels for most models.
    """
    spec = config.learner
    if spec.attention or not spec.gpus_per_rank or spec.shares_rows or config.model.dtype != "bfloat16":
        return spec.attention
    from transformers.utils import is_flash_attn_2_available

    return FLASH if is_flash_attn_2_available() and _supported(config) else None


def _supported(config: LearnerConfig) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        found = AutoConfig.from_pretrained(config.model.folder)
    except (OSError, ValueError, KeyError):
        return False  # loading the model says what is wrong
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None), "_supports_flash_attn", False))
