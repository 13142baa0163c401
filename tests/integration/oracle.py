"""Log-probs of an engine's samples, recomputed with a plain ``transformers`` model."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from volley.records import Group

State = dict[str, torch.Tensor]
Tokens = NDArray[np.int32]


class Oracle:
    """A float32 model that recomputes log-probs, with the weights of any version."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights: dict[int, State] = {0: self.state()}

    def state(self) -> State:
        """A copy of the weights, by checkpoint name."""
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items() if name not in tied}

    def other_weights(self, seed: int, scale: float = 0.1) -> State:
        """Version 0 with noise of ``scale`` on every weight."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: tensor + scale * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.weights[0].items()
        }

    def logprobs(
        self, group: Group, *, temperature: float = 1.0, top_p: float = 1.0, slept: bool = False
    ) -> NDArray[np.float32]:
        """Each token's log-prob under the weights and sampling settings it was drawn with, float32 [T].

        Args:
            slept: the engine slept whenever its weights changed, and lost its cache.
        """
        cuts = np.cumsum(group.lengths_n)[:-1]
        tokens_n, versions_n = np.split(group.tokens_T, cuts), np.split(group.versions_T, cuts)
        found_n = [np.zeros(0, np.float32)] * group.n
        alike: dict[int, list[int]] = {}  # samples under one version's weights, by version
        for i, versions in enumerate(versions_n):
            if (versions == versions[0]).all():
                alike.setdefault(int(versions[0]), []).append(i)
            else:
                found_n[i] = self._changed(group.prompt_p, tokens_n[i], versions, temperature, top_p, slept)
        for version, samples in alike.items():
            scored = self._unchanged(group.prompt_p, [tokens_n[i] for i in samples], version, temperature, top_p)
            for i, each in zip(samples, scored, strict=True):
                found_n[i] = each
        return np.concatenate(found_n)

    @torch.inference_mode()
    def _unchanged(
        self, prompt: Tokens, tokens_n: list[Tokens], version: int, temperature: float, top_p: float
    ) -> list[NDArray[np.float32]]:
        """Rows are padded on the right, where causal attention does not look."""
        rows = [torch.from_numpy(np.concatenate([prompt, tokens])).long() for tokens in tokens_n]
        fed = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self.model.load_state_dict(self.weights[version], strict=False)
        logits = self.model(fed).logits[:, len(prompt) - 1 : -1]
        return [
            _chosen(row[: len(tokens)], tokens, temperature, top_p)
            for row, tokens in zip(logits, tokens_n, strict=True)
        ]

    @torch.inference_mode()
    def _changed(
        self, prompt: Tokens, tokens: Tokens, versions: Tokens, temperature: float, top_p: float, slept: bool
    ) -> NDArray[np.float32]:
        """Unless the engine slept, it uses cached keys and values of earlier weights after a change in a sample."""
        fed = torch.tensor([*prompt, *tokens[:-1]])
        cache, logits, start = DynamicCache(config=self.model.config), [], 0
        cuts = [*np.flatnonzero(np.diff(versions)) + 1, len(tokens)]
        for first, cut in zip([0, *cuts], cuts, strict=False):
            end = len(prompt) + cut - 1
            if slept:
                cache, start = DynamicCache(config=self.model.config), 0
            self.model.load_state_dict(self.weights[int(versions[first])], strict=False)
            out = self.model(fed[None, start:end], past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -(cut - first) :])
            start = end
        return _chosen(torch.cat(logits), tokens, temperature, top_p)


def _chosen(logits: torch.Tensor, tokens: Tokens, temperature: float, top_p: float) -> NDArray[np.float32]:
    """The log-prob of each token; [T, V] and [T] -> [T]."""
    scaled = nucleus(logits / temperature, top_p)
    chosen = scaled.log_softmax(-1).gather(-1, torch.tensor(tokens[:, None], dtype=torch.int64))[:, 0]
    result: NDArray[np.float32] = chosen.numpy()
    return result


def version_changes(group: Group) -> set[tuple[int, int]]:
    """The pairs of versions that met inside one of the group's samples."""
    samples = np.split(group.versions_T, np.cumsum(group.lengths_n)[:-1])
    return {(int(a), int(b)) for sample in samples for a, b in pairwise(sample) if a != b}


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with all tokens outside the smallest set of probability ``top_p`` set to minus infinity."""
    if top_p == 1.0:
        return logits
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
