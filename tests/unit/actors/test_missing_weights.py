"""Which parameters an update must bring, with a small module in place of vLLM's model and its layerwise reload."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn


class Served(nn.Module):
    """A quantised matrix with the scale that vLLM adds, and a head tied to the embedding.

    As vLLM reloads it, the module has the checkpoint's layout meanwhile: without the scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.proj = nn.Linear(2, 2, bias=False)
        self.proj.weight_scale = nn.Parameter(torch.ones(1))

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in tensors}

    def restore(self) -> None:
        del self.proj.weight_scale


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn of deprecated calls
        import vllm.model_executor.model_loader.reload as reload

        from actors.weight_engine import WeightFileEngine

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: model.restore())
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    made = WeightFileEngine.__new__(WeightFileEngine)  # the constructor wants vLLM's whole configuration
    made.model, made.model_config, made._partial, made.device = Served(), None, False, torch.device("cpu")
    return made


def update(engine: Any, folder: Path, *names: str) -> None:
    from actors.weight_engine import WeightFiles

    path = folder / "weights.safetensors"
    path.write_bytes(save({name: torch.zeros(2, 2) for name in names}))
    engine.start_weight_update()
    engine.receive_weights(WeightFiles(version=1, paths=[str(path)]))
    engine.finish_weight_update()


def test_neither_scales_of_vllm_nor_tied_tensors_are_demanded(engine: Any, tmp_path: Path) -> None:
    update(engine, tmp_path, "embed.weight", "proj.weight")


@pytest.mark.parametrize("left_out", ["embed.weight", "proj.weight"])
def test_any_other_parameter_that_is_missing_is_named(engine: Any, tmp_path: Path, left_out: str) -> None:
    with pytest.raises(ValueError, match=f"^weights are missing from the update: {left_out}$"):
        update(engine, tmp_path, *({"embed.weight", "proj.weight"} - {left_out}))
