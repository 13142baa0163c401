"""Adapters: what is trained and published, and that export and actors merge to bitwise equal models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, load_file

from actors.adapters import Merger
from learner.batch import Packer, rank_batch
from learner.lora import FOLDER, published, split, without_adapters
from learner.policy import Policy, StartingPolicy, load_lm, load_trained
from learner.reinforce import Reinforcer
from learner.weights import file_parts, write_model
from services.data.tokens import load_tokenizer
from services.jobs.adapters import check_adapters
from tests.learner_batches import naive_logprobs, on_policy, random_group, scored
from tests.models import tiny_llama
from tests.plain_engine import PlainEngine
from tests.unit.learner.conftest import tiny_lm
from volley.errors import JobError
from volley.job import JOB
from volley.lora import DOWN, UP, LoraSpec
from volley.model import ModelSpec
from volley.objectives import Mean
from volley.update import KLPenalty, Optimizer, PolicyUpdate

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose adapted matrices have biases, which an engine loads together with them."""
    return tiny_llama(tmp_path_factory.mktemp("base"), attention_bias=True)


def spec_of(base: Path, **changes: Any) -> ModelSpec:
    lora = {"rank": 4, "alpha": 12, "target_modules": ["q_proj", "down_proj"], **changes}
    return ModelSpec.model_validate({"path": base, "lora": lora})


def trained(spec: ModelSpec) -> Any:
    """The model with adapters that change its output."""
    lm = load_trained(spec, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for _, parameter in published(lm):
            parameter.normal_(std=0.1)
    return lm


def state(lm: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in lm.named_parameters()}


def test_new_adapters_change_nothing_and_are_the_same_on_every_rank(base: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, other = load_trained(spec_of(base), seed=1), load_trained(spec_of(base), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one(IDS).logits, load_lm(base, "float32")(IDS).logits)
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(state(one).values(), state(other).values(), strict=True)
    )
    assert any(name.endswith(DOWN) and each.abs().max() > 0 for name, each in published(one))


def test_a_step_changes_only_the_adapters_and_measures_kl_against_the_base(base: Path) -> None:
    lm = trained(spec_of(base))
    before, plain = state(lm), load_lm(base, "float32")
    engine = PlainEngine(Policy(lm, 1.0), Optimizer(lr=1e-2))
    spec = PolicyUpdate(kl=KLPenalty(coefficient=0.1))
    pack = Packer(budget=64, width=64, allow_shared=True, device=torch.device("cpu"))
    reinforcer = Reinforcer(spec, engine, pack, reference=StartingPolicy(engine))  # type: ignore[arg-type]
    group = on_policy(random_group(np.random.default_rng(0), 0), lm)
    batch = rank_batch([group], [scored(group, [1.0, 0.0, 0.0, 2.0])], version=0, mask_truncated=False)
    metrics, _ = reinforcer.step(batch, Mean(), 0)
    away_T = naive_logprobs(lm_of(before, spec_of(base)), group)[0] - naive_logprobs(plain, group)[0]
    assert metrics["kl_k1"] == pytest.approx(float(away_T.detach().mean()), rel=1e-3)
    assert metrics["logprob_mismatch_max"] < 1e-5
    changed = {name for name, each in state(lm).items() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert sum(each.numel() for _, each in published(lm)) < sum(each.numel() for each in before.values()) / 5


def lm_of(parameters: dict[str, torch.Tensor], spec: ModelSpec) -> Any:
    lm = load_trained(spec, seed=0)
    lm.load_state_dict(parameters)
    return lm


def test_with_adapters_off_it_is_bitwise_the_base_even_after_an_error(base: Path) -> None:
    lm = trained(spec_of(base))
    with_adapters = lm(IDS).logits

    def fails() -> None:
        with without_adapters(lm):
            assert torch.equal(lm(IDS).logits, load_lm(base, "float32")(IDS).logits)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert torch.equal(lm(IDS).logits, with_adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_and_actors_merge_bitwise_equally_and_as_peft_does(base: Path, dtype: str, tmp_path: Path) -> None:
    spec = spec_of(base).model_copy(update={"dtype": dtype})
    lm = trained(spec)
    whole, adapters = split(state(lm), spec.lora)  # type: ignore[arg-type]
    assert whole.keys() == dict(load_lm(base, dtype).named_parameters()).keys()
    files = []
    for number, (name, parameter) in enumerate(published(lm)):  # A and B of one matrix are in different files
        assert torch.equal(adapters[name], parameter)
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(file_of({name: parameter.detach()}))
        files.append(str(file))
    received = {name: each for file in Merger(spec).full_matrices(files) for name, each in load(file.tobytes()).items()}
    blocks = {"self_attn", "mlp"}  # whole blocks, because the engine holds q, k and v as one matrix
    assert received.keys() == {name for name in whole if blocks & set(name.split("."))}
    assert all(torch.equal(received[name], whole[name]) for name in received)
    untouched = state(load_lm(base, dtype))
    changed = {name for name in whole if not torch.equal(whole[name], untouched[name])}
    assert changed == {name.replace(UP, ".weight") for name in adapters if name.endswith(UP)}
    if dtype == "float32":
        by_peft = merged_by_peft(base, lm, spec, tmp_path / "by_peft")
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, by_peft[name], atol=1e-6, rtol=0)


def merged_by_peft(base: Path, lm: Any, spec: ModelSpec, folder: Path) -> dict[str, torch.Tensor]:
    """The model in the folder as `peft` and `transformers` read it; its outputs must also agree."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(lm, state(lm), spec, folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(load_lm(base, "float32"), str(folder / FOLDER)).eval()
    assert AutoTokenizer.from_pretrained(folder).decode([5]) == "2"
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    torch.testing.assert_close(whole(IDS).logits, lm(IDS).logits, atol=1e-4, rtol=0)
    assert torch.equal(adapted(IDS).logits, lm(IDS).logits)
    return state(adapted.merge_and_unload())


def test_an_adapter_of_another_model_is_rejected(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(file_of({f"model.layers.9.mlp.up_proj{end}": torch.zeros(4, 4) for end in (DOWN, UP)}))
    with pytest.raises(JobError, match=r"the model's files have no model.layers.9.mlp.up_proj.weight"):
        list(Merger(spec_of(base)).full_matrices([str(file)]))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["query"], r"write target_modules: \[down_proj, .*v_proj\]"),
        (["lm_head"], "lm_head cannot have an adapter"),
        (["embed_tokens"], "model.embed_tokens cannot have an adapter"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_rejected(base: Path, targets: list[str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_trained(spec_of(base, target_modules=targets), seed=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "mixtral",
            r"layers.0.mlp.gate cannot have an adapter.* write target_modules: \[k_proj, o_proj, q_proj, v_proj\]",
        ),
        ("gpt2", r"attn.c_attn cannot have an adapter.* it has no linear layers: drop model.lora"),
    ],
)
def test_a_model_with_other_kinds_of_layers_gets_advice(kind: str, message: str, tmp_path: Path) -> None:
    tiny_lm(kind, num_local_experts=2).float().save_pretrained(tmp_path)
    with pytest.raises(JobError, match=message):
        load_trained(ModelSpec(path=tmp_path, lora=LoraSpec(rank=4)), seed=0)


def test_checking_a_job_knows_the_possible_target_modules(base: Path) -> None:
    check_adapters(spec_of(base))
    check_adapters(spec_of(base, target_modules="all-linear"))
    check_adapters(spec_of(base, target_modules=["layers.1.mlp.up_proj"]))
    with pytest.raises(JobError, match=r"no matrix 'query': choose from \[down_proj, .*v_proj\], or write all-linear"):
        check_adapters(spec_of(base, target_modules=["q_proj", "query"]))


def test_all_linear_is_every_matrix_of_the_blocks(base: Path) -> None:
    names = {name for name, _ in published(load_trained(spec_of(base, target_modules="all-linear"), seed=0))}
    assert len(names) == 2 * 2 * 7
    assert not any("lm_head" in name or "embed" in name for name in names)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"dropout": 0.1}, "another policy than the one sampled from: write 0"),
        ({"target_modules": []}, "write target_modules: all-linear"),
        ({"rank": 0}, "greater than or equal to 1"),
    ],
)
def test_senseless_settings_are_rejected(base: Path, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec_of(base, **lora)


def test_an_eval_job_rejects_adapters_with_advice(base: Path, tmp_path: Path) -> None:
    job = {
        "kind": "eval",
        "name": "e",
        "data": {"path": "p.jsonl"},
        "scorer": {"kind": "exact"},
        "model": {"path": str(base), "lora": {}},
    }
    with pytest.raises(ValidationError, match=r"remove model.lora and set model.path to a merged model"):
        JOB.validate_python(job)
    spec = spec_of(base)
    write_model(load_trained(spec, seed=0), state(load_trained(spec, seed=0)), spec, tmp_path / "out")
    with pytest.raises(JobError, match=r"is only an adapter: name a full model; the merged one is in .*out"):
        load_tokenizer(tmp_path / "out" / FOLDER)


def file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    return bytes(torch.cat(file_parts(tensors)).numpy())
