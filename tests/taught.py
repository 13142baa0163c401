"""A tiny model that has learned a few conversations by heart, so that a real engine makes tool calls."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama

STEPS, KNOWN = 300, 0.003  # at this loss per token, a sampled reply is nearly always the one that was learned


def taught(folder: Path, conversations: Sequence[Sequence[dict[str, Any]]], tools: Sequence[Any]) -> Path:
    """Write a model to ``folder`` that makes the replies of the conversations, given what comes before them.

    Args:
        tools: as OpenAI's API describes them.
    """
    tokenizer = chat_tokenizer()
    tiny_llama(folder, tokenizer=tokenizer, initializer_range=0.05, max_position_embeddings=1024)
    rows = [_row(tokenizer, list(messages), list(tools)) for messages in conversations]
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(STEPS):
        loss = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(loss.detach()) < KNOWN:
            break
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    return folder


def _row(tokenizer: Any, messages: list[Any], tools: list[Any]) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and the labels: those of the replies, up to the token that ends each."""
    ids = _ids(tokenizer, messages, tools)
    labels = [-100] * len(ids)
    for start, end in _replies(tokenizer, messages, tools):
        labels[start:end] = ids[start:end]
    return ids, labels


def _replies(tokenizer: Any, messages: list[Any], tools: list[Any]) -> Iterator[tuple[int, int]]:
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_ids(tokenizer, messages[:number], tools, add_generation_prompt=True))
            until = _ids(tokenizer, messages[: number + 1], tools)
            yield start, len(until) - until[::-1].index(tokenizer.eos_token_id)


def _ids(tokenizer: Any, messages: list[Any], tools: list[Any], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
