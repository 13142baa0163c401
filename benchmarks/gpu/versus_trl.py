"""TRL's `GRPOTrainer` on the model, prompts and lengths of `whole_run`; on a GPU it generates with vLLM too."""

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.jobs import STEPS, WARM, inputs, shape
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.whole_run import SPEED


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    if importlib.util.find_spec("trl") is None:
        yield Row("TRL", "not run", "TRL is not installed")
        return
    sizes, seconds = shape(setting), steps_of(setting)[WARM:]
    theirs = len(seconds) * sizes["prompts"] * sizes["n"] / sum(seconds)
    found = setting.folder / SPEED
    ratio = f"; Volley has {float(found.read_text()) / theirs:.2f} times as many" if found.exists() else ""
    yield Row("TRL", "GRPOTrainer: the same model, prompts, samples and lengths", f"{theirs:.1f} samples/s{ratio}")


def steps_of(setting: Setting) -> list[float]:
    """The seconds of each of TRL's steps."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from benchmarks.versus_trl.trl_side import Clock, settings

    model, prompts = inputs(setting)
    sizes = shape(setting)
    generation: dict[str, Any] = (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if setting.cuda else {}
    )
    config = settings(
        str(setting.folder / "trl"),
        use_cpu=not setting.cuda,
        bf16=setting.cuda,
        per_device_train_batch_size=sizes["prompts"] * sizes["n"],
        num_generations=sizes["n"],
        max_completion_length=sizes["tokens"],
        max_steps=STEPS,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        **generation,
    )
    rows = [{"prompt": json.loads(line)["prompt"]} for line in prompts.read_text().splitlines()]
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=coins, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock]
    )
    trainer.train()
    return [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]


def coins(completions: list[str], **_: Any) -> list[float]:
    """The reward of `jobs.coin` for each of ``completions``."""
    from benchmarks.gpu.jobs import coin

    return [coin(sample, {}) for sample in completions]
