"""One model under ZeRO-3 on this rank, and the process group the ranks share."""

import logging
import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learner.compiled import units
from learner.config import LearnerConfig
from learner.sparing import spare, sparing_settings
from volley.errors import Diverged
from volley.update import Optimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

# Parameters of a model this small are not worth sharding: every rank keeps them whole between steps, and ZeRO's hooks,
# which otherwise take a large part of the time, treat a layer as one unit. Gradients and moments are still sharded.
SMALL_BYTES = 64 << 20
KEPT_WHOLE = {"stage3_param_persistence_threshold": SMALL_BYTES, "memory_efficient_linear": False}


def open_store(host: str, port: int, world: int) -> Any:
    """The rendezvous of the ranks: with ``port`` 0 it is opened here on a free port, otherwise joined.

    Keep a reference for as long as the ranks live.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, world, is_master=port == 0, wait_for_workers=False)


def join_ranks(rank: int, world: int, store: "Store | None", *, cuda: bool, deadline_s: float) -> None:
    """Make this process rank ``rank`` of ``world``: gloo on CPU, NCCL on CUDA.

    Args:
        deadline_s: limit on a collective.
    """
    # Ray shows each rank only its own device, so its local rank is 0.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_SIZE="1")
    import deepspeed

    _quiet()
    # These are shared-memory kernels for CPU inference, which DeepSpeed would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline_s)
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def another_group(deadline_s: float) -> "ProcessGroup":
    """A second process group of all ranks, on their CPUs, for collectives of another thread. All ranks must call it."""
    group: ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    return group


def _quiet() -> None:
    """Reduce the logs to messages that a reader can act on."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed uses names of collectives that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """Settings for ZeRO stage 3, overridden by the job's ``deepspeed:`` keys."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are cut by tokens, and losses are already scaled
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.optimizer.clip_norm or 0.0,  # left out, DeepSpeed clips at 1
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": config.learner.gpus_per_rank > 0,
            **sparing_settings(cuda=config.learner.gpus_per_rank > 0),
            "stage3_param_persistence_threshold": 100_000,
            **(KEPT_WHOLE if _weight_bytes(config) <= SMALL_BYTES else {}),
        },
    }
    if config.model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"  # sum gradients over ranks in float32, as over micro-batches
    return _merged(settings, config.learner.deepspeed)


class Engine:
    """A DeepSpeed engine. Every rank must make the same calls in the same order.

    Args:
        load: loads the model; its parameters are sharded while they are read.
        optimizer: AdamW and its schedule.

    Attributes:
        copies: how many ranks hold the same micro-batches: those of a sequence group.
    """

    def __init__(self, load: Callable[[], nn.Module], optimizer: Optimizer, config: LearnerConfig) -> None:
        import deepspeed

        settings = deepspeed_config(config)
        model = _sharded(load, settings, compiled=config.learner.compile)
        self.spec, self.ranks, self.steps = optimizer, config.learner.ranks, config.steps
        self.copies = config.learner.sequence_parallel
        self.rate: float | None = None  # overrides the schedule
        self.before_update: Callable[[], None] = lambda: None  # blocks until the weights may change
        self.adam = _adamw(model, optimizer)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.adam, config=settings)
        spare(self._engine.optimizer)

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

    def __call__(self, *inputs: object, last: bool = False) -> Any:
        """A forward pass; ``last`` marks the last one before the next `update`."""
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, this rank's part of a sum over ranks."""
        self._engine.backward(loss * self.ranks)  # because DeepSpeed averages over ranks

    def update(self, step: int) -> tuple[float, float]:
        """Apply AdamW at step ``step`` of the schedule; returns the gradient norm before clipping and the rate.

        Raises:
            Diverged: the gradient is not finite; the weights are unchanged.
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
    """A model that is not trained: sharded over the ranks as the trained one is, or whole on each rank if it is small.

    Every rank must call a sharded model equally often.
    """
    import deepspeed

    settings = deepspeed_config(config)
    if config.learner.ranks == 1 or _is_whole(settings):
        model = load().requires_grad_(False)
        return model.cuda() if config.learner.gpus_per_rank else model
    model = _sharded(load, settings, compiled=config.learner.compile).requires_grad_(False)
    settings.pop("gradient_clipping", None)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def _sharded(load: Callable[[], nn.Module], settings: dict[str, Any], *, compiled: bool) -> nn.Module:
    """The model that ``load`` returns, with its parameters sharded while they are read."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    sharding = HfDeepSpeedConfig(settings)  # while this object lives, from_pretrained shards as it loads
    try:
        model = load()
    finally:
        del sharding
        unset_hf_deepspeed_config()
    for module in model.modules():
        for parameter in getattr(module, "parameters_used", ()):
            deepspeed.zero.register_external_parameter(module, parameter)
    if _is_whole(settings) or compiled:  # ZeRO's hooks within a layer would break what is compiled
        _layers_are_units(model)
    return model


def _is_whole(settings: dict[str, Any]) -> bool:
    """Whether every rank keeps the whole parameters between steps."""
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
    return sum(file.stat().st_size for file in config.model.folder.glob("*.safetensors"))


def _layers_are_units(model: nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_modules

    if found := {type(layer).__name__ for layer in units(model)}:
        set_z3_leaf_modules(model, sorted(found))


def _adamw(model: nn.Module, spec: Optimizer) -> torch.optim.AdamW:
    groups = decay_groups(model, spec.weight_decay)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: matrices decay, vectors (norms and biases) do not.

    ``ds_shape`` is the whole shape of a sharded parameter. Without decay all parameters form one group.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weight_decay:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [each for each in trained if len(getattr(each, "ds_shape", each.shape)) > 1]
    vectors = [each for each in trained if len(getattr(each, "ds_shape", each.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, merged recursively."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out
