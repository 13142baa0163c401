"""The reproductions: their jobs are valid, their programs right, and what they report is what the runs left."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.reproductions import adaptive, annealing, code_task, harder, lag, majority, programs, steady, trade_off
from benchmarks.reproductions.results import at_kl, heldout
from benchmarks.reproductions.runs import Options, Planned, make_missing
from benchmarks.reproductions.study import Study
from services.display import Display
from services.run_folder import RunFolder
from volley.job import RLJob

STUDIES = [module.STUDY for module in (trade_off, steady, annealing, harder, adaptive, lag, majority, code_task)]


def wanted(folder: Path) -> Options:
    return Options(folder=folder, out=folder / "out", seeds=2, steps=100, at_most=None)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_study_starts_all_methods_alike_and_judges_the_start_once(study: Study, tmp_path: Path) -> None:
    warm_up, *runs = study.plan(wanted(tmp_path))
    jobs = [run.job for run in runs]
    assert len({run.path for run in runs}) == len(runs) == 2 * len(study.runs(wanted(tmp_path)))
    assert {job.model.path for job in jobs} == {warm_up.path / "model"}
    assert all(isinstance(job, RLJob) and job.evaluation is not None for job in jobs)
    assert [job.evaluation.at_start for job in jobs if isinstance(job, RLJob) and job.evaluation] == [
        True,
        *[False] * (len(jobs) - 1),
    ]
    assert len({(job.steps, job.prompts_per_step, job.sampling.n) for job in jobs if isinstance(job, RLJob)}) == 1


def test_studies_share_runs(tmp_path: Path) -> None:
    made, again = (study.plan(wanted(tmp_path)) for study in (steady.STUDY, annealing.STUDY))
    shared = [run for run in again if run in made]
    assert [run.path.name for run in shared] == [
        "warm-up",
        *(f"steady-{name}" for name in ("mean-1", "max-8-1", "mean-2", "max-8-2")),
    ]


def leave(run: Planned, evaluations: list[list[dict[str, float]]], metrics: list[dict[str, float]]) -> None:
    """What a finished run leaves."""
    folder = RunFolder.at(run.path, run.job)
    folder.append("evaluations", [{"estimates": each} for each in evaluations])
    folder.append("metrics", metrics)
    folder.write_summary({"state": "done"})


async def test_a_run_that_is_done_is_not_made_again_unless_its_job_changed(tmp_path: Path) -> None:
    options = wanted(tmp_path)
    plan = trade_off.STUDY.plan(options)
    assert not any(run.done for run in plan)
    for run in plan:
        leave(run, [], [])
    assert await make_missing(plan, options, Display(quiet=True)) == 0  # and no stack was started
    assert not (tmp_path / "stack").exists()
    longer = Options(**{name: getattr(options, name) for name in ("folder", "out", "seeds", "at_most")}, steps=101)
    assert [run.done for run in trade_off.STUDY.plan(longer)] == [True, *[False] * 8]


def estimate(mean: float) -> list[dict[str, float]]:
    return [{"k": 1, "mean": mean, "low": mean - 0.25, "high": mean + 0.5}]


def test_results_are_means_over_seeds_with_their_spread(tmp_path: Path) -> None:
    runs = trade_off.runs(wanted(tmp_path))["mean"]
    for run, mean in zip(runs, (0.25, 0.5), strict=True):
        leave(run, [estimate(0.125), estimate(mean)], [])
    (last,) = heldout(runs)
    assert (last.k, last.seeds, last.mean, last.low, last.high) == (1, (0.25, 0.5), 0.375, 0.125, 0.875)
    assert heldout(runs[:1], at=0)[0].mean == 0.125


def test_a_metric_at_a_divergence_is_that_of_the_first_time_it_is_reached(tmp_path: Path) -> None:
    (run, _) = trade_off.runs(wanted(tmp_path))["mean"]
    steps = np.linspace(0, 1, 400)
    leave(run, [], [{"kl_k1": float(x), "pass_at_1": float(x * x)} for x in steps])
    (reached,) = at_kl([run], "pass_at_1", np.array([0.25, 0.5, 2.0]))
    np.testing.assert_allclose(reached[:2], [0.0625, 0.25], atol=0.005)
    assert np.isnan(reached[2])


def test_programs_pass_their_tests_and_are_made_of_the_models_words() -> None:
    rows = list(programs.rows(random.Random(0), 200))
    for row in rows:
        names: dict[str, Any] = {}
        exec(row["answer"] + "\n" + row["tests"][0]["asserts"], names)  # noqa: S102 - made of templates
        assert set(re.findall(programs.WORD, row["prompt"] + row["answer"])) <= set(programs.WORDS)
        assert len(re.findall(programs.WORD, row["answer"])) < code_task.LONGEST
    assert len({row["answer"] for row in rows}) > 100
    json.dumps(rows)


def test_sums_are_right_and_no_prompt_is_in_two_files() -> None:
    taken: set[str] = set()
    rows = [json.loads(line) for name in ("a", "b") for line in majority.lines(random.Random(name), 50, taken)]
    assert len({row["prompt"] for row in rows}) == len(taken) == 100
    for row in rows:
        terms = re.findall(r"[+-]?\d", row["prompt"])
        assert len(terms) == majority.NUMBERS
        assert sum(map(int, terms)) == int(row["answer"])
