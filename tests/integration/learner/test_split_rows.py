"""Rows split over two and four processes: log-probs and gradients of the whole model, in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from learner.engine import join_ranks
from learner.layout import MicroBatch, micro_batches
from learner.policy import Policy, checkpoint_layers, probe_layouts
from learner.sequence import ATTENTION, split_rows
from tests.learner_batches import naive_logprobs, random_group
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.test_layout import NEAR, evaluate, pieces_of
from volley.errors import JobError
from volley.records import Group
from volley.update import LearnerSpec

pytestmark = pytest.mark.integration
RANKS = 4
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 39}
# By name: ranks that split a row, the type of model and its settings. With four, the two key-value heads are repeated.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "two ranks": (2, "llama", HEADS),
    "repeated key-value heads": (4, "llama", HEADS),
    "one key-value head": (2, "qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    "learned positions": (2, "gpt2", GPT2),
    "biases": (4, "qwen2", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "recomputed layers": (2, "llama", HEADS),
}
REFUSED: dict[str, tuple[int, str, dict[str, Any], str]] = {
    "heads": (
        4,
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        "write one of 1, 3, 6",
    ),
    "windows": (2, "mistral", {"sliding_window": 4}, "mistral have others: write sequence_parallel: 1"),
}


def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return [random_group(rng, i, n=3, turns=True, prompt=(2, 30)) for i in range(3)]


def batches(made: list[Group]) -> list[MicroBatch]:
    """Micro-batches of one and of several rows, most of lengths that four ranks do not divide."""
    return micro_batches(pieces_of(made), 90, width=1, allow_shared=False)


def policy(name: str, rank: int) -> Policy:
    size, kind, settings = CASES[name]
    split = split_rows(rank, LearnerSpec(ranks=RANKS, sequence_parallel=size), 60.0)
    lm = tiny_lm(kind, **settings)
    lm.set_attn_implementation(ATTENTION)
    if name == "recomputed layers":
        checkpoint_layers(lm)
    return Policy(lm, 0.8, entropy_gradient=True, split=split)


def loss_of(logprob_T: torch.Tensor, entropy_T: torch.Tensor) -> torch.Tensor:
    """Every token has another weight."""
    return (logprob_T * torch.linspace(-1, 2, len(logprob_T))).sum() + (entropy_T**2).sum()


def computed(name: str, rank: int) -> dict[str, Any]:
    """What one rank computes: the scores of all tokens, and its part of the gradient."""
    made = groups()
    model = policy(name, rank)
    scores = evaluate(model, batches(made), sum(len(group.tokens_T) for group in made))
    loss_of(*scores).backward()  # type: ignore[no-untyped-call]
    assert not probe_layouts(model, "float32", torch.device("cpu"))
    gradient = {name: each.grad for name, each in model.lm.named_parameters()}
    return {"scores": [each.detach() for each in scores], "gradient": gradient}


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
    join_ranks(rank, RANKS, store, cuda=False, deadline_s=60.0)
    torch.save({name: computed(name, rank) for name in CASES}, folder / f"{rank}.pt")
    errors = {}
    for name, (size, kind, settings, _) in REFUSED.items():
        split = split_rows(rank, LearnerSpec(ranks=RANKS, sequence_parallel=size), 60.0)
        try:
            Policy(tiny_lm(kind, **settings), 1.0, split=split)
        except JobError as error:
            errors[name] = str(error)
    torch.save(errors, folder / f"errors-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four processes left what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(folder,), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
    return folder


def test_the_batches_are_the_hard_ones() -> None:
    made = batches(groups())
    assert {2, 4} & {len(batch.ids_RL) for batch in made}
    assert max(batch.ids_RL.shape[1] for batch in made) == GPT2["n_positions"]  # padding goes beyond the last position
    assert sum(batch.ids_RL.shape[1] % 4 != 0 for batch in made) > 2
    assert any(len(group.observation_S) for group in groups())


@pytest.mark.parametrize("name", CASES)
def test_split_rows_give_the_log_probs_and_the_gradient_of_whole_ones(ranks: Path, name: str) -> None:
    _, kind, settings = CASES[name]
    lm = tiny_lm(kind, **settings)
    scores = [torch.cat(each) for each in zip(*(naive_logprobs(lm, group, 0.8) for group in groups()), strict=True)]
    loss_of(*scores).backward()  # type: ignore[no-untyped-call]
    found = [torch.load(ranks / f"{rank}.pt")[name] for rank in range(RANKS)]
    for each in found:
        for mine, other, whole in zip(each["scores"], found[0]["scores"], scores, strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, whole.detach(), **NEAR)
    copies = RANKS // CASES[name][0]
    for parameter_name, parameter in lm.named_parameters():
        total = sum(each["gradient"][parameter_name] for each in found) / copies
        torch.testing.assert_close(total, parameter.grad, **NEAR, msg=parameter_name)
    parts = [each["gradient"]["lm_head.weight"] for each in found] if kind != "gpt2" else []
    assert not any(torch.allclose(part, sum(parts) / copies) for part in parts), "each rank has only a part"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_rows_cannot_be_split_is_refused_on_all_ranks(ranks: Path, name: str) -> None:
    for rank in range(RANKS):
        assert REFUSED[name][3] in torch.load(ranks / f"errors-{rank}.pt")[name]
