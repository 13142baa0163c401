"""The weight group's calls on this device, with one member, because NCCL takes one per device."""

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.setting import Row, Setting
from learner.engine import open_store
from volley.weight_group import WeightGroup, WeightGroupTerms
from volley.weight_links import SENDER


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    if setting.cuda and importlib.util.find_spec("vllm") is None:
        yield Row("weight group", "not run", "vLLM is not installed, through which NCCL is called")
        return
    setting.join()
    store = open_store("127.0.0.1", 0, 1)
    terms = WeightGroupTerms("127.0.0.1", store.port, "benchmark", (), cuda=setting.cuda, digests=False, deadline_s=60)
    begun = time.perf_counter()
    group = WeightGroup(terms, SENDER)
    connected = time.perf_counter() - begun
    file = torch.zeros((1 << 16) if setting.small else (64 << 20), dtype=torch.uint8, device=setting.device)
    group.announce(1)
    begun = time.perf_counter()
    for _ in range(16):
        group.send(file)
    group.send_end()
    setting.settle()
    sent = time.perf_counter() - begun
    names, problem = group.received(1, None)
    begun = time.perf_counter()
    group.close()
    closed = time.perf_counter() - begun
    if names or problem:
        raise RuntimeError(f"a group without receivers confirmed {sorted(names)}: {problem}")
    again = WeightGroup(replace(terms, name="next"), SENDER)
    again.close()
    yield Row(
        "weight group",
        f"{'NCCL' if setting.cuda else 'gloo'}, one member: connect, 16 buckets, confirm, end, connect anew",
        f"connected in {connected:.2f} s, sent in {sent:.3f} s, ended in {closed:.3f} s",
    )
