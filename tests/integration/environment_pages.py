"""The jobs of docs/environments.md, made small, in the environments that its commands make."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama
from tests.pages import ROOT, Block, blocks

VOLLEY = str(Path(sys.executable).parent / "volley")


def section(name: str) -> list[Block]:
    """The three blocks of a page's section: an environment, a job, commands."""
    found = list(blocks(ROOT / "docs" / "environments.md"))
    start = next(at for at, each in enumerate(found) if each.language == "yaml" and f"kind: {name}" in each.text)
    return found[start - 1 : start + 2]


def volley(folder: Path, command: str) -> str:
    """Run a command of the page; returns what it printed."""
    words = [VOLLEY, *command.partition("#")[0].replace('"', "").split()[1:]]
    home = {"VOLLEY_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **home}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_small(folder: Path, name: str, rows: int) -> None:
    """Write the section's job with a tiny model and two steps, its environment, and its data, by its commands."""
    tiny_llama(folder / "model", tokenizer=chat_tokenizer())
    environment, job, commands = section(name)
    tree: dict[str, Any] = yaml.safe_load(job.text)
    (folder / f"{tree['name']}.py").write_text(environment.text)
    create, data, *_ = commands.text.splitlines()
    volley(folder, create)
    tree["rollout"]["python"] = tree["rollout"]["python"].replace("~/.volley", str(folder / "home"))
    tree |= {"model": {"path": str(folder / "model")}, "data": {"path": str(folder / tree["data"]["path"])}}
    tree |= {"steps": 2, "prompts_per_step": 2, "max_lag": 0}
    tree["sampling"] = {"n": 16, "max_tokens": 200}  # so many samples that some of a random model's end
    tree |= {"actors": {"max_num_seqs": 32, "kv_cache_gb": 0.1}, "samples_kept": 100}
    tree["environment_workers"] = {"episodes": 16, "start_deadline_s": 300}
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    volley(folder, f"{data.partition('#')[0].partition('--count')[0]} --count {rows}")
