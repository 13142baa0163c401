"""The learner's numerical modules import without Ray."""

import subprocess
import sys
from pathlib import Path

import learner

RAY_SHELL = {"rank", "rank_actors", "pool"}
BLOCK_RAY = """
import importlib, sys
sys.modules["ray"] = None  # makes every import of it an ImportError
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.startswith("learner.")))
"""


def test_only_the_ray_actors_of_the_learner_need_ray() -> None:
    folder = Path(learner.__file__).parent
    modules = sorted(
        f"learner.{file.stem}" for file in folder.glob("*.py") if file.stem not in {"__init__", *RAY_SHELL}
    )
    assert len(modules) > 15
    done = subprocess.run([sys.executable, "-c", BLOCK_RAY, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == modules  # DeepSpeed may print before


def test_the_actor_of_a_rank_imports_no_torch_before_it_opens() -> None:
    code = "import sys, learner.rank; print(*sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
