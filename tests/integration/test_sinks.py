"""A real run with a sink: TensorBoard shows what `metrics.jsonl` contains."""

from pathlib import Path
from typing import Any

import pytest

from services.recording.display import Display
from services.runs.run import prepare, run_alone
from services.store.folder import RunFolder
from tests.integration.jobs import write_inputs
from volley.job import JOB

pytestmark = pytest.mark.integration


async def test_tensorboard_shows_the_metrics_of_the_run_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_inputs(tmp_path)
    tree: dict[str, Any] = {
        "kind": "sft",
        "name": "shown",
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "steps": 3,
        "rows_per_step": 4,
        "sinks": [{"kind": "tensorboard"}],
    }
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "7 7=", "answer": "7"}\n' * 4)
    job = JOB.validate_python(tree)
    folder = RunFolder.create(tmp_path, job)
    await run_alone(prepare(job), folder, Display(quiet=True))
    events = EventAccumulator(str(folder.path / "tensorboard" / "train"))
    events.Reload()
    rows = folder.read("metrics")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for name in ("loss", "learning_rate", "seconds_step"):
        shown = [(each.step, each.value) for each in events.Scalars(name)]
        assert shown == [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows]
    assert not any(row["kind"] == "trouble" for row in folder.read("events"))
