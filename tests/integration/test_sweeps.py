"""A sweep on the real stack: interrupted in the middle of a run, continued, with a setting that cannot run."""

import asyncio
from pathlib import Path

import pytest
import yaml

from services.recording.display import Display
from services.stack.ephemeral import Stack
from services.store.folder import RunFolder
from services.sweeps.conduct import SweepStop, conduct
from services.sweeps.local import LocalRunner
from services.sweeps.report import draw, tables
from services.sweeps.results import gather
from services.sweeps.spec import Sweep, load_sweep
from tests.integration.jobs import rl_job, write_inputs

pytestmark = pytest.mark.integration
STEPS = 6


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    write_inputs(tmp_path)
    sampling = {"n": 4, "max_tokens": 4}
    job = rl_job(tmp_path, steps=STEPS, prompts_per_step=2, sampling=sampling, samples_kept=0)
    job["objective"]["k"] = 2
    job["evaluation"] |= {"sampling": sampling, "ks": [1, 4]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    settings = [{"name": f"k={k}", "set": {"objective.k": k}} for k in (2, 4)]
    settings.append({"name": "broken", "set": {"data.path": "missing.jsonl"}})
    tree = {"base": "job.yaml", "list": settings, "seeds": [0, 1], "at_once": 2, "keep_checkpoints": False}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    return load_sweep(tmp_path / "sweep.yaml")


async def test_a_sweep_goes_on_after_an_interruption_and_past_a_run_that_fails(
    stack: Stack, sweep: Sweep, tmp_path: Path
) -> None:
    folder, display = tmp_path / "runs", Display(quiet=True)
    runner = LocalRunner(folder, tmp_path, at_once=2, stack=stack)
    runner.keep_checkpoints = sweep.spec.keep_checkpoints
    stop, first = SweepStop(), RunFolder(folder / "k-2-s0")

    async def interrupt() -> None:
        while not first.read("metrics"):  # noqa: ASYNC110 - another task writes the file
            await asyncio.sleep(0.01)
        stop.handle(lambda: None)

    interrupting = asyncio.create_task(interrupt())
    with pytest.raises(asyncio.CancelledError):
        await conduct(sweep, runner, display, stop)
    await interrupting
    assert first.state == "stopped"
    assert 1 <= len(first.read("metrics")) < STEPS

    found = await conduct(sweep, runner, display, SweepStop())
    assert {name: run.state for name, run in found.items()} == {
        **{f"k-{k}-s{seed}": "done" for k in (2, 4) for seed in (0, 1)},
        **{f"broken-s{seed}": "failed" for seed in (0, 1)},
    }
    assert "missing.jsonl" in found["broken-s0"].problem
    for run in (RunFolder(folder / f"k-{k}-s{seed}") for k in (2, 4) for seed in (0, 1)):
        assert [row["step"] for row in run.read("metrics")] == list(range(STEPS))
        assert run.model.is_dir()
        assert not run.checkpoints.exists()
    results = await gather(sweep, found, runner)
    assert [(group.name, group.seeds) for group in results.groups] == [("k=2", (0, 1)), ("k=4", (0, 1))]
    assert [list(group.held_out()) for group in results.groups] == [[1, 4], [1, 4]]
    assert sorted(results.start) == [1, 4]
    (table,) = tables(results, sweep.spec.report, 80)
    assert [row.cells[0] for row in table.rows] == ["start", "k=2", "k=4"]
    assert all(file.stat().st_size > 5000 for file in draw(sweep, results, folder / "figure"))
