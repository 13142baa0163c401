"""An actor's process and its children write to the actor's log only."""

import subprocess
import sys
from pathlib import Path

from actors.environment import engine_environment
from volley.job import ActorsSpec

SCRIPT = """
import subprocess, sys
from pathlib import Path
from actors.environment import enter
from volley.job import ActorsSpec
print("before")
enter(ActorsSpec(threads=3), Path(sys.argv[1]), Path(sys.argv[2]))
print("from the actor", flush=True)
child = "import os, sys, tempfile; print(os.environ['OMP_NUM_THREADS'], tempfile.gettempdir(), file=sys.stderr)"
subprocess.run([sys.executable, "-c", child])
"""


def test_output_of_the_process_and_its_children_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "actor-0.log"
    arguments = [str(log), str(tmp_path / "scratch")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\n", "")
    assert log.read_text() == f"from the actor\n3 {tmp_path / 'scratch'}\n"


def test_cpu_engines_are_not_pinned_and_gpu_engines_draw_without_flashinfer() -> None:
    assert engine_environment(ActorsSpec())["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert not [name for name in engine_environment(ActorsSpec(gpus=1)) if name.startswith("VLLM_CPU")]
    assert engine_environment(ActorsSpec(gpus=0.5))["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
