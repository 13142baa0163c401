"""Light modules import nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "redis", "fastapi", "matplotlib"}


@pytest.mark.parametrize(
    "module", ["volley", "volley.job", "volley.records", "volley.objectives", "services.cli", "services.jobs.job_file"]
)
def test_the_shared_vocabulary_and_the_command_line_are_light(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
