"""The reproductions: their jobs are valid, their programs correct, and they report what the runs wrote."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.reproductions import (
    adaptive,
    annealing,
    code_task,
    harder,
    lag,
    majority,
    programs,
    steady,
    trade_off,
    worth,
)
from benchmarks.reproductions.results import at_kl, heldout
from benchmarks.reproductions.runs import Options, Planned, make_missing
from benchmarks.reproductions.study import Study
from services.recording.display import Display
from services.store.folder import RunFolder
from volley.job import RLJob

MODULES = (trade_off, steady, annealing, harder, adaptive, worth, lag, majority, code_task)
STUDIES = [module.STUDY for module in MODULES]


def wanted(folder: Path) -> Options:
    return Options(folder=folder, out=folder / "out", seeds=2, steps=100, at_most=None)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_all_methods_of_a_study_have_the_same_start_which_is_evaluated_once(study: Study, tmp_path: Path) -> None:
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


def write_finished_run(
    run: Planned, evaluations: list[list[dict[str, float]]], metrics: list[dict[str, float]]
) -> None:
    """Write the files of a finished run."""
    folder = RunFolder.at(run.path, run.job)
    folder.append("evaluations", [{"estimates": each} for each in evaluations])
    folder.append("metrics", metrics)
    folder.write_summary({"state": "done"})


async def test_a_done_run_is_repeated_only_if_its_job_changed(tmp_path: Path) -> None:
    options = wanted(tmp_path)
    plan = trade_off.STUDY.plan(options)
    assert not any(run.done for run in plan)
    for run in plan:
        write_finished_run(run, [], [])
    assert await make_missing(plan, options, Display(quiet=True)) == 0  # no stack was started
    assert not (tmp_path / "stack").exists()
    longer = Options(**{name: getattr(options, name) for name in ("folder", "out", "seeds", "at_most")}, steps=101)
    assert [run.done for run in trade_off.STUDY.plan(longer)] == [True, *[False] * 8]


def estimate(mean: float) -> list[dict[str, float]]:
    return [{"k": 1, "mean": mean, "low": mean - 0.25, "high": mean + 0.5}]


def test_results_are_means_and_ranges_over_seeds(tmp_path: Path) -> None:
    runs = trade_off.runs(wanted(tmp_path))["mean"]
    for run, mean in zip(runs, (0.25, 0.5), strict=True):
        write_finished_run(run, [estimate(0.125), estimate(mean)], [])
    (last,) = heldout(runs)
    assert (last.k, last.seeds, last.mean, last.low, last.high) == (1, (0.25, 0.5), 0.375, 0.125, 0.875)
    assert heldout(runs[:1], at=0)[0].mean == 0.125


def test_a_metric_at_a_divergence_is_taken_when_it_is_first_reached(tmp_path: Path) -> None:
    (run, _) = trade_off.runs(wanted(tmp_path))["mean"]
    steps = np.linspace(0, 1, 400)
    write_finished_run(run, [], [{"kl_k1": float(x), "pass_at_1": float(x * x)} for x in steps])
    (reached,) = at_kl([run], "pass_at_1", np.array([0.25, 0.5, 2.0]))
    np.testing.assert_allclose(reached[:2], [0.0625, 0.25], atol=0.005)
    assert np.isnan(reached[2])


def test_programs_pass_their_tests_and_use_only_the_models_tokens() -> None:
    rows = list(programs.rows(random.Random(0), 200))
    for row in rows:
        names: dict[str, Any] = {}
        exec(row["answer"] + "\n" + row["tests"][0]["asserts"], names)  # noqa: S102 - made of templates
        assert set(re.findall(programs.WORD, row["prompt"] + row["answer"])) <= set(programs.WORDS)
        assert len(re.findall(programs.WORD, row["answer"])) < code_task.LONGEST
    assert len({row["answer"] for row in rows}) > 100
    json.dumps(rows)


def test_sums_are_correct_and_no_prompt_is_in_two_files() -> None:
    taken: set[str] = set()
    rows = [json.loads(line) for name in ("a", "b") for line in majority.lines(random.Random(name), 50, taken)]
    assert len({row["prompt"] for row in rows}) == len(taken) == 100
    for row in rows:
        terms = re.findall(r"[+-]?\d", row["prompt"])
        assert len(terms) == majority.NUMBERS
        assert sum(map(int, terms)) == int(row["answer"])


def test_shares_of_samples_with_a_gradient_count_the_replaced_groups() -> None:
    plain = {"live_group_fraction": 0.5, "live_sample_fraction": 0.25}
    assert worth.shown([plain, plain]) == ["16.0", "50.0%", "50.0%", "25.0%", "25.0%"]
    refilled = {"live_group_fraction": 1.0, "live_sample_fraction": 0.5, "replaced_groups": 16}
    assert worth.shown([refilled]) == ["32.0", "50.0%", "100.0%", "25.0%", "50.0%"]
    assert worth.shown([plain, refilled]) == ["24.0", "50.0%", "75.0%", "25.0%", "37.5%"]
