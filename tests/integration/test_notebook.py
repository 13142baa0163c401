"""examples/notebook.ipynb does what it says, on a local stack of its own.

Its cells are plain Python, so the test runs them as a kernel would, one after the other in one namespace, without
installing Jupyter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SECONDS = 600  # on a busy machine
KERNEL = """
import json, sys
cells = json.loads(sys.stdin.read())
for number, source in enumerate(cells):
    exec(compile(source, f"cell {number}", "exec"), globals())
figures = [len(plt.figure(number).axes) for number in plt.get_fignums()]
print(json.dumps({
    "ks": evaluations.ks,
    "versions": evaluations.versions.tolist(),
    "mean": evaluations.mean.tolist(),
    "steps": metrics.steps.tolist(),
    "figures": figures,
}))
"""


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_notebook_trains_a_model_and_plots_pass_at_k(tmp_path: Path) -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("VOLLEY", "RAY"))}
    environment = {**told, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning:__main__", "-c", KERNEL],
            input=json.dumps(cells("code")),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        volley = Path(sys.executable).with_name("volley")
        stack = tmp_path / "notebook-files" / "stack"
        subprocess.run([volley, "down", "--dir", stack], env=environment, capture_output=True, timeout=120, check=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    assert (found["ks"], found["versions"]) == ([1, 2, 4, 8, 16], [0, 20, 40])
    before, after = found["mean"][0], found["mean"][-1]
    assert before == sorted(before)
    assert after == sorted(after)
    assert after[0] > 2 * before[0], "the model has learnt the task, at one try as at four"
    assert after[2] > 2 * before[2]
    assert found["steps"] == list(range(40))
    assert found["figures"] == [1, 3]
    assert len([line for line in lines if line.startswith("step ")]) == 4


def test_the_links_of_the_notebook_resolve() -> None:
    import re

    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(cells("markdown")))
    assert len(links) > 3
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
