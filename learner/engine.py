"""One model under ZeRO-3 on this rank, and the process group the ranks share."""

import logging
import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from learner.config import LearnerConfig
from volley.errors import Diverged
from volley.update import Optimizer

# A model so small is worth no sharding of its parameters: every rank keeps them whole between steps, and a layer
# is one unit to ZeRO's hooks, which otherwise cost a good part of its time. Gradients and moments are sharded still.
SMALL_BYTES = 64 << 20
KEPT_WHOLE = {"stage3_param_persistence_threshold": SMALL_BYTES, "memory_efficient_linear": False}
GRACE_SECONDS = 30.0  # a collective gives up so long after the step it belongs to should have ended


def open_store(host: str, port: int, world: int) -> Any:
    """The ranks' rendezvous: with ``port`` 0 opened here, on a port the system picks, else joined.

    Keep it as long as the ranks live.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, world, is_master=port == 0, wait_for_workers=False)


def join_ranks(rank: int, world: int, store: Any, *, cuda: bool, deadline_s: float) -> None:
    """Make this process rank ``rank`` of ``world``: gloo on CPU, NCCL on CUDA."""
    # A device of its own is all that Ray shows a rank, so its local rank is 0.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_SIZE="1")
    import deepspeed

    _quiet()
    # Shared-memory kernels for CPU inference; DeepSpeed would compile them at every first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline_s + GRACE_SECONDS)
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def _quiet() -> None:
    """Keep the logs to what a reader may act on."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that torch is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """ZeRO stage 3, with the job's own ``deepspeed:`` keys laid over it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are cut by tokens; losses carry their own scale
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": config.learner.gpus_per_rank > 0,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 100_000,
            **(KEPT_WHOLE if _weight_bytes(config) <= SMALL_BYTES else {}),
        },
    }
    if config.optimizer.clip_norm is not None:
        settings["gradient_clipping"] = config.optimizer.clip_norm
    if config.model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(settings, config.learner.deepspeed)


class Engine:
    """A DeepSpeed engine. Every rank must make the same calls in the same order.

    Args:
        load: loads the model; its parameters are sharded as they are read.
        optimizer: AdamW and its schedule.
    """

    def __init__(self, load: Callable[[], nn.Module], optimizer: Optimizer, config: LearnerConfig) -> None:
        import deepspeed

        settings = deepspeed_config(config)
        model = _sharded(load, settings)
        self.spec, self.ranks, self.steps = optimizer, config.learner.ranks, config.steps
        self.rate: float | None = None  # in place of the schedule's
        self.before_update: Callable[[], None] = lambda: None  # returns when the weights may change
        self.adam = _adamw(model, optimizer)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.adam, config=settings)

    @property
    def module(self) -> Any:
        """The model; its parameters hold shards."""
        return self._engine.module

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO-3 optimiser."""
        return self._engine.optimizer

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    def __call__(self, *inputs: Any, last: bool = False) -> Any:
        """A forward pass; ``last`` of those whose gradients the next `update` takes."""
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, which is this rank's share of a sum over ranks."""
        self._engine.backward(loss * self.ranks)  # DeepSpeed takes the mean over ranks

    def update(self, step: int) -> tuple[float, float]:
        """AdamW with the gradients gathered, at step ``step`` of the schedule: gradient norm before clipping, rate.

        Raises:
            Diverged: the gradient is not finite; the weights are as they were.
        """
        rate = learning_rate(self.spec, step, self.steps) if self.rate is None else self.rate
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self.before_update()
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._engine.optimizer.overflow or not math.isfinite(norm):
            raise Diverged(
                f"the gradient of step {step} is not finite: lower optimizer.lr, set optimizer.clip_norm, or clip the "
                "update more tightly, and resume from a checkpoint"
            )
        return norm, rate


def frozen(load: Callable[[], nn.Module], config: LearnerConfig) -> Any:
    """A model that is only asked: sharded over the ranks as the trained one is, whole on each where it is small.

    Every rank must ask a sharded one as often.
    """
    import deepspeed

    settings = deepspeed_config(config)
    if config.learner.ranks == 1 or _is_whole(settings):
        model = load().requires_grad_(False)
        return model.cuda() if config.learner.gpus_per_rank else model
    model = _sharded(load, settings).requires_grad_(False)
    settings.pop("gradient_clipping", None)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def _sharded(load: Callable[[], nn.Module], settings: dict[str, Any]) -> nn.Module:
    """The model that ``load`` gives; its parameters are sharded as they are read."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    sharding = HfDeepSpeedConfig(settings)  # from_pretrained shards at once while this object lives
    try:
        model = load()
    finally:
        del sharding
        unset_hf_deepspeed_config()
    for module in model.modules():
        for parameter in getattr(module, "parameters_used", ()):
            deepspeed.zero.register_external_parameter(module, parameter)
    if _is_whole(settings):
        _layers_are_units(model)
    return model


def _is_whole(settings: dict[str, Any]) -> bool:
    """Does every rank keep the parameters between steps?"""
    return bool(settings["zero_optimization"]["stage3_param_persistence_threshold"] >= SMALL_BYTES)


def learning_rate(spec: Optimizer, step: int, steps: int) -> float:
    """The rate of the step numbered ``step`` from 0: linear warm-up, then constant or cosine to zero."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    return spec.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _weight_bytes(config: LearnerConfig) -> int:
    return sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))


def _layers_are_units(model: nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_modules

    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    if found := names & {type(module).__name__ for module in model.modules()}:
        set_z3_leaf_modules(model, sorted(found))


def _adamw(model: nn.Module, spec: Optimizer) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
    )


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, dictionary by dictionary."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out
