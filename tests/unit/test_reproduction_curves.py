"""The reproductions: their jobs are valid, their programs correct, and they report what the runs wrote."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.reproductions import (
    adaptive,
    annealing,
    clipping,
    code_task,
    harder,
    lag,
    majority,
    maze,
    maze_rates,
    mazes,
    products,
    programs,
    steady,
    tool_use,
    trade_off,
    worth,
)
from benchmarks.reproductions.results import PassAtK, at_kl, filled, heldout
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.data.chat import check_template
from services.recording.display import Display
from services.store.folder import RunFolder
from services.sweeps.conduct import SweepStop
from volley.errors import JobError
from volley.job import RLJob

MODULES = (
    trade_off,
    steady,
    annealing,
    harder,
    adaptive,
    worth,
    lag,
    majority,
    code_task,
    clipping,
    tool_use,
    maze,
    maze_rates,
)
STUDIES = [module.STUDY for module in MODULES]


def wanted(folder: Path, steps: int = 100) -> Options:
    return Options(folder=folder, out=folder / "out", seeds=2, steps=steps)


def runs_of(study: Study, folder: Path) -> list[Planned]:
    """The runs of a study in the order in which they are made."""
    return [run for of_seed in zip(*study.runs(wanted(folder)).values(), strict=True) for run in of_seed]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_all_methods_of_a_study_have_the_same_start_which_is_evaluated_once(study: Study, tmp_path: Path) -> None:
    warm_up, runs = study.warm_up(wanted(tmp_path)), runs_of(study, tmp_path)
    jobs = [run.job for run in runs]
    assert jobs == [member.job for member in study.sweep(wanted(tmp_path)).members]
    assert len({run.path for run in runs}) == len(runs) == 2 * len(study.runs(wanted(tmp_path)))
    assert {job.model.path for job in jobs} == {warm_up.path / "model"}
    assert all(isinstance(job, RLJob) and job.evaluation is not None for job in jobs)
    assert [job.evaluation.at_start for job in jobs if isinstance(job, RLJob) and job.evaluation] == [
        True,
        *[False] * (len(jobs) - 1),
    ]
    assert len({(job.steps, job.prompts_per_step, job.sampling.n) for job in jobs if isinstance(job, RLJob)}) == 1


def test_studies_share_runs(tmp_path: Path) -> None:
    made, again = (runs_of(study, tmp_path) for study in (steady.STUDY, annealing.STUDY))
    assert [run.path.name for run in again if run in made] == ["mean-s1", "max-8-s1", "mean-s2", "max-8-s2"]


def write_finished_run(
    run: Planned, evaluations: list[list[dict[str, float]]], metrics: list[dict[str, float]]
) -> None:
    """Write the files of a finished run."""
    folder = RunFolder.at(run.path, run.job)
    folder.append("evaluations", [{"estimates": each} for each in evaluations])
    folder.append("metrics", metrics)
    folder.write_summary({"state": "done"})


async def test_a_study_that_is_done_makes_no_runs_and_one_that_changed_says_so(tmp_path: Path) -> None:
    study, options, quiet = trade_off.STUDY, wanted(tmp_path), Display(quiet=True)
    plan = [study.warm_up(options), *runs_of(study, tmp_path)]
    assert not any(run.done for run in plan)
    for run in plan:
        write_finished_run(run, [], [])
    assert await study.make_missing(options, quiet, SweepStop()) == 0  # no stack was started
    assert not list(tmp_path.rglob("stack"))
    with pytest.raises(JobError, match="steps was 100, is 101"):
        await study.make_missing(wanted(tmp_path, steps=101), quiet, SweepStop())


def estimate(mean: float) -> list[dict[str, float]]:
    return [{"k": 1, "mean": mean, "low": mean - 0.25, "high": mean + 0.5}]


def test_results_are_means_and_ranges_over_seeds(tmp_path: Path) -> None:
    runs = trade_off.STUDY.runs(wanted(tmp_path))["mean"]
    for run, mean in zip(runs, (0.25, 0.5), strict=True):
        write_finished_run(run, [estimate(0.125), estimate(mean)], [])
    (last,) = heldout(runs)
    assert (last.k, last.seeds, last.mean, last.low, last.high) == (1, (0.25, 0.5), 0.375, 0.125, 0.875)
    assert heldout(runs[:1], at=0)[0].mean == 0.125


def test_a_metric_at_a_divergence_is_taken_when_it_is_first_reached(tmp_path: Path) -> None:
    (run, _) = trade_off.STUDY.runs(wanted(tmp_path))["mean"]
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
        assert len(re.findall(programs.WORD, row["answer"])) < 34
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


def test_products_are_correct_in_the_models_tokens_and_in_one_file_only(tmp_path: Path) -> None:
    products.make(tmp_path, supervised=200, train=50, heldout=50)
    asked: dict[str, set[str]] = {}
    for name in ("sft", "train", "heldout"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        asked[name] = {re.findall(r"\d+\*\d+=", row["prompt"])[0] for row in rows}
        for row in rows:
            words = set(re.findall(products.WORD, row["prompt"].replace("</s>", "") + row["answer"]))
            assert words <= set(products.WORDS)
    assert [len(each) for each in asked.values()] == [200, 50, 50]
    assert len(set.union(*asked.values())) == 300
    a, b = map(int, rows[0]["prompt"].removesuffix("=").split("*"))
    assert rows[0]["answer"] == str(products.multiply(a, b))


def test_the_products_of_the_warm_up_are_written_as_the_template_writes_them(tmp_path: Path) -> None:
    products.make_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_template(tokenizer, "rollout kind: tools")
    asked, answered = next(rows for rows in map(conversation, range(9)) if len(rows) == 2)
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 417, "b": 863}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "417*863="}]

    def rendered() -> str:
        tools = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
        options = {"tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(messages, tools=tools, **options))

    assert rendered() == asked["prompt"]
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "359871"}]
    assert rendered() == answered["prompt"]
    assert len(tokenizer(asked["answer"]).input_ids) + len(answered["answer"]) + 2 == 21


def test_a_maze_is_a_tree_and_its_answer_the_only_path() -> None:
    rng = random.Random(0)
    for side in (2, 3, 4):
        maze = mazes.grow(rng, side)
        doors = [(room, mazes.step(room, move)) for room, moves in maze.items() for move in moves]
        assert all(other in maze and (other, room) in doors for room, other in doors)
        assert len(doors) == 2 * (side * side - 1)  # with every room reached, as below, a tree
        for start in maze:
            for goal in maze:
                walked = [start, *mazes.path(maze, start, goal)]
                assert {*pairwise(walked)} <= {*doors}
                assert walked[-1] == goal
                assert len(set(walked)) == len(walked)
    lower = {(0, 0): {"D", "R"}, (0, 1): {"L", "D"}, (1, 0): {"U"}, (1, 1): {"U"}}
    assert mazes.text(lower, (1, 0), (1, 1)) == ("A6BcC1D1CD:", "ABD")


def test_mazes_are_in_the_models_tokens_and_in_one_file_only(tmp_path: Path) -> None:
    mazes.make(tmp_path, supervised=80, train=20, heldout=10)
    files = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("sft", "train", "heldout")]
    assert [len(lines) for lines in files] == [80, 20, 10]
    every = [json.loads(line) for lines in files for line in lines]
    assert len({row["prompt"] for row in every}) == 110
    assert {*"".join(row["prompt"] + row["answer"] for row in every)} <= {*mazes.CHARACTERS}
    assert min(len(row["answer"]) for row in every) >= mazes.SHORTEST


def test_gaps_to_the_best_are_paired_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "steady": [PassAtK(1, (0.25, 0.5, 0.75), 0, 1), PassAtK(8, (0.5, 0.5, 0.5), 0, 1)],
        "wide": [PassAtK(1, (0.20, 0.45, 0.70), 0, 1), PassAtK(8, (0.75, 0.5, 0.625), 0, 1)],
    }
    maze.print_gaps(rows)
    steady_row, wide_row = capsys.readouterr().out.splitlines()[2:4]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (steady_row, wide_row)]
    assert cells[0] == ["steady", "0.0 ± 0.0", "12.5 ± 31.1", "12.5"]
    assert cells[1] == ["wide", "5.0 ± 0.0", "0.0 ± 0.0", "5.0"]


def conversation(seed: int) -> list[dict[str, str]]:
    return products.conversation(random.Random(seed), 417, 863)


def test_shares_of_samples_with_a_gradient_count_the_replaced_groups() -> None:
    plain = {"live_group_fraction": 0.5, "live_sample_fraction": 0.25}
    assert worth.shown([plain, plain]) == ["16.0", "50.0%", "50.0%", "25.0%", "25.0%"]
    refilled = {"live_group_fraction": 1.0, "live_sample_fraction": 0.5, "replaced_groups": 16}
    assert worth.shown([refilled]) == ["32.0", "50.0%", "100.0%", "25.0%", "50.0%"]
    assert worth.shown([plain, refilled]) == ["24.0", "50.0%", "75.0%", "25.0%", "37.5%"]


def test_steps_without_a_metric_have_that_of_their_neighbours() -> None:
    rows = [{}, {"calls_mean": 1.0}, {}, {"other": 9.0}, {"calls_mean": 2.5}, {}]
    assert filled(rows, "calls_mean") == [1.0, 1.0, 1.5, 2.0, 2.5, 2.5]
