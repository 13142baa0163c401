"""The shared layout gives the same results as the flat one, on real models with real masks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.batch import rank_batch
from learner.layout import MicroBatch, Piece, micro_batches, samples_per_row
from learner.policy import Policy, probe_layouts
from tests.learner_batches import naive_logprobs, random_group, scored
from tests.unit.learner.conftest import tiny_lm
from volley.errors import JobError
from volley.records import Group

NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # the models always compute norms and rotations in float32
WIDE = 1 << 20  # in a model this wide attention costs next to nothing, so whole groups share a row


def pieces_of(groups: list[Group]) -> tuple[Piece, ...]:
    return rank_batch(groups, [scored(g, [0.0] * g.n) for g in groups], version=0, mask_truncated=False).pieces


def evaluate(policy: Policy, batches: list[MicroBatch], tokens: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rank's tokens, [T]."""
    logprob_T, entropy_T = torch.zeros(2, tokens, dtype=torch.float64)
    for batch in batches:
        scores = policy(batch)
        logprob_T = logprob_T.index_put((batch.index_T,), scores[0])
        entropy_T = entropy_T.index_put((batch.index_T,), scores[1])
    return logprob_T, entropy_T


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("budget", [1 << 20, 60])
@pytest.mark.parametrize("turns", [False, True])
def test_both_layouts_give_the_models_own_log_probs(kind: str, budget: int, turns: bool) -> None:
    lm = tiny_lm(kind)
    rng = np.random.default_rng(0)
    groups = [random_group(rng, i, n=5, turns=turns) for i in range(3)]
    assert any(len(group.observation_S) for group in groups) == turns
    direction_T = torch.from_numpy(rng.normal(size=sum(len(g.tokens_T) for g in groups)))
    parameters = dict(lm.named_parameters())
    expected_T, entropy_T = (
        torch.cat(each) for each in zip(*(naive_logprobs(lm, g, 0.8) for g in groups), strict=True)
    )
    expected = torch.autograd.grad((expected_T * direction_T + entropy_T).sum(), list(parameters.values()))
    policy = Policy(lm, 0.8, entropy_gradient=True)
    for shared in (False, True):
        batches = micro_batches(pieces_of(groups), budget, width=WIDE, allow_shared=shared)
        assert any(batch.segment_RL is not None for batch in batches) == shared
        got_T, got_entropy_T = evaluate(policy, batches, len(direction_T))
        torch.testing.assert_close(got_T, expected_T, **NEAR)
        torch.testing.assert_close(got_entropy_T, entropy_T, **NEAR)
        gradient = torch.autograd.grad((got_T * direction_T + got_entropy_T).sum(), list(parameters.values()))
        for name, mine, theirs in zip(parameters, gradient, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **NEAR, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6)), max_size=5),
    budget=st.integers(4, 120),
    shared=st.booleans(),
    width=st.sampled_from([1, 32, WIDE]),
)
def test_every_token_is_packed_once_within_the_budget(
    shape: list[tuple[int, list[int]]], budget: int, shared: bool, width: int
) -> None:
    pieces, start = [], 0
    for prompt, lengths in shape:
        tokens = sum(lengths)
        ids_T = np.arange(start + 1, start + tokens + 1, dtype=np.int32)  # a token's id is its position
        pieces.append(Piece(np.zeros(prompt, np.int32), ids_T, np.array(lengths, np.int32), start + np.arange(tokens)))
        start += tokens
    batches = micro_batches(pieces, budget, width=width, allow_shared=shared)
    index_T = torch.cat([batch.index_T for batch in batches]) if batches else torch.zeros(0)
    assert sorted(index_T.tolist()) == list(range(start))
    for batch in batches:
        assert torch.equal(batch.token_T, batch.index_T + 1)
        assert batch.ids_RL.numel() <= budget or len(batch.ids_RL) == 1
        rows_T, columns_T = batch.at_T // batch.ids_RL.shape[1], batch.at_T % batch.ids_RL.shape[1]
        before_T = batch.ids_RL[rows_T, columns_T]
        assert all(before in (0, token - 1) for before, token in zip(before_T, batch.token_T, strict=True))


def test_dropping_a_sample_drops_its_observations() -> None:
    rng = np.random.default_rng(1)
    (piece,) = pieces_of([random_group(rng, 0, n=6, length=(2, 9), turns=True)])
    keep_n = np.array([True, False, True, True, False, False])
    left = piece.only(keep_n)
    whole, part = ([each.only(np.arange(n) == i) for i in range(n)] for each, n in ((piece, 6), (left, 3)))
    for one, other in zip(part, [each for each, keep in zip(whole, keep_n, strict=True) if keep], strict=True):
        np.testing.assert_array_equal(one.body()[0], other.body()[0])
        np.testing.assert_array_equal(one.index_T, other.index_T)
    assert left.row_tokens == len(piece.prompt_p) + int(piece.spans_n[keep_n].sum())


def test_a_row_is_shared_only_if_that_is_cheaper() -> None:
    rng = np.random.default_rng(0)

    def piece(prompt: int, length: int) -> Piece:
        group = random_group(rng, 0, n=16, prompt=(prompt, prompt + 1), length=(length, length + 1))
        return pieces_of([group])[0]

    assert samples_per_row(piece(100, 4), 1 << 20, width=512) == 16
    assert samples_per_row(piece(4, 2000), 1 << 20, width=64) == 1
    assert 1 < samples_per_row(piece(100, 100), 600, width=4096) < 16  # as many as fit in the budget
    assert samples_per_row(piece(100, 100), 150, width=4096) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "qwen3"])
def test_the_probe_allows_shared_rows(kind: str) -> None:
    settings: dict[str, Any] = {"sliding_window": None} if kind == "mistral" else {}
    assert probe_layouts(Policy(tiny_lm(kind, **settings), 1.0), "float32", torch.device("cpu"))


def test_a_sliding_window_forbids_shared_rows() -> None:
    assert not probe_layouts(Policy(tiny_lm("mistral", sliding_window=4), 1.0), "float32", torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharpness", [1.0, 8.0, 40.0])
def test_the_probe_knows_rounding_from_another_function(dtype: str, sharpness: float) -> None:
    """Peaked models have large logits, which bfloat16 rounds coarsely; a model that scales them is another function."""

    def probed(kind: str, **settings: Any) -> bool:
        lm = tiny_lm(kind, hidden_size=128, num_hidden_layers=4, **settings).to(getattr(torch, dtype))
        with torch.no_grad():
            for weight in lm.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
            lm.base_model.norm.weight.mul_(sharpness)
        return probe_layouts(Policy(lm, 1.0), dtype, torch.device("cpu"))

    assert probed("qwen2")
    with pytest.raises(JobError, match=r"type granite are not supported: .* where rounding explains"):
        probed("granite", logits_scaling=3.0)
