"""The workloads that both sides run: model, prompts, reward.

short    samples of at most 16 tokens, nearly all of that length; the reward costs nothing
long     lengths with a long tail, median about 40 tokens, at most 256; the reward costs nothing
code     each sample is a small Python program, judged by what it prints
judge    like short, but the reward comes from a server that takes a second per request
sums     a pretrained model adds and subtracts two numbers, as in examples/smollm2; the reward costs nothing

The other models are untrained, because only speed is measured. Their vocabulary determines the length of samples (the
end of text is as likely as any other token) and, for ``code``, makes nearly every sample a program that runs.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234"
LINES = tuple(f"{line}\n" for line in ("print(1)", "print(2)", "x = 1", "x = 2", "pass", "1 + 1", "y = 3", "y = 4"))
SAMPLES = 16  # per prompt
JUDGE_SECONDS = 1.0
ROWS = 64
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        tokens: of the untrained model; () for a pretrained one.
        reward: ``free``, ``code`` or ``judge``.
        prompts: per step.
    """

    name: str
    tokens: tuple[str, ...]
    max_tokens: int
    steps: int
    reward: str
    prompts: int = 8


WORKLOADS = {
    each.name: each
    for each in (
        Workload("short", tuple(CHARACTERS), 16, 24, "free"),
        Workload("long", tuple(CHARACTERS), 256, 6, "free"),
        Workload("code", LINES, 12, 10, "code"),
        Workload("judge", tuple(CHARACTERS), 16, 12, "judge"),
        Workload("sums", (), 24, 9, "free", prompts=4),
    )
}


def share_of_even(sample: str) -> float:
    """The reward that costs nothing: the share of characters with even codes."""
    return sum(ord(character) % 2 == 0 for character in sample) / max(1, len(sample))


def write_inputs(
    workload: Workload, folder: Path, *, model: Path | None = None, layers: int = 4, width: int = 256
) -> None:
    """Write the model and its prompts to ``folder``, unless they exist.

    Args:
        model: of a workload with a pretrained one, its folder. Other models are untrained, with 3M parameters unless
            ``layers`` and ``width`` say otherwise.
    """
    if (folder / "prompts.jsonl").exists():
        return
    if model is None:
        write_model(workload, folder / "model", layers, width)
        texts = [
            "".join(workload.tokens[(row * 7 + i) % len(workload.tokens)] for i in range(6)) for row in range(ROWS)
        ]
    else:
        (folder / "model").symlink_to(model.resolve())
        texts = sums(model)
    rows = [{"prompt": text, "tests": [{"stdin": "", "expected": "1"}]} for text in texts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(model: Path) -> list[str]:
    """Questions for sums of two numbers, in the chat template of ``model``."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = [row["question"] for row in reasoning_gym.create_dataset("chain_sum", size=ROWS, seed=0, **SUMS)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in questions
    ]


def write_model(workload: Workload, folder: Path, layers: int, width: int) -> None:
    """Write an untrained model whose tokenizer has one token per line, and ``workload``'s."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = [*SPECIAL.values(), *workload.tokens]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=SPECIAL["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]*\n|."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def judge() -> Iterator[str]:
    """A reward server that takes a second per request; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(JUDGE_SECONDS)
            body = json.dumps({"rewards": [share_of_even(sample) for sample in request["samples"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.shutdown()
