"""Run real TRL trainers on a tiny model; write the inputs of their losses as JSON.

    python -m tests.integration.trl_runs <model> <out.json> <run> [<run> ...]

This is a separate program because TRL warns about vLLM's version when it is imported and keeps global state about
processes, and because one run uses two processes.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
STEPS = 3
PROMPTS = ["1+1=", "2+3=", "9*7=", "4-4="]
LENGTH = 4


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """The reward of an easy task, on which an untrained model gets about 0.2."""
    return [sum(character.isdigit() for character in text) / LENGTH for text in completions]


def answer(text: str) -> int | None:
    """One of three answers, determined by the first character."""
    return ord(text[0]) % 3 if text else None


def right_answer(completions: list[str], **_: Any) -> list[float | None]:
    """1 if the answer is 1, else 0; None, as if scoring had failed, if the last character has an even code."""
    return [None if text and ord(text[-1]) % 2 == 0 else float(answer(text) == 1) for text in completions]


RUNS: dict[str, dict[str, Any]] = {
    "max": {"objective": {"kind": "max_at_k", "k": 2}, "reward": share_of_digits},
    "maj": {
        "objective": {"kind": "maj_at_k", "k": 3},
        "reward": right_answer,
        "answer_fn": answer,
        "config": {
            "mask_truncated_completions": True,
            "max_completion_length": 32,
            "num_generations": 8,
            "per_device_train_batch_size": 16,
        },
    },
    "mean": {"objective": {"kind": "mean"}, "reward": share_of_digits, "config": {"learning_rate": 0.75 * 0.05}},
    "plain": {"objective": None, "reward": share_of_digits, "config": {"learning_rate": 0.05}},
    "learn": {
        "objective": {"kind": "max_at_k", "k": 2},
        "reward": share_of_digits,
        "config": {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 20},
    },
    "two_processes": {
        "objective": {"kind": "maj_at_k", "k": 3},
        "reward": right_answer,
        "answer_fn": answer,
        # One group of 8 per step, half of it in each process.
        "config": {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    },
}


def run(name: str, model: str) -> dict[str, Any]:
    """Train with ``RUNS[name]``; returns the samples in this process's losses, TRL's log, and the weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from volley.integrations.trl import KSampleGRPOTrainer

    spec = RUNS[name]
    settings: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,  # both share one generation, which is shuffled and split in two
        "max_completion_length": LENGTH,
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        **spec.get("config", {}),
    }
    args = GRPOConfig(
        str(Path(sys.argv[2]).parent / name),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    base = GRPOTrainer if spec["objective"] is None else KSampleGRPOTrainer

    class Recording(base):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            decode = self.processing_class.batch_decode
            rows = zip(
                decode(inputs["prompt_ids"], skip_special_tokens=True),
                decode(inputs["completion_ids"], skip_special_tokens=True),
                inputs["completion_mask"].any(-1).tolist(),
                inputs["advantages"].tolist(),
                strict=True,
            )
            seen.extend([self.state.global_step, *row] for row in rows)
            return super()._compute_loss(model, inputs)

    seen: list[list[Any]] = []
    extra = {} if spec["objective"] is None else {"objective": spec["objective"], "answer_fn": spec.get("answer_fn")}
    trainer = Recording(
        model=model,
        reward_funcs=spec["reward"],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        **extra,
    )
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight
    return {
        "seen": seen,
        "log": trainer.state.log_history,
        "logged_advantages": list(trainer._logs["advantages"]),
        "weights": weights.detach().tolist(),
    }


def page(model: str) -> str:
    """Run the code on the integrations page at a tiny scale; its second trainer is created but not run."""
    from datasets import Dataset

    first, second, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder = Path(sys.argv[2]).parent
    tiny = {'"out"': repr(str(folder / "page")), "max_steps=300": "max_steps=1", "length=512": f"length={LENGTH}"}
    tiny['scale_rewards="none"'] = 'scale_rewards="none", use_cpu=True, bf16=False'
    for large, small in tiny.items():
        first = first.replace(large, small)
    names: dict[str, Any] = {
        "model": model,
        "reward": share_of_digits,
        "dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "boxed": answer,
    }
    kinds = []
    for code in (first, second):
        (folder / "page.py").write_text(code)
        names = runpy.run_path(str(folder / "page.py"), names)
        kinds.append(f"{names['trainer'].objective.kind} {names['trainer'].state.global_step}")
    return " ".join(kinds)


def main() -> None:
    import os

    import torch

    torch.set_num_threads(1)
    sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL imports it where it finds it, for most of a minute
    out = Path(f"{sys.argv[2]}{os.environ.get('RANK', '')}")
    model, names = sys.argv[1], sys.argv[3:]
    out.write_text(json.dumps({name: page(model) if name == "page" else run(name, model) for name in names}))
    if torch.distributed.is_initialized():
        # Both processes exit together: gloo aborts a process whose peer disappears while the interpreter exits.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
