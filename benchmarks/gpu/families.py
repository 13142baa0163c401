"""Whether an engine on this device serves what the learner trained, for a dense model and a mixture of experts."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.setting import Row, Setting
from benchmarks.local_ray import local_ray
from benchmarks.model_families import STORE_BYTES, tried

FAMILIES = ("Qwen3-MoE", "Llama")


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    with local_ray(cpus=2, store_bytes=STORE_BYTES):
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                done = asyncio.run(tried(family, Path(folder), gpus=0.4 if setting.cuda else 0))
            moved = f"two steps, which moved them by {done.moved:.2g} nats on average"
            figure = f"{done.before:.1e} before, {done.after:.1e} after {moved}"
            yield Row("families", f"{family}: log-probs of engine and learner apart by at most", done.problem or figure)
